"""This process's rank, device and process groups; the one place where they are made.

Ranks: `rank = dp_rank * tp_size + tp_rank`; EP group g is ranks [g * ep_size, (g + 1) * ep_size).
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from ep_runtime.all2all.base import All2AllBackend, BackendShape, EPGroup
from ep_runtime.all2all.collectives import start_all_gather
from ep_runtime.all2all.registry import backend_class
from ep_runtime.config import ParallelConfig
from ep_runtime.failure import FailureLimits, FailureWatch
from ep_runtime.kernels.base import Experts
from ep_runtime.kernels.errors import ConfigError, RankFailure
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launcher_environment import read_launcher_environment
from ep_runtime.process_groups import (
    ProcessGroups,
    abort_communicators,
    make_process_groups,
    never_destroy,
    place_process,
)
from ep_runtime.rendezvous import Rendezvous, rendezvous_from, rendezvous_of_default_group
from ep_runtime.row_counts import RowCounts, agree_row_counts, refuse_negative_rows
from ep_runtime.row_counts import tp_slice as tp_slice
from ep_runtime.streams import make_streams

_STEP_CALL = -1  # what ctx.step is agreed on as, unlike any layer's call


class EPContext:
    """One rank's place among the ranks, and what its layers share; `init_distributed` makes it.

    step_group: the smallest group that holds whole EP groups and whole TP groups. world_group: all
    ranks. Leaving `with ctx:` by an exception tells all ranks, and so does a program that ends by
    one; `sys.exit(0)` is no failure.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        rendezvous: Rendezvous,
        *,
        limits: FailureLimits,
        start_timeout_s: float,
    ) -> None:
        self.parallel = parallel
        self.rank, self.world_size = rendezvous.rank, rendezvous.world_size
        self.dp_rank, self.tp_rank = divmod(self.rank, parallel.tp_size)
        self.ep_rank = self.rank % parallel.ep_size
        self._hosts_store = rendezvous.hosts_store
        self._groups: ProcessGroups | None = None
        self._is_closed = self._has_ended = False
        self._step: RowCounts | None = None
        self._num_layers = 0
        self._abort: Tensor | None = None
        self._backends: dict[tuple[str, BackendShape], All2AllBackend[Any, Any]] = {}
        self._experts: WeakSet[Experts] = WeakSet()
        self._watch = FailureWatch(
            rendezvous.private_store("watch"),
            rank=self.rank,
            world_size=self.world_size,
            store_host=rendezvous.store_host,
            limits=limits,
            on_failure=self._abort_waits,
        )
        atexit.register(self._close_at_exit)
        try:
            self._make_groups(rendezvous, start_timeout_s)
        except BaseException as error:
            self._close(error)
            raise

    def _make_groups(self, rendezvous: Rendezvous, start_timeout_s: float) -> None:
        parallel = self.parallel
        place = place_process(parallel, rendezvous, self._watch, start_timeout_s)
        self.device = place.device
        self._abort = torch.zeros(1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._watch.check()  # of what failed before there was a word to say so
        if self.world_size > 1:
            _use_default_group(
                lambda: dist.init_process_group(
                    place.group_backend,
                    store=PrefixStore("default", rendezvous.store),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=timedelta(seconds=parallel.timeout_s),
                )
            )
        groups = make_process_groups(parallel, self.rank, place.group_backend)
        self._groups = groups

        def view(group: dist.ProcessGroup | None, size: int) -> EPGroup:
            first = self.rank // size * size
            members = range(first, first + size)
            return EPGroup(
                group,
                self.rank - first,
                size,
                self.device,
                self._check_open,
                partial(self._watch.check_wait, members),
                self._abort,
            )

        self.ep_group = view(groups.ep, parallel.ep_size)
        self.tp_group = view(groups.tp, parallel.tp_size)
        self.step_group = view(groups.step, groups.step_size)
        self.world_group = view(groups.world, self.world_size)
        self.workspace = Workspace(self.device)
        self.streams = make_streams(self.device)

    @contextmanager
    def step(self, num_tokens: int, counts: tuple[int, ...] | None = None) -> Iterator[RowCounts]:
        """Agree on all ranks' row counts once for the model forward inside; a collective.

        num_tokens: rows of this rank's DP group. counts: given where they are known and static
        (under capture): rows of each EP rank's slice, as `rows_per_rank` returns them; then
        nothing is communicated. Gives what was agreed on. Raises ConfigError on all ranks where
        TP ranks differ or a count is negative.
        """
        self._check_open()
        if self._step is not None:
            raise ConfigError("ctx.step is open already; one step covers one model forward")
        if counts is None:
            self._step = self._agree(num_tokens, _STEP_CALL)
        else:
            self._step = self._given(num_tokens, counts)
        try:
            yield self._step
        finally:
            self._step = None

    def rows_per_rank(self, num_tokens: int, call: int = 0) -> tuple[int, ...]:
        """Rows of each EP rank in this call: the step's, or agreed on here (a collective).

        num_tokens: rows of this rank's DP group, before they are cut over its TP ranks.
        call: an int64 >= 0 that tells this call from others that a rank may make instead: where it
        differs, all ranks raise ConfigError. Not compared inside a step.
        """
        self._check_open()
        if self._step is None:
            return self._agree(num_tokens, call).rows_per_rank
        if num_tokens != self._step.num_tokens:
            raise ConfigError(
                f"a layer was called with {num_tokens} rows inside "
                f"ctx.step({self._step.num_tokens}); every layer of a step takes the same rows"
            )
        return self._step.rows_per_rank

    def number_layer(self) -> int:
        """The number of a layer that is being built; ranks build the same ones in the same order,
        so it tells a layer's calls from another's."""
        self._num_layers += 1
        return self._num_layers

    def gather_tp_slices(self, rows: Tensor, num_tokens: int) -> Tensor:
        """[t, n], this rank's slice, to the DP group's whole [num_tokens, n]; a TP collective."""
        tp_size = self.parallel.tp_size
        if tp_size == 1 or num_tokens == 0:
            return rows
        most_rows = -(-num_tokens // tp_size)
        padded = rows.new_zeros((most_rows, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty((tp_size * most_rows, *rows.shape[1:]))
        start_all_gather(gathered, padded, self.tp_group).join()
        return gathered[:num_tokens]

    def backend(self, name: str, shape: BackendShape) -> All2AllBackend[Any, Any]:
        """The backend of that name for that shape; made at the first call, which is a collective
        of the EP group."""
        self._check_open()
        key = (name, shape)
        if key not in self._backends:
            self._backends[key] = backend_class(name)(self.ep_group, shape)
        return self._backends[key]

    def check(self) -> None:
        """Raise RankFailure, naming rank and reason, once some rank has failed."""
        self._watch.check()
        for backend in self._backends.values():
            backend.check()
        for experts in self._experts:
            experts.check()

    def watch_experts(self, experts: Experts) -> None:
        """Have `check` and `close` ask a layer's kernel too, for as long as it lives."""
        self._experts.add(experts)

    def report_failure(self, error: BaseException) -> None:
        """Tell all ranks that this one has failed; they raise RankFailure within seconds.

        A RankFailure that tells of another rank's failure is not passed on.
        """
        self._watch.report(error)

    def close(self) -> None:
        """End what this context made; a default group made by the caller is left. Idempotent.

        The rank that hosts the store stays until all others have ended or one has failed.
        Raises RankFailure where a rank has failed, or did not come to a wait on the device, and
        nothing has said so yet.
        """
        self._close(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        self._close(error)

    def _close(self, error: BaseException | None, *, at_exit: bool = False) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_at_exit)
        if error is not None:
            self._watch.report(error)
        self._watch.close(must_outlive_others=self._hosts_store, at_exit=at_exit)
        if self._watch.failure is not None:
            if self._groups is not None:
                never_destroy(self._groups)
            if self._may_hang_at_exit():
                atexit.register(_bound_interpreter_exit)
            if error is None and not self._watch.is_delivered:
                self._watch.check()
            self._has_ended = True
            return
        found = self._close_backends()
        self._has_ended = True
        for group in self._groups.distinct() if self._groups else []:
            dist.destroy_process_group(group)
        if self._groups is not None and self.world_size > 1:
            _release_default_group()
        if found is not None and error is None:
            raise found

    def _close_backends(self) -> RankFailure | None:
        """Close all, and return the first wait on the device that had run out."""
        found: RankFailure | None = None
        for backend in self._backends.values():
            try:
                backend.close()
            except RankFailure as failure:
                found = found or failure
        self._backends.clear()
        if self._experts and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for experts in self._experts:
            try:
                experts.check()
            except RankFailure as failure:
                found = found or failure
        return found

    def _close_at_exit(self) -> None:
        """The program ends with the context open: by an exception, or without `close`."""
        uncaught: BaseException | None = getattr(sys, "last_value", None)
        try:
            self._close(uncaught, at_exit=True)
        finally:
            if self._watch.failure is not None and self._may_hang_at_exit():
                _bound_interpreter_exit()  # registered too late to be called

    def _may_hang_at_exit(self) -> bool:
        """After a failure: work on a device may wait for another rank for ever."""
        return self._groups is not None and self.world_size > 1 and self.device.type == "cuda"

    def _abort_waits(self) -> None:
        """End what would wait for a failed rank: kernels, then communicators."""
        if self._abort is not None:
            self._abort.numpy()[0] = 1  # no torch call: CUDA may be what is blocked
        if self._groups is not None:
            abort_communicators(self._groups)

    def _check_open(self) -> None:
        self._watch.check()
        if self._has_ended:
            raise ConfigError(
                "the context is closed; build and call layers before ctx.close() or the end of "
                "`with ctx:`"
            )

    def _agree(self, num_tokens: int, call: int) -> RowCounts:
        return agree_row_counts(
            num_tokens, self.parallel, call=call, world_rank=self.rank, group=self.step_group
        )

    def _given(self, num_tokens: int, counts: tuple[int, ...]) -> RowCounts:
        refuse_negative_rows(num_tokens)
        own = tp_slice(num_tokens, self.parallel.tp_size, self.tp_rank)
        own_rows = own.stop - own.start
        if len(counts) != self.parallel.ep_size or counts[self.ep_rank] != own_rows:
            raise ConfigError(
                f"counts {list(counts)} must hold one number for each of ep_size "
                f"({self.parallel.ep_size}) ranks, and {own_rows} for EP rank {self.ep_rank}"
            )
        return RowCounts(num_tokens, counts, any_rows=any(counts))


def init_distributed(
    parallel: ParallelConfig,
    *,
    rendezvous: Rendezvous | None = None,
    limits: FailureLimits | None = None,
    start_timeout_s: float = 120.0,
) -> EPContext:
    """Join the other ranks; a collective of the world.

    Uses torch's default group if there is one, else makes it, from `rendezvous` or the launcher's
    variables. limits: how fast a failed rank is noticed. start_timeout_s: how long ranks may start
    after each other. Raises ConfigError, before any group is made, where the world's size is not
    dp_size * tp_size, variables contradict, or ranks disagree about `parallel`.
    """
    if dist.is_initialized():
        found = rendezvous_of_default_group()
        _refuse_world_size(parallel, found.world_size, "torch's default process group")
    elif rendezvous is not None:
        found = rendezvous
        _refuse_world_size(parallel, found.world_size, "the rendezvous")
    else:
        environment = read_launcher_environment(os.environ)
        source = "no launcher's variables are set, so the world"
        if environment.launcher != "none":
            source = f"{environment.launcher}'s world"
        if environment.world_size is not None:
            _refuse_world_size(parallel, environment.world_size, source)
        found = rendezvous_from(environment, start_timeout_s)
        _refuse_world_size(parallel, found.world_size, source)
    return EPContext(
        parallel,
        found,
        limits=limits or FailureLimits(),
        start_timeout_s=start_timeout_s,
    )


def _refuse_world_size(parallel: ParallelConfig, world_size: int, source: str) -> None:
    if world_size != parallel.world_size:
        raise ConfigError(
            f"parallel.dp_size ({parallel.dp_size}) * parallel.tp_size ({parallel.tp_size}) is "
            f"{parallel.world_size} ranks, but {source} has {world_size}; start "
            f"{parallel.world_size} ranks (torchrun --nproc-per-node, mpirun -n) or change dp_size"
        )


def _bound_interpreter_exit() -> None:
    """End the process even if a device never becomes idle."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(5)


@dataclass
class _DefaultGroup:
    """torch's default group: how many open contexts use it, and whether one of them made it."""

    num_contexts: int = 0
    was_made_here: bool = False


_default_group = _DefaultGroup()


def _use_default_group(make: Callable[[], None]) -> None:
    if not dist.is_initialized():
        make()
        _default_group.num_contexts, _default_group.was_made_here = 0, True
    _default_group.num_contexts += 1


def _release_default_group() -> None:
    """The last context that uses it ends the default group, unless the caller made it.

    A context that has failed is never released: its groups may not be destroyed.
    """
    _default_group.num_contexts -= 1
    if _default_group.was_made_here and _default_group.num_contexts == 0:
        _default_group.was_made_here = False
        dist.destroy_process_group()
