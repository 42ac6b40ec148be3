"""The ranks' heartbeats in the store, and for how long each has been the same.

A rank's beat is a number that rises while it lives, then one of the words below.
"""

from typing import Any

from torch._C._distributed_c10d import Store

DONE = b"done"  # has closed
LEFT = b"left"  # its program has ended without closing
ENDED = frozenset({DONE, LEFT})
TOLD = b"told"  # knows of the failure


class Heartbeats:
    """What this rank says and has heard; only `say` and `hear` call the store.

    said: this rank's beat. heard: the beats of the ranks that have started, this one's included,
    as of one time: it is replaced as a whole.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store: Any = store
        self.rank, self.world_size = rank, world_size
        self.said = b""
        self.heard: dict[int, bytes] = {}
        self._counted: dict[int, bytes] = {}
        self._counted_at = 0
        self._silent_ticks: dict[int, int] = {}
        self._ended_ticks: dict[int, int] = {}

    def say(self, beat: bytes) -> None:
        """Make this rank's beat known."""
        self._store.set(self._key(self.rank), beat.decode())
        self.said = beat

    def hear(self, tick: int) -> None:
        """Read the beats of all ranks, without waiting for those that have not started.

        tick: of the caller's clock; however often it asks, a beat ages once a tick.
        """
        seen = [r for r in range(self.world_size) if r in self.heard]
        new = [r for r in range(self.world_size) if r not in self.heard]
        seen += [r for r in new if self._store.check([self._key(r)])]
        keys = [self._key(r) for r in seen]
        if self._store.has_extended_api():
            values = self._store.multi_get(keys)
        else:
            values = [self._store.get(key) for key in keys]
        heard = dict(zip(seen, values, strict=True))
        if tick != self._counted_at:
            self._count(heard)
            self._counted_at = tick
        self.heard = heard

    def silent_ticks(self, rank: int) -> int:
        """For how many ticks in a row a living rank's beat has not risen."""
        return self._silent_ticks.get(rank, 0)

    def ended_ticks(self, rank: int) -> int:
        """For how many ticks in a row a rank has been known to have ended well."""
        return self._ended_ticks.get(rank, 0)

    def _count(self, heard: dict[int, bytes]) -> None:
        for rank, beat in heard.items():
            is_silent = self._counted.get(rank) == beat and beat not in ENDED | {TOLD}
            self._silent_ticks[rank] = self.silent_ticks(rank) + 1 if is_silent else 0
            self._ended_ticks[rank] = self.ended_ticks(rank) + 1 if beat in ENDED else 0
        self._counted = heard

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"
