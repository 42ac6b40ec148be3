"""Bring rows into the order of their experts' tiles, quantising or dequantising on the way.

A grouped GEMM then reads its left operand by TMA, tile after tile.

Shapes: R rows, K slots a row, H hidden size, G = ceil(H / 128) groups of a row, P padded positions
(`AlignedSlots`).
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import BatchedExpertInput, ExpertInput
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.quant.fp8_rows import (
    dequantize_rows,
    num_groups,
    quantize_group,
    quantize_rows_reference,
)

# Four on each multiprocessor of an H100 or H200, 16 KiB of bfloat16 rows in flight in each.
MAX_PROGRAMS = 4 * 132
_FP8 = torch.float8_e4m3fn
_DTYPES = {torch.float32, torch.bfloat16, torch.float16, _FP8}


def permute_rows(
    expert_input: ExpertInput,
    aligned: AlignedSlots,
    *,
    out: Tensor,
    out_scales: Tensor | None = None,
) -> None:
    """out[p] = the row that the slot of position p belongs to; 0 where p is padding. One launch.

    expert_input: hidden_states and scales of any strides; its rows are never read past what
    `aligned` names. out: [at least max_tiles * block_m, H], any strides; memory from position
    num_tiles * block_m on is not touched and costs nothing. By dtype of rows and out:

    - the same: copied bit by bit; of e4m3 rows the scales are copied to out_scales.
    - float to e4m3: quantised as `quantize_rows_reference` does.
    - e4m3 to float: dequantised, for which out_scales is None.

    out_scales: of e4m3 out, [G, at least max_tiles * block_m] float32 of any strides, 0 on padding;
    contiguous, so that one group's scales of a tile lie side by side. Moves, for every position of
    a tile, H elements in (unless padding) and out. Does not wait for the device. Raises ValueError
    where a dtype or a shape does not fit.
    """
    rows, scales = expert_input.hidden_states, expert_input.scales
    _check(expert_input, aligned, out, out_scales)
    num_positions, hidden_size = aligned.max_tiles * aligned.block_m, out.shape[1]
    if num_positions == 0 or hidden_size == 0:
        return
    prepare_launch(out.device)
    # Slot s is row s % divisor of batch s // divisor, or row s // divisor.
    if isinstance(expert_input, BatchedExpertInput):
        divisor = rows.shape[1]
        row_strides = rows.stride()
        scale_strides = (0, 0, 0) if scales is None else scales.stride()
    else:
        divisor = expert_input.topk_ids.shape[1]
        row_strides = (rows.stride(0), 0, rows.stride(1))
        scale_strides = (0, 0, 0) if scales is None else (scales.stride(0), 0, scales.stride(1))
    groups = num_groups(hidden_size)
    block_rows, block_groups = 16, 4
    if is_interpreting():  # an operation costs 85 us however large it is
        block_rows, block_groups = 64, min(triton.next_power_of_2(groups), 64)
    num_blocks = triton.cdiv(num_positions, block_rows) * triton.cdiv(groups, block_groups)
    _permute_rows_kernel[(min(num_blocks, 4 if is_interpreting() else MAX_PROGRAMS),)](
        rows,
        scales,
        aligned.slots,
        aligned.num_tiles,
        out,
        out_scales,
        *row_strides,
        *scale_strides,
        *out.stride(),
        *((0, 0) if out_scales is None else out_scales.stride()),
        aligned.num_slots,
        divisor,
        hidden_size,
        BLOCK_M=aligned.block_m,
        BLOCK_ROWS=block_rows,
        BLOCK_GROUPS=block_groups,
        num_warps=8,
    )


def _check(
    expert_input: ExpertInput, aligned: AlignedSlots, out: Tensor, out_scales: Tensor | None
) -> None:
    """Refuse what the kernel has no answer to."""
    rows, scales = expert_input.hidden_states, expert_input.scales
    num_positions = aligned.max_tiles * aligned.block_m
    dtypes = {rows.dtype, out.dtype}
    if not dtypes <= _DTYPES or (len(dtypes) == 2 and _FP8 not in dtypes):
        raise ValueError(
            f"rows of {rows.dtype} cannot be permuted to {out.dtype}; both must be of the same "
            f"dtype, or one of them of {_FP8}"
        )
    for name, tensor, its_scales in (("hidden_states", rows, scales), ("out", out, out_scales)):
        if (tensor.dtype is _FP8) != (its_scales is not None):
            raise ValueError(
                f"{name} of {tensor.dtype} came {'without' if its_scales is None else 'with'} "
                f"scales; {_FP8} has them, other dtypes have none"
            )
    hidden_size = rows.shape[-1]
    if out.ndim != 2 or out.shape[0] < num_positions or out.shape[1] != hidden_size:
        raise ValueError(
            f"out is {list(out.shape)}; {aligned.max_tiles} tiles of {aligned.block_m} rows of "
            f"{list(rows.shape)} need [{num_positions}, {hidden_size}]"
        )
    groups = num_groups(hidden_size)
    for name, its_scales, shape in (
        ("scales", scales, (*rows.shape[:-1], groups)),
        ("out_scales", out_scales, (groups, out.shape[0])),
    ):
        if its_scales is None or (its_scales.shape, its_scales.dtype) == (shape, torch.float32):
            continue
        raise ValueError(
            f"{name} is {its_scales.dtype} {list(its_scales.shape)}; it must be torch.float32 "
            f"{list(shape)}"
        )


def permute_rows_reference(
    expert_input: ExpertInput,
    aligned: AlignedSlots,
    *,
    out: Tensor,
    out_scales: Tensor | None = None,
) -> None:
    """The definition of `permute_rows`. Waits."""
    num_positions = int(aligned.num_tiles) * aligned.block_m
    slots = aligned.slots[:num_positions].long()
    is_real = slots < aligned.num_slots
    rows, scales, top_k = expert_input.hidden_states, expert_input.scales, 1
    if isinstance(expert_input, BatchedExpertInput):
        rows = rows.flatten(0, 1)
        scales = None if scales is None else scales.flatten(0, 1)
    else:
        top_k = expert_input.topk_ids.shape[1]
    index = slots[is_real] // max(top_k, 1)
    picked = _bytes(rows)[index].view(rows.dtype)
    picked_scales = None if scales is None else scales[index]
    if picked_scales is not None and out.dtype is not _FP8:
        picked, picked_scales = dequantize_rows(picked, picked_scales, out.dtype), None
    elif picked_scales is None and out.dtype is _FP8:
        picked, picked_scales = quantize_rows_reference(picked)
    written = torch.zeros((num_positions, out.shape[1]), dtype=out.dtype, device=out.device)
    _bytes(written)[is_real] = _bytes(picked)
    _bytes(out)[:num_positions] = _bytes(written)
    if out_scales is not None and picked_scales is not None:
        out_scales[:, :num_positions] = 0
        out_scales[:, :num_positions][:, is_real] = picked_scales.T


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes where it is e4m3, which torch cannot index; else the same tensor."""
    return tensor.view(torch.uint8) if tensor.dtype is _FP8 else tensor


