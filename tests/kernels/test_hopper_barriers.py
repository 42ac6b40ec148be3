"""The barriers of the Hopper GEMM's ring, in every order in which its threads may run.

A model of the table in kernels/hopper_gemm.py: one producer thread that expects and issues TMA's
bytes (W), further ones that only copy rows (X, gathered), two consumers, one `turn`. Copies land in
any order, long after they were begun; waits see parities alone, as on the device. What has to hold:

- a consumer reads a stage only when all parts of its own block have landed in it;
- nothing is written to a stage that a consumer has yet to read, or is reading;
- some thread can always go on, until all are done.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

NUM_COPIERS = 2  # threads that copy rows: the one that also expects, and another


class BrokenError(Exception):
    """An order of steps in which the kernel would be wrong."""


@dataclass(frozen=True)
class Ring:
    """num_blocks: of K a tile. full_count: arrivals a phase of `full`, None for what is right.

    waits_ahead: as the consumers of kernels/hopper_kernel_fp8.py do, for a block before they have
    done with the one before it; else as those of kernels/hopper_kernel_half.py.
    """

    num_stages: int
    num_tiles: int
    num_blocks: int
    lead: int
    gathers: bool
    full_count: int | None = None
    empty_count: int = 2
    releases_early: bool = False
    waits_ahead: bool = False

    @property
    def total(self) -> int:
        return self.num_tiles * self.num_blocks

    @property
    def num_copiers(self) -> int:
        return NUM_COPIERS if self.gathers else 0

    @property
    def full_arrivals(self) -> int:
        return 1 + self.num_copiers if self.full_count is None else self.full_count

    @property
    def takes_turns(self) -> bool:
        return self.lead > 0 and self.num_blocks >= self.num_stages


@dataclass(frozen=True)
class State:
    """Blocks are numbered over all tiles.

    full_phase, empty_phase, turn_phase: completed phases. full_missing, full_bytes, empty_missing:
    of the running phase, the arrivals to come and TMA's parts expected but not landed.
    turns_taken: tiles for which consumer 1 has passed `turn`. expected, tma_begun, begun: blocks
    that the expecting thread has expected, asked TMA for, and that each thread has begun to copy.
    in_flight: (thread, block) not landed, thread -1 for TMA. announced: of each copying thread, the
    blocks for which its arrival was made. issued, released: of each consumer; waited: that each has
    seen landed, where it waits ahead.
    """

    full_phase: tuple[int, ...]
    full_missing: tuple[int, ...]
    full_bytes: tuple[int, ...]
    empty_phase: tuple[int, ...]
    empty_missing: tuple[int, ...]
    turn_phase: int = 0
    turns_taken: int = 0
    expected: int = 0
    tma_begun: int = 0
    begun: tuple[int, ...] = ()
    in_flight: frozenset[tuple[int, int]] = frozenset()
    announced: tuple[int, ...] = ()
    issued: tuple[int, int] = (0, 0)
    released: tuple[int, int] = (0, 0)
    waited: tuple[int, int] = (0, 0)


def start(ring: Ring) -> State:
    stages = range(ring.num_stages)
    return State(
        full_phase=tuple(0 for _ in stages),
        full_missing=tuple(ring.full_arrivals for _ in stages),
        full_bytes=tuple(0 for _ in stages),
        empty_phase=tuple(0 for _ in stages),
        empty_missing=tuple(ring.empty_count for _ in stages),
        begun=(0,) * ring.num_copiers,
        announced=(0,) * ring.num_copiers,
    )


def changed(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def passes(completed: int, parity: int) -> bool:
    """A wait for the phase of this parity, where so many phases are complete."""
    return completed % 2 != parity % 2


def arrive_full(ring: Ring, state: State, stage: int, arrivals: int, num_bytes: int) -> State:
    missing = state.full_missing[stage] - arrivals
    pending = state.full_bytes[stage] + num_bytes
    phase = state.full_phase[stage]
    if missing < 0:
        raise BrokenError(f"an arrival too many at full[{stage}]")
    if missing == 0 and pending == 0:
        missing, phase = ring.full_arrivals, phase + 1
    return replace(
        state,
        full_phase=changed(state.full_phase, stage, phase),
        full_missing=changed(state.full_missing, stage, missing),
        full_bytes=changed(state.full_bytes, stage, pending),
    )


def arrive_empty(ring: Ring, state: State, stage: int) -> State:
    missing, phase = state.empty_missing[stage] - 1, state.empty_phase[stage]
    if missing == 0:
        missing, phase = ring.empty_count, phase + 1
    return replace(
        state,
        empty_phase=changed(state.empty_phase, stage, phase),
        empty_missing=changed(state.empty_missing, stage, missing),
    )


def check_write(ring: Ring, state: State, block: int) -> None:
    """The block that had the stage before must be done with: read, and its release meant so."""
    before = block - ring.num_stages
    if before >= 0 and min(reads_done(ring, state, c) for c in range(2)) <= before:
        raise BrokenError(f"block {block} is written over block {before}, still to be read")


def reads_done(ring: Ring, state: State, consumer: int) -> int:
    """Blocks that a consumer has certainly read: all but the last, and that too at a tile's end."""
    issued = state.issued[consumer]
    is_end_of_tile = issued % ring.num_blocks == 0 and state.released[consumer] == issued
    return issued if is_end_of_tile else issued - 1


