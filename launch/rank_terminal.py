"""Where a rank of a run writes: rank 0 to the terminal, the others to a log each."""

import os
import sys
import traceback
from pathlib import Path

from ep_runtime.distributed import EPContext
from ep_runtime.kernels.errors import RankFailure


class Terminal:
    """The standard error this process was started with, kept while output goes to a log."""

    def __init__(self) -> None:
        self._stderr = os.dup(2)

    def redirect_to(self, path: Path) -> None:
        """Send what this process (and its libraries) writes to a file."""
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def say(self, message: str) -> None:
        os.write(self._stderr, f"ep-runtime: {message}\n".encode())


def tell(terminal: Terminal, error: Exception, rank: int, ctx: EPContext | None) -> None:
    """One line on the terminal, from one rank if possible.

    Before the ranks have met, each can only speak for itself: all find the same in the same
    configuration, so rank 0 does. Later the first failed rank speaks; for one that is gone, the
    lowest other.
    """
    if ctx is None:
        if rank == 0 or isinstance(error, RankFailure):
            terminal.say(str(error))
        return
    cause = _first_cause(error, rank, ctx)
    if cause.startswith(f"rank {rank} failed"):
        terminal.say(cause)
    elif " failed" not in cause.partition(":")[0]:
        speaker = 1 if cause.startswith("rank 0 ") else 0
        if rank == speaker:
            terminal.say(cause)


def _first_cause(error: Exception, rank: int, ctx: EPContext) -> str:
    """What all ranks agree on as the cause, else this rank's own error."""
    try:
        ctx.check()
    except RankFailure as failure:
        return str(failure)
    return f"rank {rank} failed: {type(error).__name__}: {error}"


def keep_traceback(output_dir: str, rank: int) -> None:
    """Rank 0's goes to a log of its own; the others' standard error is their log already."""
    text = traceback.format_exc()
    folder = Path(output_dir).expanduser()
    if rank == 0 and folder.is_dir():
        (folder / "rank0.log").write_text(text)
    elif rank != 0:
        sys.stderr.write(text)