@triton.jit(do_not_specialize=["num_slots"])
def _permute_rows_kernel(
    rows_ptr,  # [R, H], or [E, capacity, H]
    scales_ptr,  # [R, G], or [E, capacity, G], or None
    slots_ptr,  # [P]
    num_tiles_ptr,  # [1]
    out_ptr,  # [P, H]
    out_scales_ptr,  # [G, P] or None
    stride_rows_batch,
    stride_rows_row,
    stride_rows_col,
    stride_scales_batch,
    stride_scales_row,
    stride_scales_group,
    stride_out_row,
    stride_out_col,
    stride_out_scales_group,
    stride_out_scales_row,
    num_slots,
    divisor,
    hidden_size,
    BLOCK_M: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Any number of programs share the blocks of rows and of groups; a line is a row's group."""
    num_positions = tl.load(num_tiles_ptr).to(tl.int64) * BLOCK_M
    num_groups = tl.cdiv(hidden_size, 128)
    num_blocks = tl.cdiv(num_groups, BLOCK_GROUPS)
    num_items = tl.cdiv(num_positions, BLOCK_ROWS).to(tl.int32) * num_blocks
    lines = tl.arange(0, BLOCK_ROWS * BLOCK_GROUPS)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        positions = (item // num_blocks).to(tl.int64) * BLOCK_ROWS + lines // BLOCK_GROUPS
        groups = item % num_blocks * BLOCK_GROUPS + lines % BLOCK_GROUPS
        columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
        is_column = columns < hidden_size
        columns = columns.to(tl.int64)
        groups = groups.to(tl.int64)
        is_line = (positions < num_positions) & (groups < num_groups)
        slots = tl.load(slots_ptr + positions, mask=is_line, other=num_slots)
        is_real = slots < num_slots
        batches = (slots // divisor).to(tl.int64)
        rows = (slots % divisor).to(tl.int64)
        x_ptrs = rows_ptr + (batches * stride_rows_batch + rows * stride_rows_row)[:, None]
        x_ptrs += columns * stride_rows_col
        x = tl.load(x_ptrs, mask=is_real[:, None] & is_column, other=0.0)
        if scales_ptr is not None:
            scales_ptrs = scales_ptr + batches * stride_scales_batch + rows * stride_scales_row
            scales_ptrs += groups * stride_scales_group
            scales = tl.load(scales_ptrs, mask=is_real, other=0.0)
            if out_scales_ptr is None:
                x = (x.to(tl.float32) * scales[:, None]).to(out_ptr.dtype.element_ty)
        elif out_scales_ptr is not None:
            x, scales = quantize_group(x.to(tl.float32))
            scales = tl.where(is_real, scales, 0.0)
        if out_scales_ptr is not None:
            scales_ptrs = out_scales_ptr + positions * stride_out_scales_row
            tl.store(scales_ptrs + groups * stride_out_scales_group, scales, mask=is_line)
        out_ptrs = out_ptr + positions[:, None] * stride_out_row + columns * stride_out_col
        tl.store(out_ptrs, x, mask=is_line[:, None] & is_column)
