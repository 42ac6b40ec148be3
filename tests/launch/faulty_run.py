"""`ep-runtime` with a fault in one rank's first layer call, for tests of how failures end a run.

FAULT: `raise`, `kill` or `sleep`, on the rank FAULTY_RANK. The moment is left in FAULT_FILE.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from ep_runtime.launch import layer_job, starter
from ep_runtime.launch.cli import main


def commit_fault(*_: Any) -> None:
    Path(os.environ["FAULT_FILE"]).write_text(f"{time.time()} {os.getpid()}")
    fault = os.environ["FAULT"]
    if fault == "raise":
        raise ValueError("a tensor of the wrong kind")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def is_faulty_rank() -> bool:
    rank = os.environ.get("RANK", os.environ.get("PMI_RANK"))
    return rank == os.environ["FAULTY_RANK"]


if __name__ == "__main__":
    # The ranks that `run` starts are this program too.
    starter._interpreter_flags = lambda: [__file__, "--"]
    if is_faulty_rank():
        layer_job.LayerJob._call = commit_fault  # type: ignore[method-assign, assignment]
    sys.argv = [sys.argv[0], *sys.argv[1:]]
    if "--" in sys.argv:
        sys.argv = [sys.argv[0], *sys.argv[sys.argv.index("ep_runtime.launch") + 1 :]]
    main()
