"""One-sided all-to-all: ranks write into each other's memory and count arrivals; no barrier.

Words. A *slot* is a receive buffer, a result buffer and arrival counters, laid out alike in the
memory of every rank (kernels/symm_channel.py). P ranks, M = max_tokens_per_rank; both buffers hold
P * M rows, so no routing overflows them, and nothing grows after construction. All backends of a
context (one for each shape of its layers) take turns in one pair of slots, unless one is built
later that is larger than the pair (all2all/symmetric_slots.py).

Wire protocol of one call in one slot, seen from rank s:

1. dispatch (one launch, `put_tokens`) writes into the slot of every rank d, from row
   first_row(s) = the rows of the ranks before s: the ids local to d of each own row (-1 for slots
   that live elsewhere), the row's origin (s, t), and, only where d holds one of the row's experts,
   its weights and the row itself, once: as it is, or with fp8 rows its e4m3 values and their
   scales, which the same program makes of it on the way. Then it adds ARRIVAL_SHARES to s's
   dispatch counter at every d, itself included, also with zero rows.
2. joining dispatch (one launch, one program) waits until the dispatch counter of every source has
   reached (epoch + 1) * ARRIVAL_SHARES, and counts the call: epoch += 1. The received rows are the
   first sum(rows_per_rank) rows of the buffer; the experts read them where they are. Rows that
   were not sent here have ids of -1 only.
3. combine (one launch, `put_results`) writes the result of each received row that has a local
   expert to its origin's result buffer, at [s, t], and adds ARRIVAL_SHARES to s's combine counter
   at every rank. Results of s's own rows are not copied.
4. joining combine waits until every combine counter has reached epoch * ARRIVAL_SHARES, and adds
   each own row's results in the order of the ranks, in float32, then the bias (one launch,
   `sum_results`; two where many rows, or a separate join, ask for the wait on its own).

Memory order. Writer: all threads of a program store rows with ordinary stores; a block-wide
barrier; then one thread for each peer adds the program's share with a release at system scope.
Reader: spins on the counters with volatile loads, then reads them again with an acquiring atomic
at system scope; a block-wide barrier; then ordinary loads, in that program or in a later launch on
the stream. A call's shares add up to ARRIVAL_SHARES, so a counter reaches its target only after the
release of every program of the writer, and each of these releases is part of the acquired value's
history.

Why a late reader is safe, in one slot, call n:
- s overwrites the receive buffer of d (step 1 of call n) after it has joined combine n-1, so after
  d's arrival in combine n-1. d arrived there behind its experts and its own reads of the ids and
  origins: nobody at d reads what is overwritten.
- d overwrites the result buffer of s (step 3 of call n) after it has joined dispatch n, so after
  s's arrival in dispatch n, which s launched behind its sum of call n-1.
Both arguments need an arrival from every rank in every phase. That is why a rank without rows
arrives too, and why a rank without rows waits as well. A counter can be at most one call ahead of
its reader, and waits ask for "at least", so being ahead is harmless.

Why backends of different shapes may take turns in a slot. Both arguments are about whole buffers
and successive calls, and nowhere about what lies where in a buffer: calls n-1 and n may be laid out
differently, as long as
- the counters and the epoch are the slot's own: no shape moves them, and every call counts;
- the border between the two buffers is the slot's own too (`SlotSpace`): d may still be summing
  call n-1 from its result buffer when s sends it the rows of call n, so no shape's rows may lie
  where another shape's results do;
- nothing is read in call n that was not written in call n. Ids and origins are written for every
  received row, and joined before they are read; weights, rows and scales are read only where the
  id says that they were sent, and results only from ranks that hold one of the row's experts. The
  rest of the memory may hold the numbers of another shape, NaN among them, and is masked;
- views of what was received end with their call: they may be read by what is launched before the
  call's combine, and not after it; what experts return is memory of their own, which is read until
  the join. After the combine another layer's rows may come.
Slots are taken in the order of calls, whichever backend makes them: the same on every rank.

Why two buffers suffice. One receive and one result buffer serve any number of calls one after
another: each phase of a call is the other's permission to write. The second slot is there so that
a call may be dispatched before the combine of the one before it is joined. A call takes the first
free slot and holds it from dispatch to the join of its combine; all ranks make the same calls in
the same order, so they take the same slot. A third call in flight, of whatever backend in these
slots, is refused. A call that is given up after its dispatch keeps its slot: its counters are out
of step with its peers', and the context that it failed in is to be closed.
The calls of a context's layers are made on one stream, or on streams that the caller orders.

Graphs. The host bakes addresses and row counts into a launch, which are static under capture;
nothing else. Targets come from the epoch on the device, which the join of dispatch alone advances,
so a graph can be replayed any number of times, with other routing, between eager calls too, with as
many calls in flight (none, as a rule) as when it was captured. All ranks replay the same graphs in
the same order.

Streams. Puts of at least `comm_stream_bytes` go to a communication stream, behind the current one,
with a bounded number of programs; smaller ones stay on the current stream, which saves two events:
there the flight and the peers' work remain to overlap with. The join orders the current stream
behind the put. Rows and outputs that are in flight are held by the Pending.

Host. What is the same in every call (addresses, sizes, compiled kernels, events) is worked out once
(kernels/launch.py, all2all/comm_stream.py); a call looks at its own tensors and row counts.

Where it waits: on the device, in the joins; never on the host on CUDA. On a CPU (Triton's
interpreter) the join is the wait, in slices between which `group.check()` is asked.

When a peer does not come. A wait lasts at most `wait_limit_s`, and ends within milliseconds once
the host knows of a failed rank: it sets the group's abort word, in its own memory, at which every
wait looks now and then. A wait that ends so writes (phase, peer, epoch) to memory that the host
reads without waiting, marks the rank as failed, and goes on. A failed rank waits no more, puts
nothing any more (it does not know whether its peers still read what it would overwrite), and its
outputs are NaN. So whoever waits for it fails too, and no rank sums what was computed from rows
that never came. The mark is the slots', so it holds for every backend in them. The next call,
`check()` and `close()` raise RankFailure, which names the failed rank and its reason where the host
knows them, else the peer that was waited for.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    RoutedTokens,
)
from ep_runtime.all2all.comm_stream import CommStream
from ep_runtime.all2all.symmetric_buffer import open_symmetric_buffer
from ep_runtime.all2all.symmetric_slots import NUM_SLOTS, OpenBuffer, shared_slots
from ep_runtime.kernels.base import Concurrency, ConcurrencyRule, InputFormat, StandardExpertInput
from ep_runtime.kernels.devices import FEW_MULTIPROCESSORS, num_multiprocessors
from ep_runtime.kernels.errors import CapacityError, PlanError, RankFailure
from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.symm_channel import (
    Channel,
    ExpertHomes,
    SlotLayout,
    first_received_row,
)
from ep_runtime.kernels.symm_operators import (
    put_results,
    put_tokens,
    sum_results,
    wait_for_dispatch,
    wait_for_results,
)

_FP8_CAPABILITY = (8, 9)  # the first GPUs that convert to e4m3
_SLICE_S = 0.1  # of a wait on a CPU, between two looks at whether a rank has failed


@dataclass(frozen=True)
class SymmMemLimits:
    """What bounds the backend's waits and launches.

    wait_limit_s: for a peer, in one join. put_programs: of one put at most; None: as many as the
    device has multiprocessors, and twice as many where dispatch quantises, so that one program of
    each computes while the other's rows are on their way. combine_programs: of a combine on the
    communication stream: 64 leave half of an H200 to the shared expert and reach 0.97 of the rate
    of 132. comm_stream_bytes: puts of fewer bytes stay on the current stream.
    """

    wait_limit_s: float = 100.0
    put_programs: int | None = None
    combine_programs: int = 64
    comm_stream_bytes: int = 4 << 20


@dataclass(frozen=True)
class PreparedTokens:
    """One round's own rows, contiguous, and where they land in every receive buffer.

    num_received: R, rows of all ranks.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    first_row: int
    num_received: int


