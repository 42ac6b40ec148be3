"""`symm_mem` between processes and between virtual ranks; on a CPU in Triton's interpreter."""

import ctypes
import os
import random
import threading
import time
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from ep_runtime.all2all.base import BackendShape, CombineBias, RoutedTokens
from ep_runtime.all2all.collectives import gather_integers
from ep_runtime.all2all.symm_mem import SymmMemBackend, SymmMemLimits, refuse_without_fp8
from ep_runtime.all2all.symmetric_buffer import open_symmetric_buffer, virtual_buffers
from ep_runtime.config import ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext
from ep_runtime.failure import FailureLimits
from ep_runtime.kernels.base import ExpertInput, StandardExpertInput
from ep_runtime.kernels.errors import CapacityError, ConfigError, PlanError, RankFailure
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.launch import PreparedLaunch
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.layer import MoELayer
from ep_runtime.ownership import Owner, Schedule
from ep_runtime.placement import place_experts
from tests.all2all.contract import (
    ContractCase,
    check_bias_rule,
    check_case,
    contract_cases,
    received_rows,
)
from tests.all2all.virtual_ranks import (
    LIMITS,
    coded_output,
    expert_scale,
    make_virtual_ranks,
    random_counts,
    stress_tokens,
    to_device,
    virtual_groups,
    wanted_output,
)
from tests.ep_runtime.coded import coded_config, coded_routing, coded_rows, coded_weights
from tests.harness import rank_outcomes, run_ranks

ON_GPU = (pytest.mark.gpu, pytest.mark.multigpu)
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=ON_GPU)]
CASES = [pytest.param(case, id=case.name) for case in contract_cases(SymmMemBackend.capabilities)]


def skip_without_interpreter(device: str) -> None:
    if device == "cpu" and not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process; run `pytest -m gpu`")


def share_one_gpu() -> None:
    """Let ranks on one GPU map each other's memory; read when memory is first exchanged."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_shape(
    num_ranks: int,
    *,
    num_experts: int = 7,
    top_k: int = 3,
    hidden_size: int = 40,
    max_tokens: int = 6,
    dtype: torch.dtype = torch.float32,
    rows: RowScheme = RowScheme.MODEL,
) -> BackendShape:
    placement = place_experts("linear", num_experts, num_ranks)
    return BackendShape(num_experts, hidden_size, top_k, dtype, max_tokens, placement, rows)


Device = Literal["cpu", "cuda"]


def parallel(num_ranks: int, device: Device = "cpu") -> ParallelConfig:
    return ParallelConfig(
        dp_size=num_ranks, device=device, all2all_backend="symm_mem", timeout_s=60
    )


# --- the contract ---


def check_contract_case(ctx: EPContext, case: ContractCase) -> None:
    share_one_gpu()
    check_case(ctx, "symm_mem", case)


def check_bias_case(ctx: EPContext, case: ContractCase) -> None:
    share_one_gpu()
    check_bias_rule(ctx, "symm_mem", case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_symm_mem_meets_the_contract(case: ContractCase, device: Device) -> None:
    skip_without_interpreter(device)
    run_ranks(check_contract_case, case.parallel("symm_mem", device), case, timeout=120)


@pytest.mark.parametrize("device", DEVICES)
def test_bias_is_added_once_at_the_join_and_refused_at_the_issue(device: Device) -> None:
    skip_without_interpreter(device)
    assert SymmMemBackend.capabilities.combine_bias is CombineBias.AT_JOIN
    for tokens in ((3, 5), (4, 0)):
        case = ContractCase("bias", tokens)
        run_ranks(check_bias_case, case.parallel("symm_mem", device), case, timeout=120)


# --- issued and joined apart ---


def issue_before_the_peer(ctx: EPContext) -> None:
    """Rank 1 issues each phase only after rank 0's issue has returned: else both hang."""
    shape = make_shape(2)
    backend = ctx.backend("symm_mem", shape)
    tokens = stress_tokens(shape, (3, 4), ctx.rank, 0)

    def in_turn(issue: Any) -> Any:
        if ctx.rank == 1:
            gather_integers(0, ctx.ep_group)
        pending = issue()
        if ctx.rank == 0:
            gather_integers(0, ctx.ep_group)
        return pending

    received, handle = in_turn(lambda: backend.dispatch(backend.prepare(tokens))).wait()
    output = coded_output(received, expert_scale(shape, ctx.rank, ctx.device), shape.dtype)
    result = in_turn(lambda: backend.combine(output, handle)).wait()
    assert torch.equal(result, wanted_output(tokens))


