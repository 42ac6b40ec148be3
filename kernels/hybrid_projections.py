"""The steps of both projections of hybrid experts, for kernels/resident_shares.py.

An expert has one number over both tiers: its place in NVFP4, or E4 plus its place in NF3. So the
list of experts that have rows is rising by tier, and a program's share of the second projection is
one run of NVFP4's steps and one of NF3's. A step is 256 columns of the sum in both tiers, which is
a block of NF3 and four of NVFP4 (kernels/packed_tiles.py). It may reach past a row's last block,
where there are neither words nor scales.

Scales are loaded a block ahead, since nothing else hides how long that takes.

Shapes: T rows (at most BLOCK_T), H hidden size, I intermediate size, A local experts that have
rows, E4 local experts in NVFP4. TILE: (BLOCK_N, BLOCK_K, stages).
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ep_runtime.kernels.packed_kernels import gather_block
from ep_runtime.kernels.packed_tiles import (
    load_centres,
    load_scales,
    load_words,
    multiply_block,
    scales_per_block,
)
from ep_runtime.kernels.quant.scheme import NF3_GROUP, NVFP4_GROUP

# Of each tier: what a field is, fields of a word, columns with one scale. Of both: a block's words.
_NVFP4: tl.constexpr = tl.constexpr(("e2m1", 4, NVFP4_GROUP))
_NF3: tl.constexpr = tl.constexpr(("nf3", 16, NF3_GROUP))
_KW: tl.constexpr = tl.constexpr(16)


@triton.jit
def _gate_up_of_tier(
    tier,  # (descriptor of [E * rows_per_expert, words], scales, groups of a row)
    x,
    expert,
    block,
    first,
    last,
    sizes,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """Steps first .. last of an item, gate and up; expert: its place in the tier."""
    STORED: tl.constexpr = KIND[0]
    FIELDS: tl.constexpr = KIND[1]
    GROUP: tl.constexpr = KIND[2]
    COLUMNS: tl.constexpr = FIELDS * _KW
    SCALES: tl.constexpr = scales_per_block(GROUP, FIELDS, _KW)
    BLOCK_N: tl.constexpr = TILE[0]
    BLOCK_K: tl.constexpr = TILE[1]
    words, scales_ptr, num_groups = tier
    x_ptr, stride_x_row, stride_x_col = x
    rows_per_expert = sizes.rows_per_expert
    rows = tl.arange(0, BLOCK_T)
    is_row = rows < sizes.num_rows
    k = tl.arange(0, _KW)
    row_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < sizes.intermediate_size
    gate_row = expert * rows_per_expert + block * BLOCK_N
    offsets = expert.to(tl.int64) * num_groups * rows_per_expert + columns
    centres = load_centres(None, offsets, 0, is_column, SCALES, STORED, x_ptr.dtype.element_ty)
    gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    column = first * BLOCK_K
    end = tl.minimum(last * BLOCK_K, tl.cdiv(sizes.hidden_size, COLUMNS) * COLUMNS)
    is_ahead = is_column & (column < end)
    here = offsets + column // GROUP * rows_per_expert
    gate_scales = load_scales(scales_ptr, here, rows_per_expert, is_ahead, SCALES)
    up_scales = gate_scales
    if IS_GATED:
        here += sizes.intermediate_size
        up_scales = load_scales(scales_ptr, here, rows_per_expert, is_ahead, SCALES)
    for column in tl.range(first * BLOCK_K, end, COLUMNS, num_stages=TILE[2]):
        gate_words = load_words(words, gate_row, column, STORED, FIELDS, _KW)
        if IS_GATED:
            up_row = gate_row + sizes.intermediate_size
            up_words = load_words(words, up_row, column, STORED, FIELDS, _KW)
        x_ptrs = row_ptrs + (column + k).to(tl.int64)[None, :] * stride_x_col
        x_fields = gather_block(
            x_ptrs, _KW * stride_x_col, is_row, column + k, sizes.hidden_size, _KW, FIELDS
        )
        is_ahead = is_column & (column + COLUMNS < end)
        here = offsets + (column + COLUMNS) // GROUP * rows_per_expert
        next_gate = load_scales(scales_ptr, here, rows_per_expert, is_ahead, SCALES)
        if IS_GATED:
            here += sizes.intermediate_size
            next_up = load_scales(scales_ptr, here, rows_per_expert, is_ahead, SCALES)
        gate = multiply_block(
            gate_words, x_fields, gate_scales, centres, gate, STORED, FIELDS, False
        )
        gate_scales = next_gate
        if IS_GATED:
            up = multiply_block(up_words, x_fields, up_scales, centres, up, STORED, FIELDS, False)
            up_scales = next_up
    return gate, up


@triton.jit
def multiply_gate_up_hybrid(
    weights,  # (NVFP4's tier, NF3's, global scales [E4, parts], E4)
    x,
    expert,
    block,
    first,
    last,
    sizes,
    IS_GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `multiply_gate_up` of kernels/resident_projections.py; expert: over both tiers."""
    nvfp4, nf3, global_scales_ptr, num_nvfp4 = weights
    if expert < num_nvfp4:
        gate, up = _gate_up_of_tier(
            nvfp4, x, expert, block, first, last, sizes, _NVFP4, IS_GATED, BLOCK_T, TILE
        )
        if IS_GATED:
            gate *= tl.load(global_scales_ptr + 2 * expert)
            up *= tl.load(global_scales_ptr + 2 * expert + 1)
        else:
            gate *= tl.load(global_scales_ptr + expert)
    else:
        place = expert - num_nvfp4
        gate, up = _gate_up_of_tier(
            nf3, x, place, block, first, last, sizes, _NF3, IS_GATED, BLOCK_T, TILE
        )
    return gate, up


