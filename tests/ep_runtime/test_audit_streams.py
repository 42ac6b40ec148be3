"""The stream audit finds every planted fault, and nothing in the real code.

A fault is planted in the runner's own code: one method of it is replaced. Each test says which two
operations must be reported, on which streams.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime import audit_streams
from ep_runtime.all2all.all_to_all import AllToAllBackend
from ep_runtime.all2all.collectives import Collective, start_all_gather
from ep_runtime.all2all.comm_stream import CommStream
from ep_runtime.all2all.registry import backend_names
from ep_runtime.audit_stand_ins import registered_stand_ins
from ep_runtime.audit_streams import (
    AuditCase,
    AuditResult,
    audit_case,
    audited_config,
    plan_case,
)
from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import NEVER_REVIEWED
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.registry import experts_names
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.layer import MoELayer
from ep_runtime.modular_kernel import CallSchedule
from ep_runtime.ownership import Regime, Schedule
from ep_runtime.plan import Plan
from ep_runtime.runner import MoERunner
from ep_runtime.shared_expert import SharedExpert
from ep_runtime.stream_recorder import RecordedStream, StreamRecorder
from ep_runtime.streams import CudaStreams

MOE = audited_config(
    MoEConfig(
        hidden_size=32,
        moe_intermediate_size=32,
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        shared_expert_gate=True,
        dtype="bfloat16",
    )
)
WEIGHTS = SeededWeights(MOE, seed=0, device=torch.device("cpu"))
needs_interpreter = pytest.mark.skipif(
    not is_interpreting(), reason="Triton compiles for CUDA in this process"
)


def _audit(backend: str, experts: str = "reference", overlap: str = "auto") -> AuditResult:
    result = audit_case(MOE, WEIGHTS.fill, AuditCase(backend, experts, overlap))
    assert result.skip_reason is None
    return result


def _must_find(result: AuditResult, pattern: str) -> None:
    """Some fault reads like this; first and second operation, with their streams."""
    assert any(re.search(pattern, fault) for fault in result.faults), "\n".join(result.faults)


# --- the real code ---

_CLEAN = [
    ("local", "reference", "auto"),
    ("local", "reference", "off"),
    ("local", "stand_in_exclusive", "auto"),
    ("local", "stand_in_unsafe", "auto"),
    ("local", "stand_in_monolithic_certified", "auto"),
    ("local", "stand_in_monolithic_exclusive", "auto"),
    ("local", "stand_in_monolithic_unsafe", "auto"),
    ("naive", "reference", "auto"),
    ("naive", "stand_in_exclusive", "auto"),
    ("all_to_all", "reference", "auto"),
    ("all_to_all", "reference", "off"),
    ("all_to_all", "stand_in_exclusive", "auto"),
    ("all_to_all", "stand_in_unsafe", "auto"),
    ("stand_in_at_issue", "reference", "auto"),
    ("stand_in_at_issue", "reference", "off"),
    ("stand_in_at_issue", "stand_in_exclusive", "auto"),
    ("stand_in_at_join", "reference", "auto"),
    ("deepep_low_latency", "reference", "auto"),
    ("deepep_high_throughput", "reference", "auto"),
]


def test_the_real_code_orders_everything_under_every_schedule() -> None:
    seen: set[str] = set()
    for backend, experts, overlap in _CLEAN:
        result = _audit(backend, experts, overlap)
        assert result.faults == [], result.case
        assert result.num_operations > 450
        seen.update(result.schedules)
    assert seen == {str(schedule) for schedule in Schedule if schedule is not Schedule.NONE}


@needs_interpreter
@pytest.mark.parametrize(
    ("backend", "experts"), [("stand_in_symm_mem", "reference"), ("local", "triton")]
)
def test_launches_of_triton_are_watched_and_ordered(backend: str, experts: str) -> None:
    assert _audit(backend, experts).faults == []


def test_stand_ins_are_told_of_to_nobody() -> None:
    """A user cannot name them in a configuration: they are there while an audit runs."""
    refused = audit_case(MOE, WEIGHTS.fill, AuditCase("local", "deep_gemm", "auto"))
    assert re.search("; use experts: (triton or )?reference$", str(refused.skip_reason))
    refused = audit_case(MOE, WEIGHTS.fill, AuditCase("all_to_all", "stand_in_nothing", "auto"))
    assert "choose one of: auto, triton, " in str(refused.skip_reason)
    assert "stand_in" not in str(refused.skip_reason).replace("'stand_in_nothing'", "")
    refused = audit_case(MOE, WEIGHTS.fill, AuditCase("stand_in_nothing", "reference", "auto"))
    assert "choose one of: auto, local, " in str(refused.skip_reason)
    assert "stand_in" not in str(refused.skip_reason).replace("'stand_in_nothing'", "")


def test_auto_takes_no_stand_in_while_an_audit_runs() -> None:
    with registered_stand_ins(StreamRecorder(), with_triton=False):
        plan = plan_case(MOE, AuditCase("auto", "auto", "auto"))
        assert not any("stand_in" in one for one in (*backend_names(), *experts_names()))
    assert not any("stand_in" in rejection.name for rejection in plan.rejections)
    with pytest.raises(ConfigError, match="stand_in_at_issue' is unknown"):
        plan_case(MOE, AuditCase("stand_in_at_issue", "reference", "auto"))
    with pytest.raises(ConfigError, match="stand_in_unsafe' is unknown"):
        plan_case(MOE, AuditCase("local", "stand_in_unsafe", "auto"))


# --- faults of the runner's streams ---


def _plant_streams(monkeypatch: pytest.MonkeyPatch, **methods: Callable[..., Any]) -> None:
    monkeypatch.setattr(audit_streams, "CudaStreams", type("Planted", (CudaStreams,), methods))


def test_a_missing_join_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant_streams(monkeypatch, join=lambda self: None)
    result = _audit("local")
    _must_find(result, r"write by shared: \w+ on aux; read by add_ on main")
    _must_find(
        result, r"hidden_states.*read by shared: \w+ on aux; write by caller writes its rows"
    )


def test_an_aux_stream_that_does_not_wait_for_the_input_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _plant_streams(monkeypatch, fork=lambda self: None)
    _must_find(
        _audit("local"),
        r"hidden_states.*write by caller writes its rows: \w+ on main; read by shared: \w+ on aux",
    )


def test_an_event_recorded_on_the_wrong_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(self: Any) -> None:
        main = self._cuda.current_stream(self._device)
        main.wait_stream(main)

    _plant_streams(monkeypatch, join=join)
    _must_find(_audit("naive"), r"write by shared: \w+ on aux; read by add_ on main")


def test_a_second_aux_stream_that_is_not_joined_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_aux(self: Any) -> Any:
        return self._cuda.stream(self._cuda.Stream(self._device))

    _plant_streams(monkeypatch, on_aux=on_aux)
    _must_find(_audit("local"), r"write by shared: \w+ on aux 2; read by add_ on main")


def test_an_output_used_before_the_join_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_routed = MoERunner._run_routed
    outputs: list[Tensor] = []

    def run_shared(self: Any, *arguments: Any, **keywords: Any) -> Tensor:
        outputs.append(run_shared_really(self, *arguments, **keywords))
        return outputs[-1]

    def too_early(self: Any, *arguments: Any, **keywords: Any) -> Tensor:
        outputs[-1].sum()
        return run_routed(self, *arguments, **keywords)

    run_shared_really = MoERunner._run_shared
    monkeypatch.setattr(MoERunner, "_run_shared", run_shared)
    monkeypatch.setattr(MoERunner, "_run_routed", too_early)
    monkeypatch.setattr(audit_streams, "TOKEN_THRESHOLD", 100)
    _must_find(_audit("local"), r"write by shared: \w+ on aux; read by sum on main")


# --- memory ---


def test_an_input_freed_before_the_join_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared expert gets a copy of the rows that nobody holds until the join."""
    run, run_shared = MoERunner.run, MoERunner._run_shared
    copies: list[Tensor] = []

    def copying(self: Any, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        copies.append(hidden_states.clone())
        return run(self, hidden_states, *arguments, **keywords)

    def with_copy(self: Any, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return run_shared(self, copies.pop(), *arguments, **keywords)

    monkeypatch.setattr(MoERunner, "run", copying)
    monkeypatch.setattr(MoERunner, "_run_shared", with_copy)
    _must_find(_audit("local"), r"of clone.*read by shared: \w+ on aux; free by freeing .* on main")


def test_an_output_allocated_on_the_aux_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory goes back to the aux stream, which may write it while the main one reads."""
    run_shared = MoERunner._run_shared

    def own_output(self: Any, *arguments: Any, out: Tensor | None = None) -> Tensor:
        return run_shared(self, *arguments)

    monkeypatch.setattr(MoERunner, "_run_shared", own_output)
    _must_find(_audit("local"), r"read by add_ on main; free by freeing .* on aux")


def _take_scratch(workspace: Workspace, rows: Tensor) -> None:
    with workspace.frame():
        workspace.take(tuple(rows.shape), rows.dtype).copy_(rows)


def test_a_workspace_shared_by_two_streams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors that have nothing in common but their storage."""
    run_shared, run_experts = SharedExpert.run, ReferenceExperts.run
    workspaces: list[Workspace] = []

    def experts(self: Any, expert_input: Any, weights: Any, workspace: Workspace) -> Tensor:
        _take_scratch(workspace, expert_input.hidden_states)
        return run_experts(self, expert_input, weights, workspace)

    def shared(self: Any, hidden_states: Tensor, **keywords: Any) -> Tensor:
        _take_scratch(workspaces[-1], hidden_states)
        return run_shared(self, hidden_states, **keywords)

    def reserve(self: Workspace, num_bytes: int) -> None:
        workspaces.append(self)
        really_reserve(self, 1 << 16)

    really_reserve = Workspace.reserve
    monkeypatch.setattr(ReferenceExperts, "run", experts)
    monkeypatch.setattr(SharedExpert, "run", shared)
    monkeypatch.setattr(Workspace, "reserve", reserve)
    _must_find(
        _audit("local"), r"the workspace.*write by shared: copy_ on aux; write by experts: copy_ on"
    )
    # In the window of an asynchronous backend both are on the main stream, one after the other.
    assert _audit("all_to_all").faults == []


def test_a_routed_kernel_that_writes_its_input_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_experts = ReferenceExperts.run

    def writing(self: Any, expert_input: Any, *arguments: Any) -> Tensor:
        expert_input.hidden_states.mul_(1)
        return run_experts(self, expert_input, *arguments)

    monkeypatch.setattr(ReferenceExperts, "run", writing)
    _must_find(
        _audit("local"),
        r"hidden_states.*read by shared: \w+ on aux; write by experts: mul_ on main",
    )


# --- kernels that need the device to themselves ---


@pytest.mark.parametrize("form", ["", "monolithic_"])
def test_an_exclusive_kernel_with_the_aux_stream_in_flight_is_found(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    call_schedule = MoERunner._call_schedule

    def unjoined(self: Any, *arguments: Any) -> CallSchedule:
        call = call_schedule(self, *arguments)
        return CallSchedule(call.schedule, call.run_shared, before_experts=lambda: None)

    monkeypatch.setattr(MoERunner, "_call_schedule", unjoined)
    _must_find(
        _audit("local", f"stand_in_{form}exclusive"),
        r"beside by shared: \w+ on aux; alone by experts: launch on main",
    )


def _force(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    regime = Regime(None, schedule, "planted", "planted")
    monkeypatch.setattr(Plan, "regime", lambda self, num_tokens: regime)


@pytest.mark.parametrize("concurrency", ["exclusive", "unsafe"])
def test_an_uncertified_kernel_beside_the_aux_stream_is_found(
    monkeypatch: pytest.MonkeyPatch, concurrency: str
) -> None:
    _force(monkeypatch, Schedule.AUX_STREAM)
    _must_find(
        _audit("naive", f"stand_in_{concurrency}"),
        r"beside by shared: \w+ on aux; alone by experts: launch on main",
    )


def test_communication_in_flight_beside_an_uncertified_shared_expert_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedExpert, "concurrency_rules", NEVER_REVIEWED)
    assert _audit("all_to_all").faults == [], "the plan joins communication first"
    _force(monkeypatch, Schedule.COMBINE_WINDOW)
    _must_find(
        _audit("all_to_all"),
        r"beside by collective: copy_ on collectives; alone by shared: launch on main",
    )


def test_a_shared_expert_beside_communication_that_is_not_certified_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unsafe = replace(AllToAllBackend.capabilities, communication=NEVER_REVIEWED[0])
    monkeypatch.setattr(AllToAllBackend, "capabilities", unsafe)
    result = _audit("all_to_all")
    assert result.schedules == ("combine_joined",)
    assert result.faults == []
    _force(monkeypatch, Schedule.COMBINE_WINDOW)
    _must_find(
        _audit("all_to_all"),
        r"beside by collective: copy_ on collectives; alone by shared: launch on main",
    )


# --- communication streams ---


def test_results_read_before_their_collective_is_joined_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Collective, "join", lambda self: None)
    _must_find(
        _audit("all_to_all"),
        r"write by collective: copy_ on collectives; read by (combine|dispatch): \w+ on main",
    )


def test_a_bias_that_combine_takes_at_its_issue_must_be_ready_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecordedStream, "wait_stream", lambda self, other: None)
    _must_find(
        _audit("stand_in_at_issue"), r"write by shared: \w+ on main; read by combine: copy_ on comm"
    )


@needs_interpreter
@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        (
            "join",
            r"write by dispatch: _put_tokens_kernel on communication; read by experts: \w+ on",
        ),
        ("mark_end", r"write by dispatch: _put_tokens_kernel on communication; read by experts:"),
        (
            "follow_current_stream",
            r"write by caller writes its rows: copy_ on main; read by dispatch: _put_tokens_kernel",
        ),
    ],
)
def test_a_put_that_is_not_ordered_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, pattern: str
) -> None:
    monkeypatch.setattr(CommStream, method, lambda self, *arguments: None)
    _must_find(_audit("stand_in_symm_mem"), pattern)


def test_a_collective_on_the_aux_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_shared = SharedExpert.run
    groups: list[Any] = []
    really_build = MoELayer._build_kernel

    def build_kernel(self: Any, plan: Plan, ctx: Any) -> Any:
        groups.append(ctx.ep_group)
        return really_build(self, plan, ctx)

    def gathering(self: Any, hidden_states: Tensor, **keywords: Any) -> Tensor:
        gathered = torch.empty_like(hidden_states)
        start_all_gather(gathered, hidden_states, groups[-1]).join()
        return run_shared(self, gathered, **keywords)

    monkeypatch.setattr(MoELayer, "_build_kernel", build_kernel)
    monkeypatch.setattr(SharedExpert, "run", gathering)
    _must_find(_audit("local"), "a collective was issued on aux")
