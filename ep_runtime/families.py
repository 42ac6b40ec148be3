"""The supported Hugging Face families: how each spells its configuration and names its tensors.

Everything is declared: a family is data, and neither a name nor a layout is guessed from shapes.
What each family computes was read off transformers' modelling code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ep_runtime.hf_config import HFConfig, with_family_defaults
from ep_runtime.kernels.errors import ConfigError


def _every_layer(config: HFConfig) -> tuple[int, ...]:
    return tuple(range(_num_layers(config)))


def _after_first_dense(config: HFConfig) -> tuple[int, ...]:
    key, num_layers = "first_k_dense_replace", _num_layers(config)
    num_dense = _whole_number(key, config[key], least=0)
    if num_dense > num_layers:
        raise ConfigError(f"{key} ({num_dense}) must be at most num_hidden_layers ({num_layers})")
    return tuple(range(num_dense, num_layers))


def _sparse_step(config: HFConfig) -> tuple[int, ...]:
    """Layers whose number (from 1) is a multiple of decoder_sparse_step, less mlp_only_layers."""
    key, dense = "decoder_sparse_step", config.get("mlp_only_layers", ())
    step = _whole_number(key, config.get(key, 1), least=1)
    if not isinstance(dense, list | tuple):
        raise ConfigError(f"mlp_only_layers ({dense!r}) must be a list of layer numbers")
    dense = [_whole_number("mlp_only_layers", layer, least=0) for layer in dense]
    layers = range(_num_layers(config))
    return tuple(i for i in layers if (i + 1) % step == 0 and i not in dense)


def _num_layers(config: HFConfig) -> int:
    return _whole_number("num_hidden_layers", config["num_hidden_layers"], least=1)


def _whole_number(key: str, value: Any, *, least: int) -> int:
    """The value of a configuration's key; another type or a lower number is a ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{key} ({value!r}) must be {least} or more, a whole number")
    return value


@dataclass(frozen=True)
class FusedLayout:
    """How a fused tensor of all experts lies on disk.

    transposed: gate_up [E, H, 2I] and down [E, I, H]; else gate_up [E, 2I, H] and down [E, H, I].
    interleaved: gate and up rows alternate (gate first); else all of gate, then all of up.
    has_bias: gate_up_proj_bias [E, 2I] (interleaved alike) and down_proj_bias [E, H] go with it.
    """

    transposed: bool = False
    interleaved: bool = False
    has_bias: bool = False