@triton.jit
def _down_of_tier(
    result,  # [BLOCK_N, BLOCK_T] float32, added to
    tier,
    global_scales_ptr,  # [E4, 1] or None
    first_number,  # of the tier's experts
    activated,
    list_ptr,
    block,
    first,
    last,
    sizes,
    KIND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """Steps first .. last, all of one tier, of an item of the second projection."""
    STORED: tl.constexpr = KIND[0]
    FIELDS: tl.constexpr = KIND[1]
    GROUP: tl.constexpr = KIND[2]
    COLUMNS: tl.constexpr = FIELDS * _KW
    SCALES: tl.constexpr = scales_per_block(GROUP, FIELDS, _KW)
    BLOCK_N: tl.constexpr = TILE[0]
    BLOCK_K: tl.constexpr = TILE[1]
    words, scales_ptr, num_groups = tier
    activated_ptr, stride_activated = activated
    hidden_size, intermediate_size = sizes.hidden_size, sizes.intermediate_size
    rows = tl.arange(0, BLOCK_T)
    is_row = rows < BLOCK_T
    k = tl.arange(0, _KW)
    row_ptrs = activated_ptr + rows[:, None] * stride_activated
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = columns < hidden_size
    dtype: tl.constexpr = activated_ptr.dtype.element_ty
    centres = load_centres(None, columns, 0, is_column, SCALES, STORED, dtype)
    # Blocks are counted over experts, each of which has whole steps of them.
    blocks_per_expert = tl.cdiv(intermediate_size, BLOCK_K) * (BLOCK_K // COLUMNS)
    begin = first * (BLOCK_K // COLUMNS)
    end = last * (BLOCK_K // COLUMNS)
    # Of no steps, whatever number: it is not used.
    ahead = tl.load(list_ptr + begin // blocks_per_expert, mask=begin < end, other=0)
    ahead -= first_number
    column = begin % blocks_per_expert * COLUMNS
    here = (ahead.to(tl.int64) * num_groups + column // GROUP) * hidden_size + columns
    is_ahead = is_column & (begin < end) & (column < intermediate_size)
    scales = load_scales(scales_ptr, here, hidden_size, is_ahead, SCALES)
    for at in tl.range(begin, end, num_stages=TILE[2]):
        expert = ahead
        place = at // blocks_per_expert
        column = at % blocks_per_expert * COLUMNS
        w = load_words(words, expert * hidden_size + block * BLOCK_N, column, STORED, FIELDS, _KW)
        x_ptrs = row_ptrs + place * BLOCK_T * stride_activated + (column + k)[None, :]
        x = gather_block(x_ptrs, _KW, is_row, column + k, intermediate_size, _KW, FIELDS)
        next_column = (at + 1) % blocks_per_expert * COLUMNS
        # Not in every turn: what a load of the loop needs to be loaded would halve its depth.
        if (next_column == 0) & (at + 1 < end):
            ahead = tl.load(list_ptr + place + 1) - first_number
        here = (ahead.to(tl.int64) * num_groups + next_column // GROUP) * hidden_size + columns
        is_ahead = is_column & (at + 1 < end) & (next_column < intermediate_size)
        next_scales = load_scales(scales_ptr, here, hidden_size, is_ahead, SCALES)
        if global_scales_ptr is None:
            result = multiply_block(w, x, scales, centres, result, STORED, FIELDS, False)
        else:
            of_block = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            of_block = multiply_block(w, x, scales, centres, of_block, STORED, FIELDS, False)
            result += of_block * tl.load(global_scales_ptr + expert)
        scales = next_scales
    return result


@triton.jit
def multiply_down_hybrid(
    weights,  # (NVFP4's tier, NF3's, global scales [E4, 1], E4, how many of A are in NVFP4)
    activated,
    list_ptr,
    block,
    first,
    last,
    sizes,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `multiply_down` of kernels/resident_projections.py: NVFP4's steps, then NF3's."""
    BLOCK_N: tl.constexpr = TILE[0]
    nvfp4, nf3, global_scales_ptr, num_nvfp4, active_nvfp4 = weights
    middle = active_nvfp4 * tl.cdiv(sizes.intermediate_size, TILE[1])
    result = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    result = _down_of_tier(
        result,
        nvfp4,
        global_scales_ptr,
        0,
        activated,
        list_ptr,
        block,
        first,
        tl.minimum(last, middle),
        sizes,
        _NVFP4,
        BLOCK_T,
        TILE,
    )
    return _down_of_tier(
        result,
        nf3,
        None,
        num_nvfp4,
        activated,
        list_ptr,
        block,
        tl.maximum(first, middle),
        last,
        sizes,
        _NF3,
        BLOCK_T,
        TILE,
    )
