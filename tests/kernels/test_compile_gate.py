"""Every kernel of the triton experts compiles for sm_90, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What one program may use of a multiprocessor's shared memory on sm_90.
MAX_SHARED_BYTES = 227 * 1024


def jit_functions() -> set[str]:
    """Names of all kernels that the triton experts are made of, read from the sources."""
    files = (
        "align_batched.py",
        "align_blocks.py",
        "align_chunks.py",
        "grouped_gemm.py",
        "packed_kernels.py",
        "quant/fp8_rows.py",
        "sum_slots.py",
    )
    lines = [line for file in files for line in (ROOT / "kernels" / file).open()]
    return {
        line[4 : line.index("(")]
        for line in lines
        if line.startswith("def ") and "_kernel(" in line
    }


def test_every_kernel_compiles_for_sm_90_and_fits_its_shared_memory() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {entry["kernel"] for entry in report} == jit_functions()
    gemms = {
        (entry["kernel"], entry["weights"]) for entry in report if "project" in entry["kernel"]
    }
    assert len(gemms) == 2 * (5 + 4), (
        "both projections of three dtypes, of fp8 by block and by channel, and of every packed one"
    )
    in_parts = {(entry["kernel"], entry["parts"]) for entry in report if entry["parts"] > 1}
    assert in_parts == {("project_down_packed_kernel", 4), ("_sum_slots_kernel", 4)}
    early = [entry for entry in report if not entry["waits_first"]]
    assert not early, "touch memory before the launch in front of them has ended"
    too_large = [entry for entry in report if entry["shared_bytes"] > MAX_SHARED_BYTES]
    assert not too_large