def producer_steps(ring: Ring, state: State) -> Iterator[State]:
    size = ring.num_stages

    def may_write(block: int) -> bool:
        return block < ring.total and passes(state.empty_phase[block % size], block // size % 2 ^ 1)

    # The expecting thread: expect, TMA, and then, gathered, its own copies, block after block.
    own = state.begun[0] if ring.gathers else state.tma_begun
    if state.expected == state.tma_begun == own and may_write(state.expected):
        moved = arrive_full(ring, state, state.expected % size, 1, 1)
        yield replace(moved, expected=state.expected + 1)
    if state.tma_begun < state.expected:
        block = state.tma_begun
        check_write(ring, state, block)
        yield replace(state, tma_begun=block + 1, in_flight=state.in_flight | {(-1, block)})
    for thread, block in enumerate(state.begun):
        ready = block < state.tma_begun if thread == 0 else may_write(block)
        if ready:
            check_write(ring, state, block)
            yield replace(
                state,
                begun=changed(state.begun, thread, block + 1),
                in_flight=state.in_flight | {(thread, block)},
            )


def landing_steps(ring: Ring, state: State) -> Iterator[State]:
    for thread, block in state.in_flight:
        moved = replace(state, in_flight=state.in_flight - {(thread, block)})
        if thread == -1:
            yield arrive_full(ring, moved, block % ring.num_stages, 0, -1)
            continue
        # An arrival waits for all copies that its thread began before it.
        upto = moved.announced[thread]
        while upto < moved.begun[thread] and (thread, upto) not in moved.in_flight:
            moved = arrive_full(ring, moved, upto % ring.num_stages, 1, 0)
            upto += 1
        yield replace(moved, announced=changed(moved.announced, thread, upto))


def has_landed(ring: Ring, state: State, block: int) -> bool:
    is_begun = all(b > block for b in (state.tma_begun, *state.begun))
    return is_begun and not any(b == block for _, b in state.in_flight)


def release(ring: Ring, state: State, consumer: int) -> State:
    """A consumer gives its oldest block back, and consumer 0 maybe consumer 1 its turn."""
    released = state.released[consumer]
    moved = arrive_empty(ring, state, released % ring.num_stages)
    moved = replace(moved, released=_pair(moved.released, consumer, released + 1))
    if consumer == 0 and ring.takes_turns and released % ring.num_blocks == ring.lead - 1:
        moved = replace(moved, turn_phase=moved.turn_phase + 1)
    return moved


def consumer_steps(ring: Ring, state: State) -> Iterator[State]:
    for consumer in range(2):
        issued, released = state.issued[consumer], state.released[consumer]
        lag = 0 if ring.releases_early else 1
        first_of_tile = issued % ring.num_blocks == 0
        # A tile's last block is released before the next tile begins.
        due = released < (issued if first_of_tile else issued - lag)
        if due:
            yield release(ring, state, consumer)
            continue
        if issued == ring.total:
            continue
        tile = issued // ring.num_blocks
        if consumer == 1 and ring.takes_turns and first_of_tile and state.turns_taken == tile:
            if passes(state.turn_phase, tile % 2):
                yield replace(state, turns_taken=tile + 1)
            continue
        stage = issued % ring.num_stages
        if passes(state.full_phase[stage], issued // ring.num_stages % 2):
            if not has_landed(ring, state, issued):
                raise BrokenError(f"block {issued} is read before it has landed")
            yield replace(state, issued=_pair(state.issued, consumer, issued + 1))


def steps_of_consumers_that_wait_ahead(ring: Ring, state: State) -> Iterator[State]:
    for consumer in range(2):
        issued, released = state.issued[consumer], state.released[consumer]
        is_tile_border = issued % ring.num_blocks == 0
        if released < issued - 1:
            yield release(ring, state, consumer)
        elif state.waited[consumer] == issued < ring.total:
            stage = issued % ring.num_stages
            if passes(state.full_phase[stage], issued // ring.num_stages % 2):
                yield replace(state, waited=_pair(state.waited, consumer, issued + 1))
        elif is_tile_border and released < issued:
            yield release(ring, state, consumer)
        elif issued < ring.total:
            tile = issued // ring.num_blocks
            waits_for_turn = consumer == 1 and ring.takes_turns and is_tile_border
            if waits_for_turn and state.turns_taken == tile:
                if passes(state.turn_phase, tile % 2):
                    yield replace(state, turns_taken=tile + 1)
                continue
            if not has_landed(ring, state, issued):
                raise BrokenError(f"block {issued} is read before it has landed")
            yield replace(state, issued=_pair(state.issued, consumer, issued + 1))


def _pair(values: tuple[int, int], index: int, value: int) -> tuple[int, int]:
    return (value, values[1]) if index == 0 else (values[0], value)


def explore(ring: Ring) -> int:
    """How many states there are; raises BrokenError if one of them is wrong."""
    first = start(ring)
    steps = steps_of_consumers_that_wait_ahead if ring.waits_ahead else consumer_steps
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        nexts = [
            *producer_steps(ring, state),
            *landing_steps(ring, state),
            *steps(ring, state),
        ]
        if not nexts and state.released != (ring.total, ring.total):
            raise BrokenError(f"nothing can go on: {state}")
        if state.turn_phase - state.turns_taken > 1:
            raise BrokenError("turn is two phases ahead of who waits for it")
        for following in nexts:
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return len(seen)


RINGS = [
    Ring(num_stages=2, num_tiles=3, num_blocks=2, lead=1, gathers=True),
    Ring(num_stages=2, num_tiles=2, num_blocks=3, lead=0, gathers=True),
    Ring(num_stages=3, num_tiles=2, num_blocks=3, lead=2, gathers=True),
    Ring(num_stages=3, num_tiles=3, num_blocks=2, lead=1, gathers=True),
    Ring(num_stages=4, num_tiles=2, num_blocks=5, lead=1, gathers=False),
    Ring(num_stages=3, num_tiles=3, num_blocks=4, lead=2, gathers=False),
    Ring(num_stages=2, num_tiles=3, num_blocks=1, lead=1, gathers=False, waits_ahead=True),
    Ring(num_stages=2, num_tiles=3, num_blocks=3, lead=1, gathers=False, waits_ahead=True),
    Ring(num_stages=3, num_tiles=3, num_blocks=4, lead=2, gathers=False, waits_ahead=True),
    Ring(num_stages=4, num_tiles=3, num_blocks=5, lead=1, gathers=False, waits_ahead=True),
    Ring(num_stages=4, num_tiles=3, num_blocks=4, lead=3, gathers=False, waits_ahead=True),
    Ring(num_stages=4, num_tiles=4, num_blocks=2, lead=3, gathers=False, waits_ahead=True),
]


@pytest.mark.parametrize("ring", RINGS, ids=str)
def test_no_order_of_steps_reads_or_writes_early_or_stops(ring: Ring) -> None:
    assert explore(ring) > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full_count": NUM_COPIERS}, "read before it has landed|too many"),
        ({"full_count": 1}, "read before it has landed|too many"),
        ({"full_count": NUM_COPIERS + 2}, "nothing can go on"),
        ({"empty_count": 1}, "still to be read"),
        ({"releases_early": True}, "still to be read"),
    ],
)
def test_the_model_tells_wrong_counts_from_right_ones(change: dict[str, int], message: str) -> None:
    with pytest.raises(BrokenError, match=message):
        explore(replace(RINGS[0], **change))  # type: ignore[arg-type]
