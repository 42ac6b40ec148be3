"""Sort a batch's slots by local expert and cut each expert's run into tiles, on the device.

A stable counting sort: count each expert's slots chunk by chunk, turn the counts into start
positions by one cumulative sum in expert-major order, then place every slot. The order is that of
the slots, so results are bit-equal from run to run, and the host never learns a count.

Rows in the batched format lie in expert order already: there only tiles are cut.

Shapes: R rows, K slots a row, N = R * K slots, E local experts, C chunks of the N slots.
Slot s belongs to row s // K.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.base import BatchedExpertInput, StandardExpertInput
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

# The smallest tile height a grouped GEMM uses; sizes the tile tables for every other height.
MIN_BLOCK_M = 16
_MAX_SLOTS = 2**31 - 1


@dataclass(frozen=True)
class AlignedSlots:
    """The valid slots in expert order, and the tiles that a grouped GEMM works through.

    slots: [N] int32 slot numbers, expert by expert, rising within one; unwritten memory after
    the last valid slot.
    expert_ends: [E] int32, where each expert's run in `slots` ends (it starts where the one
    before it ends).
    tile_experts, tile_starts: [max_tiles] int32, each tile's expert and first position in
    `slots`; unwritten memory from `num_tiles` on.
    num_tiles: [1] int32. max_tiles bounds it; a grid of that many programs covers every tile.
    block_m: slots a tile, at least MIN_BLOCK_M; an expert's last tile may hold fewer.
    capacity: None, or of batched rows, which stay where they are: expert e's run starts at
    e * capacity, a position is its own slot (K = 1), and `slots` is empty.

    Example: ids [[0, 2], [2, -1]] with block_m 16 give slots (0, 1, 2, ?), expert_ends (1, 1, 3),
    tile_experts (0, 2), tile_starts (0, 1), num_tiles 2: expert 1 has no slot and no tile.
    """

    slots: Tensor
    expert_ends: Tensor
    tile_experts: Tensor
    tile_starts: Tensor
    num_tiles: Tensor
    max_tiles: int
    block_m: int
    capacity: int | None = None


def max_tiles(num_slots: int, num_local_experts: int, block_m: int) -> int:
    """Most tiles that any ids give: the full ones, and one begun tile for each expert in use."""
    return num_slots // block_m + min(num_slots, num_local_experts)


def align_workspace_bytes(num_slots: int, num_local_experts: int) -> int:
    """What `align_slots` takes from the workspace; never less for more slots."""
    shapes = _scratch_shapes(num_slots, num_local_experts)
    return sum(aligned_bytes(4 * size) for size in shapes)


def _scratch_shapes(num_slots: int, num_local_experts: int) -> tuple[int, ...]:
    """int32 elements of: chunk counts, chunk ends, slots, tile experts, tile starts, num tiles."""
    num_counts = num_local_experts * _num_chunks(num_slots)
    tiles = max_tiles(num_slots, num_local_experts, MIN_BLOCK_M)
    return num_counts, num_counts, num_slots, tiles, tiles, 1


def _slots_per_chunk() -> int:
    """Placing compares a chunk's slots pairwise; an interpreted program costs 65 us instead."""
    return 1024 if is_interpreting() else 128


