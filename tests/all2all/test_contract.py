"""Every built-in backend through the contract suite, on 1, 2, 4 and 8 ranks."""

import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from ep_runtime.all2all.base import CombineBias, EPGroup
from ep_runtime.all2all.registry import backend_class
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.errors import ConfigError
from tests.all2all.contract import (
    ContractCase,
    Device,
    check_bias_rule,
    check_case,
    check_gathering,
    check_graph,
    contract_cases,
    seeded_rows,
)
from tests.harness import require_gpus, run_ranks

BACKENDS = ["local", "naive", "all_to_all"]
MULTI_RANK = [b for b in BACKENDS if backend_class(b).capabilities.max_ep_size != 1]
ON_GPU = (pytest.mark.gpu, pytest.mark.multigpu)
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=ON_GPU)]
CASES = [
    pytest.param(backend, case, id=f"{backend}: {case.name}")
    for backend in BACKENDS
    for case in contract_cases(backend_class(backend).capabilities)
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backend", "case"), CASES)
def test_backend_meets_the_contract(backend: str, case: ContractCase, device: Device) -> None:
    run_ranks(check_case, case.parallel(backend, device), backend, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_is_added_once_where_declared_and_refused_elsewhere(
    backend: str, device: Device
) -> None:
    is_local = backend_class(backend).capabilities.max_ep_size == 1
    case = ContractCase("bias", (4,) if is_local else (3, 5))
    run_ranks(check_bias_rule, case.parallel(backend, device), backend, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [(5,), (4, 4), (3, 5), (4, 0), (0, 0), (3, 0, 7, 1)])
@pytest.mark.parametrize(
    "backend", [b for b in BACKENDS if backend_class(b).capabilities.gathers_rows]
)
def test_gathering_backend_gathers_and_sums_rows_in_rank_order(
    backend: str, tokens: tuple[int, ...], device: Device
) -> None:
    case = ContractCase("gathering", tokens)
    run_ranks(check_gathering, case.parallel(backend, device), backend, case)


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "backend", [b for b in MULTI_RANK if backend_class(b).capabilities.supports_cuda_graph]
)
def test_captured_call_replays_on_other_rows(backend: str, num_ranks: int) -> None:
    require_gpus(num_ranks)
    case = ContractCase("graph", (6,) * num_ranks, dtype=torch.bfloat16)
    run_ranks(check_graph, case.parallel(backend, "cuda"), backend, case)


@pytest.mark.parametrize(
    "backend", [b for b in MULTI_RANK if backend_class(b).capabilities.supports_async]
)
def test_asynchronous_backend_returns_before_its_peers_arrive(backend: str) -> None:
    case = ContractCase("async", (3, 5))
    (dispatched, waited, combined, joined), _ = run_ranks(
        time_calls_before_a_late_peer, case.parallel(backend), backend, case
    )
    assert dispatched < LATE_S / 2
    assert combined < LATE_S / 2
    assert waited > LATE_S / 2
    assert joined > LATE_S / 2


LATE_S = 0.4


def time_calls_before_a_late_peer(
    ctx: EPContext, backend_name: str, case: ContractCase
) -> tuple[float, float, float, float]:
    """Seconds in dispatch, its wait, combine, its wait; rank 1 comes LATE_S late to both."""
    backend = ctx.backend(backend_name, case.shape())
    counts = ctx.rows_per_rank(case.tokens[ctx.dp_rank])
    rows = seeded_rows(case, ctx.dp_rank, 0, ctx.device)
    tokens = type(rows)(rows.hidden_states, rows.topk_ids, rows.topk_weights, counts)
    prepared = backend.prepare(tokens)
    clock = [time.monotonic()]

    def lap() -> None:
        clock.append(time.monotonic())

    if ctx.rank == 1:
        time.sleep(LATE_S)
    pending: Any = backend.dispatch(prepared)
    lap()
    received, handle = pending.wait()
    lap()
    output = torch.zeros_like(received.hidden_states)
    if ctx.rank == 1:
        time.sleep(LATE_S)
    pending = backend.combine(output, handle)
    lap()
    pending.wait()
    lap()
    a, b, c, d = (later - earlier for earlier, later in pairwise(clock))
    return a, b, c, d


def test_built_in_backends_declare_their_registry_name_and_take_no_bias() -> None:
    for name in BACKENDS:
        capabilities = backend_class(name).capabilities
        assert capabilities.name == name
        assert capabilities.combine_bias is CombineBias.NONE


def test_local_refuses_more_than_one_rank_and_names_the_size() -> None:
    group = EPGroup(None, 0, 2, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"ep_size \(2\)"):
        backend_class("local")(group, ContractCase("two", (1, 1)).shape())
