"""Tiny quantised checkpoints and the logits of the float32 models they stand for, once a session.

fp8 of sizes that nobody's writer can make is laid out after the reader's own code in transformers
(`integrations/finegrained_fp8.py`, `FP8Linear.__init__`: ceil(N / 128) by ceil(K / 128) scales),
which is how DeepSeek-V3's is. What the tensors stand for is always what the writer's library makes
of them: transformers' `_dequantize_fp8_weight`, `Written.weight` of tests/kernels/quant/writers.py,
or, of the fixtures, what compressed-tensors or GPTQModel dequantised where they were made.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize, _dequantize_fp8_weight

from ep_runtime.tiny import write_tiny_checkpoint
from tests.ep_runtime.checkpoints import PROMPTS, copy_with_tensors, read_tensors, scratch_directory
from tests.kernels.quant.writers import (
    Written,
    write_awq,
    write_compressed_nvfp4,
    write_gptq,
    write_modelopt_nvfp4,
    write_mxfp4_experts,
    write_pack_quantized,
)

Tensors = dict[str, Tensor]
FIXTURES = Path(__file__).parents[1] / "fixtures"
FIXTURE_PROMPTS = ((17, 50, 3, 88, 41), (60, 7, 7, 7, 19), (5,))
BLOCK = 128
FP8_BLOCK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_KEPT = ("embed_tokens", "norm", "lm_head", ".gate.weight", "shared_expert_gate", "router", "_bias")


@dataclass(frozen=True)
class Recipe:
    """A tiny model and how it is quantised.

    write: name and weight of a linear layer -> what is stored, None for a plain weight.
    """

    family: str
    write: Callable[[str, Tensor], Written | None]
    config: dict[str, Any]
    sizes: dict[str, Any] = field(default_factory=dict)


def blocks_of_128(name: str, weight: Tensor) -> Written:
    """DeepSeek-V3's layout; the last block of rows and of columns is what is left."""
    rows, columns = weight.shape
    scales = torch.empty(ceil(rows / BLOCK), ceil(columns / BLOCK))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i, j in torch.cartesian_prod(*(torch.arange(n) for n in scales.shape)).tolist():
        block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
        scales[i, j] = weight[block].abs().max() / 448
        values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    return _read_fp8({".weight": values, ".weight_scale_inv": scales})


def blocks_but_a_shared_expert(name: str, weight: Tensor) -> Written | None:
    return (
        None
        if name.startswith("model.layers.2.mlp.shared_experts")
        else blocks_of_128(name, weight)
    )


def by_transformers(name: str, weight: Tensor) -> Written | None:
    """transformers' writer, which leaves alone what blocks do not divide."""
    if name.startswith("model.layers.2.mlp.experts"):
        return None
    quantizer = SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=[BLOCK, BLOCK], scale_fmt="float")
    )
    write: Any = Fp8Quantize(quantizer)
    written = write.convert({"x.weight": weight})
    if len(written) == 1:
        return None
    return _read_fp8({name.removeprefix("x"): tensor for name, tensor in written.items()})


def one_scale_and_static_activations(name: str, weight: Tensor) -> Written | None:
    """AutoFP8's layout, with the scale that it calibrated for the activations."""
    if "shared_expert" in name:
        return None
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    return _read_fp8({".weight": values, ".weight_scale": scale, ".input_scale": torch.tensor(0.1)})


def _read_fp8(tensors: Tensors) -> Written:
    scale = tensors.get(".weight_scale_inv", tensors.get(".weight_scale"))
    assert scale is not None
    block = [BLOCK, BLOCK] if scale.ndim else None
    weight = _dequantize_fp8_weight(tensors[".weight"], scale, block, torch.float32)
    return Written(tensors, weight, {})


def gptq_with_act_order(name: str, weight: Tensor) -> Written | None:
    """int4, asymmetric, desc_act; 8 bits in the attention, and nothing of the shared expert."""
    if "shared_expert" in name:
        return None
    generator = torch.Generator().manual_seed(weight.shape[1])  # gate and up have one order
    return write_gptq(
        weight,
        bits=8 if "self_attn" in name else 4,
        group_size=32,
        is_symmetric=False,
        order=torch.randperm(weight.shape[1], generator=generator),
    )


