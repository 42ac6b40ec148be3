"""Starting the ranks of one machine through torchrun's API, and telling how they ended.

Each rank is `python -m ep_runtime.launch ...` with torchrun's variables set; the store they meet
at lives in the starting process, on a free port, so it outlives any rank.
"""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    SignalException,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ep_runtime.kernels.errors import RankFailure

# Tells a rank that this starter, and not the user's torchrun, speaks for it when it fails.
STARTED_VARIABLE = "EP_RUNTIME_STARTED"
_OF_ANOTHER_RANK = RankFailure.__name__
_STOP_GRACE_S = 3


class Interrupted(Exception):
    """The user or the system ended the run; `exit_status` is 128 plus the signal's number."""

    def __init__(self, signal_number: int) -> None:
        self.exit_status = 128 + signal_number
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}; all ranks ended")


def start_ranks(arguments: Sequence[str], *, world_size: int) -> None:
    """Run `python -m ep_runtime.launch ARGUMENTS` as `world_size` ranks and wait for all.

    The ranks get this process's environment.
    Raises RankFailure, one line, once a rank failed and all have ended; Interrupted after a
    signal.
    """
    os.environ[STARTED_VARIABLE] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    _silence_torchelastic()
    with tempfile.TemporaryDirectory(prefix="ep_runtime_") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        )
        command = [*_interpreter_flags(), "-m", "ep_runtime.launch", *arguments]
        try:
            with _stopping_within(_STOP_GRACE_S):
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            raise RankFailure(describe_failures(error.failures)) from None
        except SignalException as error:
            raise Interrupted(error.sigval) from None
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT) from None
        except RendezvousError as error:
            raise RankFailure(f"the ranks could not be started: {error}") from None


@contextmanager
def _stopping_within(seconds: int) -> Iterator[None]:
    """Ranks that do not take SIGTERM, as a suspended one, are killed after so long, not after the
    30 s that torchelastic gives them and has no setting for."""
    close = PContext.close

    def close_within(
        context: PContext, death_sig: signal.Signals | None = None, timeout: int = seconds
    ) -> None:
        close(context, death_sig, min(timeout, seconds))

    PContext.close = close_within  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]


def describe_failures(failures: Mapping[int, ProcessFailure]) -> str:
    """One line for the failure that came first: the rank, and its signal or its exception.

    A killed rank comes before one that raised, and one that raised for itself before those that
    report another rank. Of a rank that has said why, how it ended does not count: a signal bounds
    its exit (`EPContext`).
    """
    reported = [_time(failure) for failure in failures.values() if _text(failure)]
    # What the others get once one has failed, and after a while those that do not take it.
    first_report = min(reported, default=math.inf)

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        _, failure = item
        if failure.exitcode < 0 and not _text(failure):
            is_late = failure.timestamp > first_report + _STOP_GRACE_S - 1
            is_stopped = failure.exitcode == -signal.SIGTERM or (
                failure.exitcode == -signal.SIGKILL and is_late
            )
            return (3 if is_stopped else 0, failure.timestamp)
        return (2 if _text(failure).startswith(_OF_ANOTHER_RANK) else 1, _time(failure))

    rank, failure = min(failures.items(), key=order)
    if failure.exitcode < 0 and not _text(failure):
        return f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    if _text(failure).startswith(_OF_ANOTHER_RANK):
        return _text(failure).removeprefix(f"{_OF_ANOTHER_RANK}: ")
    what = _text(failure) or f"ended with exit status {failure.exitcode}"
    return f"rank {rank} failed: {what}"


def record_failure(error: BaseException) -> None:
    """Leave `error` where the starter (or torchrun) reads it; nothing where there is neither."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now = time.time()
        facts = {"timestamp": int(now), "time": now, "py_callstack": traceback.format_exc()}
        text = f"{type(error).__name__}: {error}"
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": facts}}))


def _time(failure: ProcessFailure) -> float:
    message: Any = failure.message
    is_ours = isinstance(message, dict) and "time" in message["extraInfo"]
    return float(message["extraInfo"]["time"] if is_ours else failure.timestamp)


def _text(failure: ProcessFailure) -> str:
    """`Type: message` as `record_failure` left it, or empty where the rank left nothing."""
    message: Any = failure.message
    return str(message["message"]) if isinstance(message, dict) else ""


def _interpreter_flags() -> list[str]:
    """This interpreter's own flags (-O, -W, ...), so that ranks run as their starter does."""
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined, no-any-return]


def _silence_torchelastic() -> None:
    """Its warnings would repeat what is said here in one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
