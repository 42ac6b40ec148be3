"""The resident experts in a layer: their plan, and that nothing is in flight beside a launch."""

import re
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from ep_runtime.audit_streams import AuditCase, AuditResult, audit_case, audited_config
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import PlanError, RankFailure
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.resident_barrier import ACTIVATED
from ep_runtime.kernels.resident_experts import ResidentExperts, RoutingGrid
from ep_runtime.kernels.resident_launch import LaunchArguments
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine, TritonMode
from ep_runtime.modular_kernel import CallSchedule
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.reference import reference_layer
from ep_runtime.rendezvous import Rendezvous
from ep_runtime.runner import MoERunner
from ep_runtime.shared_expert import SharedExpert
from tests.harness import run_ranks
from tests.kernels.occupant import num_multiprocessors, occupy
from tests.tolerances import assert_close

H200 = Machine.preset("h200x8")
MOE = MoEConfig(
    hidden_size=48,
    moe_intermediate_size=32,
    num_experts=6,
    top_k=2,
    norm_topk_prob=True,
    num_shared_experts=1,
    dtype="float32",
)
LARGE = MOE.model_copy(
    update={
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_intermediate_size": 512,
        "num_experts": 8,
        "top_k": 4,
        "dtype": "bfloat16",
    }
)
needs_interpreter = pytest.mark.skipif(
    not is_interpreting(), reason="Triton compiles for CUDA in this process"
)


def _seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _weights(moe: MoEConfig) -> dict[str, Any]:
    """Of all experts, in the layer's dtype but for the router's."""
    experts, hidden, width = moe.num_experts, moe.hidden_size, moe.moe_intermediate_size
    shared = moe.shared_intermediate_size

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(moe.torch_dtype)

    return {
        "w13": rounded(_seeded(1, experts, 2 * width, hidden) / hidden**0.5),
        "w2": rounded(_seeded(2, experts, hidden, width) / width**0.5),
        "router": _seeded(3, experts, hidden) / hidden**0.5,
        "shared": {
            "w13": rounded(_seeded(4, 2 * shared, hidden) / hidden**0.5),
            "w2": rounded(_seeded(5, hidden, shared) / shared**0.5),
            "gate": None,
        },
    }


def _rows(moe: MoEConfig, rank: int, num_rows: int) -> Tensor:
    return _seeded(100 + rank, num_rows, moe.hidden_size).to(moe.torch_dtype)


# --- the plan ---


def _plan(machine: Machine = H200, experts: str = "resident", **parallel: Any) -> Plan:
    return resolve_plan(MOE, ParallelConfig(**parallel), machine, experts=experts)


def test_more_rows_a_round_than_it_takes_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"experts resident cannot be used.*at most 64 rows.*256"):
        _plan()
    named = (
        r"ep_size \(2\) times max_tokens_per_rank \(64\) is 128; set max_tokens_per_rank: 32, or "
        r"use experts: triton or reference$"
    )
    with pytest.raises(PlanError, match=named):
        _plan(dp_size=2, max_tokens_per_rank=64)
    with pytest.raises(PlanError, match=r"\(1\) is 128; use experts: triton or reference$"):
        _plan(dp_size=128, max_tokens_per_rank=1)
    plan = _plan(dp_size=2, max_tokens_per_rank=32)
    assert (plan.experts, plan.backend) == ("resident", "naive")


def test_only_kernels_that_could_run_the_layer_cure_too_many_rows() -> None:
    """Batched rows are not triton's, and an unusable Triton runs neither."""
    with_deep_ep = replace(H200, packages=("deep_ep",))
    batched = ParallelConfig(
        dp_size=2, all2all_backend="deepep_low_latency", max_tokens_per_rank=64
    )
    with pytest.raises(PlanError, match=r"32, or use experts: triton_batched or reference$"):
        resolve_plan(LARGE, batched, with_deep_ep, experts="resident")
    without = replace(H200, triton=TritonMode.UNUSABLE)
    with pytest.raises(PlanError, match=r"max_tokens_per_rank: 64, or use experts: reference$"):
        _plan(without)


