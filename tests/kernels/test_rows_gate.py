"""What aligning, permuting and quantising rows compile to for sm_90, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.rows_gate import GateEntry

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def compiled() -> list[GateEntry]:
    """All launches of the three files, compiled in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.rows_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [GateEntry(**entry) for entry in json.loads(done.stdout)]


def test_every_kernel_is_compiled(compiled: list[GateEntry]) -> None:
    files = (
        "align_batched.py",
        "align_blocks.py",
        "align_chunks.py",
        "permute.py",
        "quant/fp8_rows.py",
    )
    lines = [line for file in files for line in (ROOT / "kernels" / file).open()]
    defined = {
        line[4 : line.index("(")]
        for line in lines
        if line.startswith("def _") and "_kernel(" in line
    }
    assert {entry.kernel for entry in compiled} == defined


def test_kernels_take_little_of_a_multiprocessor(compiled: list[GateEntry]) -> None:
    for entry in compiled:
        assert entry.shared_bytes <= 16 * 1024, entry
        assert entry.stack_bytes <= 64, entry


def test_wide_rows_move_16_bytes_at_a_time_from_1024_threads(compiled: list[GateEntry]) -> None:
    wide = [entry for entry in compiled if entry.case.endswith("7168")]
    assert len(wide) == 4 + 2
    for entry in wide:
        assert entry.stack_bytes == 0, entry
        assert entry.registers <= 64, entry
        assert entry.widest_load_bytes == 16, entry
        # Of few rows a thread quantises 8 values, which are 8 bytes.
        assert entry.widest_store_bytes == (8 if " 1 x " in entry.case else 16), entry


def test_ids_of_a_full_block_are_read_16_bytes_at_a_time(compiled: list[GateEntry]) -> None:
    counting, placing = (entry for entry in compiled if entry.case == "align (65536, 256, 128)")
    assert counting.kernel == "_count_chunks_kernel"
    assert counting.widest_load_bytes == placing.widest_load_bytes == 16
