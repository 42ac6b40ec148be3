"""The audit on a GPU, on a CPU: its plan of cases, its schedules, what it makes of results."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ep_runtime import audit_allocator, audit_co_run, audit_sanitizer
from ep_runtime.audit_allocator import AllocatorStress, is_bit_equal
from ep_runtime.audit_co_run import Company, CoRun, CoRunStep, co_run_steps
from ep_runtime.audit_gpu import (
    GpuResult,
    GpuSite,
    gpu_config,
    gpu_layer,
    plan_gpu_case,
    takes_of,
)
from ep_runtime.audit_gpu_checks import (
    GpuAuditOptions,
    PlannedCheck,
    _Checker,
    planned_checks,
    run_checks,
)
from ep_runtime.audit_sanitizer import describe_races
from ep_runtime.audit_stand_ins import registered_stand_ins
from ep_runtime.audit_streams import AuditCase, all_cases, audited_machine
from ep_runtime.audit_watchdog import Watchdog
from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import Concurrency
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan
from ep_runtime.runner import MoERunner
from tests.ep_runtime.gpu_stand_in import CpuGpu

SMALL = MoEConfig(
    hidden_size=32,
    moe_intermediate_size=32,
    num_experts=4,
    top_k=2,
    num_shared_experts=1,
    dtype="bfloat16",
)
H200 = Machine.preset("h200x8")
needs_interpreter = pytest.mark.skipif(
    not is_interpreting(), reason="Triton compiles for CUDA in this process"
)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than on a GPU."""
    for module in (audit_allocator, audit_sanitizer):
        monkeypatch.setattr(module, "ROWS", (3, 0))
    monkeypatch.setattr(audit_co_run, "CO_RUN_ROWS", (1, 2, 3))


def run_on_cpu(
    planned: list[PlannedCheck], options: GpuAuditOptions, site: GpuSite | None = None
) -> list[GpuResult]:
    weights = SeededWeights(SMALL, seed=0, device=torch.device("cpu"))
    return list(
        run_checks(
            SMALL,
            weights.fill,
            planned,
            options,
            site=site or GpuSite(CpuGpu()),
            machine=audited_machine(with_triton=True),
            step=lambda name: None,
        )
    )


# --- what is run ---


def test_every_case_meets_the_sanitizer_those_that_overlap_the_stress_each_kernel_a_co_run() -> (
    None
):
    cases = [
        AuditCase(backend, experts, overlap)
        for backend in ("local", "symm_mem")
        for experts in ("triton", "stand_in_exclusive")
        for overlap in ("auto", "off")
    ]
    planned = planned_checks(cases, ("sanitizer", "allocator", "co_run"))
    by_check = {
        check: [item.case for item in planned if item.check == check]
        for check in ("sanitizer", "allocator", "co_run")
    }
    assert by_check["sanitizer"] == cases
    assert by_check["allocator"] == [case for case in cases if case.overlap == "auto"]
    assert [case.experts for case in by_check["co_run"]] == ["triton"]
    assert planned[-1].backends == ("local", "deepep_low_latency")


