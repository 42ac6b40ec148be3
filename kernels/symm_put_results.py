"""Send each received row's result home, then say so: combine's put of `symm_mem`.

Arrivals, and what a failed rank does, are as in `kernels/symm_put.py`.

Shapes: R rows received, P ranks, M rows a rank at most, K top-k slots, H hidden size.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.launch import PreparedLaunch
from ep_runtime.kernels.symm_channel import ARRIVAL_SHARES, Channel
from ep_runtime.kernels.symm_put import FEW_ROWS, PutTiles, arrive, choose_put_tiles


@dataclass(frozen=True)
class _ResultsPut:
    """The launches of `put_results` over one channel, for few rows or for many."""

    launch: PreparedLaunch
    tiles: PutTiles


def _prepare_put_results(channel: Channel, has_few_rows: bool) -> _ResultsPut:
    layout = channel.layout
    tiles = choose_put_tiles(layout.hidden_size, layout.dtype.itemsize, has_few_rows=has_few_rows)
    launch = PreparedLaunch(
        _put_results_kernel,
        channel.memory.device,
        options={"num_warps": tiles.num_warps},
        peers_ptr=channel.peers,
        ids_ptr=channel.topk_ids,
        origins_ptr=channel.origins,
        failed_ptr=channel.failed,
        results_offset=layout.offset("results"),
        arrivals_offset=layout.offset("combine_arrivals"),
        rank=channel.rank,
        max_tokens=layout.max_tokens_per_rank,
        hidden_size=layout.hidden_size,
        NUM_RANKS=layout.ep_size,
        TOP_K=layout.top_k,
        SHARES=ARRIVAL_SHARES,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_COLUMNS=tiles.block_columns,
        BLOCK_RANKS=triton.next_power_of_2(layout.ep_size),
    )
    return _ResultsPut(launch, tiles)


def put_results(
    channel: Channel,
    expert_output: Tensor,
    *,
    num_own_rows: int,
    first_own_row: int,
    max_programs: int,
    stream: int | None = None,
) -> None:
    """Send each received row's result home; arrive at every peer.

    expert_output: [R, H] contiguous in the layout's dtype, by received row; R may be 0. Rows
    first_own_row .. first_own_row + num_own_rows are this rank's own: they stay, `sum_results`
    reads them where they are. Rows without a local expert stay too. One launch of at most
    `max_programs` programs, on the current stream or `stream`; does not wait for the device. Moves
    H * itemsize bytes in and out per row sent, and 4 K + 4 per foreign row in.
    """
    num_rows, hidden_size = expert_output.shape
    num_foreign_rows = num_rows - num_own_rows
    put = channel.prepared(_prepare_put_results, num_foreign_rows <= FEW_ROWS)
    num_items = put.tiles.num_blocks(num_foreign_rows, hidden_size)
    put.launch(
        (max(1, min(num_items, max_programs)),),
        expert_output,
        num_rows,
        num_foreign_rows,
        first_own_row + num_own_rows,
        stream=stream,
    )


def put_results_reference(channels: Sequence[Channel], rank: int, expert_output: Tensor) -> None:
    """The definition of `put_results`. channels: one of every rank, all in this process."""
    own = channels[rank]
    num_rows = expert_output.shape[0]
    is_here = (own.topk_ids[:num_rows] >= 0).any(1)
    sources = own.origins[:num_rows] // own.layout.max_tokens_per_rank
    tokens = own.origins[:num_rows] % own.layout.max_tokens_per_rank
    for peer, channel in enumerate(channels):
        sent = is_here & (sources == peer)
        if peer != rank:
            channel.results[rank, tokens[sent].long()] = expert_output[sent]
        channel.combine_arrivals[rank] += ARRIVAL_SHARES


@triton.jit(
    do_not_specialize=["num_rows", "num_foreign_rows", "end_of_own_rows", "rank", "max_tokens"]
)
def _put_results_kernel(
    y_ptr,  # [R, H]
    num_rows,
    num_foreign_rows,
    end_of_own_rows,
    peers_ptr,  # [P] int64
    ids_ptr,  # [R, K], local
    origins_ptr,  # [R]
    failed_ptr,  # [1] int64
    results_offset,  # bytes from a slot's start
    arrivals_offset,
    rank,
    max_tokens,
    hidden_size,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """Programs stride over blocks of foreign rows and columns.

    Foreign rows are counted from behind the own ones, and around: the ranks begin with different
    destinations, and own rows cost nothing.
    """
    num_column_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)
    num_items = tl.cdiv(num_foreign_rows, BLOCK_ROWS) * num_column_blocks
    has_failed = tl.load(failed_ptr) != 0
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        foreign_rows = item // num_column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_row = foreign_rows < num_foreign_rows
        rows = (foreign_rows.to(tl.int64) + end_of_own_rows) % num_rows
        columns = item % num_column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        highest_id = tl.full([BLOCK_ROWS], -1, dtype=tl.int32)
        for k in tl.static_range(TOP_K):
            ids = tl.load(ids_ptr + rows * TOP_K + k, mask=is_row, other=-1)
            highest_id = tl.maximum(highest_id, ids)
        origins = tl.load(origins_ptr + rows, mask=is_row, other=0)
        sources = origins // max_tokens
        tokens = origins - sources * max_tokens
        is_sent = is_row & (highest_id >= 0) & (has_failed == 0)
        bases = tl.load(peers_ptr + sources, mask=is_sent, other=0)
        mask = is_sent[:, None] & (columns < hidden_size)[None, :]
        values = tl.load(y_ptr + rows[:, None] * hidden_size + columns[None, :], mask=mask)
        home = (rank.to(tl.int64) * max_tokens + tokens) * hidden_size
        home_ptrs = (bases + results_offset).to(tl.pointer_type(y_ptr.dtype.element_ty))
        home_ptrs = tl.multiple_of(home_ptrs, [16])
        home_ptrs = home_ptrs[:, None] + home[:, None] + columns[None, :]
        tl.store(home_ptrs, values, mask=mask)
    arrive(peers_ptr, arrivals_offset, rank, has_failed, NUM_RANKS, BLOCK_RANKS, SHARES)
