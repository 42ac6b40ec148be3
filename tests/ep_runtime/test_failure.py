"""One rank's failure ends all ranks in bounded time, by name; a slow rank is no failure."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, TCPStore

from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.failure import FailureLimits, FailureWatch
from ep_runtime.kernels.errors import RankFailure
from ep_runtime.rendezvous import Rendezvous
from tests.all2all.contract import ContractCase, run_layer, seeded_rows
from tests.ep_runtime.program_ranks import run_programs
from tests.harness import (
    Outcome,
    connect,
    process_outcomes,
    rank_outcomes,
    run_processes,
    run_ranks,
    store_address,
)

ROOT = Path(__file__).parents[2]
QUICK = FailureLimits(
    poll_interval_s=0.2, stale_after_s=3.0, exit_grace_s=2.0, farewell_s=2.0, ended_grace_s=1.0
)


def ranks(dp_size: int) -> ParallelConfig:
    return ParallelConfig(dp_size=dp_size, device="cpu", all2all_backend="naive")


def names(outcome: Outcome, text: str) -> bool:
    return isinstance(outcome.error, RankFailure) and text in str(outcome.error)


def wait_for_each_other_but_rank(ctx: EPContext, failing: int, how: str) -> None:
    """Every rank agrees on row counts for ever; `failing` stops after the first time."""
    for attempt in range(10_000):
        ctx.rows_per_rank(attempt)
        if ctx.rank == failing and how == "raise":
            raise ValueError("boom")
        if ctx.rank == failing and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("failing", [0, 1])
def test_all_ranks_name_the_rank_that_raised(failing: int) -> None:
    outcomes = rank_outcomes(wait_for_each_other_but_rank, ranks(3), failing, "raise", timeout=30)
    assert isinstance(outcomes[failing].error, ValueError)
    others = [outcome for outcome in outcomes if outcome.rank != failing]
    assert all(names(o, f"rank {failing} failed: ValueError: boom") for o in others), outcomes
    assert max(outcome.seconds for outcome in outcomes) < 20


def run_layers_until_rank_1_raises(ctx: EPContext, backend: str) -> None:
    case = ContractCase("failure", (3, 5, 2))
    own = seeded_rows(case, ctx.dp_rank, 0, ctx.device)
    for layer in range(1000):
        run_layer(ctx, ctx.backend(backend, case.shape()), case, own)
        if ctx.rank == 1 and layer == 2:
            raise KeyError("lost")


@pytest.mark.parametrize("backend", ["naive", "all_to_all"])
def test_ranks_inside_a_layer_name_the_rank_that_raised(backend: str) -> None:
    outcomes = rank_outcomes(run_layers_until_rank_1_raises, ranks(3), backend, timeout=30)
    assert isinstance(outcomes[1].error, KeyError)
    assert all(names(outcomes[r], "rank 1 failed: KeyError: 'lost'") for r in (0, 2)), outcomes
    assert max(outcome.seconds for outcome in outcomes) < 20


def test_survivors_name_a_killed_rank() -> None:
    outcomes = rank_outcomes(
        wait_for_each_other_but_rank, ranks(3), 1, "kill", timeout=60, limits=QUICK
    )
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert all(names(outcomes[r], "rank 1 is gone") for r in (0, 2)), outcomes
    assert max(outcome.seconds for outcome in outcomes) < 30


def wait_or_block_while_rank_1_is_killed(ctx: EPContext) -> None:
    ctx.rows_per_rank(1)
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if ctx.rank == 2:
        time.sleep(60)
    ctx.rows_per_rank(1)


def test_all_ranks_end_within_20_seconds_of_a_kill_by_default_even_a_blocked_one() -> None:
    waiting, killed, blocked = rank_outcomes(
        wait_or_block_while_rank_1_is_killed, ranks(3), timeout=50
    )
    assert killed.exit_code == -signal.SIGKILL
    assert names(waiting, "rank 1 is gone"), waiting
    assert blocked.exit_code == 1, blocked
    assert max(waiting.seconds, blocked.seconds) - killed.seconds < 20


def host_store_on_rank_0(rank: int, port: int, prefix: str, how: str) -> None:
    """As a launcher without an agent does: rank 0 hosts the store, and fails."""
    meeting_point = connect(port, prefix)
    if rank == 0:
        hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting_point.set("port", str(hosted.port))
        store = hosted
    else:
        hosted_port = int(meeting_point.get("port"))
        store = TCPStore("127.0.0.1", hosted_port, is_master=False, wait_for_workers=False)
    rendezvous = Rendezvous(store, rank, 3, rank, "rank 0 (the store's host)")
    with init_distributed(ranks(3), rendezvous=rendezvous, limits=QUICK) as ctx:
        wait_for_each_other_but_rank(ctx, 0, how)


@pytest.mark.parametrize(
    ("how", "message"),
    [("kill", "rank 0 (the store's host) is gone"), ("raise", "rank 0 failed: ValueError: boom")],
)
def test_ranks_end_when_the_one_that_hosts_the_store_fails(how: str, message: str) -> None:
    outcomes = process_outcomes(host_store_on_rank_0, 3, *store_address(), how, timeout=60)
    assert all(names(outcomes[r], message) for r in (1, 2)), outcomes
    assert max(outcome.seconds for outcome in outcomes) < 20


def be_slow_on_rank_1(ctx: EPContext, seconds: float) -> tuple[int, ...]:
    if ctx.rank == 1:
        time.sleep(seconds)
    return ctx.rows_per_rank(ctx.rank)


def test_a_rank_whose_main_thread_is_slow_is_not_taken_for_dead() -> None:
    slow_s = 2 * QUICK.stale_after_s
    assert run_ranks(be_slow_on_rank_1, ranks(2), slow_s, limits=QUICK) == [(0, 1), (0, 1)]


def block_without_checking(ctx: EPContext, blocks_abort: bool) -> None:
    if ctx.rank == 1:
        raise ValueError("boom")
    if blocks_abort:  # as NCCL may
        setattr(ctx._watch, "_on_failure", lambda: time.sleep(60))  # noqa: B010
    time.sleep(60)


@pytest.mark.parametrize("blocks_abort", [False, True])
def test_a_rank_whose_main_thread_never_notices_is_ended(blocks_abort: bool) -> None:
    limits = replace(QUICK, exit_grace_s=0.5)
    outcomes = rank_outcomes(
        block_without_checking, ranks(2), blocks_abort, timeout=20, limits=limits
    )
    assert outcomes[0].exit_code == 1
    assert outcomes[0].seconds < 15


def test_what_ends_the_waits_is_called_once_and_may_block() -> None:
    threads: list[threading.Thread] = []
    released = threading.Event()

    def block() -> None:
        threads.append(threading.current_thread())
        released.wait(3)

    watch = FailureWatch(
        HashStore(),
        rank=0,
        world_size=2,
        store_host="nobody",
        limits=FailureLimits(poll_interval_s=0.05, farewell_s=0.5),
        on_failure=block,
    )
    started_at = time.monotonic()
    try:
        for text in ("first", "second"):
            watch.report(ValueError(text))
        with pytest.raises(RankFailure, match="rank 0 failed: ValueError: first"):
            watch.check()
        watch.close(must_outlive_others=True)
        assert time.monotonic() - started_at < 2.5
    finally:
        released.set()
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def suspend_together(ctx: EPContext, seconds: float) -> str:
    """The whole machine, as it were, is asleep."""
    ctx.rows_per_rank(1)
    waker = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    waker.wait()
    for _ in range(10):
        ctx.check()
        time.sleep(0.1)
    return "ended"


def test_nobody_is_missed_after_all_ranks_were_suspended() -> None:
    limits = replace(QUICK, poll_interval_s=0.1, stale_after_s=1.5)
    assert run_ranks(suspend_together, ranks(2), 3.0, limits=limits) == ["ended"] * 2


def block_in_a_kernel(ctx: EPContext) -> None:
    """Rank 0's device waits for a collective that rank 1 never joins."""
    case = ContractCase("failure", (3, 3))
    backend = ctx.backend("naive", case.shape())
    own = seeded_rows(case, ctx.dp_rank, 0, ctx.device)
    run_layer(ctx, backend, case, own)
    if ctx.rank == 1:
        time.sleep(1)
        raise ValueError("boom")
    prepared = backend.prepare(replace(own, rows_per_rank=(3, 3)))
    backend.dispatch(prepared)
    torch.cuda.synchronize()
    ctx.check()