def test_all_backends_and_kernels_are_planned_on_a_gpu_too() -> None:
    cases = all_cases(with_triton=True)
    backends = {case.backend for case in cases}
    assert {"local", "naive", "all_to_all", "symm_mem", "stand_in_symm_mem"} <= backends
    assert {"deepep_low_latency", "stand_in_at_issue", "stand_in_at_join"} <= backends
    assert {"triton", "triton_batched", "reference"} <= {case.experts for case in cases}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checks": ("sanitiser",)}, "--checks sanitiser: is unknown; choose among sanitizer"),
        ({"iterations": 0}, r"--iterations \(0\) must be above 0"),
        ({"seconds": -1.0}, r"--seconds \(-1\) must be above 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GpuAuditOptions(**options)


def test_sizes_are_cut_and_the_structure_is_kept() -> None:
    large = MoEConfig(
        hidden_size=7168, moe_intermediate_size=4096, num_experts=256, top_k=8, num_shared_experts=1
    )
    cut = gpu_config(large)
    assert (cut.hidden_size, cut.moe_intermediate_size, cut.num_experts) == (2048, 1024, 16)
    assert (cut.top_k, cut.shared_intermediate_size) == (8, 1024)


def test_of_a_hybrid_layer_experts_of_both_tiers_are_left() -> None:
    large = MoEConfig(
        hidden_size=4096,
        moe_intermediate_size=1024,
        num_experts=128,
        top_k=8,
        quantization=QuantScheme(WeightScheme.HYBRID, nvfp4_experts=(100, 101, 102)),
    )
    assert gpu_config(large).quantization.nvfp4_experts == tuple(range(0, 16, 2))
    few = MoEConfig(**large.model_dump() | {"num_experts": 8} | {"quantization": "nvfp4"})
    assert gpu_config(few).quantization == few.quantization


def test_the_allocators_free_blocks_are_taken_in_sizes_that_open_no_segment() -> None:
    def segment(kind: str, *blocks: tuple[str, int]) -> dict[str, Any]:
        return {
            "segment_type": kind,
            "blocks": [{"state": state, "size": size} for state, size in blocks],
        }

    mebibyte = 1 << 20
    segments = [
        segment("small", ("inactive", 2 * mebibyte)),
        segment("small", ("active_allocated", 512), ("inactive", 1024), ("inactive", 1536 * 1024)),
        segment("large", ("inactive", 20 * mebibyte), ("inactive", 512 * 1024)),
        segment("large", ("inactive", 3 << 30), ("active_pending_free", 4 * mebibyte)),
    ]
    assert takes_of(segments) == [
        20 * mebibyte,
        mebibyte,
        mebibyte,
        mebibyte,
        512 * 1024,
        1024,
    ]


# --- the schedule of co-runs ---


def steps(seed: int, num: int = 4000) -> list[CoRunStep]:
    made = co_run_steps(seed, num_calls=3, num_multiprocessors=132, companies=tuple(Company))
    return list(islice(made, num))


def test_a_schedule_is_that_of_its_seed() -> None:
    assert steps(1) == steps(1)
    assert steps(1) != steps(2)


def test_a_schedule_holds_one_to_all_multiprocessors_and_meets_every_company_and_order() -> None:
    made = steps(3)
    held = [step.num_multiprocessors for step in made]
    assert (min(held), max(held)) == (1, 132)
    assert held.count(132) > len(made) / 5
    assert len(set(held)) == 132
    assert {step.company for step in made} == set(Company)
    assert {step.company_first for step in made} == {True, False}
    assert {(step.call, step.company_call) for step in made} == {
        (a, b) for a in range(3) for b in range(3)
    }
    assert all(5 <= step.duration_us <= 400 for step in made)
    assert 0 in {step.kernel_delay_us for step in made}
    alone = co_run_steps(3, num_calls=4, num_multiprocessors=132, companies=(Company.OCCUPANT,))
    assert {step.company for step in islice(alone, 100)} == {Company.OCCUPANT}


# --- the checks, on a CPU ---


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("experts", ["reference", "stand_in_monolithic_certified"])
def test_a_co_run_takes_every_call_of_the_layers_kernel(experts: str) -> None:
    check = PlannedCheck("co_run", AuditCase("", experts, "auto"), ("nowhere", "local"))
    site = GpuSite(CpuGpu())
    (result,) = run_on_cpu(
        [replace(check, backends=("local",))], GpuAuditOptions(iterations=300), site
    )
    assert result.skip_reason is None
    assert (result.faults, result.num_wrong, result.num_iterations) == ((), 0, 300)
    assert (result.concurrency, result.joined) == ("certified", False)
    calls = site.gpu.calls  # type: ignore[attr-defined]
    occupied, delayed = (
        {call[1] for call in calls if call[0] == kind} for kind in ("occupy", "spin")
    )
    assert len(occupied) == len(delayed) == 1
    assert not occupied & (delayed | {"main"})


@pytest.mark.usefixtures("few_rows")
@needs_interpreter
@pytest.mark.parametrize(
    ("experts", "backend"), [("triton", "local"), ("triton_batched", "deepep_low_latency")]
)
def test_a_co_run_of_a_triton_kernel_equals_it_alone(experts: str, backend: str) -> None:
    check = PlannedCheck("co_run", AuditCase("", experts, "auto"), (backend,))
    (result,) = run_on_cpu([check], GpuAuditOptions(iterations=4, seconds=1000))
    assert (result.skip_reason, result.faults, result.num_wrong) == (None, (), 0)
    assert result.num_iterations == 4
    assert result.case.backend == backend


@pytest.mark.usefixtures("few_rows")
def test_a_co_run_of_a_kernel_that_takes_few_rows_has_few() -> None:
    """`resident`: exclusive, and at most 64 rows at once."""
    check = PlannedCheck("co_run", AuditCase("", "resident", "auto"), ("local",))
    site = GpuSite(CpuGpu())
    plan = _Checker(
        SMALL, lambda layer: None, GpuAuditOptions(), site, H200, lambda name: None
    ).plan(check)
    assert isinstance(plan, Plan)
    assert plan.parallel.max_tokens_per_rank == 64


@pytest.mark.usefixtures("few_rows")
def test_a_kernel_that_keeps_state_between_calls_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ReferenceExperts.run
    num_calls = [0]

    def forgetful(self: Any, expert_input: Any, weights: Any, workspace: Workspace) -> Tensor:
        output = run(self, expert_input, weights, workspace)
        num_calls[0] += 1
        return output + 1 if num_calls[0] % 50 == 0 else output

    monkeypatch.setattr(ReferenceExperts, "run", forgetful)
    check = PlannedCheck("co_run", AuditCase("", "reference", "auto"), ("local",))
    (result,) = run_on_cpu([check], GpuAuditOptions(iterations=400))
    assert 0 < result.num_wrong < 20
    assert "company differed" in result.faults[0]
    assert not result.passed


@pytest.mark.usefixtures("few_rows")
def test_the_kernel_beside_itself_has_other_rows_and_so_other_results() -> None:
    """Equal ones could change places unseen."""
    gpu = CpuGpu()
    site = GpuSite(gpu)
    weights = SeededWeights(SMALL, seed=0, device=gpu.device)
    case = AuditCase("local", "reference", "auto")
    plan = plan_gpu_case(SMALL, case, audited_machine(with_triton=True), device="cpu")
    with gpu_layer(plan, weights.fill, site) as layer, torch.no_grad():
        run = CoRun(layer, gpu, seed=0)
    for own, other in zip(run.wanted, run._wanted_of_company, strict=True):
        assert own.shape == other.shape
        assert (own != other).any(1).all()


@pytest.mark.parametrize("unjoined", [False, True])
def test_what_is_not_certified_is_joined_with_its_company_unless_told_otherwise(
    unjoined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_co_run, "CO_RUN_ROWS", (1, 2, 3))
    gpu = CpuGpu()
    site = GpuSite(gpu)
    moe, weights = SMALL, SeededWeights(SMALL, seed=0, device=gpu.device)
    planned = steps(0, 40)
    with registered_stand_ins(site, with_triton=True):
        case = AuditCase("local", "stand_in_exclusive", "auto")
        plan = plan_gpu_case(moe, case, audited_machine(with_triton=True), device="cpu")
        with gpu_layer(plan, weights.fill, site) as layer, torch.no_grad():
            run = CoRun(layer, gpu, seed=0, unjoined=unjoined)
            joins: list[int] = []
            monkeypatch.setattr(run, "join", lambda: joins.append(len(gpu.calls)))
            for step in planned:
                run.run(step)
    assert len(joins) == (0 if unjoined else 3 * len(planned))
    assert run.is_joined(planned[0]) is not unjoined
    assert {call.concurrency for call in run.calls} == {Concurrency.EXCLUSIVE}


@pytest.mark.usefixtures("few_rows")
def test_an_allocator_stress_delays_streams_and_refills_free_memory() -> None:
    site = GpuSite(CpuGpu())
    case = AuditCase("stand_in_at_issue", "reference", "auto")
    check = PlannedCheck("allocator", case, (case.backend,))
    (result,) = run_on_cpu([check], GpuAuditOptions(iterations=1000), site)
    assert (result.skip_reason, result.faults, result.num_wrong) == (None, (), 0)
    assert result.num_iterations == 20
    assert result.schedules == ("dispatch_window", "dispatch_joined")
    calls = site.gpu.calls  # type: ignore[attr-defined]
    late = {call[1] for call in calls if call[0] == "spin"}
    assert len(late) > 2, "the main stream, the collectives' and the combine's"
    assert [call[1] for call in calls if call[0] == "free_blocks"].count("main") > 60
    assert site.cuda is site.gpu.cuda, "delays end with the stress"


def test_a_refill_takes_every_free_block_of_the_main_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = CpuGpu()
    stress = AllocatorStress(gpu, seed=0)
    filled: list[tuple[int, int]] = []
    fill = Tensor.fill_

    def noted(self: Tensor, value: Any) -> Tensor:
        filled.append((self.numel(), value))
        return fill(self, value)

    monkeypatch.setattr(Tensor, "fill_", noted)
    stress.refill()
    assert filled == [(512, 255), (4096, 255)]
    with gpu.cuda.stream(gpu.cuda.Stream(gpu.device)):
        stress.refill()
    assert len(filled) == 2


@pytest.mark.usefixtures("few_rows")
def test_a_collective_on_the_aux_stream_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    run = MoERunner._run_shared

    def gathering(self: Any, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        from ep_runtime.all2all.base import EPGroup
        from ep_runtime.all2all.collectives import start_all_gather

        group = EPGroup(None, 0, 1, hidden_states.device)
        gathered = torch.empty_like(hidden_states)
        start_all_gather(gathered, hidden_states, group).join()
        return run(self, gathered, *arguments, **keywords)

    monkeypatch.setattr(MoERunner, "_run_shared", gathering)
    check = PlannedCheck("allocator", AuditCase("local", "reference", "auto"), ("local",))
    (result,) = run_on_cpu([check], GpuAuditOptions(iterations=100))
    assert result.faults == ("a collective was issued beside the main stream",)
    assert not result.passed


class Sees(TorchDispatchMode):
    """In place of the sanitizer: notes operators, and refuses one."""

    def __init__(self, refused: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused, self.seen = refused, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func._schema.name)
        if func._schema.name == self.refused:
            raise ArithmeticError(f"{self.refused} races")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def sees(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Sees]]:
    from ep_runtime import audit_gpu_checks

    def install(refused: str) -> Sees:
        mode = Sees(refused)
        monkeypatch.setattr(audit_gpu_checks, "sanitizer_mode", lambda: (mode, ArithmeticError))
        audit_gpu_checks._sanitizer.cache_clear()
        return mode

    yield install
    audit_gpu_checks._sanitizer.cache_clear()


@needs_interpreter
@pytest.mark.usefixtures("few_rows")
def test_the_sanitizer_sees_our_kernels_and_what_it_raises_is_a_fault(
    sees: Callable[[str], Sees],
) -> None:
    case = AuditCase("stand_in_symm_mem", "triton", "auto")
    check = PlannedCheck("sanitizer", case, (case.backend,))
    mode = sees("")
    (result,) = run_on_cpu([check], GpuAuditOptions())
    assert (result.skip_reason, result.faults, result.num_iterations) == (None, (), 2)
    ours = {name for name in mode.seen if name.startswith("ep_runtime::")}
    assert ours == {
        "ep_runtime::run_experts",
        "ep_runtime::run_shared_projections",
        "ep_runtime::symm_put_tokens",
        "ep_runtime::symm_put_results",
        "ep_runtime::symm_wait_for_dispatch",
        "ep_runtime::symm_sum_results",
    }
    sees("ep_runtime::run_experts")
    (result,) = run_on_cpu([check], GpuAuditOptions())
    assert result.faults == ("ep_runtime::run_experts races",)
    assert result.num_iterations == 0


class OnCuda(Tensor):
    is_cuda = True


def test_the_sanitizer_looks_at_tensors_with_memory_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of others it knows Python's id(), which one on another stream may have had before."""
    from torch.cuda import _sanitizer

    monkeypatch.setattr(_sanitizer, "ArgumentHandler", _sanitizer.ArgumentHandler)
    for _ in range(2):
        audit_sanitizer.leave_out_empty_tensors(_sanitizer)
    handler = _sanitizer.ArgumentHandler()
    empty, full = (torch.zeros(n).as_subclass(OnCuda) for n in (0, 3))
    add = torch.ops.aten.add_.Tensor._schema
    handler.parse_inputs(add, (empty, empty), {}, is_factory=False)
    assert not handler.dataptrs_read | handler.dataptrs_written
    handler.parse_inputs(add, (full, empty), {}, is_factory=False)
    assert handler.dataptrs_written == {full.data_ptr()}


def test_a_race_that_the_sanitizer_reports_is_one_line() -> None:
    from traceback import FrameSummary, StackSummary

    from torch.cuda._sanitizer import (
        Access,
        AccessType,
        CUDASanitizerErrors,
        SynchronizationError,
        UnsynchronizedAccessError,
    )

    def access(kind: AccessType, stream: int, operator: str, is_output: bool) -> Access:
        frames = [FrameSummary("kernels/a.py", 7, "run"), FrameSummary("/x/torch/b.py", 9, "call")]
        stack = StackSummary.from_list(frames)
        return Access(kind, 1, stream, operator, ["workspace"], is_output, stack)

    current = access(AccessType.WRITE, 16, "ep_runtime::run_experts(Tensor x) -> Tensor", False)
    previous = access(AccessType.READ, 0, "aten::add_(Tensor self)", True)
    races: list[SynchronizationError] = [UnsynchronizedAccessError(4096, None, current, previous)]
    assert describe_races(CUDASanitizerErrors(races)) == [
        "ep_runtime::run_experts on stream 0x10 writing to workspace at kernels/a.py:7; before it "
        "aten::add_ on stream 0x0 reading from workspace, its output at kernels/a.py:7: not ordered"
    ]
    assert describe_races(ArithmeticError("else")) == ["else"]


@pytest.mark.usefixtures("few_rows")
def test_a_check_that_raises_is_a_fault_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Any, *arguments: Any) -> Tensor:
        raise RuntimeError("the barrier of the resident grid ran out")

    monkeypatch.setattr(ReferenceExperts, "run", broken)
    case = AuditCase("", "reference", "auto")
    checks = [PlannedCheck("co_run", case, ("local",))] * 2
    results = run_on_cpu(checks, GpuAuditOptions())
    fault = "RuntimeError: the barrier of the resident grid ran out"
    assert [result.faults for result in results] == [(fault,)] * 2
    gpu = CpuGpu()
    monkeypatch.setattr(gpu.cuda, "synchronize", broken)
    results = run_on_cpu(checks, GpuAuditOptions(), GpuSite(gpu))
    assert results[1].skip_reason == f"the device is lost: {fault.partition(': ')[2]}"


def test_what_cannot_be_planned_says_why() -> None:
    case = AuditCase("", "triton_batched", "auto")
    (result,) = run_on_cpu([PlannedCheck("co_run", case, ("local", "naive"))], GpuAuditOptions())
    assert "backend local delivers standard rows" in str(result.skip_reason)


def test_bits_are_compared_and_not_numbers() -> None:
    nan = torch.full((3,), float("nan"))
    assert is_bit_equal(nan, nan.clone())
    assert not is_bit_equal(torch.zeros(2), -torch.zeros(2))


HANG = """
import time
from ep_runtime.audit_watchdog import Watchdog
with Watchdog(0.5, lambda step, limit: print(f"{step} hangs after {limit:g}", flush=True)) as dog:
    for number in range(4):
        dog.step(f"step {number}")
        time.sleep(0.3)
    dog.step("the last step")
    time.sleep(60)
"""


def test_a_watchdog_says_what_hangs_and_ends_the_process() -> None:
    started = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "the last step hangs after 0.5\n")
    assert time.monotonic() - started < 30


def test_a_watchdog_leaves_alone_what_ends_in_time() -> None:
    with Watchdog(5, lambda step, limit: None) as watchdog:
        watchdog.step("short")
    assert not watchdog._thread.is_alive()
