"""How the experts benchmark times: replays of CUDA graphs, implementations taking turns."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ep_runtime.launch.bench_statistics import rotated

COPY_BYTES = 1 << 31
PRODUCT_SIZE = 8192
MOST_REPLAYS_PER_TURN = 20
# Keeps the device busy until the first replay is queued, so that no time includes the host's.
_HEAD_START_CYCLES = 200_000


class Replay(Protocol):
    """Some calls that are timed together."""

    def run(self, num_replays: int) -> list[float]:
        """Seconds of one call, from each replay."""


class GraphReplay:
    """Calls captured back to back into one CUDA graph. outputs: theirs, in order."""

    def __init__(self, calls: Sequence[Callable[[], Tensor]]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs = [call() for call in calls]

    def run(self, num_replays: int) -> list[float]:
        """Waits for the device."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_replays + 1)]
        torch.cuda._sleep(_HEAD_START_CYCLES)
        marks[0].record()
        for mark in marks[1:]:
            self._graph.replay()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 / len(self.outputs) for a, b in pairwise(marks)]


def time_in_turns(
    replays: Mapping[str, Replay], *, calls: int, num_rounds: int, turn_seconds: float
) -> dict[str, list[float]]:
    """Seconds of one call by name, from each replay of each round.

    In round r each has one turn of about turn_seconds, beginning with the r-th, so that a drift of
    clocks, temperature or power meets all of them. calls: in one replay.
    """
    times: dict[str, list[float]] = {name: [] for name in replays}
    counts = {}
    for name, replay in replays.items():
        replay.run(1)  # the first uploads the graph
        counts[name] = replays_per_turn(replay.run(1)[0] * calls, turn_seconds)
    for number in range(num_rounds):
        for name in rotated(list(replays), number):
            times[name] += replays[name].run(counts[name])
    return times


def replays_per_turn(replay_seconds: float, turn_seconds: float) -> int:
    """Example: 0.7 ms in a turn of 4 ms: 5; 9 ms: 1."""
    return int(min(MOST_REPLAYS_PER_TURN, max(1, turn_seconds / max(replay_seconds, 1e-7))))


def measure_ceilings(device: torch.device) -> dict[str, float | str]:
    """What the device reaches in this run: a copy, and products of random 8192 x 8192 matrices."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, PRODUCT_SIZE, PRODUCT_SIZE, device=device).bfloat16()
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def fp8_product() -> Tensor:
        return torch._scaled_mm(
            a8, b8.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    flops = 2 * PRODUCT_SIZE**3
    kinds: dict[str, tuple[Callable[[], Tensor], float]] = {
        "copy_bytes_per_second": (lambda: target.copy_(source), 2 * COPY_BYTES),
        "bf16_flops_per_second": (lambda: a @ b.T, flops),
        "fp8_flops_per_second": (fp8_product, flops),
    }
    replays: dict[str, Replay] = {
        name: GraphReplay([call] * 2) for name, (call, _) in kinds.items()
    }
    times = time_in_turns(replays, calls=2, num_rounds=10, turn_seconds=0.005)
    ceilings: dict[str, float | str] = {
        name: amount / float(torch.tensor(times[name]).median())
        for name, (_, amount) in kinds.items()
    }
    ceilings["products"] = f"{PRODUCT_SIZE}^3, random data; cuBLAS, fp8 with fast accumulation"
    return ceilings
