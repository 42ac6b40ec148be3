"""`quantization_config` and `quantization:`: what is stored how, and what is refused by name."""

from typing import Any

import pytest

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.quantization import CheckpointQuantization, read_quantization
from ep_runtime.tiny import tiny_config

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
EXPERT = "model.layers.3.mlp.experts.5.up_proj"


def read(**values: Any) -> CheckpointQuantization:
    quantization = read_quantization({"quantization_config": values})
    assert quantization is not None
    return quantization


def scheme_of(quantization: CheckpointQuantization, path: str) -> str:
    form = quantization.format_of(path)
    return "none" if form is None else str(form.scheme.weight)


# --- which modules ---


@pytest.mark.parametrize(
    ("entry", "path", "is_left_out"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.3", EXPERT, True),
        ("model.layers.3", "model.layers.31.mlp.experts.5.up_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.*.self_attn", "model.layers.12.self_attn.q_proj", True),
        ("model.layers.*.self_attn", EXPERT, False),
        (EXPERT, EXPERT, True),
    ],
)
def test_fp8_and_mxfp4_leave_out_what_transformers_does(
    entry: str, path: str, is_left_out: bool
) -> None:
    from transformers.quantizers.quantizers_utils import should_convert_module

    assert should_convert_module(path, [entry]) is not is_left_out
    for key in ("modules_to_not_convert", "ignored_layers"):
        left_out = scheme_of(read(**FP8, **{key: [entry]}), path)
        assert left_out == ("none" if is_left_out else "fp8_block")
    mxfp4 = read(quant_method="mxfp4", modules_to_not_convert=[entry])
    assert scheme_of(mxfp4, path) == ("none" if is_left_out else "mxfp4")


def test_awq_leaves_out_what_contains_an_entry() -> None:
    quantization = read(**AWQ, modules_to_not_convert=["gate", "shared_expert."])
    assert scheme_of(quantization, "model.layers.0.mlp.shared_expert.up_proj") == "none"
    assert scheme_of(quantization, "model.layers.0.mlp.gate") == "none"
    assert scheme_of(quantization, EXPERT) == "int4_w4a16"


def test_gptqmodel_settings_of_single_modules_are_laid_over_the_others() -> None:
    quantization = read(
        **GPTQ,
        dynamic={
            r"-:.*\.shared_expert\.": {},
            r"+:.*\.self_attn\.": {"bits": 8, "group_size": 32},
            r".*\.layers\.0\.": {"sym": False},
        },
    )
    assert scheme_of(quantization, "model.layers.0.mlp.shared_expert.up_proj") == "none"
    attention = quantization.format_of("model.layers.0.self_attn.q_proj")
    assert attention is not None
    assert attention.scheme == QuantScheme(WeightScheme.INT8, 32)
    first = quantization.format_of("model.layers.0.mlp.experts.1.up_proj")
    assert first is not None
    assert first.scheme == QuantScheme(WeightScheme.INT4, 128, has_zero_points=True)
    other = quantization.format_of(EXPERT)
    assert other is not None
    assert other.scheme == QuantScheme(WeightScheme.INT4, 128)


def test_autogptq_quantises_only_what_it_lists() -> None:
    listed = [["self_attn.q_proj"], [f"mlp.experts.{e}.up_proj" for e in range(8)]]
    quantization = read(**GPTQ, modules_in_block_to_quantize=listed)
    assert scheme_of(quantization, EXPERT) == "int4_w4a16"
    assert scheme_of(quantization, "model.layers.0.mlp.shared_expert.up_proj") == "none"


def test_modelopt_leaves_out_what_matches_a_wildcard() -> None:
    quantization = read(
        quant_method="modelopt",
        quant_algo="NVFP4",
        ignore=["lm_head", "model.layers.0*", "model.layers.*.mlp.gate"],
    )
    assert scheme_of(quantization, "lm_head") == "none"
    assert scheme_of(quantization, "model.layers.0.mlp.experts.5.up_proj") == "none"
    assert scheme_of(quantization, "model.layers.7.mlp.gate") == "none"
    assert scheme_of(quantization, "model.layers.7.mlp.gate_proj") == "nvfp4"
    assert scheme_of(quantization, EXPERT) == "nvfp4"


