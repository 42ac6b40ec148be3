"""Happens-before by vector clocks, and which accesses race."""

import pytest

from ep_runtime.kernels.interpreted_accesses import merge_addresses
from ep_runtime.stream_history import AccessKind, StreamHistory

READ, WRITE, FREE = AccessKind.READ, AccessKind.WRITE, AccessKind.FREE


class _History(StreamHistory):
    def do(self, stream: str, kind: AccessKind, start: int, stop: int, storage: int = 1) -> None:
        operation = self.issue(stream, f"{kind} of {stream}")
        self.access(operation, kind, (storage, f"storage {storage}"), start, stop)

    def order(self, first: str, second: str) -> None:
        self.wait(second, self.mark(first))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(found.first.name, found.second.name) for found in self.unordered]


@pytest.mark.parametrize(
    ("first", "second", "races"),
    [
        (READ, READ, False),
        (READ, WRITE, True),
        (WRITE, READ, True),
        (WRITE, WRITE, True),
        (READ, FREE, True),
        (WRITE, FREE, True),
    ],
)
def test_two_streams_race_unless_both_read(
    first: AccessKind, second: AccessKind, races: bool
) -> None:
    history = _History()
    history.do("a", first, 0, 8)
    history.do("b", second, 4, 12)
    assert history.pairs == ([(f"{first} of a", f"{second} of b")] if races else [])
    if races:
        assert (history.unordered[0].start, history.unordered[0].stop) == (4, 8)


def test_bytes_that_only_touch_and_other_storages_do_not_race() -> None:
    history = _History()
    history.do("a", WRITE, 0, 8)
    history.do("b", WRITE, 8, 16)
    history.do("b", WRITE, 0, 8, storage=2)
    assert history.pairs == []


def test_an_event_orders_what_came_before_its_recording_and_no_more() -> None:
    history = _History()
    history.do("a", WRITE, 0, 8)
    mark = history.mark("a")
    history.do("a", WRITE, 8, 16)
    history.wait("b", mark)
    history.do("b", READ, 0, 8)
    assert history.pairs == []
    history.do("b", READ, 8, 16)
    assert history.pairs == [("write of a", "read of b")]


def test_order_is_transitive_over_a_third_stream_and_never_backward() -> None:
    history = _History()
    history.do("a", WRITE, 0, 8)
    history.order("a", "b")
    history.order("b", "c")
    history.do("c", WRITE, 0, 8)
    assert history.pairs == []
    history.do("a", READ, 0, 8)
    assert history.pairs == [("write of c", "read of a")]


def test_what_a_later_access_covers_is_still_found_through_it() -> None:
    history = _History()
    history.do("a", READ, 0, 16)
    history.do("a", WRITE, 0, 8)  # takes the place of nothing: it covers half
    history.order("a", "b")
    history.do("b", WRITE, 0, 16)  # takes the place of both
    history.do("c", READ, 4, 5)
    assert history.pairs == [("write of b", "read of c")]


def test_a_pair_of_names_is_reported_once() -> None:
    history = _History()
    for _ in range(3):
        history.do("a", WRITE, 0, 8)
        history.do("b", WRITE, 0, 8)
    assert history.pairs == [("write of a", "write of b"), ("write of b", "write of a")]


def test_a_launch_that_must_be_alone_has_nothing_before_beside_or_behind_it_unordered() -> None:
    history = _History()
    history.do("a", READ, 0, 8)
    history.require_alone("m", "resident launch")
    assert [(f.first_kind, f.second_kind) for f in history.unordered] == [("beside", "alone")]
    history.end_alone("m")
    history.order("m", "b")
    history.do("b", READ, 0, 8)
    assert len(history.unordered) == 1, "b waited for it"
    history.do("c", READ, 0, 8)
    assert [(f.first_kind, f.second_kind) for f in history.unordered[1:]] == [("alone", "beside")]
    assert "needs the device to itself" in str(history.unordered[1])


def test_nothing_is_found_beside_a_launch_that_all_streams_are_joined_around() -> None:
    history = _History()
    history.do("a", READ, 0, 8)
    history.order("a", "m")
    history.require_alone("m", "resident launch")
    history.end_alone("m")
    history.order("m", "a")
    history.do("a", WRITE, 0, 8)
    assert history.unordered == []


def test_addresses_become_intervals() -> None:
    import numpy as np

    assert merge_addresses(np.array([8, 0, 4, 20]), 4) == [(0, 12), (20, 24)]
    assert merge_addresses(np.array([], dtype=np.int64), 4) == []