def gptq_all_of_it(name: str, weight: Tensor) -> Written:
    """int4, symmetric, the shared expert's projections too; zero points as AutoGPTQ stores them."""
    return write_gptq(weight, group_size=32, layout="gptq", writer="auto_gptq")


def gptq_8_bits_a_row(name: str, weight: Tensor) -> Written:
    """8 bits, asymmetric, one group a row; zero points as GPTQModel stores them in v1."""
    return write_gptq(weight, bits=8, group_size=-1, is_symmetric=False, layout="gptq")


def awq(name: str, weight: Tensor) -> Written | None:
    return None if "self_attn" in name else write_awq(weight, group_size=32)


def int4_with_group_order(name: str, weight: Tensor) -> Written:
    """compressed-tensors' actorder: group, with zero points; gate and up have one order."""
    generator = torch.Generator().manual_seed(weight.shape[1])
    order = torch.randperm(weight.shape[1], generator=generator)
    return write_pack_quantized(weight, group_size=32, is_symmetric=False, order=order)


def int8_static_order(name: str, weight: Tensor) -> Written:
    """compressed-tensors' 8 bits; groups are of neighbouring columns, as actorder: static leaves
    them."""
    return write_pack_quantized(weight, bits=8, group_size=32)


def compressed_nvfp4(name: str, weight: Tensor) -> Written | None:
    return None if "self_attn" in name else write_compressed_nvfp4(weight)


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config of one group for all linear layers but router and head."""
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    }


def modelopt_nvfp4(name: str, weight: Tensor) -> Written | None:
    return None if "self_attn" in name else write_modelopt_nvfp4(weight)


def mxfp4_experts(name: str, weight: Tensor) -> Written | None:
    """gpt-oss' experts, whose plain tensors are transposed."""
    if "experts" not in name:
        return None
    written = write_mxfp4_experts(weight.transpose(1, 2))
    return Written(written.tensors, written.weight.transpose(1, 2), written.config)


_RECIPES = {
    # Sizes that 128 does not divide: gate and up have blocks of their own, the last one partial.
    "deepseek_v3_fp8_block": Recipe(
        "deepseek_v3",
        blocks_of_128,
        FP8_BLOCK_CONFIG,
        {"hidden_size": 160, "moe_intermediate_size": 136, "intermediate_size": 144},
    ),
    # Sizes of a shared expert that kernels read; that of layer 2 is not quantised.
    "deepseek_v3_fp8_shared": Recipe(
        "deepseek_v3",
        blocks_but_a_shared_expert,
        {
            **FP8_BLOCK_CONFIG,
            "modules_to_not_convert": ["lm_head", "model.layers.2.mlp.shared_experts"],
        },
        {"layers": 3, "hidden_size": 160, "moe_intermediate_size": 144, "num_experts": 4},
    ),
    # Layer 0 is dense, the experts of layer 1 are quantised, those of layer 2 are not.
    "qwen3_moe_fp8_block_but_a_layer": Recipe(
        "qwen3_moe",
        by_transformers,
        {
            **FP8_BLOCK_CONFIG,
            "modules_to_not_convert": ["lm_head", "mlp.gate", "model.layers.2.mlp.experts"],
        },
        {"layers": 3, "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4},
    ),
    "qwen2_moe_fp8_tensor_static": Recipe(
        "qwen2_moe",
        one_scale_and_static_activations,
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": [
                f"model.layers.{layer}.mlp.shared_expert.{part}"
                for layer in range(2)
                for part in ("gate_proj", "up_proj", "down_proj")
            ],
        },
    ),
    "qwen2_moe_gptq_act_order": Recipe(
        "qwen2_moe",
        gptq_with_act_order,
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
            "dynamic": {"-:.*shared_expert.*": {}, r"+:.*\.self_attn\..*": {"bits": 8}},
        },
    ),
    "deepseek_v3_nvfp4": Recipe(
        "deepseek_v3",
        modelopt_nvfp4,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.*.self_attn*"],
        },
    ),
    "qwen2_moe_gptq_shared_too": Recipe(
        "qwen2_moe",
        gptq_all_of_it,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
    ),
    "mixtral_gptq_8_bits": Recipe(
        "mixtral",
        gptq_8_bits_a_row,
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": -1,
            "sym": False,
            "desc_act": False,
            "checkpoint_format": "gptq",
            "meta": {"quantizer": ["gptqmodel:7.7.0"]},
        },
    ),
    "mixtral_awq": Recipe(
        "mixtral",
        awq,
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["self_attn", "gate"],
        },
    ),
    "qwen3_moe_int4_group_order": Recipe(
        "qwen3_moe",
        int4_with_group_order,
        _compressed(
            "pack-quantized",
            {
                "num_bits": 4,
                "type": "int",
                "symmetric": False,
                "strategy": "group",
                "group_size": 32,
                "actorder": "group",
            },
        ),
    ),
    "olmoe_int8_static_order": Recipe(
        "olmoe",
        int8_static_order,
        _compressed(
            "pack-quantized",
            {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "actorder": "static",
            },
        ),
    ),
    "qwen3_moe_compressed_nvfp4": Recipe(
        "qwen3_moe",
        compressed_nvfp4,
        _compressed(
            "nvfp4-pack-quantized",
            {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": 16,
            },
        ),
    ),
    "gpt_oss_mxfp4": Recipe(
        "gpt_oss",
        mxfp4_experts,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        },
        {"intermediate_size": 32},
    ),
}
# Of integers in every layout, and NVFP4 by the other writer.
INTEGERS = (
    "qwen2_moe_gptq_shared_too",
    "mixtral_gptq_8_bits",
    "mixtral_awq",
    "qwen3_moe_int4_group_order",
    "olmoe_int8_static_order",
    "qwen3_moe_compressed_nvfp4",
)
WRITTEN = tuple(name for name in _RECIPES if name not in INTEGERS)
FROM_OTHERS = ("qwen3_moe_fp8_block", "mixtral_fp8_dynamic")
_BY_LLM_COMPRESSOR = ("mixtral_w4a16_asym", "qwen3_moe_w8a16", "qwen3_moe_nvfp4a16")
_BY_GPTQMODEL = (
    "mixtral_gptq_sym",
    "qwen3_moe_gptq_asym_desc_act",
    "qwen2_moe_gptq_8_bits",
    "mixtral_awq_by_gptqmodel",
)
INTEGERS_FROM_OTHERS = _BY_LLM_COMPRESSOR + _BY_GPTQMODEL
_FIXTURE_OF = {
    name: FIXTURES / "compressed_tensors" / name for name in FROM_OTHERS + _BY_LLM_COMPRESSOR
} | {name: FIXTURES / "gptqmodel" / name for name in _BY_GPTQMODEL}