def _num_chunks(num_slots: int) -> int:
    """At least one, so that an empty batch has its counts and tiles written too."""
    return max(1, -(-num_slots // _slots_per_chunk()))


def align_slots(
    expert_input: StandardExpertInput,
    *,
    num_local_experts: int,
    block_m: int,
    workspace: Workspace,
) -> AlignedSlots:
    """Sort the slots whose id is in [0, num_local_experts) and whose row is before num_rows.

    R may be 0; num_local_experts is at least 1. The result lives in `workspace`, until its frame
    ends. Does not wait for the device. Raises ValueError where N does not fit int32.
    """
    ids = expert_input.topk_ids.contiguous()
    num_slots = ids.numel()
    if num_slots > _MAX_SLOTS:
        raise ValueError(
            f"topk_ids {list(ids.shape)} has {num_slots} slots; the limit is {_MAX_SLOTS}: "
            "lower max_tokens_per_rank"
        )
    prepare_launch(ids.device)
    takes = [
        workspace.take((size,), torch.int32)
        for size in _scratch_shapes(num_slots, num_local_experts)
    ]
    chunk_counts, chunk_ends, slots, tile_experts, tile_starts, num_tiles = takes
    block_slots = _slots_per_chunk()
    num_chunks = _num_chunks(num_slots)
    block_e = _block_experts(num_local_experts)
    slot_arguments = (ids, expert_input.num_rows, ids.shape[1], num_slots, num_local_experts)

    _count_slots_kernel[(num_chunks,)](
        *slot_arguments, chunk_counts, BLOCK_SLOTS=block_slots, BLOCK_E=block_e
    )
    torch.cumsum(chunk_counts, 0, dtype=torch.int32, out=chunk_ends)
    _place_slots_kernel[(num_chunks,)](
        *slot_arguments, chunk_counts, chunk_ends, slots, BLOCK_SLOTS=block_slots
    )
    aligned = AlignedSlots(
        slots,
        chunk_ends.view(num_local_experts, num_chunks)[:, -1],
        tile_experts,
        tile_starts,
        num_tiles,
        max_tiles(num_slots, num_local_experts, block_m),
        block_m,
    )
    _cut_tiles(aligned, num_rows_per_expert=None)
    return aligned


def align_batched_workspace_bytes(capacity: int, num_local_experts: int) -> int:
    """What `align_batched_rows` takes from the workspace; never less for a larger capacity."""
    shapes = _batched_scratch_shapes(capacity, num_local_experts)
    return sum(aligned_bytes(4 * size) for size in shapes)


def _batched_scratch_shapes(capacity: int, num_local_experts: int) -> tuple[int, ...]:
    """int32 elements of: expert ends, tile experts, tile starts, num tiles."""
    tiles = num_local_experts * triton.cdiv(capacity, MIN_BLOCK_M)
    return num_local_experts, tiles, tiles, 1


def align_batched_rows(
    expert_input: BatchedExpertInput,
    *,
    block_m: int,
    workspace: Workspace,
    max_rows: int | None = None,
) -> AlignedSlots:
    """Cut each expert's rows up to its count into tiles; the rows stay where they are.

    max_rows: a bound on the sum of the counts, where one is known. At least one expert. The result
    lives in `workspace`, until its frame ends. Does not wait for the device. Raises ValueError
    where E * capacity does not fit int32.
    """
    num_experts, capacity, _ = expert_input.hidden_states.shape
    if num_experts * capacity > _MAX_SLOTS:
        raise ValueError(
            f"hidden_states {list(expert_input.hidden_states.shape)} has "
            f"{num_experts * capacity} rows; the limit is {_MAX_SLOTS}: lower max_tokens_per_rank"
        )
    prepare_launch(expert_input.hidden_states.device)
    expert_ends, tile_experts, tile_starts, num_tiles = (
        workspace.take((size,), torch.int32)
        for size in _batched_scratch_shapes(capacity, num_experts)
    )
    aligned = AlignedSlots(
        expert_ends[:0],
        expert_ends,
        tile_experts,
        tile_starts,
        num_tiles,
        max_batched_tiles(num_experts, capacity, block_m, max_rows),
        block_m,
        capacity,
    )
    _cut_tiles(aligned, num_rows_per_expert=expert_input.num_rows_per_expert.contiguous())
    return aligned


def max_batched_tiles(
    num_local_experts: int, capacity: int, block_m: int, max_rows: int | None = None
) -> int:
    """Most tiles that any counts give, of which the sum is at most max_rows."""
    tiles: int = num_local_experts * triton.cdiv(capacity, block_m)
    if max_rows is None:
        return tiles
    return min(tiles, max_tiles(max_rows, num_local_experts, block_m))


def _cut_tiles(aligned: AlignedSlots, *, num_rows_per_expert: Tensor | None) -> None:
    """Fill the tile tables; of batched rows, whose counts are given, the ends of the runs too."""
    num_experts = aligned.expert_ends.numel()
    block_tiles = 1024 if is_interpreting() else 128
    _cut_tiles_kernel[(max(1, triton.cdiv(aligned.max_tiles, block_tiles)),)](
        aligned.expert_ends,
        aligned.expert_ends.stride(0),
        num_rows_per_expert,
        aligned.capacity,
        aligned.tile_experts,
        aligned.tile_starts,
        aligned.num_tiles,
        num_experts,
        BLOCK_M=aligned.block_m,
        BLOCK_TILES=block_tiles,
        BLOCK_E=_block_experts(num_experts),
    )


def _block_experts(num_local_experts: int) -> int:
    """How many experts a program looks at together."""
    rounded: int = triton.next_power_of_2(num_local_experts)
    return min(rounded, 1024 if is_interpreting() else 64)


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
    ends = counts.cumsum(0)
    tile_experts, tile_starts = _cut_tiles_reference(ends - counts, ends, block_m)
    return AlignedSlots(
        slots=keys.argsort(stable=True)[: int(counts.sum())].to(torch.int32),
        expert_ends=ends.to(torch.int32),
        tile_experts=tile_experts,
        tile_starts=tile_starts,
        num_tiles=ids.new_full((1,), len(tile_starts), dtype=torch.int32),
        max_tiles=max_tiles(ids.numel(), num_local_experts, block_m),
        block_m=block_m,
    )


def align_batched_rows_reference(expert_input: BatchedExpertInput, *, block_m: int) -> AlignedSlots:
    """The definition of `align_batched_rows`; its tensors hold the written part only. Waits."""
    num_experts, capacity, _ = expert_input.hidden_states.shape
    counts = expert_input.num_rows_per_expert
    starts = torch.arange(num_experts, device=counts.device) * capacity
    ends = starts + counts
    tile_experts, tile_starts = _cut_tiles_reference(starts, ends, block_m)
    return AlignedSlots(
        slots=counts[:0],
        expert_ends=ends.to(torch.int32),
        tile_experts=tile_experts,
        tile_starts=tile_starts,
        num_tiles=counts.new_full((1,), len(tile_starts), dtype=torch.int32),
        max_tiles=max_batched_tiles(num_experts, capacity, block_m),
        block_m=block_m,
        capacity=capacity,
    )


def _cut_tiles_reference(starts: Tensor, ends: Tensor, block_m: int) -> Tensor:
    """[2, tiles] int32: each tile's expert, and its first position."""
    tiles = [
        (expert, start)
        for expert, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True))
        for start in range(first, end, block_m)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=ends.device).view(-1, 2).T.contiguous()


