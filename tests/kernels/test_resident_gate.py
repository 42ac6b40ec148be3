"""The compiled resident kernel: order around its barriers, memory, registers; without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.resident_gate import GateEntry, count_accesses, gate_cases
from tests.kernels.test_compile_gate import MAX_SHARED_BYTES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled() -> list[GateEntry]:
    """All launches, compiled for sm_90 in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.resident_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    entries = [GateEntry(**entry) for entry in json.loads(done.stdout)]
    assert len(entries) == len(list(gate_cases()))
    return entries


def test_a_block_wide_barrier_stands_before_each_release_and_behind_each_acquire(
    compiled: list[GateEntry],
) -> None:
    """A release each at the grid barriers and flags and on leaving; acquires beside their polls."""
    for entry in compiled:
        assert entry.releases >= 4, entry
        assert entry.acquires >= 2 * 3, entry
        assert (entry.unguarded_releases, entry.unguarded_acquires) == (0, 0), entry


def test_programs_fit_a_multiprocessor_and_spill_nothing(compiled: list[GateEntry]) -> None:
    for entry in compiled:
        assert entry.shared_bytes <= MAX_SHARED_BYTES, entry
        assert entry.spilled_bytes == 0, entry


def test_every_launch_is_cooperative(compiled: list[GateEntry]) -> None:
    for entry in compiled:
        assert entry.is_cooperative


@pytest.mark.parametrize(
    ("ptx", "releases", "acquires"),
    [
        ("st.global.b32 [a], r; bar.sync 0; atom.global.gpu.release.add.u64 d, [f], 1;", 0, 0),
        ("bar.sync 0; st.global.b32 [a], r; atom.global.gpu.release.add.u64 d, [f], 1;", 1, 0),
        ("st.global.b32 [a], r; atom.global.gpu.acq_rel.add.u64 d, [f], 1; bar.sync 0;", 1, 0),
        ("atom.global.gpu.acquire.add.u64 d, [f], 0; bar.sync 0; ld.global.b32 r, [a];", 0, 0),
        ("atom.global.gpu.acquire.add.u64 d, [f], 0; cp.async.cg.shared [s], [a];", 0, 1),
    ],
)
def test_the_reader_of_machine_code_sees_what_is_unguarded(
    ptx: str, releases: int, acquires: int
) -> None:
    counts = count_accesses(ptx)
    assert counts["unguarded_releases"] == releases
    assert counts["unguarded_acquires"] == acquires
