"""The supported Hugging Face families: how each spells its configuration and names its tensors.

Everything is declared: a family is data, and neither a name nor a layout is guessed from shapes.
What each family computes was read off transformers' modelling code.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ep_runtime.config import SHARED_SCHEMES, MoEConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.format import WeightFormat
from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme
from ep_runtime.quantization import CheckpointQuantization, experts_format, read_quantization

logger = logging.getLogger(__name__)

HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
DTYPE_NAMES = ("float32", "bfloat16", "float16")
_ABSENT = object()


class HFConfig:
    """Reads a transformers config object or a plain dict by key; says which key is missing."""

    def __init__(self, config: Any, model_type: str) -> None:
        self._config = config
        self.model_type = model_type

    @property
    def is_transformers_config(self) -> bool:
        """Whether it is a config object, which has the family's defaults, and not a plain dict."""
        return not isinstance(self._config, Mapping)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where it is absent or null."""
        if isinstance(self._config, Mapping):
            value = self._config.get(key)
        else:
            value = getattr(self._config, key, None)
        return default if value is None else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise ConfigError(
                f"{key}: is missing in the {self.model_type} configuration; give it, or install "
                "transformers (pip install 'ep-runtime[hf]') for the family's default"
            )
        return value


def _every_layer(config: HFConfig) -> tuple[int, ...]:
    return tuple(range(config["num_hidden_layers"]))


def _after_first_dense(config: HFConfig) -> tuple[int, ...]:
    return tuple(range(config["first_k_dense_replace"], config["num_hidden_layers"]))


def _sparse_step(config: HFConfig) -> tuple[int, ...]:
    """Layers whose number (from 1) is a multiple of decoder_sparse_step, less mlp_only_layers."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    layers = range(config["num_hidden_layers"])
    return tuple(i for i in layers if (i + 1) % step == 0 and i not in dense)


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
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    keys: MoEConfig field -> the family's configuration key.
    fixed: MoEConfig field -> what the family's modelling code always does.
    required: configuration key -> values it may have; others mean a model we would get wrong.
    moe_layers: the layers that hold an MoE block.
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
    disk_experts: tuple[str, str, str] | None = _PROJECTIONS
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
        config = _with_family_defaults(dict(config), family.model_type)
    return HFConfig(config, family.model_type)


def _with_family_defaults(values: dict[str, Any], model_type: str) -> Any:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return values
    kind = CONFIG_MAPPING[model_type]
    _check_spellings(values, kind.attribute_map)
    try:
        return kind.from_dict(values)
    except Exception as error:  # transformers' validation has no common base
        reason = " ".join(str(error).split())
        raise ConfigError(f"the {model_type} configuration is not valid: {reason}") from error


def _check_spellings(values: Mapping[str, Any], spellings: Mapping[str, str]) -> None:
    """ConfigError where a key and its other spelling both have a value, and not the same."""
    for other, key in spellings.items():
        first, second = values.get(key), values.get(other)
        if first is not None and second is not None and first != second:
            raise ConfigError(
                f"{key} ({first!r}) and {other} ({second!r}) are two spellings of one key and "
                "contradict each other; drop the wrong one"
            )


def moe_layer_ids(config: Any) -> tuple[int, ...]:
    """The decoder layers that hold an MoE block, in order."""
    reader = read_hf_config(config)
    return FAMILIES[reader.model_type].moe_layers(reader)


def expert_modules(family: Family, layer: int, num_experts: int) -> Iterator[tuple[str, ...]]:
    """The path of each expert projection of a layer as a linear layer, in every spelling that
    writers of quantised checkpoints use: as on disk, as in transformers' memory, or a mixture."""
    path = f"{family.layers}.{layer}"
    if family.disk_experts is None:
        yield (f"{path}.{family.disk_block}.experts",)
        return
    blocks = dict.fromkeys((family.disk_block, "mlp"))
    spellings = dict.fromkeys((family.disk_experts, _PROJECTIONS))
    for expert in range(num_experts):
        for part in range(len(_PROJECTIONS)):
            yield tuple(
                f"{path}.{block}.experts.{expert}.{names[part]}"
                for block in blocks
                for names in spellings
            )


def expert_formats(
    config: Any, quantization: CheckpointQuantization | None, num_experts: int
) -> dict[int, WeightFormat | None]:
    """MoE layer -> the format of its routed experts; None: not quantised.

    Raises ConfigError where experts of one layer are stored differently.
    """
    reader = read_hf_config(config)
    family = FAMILIES[reader.model_type]
    formats: dict[int, WeightFormat | None] = {}
    for layer in family.moe_layers(reader):
        modules = expert_modules(family, layer, num_experts)
        where = f"{family.layers}.{layer}"
        formats[layer] = (
            None if quantization is None else experts_format(quantization, where, modules)
        )
    return formats


