"""Ranks as processes, started in a few hundredths of a second each.

A fork server that has imported torch once forks every rank; rank functions are module-level and
take an `EPContext` (`run_ranks`) or a bare rank number (`run_processes`).
"""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import init_distributed
from ep_runtime.failure import FailureLimits
from ep_runtime.rendezvous import Rendezvous

# Imported by the fork server; none of them computes anything with torch.
_PRELOADED = [
    "tests.harness",
    "pytest",
    "ep_runtime.layer",
    "ep_runtime.all2all.all_to_all",
    "ep_runtime.all2all.symm_mem",
]
# transformers takes seconds to import: only where a collected test has it, and then once.
_PRELOADED_WHERE_USED = ["tests.ep_runtime.checkpoints"]
_ROOT = Path(__file__).parents[1]
_numbers = count()


@dataclass(frozen=True)
class Outcome:
    """How one rank ended.

    result: what its function returned. error: the exception it ended by; details: its traceback.
    exit_code: of a process that ended without a word (negative: by that signal); None: it was
    still running at the timeout. seconds: since the ranks were started.
    """

    rank: int
    result: Any = None
    error: BaseException | None = None
    details: str = ""
    exit_code: int | None = 0
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.error is None and self.exit_code == 0


class RankError(AssertionError):
    """A rank of a test failed; the message names it and carries its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    parallel: ParallelConfig,
    *args: Any,
    timeout: float = 60,
    limits: FailureLimits | None = None,
) -> list[Any]:
    """fn(ctx, *args) on every rank of `parallel`; the results in rank order.

    Raises RankError naming the rank that failed first, with its traceback.
    """
    return _results(rank_outcomes(fn, parallel, *args, timeout=timeout, limits=limits))


def rank_outcomes(
    fn: Callable[..., Any],
    parallel: ParallelConfig,
    *args: Any,
    timeout: float = 60,
    limits: FailureLimits | None = None,
) -> list[Outcome]:
    """As `run_ranks`, but gives how each rank ended instead of raising."""
    return process_outcomes(
        _with_context,
        parallel.world_size,
        fn,
        parallel,
        limits,
        *store_address(),
        args,
        timeout=timeout,
    )


def run_processes(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> Any:
    """fn(rank, *args) in `world_size` processes without a context; the results in rank order."""
    return _results(process_outcomes(fn, world_size, *args, timeout=timeout))


def process_outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60
) -> list[Outcome]:
    """As `run_processes`, but gives how each process ended instead of raising."""
    context = _fork_server()
    started_at = time.monotonic()
    processes: list[ForkServerProcess] = []
    connections: list[Connection] = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_process, args=(sender, fn, rank, args, timeout), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        connections.append(receiver)
    outcomes: dict[int, Outcome] = {}
    try:
        while len(outcomes) < world_size:
            open_ranks = [r for r in range(world_size) if r not in outcomes]
            left = started_at + timeout - time.monotonic()
            ready = wait([connections[r] for r in open_ranks], max(left, 0))
            if not ready:
                break
            seconds = time.monotonic() - started_at
            for rank in open_ranks:
                if connections[rank] in ready:
                    outcomes[rank] = _receive(rank, connections[rank], processes[rank], seconds)
    finally:
        for process, connection in zip(processes, connections, strict=True):
            if process.is_alive():
                process.join(1)  # it has sent its outcome and is about to end
            if process.is_alive():
                process.kill()
            process.join()
            connection.close()
    late = time.monotonic() - started_at
    return [outcomes.get(r) or Outcome(r, exit_code=None, seconds=late) for r in range(world_size)]


def require_gpus(num_ranks: int) -> None:
    """Skip the test where ranks would have to share a GPU."""
    found = torch.cuda.device_count()
    if found < num_ranks:
        pytest.skip(f"{num_ranks} ranks need a GPU each; there are {found}")


def store_address() -> tuple[int, str]:
    """The port of the store that this test process hosts, and a prefix used once."""
    return _store().port, f"test{next(_numbers)}"


def connect(port: int, prefix: str) -> PrefixStore:
    """A client of the test process's store."""
    return PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))


def _with_context(
    rank: int,
    fn: Callable[..., Any],
    parallel: ParallelConfig,
    limits: FailureLimits | None,
    port: int,
    prefix: str,
    args: tuple[Any, ...],
) -> Any:
    rendezvous = Rendezvous(connect(port, prefix), rank, parallel.world_size, local_rank=rank)
    with init_distributed(parallel, rendezvous=rendezvous, limits=limits) as ctx:
        return fn(ctx, *args)


def _run_process(
    sender: Connection, fn: Callable[..., Any], rank: int, args: tuple[Any, ...], timeout: float
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(timeout - 1, 1))  # says where a rank hangs
    try:
        message: tuple[Any, BaseException | None, str] = (fn(rank, *args), None, "")
    except BaseException as error:
        message = (None, _picklable(error), traceback.format_exc())
    faulthandler.cancel_dump_traceback_later()
    sender.send_bytes(pickle.dumps(message))
    sender.close()


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _receive(
    rank: int, connection: Connection, process: ForkServerProcess, seconds: float
) -> Outcome:
    try:
        result, error, details = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(5)
        return Outcome(rank, exit_code=process.exitcode, seconds=seconds)
    return Outcome(rank, result, error, details, seconds=seconds)


def _results(outcomes: list[Outcome]) -> list[Any]:
    failed = sorted((o for o in outcomes if not o.is_ok), key=lambda o: o.seconds)
    if not failed:
        return [outcome.result for outcome in outcomes]
    lines = []
    for outcome in failed:
        if outcome.error is not None:
            lines.append(f"rank {outcome.rank}: {outcome.details}")
        elif outcome.exit_code is None:
            lines.append(f"rank {outcome.rank} was still running after {outcome.seconds:.0f} s")
        else:
            lines.append(f"rank {outcome.rank} ended with status {outcome.exit_code}")
    raise RankError("\n".join(lines)) from failed[0].error


@cache
def _store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    used = [name for name in _PRELOADED_WHERE_USED if name in sys.modules]
    context.set_forkserver_preload(_PRELOADED + used)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    inherited = os.environ.get("PYTHONPATH")
    # The fork server imports by its own path, which is not this process's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), inherited]))
    from multiprocessing.forkserver import ensure_running

    ensure_running()
    if inherited is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = inherited
    return context
