"""The marlin kernel's package, and plans that have it: what is bound, chosen and refused."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import init_distributed
from ep_runtime.kernels import marlin_package, registry
from ep_runtime.kernels.base import Concurrency, ModularExperts
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.marlin_experts import MarlinExperts
from ep_runtime.kernels.marlin_package import bind_marlin
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.layer import MoELayer
from ep_runtime.machine import PRESETS, Machine
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.reference import reference_layer
from tests import fake_marlin
from tests.ep_runtime.stored_experts import quantized_moe, stored_weights
from tests.kernels.marlin_cases import CASE, ONE, ORDERED, weights_of
from tests.kernels.packed_cases import PackedCase
from tests.tolerances import relative_error

CPU = torch.device("cpu")


interpreted = pytest.mark.skipif(not is_interpreting(), reason="Triton compiles for CUDA here")


@pytest.fixture(autouse=True)
def package() -> Iterator[None]:
    with fake_marlin.registered():
        yield


# --- the package ---


def prepare(packed: PackedCase = ONE) -> ModularExperts:
    kernel = MarlinExperts(packed.shape)
    kernel.prepare_weights(weights_of(packed, CPU))
    return kernel


def test_what_was_bound_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ep_runtime.kernels.marlin_package"):
        prepare()
    assert "experts marlin: bound vllm (loaded before), torch.ops._moe_C.moe_wna16" in caplog.text


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """As if nothing had loaded the operator, and these were installed."""
    monkeypatch.setattr(marlin_package, "_has_operator", lambda namespace: False)
    found = {name: object() for name in packages}
    monkeypatch.setattr(marlin_package, "find_spec", found.get)


def test_a_missing_package_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    message = r"package vllm or sgl_kernel, and neither .*; install ep-runtime\[marlin\]"
    with pytest.raises(PlanError, match=message):
        prepare()


def test_a_library_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError("libcudart.so.13: cannot open shared object file")

    without(monkeypatch, "sgl_kernel")
    monkeypatch.setattr(marlin_package, "import_module", fail)
    with pytest.raises(PlanError, match=r"sgl_kernel, .*not load: libcudart.so.13: .* for torch 2"):
        prepare()


def test_vllm_without_the_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without(monkeypatch, "vllm")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(marlin_package, "find_spec", {"vllm": spec}.get)
    with pytest.raises(PlanError, match=r"vllm, .*not load: it has no library _moe_C\*.so"):
        prepare()
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    for name in ("_moe_C_stable_libtorch.abi3.so", "_moe_C.abi3.so", "_C.abi3.so"):
        (tmp_path / name).touch()
    with pytest.raises(
        PlanError, match=r"installed vllm has no operator torch.ops._moe_C.moe_wna16"
    ):
        prepare()
    assert loaded == [
        str(tmp_path / name) for name in ("_moe_C.abi3.so", "_moe_C_stable_libtorch.abi3.so")
    ]


@interpreted
def test_sglangs_signature_is_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_one()
    with fake_marlin.registered(fake_marlin.SGLANG_SCHEMA, "sgl_kernel"):
        monkeypatch.setattr(marlin_package, "NAMESPACES", {"sgl_kernel": "sgl_kernel"})
        source = bind_marlin("marlin", CPU).source
        assert torch.equal(run_one(), expected)
    assert source == "sgl_kernel (loaded before), torch.ops.sgl_kernel.moe_wna16_marlin_gemm"


def run_one() -> Tensor:
    kernel = MarlinExperts(ONE.shape)
    weights = kernel.prepare_weights(ONE.weights(CPU))
    return kernel.run(CASE.expert_input(CPU), weights, Workspace(CPU))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("bool is_zp_float", "bool is_zp_float, Tensor? w_fp6"), "it takes w_fp6; install"),
        (("int top_k, ", ""), "it lacks top_k; install"),
        (("bool use_atomic_add", "int reduction"), "takes reduction and lacks use_atomic_add"),
    ],
)
def test_another_signature_is_refused_by_its_arguments(
    change: tuple[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marlin_package, "NAMESPACES", {"vllm": "_moe_other"})
    changed = fake_marlin.registered(fake_marlin.SCHEMA.replace(*change), "_moe_other")
    with changed, pytest.raises(PlanError, match=rf"another signature .*{message}"):
        prepare()


def test_what_an_operator_has_no_argument_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marlin_package, "NAMESPACES", {"vllm": "_moe_other"})
    with fake_marlin.registered(fake_marlin.WITHOUT_ORDER_SCHEMA, "_moe_other"):
        prepare()
        with pytest.raises(PlanError, match=r"has_input_order is true, which vllm .*install vllm"):
            prepare(replace(ONE, scheme=ORDERED))


def test_every_triton_kernel_compiles_for_sm_90() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.marlin_gate"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {"_activate_slots_kernel", "_sum_slots_kernel"} <= set(json.loads(done.stdout))


# --- the plan ---

H200 = replace(PRESETS["h200x8"], packages=("vllm",))
ACT_ORDER = {"weight": "int4_w4a16", "group_size": 128, "has_input_order": True}


def plan(experts: str, quantization: Any = None, machine: Machine = H200, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "num_experts": 8,
        "top_k": 2,
        "dtype": "bfloat16",
        "quantization": quantization or {"weight": "int4_w4a16", "group_size": 128},
    }
    moe = MoEConfig.model_validate(values | changes)
    return resolve_plan(moe, ParallelConfig(dp_size=8, device="cuda"), machine, experts=experts)


@pytest.mark.parametrize("packages", [("vllm",), ("sgl_kernel",)])
def test_a_plan_takes_it_by_name_whichever_package_is_there(packages: tuple[str, ...]) -> None:
    chosen = plan("marlin", machine=replace(H200, packages=packages))
    assert (chosen.backend, chosen.experts, chosen.rows) == ("symm_mem", "marlin", "model")


def test_auto_takes_it_for_what_triton_does_not_read() -> None:
    assert plan("auto").experts == "triton"
    assert plan("auto", ACT_ORDER).experts == "marlin"
    assert plan("auto", ACT_ORDER, PRESETS["h200x8"]).experts == "reference"


@pytest.mark.parametrize(
    ("quantization", "changes", "message"),
    [
        (None, {"hidden_size": 2880}, r"hidden_size \(2880\) is not a multiple of 128"),
        (None, {"moe_intermediate_size": 416}, r"moe_intermediate_size \(416\) is not a multiple"),
        (None, {"dtype": "float32"}, "dtype float32 is not among its bfloat16, float16"),
        ("fp8_block", {}, "it takes weights stored as int4_w4a16, int8_w8a16, mxfp4"),
        (
            None,
            {"machine": replace(H200, packages=())},
            r"vllm or sgl_kernel.*ep-runtime\[marlin\]",
        ),
        (
            None,
            {"machine": replace(H200, name="Tesla T4", compute_capability=(7, 5))},
            "it runs on sm_80, .*and Tesla T4 is sm_75",
        ),
        (None, {"machine": PRESETS["cpu"]}, "it runs on cuda, and the device is cpu"),
    ],
)
def test_a_plan_refuses_what_it_cannot_do(
    quantization: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=f"experts marlin cannot be used: .*{message}"):
        plan("marlin", quantization, **changes)


@pytest.mark.parametrize("quantization", [None, ACT_ORDER, "mxfp4"])
def test_it_runs_beside_nothing_and_explain_says_why(quantization: Any) -> None:
    for num_tokens in (1, 8, 256, 3072):
        assert MarlinExperts.concurrency(num_tokens) is Concurrency.UNSAFE
    text = plan("marlin", quantization, shared_intermediate_size=512).explain()
    assert "can wait for ever; its locks are one launch's at a time" in text


@interpreted
def test_a_layer_of_it_computes_what_its_dequantised_weights_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu = replace(
        MarlinExperts.capabilities,
        name="marlin_on_cpu",
        device_types=frozenset({"cpu"}),
        needs_package=None,
    )
    cls = type("MarlinOnCpu", (MarlinExperts,), {"capabilities": on_cpu})
    monkeypatch.setitem(registry._registered, on_cpu.name, cls)
    moe = quantized_moe("int8_act_order", hidden_size=128, moe_intermediate_size=128)
    weights = stored_weights(moe)
    with init_distributed(ParallelConfig(device="cpu")) as ctx:
        layer = MoELayer(moe, ctx, experts=on_cpu.name)
        layer.load_experts(**weights)
        rows = torch.randn(21, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
        routing = layer.router(rows)
        output = layer(rows, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
        assert layer.w13.device.type == "meta"
    expected = reference_layer(rows, moe, routing=routing, **weights)
    assert relative_error(output, expected) < 1e-2
