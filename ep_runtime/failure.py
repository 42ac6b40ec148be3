"""One rank's failure becomes every rank's, within seconds and by name.

Every rank has a watchdog thread that beats its heartbeat in the store and reads the others'. The
rank that fails first writes the abort record; a rank whose heartbeat has stopped is recorded by
whoever notices. The thread beats while the main thread compiles or loads, so slow is not dead.

A rank that ends well says so, also where its program ends without `close`. Nobody misses it, until
a host wait finds that it waits for that rank: then that is the failure.

A rank learns of a record in `check()`, which every host wait polls. On CUDA the thread also
aborts the communicators, so that a blocked main thread wakes. A main thread that has not noticed
after `exit_grace_s` is ended by the thread, with the cause on stderr.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import Store

from ep_runtime.kernels.errors import RankFailure

_RECORD = "abort"
_DONE = b"done"  # has closed
_LEFT = b"left"  # its program has ended without closing
_ENDED = frozenset({_DONE, _LEFT})
_TOLD = b"told"  # knows of the failure
_MAX_REASON_CHARS = 2000


@dataclass(frozen=True)
class FailureLimits:
    """How fast failures spread.

    poll_interval_s: between heartbeats. stale_after_s: a rank without a heartbeat for so long is
    gone. exit_grace_s: how long a main thread may stay blocked after a failure is known.
    farewell_s: how long a failed rank stays for the others to read why. ended_grace_s: how long a
    wait goes on for a rank that has ended: what that rank sent may still be on its way.
    """

    poll_interval_s: float = 0.5
    stale_after_s: float = 12.0
    exit_grace_s: float = 10.0
    farewell_s: float = 4.0
    ended_grace_s: float = 4.0


class FailureWatch:
    """This rank's heartbeat, its view of the others', and the abort record.

    store: the world's own key space, a client that no one blocks on. store_host: who hosts the
    store, in words, for the message when it is gone. on_failure: called once, by the thread.
    is_delivered: the main thread knows of the failure.
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
        self._failure: str | None = None
        self._failed_at = self._closing_at = 0.0
        self.is_delivered = False
        self._beat_value = b"0"
        self._beats: dict[int, bytes] = {}
        self._silent_polls: dict[int, int] = {}
        self._ended_polls: dict[int, int] = {}
        self._poll_started_at: float | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if world_size > 1:
            self._store.set(self._beat_key(rank), "0")
            self._thread = threading.Thread(
                target=self._watch, name="ep_runtime failure watch", daemon=True
            )
            self._thread.start()

    @property
    def failure(self) -> str | None:
        """Who failed and why; None while all is well."""
        return self._failure

    def check(self) -> None:
        """Raise RankFailure once some rank has failed; cheap, never waits."""
        if self._failure is None:
            started = self._poll_started_at
            limit = 2 * self.limits.stale_after_s
            if started is not None and time.monotonic() - started > limit:
                self._fail(f"{self._store_host} has not answered for {limit:g} s")
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
            polls = self._ended_polls.get(rank, 0)
            if rank != self.rank and polls * self.limits.poll_interval_s >= grace_s:
                left = self._beats.get(rank) == _LEFT
                how = "has ended without closing its context" if left else "has closed its context"
                self._record(
                    f"rank {rank} {how}, and rank {self.rank} still waits for it in a collective; "
                    f"every rank makes the same calls in the same order"
                )
                self.check()

    def report(self, error: BaseException) -> None:
        """Record this rank's failure for all; the first record wins, later ones change nothing."""
        if self._failure is None:
            reason = f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]
            self._record(f"rank {self.rank} failed: {reason}")
        self.is_delivered = True

    def close(self, *, must_outlive_others: bool, at_exit: bool = False) -> None:
        """Stop watching. A rank that ends well is no longer missed by the others.

        must_outlive_others: this rank hosts the store: wait until all others have ended too, for
        as long as their heartbeats go on. at_exit: the program ends without closing its context.
        After a failure, stays for at most `farewell_s` until all others know.
        """
        if self._thread is None:
            return
        self._closing_at = time.monotonic()
        if self._failure is None:
            self._set_beat(_LEFT if at_exit else _DONE)
            if must_outlive_others:
                self._wait_for_others(_ENDED, math.inf)
        if self._failure is not None:
            self._wait_for_others(_ENDED | {_TOLD}, self.limits.farewell_s)
        self._stop.set()
        self._thread.join()
        self._thread = None

    def _wait_for_others(self, values: frozenset[bytes], timeout_s: float) -> None:
        """Until every other rank's beat is one of `values`, a failure is known, or time is up."""
        had_failed = self._failure is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and (had_failed or self._failure is None):
            try:
                beats = self._read_beats()
            except RuntimeError:
                return
            # After a failure, a rank that never started is not waited for.
            expected = beats if had_failed else range(self.world_size)
            others = [r for r in expected if r != self.rank]
            if all(beats.get(r) in values or self._is_stale(r) for r in others):
                return
            time.sleep(0.02)

    def _beat_key(self, rank: int) -> str:
        return f"beat/{rank}"

    def _set_beat(self, value: bytes) -> None:
        with self._lock:
            self._beat_value = value
            try:
                self._store.set(self._beat_key(self.rank), value.decode())
            except RuntimeError:
                return  # the store is gone; the thread says so

    def _read_beats(self) -> dict[int, bytes]:
        """The beats of the ranks that have started, without waiting for those that have not."""
        seen = [r for r in range(self.world_size) if r in self._beats]
        new = [r for r in range(self.world_size) if r not in self._beats]
        seen += [r for r in new if self._store.check([self._beat_key(r)])]
        keys = [self._beat_key(r) for r in seen]
        store: Any = self._store
        if store.has_extended_api():
            values = store.multi_get(keys)
        else:
            values = [store.get(key) for key in keys]
        return dict(zip(seen, values, strict=True))

    def _is_stale(self, rank: int) -> bool:
        # Counted in polls, not by the clock: after the whole machine was asleep nobody is missed.
        silent_s = self._silent_polls.get(rank, 0) * self.limits.poll_interval_s
        return silent_s >= self.limits.stale_after_s

    def _watch(self) -> None:
        beat = 0
        while not self._stop.is_set():
            beat += 1
            try:
                self._poll_started_at = time.monotonic()
                self._poll(beat)
            except RuntimeError as error:
                if not self._stop.is_set() and not self._closing_at:
                    self._fail(f"{self._store_host} is gone: {_first_line(error)}")
            finally:
                self._poll_started_at = None
            self._end_blocked_process()
            self._stop.wait(self.limits.poll_interval_s)

    def _poll(self, beat: int) -> None:
        with self._lock:
            if self._beat_value not in _ENDED | {_TOLD}:
                self._beat_value = str(beat).encode()
                self._store.set(self._beat_key(self.rank), str(beat))
        if self._failure is not None:
            return
        if self._store.check([_RECORD]):
            self._fail(json.loads(self._store.get(_RECORD)))
            self._set_beat(_TOLD)
            return
        for rank, value in self._read_beats().items():
            is_silent = self._beats.get(rank) == value and value not in _ENDED | {_TOLD}
            self._silent_polls[rank] = self._silent_polls.get(rank, 0) + 1 if is_silent else 0
            self._ended_polls[rank] = self._ended_polls.get(rank, 0) + 1 if value in _ENDED else 0
            self._beats[rank] = value
            if rank != self.rank and self._is_stale(rank):
                self._record(
                    f"rank {rank} is gone: no heartbeat for {self.limits.stale_after_s:g} s; it "
                    f"was killed or its machine cannot be reached"
                )
                return

    def _record(self, failure: str) -> None:
        """Write the record if there is none, and take whichever is there as the cause."""
        try:
            failure = json.loads(self._store.compare_set(_RECORD, "", json.dumps(failure)))
        except RuntimeError:
            self._fail(failure)  # the store is gone with its host: this rank's own view has to do
        else:
            self._fail(failure)
            self._set_beat(_TOLD)

    def _fail(self, failure: str) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failed_at = time.monotonic()
            self._failure = failure
        self._on_failure()

    def _end_blocked_process(self) -> None:
        if self._failure is None or (self.is_delivered and not self._closing_at):
            return
        since = max(self._failed_at, self._closing_at)
        if time.monotonic() - since < self.limits.exit_grace_s + self.limits.farewell_s:
            return
        sys.stderr.write(
            f"ep_runtime: rank {self.rank} ends, blocked since another rank failed: "
            f"{self._failure}\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
