"""The experts benchmark's tensors: weights, rows with their routing, and the float32 reference.

Shapes: R rows, K slots a row, H hidden size, I intermediate size, E local experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experts_cells import Cell, LayerShape
from benchmarks.experts_quantise import PACKED_SCHEMES, packed_weights
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.dequantize import dequantize_expert
from ep_runtime.kernels.quant.scheme import FP8_GROUP, MAX_E4M3, QuantParameters

# Largest relative Frobenius error of a right result, over all rows and over any single one. Both
# activations are rounded to the scheme's type on the way: e4m3 gives about 0.037, bf16 0.004.
# With packed weights they are bf16.
ERROR_LIMITS = {"bf16": (0.01, 0.02), "fp8_block": (0.06, 0.12)} | dict.fromkeys(
    PACKED_SCHEMES, (0.01, 0.02)
)


@dataclass(frozen=True)
class RoutedRows:
    """One set of rows as they landed.

    hidden_states: [R, H] bf16. global_ids: [R, K] int32 in [0, num_experts). local_ids: [R, K]
    int32, -1 where the expert is another rank's. topk_weights: [R, K] float32, a row's sum is 1.
    """

    hidden_states: Tensor
    global_ids: Tensor
    local_ids: Tensor
    topk_weights: Tensor

    @property
    def num_pairs(self) -> int:
        return int((self.local_ids >= 0).sum())

    @property
    def num_active_experts(self) -> int:
        return int(self.local_ids[self.local_ids >= 0].unique().numel())


def make_rows(cell: Cell, index: int, device: torch.device) -> RoutedRows:
    """Input set `index`: the same numbers in every process on the same kind of device."""
    shape, num_tokens = cell.shape, cell.tokens_per_rank
    generator = torch.Generator(device=device).manual_seed(1000 * num_tokens + index)
    random: Callable[..., Tensor] = _on(torch.rand, generator, device)
    num_choices, num_local = shape.num_experts, shape.num_local_experts
    if cell.table.routing == "local":
        num_choices = num_local
    else:
        num_tokens *= shape.ep_size
    ids = random(num_tokens, num_choices).topk(shape.top_k, dim=-1).indices.to(torch.int32)
    weights = random(num_tokens, shape.top_k) + 0.1
    weights /= weights.sum(dim=-1, keepdim=True)
    landed = (ids < num_local).any(dim=-1)
    ids, weights = ids[landed].contiguous(), weights[landed].contiguous()
    normal = _on(torch.randn, generator, device)
    return RoutedRows(
        hidden_states=normal(ids.shape[0], shape.hidden_size).bfloat16(),
        global_ids=ids,
        local_ids=torch.where(ids < num_local, ids, -1),
        topk_weights=weights,
    )


def _on(
    source: Callable[..., Tensor], generator: torch.Generator, device: torch.device
) -> Callable[..., Tensor]:
    def draw(*size: int) -> Tensor:
        return source(*size, generator=generator, device=device)

    return draw


def make_weights(
    shape: LayerShape, scheme: str, *, seed: int, device: torch.device, is_filled: bool = True
) -> ExpertWeights:
    """Random weights of a size that keeps activations near 1; no numbers to speak of if not filled.

    Packed schemes round the same weights, whichever it is.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    size_i, size_h = shape.intermediate_size, shape.hidden_size
    if scheme in PACKED_SCHEMES:

        def draw(rows: int, columns: int) -> Tensor:
            normal = torch.randn(rows, columns, generator=generator, device=device)
            return normal.mul_(columns**-0.5)

        sizes = shape.num_local_experts, size_h, size_i
        return packed_weights(sizes, scheme, draw if is_filled else None, device)
    parts: list[dict[str, Any]] = []
    for rows, columns, num_halves in ((2 * size_i, size_h, 2), (size_h, size_i, 1)):
        dtype = torch.bfloat16 if scheme == "bf16" else torch.float8_e4m3fn
        size = shape.num_local_experts, rows, columns
        values = torch.empty(size, dtype=dtype, device=device)
        quant = None
        if scheme != "bf16":
            row_blocks = num_halves * -(-(rows // num_halves) // FP8_GROUP)
            blocks = shape.num_local_experts, row_blocks, -(-columns // FP8_GROUP)
            scales = 0.5 + torch.rand(blocks, generator=generator, device=device)
            quant = QuantParameters(scales=scales / (64 * columns**0.5))
        for expert in range(shape.num_local_experts if is_filled else 0):
            normal = torch.randn(rows, columns, generator=generator, device=device)
            if scheme == "bf16":
                values[expert] = normal * columns**-0.5
            else:
                values[expert] = (normal * 64).clamp(-MAX_E4M3, MAX_E4M3).to(dtype)
        parts.append({"values": values, "quant": quant})
    return ExpertWeights(
        w13=parts[0]["values"],
        w2=parts[1]["values"],
        w13_quant=parts[0]["quant"],
        w2_quant=parts[1]["quant"],
    )


def dequantise(weights: ExpertWeights, scheme: str, expert: int) -> tuple[Tensor, Tensor]:
    """One expert's w13 [2I, H] and w2 [H, I] in float32."""
    if scheme in PACKED_SCHEMES:
        of_scheme = partial(dequantize_expert, scheme=PACKED_SCHEMES[scheme], expert=expert)
        return (
            of_scheme(weights.w13, weights.w13_quant, num_parts=2),
            of_scheme(weights.w2, weights.w2_quant, num_parts=1),
        )
    return (
        _dequantise(weights.w13[expert], weights.w13_quant, expert, num_halves=2),
        _dequantise(weights.w2[expert], weights.w2_quant, expert, num_halves=1),
    )


def _dequantise(
    values: Tensor, quant: QuantParameters | None, expert: int, *, num_halves: int
) -> Tensor:
    """Gate and up have blocks of their own; a block at an edge may be cut off."""
    if quant is None:
        return values.float()
    halves = values.float().chunk(num_halves), quant.scales[expert].chunk(num_halves)
    scaled = []
    for half, scales in zip(*halves, strict=True):
        of_rows = scales.repeat_interleave(FP8_GROUP, dim=0)[: half.shape[0]]
        scaled.append(half * of_rows.repeat_interleave(FP8_GROUP, dim=1)[:, : half.shape[1]])
    return torch.cat(scaled)


def reference(
    rows: RoutedRows, weights: ExpertWeights, scheme: str, *, up_shift: float = 0.0
) -> Tensor:
    """[R, H] float32: the weighted sum over each row's local slots of w2 @ (silu(gate) * up).

    up_shift: added to `up`, for an implementation whose gated activation is defined so.
    """
    output = torch.zeros_like(rows.hidden_states, dtype=torch.float32)
    for expert in rows.local_ids.unique().tolist():
        if expert < 0:
            continue
        w13, w2 = dequantise(weights, scheme, expert)
        row, slot = (rows.local_ids == expert).nonzero(as_tuple=True)
        gate, up = (rows.hidden_states[row].float() @ w13.T).chunk(2, dim=-1)
        result = (F.silu(gate) * (up + up_shift)) @ w2.T
        output.index_add_(0, row, result * rows.topk_weights[row, slot, None])
    return output


@dataclass(frozen=True)
class Error:
    """Relative Frobenius errors: of the whole result, and of its worst row."""

    total: float
    worst_row: float

    def is_within(self, scheme: str) -> bool:
        """False for NaN too."""
        most, most_of_row = ERROR_LIMITS[scheme]
        return self.total <= most and self.worst_row <= most_of_row


def error_of(actual: Tensor, expected: Tensor) -> Error:
    """Of [R, H] against a float32 reference none of whose rows is 0."""
    difference = actual.float() - expected
    of_rows = difference.norm(dim=-1) / expected.norm(dim=-1)
    return Error(
        total=float(difference.norm() / expected.norm()),
        worst_row=float(of_rows.max()) if len(of_rows) else 0.0,
    )


def worst(errors: Sequence[Error]) -> Error:
    """The largest of each; NaN if any is."""
    totals = torch.tensor([error.total for error in errors])
    rows = torch.tensor([error.worst_row for error in errors])
    return Error(float(totals.max()), float(rows.max()))
