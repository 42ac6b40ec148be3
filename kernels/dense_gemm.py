"""Products of few rows with one weight, K cut into parts so that they fill the device.

Shapes: T rows, K columns summed over, N columns of a result, P parts of a weight (2 of a gated w13,
whose rows are the gate's, then the up's; else 1), S splits of K.

A launch of kernels/grouped_gemm.py deals out blocks of output columns, which of many experts there
are enough of. One expert's 4096 columns are 64 blocks of 64, the fewest rows of a weight that the
matrix unit takes from shared memory; an H200 has 132 multiprocessors. So an item here is a block of
columns and one of S ranges of K, and leaves a float32 sum of its range. `activate_splits` adds
them, in their order, and goes on to what stands between the two projections anyway: the activation
and, for fp8 weights, the quantisation of its result. So the split costs no launch, and results are
bit-equal from call to call.

With few rows the product is transposed, as there (`DenseTiles.swap_operands`). fp8: weights e4m3
with a float32 scale for every 128 x 128 block (each part with blocks of its own), rows e4m3 with
one for every 128 columns; products of 128 columns are added, scaled, in float32.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.grouped_gemm import GemmRows, activate, dot_rows
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.quant.fp8_rows import (
    lines_of_block,
    num_groups,
    quantize_group,
    quantize_rows_reference,
)


@dataclass(frozen=True)
class DenseTiles:
    """One item's share of a product, and the launch options that go with it.

    block_m: rows. block_n: columns of a part. block_k: columns of the sum taken at once, 128 of
    fp8. split_k: S. swap_operands: the weight is the matrix unit's left operand.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    swap_operands: bool = False


@dataclass(frozen=True)
class DenseWeight:
    """A weight, rows first. P parts of N rows each.

    values: [P * N, K], rows contiguous and a multiple of 16 bytes apart. scales: of e4m3 values
    [P * ceil(N / 128), ceil(K / 128)] float32, contiguous; else None.
    """

    values: Tensor
    scales: Tensor | None = None
    num_parts: int = 1

    @property
    def part_rows(self) -> int:
        """N."""
        return self.values.shape[0] // self.num_parts


def multiply(rows: GemmRows, weight: DenseWeight, *, tiles: DenseTiles, out: Tensor) -> None:
    """out[s] = rows @ weight.T over the s-th range of K, summed in float32.

    rows: values [T, K], row-major, 16-byte aligned, rows a multiple of 16 bytes apart; of e4m3 with
    scales [T, ceil(K / 128)], any strides. out: [S, T, P * N] contiguous, in any float dtype. Reads
    the weight once for every block of rows. Does not wait for the device.
    """
    num_rows, k_size = rows.values.shape
    if num_rows == 0:
        return
    prepare_launch(out.device)
    blocks = weight.num_parts * triton.cdiv(weight.part_rows, tiles.block_n)
    num_items = triton.cdiv(num_rows, tiles.block_m) * blocks * tiles.split_k
    scales = rows.scales
    _multiply_kernel[(num_items,)](
        TensorDescriptor.from_tensor(rows.values, [tiles.block_m, tiles.block_k]),
        scales,
        *((0, 0) if scales is None else scales.stride()),
        TensorDescriptor.from_tensor(weight.values, [tiles.block_n, tiles.block_k]),
        weight.scales,
        out,
        num_rows,
        weight.part_rows,
        k_size,
        NUM_PARTS=weight.num_parts,
        SPLIT_K=tiles.split_k,
        SWAP_OPERANDS=tiles.swap_operands,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **launch_options(out.device),
    )


def activate_splits(splits: Tensor, activation: Activation, *, out: GemmRows) -> None:
    """out = activation(the sum of the splits), rounded once, or quantised where out has scales.

    splits: [S, T, 2N] float32 contiguous, gate first, then up; [S, T, N] where not gated.
    out: values [T, N], rows contiguous; with scales [T, ceil(N / 128)], any strides, values are
    e4m3, as `quantize_rows_reference` has them of the activation in float32. One launch; does not
    wait for the device.
    """
    num_rows, width = out.values.shape
    if num_rows == 0:
        return
    prepare_launch(splits.device)
    groups = num_groups(width)
    # 128 programs for 16 rows of 2048 columns. An interpreted operation costs 85 us at any size.
    block_rows, block_groups = (1, 2) if num_rows <= 64 else (4, 2)
    if is_interpreting():
        block_rows, block_groups = 64, min(triton.next_power_of_2(groups), 16)
    num_programs = triton.cdiv(num_rows, block_rows) * triton.cdiv(groups, block_groups)
    scales = out.scales
    _activate_splits_kernel[(num_programs,)](
        splits,
        out.values,
        out.values.stride(0),
        scales,
        *((0, 0) if scales is None else scales.stride()),
        num_rows,
        width,
        activation.alpha,
        activation.limit,
        ACTIVATION=activation.kind.value,
        IS_GATED=activation.is_gated,
        SPLIT_K=splits.shape[0],
        BLOCK_ROWS=block_rows,
        BLOCK_GROUPS=block_groups,
        num_warps=4,
        **launch_options(splits.device),
    )


def activate_splits_reference(splits: Tensor, activation: Activation, *, out: GemmRows) -> None:
    """The definition of `activate_splits`."""
    total = splits[0].clone()
    for split in splits[1:]:
        total += split
    activated = apply_activation(total, activation)
    if out.scales is None:
        out.values.copy_(activated)
        return
    values, scales = quantize_rows_reference(activated)
    out.values.copy_(values)
    out.scales.copy_(scales)