@triton.jit
def _load_slot_experts(ids_ptr, num_rows_ptr, top_k, num_slots, num_experts, slots):
    """Each slot's local expert; -1 where it has none, or lies past the last row or slot."""
    is_slot = slots < num_slots
    if num_rows_ptr is not None:
        is_slot = is_slot & (slots // top_k < tl.load(num_rows_ptr))
    ids = tl.load(ids_ptr + slots, mask=is_slot, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit(do_not_specialize=["num_slots"])
def _count_slots_kernel(
    ids_ptr,  # [N]
    num_rows_ptr,  # [1] or None
    top_k,
    num_slots,
    num_experts,
    chunk_counts_ptr,  # [E, C]
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program a chunk: how many of its slots each expert has."""
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    slots = chunk * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    slot_experts = _load_slot_experts(ids_ptr, num_rows_ptr, top_k, num_slots, num_experts, slots)
    for first in range(0, num_experts, BLOCK_E):
        experts = first + tl.arange(0, BLOCK_E)
        counts = tl.sum((slot_experts[:, None] == experts[None, :]).to(tl.int32), axis=0)
        offsets = experts.to(tl.int64) * num_chunks + chunk
        tl.store(chunk_counts_ptr + offsets, counts, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_slots"])
def _place_slots_kernel(
    ids_ptr,  # [N]
    num_rows_ptr,  # [1] or None
    top_k,
    num_slots,
    num_experts,
    chunk_counts_ptr,  # [E, C]
    chunk_ends_ptr,  # [E, C], inclusive sums of the counts
    sorted_slots_ptr,  # [N]
    BLOCK_SLOTS: tl.constexpr,
):
    """One program a chunk: each slot goes behind those of its expert that come before it."""
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    in_chunk = tl.arange(0, BLOCK_SLOTS)
    slots = chunk * BLOCK_SLOTS + in_chunk
    slot_experts = _load_slot_experts(ids_ptr, num_rows_ptr, top_k, num_slots, num_experts, slots)
    is_same = slot_experts[None, :] == slot_experts[:, None]
    is_before = in_chunk[None, :] < in_chunk[:, None]
    rank = tl.sum((is_same & is_before).to(tl.int32), axis=1)
    is_valid = slot_experts >= 0
    offsets = slot_experts.to(tl.int64) * num_chunks + chunk
    end = tl.load(chunk_ends_ptr + offsets, mask=is_valid, other=0)
    count = tl.load(chunk_counts_ptr + offsets, mask=is_valid, other=0)
    tl.store(sorted_slots_ptr + end - count + rank, slots, mask=is_valid)


@triton.jit
def _load_run_starts(expert_ends_ptr, stride_ends, capacity, experts, is_expert):
    """Where experts' runs start: at the end before, or at a multiple of the capacity."""
    if capacity is not None:
        starts = experts * capacity
    else:
        before = expert_ends_ptr + (experts - 1).to(tl.int64) * stride_ends
        starts = tl.load(before, mask=is_expert & (experts > 0), other=0)
    return starts


@triton.jit(do_not_specialize=["stride_ends"])
def _cut_tiles_kernel(
    expert_ends_ptr,  # [E], written here where the counts are given
    stride_ends,
    num_rows_per_expert_ptr,  # [E], the counts of batched rows, or None
    capacity,  # of batched rows, or None
    tile_experts_ptr,  # [max_tiles]
    tile_starts_ptr,  # [max_tiles]
    num_tiles_ptr,  # [1]
    num_experts,
    BLOCK_M: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program a block of tiles: an expert's tiles follow those of the experts before it."""
    tiles = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    num_tiles = 0
    tile_experts = tl.zeros([BLOCK_TILES], dtype=tl.int32)
    first_tiles = tl.zeros([BLOCK_TILES], dtype=tl.int32)
    for first in range(0, num_experts, BLOCK_E):
        experts = first + tl.arange(0, BLOCK_E)
        is_expert = experts < num_experts
        starts = _load_run_starts(expert_ends_ptr, stride_ends, capacity, experts, is_expert)
        end_ptrs = expert_ends_ptr + experts.to(tl.int64) * stride_ends
        if num_rows_per_expert_ptr is not None:
            ends = starts + tl.load(num_rows_per_expert_ptr + experts, mask=is_expert, other=0)
            if tl.program_id(0) == 0:
                tl.store(end_ptrs, ends, mask=is_expert)
        else:
            ends = tl.load(end_ptrs, mask=is_expert, other=0)
        expert_tiles = tl.where(is_expert, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
        tile_ends = num_tiles + tl.cumsum(expert_tiles, axis=0)
        # A tile's expert is the number of experts whose tiles all come before it.
        is_past = (tile_ends[None, :] <= tiles[:, None]) & is_expert[None, :]
        tile_experts += tl.sum(is_past.to(tl.int32), axis=1)
        past_ends = tl.max(tl.where(is_past, tile_ends[None, :], 0), axis=1)
        first_tiles = tl.maximum(first_tiles, past_ends)
        num_tiles += tl.sum(expert_tiles, axis=0)
    is_tile = tiles < num_tiles
    run_starts = _load_run_starts(expert_ends_ptr, stride_ends, capacity, tile_experts, is_tile)
    starts = run_starts + (tiles - first_tiles) * BLOCK_M
    tl.store(tile_experts_ptr + tiles, tile_experts, mask=is_tile)
    tl.store(tile_starts_ptr + tiles, starts, mask=is_tile)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, num_tiles)
