"""From positions in expert order back to rows: where each slot lies, and each row's weighted sum.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, E local experts, P padded positions
(`AlignedSlots`).
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import StandardExpertInput
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch


def index_positions(
    aligned: AlignedSlots, *, position_experts: Tensor, slot_positions: Tensor
) -> None:
    """Each position's expert, and each slot's position. One launch; does not wait for the device.

    position_experts: [P] int32, written whole: the local expert, or -1 where the position is
    padding or lies past the tiles in use. slot_positions: [N] int32; a slot without a position
    stays unwritten memory.

    Example: two tiles of 16, slots (0, 4, 14 times 5, 1, 2, 14 times 5), where 5 is N, and
    tile_experts (0, 2) give position_experts (0, 0, 14 times -1, 2, 2, 14 times -1) and
    slot_positions (0, 16, 17, ?, 1).
    """
    prepare_launch(position_experts.device)
    num_positions = aligned.max_tiles * aligned.block_m
    block = 4096 if is_interpreting() else 1024
    _index_positions_kernel[(triton.cdiv(num_positions, block),)](
        aligned.slots,
        aligned.tile_experts,
        aligned.num_tiles,
        position_experts,
        slot_positions,
        num_positions,
        aligned.num_slots,
        BLOCK_M=aligned.block_m,
        BLOCK_POSITIONS=block,
        **launch_options(position_experts.device),
    )


def index_positions_reference(
    aligned: AlignedSlots, *, position_experts: Tensor, slot_positions: Tensor
) -> None:
    """The definition of `index_positions`. Waits."""
    num_positions = int(aligned.num_tiles) * aligned.block_m
    slots = aligned.slots[:num_positions].long()
    experts = aligned.tile_experts[: int(aligned.num_tiles)].repeat_interleave(aligned.block_m)
    is_real = slots < aligned.num_slots
    position_experts.fill_(-1)
    position_experts[:num_positions] = torch.where(is_real, experts, -1)
    positions = torch.arange(num_positions, dtype=torch.int32, device=slots.device)
    slot_positions[slots[is_real]] = positions[is_real]


@triton.jit(do_not_specialize=["num_positions", "num_slots"])
def _index_positions_kernel(
    slots_ptr,  # [P]
    tile_experts_ptr,  # [P / BLOCK_M]
    num_tiles_ptr,  # [1]
    position_experts_ptr,  # [P]
    slot_positions_ptr,  # [N]
    num_positions,
    num_slots,
    BLOCK_M: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a block of positions."""
    await_predecessor(IS_DEPENDENT)
    positions = tl.program_id(0) * BLOCK_POSITIONS + tl.arange(0, BLOCK_POSITIONS)
    is_position = positions < num_positions
    tiles = positions // BLOCK_M
    is_used = is_position & (tiles < tl.load(num_tiles_ptr))
    slots = tl.load(slots_ptr + positions, mask=is_used, other=num_slots)
    is_real = slots < num_slots
    experts = tl.load(tile_experts_ptr + tiles, mask=is_real, other=-1)
    tl.store(position_experts_ptr + positions, experts, mask=is_position)
    tl.store(slot_positions_ptr + slots, positions, mask=is_real)


def sum_positions(
    outputs: Tensor,
    slot_positions: Tensor,
    expert_input: StandardExpertInput,
    *,
    num_local_experts: int,
    out: Tensor,
) -> None:
    """out[r] = sum over k of topk_weights[r, k] * outputs[slot_positions[r * K + k]], k rising.

    outputs: [P, H] contiguous. slot_positions: [N] int32. Products and sums in float32, rounded
    once. A slot whose id is outside [0, num_local_experts), and those of rows from num_rows on,
    count as exactly 0: neither weight nor output is read. out: [R, H], any strides, written whole.
    Moves slots * H + R * H elements. One launch; does not wait for the device.
    """
    prepare_launch(out.device)
    ids = expert_input.topk_ids.contiguous()
    num_rows, hidden_size = out.shape
    # An interpreted program costs 65 us whatever its size.
    block_rows = 64 if is_interpreting() else 1
    block_columns = min(triton.next_power_of_2(hidden_size), 4096 if is_interpreting() else 1024)
    num_blocks = triton.cdiv(hidden_size, block_columns)
    _sum_positions_kernel[(triton.cdiv(num_rows, block_rows) * num_blocks,)](
        outputs,
        slot_positions,
        ids,
        expert_input.topk_weights.contiguous(),
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


def sum_positions_reference(
    outputs: Tensor,
    slot_positions: Tensor,
    expert_input: StandardExpertInput,
    *,
    num_local_experts: int,
    out: Tensor,
) -> None:
    """The definition of `sum_positions`."""
    ids = expert_input.topk_ids
    is_valid = (ids >= 0) & (ids < num_local_experts)
    if expert_input.num_rows is not None:
        rows = torch.arange(ids.shape[0], device=ids.device)
        is_valid &= (rows < expert_input.num_rows)[:, None]
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    positions = torch.where(is_valid, slot_positions.view(ids.shape), 0).long()
    for k in range(ids.shape[1]):
        weighted = expert_input.topk_weights[:, k, None] * outputs[positions[:, k]].float()
        total += torch.where(is_valid[:, k, None], weighted, 0.0)
    out.copy_(total)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_positions_kernel(
    outputs_ptr,  # [P, H]
    slot_positions_ptr,  # [N]
    ids_ptr,  # [R, K]
    topk_weights_ptr,  # [R, K]
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
        weights = tl.load(topk_weights_ptr + slots, mask=is_valid, other=0.0)
        positions = tl.load(slot_positions_ptr + slots, mask=is_valid, other=0).to(tl.int64)
        values = tl.load(
            outputs_ptr + positions[:, None] * hidden_size + columns[None, :],
            mask=is_valid[:, None] & is_column[None, :],
            other=0.0,
        )
        total += weights[:, None] * values.to(tl.float32)
    out_ptrs = out_ptr + rows[:, None] * stride_out_row
    out_ptrs += columns.to(tl.int64)[None, :] * stride_out_col
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
