"""Waiting for a collective on the host: slices run out, works break, and both at once."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ep_runtime.all2all import collectives
from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import Collective, gather_integers, gather_texts
from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.errors import RankFailure
from tests.harness import run_ranks


class ScriptedWork:
    """A gloo work: waits time out `slices` times, the last of them as it completes."""

    def __init__(self, slices: int, breaks: bool = False) -> None:
        self.slices, self.breaks = slices, breaks

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self.slices > 0:
            assert timeout is not None, "would block"
            self.slices -= 1
            raise RuntimeError("Operation timed out!")
        if self.breaks:
            raise RuntimeError("Connection closed by peer")
        return True

    def is_completed(self) -> bool:
        return self.slices == 0


def alone(failure_after: int = 10**9) -> EPGroup:
    """A group whose check raises after so many calls."""
    calls = iter(range(10**9))

    def check() -> None:
        if next(calls) >= failure_after:
            raise RankFailure("rank 1 failed: boom")

    return EPGroup(None, 0, 2, torch.device("cpu"), check)


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_join_returns_when_the_work_completes_between_slices(slices: int) -> None:
    Collective(alone(), ScriptedWork(slices), waits_on_host=True).join()


def test_join_of_a_broken_work_gives_the_recorded_cause() -> None:
    pending = Collective(alone(failure_after=5), ScriptedWork(1, breaks=True), waits_on_host=True)
    with pytest.raises(RankFailure, match="rank 1 failed: boom"):
        pending.join()


def test_join_of_a_broken_work_without_a_record_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collectives, "NAMING_WAIT_S", 0.1)
    with pytest.raises(RankFailure, match="no rank reported why: Connection closed by peer"):
        Collective(alone(), ScriptedWork(1, breaks=True), waits_on_host=True).join()


def test_join_ends_when_a_rank_fails_while_the_work_never_completes() -> None:
    with pytest.raises(RankFailure, match="rank 1 failed: boom"):
        Collective(alone(failure_after=4), ScriptedWork(10**9), waits_on_host=True).join()


def waits(seconds: list[float]) -> EPGroup:
    """A group whose `check_wait` raises from 0.3 s on, and keeps what it was called with."""

    def check_wait(waited_s: float) -> None:
        seconds.append(waited_s)
        if waited_s > 0.25:
            raise RankFailure("rank 1 has closed its context")

    return EPGroup(None, 0, 2, torch.device("cpu"), check_wait=check_wait)


def test_a_wait_says_how_long_it_waits_and_ends_when_a_rank_has_ended() -> None:
    seconds: list[float] = []
    with pytest.raises(RankFailure, match="rank 1 has closed its context"):
        Collective(waits(seconds), ScriptedWork(20), waits_on_host=True).join()
    assert seconds == pytest.approx([0.1, 0.2, 0.3])


def test_a_work_broken_by_a_rank_that_has_ended_names_it() -> None:
    broken = Collective(waits([]), ScriptedWork(0, breaks=True), waits_on_host=True)
    with pytest.raises(RankFailure, match="rank 1 has closed its context"):
        broken.join()


def gather_both(ctx: EPContext) -> tuple[tuple[int, ...], tuple[str, ...]]:
    text = "é" * ctx.rank
    return gather_integers(-ctx.rank, ctx.ep_group), gather_texts(text, ctx.ep_group)


@pytest.mark.parametrize("size", [1, 3])
def test_integers_and_texts_are_gathered_in_rank_order(size: int) -> None:
    expected = (tuple(-r for r in range(size)), tuple("é" * r for r in range(size)))
    config = ParallelConfig(dp_size=size, device="cpu")
    assert run_ranks(gather_both, config) == [expected] * size


def backends_of(ctx: EPContext) -> list[str | None]:
    return [
        collectives.device_backend(ctx.ep_group, "cpu"),
        collectives.device_backend(ctx.ep_group, "mps"),
        dist.get_backend_config(ctx.ep_group.process_group),
    ]


def test_the_backend_for_a_device_type_is_known() -> None:
    cpu, other, _ = run_ranks(backends_of, ParallelConfig(dp_size=2, device="cpu"))[0]
    assert (cpu, other) == ("gloo", None)


def test_a_wait_that_runs_out_names_the_key_that_bounds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "NAMING_WAIT_S", 0.0)
    alone = EPGroup(None, 0, 2, torch.device("cpu"))
    late = RuntimeError("[unbound_buffer.cc] Timed out waiting 5000ms for send operation")
    with pytest.raises(RankFailure, match=r"parallel\.timeout_s; raise it"):
        collectives.raise_rank_failure(alone, late)
    with pytest.raises(RankFailure, match="no rank reported why"):
        collectives.raise_rank_failure(alone, RuntimeError("Connection closed by peer"))
