"""Sort many slots into the tiles of their experts in two launches: each program a chunk of them.

The first counts every chunk's slots of each expert. In the second each program adds these counts
up, so that it knows every expert's first tile and how many of its slots come before the chunk, and
places the chunk's slots. Programs do not wait for each other.

Shapes: R rows, K slots a row, N = R * K slots, E local experts, C chunks. Slot s belongs to row
s // K.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.base import StandardExpertInput
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.interpreter import is_interpreting

# As many as run at once on an H100 or H200 (132 multiprocessors); two each were slower.
MAX_PROGRAMS = 128
# Experts counted together. A thread keeps 1 / 32 of the counters.
MAX_BLOCK_EXPERTS = 1024
# Counts that a program adds up at a time.
BLOCK_COUNTS = 8192


def block_experts(num_local_experts: int) -> int:
    """How many counters a histogram has; Triton's has at least one for each thread of a warp."""
    return min(max(int(triton.next_power_of_2(num_local_experts)), 32), MAX_BLOCK_EXPERTS)


def num_chunks(num_slots: int) -> int:
    """Into how many chunks so many slots are cut; never fewer for more slots."""
    return max(1, min(-(-num_slots // _block_placed()), MAX_PROGRAMS))


def _block_placed() -> int:
    """Slots that a program places at a time. An interpreted operation costs 85 us of any size."""
    return 512 if is_interpreting() else 128


def align_chunks(
    expert_input: StandardExpertInput,
    tables: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    chunk_counts: Tensor,
    *,
    num_local_experts: int,
    block_m: int,
) -> None:
    """Fill `tables`, the five of an `AlignedSlots` in its order.

    chunk_counts: [C, E] int32, contiguous, C as `num_chunks` says; overwritten.
    """
    ids = expert_input.topk_ids
    chunks, block_placed = len(chunk_counts), _block_placed()
    has_long_chunks = ids.numel() > block_placed * MAX_PROGRAMS
    sizes = (*ids.stride(), *ids.shape, num_local_experts)
    options: dict[str, Any] = {
        "BLOCK_E": block_experts(num_local_experts),
        "BLOCK_PLACED": block_placed,
        "IS_CONTIGUOUS": ids.is_contiguous(),
        **launch_options(ids.device),
    }
    _count_chunks_kernel[(chunks,)](
        ids,
        expert_input.num_rows,
        chunk_counts,
        *sizes,
        BLOCK_SLOTS=8 * block_placed if has_long_chunks else block_placed,
        num_warps=4,
        **options,
    )
    _place_chunks_kernel[(chunks,)](
        ids,
        expert_input.num_rows,
        chunk_counts,
        *tables,
        *sizes,
        tables[1].numel(),
        BLOCK_M=block_m,
        BLOCK_CHUNKS=min(triton.next_power_of_2(chunks), BLOCK_COUNTS // options["BLOCK_E"]),
        num_warps=8,
        **options,
    )


@triton.jit
def end_of_valid_slots(num_rows_ptr, num_rows, top_k):
    """The number of slots, int64, of the rows before num_rows_ptr[0], or of all."""
    valid_rows = num_rows
    if num_rows_ptr is not None:
        valid_rows = tl.minimum(tl.maximum(tl.load(num_rows_ptr), 0), num_rows)
    return tl.cast(valid_rows, tl.int64) * top_k


@triton.jit
def id_pointers(ids_ptr, slots, strides_and_top_k, IS_CONTIGUOUS: tl.constexpr):
    """Where the ids of slots (int64) lie; anywhere of slots past MAX_SLOTS."""
    if IS_CONTIGUOUS:
        pointers = ids_ptr + slots
    else:
        stride_row, stride_col, top_k = strides_and_top_k
        slots = slots.to(tl.int32)
        rows, columns = (slots // top_k).to(tl.int64), (slots % top_k).to(tl.int64)
        pointers = ids_ptr + rows * stride_row + columns * stride_col
    return pointers


@triton.jit
def count_tiles(counts, BLOCK_M: tl.constexpr):
    """Tiles of experts with so many slots, and how many of them are tall."""
    whole, rest = counts // BLOCK_M, counts % BLOCK_M
    num_tiles = whole + (rest > 0).to(tl.int32)
    return num_tiles, whole + (rest > BLOCK_M // 2).to(tl.int32)


@triton.jit
def store_tiles(
    tile_experts_ptr, tile_order_ptr, expert, in_run, first_tile, first_tall, num_tall, end, mask
):
    """An expert's entries of tile_experts and tile_order, which ends at `end`: of its in_run-th
    tiles, of which the first num_tall are tall. first_tile, first_tall: those before the expert."""
    tile = first_tile + in_run
    tl.store(tile_experts_ptr + tile, expert, mask=mask)
    # Only an expert's last tile may not be tall.
    last = end - 1 - (first_tile - first_tall)
    place = tl.where(in_run < num_tall, first_tall + in_run, last)
    tl.store(tile_order_ptr + place, tile, mask=mask)


@triton.jit
def _load_block(
    ids_ptr, first, end, strides_and_top_k, BLOCK: tl.constexpr, IS_CONTIGUOUS: tl.constexpr
):
    """The ids of BLOCK slots from `first` on; -1 from `end` on, which may lie before `first`."""
    in_block = tl.arange(0, BLOCK)
    pointers = id_pointers(ids_ptr, first + in_block, strides_and_top_k, IS_CONTIGUOUS)
    # A mask of unknown alignment would make every load 4 bytes wide.
    if first + BLOCK <= end:
        ids = tl.load(pointers)
    else:
        ids = tl.load(pointers, mask=in_block < tl.maximum(end - first, 0), other=-1)
    return ids


@triton.jit
def _chunk_of(program, end, BLOCK_PLACED: tl.constexpr):
    """Where a program's chunk of the valid rows' slots begins, and how many blocks it has; a chunk
    may begin behind the end."""
    num_blocks = tl.cdiv(tl.cdiv(end, BLOCK_PLACED), tl.num_programs(0))
    return program * num_blocks * BLOCK_PLACED, num_blocks


# A size that changes from call to call is not compiled for.
@triton.jit(do_not_specialize=["num_rows"])
def _count_chunks_kernel(
    ids_ptr,  # [R, K]
    num_rows_ptr,  # [1] or None
    chunk_counts_ptr,  # [C, E]
    stride_row,
    stride_col,
    num_rows,
    top_k,
    num_experts,
    BLOCK_E: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_PLACED: tl.constexpr,
    IS_CONTIGUOUS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a chunk of the slots: its counts of all experts."""
    await_predecessor(IS_DEPENDENT)
    program = tl.program_id(0)
    end = end_of_valid_slots(num_rows_ptr, num_rows, top_k)
    layout = (stride_row, stride_col, top_k)
    chunk, num_blocks = _chunk_of(program, end, BLOCK_PLACED)
    end = tl.minimum(end, chunk + num_blocks * BLOCK_PLACED)
    for first_expert in range(0, num_experts, BLOCK_E):
        num_bins = tl.minimum(num_experts - first_expert, BLOCK_E)
        counts = tl.zeros([BLOCK_E], dtype=tl.int32)
        for block in range(0, tl.cdiv(tl.maximum(end - chunk, 0), BLOCK_SLOTS)):
            first = tl.multiple_of(chunk + block * BLOCK_SLOTS, BLOCK_PLACED)
            ids = _load_block(ids_ptr, first, end, layout, BLOCK_SLOTS, IS_CONTIGUOUS)
            bins = ids - first_expert
            is_counted = (bins >= 0) & (bins < num_bins)
            counts += tl.histogram(bins.to(tl.int32), BLOCK_E, mask=is_counted)
        bins = tl.arange(0, BLOCK_E)
        pointers = chunk_counts_ptr + program * num_experts + first_expert + bins
        tl.store(pointers, counts, mask=bins < num_bins)


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def _place_chunks_kernel(
    ids_ptr,  # [R, K]
    num_rows_ptr,  # [1] or None
    chunk_counts_ptr,  # [C, E]
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
    BLOCK_CHUNKS: tl.constexpr,
    BLOCK_PLACED: tl.constexpr,
    IS_CONTIGUOUS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a chunk of the slots; it writes its share of the padding and tile tables too."""
    await_predecessor(IS_DEPENDENT)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_slots = tl.cast(num_rows, tl.int64) * top_k
    end = end_of_valid_slots(num_rows_ptr, num_rows, top_k)
    layout = (stride_row, stride_col, top_k)
    chunk, num_blocks = _chunk_of(program, end, BLOCK_PLACED)
    num_tiles = 0
    num_tall_tiles = 0
    for first_expert in range(0, num_experts, BLOCK_E):
        num_bins = tl.minimum(num_experts - first_expert, BLOCK_E)
        in_bins = tl.arange(0, BLOCK_E)
        before = tl.zeros([BLOCK_E], dtype=tl.int32)  # each expert's slots before the chunk
        counts = tl.zeros([BLOCK_E], dtype=tl.int32)
        for first_chunk in range(0, num_programs, BLOCK_CHUNKS):
            chunks = (first_chunk + tl.arange(0, BLOCK_CHUNKS))[:, None]
            pointers = chunk_counts_ptr + chunks * num_experts + first_expert + in_bins[None, :]
            is_count = (chunks < num_programs) & (in_bins < num_bins)[None, :]
            of_chunks = tl.load(pointers, mask=is_count, other=0)
            counts += tl.sum(of_chunks, axis=0)
            before += tl.sum(tl.where(chunks < program, of_chunks, 0), axis=0)

        expert_tiles, tall_tiles = count_tiles(counts, BLOCK_M)
        first_tiles = num_tiles + tl.cumsum(expert_tiles, axis=0) - expert_tiles
        first_tall = num_tall_tiles + tl.cumsum(tall_tiles, axis=0) - tall_tiles
        num_tiles += tl.sum(expert_tiles, axis=0)
        num_tall_tiles += tl.sum(tall_tiles, axis=0)
        experts = first_expert + in_bins
        for tile in range(program, tl.max(expert_tiles, axis=0), num_programs):
            store_tiles(
                tile_experts_ptr,
                tile_order_ptr,
                experts,
                tile,
                first_tiles,
                first_tall,
                tall_tiles,
                max_tiles,
                tile < expert_tiles,
            )
        first_positions = first_tiles.to(tl.int64) * BLOCK_M
        rest = counts % BLOCK_M
        padding = tl.where(rest > 0, BLOCK_M - rest, 0)
        sentinel = tl.zeros([BLOCK_E], dtype=tl.int32) + num_slots.to(tl.int32)
        for position in range(program, BLOCK_M, num_programs):
            ptrs = slots_ptr + first_positions + counts + position
            tl.store(ptrs, sentinel, mask=position < padding)

        next_positions = first_positions + before
        in_block = tl.arange(0, BLOCK_PLACED)
        for block in range(0, num_blocks):
            first = tl.multiple_of(chunk + block * BLOCK_PLACED, BLOCK_PLACED)
            ids = _load_block(ids_ptr, first, end, layout, BLOCK_PLACED, IS_CONTIGUOUS)
            bins = ids - first_expert
            is_placed = (bins >= 0) & (bins < num_bins)
            bins = tl.where(is_placed, bins, 0).to(tl.int32)
            keys = tl.where(is_placed, bins, -1)
            is_earlier = (keys[None, :] == keys[:, None]) & (in_block[None, :] < in_block[:, None])
            rank = tl.sum(is_earlier.to(tl.int32), axis=1)
            positions = tl.gather(next_positions, bins, axis=0) + rank
            tl.store(slots_ptr + positions, (first + in_block).to(tl.int32), mask=is_placed)
            if block + 1 < num_blocks:
                next_positions += tl.histogram(bins, BLOCK_E, mask=is_placed)
    if program == 0:
        tl.store(num_tiles_ptr, num_tiles)
        tl.store(num_tall_tiles_ptr, num_tall_tiles)
