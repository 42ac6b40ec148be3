"""Runs code for a CUDA device on a CPU and records which stream touches which bytes, and when.

Every torch operation goes through a dispatch mode: what its schema calls written is written, other
tensor arguments are read, views touch nothing, a fresh result is allocated on the current stream
and written. Interpreted Triton kernels are watched load by load. `RecordedCuda` stands in for
`torch.cuda` where streams and events are made, so that the code that orders streams is the real
code. Memory is freed where its last reference goes.

Ranges of torch operations are from a tensor's first to its last byte, gaps included. Reads by the
host (`tolist`) order nothing, which errs on the strict side.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ep_runtime.kernels.interpreted_accesses import Intervals, watch_interpreted_launches
from ep_runtime.stream_history import AccessKind, Mark, Operation, StreamHistory

MAIN = "main"
# Operations that take a tensor for its shape and dtype alone.
_READ_NOTHING = frozenset(
    f"{form}{name}"
    for name in ("empty", "zeros", "ones", "full", "empty_strided")
    for form in ("", "new_")
) | {"empty_like", "zeros_like", "ones_like", "full_like"}


@dataclass(frozen=True)
class _Memory:
    """A live storage. stream: whose allocator it came from; None for what was there before."""

    weak: StorageWeakRef
    address: int
    num_bytes: int
    name: str
    stream: str | None


class StreamRecorder(TorchDispatchMode):
    """Use as a context manager around the code that is recorded; `history` has what was found."""

    sees_launches = True  # one by one, so that an operator of several would hide them

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.history = StreamHistory()
        self._streams = [MAIN]
        self._labels: list[str] = []
        self._memory: dict[int, _Memory] = {}
        self._fresh: dict[int, _Memory] = {}
        self._is_paused = False
        self._watching: AbstractContextManager[None] = nullcontext()
        self._by_address: tuple[list[int], list[tuple[int, _Memory]]] = ([], [])
        self._stream_names: dict[int, str] = {}
        self._launched: dict[tuple[int, AccessKind], Intervals] = {}

    def __enter__(self) -> "StreamRecorder":
        self._watching = watch_interpreted_launches(self)
        self._watching.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._watching.__exit__(*error)

    # --- what the code under audit is given ---

    @property
    def current_stream(self) -> str:
        return self._streams[-1]

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Work issued inside goes to the stream."""
        self._streams.append(stream)
        try:
            yield
        finally:
            self._streams.pop()

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Operations inside are called `label: operation`."""
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def make_cuda(self, name: str) -> "RecordedCuda":
        """In place of `torch.cuda`; streams made through it are called `name`."""
        return RecordedCuda(self, name)

    def look_at_collective(self) -> None:
        """A collective is being issued: on the main stream, or it is a fault."""
        if self.current_stream != MAIN:
            self.history.misplace(f"a collective was issued on {self.current_stream}")

    @contextmanager
    def alone(self, label: str) -> Iterator[None]:
        """What is issued inside needs the device to itself."""
        self.collect_freed()
        stream = self.current_stream
        with self.labelled(label):
            self.history.require_alone(stream, f"{label}: launch")
            yield
            self.history.end_alone(stream)

    def mark(self, stream: str) -> Mark:
        self.collect_freed()
        return self.history.mark(stream)

    def wait(self, stream: str, mark: Mark) -> None:
        self.collect_freed()
        self.history.wait(stream, mark)

    def know(self, tensor: Tensor, name: str) -> None:
        """Call a tensor's memory by a name; for what was there before."""
        self._remember(tensor, name, None)

    def collect_freed(self) -> None:
        """Record the end of memory whose last reference is gone."""
        for key in [key for key, memory in self._fresh.items() if memory.weak.expired()]:
            memory = self._fresh.pop(key)
            self.history.free(memory.stream or MAIN, (key, memory.name), memory.num_bytes)
            del self._memory[key]

    # --- torch ---

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        self.collect_freed()
        result = func(*args, **(kwargs or {}))
        self._record(func, args, kwargs or {}, result)
        return result

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        name = func._schema.name.partition("::")[2]
        reads: list[Tensor] = []
        writes: list[Tensor] = []
        given: set[int] = set()
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _tensors(value):
                given.add(_key(tensor))
                if argument.alias_info is None and name not in _READ_NOTHING:
                    reads.append(tensor)
                elif argument.alias_info is not None and argument.alias_info.is_write:
                    writes.append(tensor)
        fresh = [tensor for tensor in _tensors(result) if _key(tensor) not in given]
        is_view = not fresh and not writes and bool(_tensors(result))
        if is_view or not (reads or writes or fresh):
            return
        operation = self.history.issue(self.current_stream, self._named(name))
        for tensor in reads:
            self._touch(operation, AccessKind.READ, tensor)
        for tensor in writes:
            self._touch(operation, AccessKind.WRITE, tensor)
        for tensor in fresh:
            self._remember(tensor, f"{_text(tensor)} of {operation.name}", self.current_stream)
            if not name.removeprefix("new_").startswith("empty"):
                self._touch(operation, AccessKind.WRITE, tensor)

    def _touch(self, operation: Operation, kind: AccessKind, tensor: Tensor) -> None:
        if tensor.numel() == 0:
            return
        self._remember(tensor, f"given {_text(tensor)}", None)
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        extent = sum(int((n - 1) * s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        key = _key(tensor)
        storage = (key, self._memory[key].name)
        self.history.access(operation, kind, storage, start, start + (extent + 1) * size)

    def _remember(self, tensor: Tensor, name: str, stream: str | None) -> None:
        key = _key(tensor)
        if key in self._memory:
            return
        storage = tensor.untyped_storage()
        memory = _Memory(
            StorageWeakRef(storage), storage.data_ptr(), storage.nbytes(), name, stream
        )
        self._memory[key] = memory
        if stream is not None:
            self._fresh[key] = memory

    def _named(self, name: str) -> str:
        return f"{self._labels[-1]}: {name}" if self._labels else name

    # --- Triton: see LaunchWatcher ---

    def launch(self, kernel: str, arguments: tuple[Any, ...], run: Callable[[], None]) -> None:
        """One interpreted launch on the current stream."""
        self.collect_freed()
        for tensor in _tensors(list(arguments)):
            self._remember(tensor, f"given {_text(tensor)}", None)
        live = [(k, m) for k, m in self._memory.items() if m.num_bytes and not m.weak.expired()]
        live.sort(key=lambda item: item[1].address)
        self._by_address = ([memory.address for _, memory in live], live)
        self._launched = {}
        self._is_paused = True
        try:
            run()
        finally:
            self._is_paused = False
        operation = self.history.issue(self.current_stream, self._named(kernel))
        for (key, kind), intervals in self._launched.items():
            storage = (key, self._memory[key].name)
            for start, stop in _merged(intervals):
                self.history.access(operation, kind, storage, start, stop)

    def touched(self, intervals: Intervals, *, is_store: bool) -> None:
        """Sort a load or store of a launch by storage."""
        addresses, live = self._by_address
        kind = AccessKind.WRITE if is_store else AccessKind.READ
        for start, stop in intervals:
            while start < stop:  # neighbouring storages may lie in one interval
                index = bisect_right(addresses, start) - 1
                if index < 0 or start >= live[index][1].address + live[index][1].num_bytes:
                    raise LookupError(
                        f"a Triton kernel touches memory at {start:#x} that the recorder does not "
                        f"know; name it with StreamRecorder.know before the launch"
                    )
                key, memory = live[index]
                end = min(stop, memory.address + memory.num_bytes)
                where = (start - memory.address, end - memory.address)
                self._launched.setdefault((key, kind), []).append(where)
                start = end

    def on_stream(self, address: int) -> AbstractContextManager[None]:
        """A launch on the stream of that address."""
        return self.on(self._stream_names[address])

    def name_stream(self, name: str) -> int:
        """A new stream's address, as a launch is given it."""
        address = len(self._stream_names) + 1
        self._stream_names[address] = name
        return address


@dataclass(frozen=True)
class RecordedEvent:
    """Stands in for torch.cuda.Event."""

    recorder: StreamRecorder
    marks: list[Mark]

    def record(self, stream: "RecordedStream | None" = None) -> None:
        name = stream.name if stream is not None else self.recorder.current_stream
        self.marks[:] = [self.recorder.mark(name)]

    def wait(self, stream: "RecordedStream | None" = None) -> None:
        """One that was never recorded orders nothing, as in CUDA."""
        name = stream.name if stream is not None else self.recorder.current_stream
        for mark in self.marks:
            self.recorder.wait(name, mark)


@dataclass(frozen=True)
class RecordedStream:
    """Stands in for torch.cuda.Stream. cuda_stream: its address, as a launch is given it."""

    recorder: StreamRecorder
    name: str
    cuda_stream: int

    def wait_stream(self, other: "RecordedStream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: RecordedEvent) -> None:
        event.wait(self)

    def record_event(self) -> RecordedEvent:
        event = RecordedEvent(self.recorder, [])
        event.record(self)
        return event


class RecordedCuda:
    """The part of `torch.cuda` with which streams are made and ordered.

    name: what the streams made through it are called.
    """

    def __init__(self, recorder: StreamRecorder, name: str) -> None:
        self._recorder, self._name = recorder, name
        self._num_made = 0

    def Stream(self, device: torch.device, priority: int = 0) -> RecordedStream:
        self._num_made += 1
        name = self._name if self._num_made == 1 else f"{self._name} {self._num_made}"
        return RecordedStream(self._recorder, name, self._recorder.name_stream(name))

    def Event(self) -> RecordedEvent:
        return RecordedEvent(self._recorder, [])

    def current_stream(self, device: torch.device | None = None) -> RecordedStream:
        return RecordedStream(self._recorder, self._recorder.current_stream, 0)

    def stream(self, stream: RecordedStream) -> AbstractContextManager[None]:
        return self._recorder.on(stream.name)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in an argument or a result, however nested."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    base = getattr(value, "base", None)  # of a TMA descriptor
    return [base] if isinstance(base, Tensor) else []


def _key(tensor: Tensor) -> int:
    """Of a tensor's storage; not used again while a weak reference to it is held."""
    return int(tensor.untyped_storage()._cdata)


def _text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _merged(intervals: Intervals) -> Intervals:
    merged: Intervals = []
    for start, stop in sorted(set(intervals)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged
