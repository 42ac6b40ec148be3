"""The compiled order of stores, barriers, releases and acquires, which no interpreter shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ep_runtime.kernels.quant.scheme import RowScheme
from tests.kernels.symm_gate import GateEntry, read_ptx

ROOT = Path(__file__).parents[2]
PUTS = ("_put_tokens_kernel", "_put_results_kernel")


@pytest.fixture(scope="module")
def compiled() -> list[GateEntry]:
    """All launches of the backend, compiled for sm_90 in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.symm_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [GateEntry(**entry) for entry in json.loads(done.stdout)]


def test_a_barrier_stands_between_the_last_store_and_each_release(
    compiled: list[GateEntry],
) -> None:
    for entry in compiled:
        assert entry.releases == (1 if entry.kernel in PUTS else 0), entry
        assert entry.unguarded_releases == 0, entry


def test_a_barrier_stands_between_each_acquire_and_the_first_load_behind_it(
    compiled: list[GateEntry],
) -> None:
    waiting = [entry for entry in compiled if entry.acquires]
    assert {entry.kernel for entry in waiting} == {"_wait_kernel", "_sum_results_kernel"}
    for entry in compiled:
        assert entry.unguarded_acquires == 0, entry


def test_there_is_no_atomic_but_system_wide_releases_and_acquires(
    compiled: list[GateEntry],
) -> None:
    assert not [entry for entry in compiled if entry.other_atomics]


def test_the_abort_word_is_read_by_one_volatile_load_that_most_polls_skip(
    compiled: list[GateEntry],
) -> None:
    for entry in compiled:
        waits = entry.acquires > 0
        assert (entry.looks, entry.other_looks) == (int(waits), 0), entry


def test_rows_of_a_multiple_of_16_bytes_are_stored_16_bytes_at_a_time(
    compiled: list[GateEntry],
) -> None:
    def widths(rows: RowScheme) -> list[int]:
        return [
            entry.widest_store_bytes
            for entry in compiled
            if entry.kernel != "_wait_kernel" and entry.rows == rows
        ]

    as_is, in_fp8 = widths(RowScheme.MODEL), widths(RowScheme.FP8_GROUP)
    assert (len(as_is), len(in_fp8)) == (3 * 4, 4)
    assert set(as_is[:8]) == set(in_fp8[:3]) == {16}
    assert max(*as_is[8:], *in_fp8[3:]) <= 8, "the last cases have rows that are not aligned"


def test_every_kernel_is_compiled_and_needs_next_to_no_shared_memory(
    compiled: list[GateEntry],
) -> None:
    files = ("symm_put_tokens.py", "symm_put_results.py", "symm_wait.py")
    lines = [line for file in files for line in (ROOT / "kernels" / file).open()]
    defined = {line[4 : line.index("(")] for line in lines if re.match(r"def _\w+_kernel\(", line)}
    assert {entry.kernel for entry in compiled} == defined
    assert max(entry.shared_bytes for entry in compiled) <= 1024


@pytest.mark.parametrize(
    ("ptx", "unguarded"),
    [
        ("st.global.b32 [a], r; bar.sync 0; atom.global.sys.release.add.u64 d, [f], 1;", 0),
        ("bar.sync 0; st.global.b32 [a], r; atom.global.sys.release.add.u64 d, [f], 1;", 1),
        ("st.global.b32 [a], r; red.global.sys.release.add.u64 [f], 1;", 1),
    ],
)
def test_the_reader_of_machine_code_sees_an_unguarded_release(ptx: str, unguarded: int) -> None:
    class Compiled:
        asm = {"ptx": ptx}  # noqa: RUF012
        metadata = type("Metadata", (), {"shared": 0})
        src = type("Source", (), {"signature": {}})

    assert read_ptx("k", "d", "model", Compiled).unguarded_releases == unguarded
