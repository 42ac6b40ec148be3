"""Wait for the peers' arrivals, and sum what they sent: the receiving half of `symm_mem`.

A wait reads this rank's arrival counters until each has reached the call's target, then acquires
each of them, so that what the peers stored before they arrived may be read: by this program, and
by every later launch on the stream. A wait that runs out records whom it missed and marks the
rank as failed; from then on waits end at once and sums are NaN. A wait ends in the same way when
the host has set the abort word, which lies in the host's memory and is looked at once in many
reads of the counters: such a look takes longer than several of them.

Shapes: T own rows, R rows received, P ranks, M rows a rank at most, K top-k slots, H hidden size.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.device_clock import read_clock
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.launch import PreparedLaunch
from ep_runtime.kernels.symm_channel import (
    ABORTED,
    ARRIVAL_SHARES,
    COMBINE_PHASE,
    DISPATCH_PHASE,
    PEER_SHIFT,
    PHASE_SHIFT,
    Channel,
)
from ep_runtime.kernels.symm_put import RANKS_IN_MASK, rank_mask

# Programs up to which each of a sum's programs waits for itself, which saves a launch; more would
# only read the counters more often.
_MAX_WAITING_PROGRAMS = 1024
_FEW_ROWS = 512
# Reads of the counters between two looks at the abort word. On a GPU a read takes under 1 us and a
# look, over PCIe, 1 to 2: one in 1024 is one in about a millisecond, and a wait that is shorter
# never looks. In the interpreter a read takes about a millisecond.
_READS_PER_LOOK = 16 if is_interpreting() else 1024


def wait_for_dispatch(channel: Channel, *, limit_ns: int) -> None:
    """Order the stream behind every peer's `put_tokens` of the call that is being joined.

    Counts the call: channel.epoch is one more, unless the wait ran out. Waits on the device, at
    most limit_ns, and not much longer once channel.abort is set. One launch of one program.
    """
    channel.prepared(_prepare_wait, DISPATCH_PHASE)((1,), limit_ns)


def wait_for_results(channel: Channel, *, limit_ns: int) -> None:
    """Order the stream behind every peer's `put_results` of the call that was joined last.

    Waits on the device, as `wait_for_dispatch`. One launch of one program.
    """
    channel.prepared(_prepare_wait, COMBINE_PHASE)((1,), limit_ns)


def _prepare_wait(channel: Channel, phase: int) -> PreparedLaunch:
    counts_call = phase == DISPATCH_PHASE
    return PreparedLaunch(
        _wait_kernel,
        channel.memory.device,
        options={"num_warps": 1},
        arrivals_ptr=channel.dispatch_arrivals if counts_call else channel.combine_arrivals,
        COUNTS_CALL=counts_call,
        **_wait_arguments(channel, phase),
    )


@dataclass(frozen=True)
class _ResultsSum:
    """The launches of `sum_results` over one channel, by rows and by whether they wait."""

    launch: PreparedLaunch
    block_rows: int
    num_column_blocks: int


def _prepare_sum(channel: Channel, has_few_rows: bool, waits: bool) -> _ResultsSum:
    layout = channel.layout
    block_rows, block_columns, num_warps = _sum_tiles(
        layout.hidden_size, layout.dtype.itemsize, has_few_rows=has_few_rows
    )
    launch = PreparedLaunch(
        _sum_results_kernel,
        channel.memory.device,
        options={"num_warps": num_warps},
        arrivals_ptr=channel.combine_arrivals,
        limit_ns=channel.wait_limit_ns,
        results_ptr=channel.results,
        rank_of_ptr=channel.homes.rank_of,
        rank=channel.rank,
        max_tokens=layout.max_tokens_per_rank,
        num_experts=channel.homes.rank_of.numel(),
        hidden_size=layout.hidden_size,
        TOP_K=layout.top_k,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        WAITS=waits,
        UNROLL=min(layout.ep_size, 8),
        RANKS_IN_MASK=RANKS_IN_MASK,
        **_wait_arguments(channel, COMBINE_PHASE),
    )
    return _ResultsSum(launch, block_rows, -(-layout.hidden_size // block_columns))


def sum_results(
    channel: Channel,
    own_results: Tensor,
    topk_ids: Tensor,
    *,
    first_own_row: int,
    bias: Tensor | None,
    is_joined: bool,
) -> Tensor:
    """Add each own row's results, in the order of the ranks and in float32, and the bias last.

    own_results: [R, H] contiguous in the layout's dtype, of which row first_own_row + t is this
    rank's own share of row t. topk_ids: [T, K] int32 as they were sent. bias: [T, H] in any
    strides, or None. is_joined: `wait_for_results` was launched for this call; else this waits,
    also with T = 0. Returns a fresh [T, H] in the layout's dtype; NaN once a wait has run out. Only
    results of ranks that hold one of a row's experts are read.

    One launch; two where T is too large for each program to wait and the call is not joined. Does
    not wait on the host. Moves H * itemsize bytes in per (row, rank) pair and per bias row, and
    T * H * itemsize out.
    """
    num_tokens = topk_ids.shape[0]
    has_few_rows = num_tokens <= _FEW_ROWS
    tiled = channel.prepared(_prepare_sum, has_few_rows, not is_joined)
    num_programs = max(1, -(-num_tokens // tiled.block_rows) * tiled.num_column_blocks)
    if not is_joined and num_programs > _MAX_WAITING_PROGRAMS:
        wait_for_results(channel, limit_ns=channel.wait_limit_ns)
        tiled = channel.prepared(_prepare_sum, has_few_rows, False)
    output = own_results.new_empty((num_tokens, own_results.shape[1]))
    tiled.launch(
        (num_programs,),
        own_results,
        topk_ids,
        bias,
        *(bias.stride() if bias is not None else (0, 0)),
        output,
        first_own_row,
        num_tokens,
    )
    return output


def sum_results_reference(
    channel: Channel,
    own_results: Tensor,
    topk_ids: Tensor,
    *,
    first_own_row: int,
    bias: Tensor | None,
) -> Tensor:
    """The definition of `sum_results`, for results that have arrived."""
    num_tokens, rank_of = topk_ids.shape[0], channel.homes.rank_of
    is_routed = (topk_ids >= 0) & (topk_ids < rank_of.numel())
    ranks = torch.where(is_routed, rank_of[torch.where(is_routed, topk_ids, 0).long()], -1)
    total = own_results.new_zeros((num_tokens, own_results.shape[1]), dtype=torch.float32)
    for rank in range(channel.layout.ep_size):
        results: Tensor = channel.results[rank, :num_tokens]
        if rank == channel.rank:
            results = own_results[first_own_row : first_own_row + num_tokens]
        total += torch.where((ranks == rank).any(1, keepdim=True), results.float(), 0.0)
    if bias is not None:
        total += bias.float()
    return total.to(own_results.dtype)


def _sum_tiles(hidden_size: int, itemsize: int, *, has_few_rows: bool) -> tuple[int, int, int]:
    """Rows and columns of a program, and its warps: 16 bytes a thread where rows are few, so that
    they are summed by many programs; 32 where they are many."""
    if is_interpreting():
        return 32, min(triton.next_power_of_2(hidden_size), 4096), 4
    elements = (4096 if has_few_rows else 8192) // itemsize
    columns = min(triton.next_power_of_2(hidden_size), elements)
    return elements // columns, columns, 8


def _wait_arguments(channel: Channel, phase: int) -> dict[str, Any]:
    """What both kernels are bound to for their wait."""
    num_ranks = channel.layout.ep_size
    return {
        "epoch_ptr": channel.epoch,
        "failed_ptr": channel.failed,
        "record_ptr": channel.record,
        "abort_ptr": channel.abort,
        "PHASE": phase,
        "NUM_RANKS": num_ranks,
        "BLOCK_RANKS": triton.next_power_of_2(num_ranks),
        "SHARES": ARRIVAL_SHARES,
        "PEER_SHIFT": PEER_SHIFT,
        "PHASE_SHIFT": PHASE_SHIFT,
        "ABORTED": ABORTED,
        "READS_PER_LOOK": _READS_PER_LOOK,
    }


@triton.jit
def _wait_for_peers(
    arrivals_ptr,
    epoch,
    failed_ptr,
    record_ptr,
    abort_ptr,
    limit_ns,
    PHASE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    PEER_SHIFT: tl.constexpr,
    PHASE_SHIFT: tl.constexpr,
    ABORTED: tl.constexpr,
    READS_PER_LOOK: tl.constexpr,
):
    """Acquire every peer's arrival of call `epoch` (from 1); whether the rank has failed."""
    GIVES_UP: tl.constexpr = 1 << 16  # more than there are ranks
    peers = tl.arange(0, BLOCK_RANKS)
    is_peer = peers < NUM_RANKS
    target = epoch * SHARES
    start = read_clock()
    has_failed = tl.load(failed_ptr) != 0
    arrived = tl.load(arrivals_ptr + peers, mask=is_peer, other=0, volatile=True)
    is_missing = is_peer & (arrived < target)
    num_missing = tl.sum(is_missing.to(tl.int32), axis=0)
    num_reads = 0
    while (num_missing > 0) & (has_failed == 0):
        arrived = tl.load(arrivals_ptr + peers, mask=is_peer, other=0, volatile=True)
        is_missing = is_peer & (arrived < target)
        num_reads += 1
        looks = num_reads % READS_PER_LOOK == 0
        is_aborted = tl.load(abort_ptr, mask=looks, other=0, volatile=True) != 0
        gives_up = is_aborted | (read_clock() - start > limit_ns)
        # What each thread sees on its own is summed too: warps that reduce together stay together.
        num_missing = tl.sum(tl.where(is_missing, tl.where(gives_up, GIVES_UP + 1, 1), 0), axis=0)
        if num_missing > GIVES_UP:
            peer = tl.min(tl.where(is_missing, peers, BLOCK_RANKS), axis=0).to(tl.int64)
            phase = tl.where(is_aborted, PHASE | ABORTED, PHASE).to(tl.int64)
            tl.store(record_ptr, (phase << PHASE_SHIFT) | (peer << PEER_SHIFT) | epoch)
            tl.store(failed_ptr, 1)
            has_failed = has_failed | True
    # The counters are only ever added to, so adding 0 reads them again, now with acquire.
    zeros = tl.zeros([BLOCK_RANKS], dtype=tl.int64)
    tl.atomic_add(arrivals_ptr + peers, zeros, mask=is_peer, sem="acquire", scope="sys")
    tl.debug_barrier()
    return has_failed


