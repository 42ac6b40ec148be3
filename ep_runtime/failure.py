"""One rank's failure becomes every rank's, within seconds and by name.

The rank that fails first writes the abort record into the store; a rank whose heartbeat has stopped
is recorded by whoever notices. Heartbeats go on while the main thread compiles or loads, so slow is
not dead. A rank that ends well says so, also where its program ends without `close`. Nobody misses
it, until a host wait finds that it waits for that rank: then that is the failure.

A call on the store may block for ever (its host is frozen, or the network is gone), and so may
aborting a communicator. Each rank therefore has three daemon threads:

- the messenger makes every call on the store: it beats, reads the others' beats and the record;
- the clock counts the messenger's poll intervals. A messenger that has not come back for as many as
  `stale_after_s` holds is a failure of the store's host. It ends the process, with the cause on
  stderr, where the main thread has not noticed a failure after `exit_grace_s`;
- the aborter calls `on_failure`, so that what the device waits for ends.

The main thread learns of a failure in `check()`, which every host wait polls. Here it waits only
for word from these threads, which a silent store cannot hold up.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from ep_runtime.heartbeats import DONE, ENDED, LEFT, TOLD, Heartbeats
from ep_runtime.kernels.errors import RankFailure, first_line

_RECORD = "abort"
_MAX_REASON_CHARS = 2000
_CLOSING_POLL_S = 0.02


@dataclass(frozen=True)
class FailureLimits:
    """How fast failures spread.

    poll_interval_s: between heartbeats. stale_after_s: a rank without a heartbeat, or a store
    without an answer, for so long is gone. exit_grace_s: how long a main thread may stay blocked
    after a failure is known. farewell_s: how long a rank that closes after a failure stays for the
    others to read why. ended_grace_s: how long a wait goes on for a rank that has ended: what that
    rank sent may still be on its way.
    """

    poll_interval_s: float = 0.5
    stale_after_s: float = 12.0
    exit_grace_s: float = 5.0
    farewell_s: float = 4.0
    ended_grace_s: float = 4.0


class FailureWatch:
    """This rank's heartbeat, its view of the others', and the abort record.

    store: the world's own key space, a client that no one else uses. store_host: who hosts the
    store, in words, for the message when it is gone. on_failure: called once, on a thread of its
    own, when this rank learns that one of several has failed; it may block, and `close` waits for
    it for at most `farewell_s`. is_delivered: the main thread knows of the failure.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        store_host: str,
        limits: FailureLimits,
        on_failure: Callable[[], None],
    ) -> None:
        self.rank, self.world_size, self.limits = rank, world_size, limits
        self._store, self._store_host, self._on_failure = store, store_host, on_failure
        self._beats = Heartbeats(store, rank=rank, world_size=world_size)
        self._failure: str | None = None
        self.is_delivered = False
        self._to_record: str | None = None  # for the messenger to write
        self._ending: bytes | None = None  # this rank's last beat, once it closes
        # Time is counted in ticks of the clock: nobody is missed after the process was stopped.
        self._tick = self._answered_at = self._failed_at = 0
        self._is_store_gone = False
        self._wake, self._known, self._stop = (threading.Event() for _ in range(3))
        self._changed = threading.Condition()
        self._messenger = _daemon(self._exchange_messages, "messenger")
        self._clock = _daemon(self._count_ticks, "clock")
        self._aborter = _daemon(self._abort_when_known, "aborter")
        self._is_watching = world_size > 1
        if self._is_watching:
            for thread in (self._messenger, self._clock, self._aborter):
                thread.start()

    @property
    def failure(self) -> str | None:
        """Who failed and why; None while all is well."""
        return self._failure

    def check(self) -> None:
        """Raise RankFailure once some rank has failed; cheap, never waits."""
        if self._failure is not None:
            self.is_delivered = True
            raise RankFailure(self._failure)

    def check_wait(self, ranks: Iterable[int], waited_s: float) -> None:
        """As `check`; also fails where one of `ranks`, waited for so long, has ended."""
        self.check()
        grace_s = self.limits.ended_grace_s
        if waited_s < grace_s:
            return
        for rank in ranks:
            ended_s = self._beats.ended_ticks(rank) * self.limits.poll_interval_s
            if rank != self.rank and ended_s >= grace_s:
                left = self._beats.heard.get(rank) == LEFT
                how = "has ended without closing its context" if left else "has closed its context"
                self._record(
                    f"rank {rank} {how}, and rank {self.rank} still waits for it in a collective; "
                    f"every rank makes the same calls in the same order"
                )
                self.check()

    def report(self, error: BaseException) -> None:
        """Record this rank's failure for all; the first record wins, later ones change nothing.

        Where the store does not answer, returns once that is known: within `stale_after_s`.
        """
        if self._failure is None:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
            self._record(f"rank {self.rank} failed: {reason}")
        self.is_delivered = True

    def close(self, *, must_outlive_others: bool, at_exit: bool = False) -> None:
        """Stop watching. A rank that ends well is no longer missed by the others.

        must_outlive_others: this rank hosts the store: wait until all others have ended too, for
        as long as their heartbeats go on. at_exit: the program ends without closing its context.
        After a failure, stays for at most `farewell_s` until all others know; not at all where the
        store does not answer.
        """
        if not self._is_watching:
            return
        self._is_watching = False
        self._ending = LEFT if at_exit else DONE
        if self._failure is None:
            needed = range(self.world_size) if must_outlive_others else [self.rank]
            self._wait_until(lambda: self._failure is not None or self._all_say(ENDED, needed))
        deadline = time.monotonic() + self.limits.farewell_s
        if self._failure is not None:  # and a rank that never started is not waited for
            self._wait_until(
                lambda: self._all_say(ENDED | {TOLD}, {self.rank, *self._beats.heard}),
                self.limits.farewell_s,
            )
        for event in (self._stop, self._wake, self._known):
            event.set()
        for thread in (self._clock, self._aborter, self._messenger):
            if thread is not self._messenger or not self._is_silent():  # it may never come back
                thread.join(max(deadline - time.monotonic(), 0))

    def _record(self, failure: str) -> None:
        """Have the record written if there is none; whichever is there is the cause."""
        if self.world_size == 1:
            self._fail(failure)
        elif self._is_watching:
            self._to_record = failure
            self._wait_until(lambda: self._failure is not None)

    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for word from the other threads; ends too once the store is known not to answer."""

        def is_over() -> bool:
            is_silent = self._failure is not None and self._is_silent()
            return is_so() or self._is_store_gone or is_silent

        self._wake.set()
        with self._changed:
            self._changed.wait_for(is_over, timeout_s)

    def _all_say(self, words: frozenset[bytes], ranks: Iterable[int]) -> bool:
        """Whether all of these ranks that are still there have been heard to say such a word."""
        heard = self._beats.heard
        return all(heard.get(rank) in words or self._is_stale(rank) for rank in ranks)

    def _is_stale(self, rank: int) -> bool:
        silent_s = self._beats.silent_ticks(rank) * self.limits.poll_interval_s
        return silent_s >= self.limits.stale_after_s

    def _fail(self, failure: str) -> None:
        with self._changed:
            if self._failure is not None or self._stop.is_set():
                return
            self._failed_at = self._tick
            self._failure = failure
            self._changed.notify_all()
        self._known.set()

    def _abort_when_known(self) -> None:
        """The aborter."""
        self._known.wait()
        if self._failure is not None:
            self._on_failure()

    def _count_ticks(self) -> None:
        """The clock. Waits for no other thread, and never calls the store."""
        while not self._stop.wait(self.limits.poll_interval_s):
            self._tick += 1
            self._wake.set()
            if self._failure is None and self._is_silent() and not self._is_store_gone:
                limit = f"{self.limits.stale_after_s:g} s"
                self._fail(f"{self._store_host} has not answered for {limit}")
                self._to_record = self._failure  # for those whom the store answers again
            self._end_blocked_process()

    def _seconds_since(self, tick: int) -> float:
        return (self._tick - tick) * self.limits.poll_interval_s

    def _is_silent(self) -> bool:
        return self._seconds_since(self._answered_at) >= self.limits.stale_after_s

    def _end_blocked_process(self) -> None:
        if self._failure is None or self.is_delivered or self._ending is not None:
            return  # `close` ends by itself
        if self._seconds_since(self._failed_at) < self.limits.exit_grace_s:
            return
        sys.stderr.write(
            f"ep_runtime: rank {self.rank} ends, blocked since another rank failed: "
            f"{self._failure}\n"
        )
        sys.stderr.flush()
        os._exit(1)

    def _exchange_messages(self) -> None:
        """The messenger, the only one that calls the store."""
        while not self._stop.is_set() and not self._is_store_gone:
            self._wake.clear()
            try:
                self._poll()
            except RuntimeError as error:
                if self._beats.said not in ENDED:
                    gone = f"{self._store_host} is gone: {first_line(error)}"
                    self._fail(self._to_record or gone)  # this rank's own view has to do
                self._is_store_gone = True
            self._answered_at = self._tick
            with self._changed:
                self._changed.notify_all()
            self._wake.wait(_CLOSING_POLL_S if self._ending is not None else None)

    def _poll(self) -> None:
        if self._to_record is not None:
            self._write_record(self._to_record)
        elif self._failure is None and self._store.check([_RECORD]):
            self._fail(json.loads(self._store.get(_RECORD)))
        beat = self._ending or str(self._tick).encode()
        self._beats.say(beat if self._failure is None else TOLD)
        self._beats.hear(self._tick)
        gone = [r for r in self._beats.heard if r != self.rank and self._is_stale(r)]
        if self._failure is None and gone:
            self._write_record(
                f"rank {gone[0]} is gone: no heartbeat for {self.limits.stale_after_s:g} s; it "
                f"was killed or its machine cannot be reached"
            )
            self._wake.set()  # to say at once that this rank knows

    def _write_record(self, failure: str) -> None:
        record = self._store.compare_set(_RECORD, "", json.dumps(failure))
        self._to_record = None
        self._fail(json.loads(record))


def _daemon(target: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=target, name=f"ep_runtime failure {name}", daemon=True)
