"""Experts over deep_gemm: its stand-in and Triton's interpreter on a CPU; on CUDA, the package."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import init_distributed
from ep_runtime.kernels import registry, row_passes
from ep_runtime.kernels.base import (
    ActivationKind,
    BatchedExpertInput,
    Concurrency,
    ExpertWeights,
    ModularExperts,
    StandardExpertInput,
)
from ep_runtime.kernels.deep_gemm_batched_experts import DeepGemmBatchedExperts
from ep_runtime.kernels.deep_gemm_experts import DeepGemmExperts
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.layer import MoELayer
from ep_runtime.machine import PRESETS, Machine
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.reference import reference_layer
from tests import fake_deep_gemm
from tests.ep_runtime.stored_experts import quantized_moe, stored_weights
from tests.kernels.cases import RecordingWorkspace, poisoned_workspace
from tests.kernels.fp8_cases import Fp8Case, fp8_expert, fp8_experts, with_fp8_rows
from tests.tolerances import TOLERANCES, relative_error

CPU = torch.device("cpu")
HALF_A_STEP_TWICE = 2**-4  # of e4m3's four significant bits, relative
SMALL = Fp8Case("small", num_experts=3, top_k=3)
CASES = [
    Fp8Case("several_groups", hidden_size=384, intermediate_size=256),
    Fp8Case("gelu", kind=ActivationKind.GELU),
    Fp8Case("swigluoai_with_limit", kind=ActivationKind.SWIGLUOAI, limit=0.7),
    Fp8Case("relu2", kind=ActivationKind.RELU2, intermediate_size=256),
    Fp8Case("one_row", num_rows=1),
    Fp8Case("one_expert", num_experts=1, top_k=1),
    Fp8Case("an_expert_over_several_blocks", num_rows=300, num_experts=2),
    Fp8Case("more_experts_than_slots", num_rows=3, num_experts=9),
]


@pytest.fixture(autouse=True)
def package(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in on a CPU, the real one on CUDA."""
    if device.type == "cuda":
        if importlib.util.find_spec("deep_gemm") is None:
            pytest.skip("deep_gemm is not installed")
    else:
        monkeypatch.setitem(sys.modules, "deep_gemm", fake_deep_gemm)
        monkeypatch.setattr(fake_deep_gemm, "calls", [])
        monkeypatch.setattr(fake_deep_gemm, "_alignment", 128)


