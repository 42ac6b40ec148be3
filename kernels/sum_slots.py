"""Sum each row's slots, which are weighted already.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, E local experts.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.base import StandardExpertInput
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch


def sum_slots(
    slot_outputs: Tensor, expert_input: StandardExpertInput, *, num_local_experts: int, out: Tensor
) -> None:
    """out[r] = sum over k of slot_outputs[r * K + k], in float32, k rising.

    slot_outputs: [N, H]; slots whose id is outside [0, num_local_experts), and those of rows from
    num_rows on, are never read: they count as exactly 0. out: [R, H], any strides, written whole.
    Moves slots * H + R * H elements. Does not wait for the device.
    """
    prepare_launch(out.device)
    ids = expert_input.topk_ids.contiguous()
    num_rows, hidden_size = out.shape
    # An interpreted program costs 65 us whatever its size.
    block_rows = 64 if is_interpreting() else 1
    block_columns = min(triton.next_power_of_2(hidden_size), 4096 if is_interpreting() else 1024)
    num_blocks = triton.cdiv(hidden_size, block_columns)
    _sum_slots_kernel[(triton.cdiv(num_rows, block_rows) * num_blocks,)](
        slot_outputs,
        ids,
        expert_input.num_rows,
        out,
        *out.stride(),
        num_rows,
        hidden_size,
        num_local_experts,
        TOP_K=ids.shape[1],
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        **launch_options(out.device),
    )


def sum_slots_reference(
    slot_outputs: Tensor, expert_input: StandardExpertInput, *, num_local_experts: int, out: Tensor
) -> None:
    """The definition of `sum_slots`."""
    ids = expert_input.topk_ids
    is_valid = (ids >= 0) & (ids < num_local_experts)
    if expert_input.num_rows is not None:
        rows = torch.arange(ids.shape[0], device=ids.device)
        is_valid &= (rows < expert_input.num_rows)[:, None]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    slot_outputs = slot_outputs.view(*ids.shape, -1)
    for k in range(ids.shape[1]):
        total += torch.where(is_valid[:, k, None], slot_outputs[:, k].float(), 0.0)
    out.copy_(total)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_slots_kernel(
    slot_outputs_ptr,  # [N, H]
    ids_ptr,  # [R, K]
    num_rows_ptr,  # [1] or None
    out_ptr,  # [R, H]
    stride_out_row,
    stride_out_col,
    num_rows,
    hidden_size,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a block of rows and of hidden columns; the loads of all slots are in flight."""
    await_predecessor(IS_DEPENDENT)
    num_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)
    block = tl.program_id(0)
    rows = (block // num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    columns = block % num_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_column = columns < hidden_size
    is_row = rows < num_rows
    is_written = is_row
    if num_rows_ptr is not None:
        is_written = is_row & (rows < tl.load(num_rows_ptr))
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        slots = rows * TOP_K + k
        ids = tl.load(ids_ptr + slots, mask=is_written, other=-1)
        is_valid = (ids >= 0) & (ids < num_experts)
        values = tl.load(
            slot_outputs_ptr + slots[:, None] * hidden_size + columns[None, :],
            mask=is_valid[:, None] & is_column[None, :],
            other=0.0,
        )
        total += values.to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * stride_out_row
    out_ptrs += columns.to(tl.int64)[None, :] * stride_out_col
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
