"""Timing calls on one rank: eagerly between marks, or as replays of a CUDA graph.

A probe is run for a number of iterations and gives, for each of its parts, the seconds of one call
in each iteration. Calls take turns among the input sets. On CUDA the marks are events.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol

import torch

# Calls in a captured graph; even, and a multiple of the number of input sets.
CALLS_PER_GRAPH = 8

# Does one call with input set i; `mark` is called at the beginning, between parts, at the end.
Call = Callable[[int, Callable[[], None]], object]


class Clock(Protocol):
    """Marks moments of the current stream (on a CPU: of the caller)."""

    def mark(self, *, in_graph: bool = False) -> Any:
        """A moment, or in a graph that is being captured: that moment of each replay."""

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another that have both been passed."""

    def synchronize(self) -> None:
        """Wait until all that was issued has been done."""


class CpuClock:
    def mark(self, *, in_graph: bool = False) -> float:
        if in_graph:
            raise RuntimeError("there are no graphs on a CPU")
        return perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        return None


class CudaClock:
    def mark(self, *, in_graph: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=in_graph)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def make_clock(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()


class Probe(Protocol):
    def run(self, iterations: int) -> dict[str, list[float]]:
        """Seconds of one call per iteration, for each part; waits for the device."""


@dataclass(frozen=True)
class EagerProbe:
    """Issues each call anew. parts: each part's first and last mark of a call."""

    call: Call
    parts: Mapping[str, tuple[int, int]]
    clock: Clock

    def run(self, iterations: int) -> dict[str, list[float]]:
        """One more call comes first, untimed: in it the ranks wait for the last one to start."""
        marks = [self._marked_call(index) for index in range(-1, iterations)]
        self.clock.synchronize()
        return {
            part: [self.clock.seconds(m[start], m[end]) for m in marks[1:]]
            for part, (start, end) in self.parts.items()
        }

    def _marked_call(self, index: int) -> list[Any]:
        marks: list[Any] = []
        self.call(index, lambda: marks.append(self.clock.mark()))
        return marks


@dataclass
class GraphProbe:
    """Replays a graph of CALLS_PER_GRAPH calls; a call's time is the replay's, divided."""

    call: Call
    part: str
    clock: Clock
    _graph: torch.cuda.CUDAGraph | None = field(default=None, init=False)

    def run(self, iterations: int) -> dict[str, list[float]]:
        """One more replay comes first, untimed. The first run captures."""
        if self._graph is None:
            self._graph = _capture(lambda index: self.call(index, _no_mark))
        self._graph.replay()
        marks = [self.clock.mark()]
        for _ in range(iterations):
            self._graph.replay()
            marks.append(self.clock.mark())
        self.clock.synchronize()
        seconds = [
            self.clock.seconds(start, end) / CALLS_PER_GRAPH for start, end in pairwise(marks)
        ]
        return {self.part: seconds}


@dataclass
class MarkedGraphProbe:
    """As GraphProbe, with event nodes in the graph that tell a call's parts apart.

    A replay gives the mean of its calls without the first, in which ranks wait for each other.
    """

    call: Call
    parts: Mapping[str, tuple[int, int]]
    clock: Clock
    _graph: torch.cuda.CUDAGraph | None = field(default=None, init=False)
    _marks: list[list[Any]] = field(default_factory=list, init=False)

    def run(self, iterations: int) -> dict[str, list[float]]:
        """One more replay comes first, untimed. The first run captures."""
        if self._graph is None:
            self._graph = _capture(self._call_with_marks)
        self._graph.replay()
        seconds: dict[str, list[float]] = {part: [] for part in self.parts}
        for _ in range(iterations):
            self._graph.replay()
            self.clock.synchronize()
            for part, (start, end) in self.parts.items():
                calls = [self.clock.seconds(m[start], m[end]) for m in self._marks[1:]]
                seconds[part].append(sum(calls) / len(calls))
        return seconds

    def _call_with_marks(self, index: int) -> object:
        marks: list[Any] = []
        self._marks.append(marks)
        return self.call(index, lambda: marks.append(self.clock.mark(in_graph=True)))


def _capture(call: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    """A graph of CALLS_PER_GRAPH calls, which have all been made eagerly before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events in a thread of its own, which a global capture forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for index in range(CALLS_PER_GRAPH):
            call(index)
    return graph


def _no_mark() -> None:
    return None
