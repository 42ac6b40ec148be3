"""Ranks that are programs: each ends as an interpreter does, with its destructors and its status.

One process imports ep_runtime and forks them, as a launcher without an agent would start them:
rank 0 hosts the store. It kills whatever is left, so that no suspended rank stays behind.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ep_runtime.distributed  # noqa: F401  (so that every rank has it when it is forked)

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ProgramEnd:
    """How one rank ended.

    status: its exit status (negative: by that signal); None: it was suspended, or still running
    at the timeout. seconds: since the ranks were started, until then.
    """

    status: int | None
    seconds: float
    stderr: str


def run_programs(script: str, world_size: int = 2, *, timeout: float = 60) -> list[ProgramEnd]:
    """Run a script's text as each of the ranks; how they ended, in rank order."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        program = subprocess.Popen(
            [sys.executable, "-m", __name__, folder, str(world_size), str(timeout)],
            env=os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            program.communicate(script, timeout=timeout + 60)  # it has to import too
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        ends = json.loads(Path(folder, "ends").read_text())
        errors = [Path(folder, f"stderr{rank}").read_text() for rank in range(world_size)]
    return [
        ProgramEnd(status, seconds, error)
        for (status, seconds), error in zip(ends, errors, strict=True)
    ]


def _fork_ranks(folder: str, world_size: int, timeout: float) -> None:
    script = compile(sys.stdin.read(), "script", "exec")
    started_at = time.monotonic()
    processes: list[int] = []
    for rank in range(world_size):
        process = os.fork()
        if process == 0:
            for name, value in ("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size):
                os.environ[name] = str(value)
            os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT), 2)
            exec(script, {"__name__": "__main__"})
            return  # to the end of the interpreter
        processes.append(process)
    ends: dict[int, tuple[int | None, float]] = {}
    try:
        while len(ends) < world_size and (late := time.monotonic() - started_at) < timeout:
            process, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if process:
                is_suspended = os.WIFSTOPPED(status)
                code = None if is_suspended else os.waitstatus_to_exitcode(status)
                ends[processes.index(process)] = code, late
            time.sleep(0.01)
    finally:
        for rank, process in enumerate(processes):
            if ends.get(rank, (None,))[0] is None:
                os.kill(process, signal.SIGKILL)
    in_order = [ends.get(rank, (None, timeout)) for rank in range(world_size)]
    Path(folder, "ends").write_text(json.dumps(in_order))


if __name__ == "__main__":
    _fork_ranks(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