def shared_schemes(
    config: Any, quantization: CheckpointQuantization | None
) -> Mapping[int, QuantScheme]:
    """MoE layer -> how `quantization_config` says that its shared expert is stored, of schemes that
    are kept so; another is dequantised as it is read. Empty where there is none."""
    reader = read_hf_config(config)
    family = FAMILIES[reader.model_type]
    if family.shared is None or quantization is None:
        return {}
    blocks = dict.fromkeys((family.disk_block, "mlp"))
    schemes = {}
    for layer in family.moe_layers(reader):
        modules = [f"{family.layers}.{layer}.{block}.{family.shared}" for block in blocks]
        forms = [
            quantization.format_of(*(f"{module}.{name}" for module in modules))
            for name in _PROJECTIONS
        ]
        schemes[layer] = kept_shared_scheme(forms)
    return schemes


def kept_shared_scheme(forms: Sequence[WeightFormat | None]) -> QuantScheme:
    """The scheme that a shared expert's three projections are kept in: theirs where it is one that
    is kept and they have it alike, else none."""
    schemes = {UNQUANTISED if form is None else form.scheme for form in forms}
    scheme = schemes.pop()
    return UNQUANTISED if schemes or scheme.weight not in SHARED_SCHEMES else scheme


def moe_config_from_hf(config: Any) -> MoEConfig:
    """The MoE layers of a transformers config, or of config.json as a dict.

    `quantization` is that of the first layer whose experts are quantised, `shared_quantization` of
    the first whose shared expert is; `load_model` looks at each layer.

    Raises ConfigError: an unknown family (lists the supported ones), a missing key, or a value
    that changes the model in a way that is not supported.
    """
    family = family_of(config)
    quantization = read_quantization(config)
    reader = read_hf_config(config)
    _check_required(reader, family)
    values: dict[str, Any] = dict(family.fixed)
    optional = {"n_group", "topk_group", "swiglu_limit", "num_shared_experts"}
    for name, key in family.keys.items():
        value = reader.get(key) if name in optional else reader[key]
        if value is not None:
            values[name] = value
    if family.grouped_by and reader.get(family.grouped_by[0]) != family.grouped_by[1]:
        values.pop("n_group", None)
        values.pop("topk_group", None)
    if values.get("activation") == "swigluoai":
        values["swiglu_alpha"] = reader.get("swiglu_alpha", 1.702)
    else:
        values["activation"] = _activation(reader["hidden_act"], reader.model_type)
    values["dtype"] = _dtype_name(reader)
    moe = MoEConfig(**values)
    if quantization is None:
        return moe
    formats = expert_formats(config, quantization, moe.num_experts).values()
    scheme = next((form.scheme for form in formats if form is not None), moe.quantization)
    moe = moe.with_quantization(scheme)
    shared = [one for one in shared_schemes(config, quantization).values() if one.is_quantised]
    return moe.with_shared_quantization(shared[0]) if shared and moe.has_shared_expert else moe


def _check_required(reader: HFConfig, family: Family) -> None:
    for key, allowed in family.required.items():
        value = reader.get(key, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"{key} ({value!r}) is not supported for {family.model_type}; it must be "
                f"{' or '.join(repr(choice) for choice in allowed)}"
            )
    for key, honoured in family.ignored_keys.items():
        if reader.get(key, honoured) != honoured:
            logger.warning(
                "%s (%r) is ignored for %s, as transformers does",
                key,
                reader.get(key),
                family.model_type,
            )


def _activation(hidden_act: str, model_type: str) -> str:
    if hidden_act not in HIDDEN_ACTS:
        raise ConfigError(
            f"hidden_act ({hidden_act!r}) is not supported for {model_type}; choose one of: "
            f"{', '.join(HIDDEN_ACTS)}"
        )
    return HIDDEN_ACTS[hidden_act]


def _dtype_name(reader: HFConfig) -> str:
    """float32 where the configuration names none, as transformers does."""
    value = reader.get("dtype")
    if value is None and not reader.is_transformers_config:  # there it is a deprecated alias
        value = reader.get("torch_dtype")
    value = "float32" if value is None else value
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ConfigError(
            f"dtype ({name}) is not supported; choose one of: {', '.join(DTYPE_NAMES)}"
        )
    return name