@dataclass(frozen=True)
class SlotCall:
    """A call between dispatch and combine: its slot, and its own rows' ids [T, K]."""

    slot: int
    topk_ids: Tensor
    first_row: int
    num_received: int


@dataclass
class PendingDispatch:
    """Rows on their way. Keeps the prepared tensors until it is joined."""

    backend: "SymmMemBackend"
    prepared: PreparedTokens
    handle: SlotCall
    is_on_comm_stream: bool
    _is_joined: bool = field(default=False, init=False)

    def join(self) -> None:
        """Order the current stream (on a CPU: the caller) behind every rank's rows."""
        if self._is_joined:
            return
        self._is_joined = True
        self.backend.wait(self, wait_for_dispatch)

    def wait(self, bias: Tensor | None = None) -> tuple[StandardExpertInput, SlotCall]:
        """The received rows: views of the slot, for what is launched before the call's combine."""
        if bias is not None:
            raise ValueError("symm_mem's dispatch takes no bias")
        self.join()
        return self.backend.received(self.handle), self.handle


@dataclass
class PendingCombine:
    """Results on their way home. Keeps them until it is joined."""

    backend: "SymmMemBackend"
    expert_output: Tensor
    handle: SlotCall
    is_on_comm_stream: bool
    _is_joined: bool = field(default=False, init=False)
    _is_given: bool = field(default=False, init=False)

    def join(self) -> None:
        """Order the current stream (on a CPU: the caller) behind every rank's results."""
        if self._is_joined:
            return
        self._is_joined = True
        self.backend.wait(self, wait_for_results)

    def wait(self, bias: Tensor | None = None) -> Tensor:
        """Sum the results and `bias` [T, H] in float32; a fresh [T, H] in the input's dtype."""
        if self._is_given:
            raise RuntimeError("a combine of symm_mem gives its result once; keep what wait gave")
        was_joined = self._is_joined
        self._is_given = self._is_joined = True  # a later join must not wait for the next call
        return self.backend.finish(self, bias, is_joined=was_joined)