@pytest.mark.multigpu
def test_a_rank_blocked_in_nccl_wakes_and_names_the_rank_that_raised() -> None:
    config = ParallelConfig(dp_size=2, device="cuda", all2all_backend="naive")
    outcomes = rank_outcomes(block_in_a_kernel, config, timeout=60)
    assert names(outcomes[0], "rank 1 failed: ValueError: boom"), outcomes
    assert outcomes[0].seconds < 30


def close_while_rank_1_fails(ctx: EPContext) -> str:
    if ctx.rank == 1:
        time.sleep(0.5)
        raise ValueError("late")
    ctx.close()
    return "unreachable"


def test_close_ends_and_says_so_when_another_rank_fails_meanwhile() -> None:
    outcomes = rank_outcomes(close_while_rank_1_fails, ranks(2), timeout=30)
    assert names(outcomes[0], "rank 1 failed: ValueError: late"), outcomes


def agree_so_often(ctx: EPContext, times: tuple[int, ...]) -> str:
    for _ in range(times[ctx.rank]):
        ctx.rows_per_rank(1)
    return "ended"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_closes_while_others_wait_for_it_is_named(missing: int) -> None:
    times = tuple(1 if rank == missing else 2 for rank in range(3))
    outcomes = rank_outcomes(agree_so_often, ranks(3), times, timeout=40)
    waiting = [outcome for outcome in outcomes if outcome.rank != missing]
    text = f"rank {missing} has closed its context"
    assert all(names(outcome, text) and names(outcome, "same order") for outcome in waiting)
    # Who hosts the store is still there to learn of it; another rank has ended well.
    assert names(outcomes[0], text) if missing == 0 else outcomes[missing].result == "ended"
    assert max(outcome.seconds for outcome in outcomes) < 20