# Fused tensors under `<block>.experts.`; the per-expert ones are under `<block>.experts.<e>.`.
FUSED_PARTS = {
    "gate_up_proj": "w13",
    "down_proj": "w2",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_bias": "w2_bias",
}
EXPERT_PARTS = {
    "w1": "gate",
    "gate_proj": "gate",
    "w3": "up",
    "up_proj": "up",
    "w2": "down",
    "down_proj": "down",
}
MOE_BLOCKS = ("mlp", "block_sparse_moe")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    keys: MoEConfig field -> the family's configuration key.
    fixed: MoEConfig field -> what the family's modelling code always does.
    required: configuration key -> values it may have; others mean a model we would get wrong.
    moe_layers: the layers that hold an MoE block; ConfigError for keys that no model can have.
    layers: path of the decoder layers in transformers' model, and prefix of their names on disk.
    block: attribute of a decoder layer that holds the MoE block.
    disk_block, disk_experts: the spelling that save_pretrained writes; all of MOE_BLOCKS and
    EXPERT_PARTS are read. disk_experts is (gate, up, down), or None: fused on disk.
    fused: layout of the fused tensors.
    router, correction_bias, router_bias, shared, shared_gate: names under the block; None: none.
    returns_router_scores: the block returns (hidden_states, router_scores).
    mtp_marker: hub files carry multi-token-prediction layers from num_hidden_layers on, which are
    not loaded; each is known by this linear layer. None: has none.
    grouped_by: (key, value) that must hold for the expert groups to count; None: they always do.
    ignored_keys: key -> the one value that is honoured; another is ignored, with a warning.
    """

    model_type: str
    keys: Mapping[str, str]
    moe_layers: Callable[[HFConfig], tuple[int, ...]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    layers: str = "model.layers"
    block: str = "mlp"
    disk_block: str = "mlp"
    disk_experts: tuple[str, str, str] | None = PROJECTIONS
    fused: FusedLayout = FusedLayout()
    router: str = "gate.weight"
    correction_bias: str | None = None
    router_bias: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    returns_router_scores: bool = False
    mtp_marker: str | None = None
    grouped_by: tuple[str, str] | None = None
    ignored_keys: Mapping[str, Any] = field(default_factory=dict)


_COMMON = {"hidden_size": "hidden_size", "top_k": "num_experts_per_tok"}
_QWEN = {
    **_COMMON,
    "num_experts": "num_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
_DEEPSEEK = {
    **_COMMON,
    "num_experts": "n_routed_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
    "routed_scaling_factor": "routed_scaling_factor",
    "n_group": "n_group",
    "topk_group": "topk_group",
}
_SIGMOID_GROUPS = {
    "scoring": "sigmoid",
    "group_score": "top2_sum",
    "has_correction_bias": True,
}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "mixtral",
            keys={
                **_COMMON,
                "num_experts": "num_local_experts",
                "moe_intermediate_size": "intermediate_size",
            },
            fixed={"norm_topk_prob": True},
            moe_layers=_every_layer,
            disk_block="block_sparse_moe",
            disk_experts=("w1", "w3", "w2"),
        ),
        Family(
            "qwen2_moe",
            keys={**_QWEN, "shared_intermediate_size": "shared_expert_intermediate_size"},
            fixed={"num_shared_experts": 1, "shared_expert_gate": True},
            moe_layers=_sparse_step,
            shared="shared_expert",
            shared_gate="shared_expert_gate.weight",
        ),
        Family("qwen3_moe", keys=_QWEN, moe_layers=_sparse_step),
        Family(
            "olmoe",
            keys={**_QWEN, "moe_intermediate_size": "intermediate_size"},
            moe_layers=_every_layer,
        ),
        Family(
            "deepseek_v2",
            keys=_DEEPSEEK,
            # transformers scales the weights and never normalises them, whatever norm_topk_prob is.
            fixed={"norm_topk_prob": False, "group_score": "max"},
            ignored_keys={"norm_topk_prob": False},
            required={
                "topk_method": ("greedy", "group_limited_greedy"),
                "scoring_func": ("softmax",),
                "moe_layer_freq": (1,),
                "mlp_bias": (False,),
            },
            moe_layers=_after_first_dense,
            grouped_by=("topk_method", "group_limited_greedy"),
            shared="shared_experts",
        ),
        Family(
            "deepseek_v3",
            keys={**_DEEPSEEK, "norm_topk_prob": "norm_topk_prob"},
            fixed=_SIGMOID_GROUPS,
            required={
                "topk_method": ("noaux_tc",),
                "scoring_func": ("sigmoid",),
                "moe_layer_freq": (1,),
            },
            moe_layers=_after_first_dense,
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
            mtp_marker="eh_proj",
        ),
        Family(
            "glm4_moe",
            keys={**_DEEPSEEK, "norm_topk_prob": "norm_topk_prob"},
            fixed=_SIGMOID_GROUPS,
            moe_layers=_after_first_dense,
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
            mtp_marker="eh_proj",
        ),
        Family(
            "gpt_oss",
            keys={
                **_COMMON,
                "num_experts": "num_local_experts",
                "moe_intermediate_size": "intermediate_size",
                "swiglu_limit": "swiglu_limit",
            },
            # Softmax over the chosen logits is softmax over all, renormalised over the chosen.
            fixed={
                "norm_topk_prob": True,
                "activation": "swigluoai",
                "expert_bias": True,
                "router_bias": True,
            },
            moe_layers=_every_layer,
            disk_experts=None,
            fused=FusedLayout(transposed=True, interleaved=True, has_bias=True),
            router="router.weight",
            router_bias="router.bias",
            returns_router_scores=True,
        ),
    )
}


def family_of(config: Any) -> Family:
    """The family of a transformers config or dict; an unknown one lists the supported ones."""
    if isinstance(config, Mapping):
        model_type = config.get("model_type")
    else:
        model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported; choose a checkpoint of one of: "
            f"{', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


def read_hf_config(config: Any) -> HFConfig:
    """A reader of any supported config; a dict gets transformers' defaults where installed.

    No code of the checkpoint is run: `auto_map` and the like are ignored.
    """
    family = family_of(config)
    if isinstance(config, Mapping):
        config = with_family_defaults(dict(config), family.model_type)
    return HFConfig(config, family.model_type)


def moe_layer_ids(config: Any) -> tuple[int, ...]:
    """The decoder layers that hold an MoE block, in order."""
    reader = read_hf_config(config)
    return FAMILIES[reader.model_type].moe_layers(reader)