def _slot_layout(shape: BackendShape) -> SlotLayout:
    return SlotLayout(
        shape.placement.ep_size,
        shape.max_tokens_per_rank,
        shape.hidden_size,
        shape.top_k,
        shape.dtype,
        shape.rows,
    )


class SymmMemBackend:
    """Triton kernels over symmetric memory, for decode and prefill.

    Building it is a collective of the group. limits: as `SymmMemLimits`. open_buffer: makes the
    memory where the group's other backends have none that is large enough; `open_symmetric_buffer`,
    or one rank of `virtual_buffers` in a stress test.
    dispatch_programs, put_programs: of a dispatch, and of a combine on the current stream.
    """

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="symm_mem",
        format=InputFormat.STANDARD,
        supports_async=True,
        combine_bias=CombineBias.AT_JOIN,
        uneven_experts=True,
        supports_cuda_graph=True,
        needs_triton=True,
        row_schemes=frozenset(RowScheme),
        needs_peer_access=True,
        receive_bytes=lambda shape, ep_rank: NUM_SLOTS * _slot_layout(shape).num_bytes,
        communication=ConcurrencyRule(
            None,
            Concurrency.CERTIFIED,
            "tests/all2all/test_symm_mem.py"
            "::test_the_combine_runs_beside_work_issued_in_its_window",
            owns="two slots with arrival counters and an epoch, held from dispatch to the join of "
            "combine; one communication stream and its events",
            record="benchmarks/results/audit_triton.json",
        ),
    )

    def __init__(
        self,
        group: EPGroup,
        shape: BackendShape,
        *,
        limits: SymmMemLimits | None = None,
        open_buffer: OpenBuffer = open_symmetric_buffer,
    ) -> None:
        prepare_launch(group.device)
        self.limits = limits or SymmMemLimits()
        self._group, self.shape = group, shape
        device, self._on_cuda = group.device, group.device.type == "cuda"
        if self._on_cuda and shape.rows is RowScheme.FP8_GROUP:
            refuse_without_fp8(device)
        # Where nothing else runs, one a multiprocessor; a few in the interpreter.
        self.put_programs = self.limits.put_programs or num_multiprocessors(
            device, off_gpu=FEW_MULTIPROCESSORS
        )
        self.dispatch_programs = self.put_programs
        if self.limits.put_programs is None and shape.rows is RowScheme.FP8_GROUP:
            self.dispatch_programs *= 2
        self._sent_row_bytes = shape.sent_row_bytes
        self._result_row_bytes = shape.hidden_size * shape.dtype.itemsize
        layout, placement = _slot_layout(shape), shape.placement
        homes = ExpertHomes(
            torch.tensor(placement.rank_of, dtype=torch.int32, device=device),
            torch.tensor(placement.local_id_of, dtype=torch.int32, device=device),
        )
        self.slots = shared_slots(group, layout.needs, open_buffer)
        layout = replace(layout, space=self.slots.space)
        self._comm_stream = self.slots.comm_stream
        self.channels: Sequence[Channel] = self.slots.enter(
            layout, homes, int(self.limits.wait_limit_s * 1e9)
        )
        self._received: dict[int, tuple[int, StandardExpertInput]] = {}

    def prepare(self, tokens: RoutedTokens) -> PreparedTokens:
        """Raises CapacityError where a rank has more rows than the buffers are built for."""
        limit = self.shape.max_tokens_per_rank
        if max(tokens.rows_per_rank) > limit:
            raise CapacityError(
                f"rows_per_rank {list(tokens.rows_per_rank)} has more than "
                f"max_tokens_per_rank ({limit}) rows on a rank; call in rounds or raise "
                f"parallel.max_tokens_per_rank"
            )
        return PreparedTokens(
            hidden_states=tokens.hidden_states.contiguous(),
            topk_ids=tokens.topk_ids.contiguous(),
            topk_weights=tokens.topk_weights.contiguous(),
            first_row=first_received_row(tokens.rows_per_rank, self._group.rank),
            num_received=sum(tokens.rows_per_rank),
        )

    def dispatch(self, prepared: PreparedTokens) -> PendingDispatch:
        """Issue the rows. Raises RankFailure once a wait has run out or some rank has failed."""
        self.check()
        slot = self.slots.take()
        handle = SlotCall(slot, prepared.topk_ids, prepared.first_row, prepared.num_received)
        sent_bytes = prepared.hidden_states.shape[0] * self._sent_row_bytes
        comm_stream = self._comm_stream_for(sent_bytes)
        put_tokens(
            self.channels[slot],
            (prepared.hidden_states, prepared.topk_ids, prepared.topk_weights),
            first_row=prepared.first_row,
            max_programs=self.dispatch_programs,
            stream=comm_stream.address if comm_stream is not None else None,
        )
        if comm_stream is not None:
            comm_stream.mark_end(slot)
        return PendingDispatch(self, prepared, handle, comm_stream is not None)

    def combine(
        self, expert_output: Tensor, handle: SlotCall, bias: Tensor | None = None
    ) -> PendingCombine:
        """Issue the results. expert_output: [R, H] by received row."""
        if bias is not None:
            raise ValueError("symm_mem's combine takes its bias at the join: wait(bias=...)")
        if expert_output.dtype != self.shape.dtype:
            raise ValueError(
                f"symm_mem's combine was given {expert_output.dtype}; experts return rows in the "
                f"layer's dtype, {self.shape.dtype}"
            )
        self.check()
        expert_output = expert_output.contiguous()
        num_own_rows = handle.topk_ids.shape[0]
        sent_bytes = (handle.num_received - num_own_rows) * self._result_row_bytes
        comm_stream = self._comm_stream_for(sent_bytes)
        has_comm_stream = comm_stream is not None
        put_results(
            self.channels[handle.slot],
            expert_output,
            num_own_rows=num_own_rows,
            first_own_row=handle.first_row,
            max_programs=self.limits.combine_programs if has_comm_stream else self.put_programs,
            stream=comm_stream.address if comm_stream is not None else None,
        )
        if comm_stream is not None:
            comm_stream.mark_end(handle.slot)
        return PendingCombine(self, expert_output, handle, has_comm_stream)

    def check(self) -> None:
        """Raise RankFailure once a wait of this rank has run out, or some rank has failed."""
        self._group.check()
        failed = self.slots.failed_wait()
        if failed is None:
            return
        how = f"waited {self.limits.wait_limit_s:g} s for"
        why = "it is gone or far behind"
        if failed.is_aborted:
            how, why = "no longer waits for", "a rank has failed"
        raise RankFailure(
            f"{self._name(self._group.rank)} {how} {self._name(failed.peer)} in {failed.phase} of "
            f"call {failed.epoch} of symm_mem; {why}. Outputs since then are NaN"
        )

    def close(self) -> None:
        """Leave the slots, behind all that is in flight; the last backend's leaving releases them.
        Idempotent. Raises as `check`."""
        if self._comm_stream is not None:
            torch.cuda.synchronize(self._group.device)
        if self.channels:
            self.slots.leave()
        self.channels = ()
        self._received.clear()
        self.check()

    def wait(
        self, pending: PendingDispatch | PendingCombine, launch_wait: Callable[..., None]
    ) -> None:
        """Join a phase of a call: `launch_wait`, behind the own put."""
        channel = self.channels[pending.handle.slot]
        if self._on_cuda:
            self._join_own_put(pending)
            launch_wait(channel, limit_ns=channel.wait_limit_ns)
        else:
            self._wait_in_slices(channel, launch_wait)

    def received(self, handle: SlotCall) -> StandardExpertInput:
        """A joined call's rows. The views are made anew only when their number changes."""
        num_rows, views = self._received.get(handle.slot, (-1, None))
        if views is None or num_rows != handle.num_received:
            channel, num_rows = self.channels[handle.slot], handle.num_received
            views = StandardExpertInput(
                hidden_states=channel.rows[:num_rows],
                topk_ids=channel.topk_ids[:num_rows],
                topk_weights=channel.topk_weights[:num_rows],
                scales=channel.scales[:num_rows] if channel.scales is not None else None,
                num_source_rows=num_rows,
            )
            self._received[handle.slot] = num_rows, views
        return views

    def finish(self, pending: PendingCombine, bias: Tensor | None, *, is_joined: bool) -> Tensor:
        """Sum the results of a call and give its slot back; joins where that is still to do."""
        handle = pending.handle
        if not is_joined:
            if self._on_cuda:
                self._join_own_put(pending)
            else:
                self.wait(pending, wait_for_results)
        output = sum_results(
            self.channels[handle.slot],
            pending.expert_output,
            handle.topk_ids,
            first_own_row=handle.first_row,
            bias=bias,
            is_joined=is_joined,
        )
        self.slots.give_back(handle.slot)
        return output

    def _comm_stream_for(self, num_bytes: int) -> CommStream | None:
        """The communication stream, behind the current one, for a put of so many bytes to a rank;
        None where it stays on the current stream."""
        if self._comm_stream is None or num_bytes < self.limits.comm_stream_bytes:
            return None
        self._comm_stream.follow_current_stream()
        return self._comm_stream

    def _join_own_put(self, pending: PendingDispatch | PendingCombine) -> None:
        if pending.is_on_comm_stream and self._comm_stream is not None:
            self._comm_stream.join(pending.handle.slot)

    def _wait_in_slices(self, channel: Channel, launch_wait: Callable[..., None]) -> None:
        """A CPU's wait: the same kernel, stopped now and then to see whether a rank has failed."""
        started = time.monotonic()
        while True:
            waited_s = time.monotonic() - started
            left_s = self.limits.wait_limit_s - waited_s
            launch_wait(channel, limit_ns=int(max(min(left_s, _SLICE_S), 0.0) * 1e9))
            failed = self.slots.failed_wait()
            if failed is None:
                return
            self._group.check()
            self._group.check_wait(waited_s)
            if failed.is_aborted or left_s <= _SLICE_S:
                return
            self.slots.forget_failed_wait()

    def _name(self, ep_rank: int) -> str:
        """A rank as users count them, and its place in the EP group."""
        if self._group.process_group is None:
            return f"EP rank {ep_rank}"
        world_rank = dist.get_process_group_ranks(self._group.process_group)[ep_rank]
        return f"rank {world_rank} (EP rank {ep_rank})"


def refuse_without_fp8(device: torch.device) -> None:
    """Raise PlanError for a GPU that cannot make fp8 rows."""
    capability = torch.cuda.get_device_capability(device)
    if capability < _FP8_CAPABILITY:
        raise PlanError(
            f"dispatch_dtype fp8 needs a GPU of compute capability 8.9 or later in symm_mem, and "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}; use "
            f"dispatch_dtype: model"
        )
