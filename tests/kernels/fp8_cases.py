"""Experts in fp8 by blocks, and their answer on rows and activations that are quantised too."""

from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

import torch
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import (
    BatchedExpertInput,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.quant.dequantize import dequantize_expert
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, quantize_rows_reference
from ep_runtime.kernels.quant.scheme import (
    FP8_GROUP,
    MAX_E4M3,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from tests.kernels.cases import ExpertsCase

FP8_BLOCK = QuantScheme(WeightScheme.FP8_BLOCK)


def quantize_fp8(weight: Tensor, scheme: QuantScheme, num_parts: int) -> QuantizedTensor:
    """[E, N, K] to the nearest e4m3 under scales that bring each block's (row's) largest to 448.

    A block of zeros has scale 1. num_parts: 2 of a gated w13, whose parts keep their blocks apart.
    """
    num_experts, rows, columns = weight.shape
    parts = weight.float().reshape(num_experts * num_parts, rows // num_parts, columns)
    if scheme.weight is WeightScheme.FP8_CHANNEL:
        scales = _scale_of(parts.abs().amax(dim=2))
        values = parts / scales[:, :, None]
    else:
        part_rows = parts.shape[1]
        row_blocks, column_blocks = ceil(part_rows / FP8_GROUP), ceil(columns / FP8_GROUP)
        padded = parts.new_zeros(len(parts), row_blocks * FP8_GROUP, column_blocks * FP8_GROUP)
        padded[:, :part_rows, :columns] = parts
        blocks = padded.view(len(parts), row_blocks, FP8_GROUP, column_blocks, FP8_GROUP)
        scales = _scale_of(blocks.abs().amax(dim=(2, 4)))
        values = (blocks / scales[:, :, None, :, None]).view_as(padded)[:, :part_rows, :columns]
    stored = values.clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
    return QuantizedTensor(
        stored.reshape(num_experts, rows, columns),
        QuantParameters(scales.reshape(num_experts, -1, *scales.shape[2:])),
        scheme,
    )


def _scale_of(largest: Tensor) -> Tensor:
    return torch.where(largest > 0, largest / MAX_E4M3, 1.0)


@dataclass(frozen=True)
class Fp8Case(ExpertsCase):
    """An experts layer whose weights are e4m3 with a scale for every block."""

    intermediate_size: int = 128
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return self.name  # a dataclass writes its own

    @property
    def shape(self) -> ExpertsShape:
        return replace(super().shape, scheme=FP8_BLOCK)

    def weights(self, device: torch.device) -> ExpertWeights:
        plain = super().weights(device)
        num_parts = 2 if self.shape.activation.is_gated else 1
        w13 = quantize_fp8(plain.w13.float(), FP8_BLOCK, num_parts)
        w2 = quantize_fp8(plain.w2.float(), FP8_BLOCK, 1)
        return ExpertWeights(
            w13.values, w2.values, w13_quant=w13.parameters, w2_quant=w2.parameters
        )


Input = TypeVar("Input", StandardExpertInput, BatchedExpertInput)


def with_fp8_rows(expert_input: Input) -> Input:
    """The same rows as dispatch sends them in fp8; NaN stays NaN."""
    rows = expert_input.hidden_states
    values, scales = quantize_rows_reference(rows.flatten(0, -2))
    return replace(
        expert_input,
        hidden_states=values.view(rows.shape),
        scales=scales.view(*rows.shape[:-1], -1),
    )


def fp8_expert(rows: Tensor, weights: ExpertWeights, expert: int, case: Fp8Case) -> Tensor:
    """One expert on [n, H] rows, rounded as deep_gemm rounds: float32 [n, H].

    Rows and activations are quantised; what the first projection gives is bfloat16.
    """
    num_parts = 2 if case.shape.activation.is_gated else 1

    def weight(values: Tensor, quant: QuantParameters | None, num_parts: int) -> Tensor:
        return dequantize_expert(values, quant, FP8_BLOCK, expert=expert, num_parts=num_parts)

    def quantised(x: Tensor) -> Tensor:
        return dequantize_rows(*quantize_rows_reference(x), torch.float32)

    projected = quantised(rows) @ weight(weights.w13, weights.w13_quant, num_parts).T
    projected = projected.bfloat16().float()
    activated = apply_activation(projected, case.shape.activation)
    return quantised(activated) @ weight(weights.w2, weights.w2_quant, 1).T


def fp8_experts(expert_input: StandardExpertInput, weights: ExpertWeights, case: Fp8Case) -> Tensor:
    """The weighted sum over each row's slots: [R, H] float32, 0 past num_rows. Rows are exact."""
    rows, ids = expert_input.hidden_states.float(), expert_input.topk_ids
    num_rows = len(ids) if expert_input.num_rows is None else int(expert_input.num_rows)
    result = torch.zeros_like(rows)
    for expert in range(len(weights.w13)):
        is_its = (ids == expert) & (torch.arange(len(ids), device=ids.device) < num_rows)[:, None]
        its_weights = torch.where(is_its, expert_input.topk_weights, 0.0).sum(dim=1)
        its_rows = is_its.any(dim=1)
        outputs = fp8_expert(rows[its_rows], weights, expert, case)
        result[its_rows] += its_weights[its_rows, None] * outputs
    return result
