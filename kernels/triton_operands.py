"""The operands of the Triton experts' two projections: how they are laid out, and what they take.

Shapes: R rows, H hidden size, P padded positions, I intermediate size.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights
from ep_runtime.kernels.devices import TMA_ALIGNMENT
from ep_runtime.kernels.grouped_gemm import GemmRows
from ep_runtime.kernels.quant.fp8_rows import quantize_rows
from ep_runtime.kernels.quant.packed_weights import (
    PACKED_SCHEMES,
    is_packed,
    pack_weight,
    packed_layout,
)
from ep_runtime.kernels.quant.scheme import (
    FP8_GROUP,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

# How weights may be stored that the Triton experts take.
TRITON_SCHEMES = PACKED_SCHEMES | {
    WeightScheme.NONE,
    WeightScheme.FP8_BLOCK,
    WeightScheme.FP8_CHANNEL,
}
_FP8 = torch.float8_e4m3fn


def prepare_triton_weights(weights: ExpertWeights) -> ExpertWeights:
    """Weights whose rows TMA can read, biases and scales contiguous; copies only what is not so.

    Padded rows have the width asked for and a stride that is a multiple of TMA_ALIGNMENT bytes.
    """

    quants = [
        None if quant is None else replace(quant, scales=quant.scales.contiguous())
        for quant in (weights.w13_quant, weights.w2_quant)
    ]
    return ExpertWeights(
        w13=_with_aligned_rows(weights.w13),
        w2=_with_aligned_rows(weights.w2),
        w13_bias=_dense(weights.w13_bias),
        w2_bias=_dense(weights.w2_bias),
        w13_quant=quants[0],
        w2_quant=quants[1],
    )


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def pack_triton_weights(weights: ExpertWeights, scheme: QuantScheme) -> ExpertWeights:
    """Weights of a packed scheme as kernels/packed_gemm.py reads them; copies all but dense biases.

    ValueError for a scheme without a packed layout, and for weights without scales.
    """
    layout = packed_layout(scheme)

    def packed(values: Tensor, quant: QuantParameters | None) -> tuple[Tensor, QuantParameters]:
        if quant is None:
            raise ValueError(f"weights stored as {scheme.weight} were given without scales")
        return pack_weight(values, quant, layout)

    w13, w13_quant = packed(weights.w13, weights.w13_quant)
    w2, w2_quant = packed(weights.w2, weights.w2_quant)
    return ExpertWeights(
        w13=w13,
        w2=w2,
        w13_bias=_dense(weights.w13_bias),
        w2_bias=_dense(weights.w2_bias),
        w13_quant=w13_quant,
        w2_quant=w2_quant,
    )


def _with_aligned_rows(values: Tensor) -> Tensor:
    num_experts, num_rows, num_columns = values.shape
    row_bytes = values.stride(1) * values.dtype.itemsize
    is_dense = values.stride(2) == 1 and values.stride(0) == num_rows * values.stride(1)
    if is_dense and row_bytes % TMA_ALIGNMENT == 0 and values.data_ptr() % TMA_ALIGNMENT == 0:
        return values
    width = _aligned_columns(num_columns, values.dtype)
    copy = values.new_empty((num_experts, num_rows, width))
    copy[:, :, :num_columns] = values
    return copy[:, :, :num_columns]


def _aligned_columns(num_columns: int, dtype: torch.dtype) -> int:
    per_unit = TMA_ALIGNMENT // dtype.itemsize
    return -(-num_columns // per_unit) * per_unit


def _is_fp8(scheme: QuantScheme) -> bool:
    """Whether products are of e4m3 rows and weights; packed weights meet rows of the layer's."""
    return scheme.is_quantised and not is_packed(scheme)


def rows_for(rows: GemmRows, shape: ExpertsShape, workspace: Workspace) -> GemmRows:
    """The rows as the scheme's arithmetic wants them: of fp8 weights quantised, one launch."""
    if not _is_fp8(shape.scheme) or rows.scales is not None:
        return rows
    num_rows, hidden_size = rows.values.shape
    values = workspace.take((num_rows, hidden_size), _FP8)
    scales = workspace.take((num_rows, -(-hidden_size // FP8_GROUP)), torch.float32)
    quantize_rows(rows.values, out_values=values, out_scales=scales)
    return GemmRows(values, scales)


def quantised_rows_bytes(num_rows: int, shape: ExpertsShape) -> int:
    """What `rows_for` takes at most."""
    if not _is_fp8(shape.scheme):
        return 0
    groups = -(-shape.hidden_size // FP8_GROUP)
    return aligned_bytes(num_rows * shape.hidden_size) + aligned_bytes(4 * num_rows * groups)


def take_activated(num_positions: int, shape: ExpertsShape, workspace: Workspace) -> GemmRows:
    """Room for the first projection's result [P, I]; of fp8 weights quantised."""
    dtype = _FP8 if _is_fp8(shape.scheme) else shape.dtype
    width = _aligned_columns(shape.intermediate_size, dtype)
    values = workspace.take((num_positions, width), dtype)[:, : shape.intermediate_size]
    if not _is_fp8(shape.scheme):
        return GemmRows(values)
    groups = -(-shape.intermediate_size // FP8_GROUP)
    return GemmRows(values, workspace.take((num_positions, groups), torch.float32))


def activated_bytes(num_positions: int, shape: ExpertsShape) -> int:
    """What `take_activated` takes; never less for more positions."""
    dtype = _FP8 if _is_fp8(shape.scheme) else shape.dtype
    width = _aligned_columns(shape.intermediate_size, dtype)
    num_bytes = aligned_bytes(num_positions * width * dtype.itemsize)
    if _is_fp8(shape.scheme):
        num_bytes += aligned_bytes(4 * num_positions * -(-shape.intermediate_size // FP8_GROUP))
    return num_bytes
