"""The audit on a GPU finds planted races there, and nothing in the real code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.audit_gpu import Gpu, GpuResult, GpuSite, gpu_machine
from ep_runtime.audit_gpu_checks import GpuAuditOptions, PlannedCheck, run_checks
from ep_runtime.audit_streams import AuditCase
from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import ModularExperts
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.runner import MoERunner
from ep_runtime.streams import CudaStreams

LAYER = MoEConfig(
    hidden_size=1024,
    moe_intermediate_size=512,
    num_experts=16,
    top_k=4,
    num_shared_experts=1,
    dtype="bfloat16",
)


def run_on_gpu(check: str, case: AuditCase, moe: MoEConfig = LAYER, **options: Any) -> GpuResult:
    device = torch.device("cuda", torch.cuda.current_device())
    weights = SeededWeights(moe, seed=0, device=device)
    (result,) = run_checks(
        moe,
        weights.fill,
        [PlannedCheck(check, case, (case.backend,))],
        GpuAuditOptions(**options),
        site=GpuSite(Gpu(device)),
        machine=gpu_machine(),
        step=lambda name: None,
    )
    assert result.skip_reason is None
    return result


def plant(monkeypatch: pytest.MonkeyPatch, **methods: Callable[..., Any]) -> None:
    for name, method in methods.items():
        monkeypatch.setattr(CudaStreams, name, method)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ["sanitizer", "allocator"])
@pytest.mark.parametrize("backend", ["local", "stand_in_symm_mem", "stand_in_at_issue"])
def test_nothing_is_found_on_a_gpu(check: str, backend: str) -> None:
    result = run_on_gpu(check, AuditCase(backend, "triton", "auto"), seconds=10)
    assert (result.faults, result.num_wrong) == ((), 0)
    assert result.num_iterations >= 5


@pytest.mark.gpu
def test_the_sanitizer_finds_a_missing_join_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, join=lambda self: None)
    result = run_on_gpu("sanitizer", AuditCase("local", "triton", "auto"))
    assert any("not ordered" in fault and "aten::" in fault for fault in result.faults)


@pytest.mark.gpu
def test_the_sanitizer_finds_two_streams_in_one_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernel once more, on the aux stream, in the layer's own workspace."""
    run = MoERunner._run_shared

    def with_experts(self: Any, *arguments: Any, **keywords: Any) -> Tensor:
        again[0]()
        return run(self, *arguments, **keywords)

    again: list[Callable[[], object]] = [lambda: None]
    from ep_runtime import modular_kernel
    from ep_runtime.kernels.experts_operators import run_experts as released

    def remembered(experts: ModularExperts, *arguments: Any) -> Tensor:
        again[0] = lambda: released(experts, *arguments)
        return released(experts, *arguments)

    monkeypatch.setattr(modular_kernel, "run_experts", remembered)
    monkeypatch.setattr(MoERunner, "_run_shared", with_experts)
    result = run_on_gpu("sanitizer", AuditCase("local", "triton", "auto"))
    assert any(
        "ep_runtime::run_experts" in fault and "writing to workspace" in fault
        for fault in result.faults
    )


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["join", "fork"])
def test_the_allocator_stress_finds_streams_that_are_not_ordered(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, **{method: lambda self: None})
    result = run_on_gpu("allocator", AuditCase("local", "triton", "auto"), seconds=20)
    assert result.num_wrong > 0


@pytest.mark.gpu
def test_the_allocator_stress_finds_rows_freed_before_the_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    result = run_on_gpu("allocator", AuditCase("local", "triton", "auto"), seconds=20)
    assert result.num_wrong > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "backend"),
    [("triton", "local"), ("triton_batched", "deepep_low_latency"), ("reference", "local")],
)
def test_a_certified_kernel_beside_company_gives_its_bits_alone(experts: str, backend: str) -> None:
    result = run_on_gpu("co_run", AuditCase(backend, experts, "auto"), seconds=8)
    assert (result.faults, result.num_wrong, result.joined) == ((), 0, False)
    assert result.num_iterations >= (100 if experts == "reference" else 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["resident", "nvfp4_nf3_hybrid"])
def test_a_grid_that_waits_for_itself_is_joined_with_its_company(experts: str) -> None:
    """Occupants, the shared expert, and the same kernel in another workspace, in random order."""
    scheme = {"weight": experts, "nvfp4_experts": [0, 3, 8]} if experts != "resident" else "none"
    moe = MoEConfig(**LAYER.model_dump() | {"quantization": scheme})
    result = run_on_gpu("co_run", AuditCase("local", experts, "auto"), moe, seconds=8)
    assert (result.faults, result.num_wrong, result.joined) == ((), 0, True)
    assert result.num_iterations >= 300


@pytest.mark.gpu
def test_a_co_run_finds_scratch_that_calls_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves its result in a buffer of its own, which it copies out some time later.

    Results of different sizes are different there; a second one of the same call would not show.
    """
    from ep_runtime.kernels.triton_experts import TritonExperts

    run = TritonExperts.run
    shared = torch.empty(4 << 20, device="cuda", dtype=torch.bfloat16)

    def through_buffer(self: Any, *arguments: Any) -> Tensor:
        output = run(self, *arguments)
        buffer = shared[: output.numel()].view_as(output)
        buffer.copy_(output)
        torch.cuda._sleep(50_000)
        return buffer.clone()

    monkeypatch.setattr(TritonExperts, "run", through_buffer)
    moe = LAYER
    result = run_on_gpu("co_run", AuditCase("local", "triton", "auto"), moe, seconds=20)
    assert result.num_wrong > 0 or result.faults


@pytest.mark.gpu
def test_an_occupant_of_the_whole_device_keeps_a_large_kernel_out() -> None:
    gpu = Gpu(torch.device("cuda", torch.cuda.current_device()))
    square = torch.randn(2048, 2048, device=gpu.device, dtype=torch.bfloat16)
    torch.mm(square, square)
    gpu.occupy(1, 1)
    gpu.finish()
    side = gpu.cuda.Stream(gpu.device)
    events = {}
    for num_multiprocessors in (1, gpu.num_multiprocessors):
        with torch.cuda.stream(side):
            done = gpu.occupy(num_multiprocessors, 20_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(square, square)
        end.record()
        gpu.finish()
        assert done.tolist() == [1] * num_multiprocessors
        events[num_multiprocessors] = start.elapsed_time(end)
    assert events[1] < 5
    assert events[gpu.num_multiprocessors] > 15