def group(strategy: str, *targets: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy}
    return {"targets": targets, "weights": weights, "format": "float-quantized"}


INT4_GROUP = {
    "targets": ["re:.*experts.*"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "format": "pack-quantized",
}


def test_compressed_tensors_takes_the_group_that_says_most() -> None:
    quantization = read(
        quant_method="compressed-tensors",
        config_groups={
            "group_0": group("channel", "Linear"),
            "group_1": INT4_GROUP,
            "group_2": group("tensor", EXPERT),
        },
        ignore=["lm_head", "re:.*mlp.gate$"],
    )
    assert scheme_of(quantization, "model.layers.3.self_attn.q_proj") == "fp8_channel"
    assert scheme_of(quantization, EXPERT.replace("up", "down")) == "int4_w4a16"
    assert scheme_of(quantization, EXPERT) == "fp8_channel"
    assert scheme_of(quantization, "lm_head") == "none"
    assert scheme_of(quantization, "model.layers.3.mlp.gate") == "none"
    assert scheme_of(quantization, "model.layers.3.mlp.gate_proj") == "fp8_channel"


def test_a_module_in_no_group_is_plain() -> None:
    quantization = read(
        quant_method="compressed-tensors", config_groups={"g": group("channel", "re:.*mlp.*")}
    )
    assert scheme_of(quantization, "model.layers.3.self_attn.q_proj") == "none"
    assert scheme_of(quantization, EXPERT) == "fp8_channel"


def test_scales_of_a_kv_cache_are_unused_where_one_is_declared() -> None:
    names = (
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.attn.v_scale",
        "model.layers.0.self_attn.k_proj.output_scale",
        "model.layers.0.self_attn.v_proj.v_scale",
    )
    with_cache = read(**FP8, kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert all(with_cache.is_unused(name) for name in names)
    assert not with_cache.is_unused("model.layers.0.self_attn.k_proj.weight_scale")
    assert not any(read(**FP8).is_unused(name) for name in names)


# --- a layer's configuration ---


def hf(family: str, quantization: Any, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = tiny_config(family, **changes).to_dict()
    return {**config, "quantization_config": quantization}


@pytest.mark.parametrize(
    ("family", "quantization", "scheme"),
    [
        ("deepseek_v3", FP8, QuantScheme(WeightScheme.FP8_BLOCK)),
        ("qwen2_moe", {**GPTQ, "sym": False}, QuantScheme(WeightScheme.INT4, 128, True)),
        ("gpt_oss", {"quant_method": "mxfp4"}, QuantScheme(WeightScheme.MXFP4)),
        (
            "mixtral",
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": INT4_GROUP},
            },
            QuantScheme(WeightScheme.INT4, 128),
        ),
        ("qwen3_moe", {**FP8, "modules_to_not_convert": [r".*mlp\.experts"]}, QuantScheme()),
        (
            "qwen3_moe",
            {**FP8, "modules_to_not_convert": ["model.layers.1"]},
            QuantScheme(WeightScheme.FP8_BLOCK),
        ),
        ("qwen3_moe", None, QuantScheme()),
    ],
)
def test_from_hf_reads_the_experts_scheme(
    family: str, quantization: Any, scheme: QuantScheme
) -> None:
    # gpt_oss' sizes must be multiples of 32; layer 0 of qwen3_moe is dense.
    changes = {"gpt_oss": {"intermediate_size": 32}, "qwen3_moe": {"layers": 3}}.get(family, {})
    values = hf(family, quantization, **changes)
    assert MoEConfig.from_hf(values).quantization == scheme
    from transformers import CONFIG_MAPPING

    assert MoEConfig.from_hf(CONFIG_MAPPING[family].from_dict(values)).quantization == scheme


def test_experts_of_one_layer_that_are_stored_differently_are_refused() -> None:
    left_out = ["model.layers.1.mlp.experts.6.down_proj"]
    with pytest.raises(ConfigError) as caught:
        MoEConfig.from_hf(hf("qwen3_moe", {**FP8, "modules_to_not_convert": left_out}))
    assert "routed experts of model.layers.1 are not stored alike" in str(caught.value)
    assert f"{left_out[0]}: not quantised" in str(caught.value)


def test_a_name_in_one_spelling_of_experts_alone_is_no_expert() -> None:
    """AutoAWQ's list for Mixtral, `gate`, is the router's: its experts are w1, w2 and w3."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    scheme = QuantScheme(WeightScheme.INT4, 32, True)
    for entry, expected in (
        ("gate", scheme),
        ("block_sparse_moe.experts", QuantScheme()),
        ("mlp.experts", QuantScheme()),
    ):
        values = hf("mixtral", {**awq, "modules_to_not_convert": [entry]})
        assert MoEConfig.from_hf(values).quantization == expected, entry
    for entry in ("block_sparse_moe.experts.1.w1", "w2"):
        with pytest.raises(ConfigError, match=r"routed experts of model.layers.0 are not stored"):
            MoEConfig.from_hf(hf("mixtral", {**awq, "modules_to_not_convert": [entry]}))


@pytest.mark.parametrize(
    ("value", "scheme"),
    [
        ("fp8_block", QuantScheme(WeightScheme.FP8_BLOCK)),
        (None, QuantScheme()),
        ({"weight": "int8_w8a16"}, QuantScheme(WeightScheme.INT8)),
        (
            {"weight": "int4_w4a16", "group_size": 64, "has_zero_points": True},
            QuantScheme(WeightScheme.INT4, 64, True),
        ),
        (QuantScheme(WeightScheme.NVFP4), QuantScheme(WeightScheme.NVFP4)),
    ],
)
def test_the_key_is_a_name_or_a_mapping_and_survives_a_file(
    value: Any, scheme: QuantScheme
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "top_k": 2,
    }
    moe = MoEConfig(**sizes, quantization=value)
    assert moe.quantization == scheme
    assert MoEConfig(**moe.model_dump(mode="json", exclude_none=True)) == moe
    assert hash(moe) == hash(MoEConfig(**moe.model_dump()))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fp8_blocks", r"quantization: 'fp8_blocks' is no scheme; did you mean 'fp8_block'\?"),
        ({"weight": "fp8_block", "group_size": 64}, r"group_size \(64\) has no effect with fp8"),
        ({"group_size": 64}, "weight is required"),
        ({"weight": "int4_w4a16", "group_sise": 64}, "unknown key 'group_sise'"),
        ({"weight": "int4_w4a16", "group_size": -1}, r"group_size \(-1\) must be a number"),
        ({"weight": "int4_w4a16", "has_zero_points": 1}, "has_zero_points must be true or false"),
        (8, "must be a scheme's name or its keys"),
        (
            "mxfp4",
            r"quantization mxfp4 needs a moe_intermediate_size that 32 divides, got .*\(40\)",
        ),
    ],
)
def test_a_wrong_key_is_named(value: Any, message: str) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "moe_intermediate_size": 40,
        "num_experts": 4,
        "top_k": 2,
    }
    with pytest.raises(ConfigError, match=message):
        MoEConfig(**sizes, quantization=value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quant_method \('bitsandbytes'\) is not supported"),
        ({"quant_method": ["fp8"]}, r"quant_method \(\['fp8'\]\) is not supported"),
        ({**FP8, "weight_block_size": [64, 64]}, "weight_block_size"),
        ({**FP8, "modules_to_not_convert": "a("}, r"'a\(' is no regular expression"),
        ({**FP8, "modules_to_not_convert": 7}, "must be a list of names; got 7"),
        ({**GPTQ, "dynamic": {"-:(": {}}}, r"dynamic: '\(' is no regular expression"),
        ({**GPTQ, "dynamic": {"a": 5}}, "dynamic.a must be a mapping .* got 5"),
        ({**GPTQ, "meta": {"quantizer": 5}}, r"meta.quantizer \(5\) must be a name or a list"),
        ({**GPTQ, "bits": 3}, r"bits \(3\)"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {}},
            "config_groups must be a mapping with a group",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {**INT4_GROUP, "format": "marlin-24"}},
            },
            r"config_groups.group_0.format \('marlin-24'\) is not supported",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {**INT4_GROUP, "format": ["pack-quantized"]}},
            },
            r"config_groups.group_0.format \(\['pack-quantized'\]\) is not supported",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": group("group", "Linear")},
            },
            r"quantization_config.config_groups.group_0.weights.strategy \('group'\)",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": group("channel", "Linear")},
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparsity_config is not supported",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**values)
