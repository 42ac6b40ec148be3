"""Sort a batch's slots by local expert into whole tiles of positions.

A counting sort without communication between programs. Of few slots a program has one expert, and
counts for itself what comes before it, in one launch; of many (`kernels/align_chunks.py`) a chunk
of them, in two. The order is that of the slots, so results are bit-equal from run to run, and the
host never learns a count.

Shapes: R rows, K slots a row, N = R * K slots, E local experts. Slot s belongs to row s // K.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.align_chunks import (
    align_chunks,
    block_experts,
    count_tiles,
    end_of_valid_slots,
    id_pointers,
    num_chunks,
    store_tiles,
)
from ep_runtime.kernels.base import StandardExpertInput
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

# Slots are numbered in int32, and N itself is the sentinel.
MAX_SLOTS = 2**31 - 1
# Sizes of the one block of ids that every expert's program looks at, where there are few slots.
FEW_SLOTS = (256, 1024, 4096)


@dataclass(frozen=True)
class AlignedSlots:
    """The valid slots in expert order, each expert's padded to whole tiles.

    Tile t is positions [t * block_m, (t + 1) * block_m). Experts that have slots own tiles in
    rising order; within an expert's run its slots rise.

    slots: [max_tiles * block_m] int32, each position's slot, or `num_slots` where the position is
    padding of an expert's last tile; unwritten memory from num_tiles * block_m on.
    tile_experts: [max_tiles] int32, each tile's expert; unwritten memory from num_tiles on.
    tile_order: [max_tiles] int32, the *tall* tiles, those with more than block_m / 2 slots, in
    rising order from the front, and the others in rising order from the back, the r-th at
    len(tile_order) - 1 - r; unwritten memory between them.
    num_tiles: [1] int32. num_tall_tiles: [1] int32.
    max_tiles: bounds num_tiles on the host; a grid of that many programs covers every tile.
    block_m: positions a tile. num_slots: N, the sentinel.
    Of batched rows (K = 1) a slot is a row of hidden_states.view(E * capacity, H).

    Example: ids [[0, 2], [2, -1]] of 3 experts with block_m 16 give num_tiles 2, num_tall_tiles 0,
    tile_experts (0, 2, ?), tile_order (?, 1, 0), and slots (0, then 15 times 4, 1, 2, then 14 times
    4, 16 unwritten): expert 1 has no slot and no tile, slot 3 no expert.
    """

    slots: Tensor
    tile_experts: Tensor
    tile_order: Tensor
    num_tiles: Tensor
    num_tall_tiles: Tensor
    max_tiles: int
    block_m: int
    num_slots: int

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What a launch writes, as the kernels take it."""
        return (
            self.slots,
            self.tile_experts,
            self.tile_order,
            self.num_tiles,
            self.num_tall_tiles,
        )


def max_tiles(num_slots: int, num_local_experts: int, block_m: int) -> int:
    """Most tiles that any ids give: the full ones, and one begun tile for each expert in use."""
    return num_slots // block_m + min(num_slots, num_local_experts)


def align_workspace_bytes(num_slots: int, num_local_experts: int, block_m: int) -> int:
    """What `align_slots` takes from the workspace; never less for more slots."""
    of_tables = table_bytes(max_tiles(num_slots, num_local_experts, block_m), block_m)
    if _has_few_slots(num_slots):
        return of_tables
    return of_tables + aligned_bytes(4 * num_chunks(num_slots) * num_local_experts)


def _table_sizes(tiles: int, block_m: int) -> tuple[int, int, int, int, int]:
    return tiles * block_m, tiles, tiles, 1, 1


def table_bytes(tiles: int, block_m: int) -> int:
    """What `take_tables` takes."""
    return sum(aligned_bytes(4 * size) for size in _table_sizes(tiles, block_m))


def take_tables(workspace: Workspace, tiles: int, block_m: int, num_slots: int) -> AlignedSlots:
    """Unwritten tables with room for so many tiles, until the workspace's frame ends."""
    slots, tile_experts, tile_order, num_tiles, num_tall_tiles = (
        workspace.take((size,), torch.int32) for size in _table_sizes(tiles, block_m)
    )
    return AlignedSlots(
        slots, tile_experts, tile_order, num_tiles, num_tall_tiles, tiles, block_m, num_slots
    )


def _has_few_slots(num_slots: int) -> bool:
    """Whether a program for each expert is faster; never where it is interpreted, at 2 ms each."""
    return num_slots <= FEW_SLOTS[-1] and not is_interpreting()


def align_slots(
    expert_input: StandardExpertInput,
    *,
    num_local_experts: int,
    block_m: int,
    workspace: Workspace,
) -> AlignedSlots:
    """Sort the slots whose id is in [0, num_local_experts) and whose row is before num_rows.

    topk_ids: [R, K] int32 or int64, any strides; R and num_local_experts may be 0. The result
    lives in `workspace`, until its frame ends. Does not wait for the device. Raises ValueError
    where N does not fit int32.
    """
    ids = expert_input.topk_ids
    num_slots = ids.numel()
    if num_slots > MAX_SLOTS:
        raise ValueError(
            f"topk_ids {list(ids.shape)} has {num_slots} slots; the limit is {MAX_SLOTS}: "
            "lower max_tokens_per_rank"
        )
    prepare_launch(ids.device)
    tiles = max_tiles(num_slots, num_local_experts, block_m)
    aligned = take_tables(workspace, tiles, block_m, num_slots)
    if not _has_few_slots(num_slots):
        counts = workspace.take((num_chunks(num_slots), num_local_experts), torch.int32)
        align_chunks(
            expert_input,
            aligned.tables,
            counts,
            num_local_experts=num_local_experts,
            block_m=block_m,
        )
        return aligned
    # Few block sizes, since each is compiled.
    block_slots = next(size for size in FEW_SLOTS if num_slots <= size)
    _align_few_slots_kernel[(max(1, num_local_experts),)](
        ids,
        expert_input.num_rows,
        *aligned.tables,
        *ids.stride(),
        *ids.shape,
        num_local_experts,
        tiles,
        BLOCK_M=block_m,
        BLOCK_E=block_experts(num_local_experts),
        BLOCK_SLOTS=block_slots,
        IS_CONTIGUOUS=ids.is_contiguous(),
        num_warps=4 if block_slots <= 1024 else 8,
        **launch_options(ids.device),
    )
    return aligned


