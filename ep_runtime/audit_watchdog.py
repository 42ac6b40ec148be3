"""A bound on how long a step of an audit may take, also where the host itself is held up.

A kernel that never ends cannot be ended by its process, and whoever waits for it waits for ever:
the watchdog's thread says what hung, and ends the process.
"""

import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Watchdog:
    """Ends the process with status 1 where no step has begun for `limit_s` seconds.

    on_hang: called before that, in the watchdog's thread, with the step's name and the limit.
    Use as a context manager around all steps.
    """

    def __init__(self, limit_s: float, on_hang: Callable[[str, float], None]) -> None:
        self.limit_s = limit_s
        self._on_hang = on_hang
        self._step = "start"
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="audit watchdog", daemon=True)

    def step(self, name: str) -> None:
        """A new step begins, so the one before has ended."""
        self._step, self._began = name, time.monotonic()

    def __enter__(self) -> Self:
        self.step(self._step)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(min(0.2, self.limit_s / 4)):
            if time.monotonic() - self._began > self.limit_s:
                try:
                    self._on_hang(self._step, self.limit_s)
                finally:
                    os._exit(1)
