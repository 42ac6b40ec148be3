"""Layers with quantised weights, for the packed kernels' tests."""

from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.scheme import (
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.storage import quantized_tensor, stored_shapes
from tests.kernels.cases import ExpertsCase


@dataclass(frozen=True)
class PackedCase:
    """A layer, and how its weights are quantised."""

    name: str
    case: ExpertsCase
    scheme: QuantScheme

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> ExpertsShape:
        return replace(self.case.shape, scheme=self.scheme)

    @property
    def num_parts(self) -> int:
        return 2 if self.case.shape.activation.is_gated else 1

    def quantized(
        self, num_rows: int, num_columns: int, device: torch.device, num_parts: int = 1
    ) -> QuantizedTensor:
        """One projection of all experts, drawn so that its weights have about unit columns."""
        case = self.case
        generator = torch.Generator().manual_seed(num_rows + case.seed)
        shapes = stored_shapes(
            self.scheme, num_rows, num_columns, num_parts=num_parts, dtype=case.dtype
        )

        def draw(name: str) -> Tensor:
            size = (case.num_experts, *shapes[name].shape)
            if name == "global_scales":
                return (0.5 + torch.rand(size, generator=generator)) / (16 * sqrt(num_columns))
            if self.scheme.weight is WeightScheme.NVFP4 and name == "scales":
                return torch.rand(size, generator=generator) * 8
            if name != "scales":
                is_nibble = name == "zero_points" and self.scheme.weight is WeightScheme.INT4
                return torch.randint(0, 16 if is_nibble else 256, size, generator=generator)
            if self.scheme.weight is WeightScheme.MXFP4:  # 2^-7 to 2^-3
                return torch.randint(120, 125, size, generator=generator)
            spread = 64 if self.scheme.weight is WeightScheme.INT8 else 4
            uniform = torch.rand(size, generator=generator)
            return (uniform + 0.5) / (spread * sqrt(num_columns))

        drawn = {name: draw(name).to(device, one.dtype) for name, one in shapes.items()}
        return quantized_tensor(drawn, self.scheme)

    def weights(self, device: torch.device) -> ExpertWeights:
        """As a layer stores them."""
        case = self.case
        parts, width = self.num_parts, case.intermediate_size
        w13 = self.quantized(parts * width, case.hidden_size, device, parts)
        w2 = self.quantized(case.hidden_size, case.intermediate_size, device)
        return replace(
            case.weights(device),
            w13=w13.values,
            w2=w2.values,
            w13_quant=w13.parameters,
            w2_quant=w2.parameters,
        )

    def dequantized(self, weights: ExpertWeights) -> ExpertWeights:
        """In float32, without quantisation."""

        def plain(values: Tensor, quant: QuantParameters | None, num_parts: int) -> Tensor:
            assert quant is not None
            return dequantize(QuantizedTensor(values, quant, self.scheme), num_parts)

        return replace(
            weights,
            w13=plain(weights.w13, weights.w13_quant, self.num_parts),
            w2=plain(weights.w2, weights.w2_quant, 1),
            w13_quant=None,
            w2_quant=None,
        )


def int4(group_size: int | None = 128, *, has_zero_points: bool = False) -> QuantScheme:
    return QuantScheme(WeightScheme.INT4, group_size, has_zero_points)


def int8(group_size: int | None = 128, *, has_zero_points: bool = False) -> QuantScheme:
    return QuantScheme(WeightScheme.INT8, group_size, has_zero_points)


MXFP4 = QuantScheme(WeightScheme.MXFP4)
NVFP4 = QuantScheme(WeightScheme.NVFP4)