def test_issuing_does_not_wait_for_a_peer_that_has_not_come() -> None:
    skip_without_interpreter("cpu")
    run_ranks(issue_before_the_peer, parallel(2))


def run_shared_expert_layer(ctx: EPContext) -> list[str]:
    """Routed 10x and shared 1x are 11x, computed once, in the combine window or joined."""
    moe = coded_config(5, 2)
    rows = coded_rows((3, 5)[ctx.rank], ctx.rank)
    ids, weights = coded_routing(len(rows), moe, ctx.rank, 0.5)
    schedules = []
    outputs = []
    for overlap in ("auto", "off"):
        layer = MoELayer(
            moe,
            ctx,
            experts="reference",
            shared_experts=SharedExpertsConfig.model_validate({"overlap": overlap}),
        )
        layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
        outputs.append(layer(rows, topk_ids=ids, topk_weights=weights))
        assert layer.stats.shared_expert_calls == 1
        assert layer.plan.ownership.owner is Owner.MODULAR_KERNEL
        schedules.append(str(layer.plan.regime(5).schedule))
    torch.testing.assert_close(outputs[0], 11 * rows, rtol=1e-6, atol=0)
    assert torch.equal(outputs[0], outputs[1])
    return schedules


def test_a_layer_runs_its_shared_expert_once_in_the_combine_window_or_joined() -> None:
    skip_without_interpreter("cpu")
    wanted = [str(Schedule.COMBINE_WINDOW), str(Schedule.COMBINE_JOINED)]
    assert run_ranks(run_shared_expert_layer, parallel(2)) == [wanted] * 2


# --- calls in flight ---


