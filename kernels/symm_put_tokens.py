"""Put rows and their routing into the peers' memory: dispatch's put of `symm_mem`.

It ends in an arrival, as `kernels/symm_put.py` says.

Shapes: T own rows, P ranks, M rows a rank at most, K top-k slots, H hidden size, G = ceil(H / 128)
groups of columns, E experts.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.launch import PreparedLaunch
from ep_runtime.kernels.quant.fp8_rows import quantize_group, quantize_rows_reference
from ep_runtime.kernels.quant.scheme import FP8_GROUP
from ep_runtime.kernels.symm_channel import ARRIVAL_SHARES, Channel
from ep_runtime.kernels.symm_put import (
    FEW_ROWS,
    RANKS_IN_MASK,
    PutTiles,
    arrive,
    choose_put_tiles,
    rank_mask,
)

_ROUTING_SLOTS = 256  # ids and weights that one program sends at once, about


@dataclass(frozen=True)
class _TokensPut:
    """The launches of `put_tokens` over one channel, for few rows or for many."""

    launch: PreparedLaunch
    tiles: PutTiles
    routing_rows: int


def _prepare_put_tokens(channel: Channel, has_few_rows: bool) -> _TokensPut:
    layout, homes = channel.layout, channel.homes
    tiles = choose_put_tiles(
        layout.hidden_size,
        layout.dtype.itemsize,
        has_few_rows=has_few_rows,
        min_columns=FP8_GROUP if layout.has_scales else 1,
    )
    block_k = triton.next_power_of_2(layout.top_k)
    routing_rows = max(1, _ROUTING_SLOTS // block_k)
    launch = PreparedLaunch(
        _put_tokens_kernel,
        channel.memory.device,
        options={"num_warps": tiles.num_warps},
        peers_ptr=channel.peers,
        failed_ptr=channel.failed,
        rank_of_ptr=homes.rank_of,
        local_id_of_ptr=homes.local_id_of,
        rows_offset=layout.offset("rows"),
        scales_offset=layout.offset("scales"),
        ids_offset=layout.offset("topk_ids"),
        weights_offset=layout.offset("topk_weights"),
        origins_offset=layout.offset("origins"),
        arrivals_offset=layout.offset("dispatch_arrivals"),
        rank=channel.rank,
        first_origin=channel.rank * layout.max_tokens_per_rank,
        num_experts=homes.rank_of.numel(),
        hidden_size=layout.hidden_size,
        IN_FP8=layout.has_scales,
        GROUP=FP8_GROUP,
        NUM_RANKS=layout.ep_size,
        TOP_K=layout.top_k,
        SHARES=ARRIVAL_SHARES,
        BLOCK_ROWS=tiles.block_rows,
        BLOCK_COLUMNS=tiles.block_columns,
        ROUTING_ROWS=routing_rows,
        BLOCK_K=block_k,
        RANKS_IN_MASK=RANKS_IN_MASK,
        BLOCK_RANKS=triton.next_power_of_2(layout.ep_size),
    )
    return _TokensPut(launch, tiles, routing_rows)


def put_tokens(
    channel: Channel,
    tokens: tuple[Tensor, Tensor, Tensor],
    *,
    first_row: int,
    max_programs: int,
    stream: int | None = None,
) -> None:
    """Send each own row once to every rank that holds one of its experts; arrive at every peer.

    tokens: hidden_states [T, H], topk_ids [T, K] int32 global ids or -1, topk_weights [T, K]
    float32, all contiguous; T may be 0. first_row: where this rank's rows begin in a receive
    buffer. At row first_row + t of every rank's: ids local to that rank, -1 for slots that live
    elsewhere; the origin; the weights of the slots that live there; and the row, if there is one,
    in the layout's row scheme: in fp8 as `quantize_rows_reference` gives it, with its scales.
    One launch of at most `max_programs` programs, on the current stream or `stream`; does not wait
    for the device. Moves T * H * itemsize bytes in, a row as it is sent (`SlotLayout`) out per
    destination rank, and T * P * (8 K + 4) of routing.
    """
    hidden_states, topk_ids, topk_weights = tokens
    num_tokens, hidden_size = hidden_states.shape
    put = channel.prepared(_prepare_put_tokens, num_tokens <= FEW_ROWS)
    num_items = -(-num_tokens // put.routing_rows) + put.tiles.num_blocks(num_tokens, hidden_size)
    put.launch(
        (max(1, min(num_items, max_programs)),),
        hidden_states,
        topk_ids,
        topk_weights,
        first_row,
        num_tokens,
        stream=stream,
    )


def put_tokens_reference(
    channels: Sequence[Channel],
    rank: int,
    tokens: tuple[Tensor, Tensor, Tensor],
    *,
    first_row: int,
) -> None:
    """The definition of `put_tokens`. channels: one of every rank, all in this process."""
    hidden_states, topk_ids, topk_weights = tokens
    num_tokens, homes = topk_ids.shape[0], channels[rank].homes
    is_routed = (topk_ids >= 0) & (topk_ids < homes.rank_of.numel())
    ids = torch.where(is_routed, topk_ids, 0).long()
    landed = slice(first_row, first_row + num_tokens)
    rows, scales = hidden_states, None
    if channels[rank].layout.has_scales:
        rows, scales = quantize_rows_reference(hidden_states)
    for peer, channel in enumerate(channels):
        is_there = is_routed & (homes.rank_of[ids] == peer)
        channel.topk_ids[landed] = torch.where(is_there, homes.local_id_of[ids], -1)
        channel.topk_weights[landed][is_there] = topk_weights[is_there]
        first_origin = rank * channel.layout.max_tokens_per_rank
        channel.origins[landed] = first_origin + torch.arange(
            num_tokens, dtype=torch.int32, device=ids.device
        )
        is_needed = is_there.any(1)
        # Through bytes: torch cannot index fp8.
        landed_rows = channel.rows[landed].view(torch.uint8)
        landed_rows[is_needed] = rows.contiguous().view(torch.uint8)[is_needed]
        if channel.scales is not None and scales is not None:
            channel.scales[landed][is_needed] = scales[is_needed]
        channel.dispatch_arrivals[rank] += ARRIVAL_SHARES


@triton.jit(do_not_specialize=["first_row", "num_tokens", "rank", "first_origin"])
def _put_tokens_kernel(
    x_ptr,  # [T, H]
    ids_ptr,  # [T, K]
    weights_ptr,  # [T, K]
    first_row,
    num_tokens,
    peers_ptr,  # [P] int64
    failed_ptr,  # [1] int64
    rank_of_ptr,  # [E]
    local_id_of_ptr,  # [E]
    rows_offset,  # bytes from a slot's start, like the other offsets
    scales_offset,
    ids_offset,
    weights_offset,
    origins_offset,
    arrivals_offset,
    rank,
    first_origin,
    num_experts,
    hidden_size,
    IN_FP8: tl.constexpr,
    GROUP: tl.constexpr,
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
            first_token = block // num_column_blocks * BLOCK_ROWS
            first_column = block % num_column_blocks * BLOCK_COLUMNS
            if IN_FP8:
                # A line of the block is one group of one row.
                GROUPS: tl.constexpr = BLOCK_COLUMNS // GROUP
                lines = tl.arange(0, BLOCK_ROWS * GROUPS)
                rows = (first_token + lines // GROUPS).to(tl.int64)
                groups = first_column // GROUP + lines % GROUPS
                columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            else:
                rows = (first_token + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
                columns = (first_column + tl.arange(0, BLOCK_COLUMNS))[None, :]
            is_row = rows < num_tokens
            mask = is_row[:, None] & (columns < hidden_size)
            x_ptrs = x_ptr + rows[:, None] * hidden_size + columns
            values = tl.load(x_ptrs, mask=mask, other=0.0)
            # Where rows go is read while they are on their way.
            destinations = rank_mask(
                ids_ptr, rank_of_ptr, rows, is_row, num_experts, 0, TOP_K, RANKS_IN_MASK
            )
            landed = rows + first_row
            offsets = landed[:, None] * hidden_size + columns
            if IN_FP8:
                values, scales = quantize_group(values.to(tl.float32))
                num_groups = tl.cdiv(hidden_size, GROUP)
                scales_offsets = landed * num_groups + groups
                is_group = is_row & (groups < num_groups)
            for first_rank in tl.static_range(0, NUM_RANKS, RANKS_IN_MASK):
                if first_rank > 0:
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
                    is_needed = (destinations >> bit) & 1 != 0
                    landed_ptr = (base + rows_offset).to(tl.pointer_type(values.dtype))
                    # Slots are 256-byte aligned; without the hint Triton stores 2 bytes at a time.
                    landed_ptr = tl.multiple_of(landed_ptr, 16)
                    tl.store(landed_ptr + offsets, values, mask=mask & is_needed[:, None])
                    if IN_FP8:
                        scales_ptr = (base + scales_offset).to(tl.pointer_type(tl.float32))
                        scales_ptrs = tl.multiple_of(scales_ptr, 16) + scales_offsets
                        tl.store(scales_ptrs, scales, mask=is_group & is_needed)
    arrive(peers_ptr, arrivals_offset, rank, has_failed, NUM_RANKS, BLOCK_RANKS, SHARES)


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