def skip_a_call_after_an_error(ctx: EPContext) -> None:
    for call in range(3):
        if not (call == 1 and ctx.rank == 1):
            ctx.rows_per_rank(call)


def test_a_rank_that_skips_a_call_ends_all_ranks() -> None:
    outcomes = rank_outcomes(skip_a_call_after_an_error, ranks(2), timeout=40, limits=QUICK)
    assert names(outcomes[0], "rank 1 has closed its context"), outcomes
    assert max(outcome.seconds for outcome in outcomes) < 20


def wait_for_ended_ranks(ctx: EPContext) -> str:
    """Ranks 2 and 3 end at once; rank 1 stays until rank 0 has failed."""
    while ctx.rank == 1:
        try:
            ctx.check()
        except RankFailure as failure:
            return str(failure)
        time.sleep(0.05)
    if ctx.rank > 1:
        return ""
    time.sleep(3 * QUICK.ended_grace_s)
    ctx.check()
    ctx.ep_group.check_wait(99.0)  # its other rank has not ended
    ctx.world_group.check_wait(0.5 * QUICK.ended_grace_s)  # what they sent may be on its way
    with pytest.raises(RankFailure) as caught:
        ctx.world_group.check_wait(99.0)
    return str(caught.value)


def test_only_a_long_wait_for_a_rank_that_has_ended_is_a_failure() -> None:
    config = ranks(4).model_copy(update={"ep_size": 2})
    failures = run_ranks(wait_for_ended_ranks, config, limits=QUICK)
    assert failures[0].startswith("rank 2 has closed its context, and rank 0 still waits for it")
    assert failures[1:] == [failures[0], "", ""]


def work_alone(ctx: EPContext, seconds: float) -> str:
    """Rank 0, which hosts the store, ends first; the others go on without waiting for anyone."""
    if ctx.rank > 0:
        started_at = time.monotonic()
        while time.monotonic() - started_at < seconds:
            ctx.check()
            time.sleep(0.05)
    return "ended"


