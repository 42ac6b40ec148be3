"""Steps of both projections with unquantised weights, for kernels/resident_shares.py.

Shapes: T rows (at most BLOCK_T), E local experts, H hidden size, I intermediate size, A local
experts that have rows. TILE: (BLOCK_N, BLOCK_K, stages, whether BLOCK_K divides the columns).
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def multiply_gate_up(
    w13,  # descriptor of [E * rows_per_expert, H]
    x,  # (pointer to [T, H], stride of rows, of columns)
    expert,
    block,
    first,
    last,
    sizes,
    IS_GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """Steps first .. last of an item of the first projection: gate and up, [BLOCK_N, BLOCK_T]."""
    BLOCK_N: tl.constexpr = TILE[0]
    BLOCK_K: tl.constexpr = TILE[1]
    IS_WHOLE: tl.constexpr = TILE[3]
    x_ptr, stride_x_row, stride_x_col = x
    rows = tl.arange(0, BLOCK_T)
    offsets = tl.arange(0, BLOCK_K)
    is_row = (rows < sizes.num_rows)[:, None]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row
    gate_row = expert * sizes.rows_per_expert + block * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=TILE[2]):
        columns = step * BLOCK_K + offsets
        mask = is_row if IS_WHOLE else is_row & (columns < sizes.hidden_size)[None, :]
        x_block = tl.load(x_ptrs + columns[None, :] * stride_x_col, mask=mask, other=0.0)
        w_gate = w13.load([gate_row, step * BLOCK_K])
        gate = tl.dot(w_gate, x_block.T, gate, input_precision="ieee")
        if IS_GATED:
            w_up = w13.load([gate_row + sizes.intermediate_size, step * BLOCK_K])
            up = tl.dot(w_up, x_block.T, up, input_precision="ieee")
    return gate, up


@triton.jit
def multiply_down(
    w2,  # descriptor of [E * H, I]
    activated,  # (pointer to [A * BLOCK_T, I], stride of rows)
    list_ptr,
    block,
    first,
    last,
    sizes,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """Steps first .. last of an item of the second projection, [BLOCK_N, BLOCK_T]."""
    BLOCK_N: tl.constexpr = TILE[0]
    BLOCK_K: tl.constexpr = TILE[1]
    IS_WHOLE: tl.constexpr = TILE[3]
    activated_ptr, stride_activated = activated
    offsets = tl.arange(0, BLOCK_K)
    steps_per_expert = tl.cdiv(sizes.intermediate_size, BLOCK_K)
    row_ptrs = activated_ptr + tl.arange(0, BLOCK_T)[:, None] * stride_activated
    result = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    expert = 0
    if first < last:
        expert = tl.load(list_ptr + first // steps_per_expert)
    for step in tl.range(first, last, num_stages=TILE[2]):
        place = step // steps_per_expert
        column = step % steps_per_expert * BLOCK_K
        # Not in every step: what a load of the loop needs to be loaded would halve its depth.
        if column == 0:
            expert = tl.load(list_ptr + place)
        x_ptrs = row_ptrs + place * BLOCK_T * stride_activated + column + offsets[None, :]
        if IS_WHOLE:
            x = tl.load(x_ptrs)
        else:
            is_column = column + offsets < sizes.intermediate_size
            x = tl.load(x_ptrs, mask=is_column[None, :], other=0.0)
        w = w2.load([expert * sizes.hidden_size + block * BLOCK_N, column])
        result = tl.dot(w, x.T, result, input_precision="ieee")
    return result
