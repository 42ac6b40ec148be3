"""Reading quantised checkpoints: what does not fit is named, whatever is quantised."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import CheckpointError, ConfigError
from ep_runtime.models import load_model
from tests.ep_runtime.checkpoints import copy_with_tensors, read_tensors, tiny_checkpoint
from tests.ep_runtime.quantized_checkpoints import quantized_checkpoint, set_quantization

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]
DEEPSEEK = "deepseek_v3_fp8_block"
EXPERT = "model.layers.1.mlp.experts.5.up_proj"
SHARED = "model.layers.1.mlp.shared_experts.down_proj"
ATTENTION = "model.layers.0.self_attn.o_proj"


@pytest.fixture(scope="module")
def ctx() -> Iterator[EPContext]:
    with init_distributed(ParallelConfig(device="cpu")) as context:
        yield context


def without(*names: str) -> Change:
    return lambda tensors: {n: t for n, t in tensors.items() if n not in names}


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def added(name: str, tensor: Tensor) -> Change:
    return lambda tensors: {**tensors, name: tensor}


def moved(old: str, new: str) -> Change:
    return lambda tensors: {(new if n == old else n): t for n, t in tensors.items()}


def with_nan(scales: Tensor) -> Tensor:
    scales = scales.clone()
    scales[-1, 0] = torch.nan
    return scales


@pytest.mark.parametrize(
    ("name", "change", "messages"),
    [
        pytest.param(
            DEEPSEEK,
            without(f"{EXPERT}.weight_scale_inv"),
            [f"1 missing: {EXPERT}.weight_scale_inv"],
            id="an_experts_scale_is_missing",
        ),
        pytest.param(
            DEEPSEEK,
            without(f"{EXPERT}.weight"),
            [f"1 missing: {EXPERT}.weight"],
            id="an_experts_values_are_missing",
        ),
        pytest.param(
            DEEPSEEK,
            without(f"{SHARED}.weight_scale_inv", f"{ATTENTION}.weight_scale_inv"),
            [f"2 missing: {ATTENTION}.weight_scale_inv, {SHARED}.weight_scale_inv"],
            id="scales_of_shared_expert_and_attention_are_missing",
        ),
        pytest.param(
            DEEPSEEK,
            moved(f"{EXPERT}.weight_scale_inv", f"{EXPERT}.weight_scale_inf"),
            [f"{EXPERT}.weight_scale_inv (is it {EXPERT}.weight_scale_inf?)", "1 left over"],
            id="a_misspelt_scale",
        ),
        pytest.param(
            DEEPSEEK,
            added(f"{EXPERT}.weight_scale", torch.ones(2, 2)),
            [f"1 there under two names: {EXPERT}.weight_scale_inv and {EXPERT}.weight_scale"],
            id="a_scale_in_two_spellings",
        ),
        pytest.param(
            DEEPSEEK,
            added(f"{EXPERT}.input_scale", torch.tensor(1.0)),
            [f"1 left over: {EXPERT}.input_scale"],
            id="an_activation_scale_where_none_is_declared",
        ),
        pytest.param(
            DEEPSEEK,
            changed(f"{EXPERT}.weight_scale_inv", lambda scales: scales[:1]),
            [f"{EXPERT}.weight_scale_inv: shape [1, 2]", "wanted [2, 2]"],
            id="too_few_scales",
        ),
        pytest.param(
            DEEPSEEK,
            changed(f"{ATTENTION}.weight_scale_inv", lambda scales: torch.ones(160, 1)),
            [f"{ATTENTION}.weight_scale_inv: shape [160, 1]", "wanted [2, 1]"],
            id="a_channels_scales_in_the_attention",
        ),
        pytest.param(
            DEEPSEEK,
            changed(f"{EXPERT}.weight_scale_inv", lambda scales: scales.int()),
            [f"{EXPERT}.weight_scale_inv: dtype I32", "wanted one of F32, BF16, F16, F8_E8M0"],
            id="scales_that_are_integers",
        ),
        pytest.param(
            DEEPSEEK,
            changed(f"{EXPERT}.weight", lambda values: values.bfloat16()),
            [f"{EXPERT}.weight: dtype BF16", "wanted one of F8_E4M3"],
            id="values_that_are_not_fp8",
        ),
        pytest.param(
            DEEPSEEK,
            changed(f"{EXPERT}.weight_scale_inv", with_nan),
            [f"{EXPERT}.weight_scale_inv: 1 of 4 scales are NaN or infinite"],
            id="an_experts_scale_is_nan",
        ),
        pytest.param(
            DEEPSEEK,
            changed(f"{SHARED}.weight_scale_inv", with_nan),
            [f"{SHARED}.weight_scale_inv: 1 of 4 scales are NaN or infinite"],
            id="a_shared_experts_scale_is_nan",
        ),
        pytest.param(
            "qwen3_moe_fp8_block_but_a_layer",
            added("model.layers.2.mlp.experts.3.up_proj.weight_scale_inv", torch.ones(1, 1)),
            ["1 left over: model.layers.2.mlp.experts.3.up_proj.weight_scale_inv"],
            id="a_scale_in_a_layer_left_unquantised",
        ),
        pytest.param(
            "qwen2_moe_gptq_act_order",
            changed("model.layers.0.mlp.experts.2.up_proj.g_idx", lambda groups: groups.flip(0)),
            ["model.layers.0.mlp.experts.2.up_proj", "columns are stored in different orders"],
            id="gate_and_up_in_different_orders",
        ),
        pytest.param(
            "gpt_oss_mxfp4",
            changed(
                "model.layers.1.mlp.experts.down_proj_scales",
                lambda scales: torch.where(torch.arange(6)[:, None, None] == 4, 255, scales).byte(),
            ),
            ["model.layers.1.mlp.experts.down_proj_scales (expert 4): 64 of 64 scales are NaN"],
            id="a_fused_experts_scales_are_nan",
        ),
        pytest.param(
            "gpt_oss_mxfp4",
            without("model.layers.1.mlp.experts.gate_up_proj_scales"),
            ["1 missing: model.layers.1.mlp.experts.gate_up_proj_scales"],
            id="fused_scales_are_missing",
        ),
    ],
)
def test_stored_tensors_that_do_not_fit_are_named(
    name: str, change: Change, messages: list[str], ctx: EPContext, tmp_path: Path
) -> None:
    source = quantized_checkpoint(name)
    path = copy_with_tensors(source, tmp_path, change(read_tensors(source)))
    with pytest.raises(CheckpointError) as caught:
        load_model(path, ctx, progress=False)
    for message in messages:
        assert message in str(caught.value)


def test_a_plain_checkpoint_that_says_it_is_quantised_lacks_its_scales(
    ctx: EPContext, tmp_path: Path
) -> None:
    source = tiny_checkpoint("deepseek_v3")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    set_quantization(path, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    with pytest.raises(
        CheckpointError, match=r"24 missing: model.layers.1.mlp.experts.0.down_proj"
    ):
        load_model(path, ctx, progress=False)


def test_a_quantised_checkpoint_that_does_not_say_so_has_tensors_left_over(
    ctx: EPContext, tmp_path: Path
) -> None:
    source = quantized_checkpoint(DEEPSEEK)
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    values = json.loads((path / "config.json").read_text())
    del values["quantization_config"]
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"left over: .*weight_scale_inv"):
        load_model(path, ctx, progress=False)


def test_experts_in_a_fused_tensor_of_a_format_without_one_are_refused(
    ctx: EPContext, tmp_path: Path
) -> None:
    source = quantized_checkpoint("gpt_oss_mxfp4")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    set_quantization(path, {"quant_method": "fp8"})
    message = r"experts\.gate_up_proj: fp8_channel weights of all experts in one tensor are not"
    with pytest.raises(CheckpointError, match=message):
        load_model(path, ctx, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, "quantization_config.fmt"),
        ({"weight_block_size": [128, 64]}, "quantization_config.weight_block_size"),
        (
            {"modules_to_not_convert": ["model.layers.1.mlp.experts.2"]},
            "routed experts of model.layers.1 are not stored alike",
        ),
    ],
)
def test_a_configuration_that_is_not_read_is_refused_before_any_tensor(
    changes: dict[str, Any], message: str, ctx: EPContext, tmp_path: Path
) -> None:
    source = quantized_checkpoint(DEEPSEEK)
    values = json.loads((source / "config.json").read_text())
    values["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(values))  # and no tensors at all
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, ctx, progress=False)


def test_modelopts_own_file_says_how_a_checkpoint_is_quantised(
    ctx: EPContext, tmp_path: Path
) -> None:
    source = quantized_checkpoint("deepseek_v3_nvfp4")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    set_quantization(path, None)
    keys = {
        "quant_algo": "NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
    }
    file = path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": keys}))
    model = load_model(path, ctx, progress=False)
    assert str(model.plan.moe.quantization.weight) == "nvfp4"
    file.write_text(json.dumps({"quantization": "NVFP4"}))
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization must be a map"):
        load_model(path, ctx, progress=False)


def test_an_unused_kv_cache_scale_is_named(
    ctx: EPContext, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = quantized_checkpoint("mixtral_fp8_dynamic")
    scales = {f"model.layers.{i}.self_attn.{n}_scale": torch.ones(1) for i in (0, 1) for n in "kv"}
    path = copy_with_tensors(source, tmp_path, {**read_tensors(source), **scales})
    with pytest.raises(CheckpointError, match="4 left over"):
        load_model(path, ctx, progress=False)
    values = json.loads((path / "config.json").read_text())["quantization_config"]
    set_quantization(path, {**values, "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    model = load_model(path, ctx, progress=False)
    assert model.load_report.unused == tuple(sorted(scales))
    assert "4 scales of activations or of a KV cache are not used" in caplog.text
    assert "both stay in bfloat16" in caplog.text
