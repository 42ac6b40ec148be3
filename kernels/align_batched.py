"""Lay rows of the batched format out in whole tiles of positions, in one launch.

They lie in expert order already, so each position's row is written; the tables are those of
kernels/align_blocks.py.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from ep_runtime.kernels.align_blocks import (
    MAX_SLOTS,
    AlignedSlots,
    lay_out_reference,
    max_tiles,
    table_bytes,
    take_tables,
)
from ep_runtime.kernels.align_chunks import block_experts, count_tiles, store_tiles
from ep_runtime.kernels.base import BatchedExpertInput
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.workspace import Workspace


def max_batched_tiles(
    num_local_experts: int, capacity: int, block_m: int, max_rows: int | None = None
) -> int:
    """Most tiles that any counts give, of which the sum is at most max_rows."""
    tiles = num_local_experts * -(-capacity // block_m)
    if max_rows is None:
        return tiles
    return min(tiles, max_tiles(max_rows, num_local_experts, block_m))


def align_batched_workspace_bytes(
    num_local_experts: int, capacity: int, block_m: int, max_rows: int | None = None
) -> int:
    """What `align_batched_rows` takes from the workspace; never less for a larger capacity."""
    return table_bytes(max_batched_tiles(num_local_experts, capacity, block_m, max_rows), block_m)


def align_batched_rows(
    expert_input: BatchedExpertInput,
    *,
    block_m: int,
    workspace: Workspace,
    max_rows: int | None = None,
) -> AlignedSlots:
    """Lay each expert's rows up to its count out in tiles; counts are clamped to the capacity.

    max_rows: a bound on the sum of the counts, where one is known, so that max_tiles is smaller;
    tiles past it are left out. The result lives in `workspace`, until its frame ends. One launch;
    does not wait for the device. Raises ValueError where E * capacity does not fit int32.
    """
    num_experts, capacity, _ = expert_input.hidden_states.shape
    counts = expert_input.num_rows_per_expert
    num_slots = num_experts * capacity
    if num_slots > MAX_SLOTS:
        raise ValueError(
            f"hidden_states {list(expert_input.hidden_states.shape)} has {num_slots} rows; the "
            f"limit is {MAX_SLOTS}: lower max_tokens_per_rank"
        )
    prepare_launch(counts.device)
    tiles = max_batched_tiles(num_experts, capacity, block_m, max_rows)
    aligned = take_tables(workspace, tiles, block_m, num_slots)
    block_positions = 4096 if is_interpreting() else 1024
    num_parts = min(max(1, triton.cdiv(capacity, block_positions)), 8)
    _align_batched_rows_kernel[(max(1, num_experts), num_parts)](
        counts,
        *aligned.tables,
        counts.stride(0),
        num_experts,
        capacity,
        tiles,
        BLOCK_M=block_m,
        BLOCK_E=block_experts(num_experts),
        BLOCK_POSITIONS=block_positions,
        **launch_options(counts.device),
    )
    return aligned


def align_batched_rows_reference(
    expert_input: BatchedExpertInput, *, block_m: int, max_rows: int | None = None
) -> AlignedSlots:
    """The definition of `align_batched_rows`; its tensors hold the written part only. Waits."""
    num_experts, capacity, _ = expert_input.hidden_states.shape
    counts = expert_input.num_rows_per_expert.long().clamp(0, capacity)
    in_expert = torch.arange(capacity, device=counts.device) < counts[:, None]
    in_order = in_expert.flatten().nonzero().flatten()
    tiles = max_batched_tiles(num_experts, capacity, block_m, max_rows)
    return lay_out_reference(
        in_order, counts, tiles, block_m=block_m, num_slots=num_experts * capacity
    )


@triton.jit(do_not_specialize=["capacity", "max_tiles"])
def _align_batched_rows_kernel(
    num_rows_per_expert_ptr,  # [E]
    slots_ptr,  # [max_tiles * BLOCK_M]
    tile_experts_ptr,  # [max_tiles]
    tile_order_ptr,  # [max_tiles]
    num_tiles_ptr,  # [1]
    num_tall_tiles_ptr,  # [1]
    stride_counts,
    num_experts,
    capacity,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_POSITIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Program (e, part): of expert e's positions the blocks part, part + parts, and so on."""
    await_predecessor(IS_DEPENDENT)
    expert = tl.program_id(0)
    part = tl.program_id(1)
    first_tile = 0
    first_tall = 0
    num_tiles = 0
    num_rows = 0
    for first_expert in range(0, num_experts, BLOCK_E):
        experts = first_expert + tl.arange(0, BLOCK_E)
        ptrs = num_rows_per_expert_ptr + experts.to(tl.int64) * stride_counts
        counts = tl.load(ptrs, mask=experts < num_experts, other=0)
        counts = tl.minimum(tl.maximum(counts, 0), capacity).to(tl.int32)
        expert_tiles, tall_tiles = count_tiles(counts, BLOCK_M)
        first_tile += tl.sum(tl.where(experts < expert, expert_tiles, 0), axis=0)
        first_tall += tl.sum(tl.where(experts < expert, tall_tiles, 0), axis=0)
        num_tiles += tl.sum(expert_tiles, axis=0)
        num_rows += tl.sum(tl.where(experts == expert, counts, 0), axis=0)
    num_tiles = tl.minimum(num_tiles, max_tiles)
    own_tiles, own_tall = count_tiles(num_rows, BLOCK_M)
    last_tile = tl.minimum(first_tile + own_tiles, num_tiles)
    num_positions = (last_tile - first_tile).to(tl.int64) * BLOCK_M
    run_ptr = slots_ptr + tl.cast(first_tile, tl.int64) * BLOCK_M
    first_row = expert * capacity
    num_slots = num_experts * capacity
    stride = tl.num_programs(1) * BLOCK_POSITIONS
    for first in range(part.to(tl.int64) * BLOCK_POSITIONS, num_positions, stride):
        in_run = first + tl.arange(0, BLOCK_POSITIONS)
        is_position = in_run < num_positions
        slots = tl.where(in_run < num_rows, first_row + in_run, num_slots).to(tl.int32)
        tl.store(run_ptr + in_run, slots, mask=is_position)
        store_tiles(
            tile_experts_ptr,
            tile_order_ptr,
            expert,
            in_run // BLOCK_M,
            first_tile,
            first_tall,
            own_tall,
            max_tiles,
            is_position & (in_run % BLOCK_M == 0),
        )
    # The expert of the last tile, or the first where there is none, knows how many tall ones are
    # not left out.
    is_last = (first_tile < num_tiles) & (last_tile == num_tiles)
    if (part == 0) & (is_last | ((num_tiles == 0) & (expert == 0))):
        tl.store(num_tiles_ptr, num_tiles)
        tl.store(num_tall_tiles_ptr, first_tall + tl.minimum(own_tall, last_tile - first_tile))