def align_slots_reference(
    expert_input: StandardExpertInput, *, num_local_experts: int, block_m: int
) -> AlignedSlots:
    """The definition of `align_slots`; its tensors hold the written part only. Waits."""
    ids = expert_input.topk_ids
    is_valid = (ids >= 0) & (ids < num_local_experts)
    if expert_input.num_rows is not None:
        rows = torch.arange(ids.shape[0], device=ids.device)
        is_valid &= (rows < expert_input.num_rows)[:, None]
    keys = torch.where(is_valid, ids, num_local_experts).flatten().long()
    counts = keys.bincount(minlength=num_local_experts + 1)[:num_local_experts]
    in_order = keys.argsort(stable=True)[: int(counts.sum())]
    tiles = max_tiles(ids.numel(), num_local_experts, block_m)
    return lay_out_reference(in_order, counts, tiles, block_m=block_m, num_slots=ids.numel())


def lay_out_reference(
    in_order: Tensor, counts: Tensor, tiles: int, *, block_m: int, num_slots: int
) -> AlignedSlots:
    """Tables of slots in expert order, `counts[e]` of them expert e's."""
    tile_counts = (counts + block_m - 1) // block_m
    experts = torch.arange(len(counts), device=counts.device)
    first_positions = (tile_counts.cumsum(0) - tile_counts) * block_m
    shifts = first_positions - (counts.cumsum(0) - counts)
    positions = torch.arange(len(in_order), device=counts.device)
    positions = positions + shifts.repeat_interleave(counts)
    num_tiles = tile_counts.sum().view(1)
    slots = in_order.new_full((int(num_tiles) * block_m,), num_slots)
    slots[positions] = in_order
    is_tall = (slots.view(-1, block_m) < num_slots).sum(1) > block_m // 2
    others = (~is_tall).nonzero().flatten()
    return AlignedSlots(
        slots.to(torch.int32),
        experts.repeat_interleave(tile_counts).to(torch.int32),
        torch.cat([is_tall.nonzero().flatten(), others.flip(0)]).to(torch.int32),
        num_tiles.to(torch.int32),
        is_tall.sum().view(1).to(torch.int32),
        tiles,
        block_m,
        num_slots,
    )


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def _align_few_slots_kernel(
    ids_ptr,  # [R, K]
    num_rows_ptr,  # [1] or None
    slots_ptr,  # [max_tiles * BLOCK_M]
    tile_experts_ptr,  # [max_tiles]
    tile_order_ptr,  # [max_tiles]
    num_tiles_ptr,  # [1]
    num_tall_tiles_ptr,  # [1]
    stride_row,
    stride_col,
    num_rows,
    top_k,
    num_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,  # at least N
    IS_CONTIGUOUS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program an expert: its tiles follow those of the experts before it."""
    await_predecessor(IS_DEPENDENT)
    expert = tl.program_id(0)
    num_slots = num_rows * top_k
    slots = tl.arange(0, BLOCK_SLOTS)
    # The ids do not wait for num_rows.
    layout = (stride_row, stride_col, top_k)
    pointers = id_pointers(ids_ptr, slots.to(tl.int64), layout, IS_CONTIGUOUS)
    ids = tl.load(pointers, mask=slots < num_slots, other=-1)
    is_valid = (ids >= 0) & (slots < end_of_valid_slots(num_rows_ptr, num_rows, top_k).to(tl.int32))
    first_tile = 0
    first_tall = 0
    for first_expert in range(0, expert, BLOCK_E):
        bins = ids - first_expert
        is_before = is_valid & (bins >= 0) & (bins < tl.minimum(expert - first_expert, BLOCK_E))
        counts = tl.histogram(bins.to(tl.int32), BLOCK_E, mask=is_before)
        expert_tiles, tall_tiles = count_tiles(counts, BLOCK_M)
        first_tile += tl.sum(expert_tiles, axis=0)
        first_tall += tl.sum(tall_tiles, axis=0)

    is_own = (is_valid & (ids == expert) & (expert < num_experts)).to(tl.int32)
    rank = tl.cumsum(is_own, axis=0) - is_own
    count = tl.sum(is_own, axis=0)
    own_tiles, own_tall = count_tiles(count, BLOCK_M)
    run_ptr = slots_ptr + tl.cast(first_tile, tl.int64) * BLOCK_M
    tl.store(run_ptr + rank, slots, mask=is_own > 0)
    padding = count + tl.arange(0, BLOCK_M)
    tl.store(run_ptr + padding, num_slots, mask=padding < own_tiles * BLOCK_M)
    tiles = tl.arange(0, max(BLOCK_SLOTS // BLOCK_M, 1))
    store_tiles(
        tile_experts_ptr,
        tile_order_ptr,
        expert,
        tiles,
        first_tile,
        first_tall,
        own_tall,
        max_tiles,
        tiles < own_tiles,
    )
    if expert + 1 == tl.num_programs(0):
        tl.store(num_tiles_ptr, first_tile + own_tiles)
        tl.store(num_tall_tiles_ptr, first_tall + own_tall)
