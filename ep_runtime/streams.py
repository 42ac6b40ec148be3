"""Streams and events behind one small interface, so that a test can record what runs where."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class Streams(Protocol):
    """The device's main stream (whatever is current) and its one aux stream."""

    def fork(self) -> None:
        """Order the aux stream behind all that the main stream has been given."""

    def on_aux(self) -> AbstractContextManager[object]:
        """Work issued inside goes to the aux stream."""

    def join(self) -> None:
        """Order the main stream behind all that the aux stream has been given."""

    def timer(self) -> Callable[[], Callable[[], float]]:
        """Start a clock on the current stream. Calling it stops the clock and returns a function
        that gives the seconds between, waiting for the device."""


class CpuStreams:
    """A CPU has one stream: everything runs where it is called."""

    def fork(self) -> None:
        return None

    def on_aux(self) -> AbstractContextManager[object]:
        return nullcontext()

    def join(self) -> None:
        return None

    def timer(self) -> Callable[[], Callable[[], float]]:
        from time import perf_counter

        start = perf_counter()

        def stop() -> Callable[[], float]:
            seconds = perf_counter() - start
            return lambda: seconds

        return stop


class CudaStreams:
    """The current stream and one aux stream; make one a device and share it between layers.

    cuda: `torch.cuda`, or what records the same calls (ep_runtime/stream_recorder.py).
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._aux = cuda.Stream(device)

    def fork(self) -> None:
        self._aux.wait_stream(self._cuda.current_stream(self._device))

    def on_aux(self) -> AbstractContextManager[object]:
        on_aux: AbstractContextManager[object] = self._cuda.stream(self._aux)
        return on_aux

    def join(self) -> None:
        self._cuda.current_stream(self._device).wait_stream(self._aux)

    def timer(self) -> Callable[[], Callable[[], float]]:
        start = torch.cuda.Event(enable_timing=True)
        start.record()

        def stop() -> Callable[[], float]:
            end = torch.cuda.Event(enable_timing=True)
            end.record()

            def seconds() -> float:
                end.synchronize()
                return float(start.elapsed_time(end)) / 1e3

            return seconds

        return stop


def make_streams(device: torch.device) -> Streams:
    """The form for a device."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