def run(
    kernel: ModularExperts,
    expert_input: StandardExpertInput | BatchedExpertInput,
    weights: ExpertWeights,
    workspace: Workspace | None = None,
) -> Tensor:
    """Run in a poisoned workspace of exactly the promised size, or in the one given.

    Torch's deterministic mode fills the output with NaN, so a row that was not computed shows.
    """
    rows = expert_input.hidden_states
    if workspace is None:
        num_bytes = kernel.workspace_bytes(rows.shape[-2])
        workspace = poisoned_workspace(rows.device, num_bytes)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        output = kernel.run(expert_input, kernel.prepare_weights(weights), workspace)
    finally:
        torch.use_deterministic_algorithms(False)
    if isinstance(workspace, RecordingWorkspace):
        assert not workspace.overflowed
    assert output.dtype is torch.bfloat16
    assert output.is_contiguous()
    assert output.shape == rows.shape
    return output


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Of rows and activations quantised alike.

    A GPU adds products up in another order. Where that rounds a group's largest activation
    otherwise, the group's scale moves, and with it each of its e4m3 values, by up to half a step on
    both sides: no row by more than that. Only of three rows or fewer can one such row be more of
    their whole than the tolerance of any.
    """
    limit = TOLERANCES[torch.bfloat16]
    if actual.device.type == "cuda":
        pairs = list(zip(actual.flatten(0, -2), expected.flatten(0, -2), strict=True))
        assert all(relative_error(*pair) <= HALF_A_STEP_TWICE for pair in pairs)
        limit = HALF_A_STEP_TWICE if 0 < len(pairs) <= 3 else limit
    assert relative_error(actual, expected) <= limit


# --- the standard format ---


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_contiguous_layout_equals_the_definition(case: Fp8Case, device: torch.device) -> None:
    expert_input, weights = case.expert_input(device), case.weights(device)
    output = run(DeepGemmExperts(case.shape), expert_input, weights)
    assert_close(output, fp8_experts(expert_input, weights, case))


def test_rows_that_dispatch_quantised_give_the_same_bits(device: torch.device) -> None:
    expert_input, weights = SMALL.expert_input(device), SMALL.weights(device)
    kernel = DeepGemmExperts(SMALL.shape)
    output = run(kernel, expert_input, weights)
    assert torch.equal(run(kernel, with_fp8_rows(expert_input), weights), output)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 19])
def test_rows_from_num_rows_on_are_never_read(num_rows: int, device: torch.device) -> None:
    expert_input, weights = SMALL.expert_input(device), SMALL.weights(device)
    expected = fp8_experts(expert_input, weights, SMALL)[:num_rows]
    expert_input.hidden_states[num_rows:] = torch.nan
    count = torch.tensor([num_rows], dtype=torch.int32, device=device)
    limited = replace(expert_input, num_rows=count)
    output = run(DeepGemmExperts(SMALL.shape), limited, weights)
    assert_close(output[:num_rows], expected)
    assert torch.equal(output[num_rows:], torch.zeros_like(output[num_rows:]))


@pytest.mark.parametrize("ids", [-1, 2, 3])
def test_all_slots_elsewhere_or_on_one_expert(ids: int, device: torch.device) -> None:
    """Id 3 of 3 experts is none of them. An expert whose weights are NaN has then no slot."""
    expert_input, weights = SMALL.expert_input(device), SMALL.weights(device)
    expert_input.topk_ids.fill_(ids)
    expert_input.topk_weights.fill_(0.25)
    assert weights.w13_quant is not None
    weights.w13_quant.scales[:2] = torch.nan
    output = run(DeepGemmExperts(SMALL.shape), expert_input, weights)
    if ids == 2:
        assert_close(output, fp8_experts(expert_input, weights, SMALL))
    else:
        assert torch.equal(output, torch.zeros_like(output))


def test_a_nan_in_one_row_stays_in_that_row(device: torch.device) -> None:
    expert_input, weights = SMALL.expert_input(device), SMALL.weights(device)
    expert_input.topk_ids.fill_(1)
    expert_input.topk_weights.fill_(1.0)
    expected = fp8_experts(expert_input, weights, SMALL)
    expert_input.hidden_states[4] = torch.nan
    output = run(DeepGemmExperts(SMALL.shape), expert_input, weights)
    assert output[4].isnan().all()
    assert_close(torch.cat([output[:4], output[5:]]), torch.cat([expected[:4], expected[5:]]))


def test_rows_in_several_passes_equal_one_pass(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert_input, weights = SMALL.expert_input(device), SMALL.weights(device)
    kernel = DeepGemmExperts(SMALL.shape)
    whole = run(kernel, expert_input, weights)
    monkeypatch.setattr(row_passes, "MAX_SLOTS_PER_PASS", 8 * SMALL.top_k)
    assert torch.equal(run(kernel, expert_input, weights), whole)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    ],
    ids=["every_second_column", "transposed", "slice_of_a_wide_row"],
)
def test_strided_rows(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    expert_input, weights = SMALL.expert_input(device), SMALL.weights(device)
    strided = replace(expert_input, hidden_states=view(expert_input.hidden_states))
    assert not strided.hidden_states.is_contiguous()
    kernel = DeepGemmExperts(SMALL.shape)
    assert torch.equal(run(kernel, strided, weights), run(kernel, expert_input, weights))


def test_no_rows_and_no_local_experts(device: torch.device) -> None:
    none = replace(SMALL, num_rows=0)
    assert run(DeepGemmExperts(none.shape), none.expert_input(device), none.weights(device)).shape
    elsewhere = replace(SMALL, num_experts=0)
    expert_input = SMALL.expert_input(device)
    expert_input.topk_ids.fill_(-1)
    weights = SMALL.weights(device)
    kernel = DeepGemmExperts(elsewhere.shape)
    output = run(kernel, expert_input, replace(weights, w13=weights.w13[:0], w2=weights.w2[:0]))
    assert torch.equal(output, torch.zeros_like(output))


# --- the batched format ---


def batched_input(case: Fp8Case, counts: list[int], device: torch.device) -> BatchedExpertInput:
    """`case.num_rows` is the capacity; NaN past a count."""
    rows = case._random(case.num_experts, case.num_rows, case.hidden_size, salt=5)
    rows = rows.to(device, case.dtype)
    for expert, count in enumerate(counts):
        rows[expert, count:] = torch.nan
    return BatchedExpertInput(rows, torch.tensor(counts, dtype=torch.int32, device=device))


def assert_batched(
    output: Tensor, expert_input: BatchedExpertInput, weights: ExpertWeights, case: Fp8Case
) -> None:
    for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
        rows = expert_input.hidden_states[expert, :count].float()
        if count:
            assert_close(output[expert, :count], fp8_expert(rows, weights, expert, case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_masked_layout_equals_the_definition(case: Fp8Case, device: torch.device) -> None:
    num_rows = min(case.num_rows, 150)
    case = replace(case, num_rows=num_rows)
    counts = [(5 * expert + num_rows) % (num_rows + 1) for expert in range(case.num_experts)]
    expert_input, weights = batched_input(case, counts, device), case.weights(device)
    output = run(DeepGemmBatchedExperts(case.shape), expert_input, weights)
    assert_batched(output, expert_input, weights, case)


@pytest.mark.parametrize("capacity", [19, 128, 130, 256])
@pytest.mark.parametrize("strided_scales", [False, True])
def test_batched_fp8_rows(capacity: int, strided_scales: bool, device: torch.device) -> None:
    """A backend gives the scales either way round."""
    case = replace(SMALL, num_rows=capacity, hidden_size=256)
    plain, weights = batched_input(case, [capacity, 0, 17], device), case.weights(device)
    expert_input = with_fp8_rows(plain)
    if strided_scales:
        assert expert_input.scales is not None
        expert_input = replace(expert_input, scales=expert_input.scales.mT.contiguous().mT)
    kernel = DeepGemmBatchedExperts(case.shape)
    assert_batched(run(kernel, expert_input, weights), plain, weights, case)


def test_fp8_rows_of_whole_blocks_are_read_where_they_are(device: torch.device) -> None:
    """Neither the rows nor the outputs take workspace."""
    case = replace(SMALL, num_rows=128, hidden_size=256)
    expert_input = with_fp8_rows(batched_input(case, [128, 3, 0], device))
    assert expert_input.scales is not None
    expert_input = replace(expert_input, scales=expert_input.scales.mT.contiguous().mT)
    kernel, weights = DeepGemmBatchedExperts(case.shape), case.weights(device)
    workspace = poisoned_workspace(device, kernel.workspace_bytes(128))
    run(kernel, expert_input, weights, workspace)
    activated = 3 * 128 * (128 + 4)
    gate_up = 3 * 128 * 256 * 2
    assert workspace.peak_bytes == activated + gate_up


@pytest.mark.parametrize(
    ("num_source_rows", "num_experts", "expected"),
    [(None, None, 128), (100, None, 128), (30, 24, 4), (20, 24, 2), (1, 24, 1), (10**6, 24, 128)],
)
def test_what_deep_gemm_expects_is_a_power_of_two(
    num_source_rows: int | None, num_experts: int | None, expected: int, device: torch.device
) -> None:
    """Top 3 of 3 local experts, or of 24; never more than fit."""
    if device.type == "cuda":
        pytest.skip("the package does not tell what it was asked")
    case = replace(SMALL, num_rows=100)
    shape = replace(case.shape, num_experts=num_experts)
    expert_input = batched_input(case, [1, 1, 0], device)
    expert_input = replace(expert_input, num_source_rows=num_source_rows)
    run(DeepGemmBatchedExperts(shape), expert_input, case.weights(device))
    assert [call["expected_m"] for _, call in fake_deep_gemm.calls] == [expected] * 2


def test_no_batched_rows(device: torch.device) -> None:
    case = replace(SMALL, num_rows=0)
    kernel, weights = DeepGemmBatchedExperts(case.shape), case.weights(device)
    assert run(kernel, batched_input(case, [0, 0, 0], device), weights).shape == (3, 0, 128)
    some = replace(batched_input(SMALL, [0, 0, 0], device), num_source_rows=0)
    assert run(kernel, some, weights).shape == (3, 19, 128)


# --- both ---


@pytest.mark.parametrize("kernel_class", [DeepGemmExperts, DeepGemmBatchedExperts])
def test_workspace_bytes_never_shrink_with_more_rows(kernel_class: type[ModularExperts]) -> None:
    kernel = kernel_class(SMALL.shape)
    sizes = [kernel.workspace_bytes(num_rows) for num_rows in range(0, 600, 7)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)


def test_a_call_of_fewer_rows_fits_the_reserved_arena(device: torch.device) -> None:
    kernel, weights = DeepGemmExperts(SMALL.shape), SMALL.weights(device)
    expert_input = SMALL.expert_input(device)
    workspace = poisoned_workspace(device, kernel.workspace_bytes(300))
    output = run(kernel, expert_input, weights, workspace)
    assert torch.equal(output, run(kernel, expert_input, weights))


def test_inputs_are_never_written(device: torch.device) -> None:
    expert_input, weights = SMALL.expert_input(device), SMALL.weights(device)
    batched = batched_input(SMALL, [19, 0, 4], device)
    given = [expert_input.hidden_states, expert_input.topk_weights, batched.hidden_states]
    before = [tensor.clone() for tensor in given]
    run(DeepGemmExperts(SMALL.shape), expert_input, weights)
    run(DeepGemmBatchedExperts(SMALL.shape), batched, weights)
    for tensor, copy in zip(given, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


def test_prepared_weights_are_the_ones_given_unless_their_layout_is_another(
    device: torch.device,
) -> None:
    weights = SMALL.weights(device)
    kernel = DeepGemmExperts(SMALL.shape)
    same = kernel.prepare_weights(weights)
    assert same.w13.data_ptr() == weights.w13.data_ptr()
    assert same.w13_quant is not None
    assert weights.w13_quant is not None
    assert same.w13_quant.scales.data_ptr() == weights.w13_quant.scales.data_ptr()
    turned = replace(weights, w2=weights.w2.mT.contiguous().mT)
    expert_input = SMALL.expert_input(device)
    assert torch.equal(run(kernel, expert_input, turned), run(kernel, expert_input, weights))


def test_each_refuses_the_others_format(device: torch.device) -> None:
    weights, workspace = SMALL.weights(device), Workspace(device)
    with pytest.raises(PlanError, match="choose experts: deep_gemm_batched"):
        DeepGemmExperts(SMALL.shape).run(
            batched_input(SMALL, [1, 1, 1], device), weights, workspace
        )
    with pytest.raises(PlanError, match=r"choose experts: deep_gemm$"):
        DeepGemmBatchedExperts(SMALL.shape).run(SMALL.expert_input(device), weights, workspace)


def test_weights_that_were_not_prepared_are_refused(device: torch.device) -> None:
    with pytest.raises(PlanError, match="deep_gemm runs on weights that its prepare_weights"):
        DeepGemmExperts(SMALL.shape).run(
            SMALL.expert_input(device), SMALL.weights(device), Workspace(device)
        )


# --- the package ---


def test_another_alignment_in_the_process_is_refused(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the package's is set by whoever else uses it; the stand-in's is set here")
    kernel, weights = DeepGemmExperts(SMALL.shape), SMALL.weights(CPU)
    kernel.prepare_weights(weights)
    fake_deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    with pytest.raises(PlanError, match=r"at 128, .* set it to 64; call .*layout\(128\)"):
        kernel.run(SMALL.expert_input(CPU), weights, Workspace(CPU))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["m_grouped_gemm_fp8_fp8_bf16_nt_contiguous"], "has API generation V1"),
        (["m_grouped_fp8_gemm_nt_contiguous"], "V2, without m_grouped_fp8_gemm_nt_masked"),
        ([], "is not DeepGEMM"),
    ],
)
def test_another_generation_is_refused_by_name(
    names: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", fake_deep_gemm.module_with(*names))
    with pytest.raises(PlanError, match=message + r".*ep-runtime\[deepgemm\]"):
        DeepGemmExperts(SMALL.shape).prepare_weights(SMALL.weights(CPU))


def test_an_import_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise AssertionError("cuda_home is not None")

    monkeypatch.setattr("ep_runtime.kernels.deep_gemm_package.import_module", fail)
    with pytest.raises(PlanError, match=r"import failed: cuda_home is not None; .*CUDA_HOME"):
        DeepGemmExperts(SMALL.shape).prepare_weights(SMALL.weights(CPU))


def test_every_triton_kernel_compiles_for_sm_90(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("here they run")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.deep_gemm_gate"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    new = {"_activate_rows_kernel", "_index_positions_kernel", "_sum_slots_kernel"}
    assert new <= set(json.loads(done.stdout))


# --- the plan ---

H200 = replace(PRESETS["h200x8"], packages=("deep_gemm", "deep_ep"))


def plan(experts: str, machine: Machine = H200, backend: str = "auto", **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 8,
        "top_k": 2,
        "dtype": "bfloat16",
        "quantization": "fp8_block",
    }
    moe = MoEConfig.model_validate(values | changes)
    parallel = ParallelConfig(dp_size=8, device="cuda", all2all_backend=backend)
    return resolve_plan(moe, parallel, machine, experts=experts)


def test_a_plan_takes_it_by_name_with_rows_in_fp8() -> None:
    standard = plan("deep_gemm")
    assert (standard.backend, standard.experts, standard.rows) == ("symm_mem", "deep_gemm", "fp8")
    batched = plan("deep_gemm_batched", backend="deepep_low_latency")
    assert (batched.experts, batched.rows) == ("deep_gemm_batched", "fp8")
    assert plan("auto").experts == "triton"


@pytest.mark.parametrize("experts", ["deep_gemm", "deep_gemm_batched"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 2880}, r"hidden_size \(2880\) is not a multiple of 128"),
        ({"moe_intermediate_size": 416}, r"moe_intermediate_size \(416\) is not a multiple"),
        ({"dtype": "float16"}, "dtype float16 is not among its bfloat16"),
        ({"quantization": "fp8_channel"}, "it takes weights stored as fp8_block"),
        ({"expert_bias": True}, "it has no bias"),
        ({"machine": replace(H200, packages=())}, r"package deep_gemm.*ep-runtime\[deepgemm\]"),
        (
            {"machine": replace(H200, name="NVIDIA B200", compute_capability=(10, 0))},
            "it runs on sm_90, and NVIDIA B200 is sm_100",
        ),
        ({"machine": PRESETS["cpu"]}, "it runs on cuda, and the device is cpu"),
    ],
)
def test_a_plan_refuses_what_it_cannot_do(
    experts: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=f"experts {experts} cannot be used: .*{message}"):
        plan(experts, **changes)


def test_explain_says_why_it_was_not_picked() -> None:
    text = plan("auto", hidden_size=2880, moe_intermediate_size=512).explain()
    assert "not deep_gemm: hidden_size (2880) is not a multiple of 128" in text
    text = plan("auto", PRESETS["h200x8"]).explain()
    assert "not deep_gemm: it needs the package deep_gemm, which is not installed" in text


def test_it_runs_beside_nothing() -> None:
    assert DeepGemmExperts.concurrency(1) is Concurrency.UNSAFE
    assert DeepGemmBatchedExperts.concurrency(4096) is Concurrency.UNSAFE


def test_a_layer_of_it_computes_what_its_dequantised_weights_do(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("a CPU's plan is what has to be talked into it")
    on_cpu = replace(
        DeepGemmExperts.capabilities,
        name="deep_gemm_on_cpu",
        device_types=frozenset({"cpu"}),
        needs_package=None,
    )
    cls = type("DeepGemmOnCpu", (DeepGemmExperts,), {"capabilities": on_cpu})
    monkeypatch.setitem(registry._registered, on_cpu.name, cls)
    moe = quantized_moe("fp8_block", hidden_size=256, moe_intermediate_size=128)
    weights = stored_weights(moe)
    with init_distributed(ParallelConfig(device="cpu")) as ctx:
        layer = MoELayer(moe, ctx, experts=on_cpu.name)
        layer.load_experts(**weights)
        rows = torch.randn(21, 256, generator=torch.Generator().manual_seed(3)).bfloat16()
        routing = layer.router(rows)
        output = layer(rows, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
        held = (layer.w13.data_ptr(), layer.w2.data_ptr())
        assert held == (layer.expert_weights.w13.data_ptr(), layer.expert_weights.w2.data_ptr())
    expected = reference_layer(rows, moe, routing=routing, **weights)
    assert 1e-2 < relative_error(output, expected) < 6e-2
    assert [name for name, _ in fake_deep_gemm.calls] == ["contiguous"] * 2
    assert not any(call["ue8m0"] for _, call in fake_deep_gemm.calls)