def quantized_checkpoint(name: str) -> Path:
    return _FIXTURE_OF[name] if name in _FIXTURE_OF else _write(name)[0]


def plain_checkpoint(name: str) -> Path:
    """Of the float32 weights that the quantised ones stand for; none of a fixture."""
    return _write(name)[1]


@cache
def _write(name: str) -> tuple[Path, Path]:
    """The quantised checkpoint, and a plain one of the same weights in float32."""
    recipe = _RECIPES[name]
    folder = scratch_directory() / "quantized" / name
    source = write_tiny_checkpoint(recipe.family, folder / "source", **recipe.sizes)
    stored: Tensors = {}
    plain: Tensors = {}
    for key, tensor in read_tensors(source).items():
        is_linear = tensor.ndim > 1 and not any(part in key for part in _KEPT)
        written = recipe.write(key, tensor) if is_linear else None
        plain[key] = tensor if written is None else written.weight
        for suffix, one in ({"": tensor} if written is None else written.tensors).items():
            stored[(key if suffix[:1] in ("", "_") else key.removesuffix(".weight")) + suffix] = one
    path = copy_with_tensors(source, folder / "quantized", stored)
    set_quantization(path, recipe.config)
    return path, copy_with_tensors(source, folder / "plain", plain)


def set_quantization(path: Path, config: dict[str, Any] | None) -> None:
    """Replace `quantization_config` in config.json."""
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(values))


def prompts_of(name: str) -> tuple[tuple[int, ...], ...]:
    return FIXTURE_PROMPTS if name in _FIXTURE_OF else PROMPTS


@cache
@torch.no_grad()
def expected_logits(name: str) -> tuple[Tensor, ...]:
    """[n, vocab] float32 of each prompt, by a model of the dequantised weights."""
    if name in _FIXTURE_OF:
        stored = load_file(_FIXTURE_OF[name] / "expected.safetensors")
        return tuple(stored[f"prompt_{i}"] for i in range(len(FIXTURE_PROMPTS)))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_write(name)[1], dtype=torch.float32)
    return tuple(model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS)