@triton.jit
def _scales_at(
    x_scale_ptrs,  # [BLOCK_M]
    stride_group,
    w_scale_ptr,
    group,
    is_row,
    SWAP_OPERANDS: tl.constexpr,
):
    """What a product of one group of columns is multiplied by, shaped to multiply it."""
    scales = tl.load(x_scale_ptrs + group * stride_group, mask=is_row, other=0.0)
    scales *= tl.load(w_scale_ptr + group)
    if SWAP_OPERANDS:
        return scales[None, :]
    else:
        return scales[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_kernel(
    x,  # descriptor of [T, K]; rows past the last are read as 0
    x_scales_ptr,  # [T, ceil(K / 128)] or None
    stride_x_scales_row,
    stride_x_scales_group,
    w,  # descriptor of [P * N, K]
    w_scales_ptr,  # [P * ceil(N / 128), ceil(K / 128)] or None
    out_ptr,  # [SPLIT_K, T, P * N]
    num_rows,
    part_rows,  # N
    k_size,
    NUM_PARTS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    SWAP_OPERANDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One item: BLOCK_M rows, BLOCK_N columns of one part, one range of K.

    Items of one block and range, which read the same weights, run at the same time.
    """
    await_predecessor(IS_DEPENDENT)
    is_fp8: tl.constexpr = w_scales_ptr is not None
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    part_blocks = tl.cdiv(part_rows, BLOCK_N)
    num_blocks = NUM_PARTS * part_blocks
    item = tl.program_id(0)
    tile = item % num_tiles
    block = item // num_tiles % num_blocks
    split = item // num_tiles // num_blocks
    part = block // part_blocks
    first_column = block % part_blocks * BLOCK_N
    first_row = part * part_rows + first_column
    rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = rows < num_rows
    num_steps = tl.cdiv(k_size, BLOCK_K)
    steps_per_split = tl.cdiv(num_steps, SPLIT_K)
    first_step = split * steps_per_split
    end_step = tl.minimum(first_step + steps_per_split, num_steps)
    if SWAP_OPERANDS:
        result = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    else:
        result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    if is_fp8:
        tl.static_assert(BLOCK_K == 128)
        tl.static_assert(BLOCK_N <= 128)
        x_scale_ptrs = x_scales_ptr + rows * stride_x_scales_row
        scale_row = part * tl.cdiv(part_rows, 128) + first_column // 128
        w_scale_ptr = w_scales_ptr + scale_row.to(tl.int64) * num_steps
        # A step ahead of the products, which would wait for them. An empty range reads the last.
        scales = _scales_at(
            x_scale_ptrs,
            stride_x_scales_group,
            w_scale_ptr,
            tl.minimum(first_step, num_steps - 1),
            is_row,
            SWAP_OPERANDS,
        )
        for step in range(first_step, end_step):
            next_scales = _scales_at(
                x_scale_ptrs,
                stride_x_scales_group,
                w_scale_ptr,
                tl.minimum(step + 1, num_steps - 1),
                is_row,
                SWAP_OPERANDS,
            )
            x_block = x.load([tile * BLOCK_M, step * BLOCK_K])
            w_block = w.load([first_row, step * BLOCK_K])
            result += dot_rows(x_block, w_block, SWAP_OPERANDS) * scales
            scales = next_scales
    else:
        for step in range(first_step, end_step):
            x_block = x.load([tile * BLOCK_M, step * BLOCK_K])
            w_block = w.load([first_row, step * BLOCK_K])
            if SWAP_OPERANDS:
                result = tl.dot(w_block, x_block.T, result, input_precision="ieee")
            else:
                result = tl.dot(x_block, w_block.T, result, input_precision="ieee")
    if SWAP_OPERANDS:
        result = result.T
    columns = first_column + tl.arange(0, BLOCK_N)
    mask = is_row[:, None] & (columns < part_rows)[None, :]
    out_rows = split.to(tl.int64) * num_rows + rows
    out_ptrs = out_ptr + out_rows[:, None] * (NUM_PARTS * part_rows)
    out_ptrs += (part * part_rows + columns)[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _activate_splits_kernel(
    splits_ptr,  # [SPLIT_K, T, 2N] or [SPLIT_K, T, N]
    out_ptr,  # [T, N]
    stride_out_row,
    out_scales_ptr,  # [T, ceil(N / 128)] or None
    stride_out_scales_row,
    stride_out_scales_group,
    num_rows,
    width,  # N
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a block of rows and of groups; a line is 128 columns of one row."""
    await_predecessor(IS_DEPENDENT)
    rows, groups, columns, is_line = lines_of_block(num_rows, width, BLOCK_ROWS, BLOCK_GROUPS)
    mask = is_line[:, None] & (columns < width)
    row_size = 2 * width if IS_GATED else width
    gate_ptrs = splits_ptr + rows[:, None] * row_size + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0)
    up = gate
    if IS_GATED:
        up = tl.load(gate_ptrs + width, mask=mask, other=0.0)
    split_ptrs = gate_ptrs
    for _ in tl.static_range(1, SPLIT_K):
        split_ptrs += num_rows.to(tl.int64) * row_size
        gate += tl.load(split_ptrs, mask=mask, other=0.0)
        if IS_GATED:
            up += tl.load(split_ptrs + width, mask=mask, other=0.0)
    # Of zeros it is 0, whichever it is: what a mask left out does not raise an amax.
    result = activate(gate, up, alpha, limit, ACTIVATION)
    if out_scales_ptr is not None:
        values, scales = quantize_group(result)
        scales_ptrs = out_scales_ptr + rows * stride_out_scales_row
        scales_ptrs += groups.to(tl.int64) * stride_out_scales_group
        tl.store(scales_ptrs, scales, mask=is_line)
    else:
        values = result.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * stride_out_row + columns, values, mask=mask)