def dispatch_all(backends: list[SymmMemBackend], tokens: list[RoutedTokens]) -> list[Any]:
    return [b.dispatch(b.prepare(t)) for b, t in zip(backends, tokens, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
def test_two_calls_in_flight_keep_apart_and_a_third_is_refused(device: str) -> None:
    skip_without_interpreter(device)
    shape, where = make_shape(2), torch.device(device)
    backends = make_virtual_ranks(shape, where)
    calls = [
        [to_device(stress_tokens(shape, (3, 5), rank, call), where) for rank in range(2)]
        for call in range(2)
    ]
    pending = [dispatch_all(backends, tokens) for tokens in calls]
    with pytest.raises(RuntimeError, match="2 calls in flight"):
        backends[0].dispatch(backends[0].prepare(calls[0][0]))
    for tokens, dispatching in reversed(list(zip(calls, pending, strict=True))):
        landed = [d.wait() for d in dispatching]
        combining = [
            backends[rank].combine(
                coded_output(received, expert_scale(shape, rank, where), shape.dtype), handle
            )
            for rank, (received, handle) in enumerate(landed)
        ]
        for own, combined in zip(tokens, combining, strict=True):
            assert torch.equal(
                combined.wait().cpu(), wanted_output(to_device(own, torch.device("cpu")))
            )
            with pytest.raises(RuntimeError, match="gives its result once"):
                combined.wait()
    dispatch_all(backends, calls[0])


def test_joining_before_waiting_gives_the_same_bits() -> None:
    skip_without_interpreter("cpu")
    shape = make_shape(2, dtype=torch.bfloat16)
    backends = make_virtual_ranks(shape, torch.device("cpu"))
    tokens = [stress_tokens(shape, (3, 5), rank, 7) for rank in range(2)]
    results: list[list[Tensor]] = []
    for joins_first in (False, True):
        landed = [d.wait() for d in dispatch_all(backends, tokens)]
        combining = [
            b.combine(torch.full_like(received.hidden_states, 0.1), handle)
            for b, (received, handle) in zip(backends, landed, strict=True)
        ]
        for pending in combining if joins_first else []:
            pending.join()
            pending.join()
        biases = [torch.ones_like(own.hidden_states) for own in tokens]
        results.append([c.wait(b) for c, b in zip(combining, biases, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("waits_as_cuda", [False, True])
def test_a_join_after_the_result_does_not_wait_for_the_next_call(waits_as_cuda: bool) -> None:
    skip_without_interpreter("cpu")
    shape, device = make_shape(2), torch.device("cpu")
    backends = make_virtual_ranks(shape, device, replace(LIMITS, wait_limit_s=1))
    for backend in backends:
        backend._on_cuda = waits_as_cuda
    tokens = [stress_tokens(shape, (3, 5), rank, 0) for rank in range(2)]
    landed = [d.wait() for d in dispatch_all(backends, tokens)]
    combining = [
        b.combine(torch.zeros_like(received.hidden_states), handle)
        for b, (received, handle) in zip(backends, landed, strict=True)
    ]
    for pending in combining:
        pending.wait()
    for dispatching in dispatch_all(backends, tokens):
        dispatching.join()  # the slot's epoch is the next call's
    for pending in combining:
        pending.join()
    for backend in backends:
        backend.check()


def test_more_rows_than_the_buffers_hold_are_refused_with_the_numbers() -> None:
    skip_without_interpreter("cpu")
    shape = make_shape(2)
    backend = make_virtual_ranks(shape, torch.device("cpu"))[0]
    tokens = replace(stress_tokens(shape, (3, 5), 0, 0), rows_per_rank=(3, 7))
    with pytest.raises(CapacityError, match=r"max_tokens_per_rank \(6\)"):
        backend.prepare(tokens)


def test_a_gpu_without_fp8_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, is_refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d, c=capability: c)
        if not is_refused:
            refuse_without_fp8(torch.device("cuda"))
            continue
        with pytest.raises(PlanError, match=r"A100 has 8.0; use dispatch_dtype: model"):
            refuse_without_fp8(torch.device("cuda"))


def test_experts_that_return_other_than_the_layers_dtype_are_refused() -> None:
    skip_without_interpreter("cpu")
    shape = make_shape(1, rows=RowScheme.FP8_GROUP)
    backend = make_virtual_ranks(shape, torch.device("cpu"))[0]
    received, handle = backend.dispatch(backend.prepare(stress_tokens(shape, (3,), 0, 0))).wait()
    with pytest.raises(ValueError, match="experts return rows in the layer's dtype"):
        backend.combine(received.hidden_states, handle)


# --- stress ---


def stress_between_processes(
    ctx: EPContext, num_rounds: int, seed: int, rows: RowScheme = RowScheme.MODEL
) -> None:
    share_one_gpu()
    shape = make_shape(ctx.world_size, rows=rows)
    backend = ctx.backend("symm_mem", shape)
    shared, own = random.Random(seed), random.Random(seed + 1 + ctx.rank)
    for index in range(num_rounds):
        counts = random_counts(shape, shared)
        tokens = stress_tokens(shape, counts, ctx.rank, index)

        def dawdle() -> None:
            if own.random() < 0.3:
                time.sleep(own.random() * 0.05)

        dawdle()
        pending = backend.dispatch(backend.prepare(to_device(tokens, ctx.device)))
        dawdle()
        received, handle = pending.wait()
        check_landed(received, shape, counts, ctx.rank, index)
        dawdle()
        output = coded_output(received, expert_scale(shape, ctx.rank, ctx.device), shape.dtype)
        combining = backend.combine(output, handle)
        dawdle()
        assert torch.equal(combining.wait().cpu(), wanted_output(tokens)), index


def check_landed(
    received: ExpertInput,
    shape: BackendShape,
    counts: tuple[int, ...],
    rank: int,
    round_index: int,
) -> None:
    """Every row that has an expert here is the one its source sent in this round."""
    assert isinstance(received, StandardExpertInput)
    sent = torch.cat(
        [stress_tokens(shape, counts, s, round_index).hidden_states for s in range(len(counts))]
    )
    ids = torch.cat(
        [stress_tokens(shape, counts, s, round_index).topk_ids for s in range(len(counts))]
    )
    owner = torch.tensor([*shape.placement.rank_of, -1])
    local = torch.tensor([*shape.placement.local_id_of, -1], dtype=torch.int32)
    is_here = owner[ids.long()] == rank
    assert torch.equal(received.topk_ids.cpu(), torch.where(is_here, local[ids.long()], -1))
    needed = is_here.any(1)
    assert torch.equal(received_rows(received).cpu()[needed], sent.float()[needed])


@pytest.mark.parametrize(
    ("num_ranks", "rows"), [(2, RowScheme.MODEL), (3, RowScheme.MODEL), (2, RowScheme.FP8_GROUP)]
)
def test_no_row_is_wrong_over_random_rounds_between_processes(
    num_ranks: int, rows: RowScheme
) -> None:
    skip_without_interpreter("cpu")
    run_ranks(stress_between_processes, parallel(num_ranks), 12, 5, rows, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", RowScheme)
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_no_row_is_wrong_over_random_rounds_of_ranks_that_share_a_gpu(
    num_ranks: int, rows: RowScheme
) -> None:
    run_ranks(stress_between_processes, parallel(num_ranks, "cuda"), 50, 6, rows, timeout=300)


class VirtualRounds:
    """Rounds of all ranks of one process, each on its own stream, issued in an order of chance.

    On a GPU the host waits once a round, behind its last launch.
    """

    def __init__(self, num_ranks: int, device: torch.device, seed: int, rows: RowScheme) -> None:
        self.shape, self.device = make_shape(num_ranks, rows=rows), device
        self.backends = make_virtual_ranks(self.shape, device)
        self.on_cuda = device.type == "cuda"
        self.streams = [torch.cuda.Stream(device) if self.on_cuda else None for _ in self.backends]
        self.chance = random.Random(seed)
        self.num_wrong = torch.zeros(num_ranks, dtype=torch.int64, device=device)

    def run(self, index: int) -> None:
        """One round; `num_wrong` counts elements that differ."""
        chance, ranks = self.chance, range(len(self.backends))
        counts = random_counts(self.shape, chance)
        tokens = [stress_tokens(self.shape, counts, rank, index) for rank in ranks]
        own = [to_device(t, self.device) for t in tokens]
        wanted = [wanted_output(t).to(self.device) for t in tokens]
        synchronize(self.device)
        pending: dict[int, Any] = {}

        def dispatch(rank: int) -> None:
            self._dawdle()
            backend = self.backends[rank]
            pending[rank] = backend.dispatch(backend.prepare(own[rank]))

        def combine(rank: int) -> None:
            received, handle = pending[rank].wait()
            output = coded_output(
                received, expert_scale(self.shape, rank, self.device), self.shape.dtype
            )
            self._dawdle()
            pending[rank] = self.backends[rank].combine(output, handle)

        def compare(rank: int) -> None:
            self.num_wrong[rank] += (pending[rank].wait() != wanted[rank]).sum()

        for step in (dispatch, combine, compare):
            for rank in chance.sample(ranks, len(ranks)):
                with torch.cuda.stream(self.streams[rank]):
                    step(rank)
        synchronize(self.device)
        for backend in self.backends:
            backend.check()

    def _dawdle(self) -> None:
        if self.on_cuda and self.chance.random() < 0.2:
            torch.cuda._sleep(self.chance.randrange(200_000))


def run_virtual_rounds(
    num_ranks: int, device: torch.device, num_rounds: int, seed: int, rows: RowScheme
) -> None:
    rounds = VirtualRounds(num_ranks, device, seed, rows)
    for index in range(num_rounds):
        rounds.run(index)
    assert rounds.num_wrong.tolist() == [0] * num_ranks


@pytest.mark.parametrize("rows", RowScheme)
def test_no_row_is_wrong_over_random_rounds_of_virtual_ranks(rows: RowScheme) -> None:
    skip_without_interpreter("cpu")
    run_virtual_rounds(3, torch.device("cpu"), 6, 1, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", RowScheme)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_no_row_is_wrong_over_2000_rounds_of_virtual_ranks_on_a_gpu(
    num_ranks: int, rows: RowScheme
) -> None:
    run_virtual_rounds(num_ranks, torch.device("cuda"), 2000, 2, rows)


# --- a peer that does not come ---


def compile_kernels(shape: BackendShape, device: torch.device) -> None:
    """One whole call, so that no compilation is counted as waiting."""
    backends = make_virtual_ranks(shape, device)
    counts = (3, 0, 2)
    tokens = [to_device(stress_tokens(shape, counts, rank, 0), device) for rank in range(3)]
    landed = [d.wait() for d in dispatch_all(backends, tokens)]
    outputs = [torch.zeros_like(received.hidden_states) for received, _ in landed]
    calls = zip(backends, outputs, landed, strict=True)
    for pending in [backend.combine(output, handle) for backend, output, (_, handle) in calls]:
        pending.join()
        pending.wait()
    synchronize(device)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_peer_that_never_comes_are_waited_for_within_the_bound(device: str) -> None:
    skip_without_interpreter(device)
    shape, where = make_shape(3), torch.device(device)
    compile_kernels(shape, where)
    backends = make_virtual_ranks(shape, where, SymmMemLimits(wait_limit_s=2))
    tokens = [to_device(stress_tokens(shape, (3, 5, 2), rank, 0), where) for rank in range(3)]
    pending = {r: backends[r].dispatch(backends[r].prepare(tokens[r])) for r in (0, 2)}
    synchronize(where)
    started = time.monotonic()
    received, handle = pending[0].wait()
    synchronize(where)
    assert 1.9 < time.monotonic() - started < 4
    told = r"EP rank 0 waited 2 s for EP rank 1 in dispatch of call 1"
    with pytest.raises(RankFailure, match=told):
        backends[0].combine(torch.zeros_like(received.hidden_states), handle)
    with pytest.raises(RankFailure, match=told):
        backends[0].dispatch(backends[0].prepare(tokens[0]))
    with pytest.raises(RankFailure, match=told):
        backends[0].close()
    backends[2].check()  # it has waited for nobody yet


@pytest.mark.parametrize("joins_first", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_results_of_a_peer_that_never_comes_are_nan_and_the_next_call_names_it(
    device: str, joins_first: bool
) -> None:
    skip_without_interpreter(device)
    shape, where = make_shape(3), torch.device(device)
    compile_kernels(shape, where)
    backends = make_virtual_ranks(shape, where, SymmMemLimits(wait_limit_s=2))
    tokens = [to_device(stress_tokens(shape, (3, 0, 2), rank, 0), where) for rank in range(3)]
    received, handle = dispatch_all(backends, tokens)[0].wait()
    combining = backends[0].combine(torch.zeros_like(received.hidden_states), handle)
    synchronize(where)
    started = time.monotonic()
    if joins_first:
        combining.join()
    output = combining.wait()
    synchronize(where)
    assert 1.9 < time.monotonic() - started < 4
    assert output.shape == tokens[0].hidden_states.shape
    assert output.isnan().all()
    with pytest.raises(RankFailure, match=r"waited 2 s for EP rank 1 in combine of call 1"):
        backends[0].dispatch(backends[0].prepare(tokens[0]))


@pytest.mark.parametrize("joins_first", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_the_hosts_abort_word_ends_a_wait_long_before_its_bound(
    device: str, joins_first: bool
) -> None:
    skip_without_interpreter(device)
    shape, where = make_shape(3), torch.device(device)
    compile_kernels(shape, where)
    abort = torch.zeros(1, dtype=torch.int64, pin_memory=device == "cuda")
    groups = virtual_groups(3, where, abort)
    backends = make_virtual_ranks(shape, where, SymmMemLimits(wait_limit_s=60), groups)
    tokens = [to_device(stress_tokens(shape, (3, 0, 2), rank, 0), where) for rank in range(3)]
    received, handle = dispatch_all(backends, tokens)[0].wait()
    combining = backends[0].combine(torch.zeros_like(received.hidden_states), handle)
    timer = threading.Timer(0.5, abort.fill_, (1,))
    started = time.monotonic()
    timer.start()
    if joins_first:
        combining.join()
    output = combining.wait()
    synchronize(where)
    assert 0.4 < time.monotonic() - started < 10
    assert output.shape == tokens[0].hidden_states.shape
    assert output.isnan().all()
    told = r"EP rank 0 no longer waits for EP rank 1 in combine of call 1 .*; a rank has failed"
    with pytest.raises(RankFailure, match=told):
        backends[0].dispatch(backends[0].prepare(tokens[0]))


def see_the_abort_word(ctx: EPContext) -> None:
    abort = ctx.ep_group.abort
    assert abort is not None
    assert int(abort) == 0
    gather_integers(0, ctx.ep_group)
    if ctx.rank == 1:
        raise ValueError("the second rank has had enough")
    deadline = time.monotonic() + 20
    while not int(abort):  # as a kernel would, which cannot ask who has failed
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ctx.check()


def test_the_failure_watch_sets_the_abort_word_once_it_knows_of_a_failed_rank() -> None:
    limits = FailureLimits(poll_interval_s=0.1, stale_after_s=5)
    first, second = rank_outcomes(see_the_abort_word, parallel(2), limits=limits)
    assert isinstance(second.error, ValueError)
    assert isinstance(first.error, RankFailure)
    assert "rank 1 failed: ValueError: the second rank has had enough" in str(first.error)


def leave_while_the_other_waits(ctx: EPContext) -> None:
    shape = make_shape(2)
    backend = ctx.backend("symm_mem", shape)
    if ctx.rank == 0:
        backend.dispatch(backend.prepare(stress_tokens(shape, (3, 5), 0, 0))).wait()


def test_a_rank_that_has_ended_is_named_by_the_rank_that_waits_for_it() -> None:
    skip_without_interpreter("cpu")
    limits = FailureLimits(poll_interval_s=0.1, stale_after_s=5, ended_grace_s=0.5)
    first, _ = rank_outcomes(leave_while_the_other_waits, parallel(2), limits=limits)
    assert isinstance(first.error, RankFailure)
    assert "rank 1 has closed its context" in str(first.error)
    assert first.seconds < 20


def fail_while_others_wait(ctx: EPContext) -> None:
    shape = make_shape(2)
    backend = ctx.backend("symm_mem", shape)
    tokens = stress_tokens(shape, (3, 5), ctx.rank, 0)
    if ctx.rank == 1:
        raise ValueError("the second rank has had enough")
    backend.dispatch(backend.prepare(tokens)).wait()


def test_a_rank_that_raises_is_named_by_the_rank_that_waits_for_it() -> None:
    skip_without_interpreter("cpu")
    limits = FailureLimits(poll_interval_s=0.1, stale_after_s=5)
    first, second = rank_outcomes(fail_while_others_wait, parallel(2), limits=limits)
    assert isinstance(second.error, ValueError)
    assert isinstance(first.error, RankFailure)
    assert "rank 1" in str(first.error)
    assert "had enough" in str(first.error)
    assert first.seconds < 20


# --- the memory itself ---


def write_to_every_peer(ctx: EPContext) -> list[int]:
    """Each rank writes its number at its own place in every rank's memory, by address."""
    buffer = open_symmetric_buffer(ctx.ep_group, 5000)
    assert buffer.memory.numel() == 5000
    assert buffer.memory.data_ptr() == buffer.addresses[ctx.rank]
    assert all(address % 256 == 0 for address in buffer.addresses)
    assert not buffer.memory.any()
    gather_integers(0, ctx.ep_group)
    for address in buffer.addresses:
        ctypes.c_uint8.from_address(address + ctx.rank).value = ctx.rank + 1
    gather_integers(0, ctx.ep_group)
    written: list[int] = buffer.memory[:4].tolist()
    return written


def test_host_memory_is_shared_by_all_ranks_and_has_no_name_that_could_be_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    assert run_ranks(write_to_every_peer, parallel(4)) == [[1, 2, 3, 4]] * 4
    assert set(os.listdir("/dev/shm")) == before


def test_virtual_buffers_are_aligned_zeroed_and_know_each_other() -> None:
    buffers = virtual_buffers(3, 1000, torch.device("cpu"))
    for buffer in buffers:
        assert buffer.memory.shape == (1000,)
        assert not buffer.memory.any()
        assert buffer.addresses == tuple(b.memory.data_ptr() for b in buffers)
        assert all(address % 256 == 0 for address in buffer.addresses)


def refuse_foreign_host(ctx: EPContext) -> str:
    from ep_runtime.all2all import symmetric_buffer

    if ctx.rank == 1:
        symmetric_buffer._host_id = lambda: "another-host"
    try:
        open_symmetric_buffer(ctx.ep_group, 100)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_on_two_hosts_are_refused_on_every_rank() -> None:
    for message in run_ranks(refuse_foreign_host, parallel(2)):
        assert "one host" in message
        assert "all2all_backend: all_to_all" in message


def open_without_memory(ctx: EPContext) -> str:
    import torch.distributed._symmetric_memory as symmetric_memory

    from ep_runtime.all2all import symmetric_buffer

    def empty(num_bytes: int, **_: Any) -> Tensor:
        if ctx.rank == 1:
            raise RuntimeError("\nCUDA out of memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def rendezvous(*_: Any) -> None:
        raise AssertionError("a rank waits for one that has no memory")

    symmetric_memory.empty = empty  # type: ignore[assignment]
    symmetric_memory.rendezvous = rendezvous  # type: ignore[assignment]
    group = ctx.ep_group.process_group
    assert group is not None
    try:
        symmetric_buffer._open_cuda_buffer(ctx.ep_group, group, 100)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_rank_without_memory_for_its_slots_is_named_by_every_rank() -> None:
    for message in run_ranks(open_without_memory, parallel(2)):
        assert "EP rank 1: cannot allocate 100 bytes: CUDA out of memory; lower" in message


# --- on a GPU: graphs and overlap ---


def graph_of(backend: SymmMemBackend, own: RoutedTokens, rank: int, stream: Any) -> Any:
    """(graph, its output, what it reads besides and must outlive it): a whole call, captured."""
    scale = expert_scale(backend.shape, rank, own.hidden_states.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        received, handle = backend.dispatch(backend.prepare(own)).wait()
        combining = backend.combine(coded_output(received, scale, backend.shape.dtype), handle)
        output = combining.wait(own.hidden_states)
    return graph, output, scale


@pytest.mark.gpu
@pytest.mark.parametrize("rows", RowScheme)
def test_a_captured_call_replays_with_other_routing_bit_equal_to_eager(rows: RowScheme) -> None:
    device = torch.device("cuda")
    for comm_stream_bytes in (0, 1 << 30):
        limits = SymmMemLimits(
            wait_limit_s=20, put_programs=8, combine_programs=8, comm_stream_bytes=comm_stream_bytes
        )
        shape = make_shape(2, dtype=torch.bfloat16, rows=rows)
        backends = make_virtual_ranks(shape, device, limits)
        streams = [torch.cuda.Stream(device) for _ in backends]
        static = [to_device(stress_tokens(shape, (3, 5), r, 0), device) for r in range(2)]

        def eager(backends: Any = backends, streams: Any = streams, own: Any = static) -> Any:
            shape = backends[0].shape
            pending, combining, outputs = {}, {}, {}
            for rank, backend in enumerate(backends):
                with torch.cuda.stream(streams[rank]):
                    pending[rank] = backend.dispatch(backend.prepare(own[rank]))
            for rank, backend in enumerate(backends):
                with torch.cuda.stream(streams[rank]):
                    received, handle = pending[rank].wait()
                    scale = expert_scale(shape, rank, device)
                    output = coded_output(received, scale, shape.dtype)
                    combining[rank] = backend.combine(output, handle)
            for rank in range(len(backends)):
                with torch.cuda.stream(streams[rank]):
                    outputs[rank] = combining[rank].wait(own[rank].hidden_states)
            torch.cuda.synchronize()
            return outputs

        eager()
        captured = [graph_of(backends[r], static[r], r, streams[r]) for r in range(2)]
        for index in (1, 2, 3, 4):
            for rank in range(2):
                fresh = to_device(stress_tokens(shape, (3, 5), rank, index), device)
                static[rank].hidden_states.copy_(fresh.hidden_states)
                static[rank].topk_ids.copy_(fresh.topk_ids)
                static[rank].topk_weights.copy_(fresh.topk_weights)
            torch.cuda.synchronize()
            for rank, (graph, _, _) in enumerate(captured):
                with torch.cuda.stream(streams[rank]):
                    graph.replay()
            torch.cuda.synchronize()
            replayed = [output.clone() for _, output, _ in captured]
            wanted = eager()
            for rank in range(2):
                backends[rank].check()
                assert torch.equal(replayed[rank], wanted[rank]), (index, rank)


@pytest.mark.gpu
def test_a_decode_call_is_four_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    shape = make_shape(1, num_experts=8, hidden_size=7168, max_tokens=128, dtype=torch.bfloat16)
    backend = make_virtual_ranks(shape, device)[0]
    own = to_device(stress_tokens(shape, (128,), 0, 0), device)
    launched: list[str] = []
    released = PreparedLaunch.__call__

    def count(launch: PreparedLaunch, *arguments: Any, **keywords: Any) -> None:
        launched.append(launch.kernel.__name__)
        released(launch, *arguments, **keywords)

    def count_others(kernel: Any, *arguments: Any, warmup: bool, **keywords: Any) -> Any:
        launched.extend([] if warmup else [f"{kernel.__name__}, not prepared"])
        return run(kernel, *arguments, warmup=warmup, **keywords)

    run = JITFunction.run
    monkeypatch.setattr(PreparedLaunch, "__call__", count)
    monkeypatch.setattr(JITFunction, "run", count_others)
    received, handle = backend.dispatch(backend.prepare(own)).wait()
    backend.combine(torch.zeros_like(received.hidden_states), handle).wait(own.hidden_states)
    kernels = ("_put_tokens_kernel", "_wait_kernel", "_put_results_kernel", "_sum_results_kernel")
    assert launched == list(kernels)


@pytest.mark.gpu
def test_the_combine_runs_beside_work_issued_in_its_window() -> None:
    """Read from a profiler's trace: a matrix product begins before the put has ended."""
    from torch.profiler import ProfilerActivity, profile

    device = torch.device("cuda")
    shape = make_shape(
        2, num_experts=8, hidden_size=7168, max_tokens=4096, dtype=torch.bfloat16, top_k=8
    )
    limits = SymmMemLimits(wait_limit_s=20, combine_programs=8)
    backends = make_virtual_ranks(shape, device, limits)
    tokens = [to_device(stress_tokens(shape, (4096, 4096), r, 0), device) for r in range(2)]
    square = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def call() -> None:
        landed = [d.wait() for d in dispatch_all(backends, tokens)]
        combining = []
        for backend, (received, handle) in zip(backends, landed, strict=True):
            combining.append(backend.combine(received.hidden_states.clone(), handle))
            torch.mm(square, square)
        for pending in combining:
            pending.wait()
        torch.cuda.synchronize()

    call()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
    spans = [
        (event.name, event.time_range.start, event.time_range.end) for event in profiler.events()
    ]
    puts = [span for span in spans if "_put_results" in span[0]]
    products = [span for span in spans if "gemm" in span[0].lower() or "nvjet" in span[0].lower()]
    assert puts
    assert products
    assert any(p[1] < m[1] < p[2] or m[1] < p[1] < m[2] for p in puts for m in products)