def test_the_backends_that_gather_rows_are_told_of_where_one_does_not() -> None:
    gathering = r"which backend all_to_all does not do; use all2all_backend: naive$"
    with pytest.raises(PlanError, match=gathering):
        _plan(dp_size=2, max_tokens_per_rank=8, all2all_backend="all_to_all")


def test_another_generation_of_gpu_is_refused_by_name() -> None:
    other = Machine.from_dict(H200.to_dict() | {"compute_capability": (8, 0)})
    with pytest.raises(PlanError, match=r"runs on sm_90, and .* is sm_80"):
        _plan(other, max_tokens_per_rank=64)


@pytest.mark.parametrize("backend", ["local", "naive"])
def test_auto_never_takes_it(backend: str) -> None:
    dp_size = 1 if backend == "local" else 2
    plan = _plan(experts="auto", all2all_backend=backend, dp_size=dp_size, max_tokens_per_rank=8)
    (why,) = [r.reason for r in plan.rejections if r.name == "resident"]
    assert "monolithic and takes no given topk_ids" in why


@pytest.mark.parametrize("num_tokens", [1, 8, 64, 3072])
def test_the_aux_stream_is_joined_before_its_launch_whatever_the_number_of_rows(
    num_tokens: int,
) -> None:
    """More rows than a round has come in rounds, each of which is exclusive."""
    shared = SharedExpertsConfig(token_threshold=4096)
    parallel = ParallelConfig(max_tokens_per_rank=64)
    plan = resolve_plan(MOE, parallel, H200, experts="resident", shared_experts=shared)
    assert plan.regime(num_tokens).schedule == "aux_stream_before_experts"
    assert "grid waits for its own programs" in plan.explain()


# --- layers ---


def compute_layer(ctx: EPContext, num_rows: tuple[int, ...]) -> Tensor:
    layer = MoELayer(MOE, ctx, experts="resident")
    layer.load_experts(**_weights(MOE))
    outputs: list[Tensor] = [layer(_rows(MOE, ctx.rank, num_rows[ctx.rank])) for _ in range(2)]
    assert torch.equal(outputs[0], outputs[1])
    return outputs[0]


@needs_interpreter
@pytest.mark.parametrize("num_rows", [(5,), (3, 5), (0, 4), (0, 0)])
def test_a_layer_gives_what_its_definition_does(num_rows: tuple[int, ...]) -> None:
    """In rounds of 2 rows; several ranks gather them."""
    parallel = ParallelConfig(
        dp_size=len(num_rows), all2all_backend="auto", device="cpu", max_tokens_per_rank=2
    )
    outputs = run_ranks(compute_layer, parallel, num_rows)
    for rank, output in enumerate(outputs):
        expected = reference_layer(_rows(MOE, rank, num_rows[rank]), MOE, **_weights(MOE))
        assert output.shape == expected.shape
        assert_close(output, expected)


# --- the audit ---


def _audit(**changes: Any) -> AuditResult:
    moe = audited_config(MOE.model_copy(update=changes))
    fill = SeededWeights(moe, seed=0, device=torch.device("cpu")).fill
    return audit_case(moe, fill, AuditCase("local", "resident", "auto"))


@needs_interpreter
def test_the_audit_finds_everything_ordered() -> None:
    result = _audit()
    assert result.skip_reason is None
    assert result.faults == []
    assert "aux_stream_before_experts" in result.schedules