@triton.jit(do_not_specialize=["limit_ns"])
def _wait_kernel(
    limit_ns: tl.int64,
    arrivals_ptr,  # [P] int64
    epoch_ptr,  # [1] int64
    failed_ptr,  # [1] int64
    record_ptr,  # [1] int64
    abort_ptr,  # [1] int64
    PHASE: tl.constexpr,
    COUNTS_CALL: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    PEER_SHIFT: tl.constexpr,
    PHASE_SHIFT: tl.constexpr,
    ABORTED: tl.constexpr,
    READS_PER_LOOK: tl.constexpr,
):
    """One program: wait, and in the dispatch phase count a call whose rows have all arrived."""
    epoch = tl.load(epoch_ptr)
    if COUNTS_CALL:
        epoch += 1
    has_failed = _wait_for_peers(
        arrivals_ptr,
        epoch,
        failed_ptr,
        record_ptr,
        abort_ptr,
        limit_ns,
        PHASE,
        NUM_RANKS,
        BLOCK_RANKS,
        SHARES,
        PEER_SHIFT,
        PHASE_SHIFT,
        ABORTED,
        READS_PER_LOOK,
    )
    if COUNTS_CALL:
        tl.store(epoch_ptr, epoch, mask=has_failed == 0)


@triton.jit(do_not_specialize=["first_own_row", "num_tokens", "limit_ns", "rank", "max_tokens"])
def _sum_results_kernel(
    own_results_ptr,  # [R, H]
    ids_ptr,  # [T, K]
    bias_ptr,  # [T, H] or None
    stride_bias_row,
    stride_bias_col,
    out_ptr,  # [T, H]
    first_own_row,
    num_tokens,
    arrivals_ptr,  # [P] int64
    epoch_ptr,  # [1] int64
    failed_ptr,  # [1] int64
    record_ptr,  # [1] int64
    abort_ptr,  # [1] int64
    limit_ns: tl.int64,
    results_ptr,  # [P, M, H]
    rank_of_ptr,  # [E]
    rank,
    max_tokens,
    num_experts,
    hidden_size,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    WAITS: tl.constexpr,
    UNROLL: tl.constexpr,
    RANKS_IN_MASK: tl.constexpr,
    PHASE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    PEER_SHIFT: tl.constexpr,
    PHASE_SHIFT: tl.constexpr,
    ABORTED: tl.constexpr,
    READS_PER_LOOK: tl.constexpr,
):
    """One program a block of rows and columns. What does not depend on the peers comes first."""
    num_column_blocks = tl.cdiv(hidden_size, BLOCK_COLUMNS)
    block = tl.program_id(0)
    rows = (block // num_column_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    columns = block % num_column_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_row = rows < num_tokens
    mask = is_row[:, None] & (columns < hidden_size)[None, :]
    offsets = rows[:, None] * hidden_size + columns[None, :]
    ranks = rank_mask(ids_ptr, rank_of_ptr, rows, is_row, num_experts, 0, TOP_K, RANKS_IN_MASK)
    own_offsets = offsets + first_own_row.to(tl.int64) * hidden_size
    own_values = tl.load(own_results_ptr + own_offsets, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + rows[:, None] * stride_bias_row + columns[None, :] * stride_bias_col
        bias = tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
    if WAITS:
        has_failed = _wait_for_peers(
            arrivals_ptr,
            tl.load(epoch_ptr),
            failed_ptr,
            record_ptr,
            abort_ptr,
            limit_ns,
            PHASE,
            NUM_RANKS,
            BLOCK_RANKS,
            SHARES,
            PEER_SHIFT,
            PHASE_SHIFT,
            ABORTED,
            READS_PER_LOOK,
        )
    else:
        has_failed = tl.load(failed_ptr) != 0
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], dtype=tl.float32)
    for first_rank in tl.static_range(0, NUM_RANKS, RANKS_IN_MASK):
        if first_rank > 0:
            ranks = rank_mask(
                ids_ptr, rank_of_ptr, rows, is_row, num_experts, first_rank, TOP_K, RANKS_IN_MASK
            )
        num_in_mask = tl.minimum(NUM_RANKS - first_rank, RANKS_IN_MASK)
        for bit in tl.range(0, num_in_mask, loop_unroll_factor=UNROLL):
            peer = first_rank + bit
            is_there = mask & ((ranks >> bit) & 1 != 0)[:, None]
            sent_offsets = offsets + max_tokens.to(tl.int64) * peer * hidden_size
            is_sent = is_there & (peer != rank)
            values = tl.load(results_ptr + sent_offsets, mask=is_sent, other=0.0).to(tl.float32)
            total += tl.where(is_there, tl.where(peer == rank, own_values, values), 0.0)
    if bias_ptr is not None:
        total += bias
    total = tl.where(has_failed, float("nan"), total)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
