"""Where each slot lies in expert order, and which expert a position belongs to.

Shapes: N slots, P padded positions (`AlignedSlots`).
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
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
