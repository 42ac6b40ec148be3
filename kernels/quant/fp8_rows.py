"""Rows in e4m3 with a float32 scale for every 128 columns, as DeepSeek-V3 stores activations.

Shapes: R rows, H columns, G = ceil(H / 128) groups of a row; the last group may be partial.

A group's amax is its largest |x|, NaN left out. Its scale is amax / 448, and a value is
e4m3(x * (448 / amax)), both quotients rounded to float32, so that one multiplication an element is
left to a kernel; it is at most 448 * (1 + 2^-23), which rounds to 448, the largest e4m3: nothing
saturates. amax is at least 448 * 2^-126, for which scale and factor are normal float32 numbers: a
group of zeros has values of exactly 0.

Nothing that is not a number gets lost: NaN stays NaN and leaves the rest of its group alone; in a
group with an infinity the scale is infinite, and every dequantised value NaN.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.quant.scheme import FP8_GROUP, MAX_E4M3

MIN_AMAX = MAX_E4M3 * 2.0**-126


def num_groups(hidden_size: int) -> int:
    """G: 7168 columns are 56 groups, 300 are 3."""
    return -(-hidden_size // FP8_GROUP)


def quantize_rows_reference(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: rows [R, H], any float dtype -> values [R, H] e4m3, scales [R, G] float32."""
    num_rows, hidden_size = rows.shape
    groups = num_groups(hidden_size)
    padded = rows.new_zeros((num_rows, groups * FP8_GROUP), dtype=torch.float32)
    padded[:, :hidden_size] = rows
    padded = padded.view(num_rows, groups, FP8_GROUP)
    numbers = torch.where(padded.isnan(), 0.0, padded.abs())
    amax = numbers.amax(-1, keepdim=True).clamp_min(MIN_AMAX)
    # By a tensor: torch turns a quotient with a number into a product with a reciprocal.
    largest = torch.full_like(amax, MAX_E4M3)
    values = (padded * (largest / amax)).view(num_rows, groups * FP8_GROUP)[:, :hidden_size]
    return values.to(torch.float8_e4m3fn), (amax / largest).squeeze(-1)


def dequantize_rows(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """values [R, H] e4m3 times scales [R, G] (any strides) in float32, rounded to `dtype`."""
    wide = scales.repeat_interleave(FP8_GROUP, dim=1)[:, : values.shape[1]]
    return (values.float() * wide).to(dtype)


def quantize_rows(rows: Tensor, *, out_values: Tensor, out_scales: Tensor) -> None:
    """`quantize_rows_reference` into given tensors, in one launch.

    rows: [R, H] float32, bfloat16 or float16. out_values: [R, H] e4m3. out_scales: [R, G] float32.
    Any strides, but rows and values are read and written 16 bytes at a time only where they are
    row-major with rows a multiple of 16 elements apart. Moves R * H * (itemsize + 1) bytes and the
    scales. Does not wait for the device. Bit-equal to the reference, on a GPU too, except that
    there every NaN is the positive one. Raises ValueError where a shape or dtype does not fit.
    """
    num_rows, hidden_size = rows.shape
    groups = num_groups(hidden_size)
    for name, out, shape, dtype in (
        ("out_values", out_values, (num_rows, hidden_size), torch.float8_e4m3fn),
        ("out_scales", out_scales, (num_rows, groups), torch.float32),
    ):
        if out.shape != shape or out.dtype is not dtype:
            raise ValueError(
                f"{name} is {out.dtype} {list(out.shape)}; rows {list(rows.shape)} need "
                f"{dtype} {list(shape)}"
            )
    if rows.numel() == 0:
        return
    prepare_launch(rows.device)
    # 1024 or 8192 values a program. An interpreted operation costs 85 us however large it is.
    block_rows, block_groups, num_warps = (2, 4, 4) if num_rows <= 256 else (16, 4, 8)
    if is_interpreting():
        block_rows, block_groups = 64, min(triton.next_power_of_2(groups), 16)
    num_programs = triton.cdiv(num_rows, block_rows) * triton.cdiv(groups, block_groups)
    _quantize_rows_kernel[(num_programs,)](
        rows,
        out_values,
        out_scales,
        *rows.stride(),
        *out_values.stride(),
        *out_scales.stride(),
        num_rows,
        hidden_size,
        BLOCK_ROWS=block_rows,
        BLOCK_GROUPS=block_groups,
        num_warps=num_warps,
        **launch_options(rows.device),
    )


@triton.jit
def quantize_group(x):
    """x: [LINES, 128] float32, 0 past the last column. Values [LINES, 128] e4m3, scales [LINES]."""
    numbers = tl.where(x == x, tl.abs(x), 0.0)
    amax = tl.maximum(tl.max(numbers, axis=1), 448.0 * 2.0**-126)
    factors = tl.div_rn(448.0, amax)
    values = (x * factors[:, None]).to(tl.float8e4nv)
    return values, tl.div_rn(amax, 448.0)


@triton.jit
def lines_of_block(num_rows, num_columns, BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr):
    """This program's lines, each a group of 128 columns of one row: their rows (int64), groups,
    columns [LINES, 128], and which there are. Programs take blocks of groups, then of rows."""
    num_groups = tl.cdiv(num_columns, 128)
    num_blocks = tl.cdiv(num_groups, BLOCK_GROUPS)
    block = tl.program_id(0)
    lines = tl.arange(0, BLOCK_ROWS * BLOCK_GROUPS)
    rows = (block // num_blocks).to(tl.int64) * BLOCK_ROWS + lines // BLOCK_GROUPS
    groups = block % num_blocks * BLOCK_GROUPS + lines % BLOCK_GROUPS
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    return rows, groups, columns, (rows < num_rows) & (groups < num_groups)


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows_kernel(
    rows_ptr,  # [R, H]
    values_ptr,  # [R, H]
    scales_ptr,  # [R, G]
    stride_rows_row,
    stride_rows_col,
    stride_values_row,
    stride_values_col,
    stride_scales_row,
    stride_scales_group,
    num_rows,
    hidden_size,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a block of rows and of groups; a line is one group of one row."""
    await_predecessor(IS_DEPENDENT)
    rows, groups, columns, is_line = lines_of_block(num_rows, hidden_size, BLOCK_ROWS, BLOCK_GROUPS)
    mask = is_line[:, None] & (columns < hidden_size)
    columns = columns.to(tl.int64)
    x_ptrs = rows_ptr + rows[:, None] * stride_rows_row + columns * stride_rows_col
    values, scales = quantize_group(tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32))
    values_ptrs = values_ptr + rows[:, None] * stride_values_row + columns * stride_values_col
    tl.store(values_ptrs, values, mask=mask)
    scales_ptrs = scales_ptr + rows * stride_scales_row
    tl.store(scales_ptrs + groups.to(tl.int64) * stride_scales_group, scales, mask=is_line)
