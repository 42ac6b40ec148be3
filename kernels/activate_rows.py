"""Activate rows and quantise them, in one pass: what stands between two GEMMs on fp8 rows.

Also quantises rows that are not to be activated. Rows come in batches, each with a count, so that
what nobody wrote is not read.

Shapes: B batches, M rows of each, I columns of a result, G = ceil(I / 128) groups.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.grouped_gemm import activate
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.quant.fp8_rows import num_groups, quantize_group, quantize_rows_reference

# Four on each multiprocessor of an H100 or H200.
MAX_PROGRAMS = 4 * 132


def activate_rows(
    rows: Tensor,
    activation: Activation | None,
    counts: Tensor,
    *,
    rows_per_count: int = 1,
    out_values: Tensor,
    out_scales: Tensor,
) -> None:
    """out[b, i] = quantised activation(rows[b, i]) for i below counts[b] * rows_per_count.

    rows: [B, M, 2I] gate first, then up; [B, M, I] where not gated, or without an activation;
    float32, bfloat16 or float16. counts: [B] int32; more than M counts as M.
    out_values: [B, at least M, I] e4m3; out_scales: [B, at least M, G] float32; as
    `quantize_rows_reference` defines them, of the activation in float32, which is not rounded in
    between. Rows past the count are neither read nor written. Any strides. Moves what the counts
    say. One launch; does not wait for the device. Raises ValueError where a shape does not fit.
    """
    num_batches, num_rows, _ = rows.shape
    width = _check(rows, activation, out_values, out_scales)
    if num_batches == 0 or num_rows == 0:
        return
    prepare_launch(rows.device)
    groups = num_groups(width)
    block_rows, block_groups = 16, 2
    if is_interpreting():  # an operation costs 85 us however large it is
        block_rows, block_groups = 64, min(triton.next_power_of_2(groups), 16)
    num_items = triton.cdiv(num_rows, block_rows) * triton.cdiv(groups, block_groups)
    limit = 4 if is_interpreting() else max(1, MAX_PROGRAMS // num_batches)
    _activate_rows_kernel[(min(num_items, limit), num_batches)](
        rows,
        counts,
        out_values,
        out_scales,
        *rows.stride(),
        counts.stride(0),
        *out_values.stride(),
        *out_scales.stride(),
        num_rows,
        width,
        activation.alpha if activation is not None else 0.0,
        activation.limit if activation is not None else None,
        ROWS_PER_COUNT=rows_per_count,
        ACTIVATION=None if activation is None else activation.kind.value,
        IS_GATED=activation is not None and activation.is_gated,
        BLOCK_ROWS=block_rows,
        BLOCK_GROUPS=block_groups,
        num_warps=8,
        **launch_options(rows.device),
    )


def _check(
    rows: Tensor, activation: Activation | None, out_values: Tensor, out_scales: Tensor
) -> int:
    """I; refuses what the kernel has no answer to."""
    num_batches, num_rows, num_columns = rows.shape
    is_gated = activation is not None and activation.is_gated
    width = num_columns // 2 if is_gated else num_columns
    for name, out, last, dtype in (
        ("out_values", out_values, width, torch.float8_e4m3fn),
        ("out_scales", out_scales, num_groups(width), torch.float32),
    ):
        fits = out.ndim == 3 and (out.shape[0], out.shape[2]) == (num_batches, last)
        if not fits or out.shape[1] < num_rows or out.dtype is not dtype:
            raise ValueError(
                f"{name} is {out.dtype} {list(out.shape)}; rows {list(rows.shape)} need {dtype} "
                f"{[num_batches, num_rows, last]}"
            )
    return width


def activate_rows_reference(
    rows: Tensor,
    activation: Activation | None,
    counts: Tensor,
    *,
    rows_per_count: int = 1,
    out_values: Tensor,
    out_scales: Tensor,
) -> None:
    """The definition of `activate_rows`. Waits."""
    for batch, count in enumerate(counts.tolist()):
        taken = rows[batch, : count * rows_per_count].float()
        if activation is not None:
            taken = apply_activation(taken, activation)
        values, scales = quantize_rows_reference(taken)
        out_values[batch].view(torch.uint8)[: len(taken)] = values.view(torch.uint8)
        out_scales[batch, : len(taken)] = scales


@triton.jit(do_not_specialize=["num_rows"])
def _activate_rows_kernel(
    rows_ptr,  # [B, M, 2I] or [B, M, I]
    counts_ptr,  # [B]
    values_ptr,  # [B, M, I]
    scales_ptr,  # [B, M, G]
    stride_rows_batch,
    stride_rows_row,
    stride_rows_col,
    stride_counts_batch,
    stride_values_batch,
    stride_values_row,
    stride_values_col,
    stride_scales_batch,
    stride_scales_row,
    stride_scales_group,
    num_rows,
    width,
    alpha,
    limit,
    ROWS_PER_COUNT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The programs of a batch share its blocks of rows and groups; a line is a row's group."""
    await_predecessor(IS_DEPENDENT)
    batch = tl.program_id(1).to(tl.int64)
    rows_ptr += batch * stride_rows_batch
    values_ptr += batch * stride_values_batch
    scales_ptr += batch * stride_scales_batch
    count = tl.load(counts_ptr + batch * stride_counts_batch) * ROWS_PER_COUNT
    count = tl.minimum(count, num_rows)
    num_groups = tl.cdiv(width, 128)
    num_blocks = tl.cdiv(num_groups, BLOCK_GROUPS)
    num_items = tl.cdiv(count, BLOCK_ROWS) * num_blocks
    lines = tl.arange(0, BLOCK_ROWS * BLOCK_GROUPS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        rows = (item // num_blocks).to(tl.int64) * BLOCK_ROWS + lines // BLOCK_GROUPS
        groups = item % num_blocks * BLOCK_GROUPS + lines % BLOCK_GROUPS
        columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        is_line = (rows < count) & (groups < num_groups)
        mask = is_line[:, None] & (columns < width)
        columns = columns.to(tl.int64)
        x_ptrs = rows_ptr + rows[:, None] * stride_rows_row + columns * stride_rows_col
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        if ACTIVATION is not None:
            up = x
            if IS_GATED:
                up_ptrs = rows_ptr + rows[:, None] * stride_rows_row
                up_ptrs += (columns + width) * stride_rows_col
                up = tl.load(up_ptrs, mask=mask, other=0.0).to(tl.float32)
            # Of zeros it is 0, whichever it is: what a mask left out does not raise an amax.
            x = activate(x, up, alpha, limit, ACTIVATION)
        values, scales = quantize_group(x)
        values_ptrs = values_ptr + rows[:, None] * stride_values_row + columns * stride_values_col
        tl.store(values_ptrs, values, mask=mask)
        scales_ptrs = scales_ptr + rows * stride_scales_row
        tl.store(scales_ptrs + groups.to(tl.int64) * stride_scales_group, scales, mask=is_line)
