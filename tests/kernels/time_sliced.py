"""Calls of the `triton` experts while another process has the GPU in turn with this one.

    python -m tests.kernels.time_sliced KIND SECONDS     without TRITON_INTERPRET, on a GPU

Replays a graph of calls and compares each output with the first, bit by bit. When a GPU turns from
one process to another it stores all of a multiprocessor's state, and loads it later: there, shared
memory that is a barrier and something else gives itself away.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase
from tests.kernels.fp8_cases import Fp8Case
from tests.kernels.packed_cases import PackedCase, int4

DEVICE = torch.device("cuda")
ROOT = Path(__file__).parents[2]
REPLAYS_AT_A_TIME = 50
NUM_OTHERS = 2
# Few rows for the packed GEMM; for bf16 and fp8 so many that the GEMMs for Hopper multiply them.
FEW, MANY = 2, 512
CASES: dict[str, PackedCase | ExpertsCase] = {
    "int4": PackedCase(
        "int4", ExpertsCase("few", FEW, 8, 2048, 4096, 2, dtype=torch.bfloat16), int4()
    ),
    "bf16": ExpertsCase("many", MANY, 8, 2048, 2048, 2, dtype=torch.bfloat16),
    "fp8": Fp8Case("many", MANY, 8, 2048, 2048, 2),
}


def be_another() -> None:
    """Products without end, so that the GPU has something else to turn to."""
    a = torch.ones(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
    while True:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()


@contextmanager
def others() -> Iterator[None]:
    command = [sys.executable, "-m", "tests.kernels.time_sliced", "another"]
    running = [subprocess.Popen(command, cwd=ROOT) for _ in range(NUM_OTHERS)]
    try:
        yield
        assert all(process.poll() is None for process in running)
    finally:
        for process in running:
            process.kill()
            process.wait()


def run(kind: str, seconds: float) -> int:
    """How many replays there were in that time, all alike."""
    case = CASES[kind]
    given = case.case if isinstance(case, PackedCase) else case
    kernel = TritonExperts(case.shape)
    weights = kernel.prepare_weights(case.weights(DEVICE))
    rows = given.expert_input(DEVICE)
    workspace = Workspace(DEVICE, kernel.workspace_bytes(given.num_rows))
    first = kernel.run(rows, weights, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [kernel.run(rows, weights, workspace) for _ in range(4)]
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(REPLAYS_AT_A_TIME):
            graph.replay()
        torch.cuda.synchronize()
        count += REPLAYS_AT_A_TIME
        for output in outputs:
            assert torch.equal(output.view(torch.int16), first.view(torch.int16)), count
    return count


def main() -> None:
    if sys.argv[1] == "another":
        be_another()
    with others():
        print(run(sys.argv[1], float(sys.argv[2])))


if __name__ == "__main__":
    main()
