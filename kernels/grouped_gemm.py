"""The two projections of all local experts, one launch each, over tiles of aligned slots.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, I intermediate size, E local experts,
P padded positions (`AlignedSlots`): tile t is positions [t * block_m, (t + 1) * block_m), all of
one expert; slot s belongs to row s // K. Batched rows [E, capacity, H] are taken as
[E * capacity, H] with K = 1: there slot and row are one.

A launch works through items, an item being one tile and one block of output columns. They are
dealt out round robin to a fixed number of programs, in an order in which those that run at the same
time share rows and weights (`item_at`). The weights come through TMA; rows are gathered by slot in
the first projection, and lie in expert order, so come through TMA, in the second.

With few rows a tile the product is transposed (`GemmTiles.swap_operands`): the weights are the left
operand of the matrix unit, which wants 64 rows and takes them from shared memory as they arrived,
and 16 or 32 rows are the right one. That reaches the memory's rate where the ordinary order, which
takes small operands through registers, does not.

fp8: weights e4m3 with a scale for every 128 x 128 block or for every output row, rows e4m3 with a
scale for every 128 columns (kernels/quant/fp8_rows.py). The products of 128 columns are summed on
the matrix unit and added, scaled, in float32. The first projection leaves its result quantised.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import Activation, ExpertWeights
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, quantize_group
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.tiles import GemmTiles, num_programs


@dataclass(frozen=True)
class GemmRows:
    """The left operand of a projection.

    values: [R, H] of the first projection, any strides; [P, I] by position of the second, row-major
    with rows a multiple of TMA_ALIGNMENT bytes apart. scales: None, or of e4m3 values float32
    [R, ceil(H / 128)] or [P, ceil(I / 128)], any strides.
    """

    values: Tensor
    scales: Tensor | None = None


def project_gate_up(
    rows: GemmRows,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    top_k: int,
    activation: Activation,
    tiles: GemmTiles,
    out: GemmRows,
) -> None:
    """First projection with bias and activation: out[p] = act(w13[expert of p] @ row of p).

    weights: as `TritonExperts.prepare_weights` leaves them. top_k: K. out: [P, I], rows contiguous;
    padding and positions past the last tile stay unwritten; with scales it is quantised, for which
    tiles.block_n must be 128. Sums in float32, float32 products in IEEE precision. Work: 2 * slots
    * H * 2I FLOPs (half of it where not gated); reads each used expert's w13 at least once. Does
    not wait for the device.
    """
    prepare_launch(rows.values.device)
    intermediate_size, hidden_size = out.values.shape[1], rows.values.shape[1]
    bias, quant = weights.w13_bias, weights.w13_quant
    num_items = aligned.max_tiles * triton.cdiv(intermediate_size, tiles.block_n)
    grid = (num_programs(num_items, tiles, rows.values.device),)
    _project_gate_up_kernel[grid](
        aligned.slots,
        aligned.tile_experts,
        aligned.num_tiles,
        aligned.num_slots,
        top_k,
        rows.values,
        *rows.values.stride(),
        *_scale_arguments(rows),
        _weight_descriptor(weights.w13, tiles),
        weights.w13.shape[1],
        None if quant is None else quant.scales,
        bias,
        out.values,
        out.values.stride(0),
        *_scale_arguments(out),
        hidden_size,
        intermediate_size,
        activation.alpha,
        activation.limit,
        ACTIVATION=activation.kind.value,
        WEIGHT_SCALES=_weight_scales(quant),
        DEQUANTIZE_ROWS=rows.scales is not None and weights.w13_quant is None,
        BLOCK_M=aligned.block_m,
        **_tile_constants(tiles),
        **launch_options(rows.values.device),
    )


def project_gate_up_reference(
    rows: GemmRows,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    top_k: int,
    activation: Activation,
    out: Tensor,
) -> None:
    """The definition of `project_gate_up`, tile by tile, into an unquantised [P, I]. Waits.

    weights: unquantised.
    """
    values = _as_float32(rows)
    for positions, expert, slots in _tiles_of(aligned):
        projected = values[slots // top_k] @ weights.w13[expert].float().T
        if weights.w13_bias is not None:
            projected = projected + weights.w13_bias[expert].float()
        out[positions] = apply_activation(projected, activation).to(out.dtype)


def project_down(
    activated: GemmRows,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    slot_weights: Tensor | None,
    tiles: GemmTiles,
    out: Tensor,
) -> None:
    """Second projection with bias: out[slot of p] = its weight * (w2[p's expert] @ activated[p]).

    weights: as `TritonExperts.prepare_weights` leaves them. slot_weights: [N] float32 router
    weights, applied before the result is rounded, or None. out: [N, H], contiguous, by slot; slots
    without a local expert stay unwritten. Work: 2 * slots * I * H FLOPs. Does not wait for the
    device.
    """
    prepare_launch(activated.values.device)
    intermediate_size, hidden_size = activated.values.shape[1], out.shape[1]
    bias, quant = weights.w2_bias, weights.w2_quant
    num_items = aligned.max_tiles * triton.cdiv(hidden_size, tiles.block_n)
    grid = (num_programs(num_items, tiles, out.device),)
    _project_down_kernel[grid](
        aligned.slots,
        aligned.tile_experts,
        aligned.num_tiles,
        aligned.num_slots,
        TensorDescriptor.from_tensor(activated.values, [aligned.block_m, tiles.block_k]),
        *_scale_arguments(activated),
        _weight_descriptor(weights.w2, tiles),
        None if quant is None else quant.scales,
        bias,
        slot_weights,
        out,
        intermediate_size,
        hidden_size,
        WEIGHT_SCALES=_weight_scales(quant),
        BLOCK_M=aligned.block_m,
        **_tile_constants(tiles),
        **launch_options(out.device),
    )


def project_down_reference(
    activated: GemmRows,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    slot_weights: Tensor | None,
    out: Tensor,
) -> None:
    """The definition of `project_down`, tile by tile. Waits for the device.

    weights: unquantised.
    """
    values = _as_float32(activated)
    for positions, expert, slots in _tiles_of(aligned):
        raw = values[positions] @ weights.w2[expert].float().T
        if weights.w2_bias is not None:
            raw = raw + weights.w2_bias[expert].float()
        if slot_weights is not None:
            raw = raw * slot_weights[slots, None]
        out[slots] = raw.to(out.dtype)


def _as_float32(rows: GemmRows) -> Tensor:
    if rows.scales is None:
        return rows.values.float()
    return dequantize_rows(rows.values, rows.scales, torch.float32)


def _tiles_of(aligned: AlignedSlots) -> list[tuple[Tensor, int, Tensor]]:
    """Of each tile: its positions that hold a slot, its expert, and those slots. Waits."""
    tiles = []
    for tile, expert in enumerate(aligned.tile_experts[: int(aligned.num_tiles)].tolist()):
        first = tile * aligned.block_m
        slots = aligned.slots[first : first + aligned.block_m].long()
        is_slot = slots < aligned.num_slots
        tiles.append((first + is_slot.nonzero().flatten(), expert, slots[is_slot]))
    return tiles


def _scale_arguments(rows: GemmRows) -> tuple[Tensor | None, int, int]:
    """Pointer and strides of the rows' scales."""
    if rows.scales is None:
        return None, 0, 0
    return rows.scales, rows.scales.stride(0), rows.scales.stride(1)


def _weight_scales(quant: QuantParameters | None) -> str:
    """How the kernels scale a product: none | block | channel."""
    if quant is None:
        return "none"
    return "channel" if quant.scales.dim() == 2 else "block"


def _weight_descriptor(values: Tensor, tiles: GemmTiles) -> TensorDescriptor:
    """[E, rows, columns] as [E * rows, columns], read a block of tiles.block_n rows at a time."""
    num_experts, num_rows, num_columns = values.shape
    return TensorDescriptor(
        values,
        [num_experts * num_rows, num_columns],
        [values.stride(1), 1],
        [tiles.block_n, tiles.block_k],
    )


def _tile_constants(tiles: GemmTiles) -> dict[str, int | bool]:
    return {
        "SWAP_OPERANDS": tiles.swap_operands,
        "FLATTEN": tiles.flatten,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "GROUP_TILES": tiles.group_tiles,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


@triton.jit
def item_at(item, num_tiles, num_blocks, GROUP_TILES: tl.constexpr):
    """The tile and the block of columns of an item.

    GROUP_TILES tiles go through all blocks before the next tiles begin, block by block.
    Example: 3 tiles, 2 blocks, groups of 2: (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1).
    """
    items_per_group = GROUP_TILES * num_blocks
    first_tile = item // items_per_group * GROUP_TILES
    height = tl.minimum(num_tiles - first_tile, GROUP_TILES)
    within = item % items_per_group
    return first_tile + within % height, within // height


@triton.jit
def dot_rows(x, w, SWAP_OPERANDS: tl.constexpr):
    """x [M, K] @ w [N, K].T, or its transpose."""
    if SWAP_OPERANDS:
        return tl.dot(w, x.T, input_precision="ieee")
    else:
        return tl.dot(x, w.T, input_precision="ieee")


@triton.jit
def _multiply_add(x, w, total, SWAP_OPERANDS: tl.constexpr):
    if SWAP_OPERANDS:
        return tl.dot(w, x.T, total, input_precision="ieee")
    else:
        return tl.dot(x, w.T, total, input_precision="ieee")


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_OPERANDS: tl.constexpr):
    if SWAP_OPERANDS:
        return tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        return tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)


@triton.jit
def _by_row(scales, SWAP_OPERANDS: tl.constexpr):
    """A value for every row of x, shaped to multiply a product."""
    if SWAP_OPERANDS:
        return scales[None, :]
    else:
        return scales[:, None]


@triton.jit
def activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """`apply_activation` on float32 halves; comparisons are written so that a NaN stays one."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "swigluoai":
        if limit is not None:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1) * gate * tl.sigmoid(alpha * gate)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(gate < 0, 0.0, gate)
        return positive * positive


@triton.jit(do_not_specialize=["num_slots"])
def _project_gate_up_kernel(
    slots_ptr,  # [P]
    tile_experts_ptr,  # [max_tiles]
    num_tiles_ptr,  # [1]
    num_slots,
    top_k,
    x_ptr,  # [R, H]
    stride_x_row,
    stride_x_col,
    x_scales_ptr,  # [R, ceil(H / 128)] or None
    stride_x_scales_row,
    stride_x_scales_group,
    w13,  # descriptor of [E * 2I, H], or of [E * I, H] where not gated
    rows_per_expert,  # of w13
    w13_scales_ptr,  # block: [E, 2 * ceil(I / 128), ceil(H / 128)]; channel: [E, 2I]; or None
    bias_ptr,  # [E, 2I] or None
    out_ptr,  # [P, I]
    stride_out_row,
    out_scales_ptr,  # [P, ceil(I / 128)] or None
    stride_out_scales_row,
    stride_out_scales_group,
    hidden_size,
    intermediate_size,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    WEIGHT_SCALES: tl.constexpr,
    DEQUANTIZE_ROWS: tl.constexpr,
    SWAP_OPERANDS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One item: BLOCK_M positions and BLOCK_N intermediate columns, gate and up side by side."""
    await_predecessor(IS_DEPENDENT)
    is_gated: tl.constexpr = ACTIVATION != "relu2"
    num_blocks = tl.cdiv(intermediate_size, BLOCK_N)
    num_tiles = tl.load(num_tiles_ptr)
    num_items = num_tiles * num_blocks
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), flatten=FLATTEN):
        tile, block = item_at(item, num_tiles, num_blocks, GROUP_TILES)
        expert = tl.load(tile_experts_ptr + tile)
        positions = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        slots = tl.load(slots_ptr + positions)
        is_slot = slots < num_slots
        rows = tl.where(is_slot, slots // top_k, 0).to(tl.int64)
        k_offsets = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + rows[:, None] * stride_x_row
        x_ptrs += k_offsets.to(tl.int64)[None, :] * stride_x_col
        x_scale_ptrs = x_scales_ptr
        if x_scales_ptr is not None:
            x_scale_ptrs += rows * stride_x_scales_row
        gate_row = expert * rows_per_expert + block * BLOCK_N
        gate_scale_ptr = w13_scales_ptr
        up_scale_ptr = w13_scales_ptr
        if WEIGHT_SCALES == "block":
            blocks_i = tl.cdiv(intermediate_size, 128)
            blocks_h = tl.cdiv(hidden_size, 128)
            parts: tl.constexpr = 2 if is_gated else 1
            first_block = (expert * parts * blocks_i + block * BLOCK_N // 128).to(tl.int64)
            gate_scale_ptr += first_block * blocks_h
            up_scale_ptr = gate_scale_ptr + blocks_i * blocks_h
        gate = _zeros(BLOCK_M, BLOCK_N, SWAP_OPERANDS)
        up = _zeros(BLOCK_M, BLOCK_N, SWAP_OPERANDS)
        for first in range(0, hidden_size, BLOCK_K):
            is_k = first + k_offsets < hidden_size
            x = tl.load(x_ptrs, mask=is_slot[:, None] & is_k[None, :], other=0.0)
            w_gate = w13.load([gate_row, first])
            if is_gated:
                w_up = w13.load([gate_row + intermediate_size, first])
            if WEIGHT_SCALES == "none":
                if DEQUANTIZE_ROWS:
                    tl.static_assert(BLOCK_K <= 128)
                    row_scales = tl.load(
                        x_scale_ptrs + first // 128 * stride_x_scales_group, mask=is_slot, other=0.0
                    )
                    x = (x.to(tl.float32) * row_scales[:, None]).to(w_gate.dtype)
                gate = _multiply_add(x, w_gate, gate, SWAP_OPERANDS)
                if is_gated:
                    up = _multiply_add(x, w_up, up, SWAP_OPERANDS)
            else:
                tl.static_assert(BLOCK_K == 128)
                group = first // 128
                row_scales = tl.load(
                    x_scale_ptrs + group * stride_x_scales_group, mask=is_slot, other=0.0
                )
                gate_scales = row_scales
                up_scales = row_scales
                if WEIGHT_SCALES == "block":
                    gate_scales = row_scales * tl.load(gate_scale_ptr + group)
                    if is_gated:
                        up_scales = row_scales * tl.load(up_scale_ptr + group)
                product = dot_rows(x, w_gate, SWAP_OPERANDS)
                gate += product * _by_row(gate_scales, SWAP_OPERANDS)
                if is_gated:
                    product = dot_rows(x, w_up, SWAP_OPERANDS)
                    up += product * _by_row(up_scales, SWAP_OPERANDS)
            x_ptrs += BLOCK_K * stride_x_col
        if SWAP_OPERANDS:
            gate = gate.T
            up = up.T
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < intermediate_size
        first_channel = expert.to(tl.int64) * rows_per_expert
        if WEIGHT_SCALES == "channel":
            channel_ptrs = w13_scales_ptr + first_channel + columns
            gate *= tl.load(channel_ptrs, mask=is_column, other=0.0)[None, :]
            if is_gated:
                channel_ptrs += intermediate_size
                up *= tl.load(channel_ptrs, mask=is_column, other=0.0)[None, :]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + first_channel + columns
            gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if is_gated:
                bias_ptrs += intermediate_size
                up += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        result = activate(gate, up, alpha, limit, ACTIVATION)
        if out_scales_ptr is not None:
            tl.static_assert(BLOCK_N == 128)
            values, scales = quantize_group(tl.where(is_column[None, :], result, 0.0))
            scale_ptrs = out_scales_ptr + positions * stride_out_scales_row
            tl.store(scale_ptrs + block * stride_out_scales_group, scales, mask=is_slot)
        else:
            values = result.to(out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + positions[:, None] * stride_out_row + columns[None, :]
        tl.store(out_ptrs, values, mask=is_slot[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_slots"])
def _project_down_kernel(
    slots_ptr,  # [P]
    tile_experts_ptr,  # [max_tiles]
    num_tiles_ptr,  # [1]
    num_slots,
    x,  # descriptor of [P, I]
    x_scales_ptr,  # [P, ceil(I / 128)] or None
    stride_x_scales_row,
    stride_x_scales_group,
    w2,  # descriptor of [E * H, I]
    w2_scales_ptr,  # block: [E, ceil(H / 128), ceil(I / 128)]; channel: [E, H]; or None
    bias_ptr,  # [E, H] or None
    slot_weights_ptr,  # [N] or None
    out_ptr,  # [N, H]
    intermediate_size,
    hidden_size,
    WEIGHT_SCALES: tl.constexpr,
    SWAP_OPERANDS: tl.constexpr,
    FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One item: BLOCK_M positions and BLOCK_N hidden columns."""
    await_predecessor(IS_DEPENDENT)
    num_blocks = tl.cdiv(hidden_size, BLOCK_N)
    num_tiles = tl.load(num_tiles_ptr)
    num_items = num_tiles * num_blocks
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), flatten=FLATTEN):
        tile, block = item_at(item, num_tiles, num_blocks, GROUP_TILES)
        expert = tl.load(tile_experts_ptr + tile)
        positions = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        first_row = expert * hidden_size + block * BLOCK_N
        x_scale_ptrs = x_scales_ptr
        if x_scales_ptr is not None:
            x_scale_ptrs += positions * stride_x_scales_row
        w2_scale_ptr = w2_scales_ptr
        if WEIGHT_SCALES == "block":
            tl.static_assert(BLOCK_N <= 128)
            blocks_i = tl.cdiv(intermediate_size, 128)
            first_block = expert * tl.cdiv(hidden_size, 128) + block * BLOCK_N // 128
            w2_scale_ptr += first_block.to(tl.int64) * blocks_i
        result = _zeros(BLOCK_M, BLOCK_N, SWAP_OPERANDS)
        for first in range(0, intermediate_size, BLOCK_K):
            rows = x.load([tile * BLOCK_M, first])
            w = w2.load([first_row, first])
            if WEIGHT_SCALES == "none":
                result = _multiply_add(rows, w, result, SWAP_OPERANDS)
            else:
                tl.static_assert(BLOCK_K == 128)
                group = first // 128
                scales = tl.load(x_scale_ptrs + group * stride_x_scales_group)
                if WEIGHT_SCALES == "block":
                    scales *= tl.load(w2_scale_ptr + group)
                product = dot_rows(rows, w, SWAP_OPERANDS)
                result += product * _by_row(scales, SWAP_OPERANDS)
        if SWAP_OPERANDS:
            result = result.T
        columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_column = columns < hidden_size
        first_channel = expert.to(tl.int64) * hidden_size
        if WEIGHT_SCALES == "channel":
            channel_ptrs = w2_scales_ptr + first_channel + columns
            result *= tl.load(channel_ptrs, mask=is_column, other=0.0)[None, :]
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + first_channel + columns
            result += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        slots = tl.load(slots_ptr + positions)
        is_slot = slots < num_slots
        if slot_weights_ptr is not None:
            result *= tl.load(slot_weights_ptr + slots, mask=is_slot, other=0.0)[:, None]
        out_ptrs = out_ptr + slots.to(tl.int64)[:, None] * hidden_size + columns[None, :]
        mask = is_slot[:, None] & is_column[None, :]
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
