"""What a call of the hybrid experts launches, compiled for sm_90 without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.test_compile_gate import MAX_SHARED_BYTES


def test_every_launch_compiles_for_sm_90() -> None:
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hybrid_gate"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    kernels = {entry["kernel"] for entry in report}
    assert {
        "_hybrid_experts_kernel",
        "_split_ids_kernel",
        "project_gate_up_packed_kernel",
        "project_down_packed_kernel",
    } <= kernels
    assert all(entry["waits_first"] for entry in report)
    assert all(entry["releases_behind_a_barrier"] for entry in report)
    grids = [entry for entry in report if entry["kernel"] == "_hybrid_experts_kernel"]
    # A grid barrier, a flag for each projection's shared sums, and the leaving.
    assert [entry["num_releases"] for entry in grids] == [4] * len(grids)
    assert all(entry["shared_bytes"] <= MAX_SHARED_BYTES for entry in report)
