"""How `ep-runtime tune` times, by replays of CUDA graphs in turns, and the roofline it draws."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, TypeVar

import torch

from ep_runtime.kernels.read_probe import read_output, read_words
from ep_runtime.launch.bench_statistics import rotated, summarise

Call = Callable[[], object]
NameT = TypeVar("NameT", bound=Hashable)
MAX_REPLAYS = 20
# Keeps the device busy until the first replay is queued, so that no time includes the host's.
_HEAD_START_CYCLES = 200_000
_READ_BYTES = 1 << 30
_PRODUCT_SIZE = 8192


class Timer(Protocol):
    """What a search asks for times."""

    def time(self, calls: Mapping[NameT, Sequence[Call]], *, num_rounds: int) -> dict[NameT, float]:
        """Median microseconds of one call by name. In each round every name has one turn."""


class GraphTimer:
    """Captures each name's calls back to back into one CUDA graph and replays them in turns.

    turn_seconds: about how long one turn is.
    """

    def __init__(self, turn_seconds: float = 0.002) -> None:
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
    """What the device reaches in this run: bytes that a kernel only reads, and products.

    Neither is a hard limit. products: of what, as `bfloat16`.
    """

    bytes_per_second: float
    flops_per_second: float
    products: str

    def least_us(self, num_bytes: float, num_flops: float) -> float:
        """The larger of the two times. Example: 4 GB at 4 TB/s, no products: 1000."""
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second) * 1e6

    def __str__(self) -> str:
        return (
            f"reads {self.bytes_per_second / 1e12:.2f} TB/s, products of {self.products} "
            f"{self.flops_per_second / 1e12:.0f} TFLOP/s"
        )


def measure_ceilings(
    timer: Timer, device: torch.device, dtype: torch.dtype, *, is_fp8: bool
) -> Ceilings:
    """Of reading 1 GiB (weights are read and not written, so no copy is the measure of them), and
    of products of random 8192 x 8192 matrices by torch.

    is_fp8: e4m3 products are taken to be twice as fast as those of the dtype.
    """
    words = torch.randint(256, (_READ_BYTES // 2,), dtype=torch.int16, device=device)
    out = read_output(device)
    a, b = torch.randn(2, _PRODUCT_SIZE, _PRODUCT_SIZE, device=device).to(dtype)
    product = torch.empty_like(a)
    us = timer.time(
        {
            "read": [lambda: read_words(words, out=out)] * 2,
            "product": [lambda: torch.mm(a, b.T, out=product)] * 2,
        },
        num_rounds=5,
    )
    flops = 2.0 * _PRODUCT_SIZE**3 * (2 if is_fp8 else 1)
    products = str(dtype).removeprefix("torch.")
    return Ceilings(
        1e6 * _READ_BYTES / us["read"],
        1e6 * flops / us["product"],
        f"e4m3, twice those of {products}," if is_fp8 else products,
    )
