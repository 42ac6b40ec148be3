"""Weights in fp8 (e4m3): a float32 scale for every 128 x 128 block, or for every output row.

A stored scale is a multiplier, weight = value * scale, whatever its name says: DeepSeek-V3's
`weight_scale_inv` (the README_WEIGHTS.md and `weight_dequant` released with that model),
compressed-tensors' and AutoFP8's `weight_scale`. The last block of rows or columns may be partial.
One scale for a whole projection becomes the same scale for each of its rows; gate and up keep their
own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.format import (
    Projection,
    StoredTensor,
    WeightFormat,
    check_finite,
)
from ep_runtime.kernels.quant.scheme import (
    FP8_GROUP,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.settings import QuantizationSettings

_SCALE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu})


class ScaleOf(StrEnum):
    """What one stored scale belongs to."""

    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


@dataclass(frozen=True)
class Fp8Format(WeightFormat):
    """`weight` in e4m3 [N, K] and its scales.

    scales: block [ceil(N / 128), ceil(K / 128)], channel [N, 1] or [N], tensor [] or [1]; float32,
    or what converts to it exactly. scale_suffixes: how the scale is spelt.
    has_activation_scales: the checkpoint holds static scales of activations; they are not used,
    since activations are not quantised with them.
    """

    scale_of: ScaleOf
    scale_suffixes: tuple[str, ...]
    has_activation_scales: bool = False

    @property
    def scheme(self) -> QuantScheme:
        is_block = self.scale_of is ScaleOf.BLOCK
        return QuantScheme(WeightScheme.FP8_BLOCK if is_block else WeightScheme.FP8_CHANNEL)

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        rows, columns = projection.rows, projection.columns
        shapes: dict[ScaleOf, tuple[tuple[int, ...], ...]] = {
            ScaleOf.BLOCK: ((ceil(rows / FP8_GROUP), ceil(columns / FP8_GROUP)),),
            ScaleOf.CHANNEL: ((rows, 1), (rows,)),
            ScaleOf.TENSOR: ((), (1,)),
        }
        stored = {
            "weight": StoredTensor(
                (".weight",), ((rows, columns),), frozenset({torch.float8_e4m3fn})
            ),
            "scale": StoredTensor(self.scale_suffixes, shapes[self.scale_of], _SCALE_DTYPES),
        }
        if self.has_activation_scales:
            stored["activation_scale"] = StoredTensor(
                (".input_scale", ".activation_scale"), is_required=False, is_used=False
            )
        return stored

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        scales = tensors["scale"].float()
        check_finite("scale", scales)
        if self.scale_of is not ScaleOf.BLOCK:
            scales = scales.reshape(-1).expand(projection.rows)
        parameters = QuantParameters(scales[None])
        return QuantizedTensor(tensors["weight"][None], parameters, self.scheme)


def read_fp8(values: Mapping[str, Any]) -> Fp8Format:
    """Of a quantization_config with `quant_method: fp8` (DeepSeek, transformers, AutoFP8).

    `scale_fmt: ue8m0` is about scales that are powers of 2, and about how a kernel that quantises
    activations rounds theirs; weights are read alike.
    ConfigError: blocks of another size, another 8-bit float, 4-bit experts, other modules than
    linear layers.
    """
    settings = QuantizationSettings(values)
    cure = "quantise again in e4m3 with blocks of 128 x 128"
    settings.choice("fmt", ("e4m3",), default="e4m3", cure=cure)
    settings.choice("scale_fmt", ("float", "ue8m0"), default="float", cure=cure)
    settings.choice("expert_dtype", ("fp8",), default="fp8", cure=cure)
    if settings.get("modules_to_convert"):
        raise settings.error(
            "modules_to_convert", "(embeddings in fp8) must be absent; keep them in 16 bits"
        )
    scheme = settings.choice(
        "activation_scheme", ("dynamic", "static"), default="dynamic", cure="use either"
    )
    return Fp8Format(
        ScaleOf.TENSOR
        if settings.get("weight_block_size") is None
        else _checked_block(settings, "weight_block_size", cure),
        (".weight_scale_inv", ".weight_scale"),
        has_activation_scales=scheme == "static",
    )


def _checked_block(settings: QuantizationSettings, key: str, cure: str) -> ScaleOf:
    settings.choice(key, ([FP8_GROUP, FP8_GROUP],), cure=cure)
    return ScaleOf.BLOCK


def read_compressed_fp8(group: Mapping[str, Any]) -> Fp8Format:
    """Of one of compressed-tensors' `config_groups`, whose path a ConfigError's key is under."""
    settings = QuantizationSettings(group, path="")
    weights, activations = settings.section("weights"), settings.section("input_activations")
    cure = "quantise again as FP8_DYNAMIC or FP8_BLOCK"
    weights.choice("num_bits", (8,), cure=cure)
    weights.choice("type", ("float",), cure=cure)
    weights.choice("symmetric", (True,), default=True, cure=cure)
    weights.choice("dynamic", (False,), default=False, cure=cure)
    scale_of = ScaleOf(weights.choice("strategy", tuple(map(str, ScaleOf)), cure=cure))
    if scale_of is ScaleOf.BLOCK:
        _checked_block(weights, "block_structure", cure)
    activations.choice("num_bits", (8,), default=8, cure=cure)
    activations.choice("type", ("float",), default="float", cure=cure)
    is_static = (
        group.get("input_activations") is not None and activations.get("dynamic") is not True
    )
    return Fp8Format(scale_of, (".weight_scale",), has_activation_scales=is_static)


def dequantize_fp8(weight: QuantizedTensor, num_parts: int) -> Tensor:
    """value * scale: float32 [E, N, K]. num_parts: 2 of a gated w13, whose parts keep their blocks
    apart; else 1."""
    values, scales = weight.values.float(), weight.parameters.scales
    if weight.scheme.weight is WeightScheme.FP8_CHANNEL:
        return values * scales[:, :, None]
    part_rows = values.shape[1] // num_parts
    part_blocks = scales.shape[1] // num_parts
    for part in range(num_parts):
        rows = values[:, part * part_rows : (part + 1) * part_rows]
        of_rows = scales[:, part * part_blocks : (part + 1) * part_blocks]
        of_rows = of_rows.repeat_interleave(FP8_GROUP, dim=1)[:, :part_rows]
        rows *= of_rows.repeat_interleave(FP8_GROUP, dim=2)[:, :, : rows.shape[2]]
    return values
