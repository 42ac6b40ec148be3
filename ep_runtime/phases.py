"""How long the parts of a layer call take."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ep_runtime.streams import Streams

# Measurements kept back until read or long over, so that timing does not wait for the device.
_KEPT = 512
PHASES = ("router", "dispatch", "experts", "combine", "shared")


class PhaseTimer:
    """Seconds spent in each phase, summed over calls; off until `enabled` is set.

    On CUDA a phase is the time between two events on its stream; nothing waits before the times
    are read. Overlapped phases count in full, so the phases may add up to more than the call.
    """

    def __init__(self, streams: Streams) -> None:
        self.enabled = False
        self._streams = streams
        self._pending: list[tuple[str, Callable[[], float]]] = []
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is issued inside, on the current stream."""
        if not self.enabled:
            yield
            return
        stop = self._streams.timer()
        try:
            yield
        finally:
            self._pending.append((name, stop()))
            if len(self._pending) >= 2 * _KEPT:
                self._sum_up(_KEPT)

    def _sum_up(self, count: int) -> None:
        for name, measured in self._pending[:count]:
            self._seconds[name] += measured()
        del self._pending[:count]

    def seconds(self) -> dict[str, float]:
        """Phase to seconds so far, 0 for one that never ran; waits for the device."""
        self._sum_up(len(self._pending))
        return {name: self._seconds[name] for name in PHASES}
