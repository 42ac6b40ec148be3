"""What streams did to which bytes, and which of it nothing orders.

Happens-before by vector clocks: a stream's clock holds, for every stream, how many of its
operations are known to be done before the stream's next one. An event is a copy of the clock at
its recording; waiting for it takes the larger of each count. Operation a, number n of stream s,
happens before what stream t does next exactly where t's clock says at least n of s. Source:
Mattern, Virtual Time and Global States of Distributed Systems, 1988.

Two accesses race where their byte ranges in one storage overlap, one of them writes or frees, and
neither happens before the other. Whoever frees gives the bytes to the next allocation of the stream
that allocated them, as torch's CUDA allocator does, so a free is a write by that stream.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum


class AccessKind(StrEnum):
    READ = "read"
    WRITE = "write"
    FREE = "free"


@dataclass(frozen=True)
class Operation:
    """Number `time` of what a stream was given; `name` for a reader."""

    stream: str
    time: int
    name: str


@dataclass(frozen=True)
class Access:
    """Bytes [start, stop) of a storage that an operation touched."""

    operation: Operation
    kind: AccessKind
    start: int
    stop: int


@dataclass(frozen=True)
class Unordered:
    """Two operations that nothing orders, in the order in which the host issued them.

    storage: what both touched; None where the fault is that the second may not run beside the
    first at all. first_kind, second_kind: "alone" for the one that needs the device to itself,
    "beside" for the other.
    """

    first: Operation
    first_kind: str
    second: Operation
    second_kind: str
    storage: str | None
    start: int = 0
    stop: int = 0

    def __str__(self) -> str:
        first = f"{self.first_kind} by {self.first.name} on {self.first.stream}"
        second = f"{self.second_kind} by {self.second.name} on {self.second.stream}"
        if self.storage is None:
            return f"{first}; {second}: not ordered, and one needs the device to itself"
        return f"{self.storage}, bytes {self.start} to {self.stop}: {first}; {second}: not ordered"


Mark = dict[str, int]


class StreamHistory:
    """Operations as the host issues them.

    unordered: what was found, each pair of names once. misplaced: operations on a stream that may
    not carry them, in words, each once.
    """

    def __init__(self) -> None:
        self.num_operations = 0
        self.unordered: list[Unordered] = []
        self.misplaced: list[str] = []
        self._clocks: dict[str, Mark] = defaultdict(dict)
        self._last: dict[str, Operation] = {}
        self._alone: dict[str, Operation] = {}
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._found: set[tuple[object, ...]] = set()

    def issue(self, stream: str, name: str) -> Operation:
        """A stream is given its next operation."""
        operation = self._next(stream, name)
        self._last[stream] = operation
        self.num_operations += 1
        for other in self._alone.values():
            if not self._is_before(other, stream):
                self._report(Unordered(other, "alone", operation, "beside", None))
        return operation

    def mark(self, stream: str) -> Mark:
        """What an event that is recorded on the stream now stands for."""
        return dict(self._clocks[stream])

    def wait(self, stream: str, mark: Mark) -> None:
        """The stream's next operation comes after all that the mark stands for."""
        clock = self._clocks[stream]
        for other, time in mark.items():
            clock[other] = max(clock.get(other, 0), time)

    def access(
        self,
        operation: Operation,
        kind: AccessKind,
        storage: tuple[int, str],
        start: int,
        stop: int,
    ) -> None:
        """The stream's newest operation touches bytes of a storage, given as (key, name)."""
        key, name = storage
        if start >= stop:
            return
        kept: list[Access] = []
        for earlier in self._accesses[key]:
            is_ordered = self._is_before(earlier.operation, operation.stream)
            overlaps = earlier.start < stop and start < earlier.stop
            conflicts = not (earlier.kind is kind is AccessKind.READ)
            if overlaps and conflicts and not is_ordered:
                self._report(
                    Unordered(
                        earlier.operation,
                        earlier.kind,
                        operation,
                        kind,
                        name,
                        max(start, earlier.start),
                        min(stop, earlier.stop),
                    )
                )
            # What comes after this access comes after what this one covers, too: nothing is lost.
            is_covered = start <= earlier.start and earlier.stop <= stop
            supersedes = kind is not AccessKind.READ or earlier.kind is AccessKind.READ
            if not (is_ordered and is_covered and supersedes):
                kept.append(earlier)
        kept.append(Access(operation, kind, start, stop))
        self._accesses[key] = kept

    def free(self, stream: str, storage: tuple[int, str], num_bytes: int) -> None:
        """The storage is no more; its bytes are the stream's next allocation's. No device work."""
        operation = self._next(stream, f"freeing {storage[1]}")
        self.access(operation, AccessKind.FREE, storage, 0, num_bytes)
        self._accesses.pop(storage[0], None)

    def _next(self, stream: str, name: str) -> Operation:
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        return Operation(stream, clock[stream], name)

    def require_alone(self, stream: str, name: str) -> None:
        """From here to `end_alone` the stream's operations need the device to themselves."""
        operation = self.issue(stream, name)
        for other in list(self._last.values()):
            if other.stream != stream and not self._is_before(other, stream):
                self._report(Unordered(other, "beside", operation, "alone", None))
        self._alone[stream] = operation

    def end_alone(self, stream: str) -> None:
        """The last operation of the stream ends what `require_alone` began."""
        self._alone[stream] = self._last[stream]

    def misplace(self, fault: str) -> None:
        """Something was issued on a stream that may not carry it."""
        if fault not in self.misplaced:
            self.misplaced.append(fault)

    def _is_before(self, operation: Operation, stream: str) -> bool:
        """Whether an operation happens before the stream's newest one, or is it."""
        return self._clocks[stream].get(operation.stream, 0) >= operation.time

    def _report(self, found: Unordered) -> None:
        key = (
            found.first.name,
            found.first_kind,
            found.second.name,
            found.second_kind,
            found.storage,
        )
        if key not in self._found:
            self._found.add(key)
            self.unordered.append(found)
