"""Streams that record what is issued where, on a CPU that stands in for a CUDA device.

Work on the aux stream is computed at once, but its result is hidden (NaN) until the main stream
joins, as it may be on a device: whoever reads it too early sees NaN.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from ep_runtime.all2all import collectives
from ep_runtime.layer import MoELayer

# What happened in this process, in order; `record` says on which stream.
EVENTS: list[str] = []
_stream = ["main"]


def record(event: str) -> None:
    """Note an event; those on the aux stream are marked."""
    EVENTS.append(event if _stream[0] == "main" else f"{event} on aux")


def take_events() -> list[str]:
    """All events so far, which are forgotten."""
    events = list(EVENTS)
    EVENTS.clear()
    return events


class RecordingStreams:
    """The main stream and one aux stream of a device that is not there."""

    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1
        self._hidden: list[Callable[[], None]] = []

    def fork(self) -> None:
        record("fork")

    def on_aux(self) -> AbstractContextManager[object]:
        return self._on_aux()

    @contextmanager
    def _on_aux(self) -> Iterator[None]:
        assert _stream[0] == "main", "aux work inside aux work"
        _stream[0] = "aux"
        try:
            yield
        finally:
            _stream[0] = "main"

    def join(self) -> None:
        record("join aux")
        for show in self._hidden:
            show()
        self._hidden.clear()

    def timer(self) -> Callable[[], Callable[[], float]]:
        return lambda: lambda: 0.0

    def hide(self, inputs: Tensor, out: Tensor) -> None:
        """Make `out` NaN until the join; at the join `inputs` must be what they are now."""
        result, seen = out.clone(), inputs.clone()
        out.fill_(float("nan"))

        def show() -> None:
            assert torch.equal(inputs, seen), "the aux stream's input changed before the join"
            assert out.isnan().all(), "the aux stream's output was written before the join"
            out.copy_(result)

        self._hidden.append(show)


def record_shared_expert(layer: MoELayer) -> None:
    """Note each run of the layer's shared expert; on the aux stream, hide its result."""
    shared, streams = layer.shared, layer.ctx.streams
    assert shared is not None
    run = shared.run

    def recorded(hidden_states: Tensor, **kwargs: Any) -> Tensor:
        record("shared")
        out = run(hidden_states, **kwargs)
        if _stream[0] == "aux":
            assert isinstance(streams, RecordingStreams)
            streams.hide(hidden_states, out)
        return out

    shared.run = recorded  # type: ignore[method-assign]


def record_collectives() -> None:
    """Note each collective of a backend, in this process and for good."""
    issue = collectives._issue

    def recorded(*args: Any, **kwargs: Any) -> Any:
        record("collective")
        return issue(*args, **kwargs)

    collectives._issue = recorded