def test_the_stores_host_stays_while_slow_ranks_work_longer_than_timeout_s() -> None:
    config = ranks(3).model_copy(update={"timeout_s": 1.0})
    outcomes = rank_outcomes(work_alone, config, 5.0, timeout=40, limits=QUICK)
    assert [outcome.result for outcome in outcomes] == ["ended"] * 3, outcomes
    (host, *_) = outcomes
    assert host.seconds >= 5


def leave_by_sys_exit(ctx: EPContext, code: int | None) -> None:
    if ctx.rank == 1:
        sys.exit(code)
    for _ in range(20):
        ctx.check()
        time.sleep(0.1)


@pytest.mark.parametrize("code", [0, None])
def test_sys_exit_0_closes_the_context_well(code: int | None) -> None:
    outcomes = rank_outcomes(leave_by_sys_exit, ranks(2), code, timeout=30, limits=QUICK)
    assert outcomes[0].is_ok, outcomes


def test_sys_exit_with_a_status_is_a_failure() -> None:
    outcomes = rank_outcomes(leave_by_sys_exit, ranks(2), 3, timeout=30, limits=QUICK)
    assert names(outcomes[0], "rank 1 failed: SystemExit: 3"), outcomes


def report_and_look(ctx: EPContext) -> list[str]:
    """Both ranks see one cause, however often and by whom failures are reported after it."""
    seen = []
    if ctx.rank == 1:
        ctx.report_failure(ValueError("first"))
    for _ in range(200):
        try:
            ctx.check()
        except RankFailure as failure:
            ctx.report_failure(failure)
            ctx.report_failure(ValueError("later"))
            seen.append(str(failure))
            if len(seen) == 2:
                break
        time.sleep(0.05)
    return seen


def test_the_first_report_is_the_cause_and_noticing_it_is_not_reported() -> None:
    for seen in run_ranks(report_and_look, ranks(2)):
        assert seen == ["rank 1 failed: ValueError: first"] * 2


SCRIPT = """
import ep_runtime as ep
ctx = ep.init_distributed(ep.ParallelConfig(dp_size=2, device="cpu"))
for n in range(100):
    ctx.rows_per_rank(n)
    if ctx.rank == 1 and n == 3:
        raise KeyError("uncaught")
"""


def test_a_script_that_dies_without_closing_its_context_tells_the_others() -> None:
    survivor, failed = run_programs(SCRIPT)
    assert "RankFailure: rank 1 failed: KeyError: 'uncaught'" in survivor.stderr
    assert "KeyError: 'uncaught'" in failed.stderr
    assert (survivor.status, failed.status) == (1, 1)
    assert survivor.seconds < 20


EXITING_SCRIPT = """
import sys
import ep_runtime as ep
from ep_runtime.failure import FailureLimits
limits = FailureLimits(ended_grace_s=1.0)
ctx = ep.init_distributed(ep.ParallelConfig(dp_size=2, device="cpu"), limits=limits)
ctx.rows_per_rank(1)
if ctx.rank == 0:
    sys.exit(3)
ctx.rows_per_rank(1)
"""


def test_a_script_that_exits_while_another_rank_waits_for_it_is_named() -> None:
    exited, waiting = run_programs(EXITING_SCRIPT)
    assert "RankFailure: rank 0 has ended without closing its context" in waiting.stderr
    assert (exited.status, waiting.status) == (3, 1)
    assert waiting.seconds < 20


UNCLOSED_SCRIPT = """
import time
import ep_runtime as ep
ctx = ep.init_distributed(ep.ParallelConfig(dp_size=2, device="cpu"))
ctx.rows_per_rank(1)
time.sleep(3 * ctx.rank)
"""


def test_scripts_that_just_end_without_closing_end_well() -> None:
    ends = run_programs(UNCLOSED_SCRIPT)
    assert [end.status for end in ends] == [0, 0], ends
    assert not any("Error" in end.stderr or "RankFailure" in end.stderr for end in ends), ends


