"""Overlap on and off are bit-equal on a GPU, for every certified kernel, eager and captured."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.all2all import registry as backends
from ep_runtime.all2all.deepep_low_latency import DeepEPLowLatencyBackend
from ep_runtime.all2all.local import LocalBackend
from ep_runtime.audit_gpu import (
    Gpu,
    GpuSite,
    gpu_layer,
    gpu_machine,
    plan_gpu_case,
    random_rows,
)
from ep_runtime.audit_streams import AuditCase
from ep_runtime.config import MoEConfig
from ep_runtime.kernels import registry as experts
from ep_runtime.kernels.base import Concurrency
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.ownership import Schedule

MOE = MoEConfig(
    hidden_size=1024,
    moe_intermediate_size=512,
    num_experts=8,
    top_k=4,
    num_shared_experts=1,
    shared_expert_gate=True,
    dtype="bfloat16",
)
ITERATIONS = 1000
ROWS = (1, 7, 64)
# Batched rows without communication, so that the runner's aux stream runs beside the kernel.
BATCHED = "batched_on_one_rank"
# Kernel, backend; a kernel that waits for the host cannot be captured.
CASES = {
    ("reference", "local"): False,
    ("triton", "local"): True,
    ("triton", "symm_mem"): True,
    ("triton_batched", BATCHED): True,
}


@contextmanager
def batched_backend() -> Iterator[None]:
    capabilities = replace(
        DeepEPLowLatencyBackend.capabilities,
        name=BATCHED,
        supports_async=False,
        needs_package=None,
        communication=LocalBackend.capabilities.communication,
    )
    cls = type(BATCHED, (DeepEPLowLatencyBackend,), {"capabilities": capabilities})
    backends.register_backend(BATCHED, cls)
    try:
        yield
    finally:
        backends._registered.pop(BATCHED)


def certified(name: str) -> bool:
    rules = experts.experts_class(name).capabilities.concurrency
    return all(rule.concurrency is Concurrency.CERTIFIED for rule in rules)


def test_every_certified_kernel_is_among_the_cases() -> None:
    wanted = {name for name in experts._BUILT_IN if certified(name)}
    assert {kernel for kernel, _ in CASES} == wanted


def bits(output: Tensor) -> Tensor:
    return output.view(torch.int16)


class Calls:
    """A layer's calls on rows of each count, eager or replayed."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        self.layer = layer
        self.given = [random_rows(MOE, device, count, count) for count in ROWS]

    def eager(self, index: int) -> Tensor:
        output: Tensor = self.layer(self.given[index])
        return output

    def captured(self) -> Any:
        """index -> the output of a replay, on the rows that were captured."""
        graphs = []
        side = torch.cuda.Stream()
        for rows in self.given:
            with self.layer.ctx.step(len(rows), counts=(len(rows),)):
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    self.layer(rows)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    output = self.layer(rows)
            graphs.append((graph, output))

        def replay(index: int) -> Tensor:
            graph, output = graphs[index]
            output.fill_(float("nan"))
            graph.replay()
            return output  # type: ignore[no-any-return]

        return replay


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "backend"), CASES)
def test_overlap_on_and_off_are_bit_equal_a_thousand_times(kernel: str, backend: str) -> None:
    gpu = Gpu(torch.device("cuda", torch.cuda.current_device()))
    weights = SeededWeights(MOE, seed=0, device=gpu.device)
    wanted: list[Tensor] = []
    with batched_backend(), torch.no_grad():
        for overlap in ("off", "auto"):
            plan = plan_gpu_case(MOE, AuditCase(backend, kernel, overlap), gpu_machine())
            schedule = plan.regime(max(ROWS)).schedule
            assert schedule.overlaps == (overlap == "auto")
            if overlap == "auto":
                window = Schedule.COMBINE_WINDOW
                assert schedule is (window if backend == "symm_mem" else Schedule.AUX_STREAM)
            with gpu_layer(plan, weights.fill, GpuSite(gpu)) as layer:
                calls = Calls(layer, gpu.device)
                wanted = wanted or [calls.eager(i) for i in range(len(ROWS))]
                ways = [calls.eager]
                ways += [calls.captured()] if CASES[kernel, backend] else []
                for way in ways:
                    num_wrong = torch.zeros((), dtype=torch.int64, device=gpu.device)
                    for number in range(ITERATIONS):
                        index = number % len(ROWS)
                        if number % 3 == 0:
                            gpu.spin(number % 50)
                        num_wrong += (bits(way(index)) != bits(wanted[index])).any()
                    assert num_wrong.item() == 0, (overlap, way)
