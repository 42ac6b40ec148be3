"""Layers of packed weights: which kernel is chosen, with which rows, and what is refused."""

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


def plan(quantization: Any, experts: str = "auto", **parallel: Any) -> Plan:
    moe = MoEConfig(
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_experts=128,
        top_k=8,
        quantization=quantization,
    )
    config = ParallelConfig(**{"dp_size": 8, "all2all_backend": "symm_mem", **parallel})
    return resolve_plan(moe, config, H200, experts=experts)


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
