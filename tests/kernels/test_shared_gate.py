"""What the shared expert's products compile to for sm_90, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.shared_gate import SharedEntry

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = 232_448


@pytest.fixture(scope="module")
def compiled() -> list[SharedEntry]:
    """Compiled in a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.shared_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr

    def entry(values: dict[str, Any]) -> SharedEntry:
        return SharedEntry(**{**values, "products": tuple(values["products"])})

    return [entry(values) for values in json.loads(done.stdout)]


def test_every_kernel_is_compiled(compiled: list[SharedEntry]) -> None:
    lines = (ROOT / "kernels" / "dense_gemm.py").read_text().splitlines()
    defined = {line[4 : line.index("(")] for line in lines if line.startswith("def _")}
    kernels = {name for name in defined if name.endswith("_kernel")}
    assert {entry.kernel for entry in compiled} == {*kernels, "_quantize_rows_kernel"}


def test_nothing_is_spilled_and_a_program_fits_a_multiprocessor(
    compiled: list[SharedEntry],
) -> None:
    for entry in compiled:
        assert entry.stack_bytes == 0, entry
        assert entry.shared_bytes <= MAX_SHARED_BYTES, entry
        assert entry.waits_first, entry


def test_weights_go_from_shared_memory_into_the_matrix_units(compiled: list[SharedEntry]) -> None:
    """Through registers (mma.sync) they do not reach the memory's rate."""
    products = [entry for entry in compiled if entry.kernel == "_multiply_kernel"]
    for entry in products:
        kind = "e4m3.e4m3" if entry.case.endswith("fp8") else "f16"
        assert entry.products, entry
        assert all(kind in product for product in entry.products), entry
        assert entry.other_products == 0, entry
        assert entry.bulk_loads > 0, entry


def test_enough_is_in_flight_to_read_at_the_memorys_rate(compiled: list[SharedEntry]) -> None:
    """At least 110 KiB on each multiprocessor, of which all 132 have a program, or nearly so, or
    two of small ones: then their items are as many."""
    few = [entry for entry in compiled if entry.case.startswith("1 x 7168")]
    products = [entry for entry in few if entry.kernel == "_multiply_kernel"]
    assert len(products) == 4
    for entry in products:
        num_programs = MAX_SHARED_BYTES // entry.shared_bytes
        assert num_programs * entry.shared_bytes >= 110 * 1024, entry
