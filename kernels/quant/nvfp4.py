"""NVFP4: e2m1 values, an e4m3 scale for every 16 columns, and one float32 scale for all of it.

N output rows, K input columns; two values a byte, the even column in the low nibble:

    modelopt: `weight` uint8 [N, K / 2], `weight_scale` e4m3 [N, K / 16], `weight_scale_2` float32
        weight[n, k] = e2m1(code[n, k]) * scale[n, k // 16] * weight_scale_2
    compressed-tensors (`nvfp4-pack-quantized`): `weight_packed`, `weight_scale` the same,
    `weight_global_scale` float32
        weight[n, k] = e2m1(code[n, k]) * scale[n, k // 16] / weight_global_scale

The float32 scale is a multiplier in one and a divisor in the other. Gate and up of one expert have
one each. Static scales of activations (`input_scale`, `input_global_scale`) are not used:
activations stay as they are.

Source: NVIDIA modelopt 0.47.0, torch/quantization/qtensor/nvfp4_tensor.py (`quantize`,
`dequantize`); compressed-tensors 0.18.0, compressors/nvfp4 and quantization/lifecycle
(`dequantize`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.e2m1 import E2M1_VALUES, e2m1_codes, e2m1_values, scale_groups
from ep_runtime.kernels.quant.format import (
    Projection,
    StoredTensor,
    StoredTensorError,
    WeightFormat,
    check_finite,
)
from ep_runtime.kernels.quant.packing import pack_pairs
from ep_runtime.kernels.quant.scheme import (
    MAX_E4M3,
    NVFP4_GROUP,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.settings import QuantizationSettings

_UINT8 = frozenset({torch.uint8})
_E4M3 = frozenset({torch.float8_e4m3fn})
_FLOAT32 = frozenset({torch.float32})


class Nvfp4Writer(StrEnum):
    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


_SUFFIXES = {
    Nvfp4Writer.MODELOPT: (".weight", ".weight_scale_2", ".input_scale"),
    Nvfp4Writer.COMPRESSED_TENSORS: (
        ".weight_packed",
        ".weight_global_scale",
        ".input_global_scale",
    ),
}


@dataclass(frozen=True)
class Nvfp4Format(WeightFormat):
    """writer: whose names, and whose global scale, a multiplier or a divisor."""

    writer: Nvfp4Writer

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(WeightScheme.NVFP4)

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        rows, columns = projection.rows, projection.columns
        weight, global_scale, input_scale = _SUFFIXES[self.writer]
        return {
            "weight": StoredTensor((weight,), ((rows, columns // 2),), _UINT8),
            "scale": StoredTensor((".weight_scale",), ((rows, columns // NVFP4_GROUP),), _E4M3),
            "global_scale": StoredTensor((global_scale,), ((), (1,)), _FLOAT32),
            "input_scale": StoredTensor((input_scale,), is_required=False, is_used=False),
        }

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        check_finite("scale", tensors["scale"])
        multiplier = self._multiplier(tensors)
        if not bool(torch.isfinite(multiplier)) or not bool(multiplier > 0):
            raise StoredTensorError(
                "global_scale", f"is {float(tensors['global_scale'])}, must be above 0 and finite"
            )
        parameters = QuantParameters(tensors["scale"][None], global_scales=multiplier.reshape(1, 1))
        return QuantizedTensor(tensors["weight"][None], parameters, self.scheme)

    def dequantize(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor:
        """The definition: one projection's weight [N, K] in float32."""
        scales = tensors["scale"].float() * self._multiplier(tensors)
        return scale_groups(e2m1_values(tensors["weight"]), scales)

    def _multiplier(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """[] or [1] float32."""
        stored = tensors["global_scale"]
        return stored if self.writer is Nvfp4Writer.MODELOPT else stored.reciprocal()


def quantize_nvfp4(weight: Tensor) -> QuantizedTensor:
    """One projection [N, K] of any float dtype as NVFP4 (E = 1), K a multiple of 16.

    The float32 scale brings the largest magnitude to 6 * 448, so that the scales of 16 columns,
    their largest magnitude over 6, use all of e4m3; codes are the nearest. Raises ValueError for
    weights that are NaN or infinite, and where 16 does not divide K. Takes about 16 bytes a weight.
    """
    if weight.shape[1] % NVFP4_GROUP:
        raise ValueError(
            f"NVFP4 has a scale for every {NVFP4_GROUP} columns, and these weights have "
            f"{weight.shape[1]}; give a multiple"
        )
    groups = weight.float().unflatten(1, (-1, NVFP4_GROUP))
    largest = groups.abs().amax(dim=2)
    if not bool(torch.isfinite(largest).all()):
        raise ValueError("weights that are NaN or infinite have no NVFP4 form")
    global_scale = largest.max() / (E2M1_VALUES[7] * MAX_E4M3)
    if not bool(global_scale > 0):
        global_scale = torch.ones_like(global_scale)
    of_groups = (largest / E2M1_VALUES[7] / global_scale).clamp(max=MAX_E4M3)
    scales = of_groups.to(torch.float8_e4m3fn)
    divisors = (scales.float() * global_scale).unsqueeze(2)
    codes = e2m1_codes(torch.where(divisors > 0, groups / divisors, 0.0)).flatten(1)
    parameters = QuantParameters(scales[None], global_scales=global_scale.reshape(1, 1))
    return QuantizedTensor(pack_pairs(codes)[None], parameters, QuantScheme(WeightScheme.NVFP4))


def dequantize_nvfp4(weight: QuantizedTensor, num_parts: int = 1) -> Tensor:
    """The weight [E, N, K] in float32. num_parts: as many global scales as there are."""
    scales, global_scales = weight.parameters.scales.float(), weight.parameters.global_scales
    if global_scales is None or global_scales.shape[1] != num_parts:
        found = None if global_scales is None else list(global_scales.shape)
        raise ValueError(f"nvfp4 weights of {num_parts} parts have global scales {found}")
    of_rows = global_scales.repeat_interleave(scales.shape[1] // num_parts, dim=1)
    return scale_groups(e2m1_values(weight.values), scales * of_rows.unsqueeze(-1))


def read_modelopt(values: Mapping[str, Any]) -> Nvfp4Format:
    """Of a quantization_config with `quant_method: modelopt`.

    ConfigError: another algorithm, among them those that scale activations (NVFP4_AWQ).
    """
    settings = QuantizationSettings(values)
    settings.choice("quant_algo", ("NVFP4", "W4A16_NVFP4"), cure="quantise again as NVFP4")
    groups = settings.section("config_groups")
    for name in settings.get("config_groups", {}):
        groups.section(name).section("weights").choice(
            "group_size", (NVFP4_GROUP,), default=NVFP4_GROUP, cure="quantise again in blocks of 16"
        )
    return Nvfp4Format(Nvfp4Writer.MODELOPT)


def read_compressed_nvfp4(group: Mapping[str, Any]) -> Nvfp4Format:
    """Of one of compressed-tensors' `config_groups`, whose path a ConfigError's key is under."""
    weights = QuantizationSettings(group, path="").section("weights")
    weights.choice("num_bits", (4,), cure="quantise again as NVFP4A16")
    weights.choice("type", ("float",), cure="quantise again as NVFP4A16")
    weights.choice("group_size", (NVFP4_GROUP,), cure="quantise again as NVFP4A16")
    weights.choice("symmetric", (True,), default=True, cure="quantise again as NVFP4A16")
    return Nvfp4Format(Nvfp4Writer.COMPRESSED_TENSORS)
