"""The occupant of co-run stress: it compiles, and takes a multiprocessor's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_it_compiles_for_sm_90_and_leaves_little_shared_memory() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kernels.occupant_gate"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    # One program may have 227 KiB; two of half the threads would fit otherwise.
    assert 220 * 1024 < found["shared_bytes"] <= 227 * 1024
    assert found["num_warps"] == 32
    assert found["clock_reads"] == 2, "before, and again in every turn of the wait"
