"""The GEMMs for Hopper beside another process on the same GPU."""

import os
import subprocess
import sys

import pytest

from tests.kernels.time_sliced import CASES, REPLAYS_AT_A_TIME, ROOT

SECONDS = 6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CASES)
def test_results_are_the_same_when_another_process_has_the_gpu_in_turn(kind: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.time_sliced", kind, str(SECONDS)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= REPLAYS_AT_A_TIME
