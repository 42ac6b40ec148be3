"""Several programs of one interpreted launch at a time, so that they can wait for each other.

The interpreter runs programs one after another. Here each is a thread, of which one runs at a time;
it hands over where it reads the clock, which every wait does in every round. Time passes by such
reads alone, so a run is the same each time, and a wait that is in vain ends soon.
"""

import inspect
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import triton.language as tl  # patched, through this module's functions, as the kernels' is
import triton.runtime.interpreter as interpreter

NANOSECONDS_A_READ = 1_000_000
assert tl is not None


class Programs:
    """The programs of one launch, run as threads by turns in a random order from a seed.

    is_held: of a program and the reads of the clock so far, whether it may not run yet, as long as
    others can.
    """

    def __init__(
        self, program: Callable[..., None], seed: int, is_held: Callable[[int, int], bool]
    ) -> None:
        self._program, self._random, self._is_held = program, random.Random(seed), is_held
        self._arguments: list[dict[str, Any]] = []
        self._turn = threading.Condition()
        self._running = -1
        self._live: list[int] = []
        self._failures: list[BaseException] = []
        self.reads = 0

    def add(self, **arguments: Any) -> None:
        self._arguments.append(arguments)

    def run(self) -> None:
        self._live = list(range(len(self._arguments)))
        threads = [threading.Thread(target=self._run, args=(i,)) for i in self._live]
        for thread in threads:
            thread.start()
        with self._turn:
            self._choose()
        for thread in threads:
            thread.join()
        if self._failures:
            raise self._failures[0]

    def read_clock(self) -> int:
        """Let another program run; nanoseconds."""
        self.reads += 1
        me = self._running
        with self._turn:
            self._choose()
            self._await_turn(me)
        return self.reads * NANOSECONDS_A_READ

    def _run(self, index: int) -> None:
        with self._turn:
            self._await_turn(index)
        try:
            if not self._failures:
                self._program(**self._arguments[index])
        except BaseException as error:
            self._failures.append(error)
        with self._turn:
            self._live.remove(index)
            self._choose()

    def _choose(self) -> None:
        ready = [i for i in self._live if not self._is_held(i, self.reads)]
        ready = ready or self._live
        self._running = self._random.choice(ready) if ready else -1
        self._turn.notify_all()

    def _await_turn(self, index: int) -> None:
        self._turn.wait_for(lambda: self._running == index)
        interpreter.interpreter_builder.set_grid_idx(index, 0, 0)


def run_several_programs(
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    *,
    seed: int = 0,
    is_held: Callable[[int, int], bool] = lambda program, reads: False,
) -> None:
    """From now on a launch of a resident grid has `count` programs, which run by turns."""
    current: list[Programs] = []

    class Executor(interpreter.GridExecutor):  # type: ignore[misc]
        def __init__(self, fn: Any, *arguments: Any) -> None:
            super().__init__(fn, *arguments)
            (num_programs,) = self.grid
            programs = Programs(fn, seed, is_held)
            current[:] = [programs]

            def add(**arguments: Any) -> None:
                programs.add(**arguments)
                if len(programs._arguments) == num_programs:
                    programs.run()

            add.__signature__ = inspect.signature(fn)  # type: ignore[attr-defined]
            self.fn = add

    monkeypatch.setattr(interpreter, "GridExecutor", Executor)
    monkeypatch.setattr("ep_runtime.kernels.resident_launch._INTERPRETED_PROGRAMS", count)
    monkeypatch.setattr(
        "ep_runtime.kernels.resident_barrier.read_clock", lambda: current[0].read_clock()
    )
