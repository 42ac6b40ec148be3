"""Every family's configuration, read into MoEConfig, computes what transformers computes."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime import families
from ep_runtime.config import MoEConfig
from ep_runtime.families import FAMILIES, moe_layer_ids
from ep_runtime.hf_config import HFConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.moe_from_hf import moe_config_from_hf
from ep_runtime.reference import reference_layer
from ep_runtime.tiny import tiny_config, write_tiny_checkpoint
from tests.ep_runtime.checkpoints import FAMILY_NAMES, transformers_model
from tests.tolerances import assert_close

# As the original releases' config.json have them (shortened to what an MoE layer needs).
HUB_CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 3,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
}
NO_GROUPS = {"n_group": 1, "topk_group": 1}
EXPECTED: dict[str, dict[str, Any]] = {
    "mixtral": {
        "hidden_size": 4096,
        "moe_intermediate_size": 14336,
        "num_experts": 8,
        "top_k": 2,
        "scoring": "softmax",
        "norm_topk_prob": True,
        "shared_intermediate_size": 0,
        "dtype": "bfloat16",
    },
    "deepseek_v2": {
        "num_experts": 160,
        "moe_intermediate_size": 1536,
        "top_k": 6,
        "scoring": "softmax",
        "n_group": 8,
        "topk_group": 3,
        "group_score": "max",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0,
        "num_shared_experts": 2,
        "shared_intermediate_size": 3072,
        "shared_expert_gate": False,
        "has_correction_bias": False,
    },
    "deepseek_v3": {
        "num_experts": 256,
        "moe_intermediate_size": 2048,
        "top_k": 8,
        "scoring": "sigmoid",
        "n_group": 8,
        "topk_group": 4,
        "group_score": "top2_sum",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_shared_experts": 1,
        "shared_intermediate_size": 2048,
        "has_correction_bias": True,
        "dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("family", HUB_CONFIGS)
def test_the_original_releases_are_read(family: str) -> None:
    moe = MoEConfig.from_hf(HUB_CONFIGS[family])
    assert {name: getattr(moe, name) for name in EXPECTED[family]} == EXPECTED[family]


def test_a_dict_and_the_config_object_it_describes_read_alike() -> None:
    for family in FAMILY_NAMES:
        config = tiny_config(family)
        assert moe_config_from_hf(config.to_dict()) == moe_config_from_hf(config)


def test_a_missing_key_takes_the_default_of_transformers() -> None:
    moe = MoEConfig.from_hf({"model_type": "qwen2_moe"})
    assert (moe.num_experts, moe.top_k, moe.norm_topk_prob) == (60, 4, False)
    assert (moe.shared_intermediate_size, moe.shared_expert_gate) == (5632, True)


def test_a_missing_key_is_named_where_there_are_no_defaults() -> None:
    with pytest.raises(ConfigError, match="num_experts: is missing in the qwen3_moe config"):
        HFConfig({"model_type": "qwen3_moe"}, "qwen3_moe")["num_experts"]


def test_an_unknown_family_lists_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match="'llama' is not supported") as caught:
        MoEConfig.from_hf({"model_type": "llama"})
    assert all(family in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("mixtral", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ("mixtral", {"torch_dtype": "float64"}, "dtype"),
    ],
)
def test_a_value_we_would_get_wrong_is_refused(
    family: str, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        MoEConfig.from_hf({**HUB_CONFIGS[family], **changed})


@pytest.mark.parametrize(
    ("family", "key", "other"),
    [
        ("mixtral", "num_local_experts", "num_experts"),
        ("olmoe", "num_experts", "num_local_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
    ],
)
def test_two_spellings_of_one_key_must_agree(family: str, key: str, other: str) -> None:
    values = HUB_CONFIGS.get(family, {"model_type": family})
    moe = MoEConfig.from_hf({**values, key: 16, other: 16, **NO_GROUPS})
    assert moe.num_experts == 16
    with pytest.raises(ConfigError, match=rf"{key} \(16\) and {other} \(7\) are two spellings"):
        MoEConfig.from_hf({**values, key: 16, other: 7, **NO_GROUPS})


def test_a_key_that_transformers_ignores_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        moe = MoEConfig.from_hf({**HUB_CONFIGS["deepseek_v2"], "norm_topk_prob": True})
    assert not moe.norm_topk_prob
    assert "norm_topk_prob (True) is ignored for deepseek_v2" in caplog.text


# Of a GLM-4.5, whose router is written for groups and has one.
GLM = {"model_type": "glm4_moe", "n_routed_experts": 160, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        pytest.param(
            HUB_CONFIGS["deepseek_v2"] | {"topk_method": "greedy"}, (1, 1, "max"), id="greedy"
        ),
        pytest.param(GLM | NO_GROUPS, (1, 1, "max"), id="one group"),
        pytest.param(GLM, (1, 1, "max"), id="one group by default"),
        pytest.param(GLM | {"n_group": 4, "topk_group": 4}, (1, 1, "max"), id="all groups"),
        pytest.param(GLM | {"n_group": 4, "topk_group": 2}, (4, 2, "top2_sum"), id="some groups"),
        pytest.param(GLM | {"n_group": 1, "topk_group": 0}, "topk_group: .*got 0", id="no group"),
        pytest.param(GLM | {"n_group": 1, "topk_group": 2}, r"topk_group \(2\)", id="too many"),
    ],
)
def test_groups_are_set_only_where_they_leave_some_out(
    config: dict[str, Any], groups: tuple[int, int, str] | str
) -> None:
    if isinstance(groups, str):
        with pytest.raises(ConfigError, match=groups):
            MoEConfig.from_hf(config)
        return
    moe = MoEConfig.from_hf(config)
    assert (moe.n_group, moe.topk_group, moe.group_score) == groups


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 0}, r"decoder_sparse_step \(0\) must be 1 or more"),
        ("qwen2_moe", {"decoder_sparse_step": -2}, r"decoder_sparse_step \(-2\) must be 1 or"),
        ("qwen3_moe", {"num_hidden_layers": 0}, r"num_hidden_layers \(0\) must be 1 or more"),
        ("mixtral", {"num_hidden_layers": -1}, r"num_hidden_layers \(-1\) must be 1 or more"),
        (
            "deepseek_v3",
            {"first_k_dense_replace": -1},
            r"first_k_dense_replace \(-1\) must be 0 or more",
        ),
        (
            "glm4_moe",
            {"first_k_dense_replace": 5, "num_hidden_layers": 4},
            r"first_k_dense_replace \(5\) must be at most num_hidden_layers \(4\)",
        ),
        ("deepseek_v2", {"num_hidden_layers": 0}, r"num_hidden_layers \(0\) must be 1 or more"),
    ],
)
@pytest.mark.parametrize("has_transformers", [True, False])
def test_layers_that_cannot_be_are_refused_by_their_key(
    family: str,
    changed: dict[str, Any],
    message: str,
    has_transformers: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config(family).to_dict() | HUB_CONFIGS.get(family, {}) | changed
    if not has_transformers:
        monkeypatch.setattr(families, "with_family_defaults", lambda values, model_type: values)
    with pytest.raises(ConfigError, match=message):
        moe_layer_ids(config)


def read_layers(config: dict[str, Any]) -> tuple[int, ...]:
    MoEConfig.from_hf(config)
    return moe_layer_ids(config)


# What a key of the list below may be all the same.
FITTING = [("mlp_only_layers", [2]), ("swiglu_limit", 2.0), ("swiglu_alpha", 2.0)]


@pytest.mark.parametrize("value", ["2", 2.0, True, [2], {"2": 2}])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("mixtral", "num_hidden_layers"),
        ("qwen2_moe", "decoder_sparse_step"),
        ("qwen2_moe", "mlp_only_layers"),
        ("deepseek_v2", "first_k_dense_replace"),
        ("olmoe", "hidden_act"),
        ("olmoe", "dtype"),
        ("olmoe", "hidden_size"),
        ("glm4_moe", "n_group"),
        ("deepseek_v2", "topk_method"),
        ("gpt_oss", "swiglu_limit"),
        ("gpt_oss", "swiglu_alpha"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(
    family: str, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As config.json's keys are read where transformers, which checks some, is not installed."""
    monkeypatch.setattr(families, "with_family_defaults", lambda values, model_type: values)
    config = tiny_config(family).to_dict() | {key: value}
    if (key, value) in FITTING:
        assert read_layers(config) == read_layers(tiny_config(family).to_dict())
        return
    with pytest.raises(ConfigError, match=key):
        read_layers(config)


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("mixtral", {}, (0, 1, 2, 3, 4, 5)),
        ("qwen2_moe", {"decoder_sparse_step": 2}, (1, 3, 5)),
        ("qwen3_moe", {"mlp_only_layers": [0, 4]}, (1, 2, 3, 5)),
        ("deepseek_v3", {"first_k_dense_replace": 4}, (4, 5)),
        ("glm4_moe", {"first_k_dense_replace": 0}, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_moe_layers_are_those_that_transformers_builds(
    family: str, keys: dict[str, Any], expected: tuple[int, ...]
) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, layers=6, **keys)
    assert moe_layer_ids(config) == expected
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(config).get_submodule(FAMILIES[family].layers)
    blocks = [i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")]
    assert tuple(blocks) == expected


def block_weights(block: Any, moe: MoEConfig) -> dict[str, Any]:
    """A transformers MoE block's weights, as load_experts and reference_layer take them."""
    w13, w2 = block.experts.gate_up_proj, block.experts.down_proj
    weights: dict[str, Any] = {}
    router = getattr(block, "router", None) or block.gate
    if moe.expert_bias:  # gpt-oss: transposed, gate and up interleaved
        halves = w13.transpose(1, 2)
        w13, w2 = torch.cat([halves[:, ::2], halves[:, 1::2]], 1), w2.transpose(1, 2)
        bias = block.experts.gate_up_proj_bias
        weights["w13_bias"] = torch.cat([bias[:, ::2], bias[:, 1::2]], 1)
        weights["w2_bias"] = block.experts.down_proj_bias
        weights["router_bias"] = router.bias
    if moe.has_correction_bias:
        weights["correction_bias"] = router.e_score_correction_bias
    if moe.has_shared_expert:
        shared = getattr(block, "shared_experts", None) or block.shared_expert
        gate = block.shared_expert_gate.weight if moe.shared_expert_gate else None
        up = [shared.gate_proj.weight, shared.up_proj.weight]
        weights["shared"] = {"w13": torch.cat(up), "w2": shared.down_proj.weight, "gate": gate}
    return {"w13": w13, "w2": w2, "router": router.weight, **weights}


@torch.no_grad()
def compare_block(model: Any) -> None:
    moe = moe_config_from_hf(model.config)
    block = model.model.layers[moe_layer_ids(model.config)[-1]].mlp
    rows = torch.randn(33, moe.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = block(rows[None])
    if isinstance(expected, tuple):
        expected = expected[0]
    actual: Tensor = reference_layer(rows, moe, **block_weights(block, moe))
    assert_close(actual, expected[0])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_reference_layer_is_the_block_of_transformers(family: str) -> None:
    compare_block(transformers_model(family))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("olmoe", {"norm_topk_prob": True}),
        ("deepseek_v2", {"topk_method": "greedy"}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v3", {"norm_topk_prob": False}),
        ("glm4_moe", {"n_group": 3, "topk_group": 2}),
        ("mixtral", {"hidden_act": "gelu"}),
    ],
)
def test_so_it_is_with_each_routing_switch(
    family: str, overrides: dict[str, Any], tmp_path: Any
) -> None:
    from transformers import AutoModelForCausalLM

    path = write_tiny_checkpoint(family, tmp_path, seed=3, **overrides)
    compare_block(AutoModelForCausalLM.from_pretrained(path))
