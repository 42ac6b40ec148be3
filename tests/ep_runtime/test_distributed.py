"""Ranks, groups, row counts and what a context owns."""

import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launcher_environment import LauncherEnvironment
from ep_runtime.rendezvous import Rendezvous, rendezvous_from
from ep_runtime.row_counts import slice_counts, tp_slice
from tests.all2all.contract import ContractCase
from tests.harness import connect, process_outcomes, run_processes, run_ranks, store_address

LAUNCHER_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def parallel(dp_size: int, tp_size: int = 1, ep_size: int | None = None) -> ParallelConfig:
    return ParallelConfig(
        dp_size=dp_size, tp_size=tp_size, ep_size=ep_size or dp_size * tp_size, device="cpu"
    )


def test_tp_slice_cuts_rows_into_contiguous_blocks() -> None:
    assert [tp_slice(5, 4, r) for r in range(4)] == [
        slice(0, 2),
        slice(2, 4),
        slice(4, 5),
        slice(5, 5),
    ]
    for num_tokens in range(12):
        for tp_size in range(1, 6):
            cut = [
                list(range(num_tokens))[tp_slice(num_tokens, tp_size, r)] for r in range(tp_size)
            ]
            assert [row for part in cut for row in part] == list(range(num_tokens))
            assert max(map(len, cut)) == -(-num_tokens // tp_size)


def test_slice_counts_are_those_of_each_ranks_slice() -> None:
    assert slice_counts([5, 5, 8, 8], 0, 2) == (3, 2, 4, 4)
    assert slice_counts([5, 8], 1, 2) == (2, 4)  # an EP group that starts inside a DP group


def place_of(ctx: EPContext) -> dict[str, Any]:
    groups = [
        dist.get_process_group_ranks(g.process_group) if g.process_group else [ctx.rank]
        for g in (ctx.ep_group, ctx.tp_group, ctx.step_group, ctx.world_group)
    ]
    return {
        "ranks": (ctx.rank, ctx.dp_rank, ctx.tp_rank, ctx.ep_rank),
        "in group": (ctx.ep_group.rank, ctx.ep_group.size, ctx.tp_group.rank, ctx.tp_group.size),
        "ep": groups[0],
        "tp": groups[1],
        "step": groups[2],
        "world": groups[3],
    }


def test_groups_are_contiguous_blocks_of_the_world() -> None:
    places = run_ranks(place_of, parallel(dp_size=2, tp_size=2, ep_size=2))
    assert [p["ranks"] for p in places] == [(0, 0, 0, 0), (1, 0, 1, 1), (2, 1, 0, 0), (3, 1, 1, 1)]
    assert [p["in group"] for p in places] == [(0, 2, 0, 2), (1, 2, 1, 2)] * 2
    assert [p["ep"] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [p["tp"] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [p["step"] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [p["world"] for p in places] == [[0, 1, 2, 3]] * 4


def test_the_step_group_holds_whole_ep_and_tp_groups() -> None:
    places = run_ranks(place_of, parallel(dp_size=2, tp_size=2, ep_size=1))
    assert [p["step"] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    places = run_ranks(place_of, parallel(dp_size=4, tp_size=1, ep_size=2))
    assert [p["step"] for p in places] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def counts_of(ctx: EPContext, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Outside a step, inside one (twice), and inside one with given counts."""
    own = tokens[ctx.dp_rank]
    seen = [ctx.rows_per_rank(own)]
    with ctx.step(own):
        seen += [ctx.rows_per_rank(own), ctx.rows_per_rank(own)]
    with ctx.step(own, counts=seen[0]):
        seen.append(ctx.rows_per_rank(own))
    return seen


@pytest.mark.parametrize(
    ("config", "tokens", "expected"),
    [
        pytest.param(parallel(2), (3, 5), [(3, 5)] * 2, id="dp2"),
        pytest.param(parallel(2), (0, 0), [(0, 0)] * 2, id="no rows"),
        pytest.param(parallel(1), (4,), [(4,)], id="one rank"),
        pytest.param(parallel(2, 2), (5, 8), [(3, 2, 4, 4)] * 4, id="dp2 tp2"),
        pytest.param(parallel(4, 1, 2), (1, 2, 3, 4), [(1, 2)] * 2 + [(3, 4)] * 2, id="ep2 of 4"),
        pytest.param(parallel(1, 4, 2), (5,), [(2, 2)] * 2 + [(1, 0)] * 2, id="tp4 over ep2"),
        pytest.param(
            parallel(2, 2, 1), (3, 6), [(2,), (1,), (3,), (3,)], id="ep1, the TP groups agree"
        ),
    ],
)
def test_step_agrees_on_the_rows_of_each_ep_rank(
    config: ParallelConfig, tokens: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    assert run_ranks(counts_of, config, tokens) == [[counts] * 4 for counts in expected]


def error_of_unequal_tp_ranks(ctx: EPContext) -> str:
    try:
        ctx.rows_per_rank(7 if ctx.rank == 3 else 5)
    except ConfigError as error:
        ctx.rows_per_rank(5)  # and the ranks are still in step
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "config", [parallel(2, 2), parallel(1, 4, 2), parallel(2, 2, 1)], ids=["ep4", "ep2", "ep1"]
)
def test_tp_ranks_with_unequal_rows_all_raise_one_error(config: ParallelConfig) -> None:
    errors = run_ranks(error_of_unequal_tp_ranks, config)
    held = "[5, 7] on ranks [2, 3]" if config.tp_size == 2 else "[5, 5, 5, 7] on ranks [0, 1, 2, 3]"
    concerned = errors[2:] if config.ep_size == 1 else errors
    assert all(f"num_tokens is {held}" in error for error in concerned), errors


def misuses_of_step(ctx: EPContext) -> list[str]:
    def error_of(call: Callable[[], Any]) -> str:
        with pytest.raises(ConfigError) as caught:
            call()
        return str(caught.value)

    seen = []
    with ctx.step(3):
        seen.append(error_of(lambda: ctx.rows_per_rank(4)))
        seen.append(error_of(lambda: ctx.step(3).__enter__()))
    seen.append(error_of(lambda: ctx.step(3, counts=(3,)).__enter__()))
    seen.append(error_of(lambda: ctx.step(3, counts=(4, 4)).__enter__()))
    with ctx.step(2):
        assert ctx.rows_per_rank(2) == (2, 2)
    return seen


def test_step_refuses_other_counts_and_nesting() -> None:
    for other, nested, short, wrong in run_ranks(misuses_of_step, parallel(2)):
        assert "4 rows inside ctx.step(3)" in other
        assert "open already" in nested
        assert "counts [3]" in short
        assert "counts [4, 4]" in wrong


def errors_of_negative_rows(ctx: EPContext) -> list[str]:
    seen = []
    steps = (ctx.step(-1 if ctx.rank == 1 else 2), ctx.step(-1, counts=(0, 0)))
    for step in steps:
        with pytest.raises(ConfigError) as caught:
            step.__enter__()
        seen.append(str(caught.value))
    assert ctx.rows_per_rank(3) == (3, 3)  # and the ranks are still in step
    return seen


def test_negative_rows_are_refused_on_all_ranks() -> None:
    for agreed, given in run_ranks(errors_of_negative_rows, parallel(2)):
        assert "num_tokens is -1 on rank 1" in agreed
        assert "num_tokens is -1;" in given


def errors_of_different_calls(ctx: EPContext) -> list[str]:
    """A call of its own on rank 2; then a step there, and a call outside of it elsewhere."""
    seen = []
    with pytest.raises(ConfigError) as caught:
        ctx.rows_per_rank(3, call=2**62 if ctx.rank == 2 else 5)
    seen.append(str(caught.value))
    call = ctx.step(3).__enter__ if ctx.rank == 2 else lambda: ctx.rows_per_rank(3)
    with pytest.raises(ConfigError) as caught:
        call()
    seen.append(str(caught.value))
    assert ctx.rows_per_rank(3, call=2**62) == (3, 3, 3)
    return seen


def test_ranks_in_different_calls_all_raise_and_are_named() -> None:
    for errors in run_ranks(errors_of_different_calls, parallel(3)):
        assert len(errors) == 2
        assert all("ranks [0, 1], ranks [2] are in different calls" in e for e in errors), errors


def errors_after_close(ctx: EPContext) -> list[str]:
    case = ContractCase("a", (1, 1))
    ctx.backend("naive", case.shape())
    ctx.close()
    seen = []
    calls: list[Callable[[], Any]] = [
        lambda: ctx.rows_per_rank(1),
        lambda: ctx.step(1).__enter__(),
        lambda: ctx.step(1, counts=(1,) * ctx.world_size).__enter__(),
        lambda: ctx.backend("naive", case.shape()),
        lambda: gather_texts("", ctx.step_group) if ctx.world_size > 1 else ctx.rows_per_rank(1),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        seen.append(str(caught.value))
    return seen


@pytest.mark.parametrize("size", [1, 2])
def test_a_closed_context_refuses_calls(size: int) -> None:
    for errors in run_ranks(errors_after_close, parallel(size)):
        assert len(errors) == 5
        assert all("the context is closed" in error for error in errors), errors


def gather_slices(ctx: EPContext, num_tokens: int) -> bool:
    rows = torch.arange(num_tokens * 3, dtype=torch.bfloat16).view(num_tokens, 3)
    own = tp_slice(num_tokens, ctx.parallel.tp_size, ctx.tp_rank)
    return torch.equal(ctx.gather_tp_slices(rows[own], num_tokens), rows)


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5])
def test_gathering_tp_slices_restores_the_rows(num_tokens: int) -> None:
    assert all(run_ranks(gather_slices, parallel(1, 2), num_tokens))


def same_backend(ctx: EPContext) -> list[bool]:
    case, other = ContractCase("a", (1, 1)), ContractCase("b", (1, 1), hidden_size=8)
    first = ctx.backend("naive", case.shape())
    return [
        first is ctx.backend("naive", case.shape()),
        first is ctx.backend("naive", other.shape()),
        first is ctx.backend("all_to_all", case.shape()),
    ]


def test_layers_of_equal_shape_share_a_backend() -> None:
    assert run_ranks(same_backend, parallel(2)) == [[True, False, False]] * 2


@pytest.fixture
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_no_launcher")
def test_one_rank_needs_neither_launcher_nor_process_group() -> None:
    with init_distributed(parallel(1)) as ctx:
        assert (ctx.rank, ctx.world_size, ctx.device.type) == (0, 1, "cpu")
        assert ctx.rows_per_rank(3) == (3,)
        assert not dist.is_initialized()
    ctx.close()


@pytest.mark.usefixtures("_no_launcher")
def test_a_world_of_another_size_is_refused_before_any_group_is_made() -> None:
    with pytest.raises(
        ConfigError, match=r"dp_size \(2\) \* parallel.tp_size \(3\) is 6 ranks.* 1;"
    ):
        init_distributed(parallel(2, 3))
    assert not dist.is_initialized()


def test_a_launchers_world_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"is 2 ranks, but torchrun's world has 4"):
        init_distributed(parallel(2))


def use_callers_group(rank: int, port: int, prefix: str) -> list[Any]:
    dist.init_process_group("gloo", store=connect(port, prefix), rank=rank, world_size=2)
    seen = []
    for tokens in ((1, 2), (3, 4)):  # one context after the other
        with init_distributed(parallel(2)) as ctx:
            seen.append(ctx.rows_per_rank(tokens[rank]))
        ctx.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return [*seen, total.item()]


def test_a_default_group_made_by_the_caller_is_used_and_left_alone() -> None:
    assert run_processes(use_callers_group, 2, *store_address()) == [[(1, 2), (3, 4), 2.0]] * 2


def make_and_close_twice(rank: int, port: int, prefix: str) -> list[bool]:
    seen = []
    for attempt in range(2):
        rendezvous = Rendezvous(connect(port, f"{prefix}.{attempt}"), rank, 2, rank)
        with init_distributed(parallel(2), rendezvous=rendezvous) as ctx:
            assert ctx.rows_per_rank(rank) == (0, 1)
            seen.append(dist.is_initialized())
        ctx.close()
        seen.append(dist.is_initialized())
    return seen


def test_a_default_group_made_here_ends_with_the_context() -> None:
    assert run_processes(make_and_close_twice, 2, *store_address()) == [[True, False] * 2] * 2


def close_one_of_two(rank: int, port: int, prefix: str, closes_first: int) -> list[Any]:
    first = init_distributed(parallel(2), rendezvous=Rendezvous(connect(port, prefix), rank, 2))
    contexts = [first, init_distributed(parallel(1, 2))]
    contexts.pop(closes_first).close()
    (left,) = contexts
    with left.step(3) as counts:
        seen: list[Any] = [counts.rows_per_rank]
    left.close()
    return [*seen, dist.is_initialized()]


@pytest.mark.parametrize("closes_first", [0, 1])
def test_a_context_outlives_the_one_that_made_the_default_group(closes_first: int) -> None:
    results = run_processes(close_one_of_two, 2, *store_address(), closes_first)
    rows = (2, 1) if closes_first == 0 else (3, 3)
    assert results == [[rows, False]] * 2


def disagree(rank: int, port: int, prefix: str) -> None:
    config = ParallelConfig(dp_size=2, device="cpu", max_tokens_per_rank=[256, 128][rank])
    init_distributed(config, rendezvous=Rendezvous(connect(port, prefix), rank, 2, rank))


def test_ranks_with_different_configurations_all_raise_and_name_the_key() -> None:
    for outcome in process_outcomes(disagree, 2, *store_address()):
        assert isinstance(outcome.error, ConfigError)
        message = "parallel.max_tokens_per_rank: 256 on ranks [0], 128 on ranks [1]"
        assert message in str(outcome.error)
        assert outcome.seconds < 20


def start_alone(rank: int, port: int, prefix: str) -> None:
    rendezvous = Rendezvous(connect(port, prefix), rank, 2, rank)
    init_distributed(parallel(2), rendezvous=rendezvous, start_timeout_s=0.5)


def test_ranks_that_never_start_are_named() -> None:
    (outcome,) = process_outcomes(start_alone, 1, *store_address())
    assert "ranks [1] of 2 did not start within 0.5 s" in str(outcome.error)


def test_a_busy_master_port_is_named() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        environment = LauncherEnvironment("torchrun", 0, 2, 0, 2, "127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"MASTER_PORT \({port}\) is busy"):
            rendezvous_from(environment, 5)


def test_a_restarted_attempt_does_not_see_the_keys_of_the_one_before() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second = (
        rendezvous_from(
            LauncherEnvironment("torchrun", 0, 2, 0, 2, "127.0.0.1", server.port, attempt, True), 5
        ).store
        for attempt in range(2)
    )
    first.set("key", "stale")
    assert first.check(["key"])
    assert not second.check(["key"])


def join_from_environment(rank: int, port: int) -> tuple[int, ...]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2", "RANK": str(rank)}
    with init_distributed(parallel(2)) as ctx:
        return ctx.rows_per_rank(rank + 1)


def test_ranks_join_by_the_launchers_variables() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(join_from_environment, 2, server.port) == [(1, 2)] * 2
