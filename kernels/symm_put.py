"""Put rows and their routing into the peers' memory, then say so: the sending half of `symm_mem`.

Each launch ends in an arrival: every program adds its share to this rank's counter in the memory
of every peer, with release semantics, after all its stores. The shares of a launch add up to
ARRIVAL_SHARES whatever its grid is, and also with zero rows. Once a wait of this rank has run out,
nothing is put and nobody is told: its peers may still be reading what would be overwritten.

Shapes: T own rows, R rows received, P ranks, M rows a rank at most, K top-k slots, H hidden size,
E experts.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.symm_channel import ARRIVAL_SHARES, Channel

# Rows up to which a row is spread over several programs: the first bytes leave sooner.
_FEW_ROWS = 32
RANKS_IN_MASK = 64  # bits of the word that says where a row goes
_ROUTING_SLOTS = 256  # ids and weights that one program sends at once, about


@dataclass(frozen=True)
class ExpertHomes:
    """rank_of, local_id_of: [E] int32 on the device: each expert's rank and its id there."""

    rank_of: Tensor
    local_id_of: Tensor


@dataclass(frozen=True)
class PutTiles:
    """One program's share of a put: a block of rows and of columns, and its warps."""

    block_rows: int
    block_columns: int
    num_warps: int


def choose_put_tiles(num_rows: int, hidden_size: int, itemsize: int) -> PutTiles:
    """Few rows: 4 KiB a block, so that a row of 14 KiB leaves from four programs at once; many:
    16 KiB, four 16-byte stores a thread in flight. Short rows share a block. In the interpreter
    a program costs 65 us whatever its size."""
    if is_interpreting():
        columns = min(triton.next_power_of_2(hidden_size), 4096)
        return PutTiles(32, columns, num_warps=4)
    block_bytes, num_warps = (4096, 4) if num_rows <= _FEW_ROWS else (16384, 8)
    elements = block_bytes // itemsize
    columns = min(triton.next_power_of_2(hidden_size), elements)
    return PutTiles(elements // columns if num_rows > _FEW_ROWS else 1, columns, num_warps)


def put_tokens(
    channel: Channel,
    tokens: tuple[Tensor, Tensor, Tensor],
    homes: ExpertHomes,
    *,
    first_row: int,
    max_programs: int,
) -> None:
    """Send each own row once to every rank that holds one of its experts; arrive at every peer.

    tokens: hidden_states [T, H], topk_ids [T, K] int32 global ids or -1, topk_weights [T, K]
    float32, all contiguous; T may be 0. first_row: where this rank's rows begin in a receive
    buffer. At row first_row + t of every rank's: ids local to that rank, -1 for slots that live
    elsewhere; the origin; the weights of the slots that live there; and the row, if there is one.
    One launch of at most `max_programs` programs; does not wait for the device. Moves T * H *
    itemsize bytes in, as much out per destination rank of a row, and T * P * (8 K + 4) of routing.
    """
    prepare_launch(channel.memory.device)
    hidden_states, topk_ids, topk_weights = tokens
    num_tokens, hidden_size = hidden_states.shape
    top_k, layout = topk_ids.shape[1], channel.layout
    tiles = choose_put_tiles(num_tokens, hidden_size, hidden_states.element_size())
    block_k = triton.next_power_of_2(top_k)
    routing_rows = max(1, _ROUTING_SLOTS // block_k)
    num_items = triton.cdiv(num_tokens, routing_rows) + triton.cdiv(
        num_tokens, tiles.block_rows
    ) * triton.cdiv(hidden_size, tiles.block_columns)
    _put_tokens_kernel[(max(1, min(num_items, max_programs)),)](
        channel.peers,
        channel.failed,
        hidden_states,
        topk_ids,
        topk_weights,
        homes.rank_of,
        homes.local_id_of,
        layout.offset("rows"),
        layout.offset("topk_ids"),
        layout.offset("topk_weights"),
        layout.offset("origins"),
        layout.offset("dispatch_arrivals"),
        channel.rank,
        first_row,
        channel.rank * layout.max_tokens_per_rank,
        num_tokens,
        homes.rank_of.numel(),
        hidden_size,
        NUM_RANKS=layout.ep_size,
        TOP_K=top_k,
        SHARES=ARRIVAL_SHARES,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_COLUMNS=tiles.block_columns,
        ROUTING_ROWS=routing_rows,
        BLOCK_K=block_k,
        RANKS_IN_MASK=RANKS_IN_MASK,
        BLOCK_RANKS=triton.next_power_of_2(layout.ep_size),
        num_warps=tiles.num_warps,
    )


def put_tokens_reference(
    channels: Sequence[Channel],
    rank: int,
    tokens: tuple[Tensor, Tensor, Tensor],
    homes: ExpertHomes,
    *,
    first_row: int,
) -> None:
    """The definition of `put_tokens`. channels: one of every rank, all in this process."""
    hidden_states, topk_ids, topk_weights = tokens
    num_tokens = topk_ids.shape[0]
    is_routed = (topk_ids >= 0) & (topk_ids < homes.rank_of.numel())
    ids = torch.where(is_routed, topk_ids, 0).long()
    landed = slice(first_row, first_row + num_tokens)
    for peer, channel in enumerate(channels):
        is_there = is_routed & (homes.rank_of[ids] == peer)
        channel.topk_ids[landed] = torch.where(is_there, homes.local_id_of[ids], -1)
        channel.topk_weights[landed][is_there] = topk_weights[is_there]
        first_origin = rank * channel.layout.max_tokens_per_rank
        channel.origins[landed] = first_origin + torch.arange(
            num_tokens, dtype=torch.int32, device=ids.device
        )
        is_needed = is_there.any(1)
        channel.rows[landed][is_needed] = hidden_states[is_needed]
        channel.dispatch_arrivals[rank] += ARRIVAL_SHARES


def put_results(
    channel: Channel,
    expert_output: Tensor,
    *,
    num_own_rows: int,
    first_own_row: int,
    max_programs: int,
) -> None:
    """Send each received row's result home; arrive at every peer.

    expert_output: [R, H] contiguous, by received row; R may be 0. Rows first_own_row ..
    first_own_row + num_own_rows are this rank's own: they stay, `sum_results` reads them where
    they are. Rows without a local expert stay too. One launch of at most `max_programs` programs;
    does not wait for the device. Moves H * itemsize bytes in and out per row sent, and 4 K + 4 per
    foreign row in.
    """
    prepare_launch(channel.memory.device)
    num_rows, hidden_size = expert_output.shape
    layout, num_foreign_rows = channel.layout, num_rows - num_own_rows
    tiles = choose_put_tiles(num_foreign_rows, hidden_size, expert_output.element_size())
    num_items = triton.cdiv(num_foreign_rows, tiles.block_rows) * triton.cdiv(
        hidden_size, tiles.block_columns
    )
    _put_results_kernel[(max(1, min(num_items, max_programs)),)](
        channel.peers,
        expert_output,
        channel.topk_ids,
        channel.origins,
        channel.failed,
        layout.offset("results"),
        layout.offset("combine_arrivals"),
        channel.rank,
        layout.max_tokens_per_rank,
        num_rows,
        num_foreign_rows,
        first_own_row + num_own_rows,
        hidden_size,
        NUM_RANKS=layout.ep_size,
        TOP_K=layout.top_k,
        SHARES=ARRIVAL_SHARES,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_COLUMNS=tiles.block_columns,
        BLOCK_RANKS=triton.next_power_of_2(layout.ep_size),
        num_warps=tiles.num_warps,
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


@triton.jit
def rank_mask(
    ids_ptr,
    rank_of_ptr,
    rows,
    is_row,
    num_experts,
    first_rank,
    TOP_K: tl.constexpr,
    RANKS_IN_MASK: tl.constexpr,
):
    """[rows] int64: bit b is set where one of a row's experts is on rank first_rank + b."""
    ranks = tl.zeros(rows.shape, dtype=tl.int64)
    for k in tl.static_range(TOP_K):
        ids = tl.load(ids_ptr + rows * TOP_K + k, mask=is_row, other=-1)
        is_routed = (ids >= 0) & (ids < num_experts)
        bits = tl.load(rank_of_ptr + ids, mask=is_routed, other=-1) - first_rank
        is_in_mask = is_routed & (bits >= 0) & (bits < RANKS_IN_MASK)
        bits = tl.where(is_in_mask, bits, 0).to(tl.int64)
        ranks |= tl.where(is_in_mask, 1, 0).to(tl.int64) << bits
    return ranks


@triton.jit
def _arrive(
    peers_ptr,
    arrivals_offset,
    rank,
    has_failed,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Release this program's stores: add its share to this rank's counter at every peer.

    All threads' stores come before the barrier, and the barrier before the thread that releases.
    A failed rank adds nothing.
    """
    peers = tl.arange(0, BLOCK_RANKS)
    is_peer = peers < NUM_RANKS
    bases = tl.load(peers_ptr + peers, mask=is_peer, other=0)
    counters = (bases + arrivals_offset + rank * 8).to(tl.pointer_type(tl.int64))
    share = tl.where(tl.program_id(0) == 0, SHARES + 1 - tl.num_programs(0), 1).to(tl.int64)
    shares = tl.zeros([BLOCK_RANKS], dtype=tl.int64) + share
    tl.debug_barrier()
    arrives = is_peer & (has_failed == 0)
    tl.atomic_add(counters, shares, mask=arrives, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rank", "first_row", "first_origin", "num_tokens"])
def _put_tokens_kernel(
    peers_ptr,  # [P] int64
    failed_ptr,  # [1] int64
    x_ptr,  # [T, H]
    ids_ptr,  # [T, K]
    weights_ptr,  # [T, K]
    rank_of_ptr,  # [E]
    local_id_of_ptr,  # [E]
    rows_offset,  # bytes from a slot's start, like the other offsets
    ids_offset,
    weights_offset,
    origins_offset,
    arrivals_offset,
    rank,
    first_row,
    first_origin,
    num_tokens,
    num_experts,
    hidden_size,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROUTING_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RANKS_IN_MASK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """Programs stride over items: first blocks of routing, then blocks of rows and columns."""
    num_routing = tl.cdiv(num_tokens, ROUTING_ROWS)
    num_column_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)
    has_failed = tl.load(failed_ptr) != 0
    num_items = num_routing + tl.cdiv(num_tokens, BLOCK_ROWS) * num_column_blocks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        if item < num_routing:
            _put_routing(
                peers_ptr,
                ids_ptr,
                weights_ptr,
                rank_of_ptr,
                local_id_of_ptr,
                ids_offset,
                weights_offset,
                origins_offset,
                rank,
                first_row,
                first_origin,
                num_tokens,
                num_experts,
                item * ROUTING_ROWS,
                has_failed,
                NUM_RANKS,
                TOP_K,
                ROUTING_ROWS,
                BLOCK_K,
            )
        else:
            block = item - num_routing
            rows = (block // num_column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
            columns = block % num_column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            is_row = rows < num_tokens
            is_column = columns < hidden_size
            offsets = rows[:, None] * hidden_size + columns[None, :]
            mask = is_row[:, None] & is_column[None, :]
            values = tl.load(x_ptr + offsets, mask=mask)
            offsets += first_row.to(tl.int64) * hidden_size
            for first_rank in tl.static_range(0, NUM_RANKS, RANKS_IN_MASK):
                destinations = rank_mask(
                    ids_ptr,
                    rank_of_ptr,
                    rows,
                    is_row,
                    num_experts,
                    first_rank,
                    TOP_K,
                    RANKS_IN_MASK,
                )
                destinations = tl.where(has_failed, 0, destinations)
                num_in_mask = tl.minimum(NUM_RANKS - first_rank, RANKS_IN_MASK)
                for step in range(0, num_in_mask):
                    # Start behind the own rank, so that ranks do not all send to the same one.
                    bit = (rank + 1 + step) % num_in_mask
                    base = tl.load(peers_ptr + first_rank + bit)
                    landed_ptr = (base + rows_offset).to(tl.pointer_type(x_ptr.dtype.element_ty))
                    # Slots are 256-byte aligned; without the hint Triton stores 2 bytes at a time.
                    landed_ptr = tl.multiple_of(landed_ptr, 16)
                    is_needed = (destinations >> bit) & 1 != 0
                    tl.store(landed_ptr + offsets, values, mask=mask & is_needed[:, None])
    _arrive(peers_ptr, arrivals_offset, rank, has_failed, NUM_RANKS, BLOCK_RANKS, SHARES)


@triton.jit
def _put_routing(
    peers_ptr,
    ids_ptr,
    weights_ptr,
    rank_of_ptr,
    local_id_of_ptr,
    ids_offset,
    weights_offset,
    origins_offset,
    rank,
    first_row,
    first_origin,
    num_tokens,
    num_experts,
    first_token,
    has_failed,
    NUM_RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUTING_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A block of rows' ids, weights and origins to every rank.

    One dimension, so that every load and store has the same threads: in two, Triton moves ids and
    weights through shared memory for each gather and store.
    """
    lanes = tl.arange(0, ROUTING_ROWS * BLOCK_K)
    rows = (first_token + lanes // BLOCK_K).to(tl.int64)
    slots = lanes % BLOCK_K
    is_row = rows < num_tokens
    mask = is_row & (slots < TOP_K)
    offsets = rows * TOP_K + slots
    ids = tl.load(ids_ptr + offsets, mask=mask, other=-1)
    weights = tl.load(weights_ptr + offsets, mask=mask)
    is_routed = (ids >= 0) & (ids < num_experts)
    ranks = tl.load(rank_of_ptr + ids, mask=is_routed, other=-1)
    local_ids = tl.load(local_id_of_ptr + ids, mask=is_routed, other=-1)
    landed = first_row + rows
    offsets += first_row.to(tl.int64) * TOP_K
    origins = (first_origin + rows).to(tl.int32)
    is_row = is_row & (has_failed == 0)
    mask = mask & (has_failed == 0)
    for step in range(0, NUM_RANKS):
        peer = (rank + 1 + step) % NUM_RANKS
        base = tl.load(peers_ptr + peer)
        is_there = ranks == peer
        to_ids_ptr = (base + ids_offset).to(tl.pointer_type(tl.int32))
        to_weights_ptr = (base + weights_offset).to(tl.pointer_type(tl.float32))
        to_origins_ptr = (base + origins_offset).to(tl.pointer_type(tl.int32))
        tl.store(to_ids_ptr + offsets, tl.where(is_there, local_ids, -1), mask=mask)
        tl.store(to_weights_ptr + offsets, weights, mask=mask & is_there)
        tl.store(to_origins_ptr + landed, origins, mask=is_row & (slots == 0))


@triton.jit(
    do_not_specialize=["rank", "max_tokens", "num_rows", "num_foreign_rows", "end_of_own_rows"]
)
def _put_results_kernel(
    peers_ptr,  # [P] int64
    y_ptr,  # [R, H]
    ids_ptr,  # [R, K], local
    origins_ptr,  # [R]
    failed_ptr,  # [1] int64
    results_offset,  # bytes from a slot's start
    arrivals_offset,
    rank,
    max_tokens,
    num_rows,
    num_foreign_rows,
    end_of_own_rows,
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
    _arrive(peers_ptr, arrivals_offset, rank, has_failed, NUM_RANKS, BLOCK_RANKS, SHARES)