SURVIVING_SCRIPT = """
import atexit, os, signal, sys, time
import torch.distributed as dist
import ep_runtime as ep
from ep_runtime.failure import FailureLimits

limits = FailureLimits(poll_interval_s=0.1, farewell_s=1.0)
ctx = ep.init_distributed(ep.ParallelConfig(dp_size=2, device="cpu"), limits=limits)
pids = [0, 0]
dist.all_gather_object(pids, os.getpid())
if ctx.rank == 0:
    atexit.register(lambda: print("alarm in", signal.alarm(0), file=sys.stderr))
    work = dist.barrier(async_op=True)
    try:
        with ctx:
            ctx.rows_per_rank(1)
    except ep.RankFailure:
        sys.exit(5)
else:
    ctx.report_failure(ValueError("boom"))
    for _ in range(300):
        try:
            os.kill(pids[0], 0)
        except ProcessLookupError:
            os._exit(0)
        time.sleep(0.1)
    os._exit(1)
"""


def test_a_survivor_ends_with_its_own_status_while_the_failed_rank_lives_on() -> None:
    survivor, failed = run_programs(SURVIVING_SCRIPT)
    assert (survivor.status, failed.status) == (5, 0), (survivor, failed)
    assert "alarm in 0" in survivor.stderr


SUSPENDED_HOST = """
import os, signal, time
import torch.distributed as dist
import ep_runtime as ep
from ep_runtime.failure import FailureLimits

limits = FailureLimits(poll_interval_s=0.1, stale_after_s=1.5, exit_grace_s=0.5, farewell_s=0.5)
with ep.init_distributed(ep.ParallelConfig(dp_size=6, device="cpu"), limits=limits) as ctx:
    ctx.rows_per_rank(1)
    if ctx.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.3)  # until the host has stopped
    if ctx.rank == 1:
        ctx.rows_per_rank(1)
    if ctx.rank == 2:
        ctx.close()
    if ctx.rank == 3:
        raise ValueError("its own")
    if ctx.rank == 4:
        dist.distributed_c10d._get_default_store().check(["blocked"])
"""


def test_every_rank_ends_when_the_one_that_hosts_the_store_is_suspended() -> None:
    """In a collective, in close, by an exception, blocked in the store, and by leaving `with`."""
    message = "rank 0 (the store's host) has not answered for 1.5 s"
    host, in_collective, closing, raising, blocked, leaving = run_programs(
        SUSPENDED_HOST, 6, timeout=25
    )
    assert host.status is None
    survivors = (in_collective, closing, raising, blocked, leaving)
    assert [end.status for end in survivors] == [1] * 5, survivors
    for end in (in_collective, closing, leaving):
        assert f"RankFailure: {message}" in end.stderr
    assert "ValueError: its own" in raising.stderr
    assert blocked.stderr.endswith(f"ends, blocked since another rank failed: {message}\n")
    assert max(end.seconds for end in survivors) - host.seconds < 10


HANDLED_SCRIPT = """
import atexit, os, signal
import ep_runtime as ep

atexit.register(lambda: os._exit(signal.alarm(0)))
try:
    with ep.init_distributed(ep.ParallelConfig(dp_size=1)):
        raise KeyError("handled")
except KeyError:
    pass
"""


def test_nothing_bounds_the_exit_of_a_program_that_was_one_rank() -> None:
    subprocess.run([sys.executable, "-c", HANDLED_SCRIPT], cwd=ROOT, check=True, timeout=60)


def abandon_a_collective(rank: int, port: int, prefix: str) -> Any:
    """Rank 1 never joins the collective, yet rank 0 closes at once after its RankFailure."""
    limits = FailureLimits(poll_interval_s=0.1, farewell_s=1.0)
    rendezvous = Rendezvous(connect(port, prefix), rank, 2, rank)
    ctx = init_distributed(ranks(2), rendezvous=rendezvous, limits=limits)
    if rank == 1:
        time.sleep(0.5)
        ctx.report_failure(ValueError("boom"))
        time.sleep(3)
        return None
    with pytest.raises(RankFailure, match="rank 1 failed"):
        ctx.rows_per_rank(torch.zeros(1).numel())
    started_at = time.monotonic()
    ctx.close()
    ctx.close()
    return time.monotonic() - started_at


def test_close_does_not_wait_for_an_abandoned_collective() -> None:
    seconds, _ = run_processes(abandon_a_collective, 2, *store_address())
    assert seconds < 2
