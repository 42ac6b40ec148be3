"""A CUDA stream for communication beside the stream that computes, and what orders the two."""

from typing import Any

import torch


class CommStream:
    """One stream of high priority, and one event for each piece of work that is in flight.

    Events are made once: making one costs as much as recording it. Each is recorded anew before
    it is waited for, so eager calls and captures can share them. cuda: `torch.cuda`, or what
    records the same calls.
    """

    def __init__(self, device: torch.device, num_in_flight: int, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device, priority=-1)
        self._issued = cuda.Event()
        self._finished = [cuda.Event() for _ in range(num_in_flight)]
        self.address: int = self._stream.cuda_stream

    def follow_current_stream(self) -> None:
        """Order what is launched here from now on behind all that the current stream has."""
        self._issued.record(self._cuda.current_stream(self._device))
        self._stream.wait_event(self._issued)

    def mark_end(self, index: int) -> None:
        """Remember what has been launched here so far as the work of that index."""
        self._finished[index].record(self._stream)

    def join(self, index: int) -> None:
        """Order the current stream behind the work of that index."""
        self._cuda.current_stream(self._device).wait_event(self._finished[index])
