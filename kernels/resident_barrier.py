"""A barrier of all programs of one launch, flags between them, and what is said when a wait ends.

The words lie in memory of the launch's own (`StateLayout`): all 0 before it, and 0 again after it,
because the last program to leave clears them. So a captured launch can be replayed, and launches
with different numbers of programs can share the words one after the other; two that are in flight
at once must not.

Each wait polls with an atomic that acquires, made by one thread, whose answer all threads of the
program get: so they agree on when it ends. It ends when the word has reached its target, or, once
it has lasted `limit_ns`, because the waiter itself adds FAILED to the word, which is above every
target. All other waits for that word end with it. Who finds a wait failed marks the barrier's
counter too, so that every later wait ends at once; the first of them writes the record, one word in
memory that the host reads without waiting (`FailedBarrier`).

Triton 3.6 puts no `bar.sync` between a program's stores and an atomic that releases them, so one
stands here before each.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_runtime.kernels.device_clock import read_clock

# Programs of a launch at most.
MAX_PROGRAMS = 512
# Phases in which a program waits for others; 0 in a record means that nothing has failed.
ROUTED, GATE_UP_SHARED, ACTIVATED, DOWN_SHARED = 1, 2, 3, 4
_WAITS = {
    ROUTED: "grid barrier behind the routing",
    GATE_UP_SHARED: "wait for a shared sum of the first projection",
    ACTIVATED: "grid barrier between the two projections",
    DOWN_SHARED: "wait for a shared sum of the second projection",
}
_PHASE_SHIFT, _ARRIVED_SHIFT = 48, 24
_COUNT_MASK = (1 << 24) - 1

_FAILED: tl.constexpr = tl.constexpr(1 << 32)
# Words of the state, those that are polled a cache line apart. The first counts arrivals.
_STARTED: tl.constexpr = tl.constexpr(8)
_DEPARTED: tl.constexpr = tl.constexpr(16)
_CLAIMED: tl.constexpr = tl.constexpr(32)
_FLAGS: tl.constexpr = tl.constexpr(48)
_FLAG_SETS: tl.constexpr = tl.constexpr(2)
STATE_WORDS = 48 + 2 * MAX_PROGRAMS


@dataclass(frozen=True)
class FailedBarrier:
    """A wait that lasted as long as it may: where, and how many programs of how many had come."""

    phase: int
    arrived: int
    expected: int

    @classmethod
    def from_record(cls, record: int) -> "FailedBarrier | None":
        """None where nothing has failed."""
        if record == 0:
            return None
        arrived = record >> _ARRIVED_SHIFT & _COUNT_MASK
        return cls(record >> _PHASE_SHIFT, arrived, record & _COUNT_MASK)

    def __str__(self) -> str:
        return (
            f"{_WAITS[self.phase]} (phase {self.phase} of {len(_WAITS)}): "
            f"{self.arrived} of {self.expected} programs had arrived"
        )


class Grid(NamedTuple):
    """Inside a kernel: which program of a launch one is, and what it waits with.

    program: 0 is the last of the launch. state_ptr: [STATE_WORDS] int64. record_ptr: [1] int64.
    limit_ns: of each wait.
    """

    program: Any
    num_programs: Any
    state_ptr: Any
    record_ptr: Any
    limit_ns: Any


@triton.jit
def own_grid(num_programs, state_ptr, record_ptr, limit_ns):
    """`Grid` of this program."""
    program = num_programs - 1 - tl.program_id(0)
    return Grid(program, num_programs, state_ptr, record_ptr, limit_ns)


@triton.jit
def wait_until(word_ptr, target, limit_ns):
    """Acquire a word that has reached `target`; what it holds, _FAILED or more where it has not."""
    start = read_clock()
    value = tl.atomic_add(word_ptr, tl.full([], 0, tl.int64), sem="acquire", scope="gpu")
    while value < target:
        is_late = read_clock() - start > limit_ns
        added = tl.where(is_late, _FAILED, 0).to(tl.int64)
        value = tl.atomic_add(word_ptr, added, sem="acquire", scope="gpu")
    tl.debug_barrier()
    return value


@triton.jit
def _tell_of_failure(grid, phase, arrived):
    """Mark the launch, and record the first failure of it."""
    tl.atomic_add(grid.state_ptr, tl.full([], 0, tl.int64) + _FAILED, sem="relaxed", scope="gpu")
    one = tl.full([], 1, tl.int64)
    if tl.atomic_xchg(grid.state_ptr + _CLAIMED, one, sem="relaxed", scope="gpu") == 0:
        word = (tl.full([], 0, tl.int64) + phase) << 48 | arrived.to(tl.int64) << 24
        tl.store(grid.record_ptr, word | grid.num_programs.to(tl.int64))


@triton.jit
def pass_grid_barrier(grid, NUMBER: tl.constexpr, PHASE: tl.constexpr):
    """Release what this program stored, acquire what all have; whether that failed.

    NUMBER: of the barrier in its launch, from 1.
    """
    tl.debug_barrier()
    tl.atomic_add(grid.state_ptr, tl.full([], 1, tl.int64), sem="release", scope="gpu")
    target = grid.num_programs.to(tl.int64) * NUMBER
    value = wait_until(grid.state_ptr, target, grid.limit_ns)
    has_failed = value >= _FAILED
    if has_failed:
        arrived = value % _FAILED - (target - grid.num_programs)
        _tell_of_failure(grid, PHASE, arrived)
    return has_failed


@triton.jit
def set_flag(grid, SET: tl.constexpr):
    """Release what this program stored to whoever waits for its flag of a set (0 or 1)."""
    tl.debug_barrier()
    flag_ptr = grid.state_ptr + _FLAGS + grid.program * _FLAG_SETS + SET
    tl.atomic_add(flag_ptr, tl.full([], 1, tl.int64), sem="release", scope="gpu")


@triton.jit
def announce(grid):
    """Count this program among those that a failed wait for a flag tells of."""
    tl.atomic_add(grid.state_ptr + _STARTED, tl.full([], 1, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def wait_for_flag(grid, program, has_failed, SET: tl.constexpr, PHASE: tl.constexpr):
    """Acquire what `program` stored before it set its flag; whether that, or a wait before, failed.

    has_failed: whether one did before: then this one ends at once.
    """
    limit_ns = tl.where(has_failed, 0, grid.limit_ns)
    value = wait_until(grid.state_ptr + _FLAGS + program * _FLAG_SETS + SET, 1, limit_ns)
    is_late = value >= _FAILED
    if is_late:
        zero = tl.full([], 0, tl.int64)
        started = tl.atomic_add(grid.state_ptr + _STARTED, zero, sem="relaxed", scope="gpu")
        _tell_of_failure(grid, PHASE, started)
    return has_failed | is_late


@triton.jit
def leave(grid, MAX_PROGRAMS: tl.constexpr):
    """The last that a program does; the last one to do it clears the state."""
    tl.debug_barrier()
    one = tl.full([], 1, tl.int64)
    departed = tl.atomic_add(grid.state_ptr + _DEPARTED, one, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if departed == grid.num_programs - 1:
        flags = tl.arange(0, MAX_PROGRAMS * _FLAG_SETS)
        zeros = tl.zeros([MAX_PROGRAMS * _FLAG_SETS], tl.int64)
        tl.store(grid.state_ptr + _FLAGS + flags, zeros)
        zero = tl.full([], 0, tl.int64)
        tl.store(grid.state_ptr, zero)
        tl.store(grid.state_ptr + _STARTED, zero)
        tl.store(grid.state_ptr + _DEPARTED, zero)
        tl.store(grid.state_ptr + _CLAIMED, zero)
