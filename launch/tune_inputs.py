"""Random layers and routed rows for `ep-runtime tune`, and what is right for them.

Shapes: S rows routed on all ranks, R of which land here, K slots a row, N = R * K slots, H hidden
size, I intermediate size, E local experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import ExpertsShape, ExpertWeights, StandardExpertInput
from ep_runtime.kernels.grouped_gemm import GemmRows
from ep_runtime.kernels.quant.dequantize import dequantize_expert
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, quantize_rows_reference
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.quant.storage import (
    PARAMETER_NAMES,
    empty_stored,
    stored_shapes,
    tensors_of,
)
from ep_runtime.launch.seeded_stored import draw_stored


def draw_rows(
    shape: ExpertsShape, num_source_rows: int, generator: torch.Generator
) -> StandardExpertInput:
    """Rows with K different experts each, of which those with a local one land; at least one.

    Values are normal, and router weights between 0.1 and 1.1.
    """
    device, num_local = generator.device, shape.num_local_experts
    num_experts = shape.num_experts or num_local
    scores = torch.rand(num_source_rows, num_experts, generator=generator, device=device)
    ids = scores.topk(shape.top_k, dim=-1).indices.to(torch.int32)
    landed = (ids < num_local).any(dim=-1)
    if not bool(landed.any()):
        ids[0, 0], landed[0] = 0, True
    ids = ids[landed]
    size = (len(ids), shape.hidden_size)
    rows = torch.randn(size, generator=generator, device=device).to(shape.dtype)
    weights = torch.rand(ids.shape, generator=generator, device=device) + 0.1
    local_ids = torch.where(ids < num_local, ids, -1).contiguous()
    return StandardExpertInput(rows, local_ids, weights, num_source_rows=num_source_rows)


def draw_weights(shape: ExpertsShape, generator: torch.Generator) -> ExpertWeights:
    """Random weights as the scheme stores them, of a size that keeps activations near 1."""
    num_parts = 2 if shape.activation.is_gated else 1
    inner, hidden = shape.intermediate_size, shape.hidden_size
    w13, w13_quant = _draw_projection(shape, num_parts * inner, hidden, num_parts, generator)
    w2, w2_quant = _draw_projection(shape, hidden, inner, 1, generator)
    return ExpertWeights(w13, w2, w13_quant=w13_quant, w2_quant=w2_quant)


def _draw_projection(
    shape: ExpertsShape, rows: int, columns: int, num_parts: int, generator: torch.Generator
) -> tuple[Tensor, QuantParameters | None]:
    num_experts, device, scheme = shape.num_local_experts, generator.device, shape.scheme
    if not scheme.is_quantised:
        values = torch.empty((num_experts, rows, columns), dtype=shape.dtype, device=device)
        for expert in range(num_experts):
            normal = torch.randn((rows, columns), generator=generator, device=device)
            values[expert] = normal * columns**-0.5
        return values, None
    stored = stored_shapes(scheme, rows, columns, num_parts=num_parts, dtype=shape.dtype)
    tensors = empty_stored(stored, num_experts, device)
    for expert in range(num_experts):
        one = draw_stored(
            scheme, rows, columns, num_parts=num_parts, dtype=shape.dtype, generator=generator
        )
        for name, tensor in tensors_of(one).items():
            tensors[name][expert].copy_(tensor[0])
    named = {name: tensors[name] for name in PARAMETER_NAMES if name in tensors}
    return tensors["values"], QuantParameters(**named)


def draw_activated(shape: ExpertsShape, num_slots: int, generator: torch.Generator) -> GemmRows:
    """What the second projection might be given, [N, I] by slot, as the first would leave it."""
    size, device = (num_slots, shape.intermediate_size), generator.device
    values = torch.randn(size, generator=generator, device=device).to(shape.dtype)
    return as_operand(values, shape)


def as_operand(rows: Tensor, shape: ExpertsShape) -> GemmRows:
    """Rows as the scheme's arithmetic takes them: of fp8 weights quantised."""
    if not multiplies_fp8(shape):
        return GemmRows(rows)
    return GemmRows(*quantize_rows_reference(rows))


def multiplies_fp8(shape: ExpertsShape) -> bool:
    """Whether the scheme's products are of e4m3 values."""
    return shape.scheme.is_quantised and not is_packed(shape.scheme)


def as_float32(rows: GemmRows) -> Tensor:
    if rows.scales is None:
        return rows.values.float()
    return dequantize_rows(rows.values, rows.scales, torch.float32)


@dataclass(frozen=True)
class Expected:
    """Right results by slot, float32, of slots without a local expert 0.

    gate_up: [N, I]. down: [N, H] of the activated rows given, with router weights. whole: [N, H] of
    both projections. is_local: [N] bool.
    """

    gate_up: Tensor
    down: Tensor
    whole: Tensor
    is_local: Tensor


def expect(
    shape: ExpertsShape,
    expert_input: StandardExpertInput,
    weights: ExpertWeights,
    activated: GemmRows,
) -> Expected:
    """Expert by expert in float32 from the operands as they are stored. Waits for the device."""
    ids = expert_input.topk_ids.flatten()
    slot_weights = expert_input.topk_weights.flatten()
    rows = as_float32(as_operand(expert_input.hidden_states, shape))
    given = as_float32(activated)
    num_parts = 2 if shape.activation.is_gated else 1
    gate_up = torch.zeros(len(ids), shape.intermediate_size, device=ids.device)
    down = torch.zeros(len(ids), shape.hidden_size, device=ids.device)
    whole = torch.zeros_like(down)
    for expert in range(shape.num_local_experts):
        slots = (ids == expert).nonzero().flatten()
        if not len(slots):
            continue
        w13, w2 = (
            dequantize_expert(values, quant, shape.scheme, expert=expert, num_parts=parts)
            for values, quant, parts in (
                (weights.w13, weights.w13_quant, num_parts),
                (weights.w2, weights.w2_quant, 1),
            )
        )
        gate_up[slots] = apply_activation(rows[slots // shape.top_k] @ w13.T, shape.activation)
        weighted = slot_weights[slots, None]
        down[slots] = given[slots] @ w2.T * weighted
        whole[slots] = gate_up[slots] @ w2.T * weighted
    return Expected(gate_up, down, whole, ids >= 0)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, the larger of all rows' and of the worst row; NaN stays."""
    difference = (actual.float() - expected).norm(dim=-1)
    norms = expected.norm(dim=-1)
    total = difference.norm() / norms.norm()
    # A row may be rounded twice as badly as all together.
    worst = (difference / norms.clamp_min(1e-30)).max() / 2
    return float(torch.stack([total, worst]).max())
