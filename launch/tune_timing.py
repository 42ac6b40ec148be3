"""How `ep-runtime tune` times: replays of CUDA graphs, candidates taking turns."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch

from ep_runtime.launch.bench_statistics import rotated, summarise

Call = Callable[[], object]
NameT = TypeVar("NameT", bound=Hashable)
MAX_REPLAYS = 20
# Keeps the device busy until the first replay is queued, so that no time includes the host's.
_HEAD_START_CYCLES = 200_000
_COPY_BYTES = 1 << 30
_PRODUCT_SIZE = 8192


class Timer(Protocol):
    """What a search asks for times."""

    def time(self, calls: Mapping[NameT, Sequence[Call]], *, num_rounds: int) -> dict[NameT, float]:
        """Median microseconds of one call by name. In each round every name has one turn."""


class GraphTimer:
    """Captures each name's calls back to back into one CUDA graph and replays them in turns.

    turn_seconds: about how long one turn is.
    """

    def __init__(self, turn_seconds: float = 0.004) -> None:
        self._turn_seconds = turn_seconds

    def time(self, calls: Mapping[NameT, Sequence[Call]], *, num_rounds: int) -> dict[NameT, float]:
        graphs = {name: _capture(some) for name, some in calls.items()}
        counts = {}
        for name, graph in graphs.items():
            _replay(graph, 1)  # uploads it
            one = _replay(graph, 1)[0]
            counts[name] = int(min(MAX_REPLAYS, max(1, self._turn_seconds / max(one, 1e-7))))
        seconds: dict[NameT, list[float]] = {name: [] for name in calls}
        for number in range(num_rounds):
            for name in rotated(list(calls), number):
                seconds[name] += _replay(graphs[name], counts[name])
        return {name: summarise(times).median / len(calls[name]) for name, times in seconds.items()}


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph, num_replays: int) -> list[float]:
    """Seconds of each replay. Waits for the device."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
    torch.cuda._sleep(_HEAD_START_CYCLES)
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches in this run: bytes of a copy, read and written, and products."""

    bytes_per_second: float
    flops_per_second: float

    def least_us(self, num_bytes: float, num_flops: float) -> float:
        """The larger of the two times. Example: 4 GB at 4 TB/s, no products: 1000."""
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second) * 1e6


def measure_ceilings(
    timer: Timer, device: torch.device, dtype: torch.dtype, *, is_fp8: bool
) -> Ceilings:
    """Of a copy of 1 GiB, and of products of random 8192 x 8192 matrices by torch.

    is_fp8: e4m3 products are taken to be twice as fast as those of bfloat16.
    """
    source = torch.randint(256, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, _PRODUCT_SIZE, _PRODUCT_SIZE, device=device).to(dtype)
    product = torch.empty_like(a)
    us = timer.time(
        {
            "copy": [lambda: target.copy_(source)] * 2,
            "product": [lambda: torch.mm(a, b.T, out=product)] * 2,
        },
        num_rounds=5,
    )
    flops = 2.0 * _PRODUCT_SIZE**3 * (2 if is_fp8 else 1)
    return Ceilings(2e6 * _COPY_BYTES / us["copy"], 1e6 * flops / us["product"])
