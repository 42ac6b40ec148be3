"""Sum each row's slots: weighted already and by slot, or raw and by position.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, E local experts, P padded positions.
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

# Of the rows of parts. Twice the layer's dtype, of few rows, and parts that cancel lose nothing.
PARTS_DTYPE = torch.float32


def sum_slots(
    outputs: Tensor,
    expert_input: StandardExpertInput,
    *,
    num_local_experts: int,
    out: Tensor,
    slot_positions: Tensor | None = None,
    num_parts: int = 1,
) -> None:
    """out[r] = sum over k of outputs[r * K + k], in float32, k rising.

    outputs: [N, H] contiguous. With slot_positions, [N] int32, it is [P, H] and raw, and a summand
    is topk_weights[r, k] * outputs[slot_positions[r * K + k]]. In parts, it has num_parts rows for
    each of these, one after another, that are summed in their order. Slots whose id is outside
    [0, num_local_experts), and those of rows from num_rows on, are never read: they count as
    exactly 0. out: [R, H], any strides, written whole. Moves slots * num_parts * H + R * H
    elements. One launch; does not wait for the device.
    """
    prepare_launch(out.device)
    ids = expert_input.topk_ids.contiguous()
    num_rows, hidden_size = out.shape
    # An interpreted program costs 65 us whatever its size.
    block_rows = 64 if is_interpreting() else 1
    block_columns = min(triton.next_power_of_2(hidden_size), 4096 if is_interpreting() else 1024)
    num_blocks = triton.cdiv(hidden_size, block_columns)
    _sum_slots_kernel[(triton.cdiv(num_rows, block_rows) * num_blocks,)](
        outputs,
        slot_positions,
        ids,
        None if slot_positions is None else expert_input.topk_weights.contiguous(),
        expert_input.num_rows,
        out,
        *out.stride(),
        num_rows,
        hidden_size,
        num_local_experts,
        TOP_K=ids.shape[1],
        NUM_PARTS=num_parts,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        # 32 bytes of a 16-bit slot a thread: twice as many in flight as with 4 warps.
        num_warps=2,
        **launch_options(out.device),
    )


def sum_slots_reference(
    outputs: Tensor,
    expert_input: StandardExpertInput,
    *,
    num_local_experts: int,
    out: Tensor,
    slot_positions: Tensor | None = None,
    num_parts: int = 1,
) -> None:
    """The definition of `sum_slots`."""
    ids = expert_input.topk_ids
    is_valid = (ids >= 0) & (ids < num_local_experts)
    if expert_input.num_rows is not None:
        rows = torch.arange(ids.shape[0], device=ids.device)
        is_valid &= (rows < expert_input.num_rows)[:, None]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    positions = torch.arange(ids.numel(), device=ids.device)
    if slot_positions is not None:
        positions = torch.where(is_valid.flatten(), slot_positions, 0).long()
    positions = positions.view(ids.shape)
    for k in range(ids.shape[1]):
        for part in range(num_parts):
            values = outputs[positions[:, k] * num_parts + part].float()
            if slot_positions is not None:
                values = expert_input.topk_weights[:, k, None] * values
            total += torch.where(is_valid[:, k, None], values, 0.0)
    out.copy_(total)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_slots_kernel(
    outputs_ptr,  # [N * NUM_PARTS, H], or [P * NUM_PARTS, H] where there are positions
    slot_positions_ptr,  # [N] or None
    ids_ptr,  # [R, K]
    topk_weights_ptr,  # [R, K], or None where the outputs are weighted
    num_rows_ptr,  # [1] or None
    out_ptr,  # [R, H]
    stride_out_row,
    stride_out_col,
    num_rows,
    hidden_size,
    num_experts,
    TOP_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
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
        positions = slots
        if slot_positions_ptr is not None:
            positions = tl.load(slot_positions_ptr + slots, mask=is_valid, other=0).to(tl.int64)
        for part in tl.static_range(NUM_PARTS):
            values = tl.load(
                outputs_ptr
                + (positions[:, None] * NUM_PARTS + part) * hidden_size
                + columns[None, :],
                mask=is_valid[:, None] & is_column[None, :],
                other=0.0,
            ).to(tl.float32)
            if topk_weights_ptr is not None:
                values *= tl.load(topk_weights_ptr + slots, mask=is_valid, other=0.0)[:, None]
            total += values
    out_ptrs = out_ptr + rows[:, None] * stride_out_row
    out_ptrs += columns.to(tl.int64)[None, :] * stride_out_col
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
