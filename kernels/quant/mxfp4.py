"""MXFP4: e2m1 values and a ue8m0 scale for every 32 columns.

N output rows, K input columns. gpt-oss stores all experts of a layer in one tensor,

    gate_up_proj_blocks, down_proj_blocks  uint8 [E, N, K / 32, 16]  the even column in a low nibble
    gate_up_proj_scales, down_proj_scales  uint8 [E, N, K / 32]      s stands for 2^(s - 127)

with gate_up_proj's rows alternating between gate and up. compressed-tensors' `mxfp4-pack-quantized`
stores each linear layer by itself, `weight_packed` uint8 [N, K / 2] and `weight_scale` uint8
[N, K / 32], with the same bytes in them.

    weight[n, k] = e2m1(code[n, k]) * 2^(scale[n, k // 32] - 127)

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3, 5.4.1 and 6.3 (255 is NaN);
transformers, integrations/mxfp4.py (`convert_moe_packed_tensors`); compressed-tensors 0.18.0,
compressors/mxfp4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.e2m1 import e2m1_values, scale_groups
from ep_runtime.kernels.quant.format import (
    Projection,
    StoredTensor,
    WeightFormat,
    check_finite,
)
from ep_runtime.kernels.quant.scheme import (
    MXFP4_GROUP,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.settings import QuantizationSettings

_UINT8 = frozenset({torch.uint8})


@dataclass(frozen=True)
class Mxfp4Format(WeightFormat):
    """Either spelling; which of them it is follows from whether the tensors are fused."""

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(WeightScheme.MXFP4)

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        rows, columns = projection.rows, projection.columns
        return {
            "blocks": StoredTensor((".weight_packed",), ((rows, columns // 2),), _UINT8),
            "scales": StoredTensor((".weight_scale",), ((rows, columns // MXFP4_GROUP),), _UINT8),
        }

    def stored_fused(
        self, num_experts: int, projection: Projection
    ) -> Mapping[str, StoredTensor] | None:
        shape = num_experts, projection.rows, projection.columns // MXFP4_GROUP
        return {
            "blocks": StoredTensor(("_blocks",), ((*shape, MXFP4_GROUP // 2),), _UINT8),
            "scales": StoredTensor(("_scales",), (shape,), _UINT8),
        }

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        check_finite("scales", tensors["scales"].view(torch.float8_e8m0fnu))
        blocks = tensors["blocks"].reshape(1, projection.rows, projection.columns // 2)
        return QuantizedTensor(blocks, QuantParameters(tensors["scales"][None]), self.scheme)

    def dequantize(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor:
        """The definition: one projection's weight [N, K] in float32."""
        blocks = tensors["blocks"].reshape(projection.rows, projection.columns // 2)
        return _weight(blocks, tensors["scales"])


def dequantize_mxfp4(weight: QuantizedTensor, num_parts: int = 1) -> Tensor:
    """The weight [E, N, K] in float32. num_parts: of no effect here."""
    return _weight(weight.values, weight.parameters.scales)


def _weight(pairs: Tensor, scales: Tensor) -> Tensor:
    """pairs: [..., K / 2] and scales: [..., K / 32], both uint8."""
    return scale_groups(e2m1_values(pairs), scales.view(torch.float8_e8m0fnu).float())


def read_mxfp4(values: Mapping[str, Any]) -> Mxfp4Format:
    """Of a quantization_config with `quant_method: mxfp4`, which has no settings."""
    return Mxfp4Format()


def read_compressed_mxfp4(group: Mapping[str, Any]) -> Mxfp4Format:
    """Of one of compressed-tensors' `config_groups`, whose path a ConfigError's key is under.

    Activations in MXFP4, where they are to be quantised, are not: they stay as they are.
    """
    weights = QuantizationSettings(group, path="").section("weights")
    weights.choice("num_bits", (4,), cure="quantise again as MXFP4A16")
    weights.choice("type", ("float",), cure="quantise again as MXFP4A16")
    weights.choice("group_size", (MXFP4_GROUP,), cure="quantise again as MXFP4A16")
    weights.choice("symmetric", (True,), default=True, cure="quantise again as MXFP4A16")
    return Mxfp4Format()
