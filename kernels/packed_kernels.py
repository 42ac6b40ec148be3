"""The kernels of the packed projections: one item, one program (kernels/packed_gemm.py)."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ep_runtime.kernels.dependent_launch import await_predecessor
from ep_runtime.kernels.grouped_gemm import activate, item_at
from ep_runtime.kernels.packed_tiles import (
    load_centres,
    load_scales,
    load_words,
    multiply_block,
    scale_values,
    scales_per_block,
)


@triton.jit
def gather_block(x_ptrs, step, is_slot, k, hidden_size, KW: tl.constexpr, FIELDS: tl.constexpr):
    """FIELDS times KW columns of x, [BLOCK_M, KW] each; k: the first of them."""
    x0 = _gather(x_ptrs, is_slot, k, hidden_size)
    x1 = _gather(x_ptrs + step, is_slot, k + KW, hidden_size)
    if FIELDS == 2:
        return (x0, x1)
    elif FIELDS == 16:
        x = gather_block(x_ptrs, step, is_slot, k, hidden_size, KW, 4)
        for part in tl.static_range(1, 4):
            ptrs = x_ptrs + 4 * part * step
            x += gather_block(ptrs, step, is_slot, k + 4 * part * KW, hidden_size, KW, 4)
        return x
    else:
        tl.static_assert(FIELDS == 4)
        x2 = _gather(x_ptrs + 2 * step, is_slot, k + 2 * KW, hidden_size)
        x3 = _gather(x_ptrs + 3 * step, is_slot, k + 3 * KW, hidden_size)
        return (x0, x1, x2, x3)


@triton.jit
def _gather(x_ptrs, is_slot, k, hidden_size):
    return tl.load(x_ptrs, mask=is_slot[:, None] & (k < hidden_size)[None, :], other=0.0)


@triton.jit
def _read_block(x, row, first, KW: tl.constexpr, FIELDS: tl.constexpr):
    """As `gather_block`, from a descriptor of rows in expert order."""
    x0 = x.load([row, first])
    x1 = x.load([row, first + KW])
    if FIELDS == 2:
        return (x0, x1)
    elif FIELDS == 16:
        rows = _read_block(x, row, first, KW, 4)
        for part in tl.static_range(1, 4):
            rows += _read_block(x, row, first + 4 * part * KW, KW, 4)
        return rows
    else:
        tl.static_assert(FIELDS == 4)
        return (x0, x1, x.load([row, first + 2 * KW]), x.load([row, first + 3 * KW]))


@triton.jit(do_not_specialize=["num_slots", "num_groups"])
def project_gate_up_packed_kernel(
    slots_ptr,  # [P]
    tile_experts_ptr,  # [max_tiles]
    num_tiles_ptr,  # [1]
    num_slots,
    top_k,
    x_ptr,  # [R, H]
    stride_x_row,
    stride_x_col,
    words,  # descriptor of [E * rows_per_expert, words] int16
    rows_per_expert,
    scales_ptr,  # [E, groups, rows_per_expert]
    num_groups,
    zeros_ptr,  # the same, uint8, or None
    global_scales_ptr,  # [E, parts] float32, or None
    bias_ptr,  # [E, 2I] or None
    out_ptr,  # [P, I]
    stride_out_row,
    hidden_size,
    intermediate_size,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    STORED: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    KW: tl.constexpr,
    VALUES_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One item: BLOCK_M positions and BLOCK_N intermediate columns, gate and up one by one."""
    await_predecessor(IS_DEPENDENT)
    num_tiles = tl.load(num_tiles_ptr)
    num_blocks = tl.cdiv(intermediate_size, BLOCK_N)
    item = tl.program_id(0)
    if item >= num_tiles * num_blocks:
        return
    is_gated: tl.constexpr = ACTIVATION != "relu2"
    COLUMNS: tl.constexpr = FIELDS * KW
    SCALES: tl.constexpr = scales_per_block(GROUP, FIELDS, KW)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    last = (tl.cdiv(hidden_size, COLUMNS) - 1) * COLUMNS  # where the last block begins
    tile, block = item_at(item, num_tiles, num_blocks, GROUP_TILES)
    expert = tl.load(tile_experts_ptr + tile)
    positions = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    slots = tl.load(slots_ptr + positions)
    is_slot = slots < num_slots
    rows = tl.where(is_slot, slots // top_k, 0).to(tl.int64)
    k = tl.arange(0, KW)
    x_ptrs = x_ptr + rows[:, None] * stride_x_row + k.to(tl.int64)[None, :] * stride_x_col
    step = KW * stride_x_col
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < intermediate_size
    gate_row = expert * rows_per_expert + block * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    group_ptr = None if GROUP == 0 else scales_ptr
    offsets = expert.to(tl.int64) * num_groups * rows_per_expert + columns
    up_offsets = offsets + intermediate_size
    gate_scales = load_scales(group_ptr, offsets, rows_per_expert, is_column, SCALES)
    up_scales = gate_scales
    if is_gated:
        up_scales = load_scales(group_ptr, up_offsets, rows_per_expert, is_column, SCALES)
    for first in range(0, hidden_size, COLUMNS):
        gate_words = load_words(words, gate_row, first, STORED, FIELDS, KW)
        if is_gated:
            up_row = gate_row + intermediate_size
            up_words = load_words(words, up_row, first, STORED, FIELDS, KW)
        x = gather_block(x_ptrs, step, is_slot, first + k, hidden_size, KW, FIELDS)
        here = 0
        ahead = 0
        if GROUP > 0:
            here = first // GROUP * rows_per_expert
            ahead = tl.minimum(first + COLUMNS, last) // GROUP * rows_per_expert
        centres = load_centres(
            zeros_ptr, offsets + here, rows_per_expert, is_column, SCALES, STORED, dtype
        )
        next_gate = load_scales(group_ptr, offsets + ahead, rows_per_expert, is_column, SCALES)
        if is_gated:
            up_centres = load_centres(
                zeros_ptr, up_offsets + here, rows_per_expert, is_column, SCALES, STORED, dtype
            )
            next_up = load_scales(group_ptr, up_offsets + ahead, rows_per_expert, is_column, SCALES)
        gate = multiply_block(
            gate_words, x, gate_scales, centres, gate, STORED, FIELDS, VALUES_FIRST
        )
        gate_scales = next_gate
        if is_gated:
            up = multiply_block(
                up_words, x, up_scales, up_centres, up, STORED, FIELDS, VALUES_FIRST
            )
            up_scales = next_up
        x_ptrs += FIELDS * step
    first_channel = expert.to(tl.int64) * rows_per_expert
    if GROUP == 0:
        channel_ptrs = scales_ptr + first_channel + columns
        gate *= scale_values(tl.load(channel_ptrs, mask=is_column, other=0.0))[:, None]
        if is_gated:
            channel_ptrs += intermediate_size
            up *= scale_values(tl.load(channel_ptrs, mask=is_column, other=0.0))[:, None]
    if global_scales_ptr is not None:
        if is_gated:
            gate *= tl.load(global_scales_ptr + 2 * expert)
            up *= tl.load(global_scales_ptr + 2 * expert + 1)
        else:
            gate *= tl.load(global_scales_ptr + expert)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + first_channel + columns
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if is_gated:
            bias_ptrs += intermediate_size
            up += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[:, None]
    result = activate(gate, up, alpha, limit, ACTIVATION).to(out_ptr.dtype.element_ty).T
    out_ptrs = out_ptr + positions[:, None] * stride_out_row + columns[None, :]
    tl.store(out_ptrs, result, mask=is_slot[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["num_slots", "num_groups"])
def project_down_packed_kernel(
    slots_ptr,  # [P]
    tile_experts_ptr,  # [max_tiles]
    num_tiles_ptr,  # [1]
    num_slots,
    x,  # descriptor of [P, I]
    words,  # descriptor of [E * H, words] int16
    scales_ptr,  # [E, groups, H]
    num_groups,
    zeros_ptr,  # the same, uint8, or None
    global_scales_ptr,  # [E, parts] float32, or None
    bias_ptr,  # [E, H] or None
    slot_weights_ptr,  # [N] or None
    out_ptr,  # [N * SPLIT, H]
    intermediate_size,
    hidden_size,
    STORED: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    KW: tl.constexpr,
    VALUES_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One item's part of K: BLOCK_M positions and BLOCK_N hidden columns; a part may be empty."""
    await_predecessor(IS_DEPENDENT)
    num_tiles = tl.load(num_tiles_ptr)
    num_blocks = tl.cdiv(hidden_size, BLOCK_N)
    item = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    if item >= num_tiles * num_blocks:
        return
    COLUMNS: tl.constexpr = FIELDS * KW
    SCALES: tl.constexpr = scales_per_block(GROUP, FIELDS, KW)
    last = (tl.cdiv(intermediate_size, COLUMNS) - 1) * COLUMNS  # where the last block begins
    part_size = tl.cdiv(tl.cdiv(intermediate_size, COLUMNS), SPLIT) * COLUMNS
    start = part * part_size
    end = tl.minimum(start + part_size, intermediate_size)
    tile, block = item_at(item, num_tiles, num_blocks, GROUP_TILES)
    expert = tl.load(tile_experts_ptr + tile)
    positions = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < hidden_size
    first_row = expert * hidden_size + block * BLOCK_N
    result = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    group_ptr = None if GROUP == 0 else scales_ptr
    offsets = expert.to(tl.int64) * num_groups * hidden_size + columns
    at_start = 0
    if GROUP > 0:
        at_start = tl.minimum(start, last) // GROUP * hidden_size
    scales = load_scales(group_ptr, offsets + at_start, hidden_size, is_column, SCALES)
    for first in range(start, end, COLUMNS):
        w = load_words(words, first_row, first, STORED, FIELDS, KW)
        rows = _read_block(x, tile * BLOCK_M, first, KW, FIELDS)
        here = 0
        ahead = 0
        if GROUP > 0:
            here = first // GROUP * hidden_size
            ahead = tl.minimum(first + COLUMNS, last) // GROUP * hidden_size
        centres = load_centres(
            zeros_ptr, offsets + here, hidden_size, is_column, SCALES, STORED, rows[0].dtype
        )
        next_scales = load_scales(group_ptr, offsets + ahead, hidden_size, is_column, SCALES)
        result = multiply_block(w, rows, scales, centres, result, STORED, FIELDS, VALUES_FIRST)
        scales = next_scales
    first_channel = expert.to(tl.int64) * hidden_size
    if GROUP == 0:
        channel_ptrs = scales_ptr + first_channel + columns
        result *= scale_values(tl.load(channel_ptrs, mask=is_column, other=0.0))[:, None]
    if global_scales_ptr is not None:
        result *= tl.load(global_scales_ptr + expert)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + first_channel + columns
        is_biased = is_column & (part == 0)
        result += tl.load(bias_ptrs, mask=is_biased, other=0.0).to(tl.float32)[:, None]
    slots = tl.load(slots_ptr + positions)
    is_slot = slots < num_slots
    if slot_weights_ptr is not None:
        result *= tl.load(slot_weights_ptr + slots, mask=is_slot, other=0.0)[None, :]
    out_rows = slots.to(tl.int64) * SPLIT + part
    out_ptrs = out_ptr + out_rows[:, None] * hidden_size + columns[None, :]
    mask = is_slot[:, None] & is_column[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty).T, mask=mask)
