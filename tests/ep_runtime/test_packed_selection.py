"""Layers of packed weights: which kernel is chosen, with which rows, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan, resolve_plan

H200 = Machine.preset("h200x8")
ORDERED = {"weight": "int4_w4a16", "group_size": 128, "has_input_order": True}
PACKED: list[Any] = [
    {"weight": "int4_w4a16", "group_size": 128},
    {"weight": "int4_w4a16", "group_size": 32, "has_zero_points": True},
    {"weight": "int8_w8a16", "group_size": None},
    "mxfp4",
    "nvfp4",
]


WITH_MARLIN = replace(H200, packages=("vllm",))


def plan(
    quantization: Any,
    experts: str = "auto",
    *,
    machine: Machine = H200,
    layer: dict[str, Any] | None = None,
    **parallel: Any,
) -> Plan:
    moe = MoEConfig(
        **{
            "hidden_size": 4096,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "top_k": 8,
            "quantization": quantization,
            **(layer or {}),
        }
    )
    config = ParallelConfig(**{"dp_size": 8, "all2all_backend": "symm_mem", **parallel})
    return resolve_plan(moe, config, machine, experts=experts)


def refusal(quantization: Any, experts: str, **given: Any) -> str:
    with pytest.raises(PlanError) as refused:
        plan(quantization, experts, **given)
    return str(refused.value)


def why_not(chosen: Plan, name: str) -> str:
    return next(r.reason for r in chosen.rejections if (r.kind, r.name) == ("experts", name))


@pytest.mark.parametrize("quantization", PACKED, ids=str)
def test_a_packed_scheme_runs_on_the_triton_kernel_with_rows_in_the_layers_dtype(
    quantization: Any,
) -> None:
    chosen = plan(quantization)
    assert chosen.experts == "triton"
    assert chosen.rows is RowScheme.MODEL


def test_an_order_of_columns_is_the_reference_kernels() -> None:
    chosen = plan(ORDERED)
    assert chosen.experts == "reference"
    assert "has_input_order is true (act-order)" in why_not(chosen, "triton")
    with pytest.raises(PlanError, match=r"experts triton cannot be used: .*experts: reference"):
        plan(ORDERED, "triton")


def test_a_group_size_that_fits_no_block_is_refused_by_name() -> None:
    odd = {"weight": "int8_w8a16", "group_size": 96}
    assert plan(odd).experts == "reference"
    with pytest.raises(PlanError, match=r"quantization.group_size \(96\) is not among its 32, 64"):
        plan(odd, "triton")


def test_fp8_rows_are_refused_with_packed_weights_alone() -> None:
    reason = r"takes rows as model with weights stored as int4_w4a16, and dispatch_dtype is fp8"
    with pytest.raises(PlanError, match=reason):
        plan(PACKED[0], "triton", dispatch_dtype="fp8")
    assert plan(PACKED[0], dispatch_dtype="fp8").experts == "reference"
    assert plan("none", "triton", dispatch_dtype="fp8").rows is RowScheme.FP8_GROUP


@pytest.mark.parametrize(
    "experts", ["triton", "triton_batched", "deep_gemm", "resident", "nvfp4_nf3_hybrid"]
)
def test_only_kernels_that_take_the_layer_are_told_of_in_the_place_of_a_refused_one(
    experts: str,
) -> None:
    assert refusal(ORDERED, experts).endswith("; use experts: reference")
    with_marlin = refusal(ORDERED, experts, machine=WITH_MARLIN)
    assert with_marlin.endswith("; use experts: marlin or reference")
    assert plan(ORDERED, machine=WITH_MARLIN).experts == "marlin"


def test_a_kernel_that_no_backend_serves_is_not_told_of() -> None:
    """Of batched rows, which symm_mem does not deliver and deep_ep's low latency does."""
    told = refusal(PACKED[0], "deep_gemm")
    assert told.endswith("; use experts: triton or reference")
    ready = replace(H200, packages=("deep_ep",))
    batched = refusal(PACKED[0], "deep_gemm", machine=ready, all2all_backend="deepep_low_latency")
    assert batched.endswith("; use experts: triton_batched or reference")
    odd = refusal(
        "fp8_block",
        "deep_gemm_batched",
        machine=ready,
        all2all_backend="deepep_low_latency",
        layer={"moe_intermediate_size": 1504},
    )
    assert odd.endswith("(1504) is not a multiple of 128; use experts: triton_batched or reference")


def test_what_can_be_installed_or_set_is_told_before_the_other_kernels() -> None:
    told = refusal("fp8_block", "deep_gemm")
    assert told.endswith("; install ep-runtime[deepgemm], or use experts: triton or reference")
    half = {"dtype": "float16"}
    told = refusal("mxfp4", "marlin", machine=WITH_MARLIN, layer=half)
    assert told.endswith("; set dtype: bfloat16, or use experts: triton or reference")


@pytest.mark.parametrize(
    ("quantization", "layer", "said"),
    [
        ("mxfp4", {"hidden_size": 2880}, "hidden_size (2880) is not a multiple of 128"),
        ({"weight": "int4_w4a16", "group_size": 96}, {}, "quantization.group_size (96) is not"),
        (
            {"weight": "int8_w8a16", "group_size": 128, "has_zero_points": True},
            {},
            "it has no kernel for int8 with zero points",
        ),
        (ORDERED, {"dtype": "float32"}, "dtype float32 is not among its bfloat16, float16"),
    ],
    ids=str,
)
def test_a_package_is_not_asked_for_by_a_kernel_that_refuses_the_layer_anyway(
    quantization: Any, layer: dict[str, Any], said: str
) -> None:
    assert why_not(plan(quantization, layer=layer), "marlin").startswith(said)
    assert refusal(quantization, "marlin", layer=layer).startswith(
        f"experts marlin cannot be used: {said}"
    )
    assert why_not(plan(quantization, layer=layer, machine=WITH_MARLIN), "marlin").startswith(said)


def test_a_package_is_asked_for_by_a_kernel_that_takes_the_layer() -> None:
    reason = why_not(plan(PACKED[0]), "marlin")
    assert reason.startswith("it needs the package vllm or sgl_kernel")
    assert reason.endswith("install ep-runtime[marlin]")
    fp8 = plan("fp8_block", layer={"moe_intermediate_size": 1504})
    assert "moe_intermediate_size (1504) is not a multiple" in why_not(fp8, "deep_gemm")