def _without_early_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner launches the experts while the shared expert may still run."""
    call_schedule = MoERunner._call_schedule

    def unjoined(self: Any, *arguments: Any) -> CallSchedule:
        call = call_schedule(self, *arguments)
        return CallSchedule(call.schedule, call.run_shared, before_experts=lambda: None)

    monkeypatch.setattr(MoERunner, "_call_schedule", unjoined)


@needs_interpreter
def test_the_audit_finds_a_launch_beside_the_shared_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_early_join(monkeypatch)
    pattern = r"beside by shared: \w+ on aux; alone by experts: launch on main"
    assert any(re.search(pattern, fault) for fault in _audit().faults)


# --- beside an occupant, on a GPU ---

LIMIT_S, HOLD_S = 0.25, 1.5


def _start_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may hold back a cooperative grid as a whole, so launch another."""
    arguments_of = RoutingGrid._arguments

    def not_cooperative(self: RoutingGrid, *arguments: Any) -> LaunchArguments:
        positional, constants = arguments_of(self, *arguments)
        return positional, constants | {"launch_cooperative_grid": False}

    monkeypatch.setattr(RoutingGrid, "_arguments", not_cooperative)


def _occupied_layer(ctx: EPContext, monkeypatch: pytest.MonkeyPatch) -> tuple[MoELayer, Tensor]:
    """A layer whose shared expert holds half of the multiprocessors for long before it computes,
    and its output without that."""
    _start_where_there_is_room(monkeypatch)
    layer = MoELayer(LARGE, ctx, experts="resident")
    layer.load_experts(**_weights(LARGE))
    rows = _rows(LARGE, 0, 8).to(ctx.device)
    expected = layer(rows)
    occupy(1, 0.0)
    torch.cuda.synchronize()
    run_shared = SharedExpert.run

    def occupied(self: SharedExpert, *arguments: Any, **keywords: Any) -> Tensor:
        occupy(num_multiprocessors() // 2, HOLD_S)
        return run_shared(self, *arguments, **keywords)

    monkeypatch.setattr(SharedExpert, "run", occupied)
    experts = layer.experts
    assert isinstance(experts, ResidentExperts)
    experts.grid.wait_limit_s = LIMIT_S
    assert layer.plan.regime(8).schedule == "aux_stream_before_experts"
    return layer, expected


def _one_gpu() -> EPContext:
    parallel = ParallelConfig(device="cuda", max_tokens_per_rank=64)
    return init_distributed(parallel, rendezvous=Rendezvous(HashStore(), 0, 1))


@pytest.mark.gpu
def test_joined_before_the_launch_an_occupant_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _one_gpu() as ctx:
        layer, expected = _occupied_layer(ctx, monkeypatch)
        rows = _rows(LARGE, 0, 8).to(ctx.device)
        assert torch.equal(layer(rows), expected)
        assert_close(expected.cpu(), reference_layer(rows.cpu(), LARGE, **_weights(LARGE)))
        ctx.check()


@pytest.mark.gpu
def test_without_the_join_the_launch_ends_in_an_error_that_names_its_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = _one_gpu()
    layer, _ = _occupied_layer(ctx, monkeypatch)
    _without_early_join(monkeypatch)
    rows = _rows(LARGE, 0, 8).to(ctx.device)
    start = time.monotonic()
    output = layer(rows)
    torch.cuda.synchronize()
    assert time.monotonic() - start < HOLD_S + 1
    assert output.isnan().any()
    with pytest.raises(RankFailure, match=r"experts resident: .* of \d+ programs had arrived"):
        layer(rows)
    with suppress(RankFailure):
        ctx.close()


@needs_interpreter
def test_the_context_tells_of_a_barrier_that_was_waited_for_in_vain() -> None:
    parallel = ParallelConfig(device="cpu", max_tokens_per_rank=8)
    ctx = init_distributed(parallel, rendezvous=Rendezvous(HashStore(), 0, 1))
    layer = MoELayer(MOE, ctx, experts="resident")
    layer.load_experts(**_weights(MOE))
    layer(_rows(MOE, 0, 3))
    ctx.check()
    experts = layer.experts
    assert isinstance(experts, ResidentExperts)
    assert experts.grid._record is not None
    experts.grid._record[0] = ACTIVATED << 48 | 1 << 24 | 2
    for end in (ctx.check, ctx.close):
        with pytest.raises(RankFailure, match=r"experts resident: .* 1 of 2 programs"):
            end()
