"""How the shared expert is held and computed: the rules, and what the plan says of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_runtime.audit_stand_ins import EXPERTS, registered_stand_ins
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.kernels.shared_projections import SharedShape, can_read
from ep_runtime.machine import Machine, TritonMode
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.shared_compute import SharedCompute, choose_shared_compute
from ep_runtime.shared_expert import SharedExpert
from ep_runtime.stream_recorder import StreamRecorder

H200 = Machine.preset("h200x8")
CPU = Machine.preset("cpu")


def moe_of(**changes: Any) -> MoEConfig:
    values: dict[str, Any] = {
        "hidden_size": 160,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "top_k": 2,
        "num_shared_experts": 3,
        "shared_quantization": "fp8_block",
    }
    return MoEConfig(**(values | changes))


def choose(
    machine: Machine = H200, experts: str = "triton", **changes: Any
) -> tuple[SharedCompute, dict[SharedCompute, str]]:
    return choose_shared_compute(moe_of(**changes), machine, experts_class(experts).capabilities)


def plan_of(machine: Machine = H200, experts: str = "triton", **changes: Any) -> Plan:
    return resolve_plan(moe_of(**changes), ParallelConfig(), machine, experts=experts)


@pytest.mark.parametrize(
    ("machine", "experts", "changes", "compute", "reason"),
    [
        (H200, "triton", {}, "fp8", ""),
        (replace(H200, compute_capability=None), "triton", {}, "fp8", ""),
        (replace(H200, compute_capability=(10, 0)), "triton", {}, "fp8", ""),
        (CPU, "triton", {}, "fp8", ""),
        (H200, "triton", {"dtype": "float16"}, "fp8", ""),
        (H200, "triton", {"shared_quantization": "none"}, "kernels", "shared_quantization is none"),
        (H200, "triton", {"hidden_size": 168}, "kernels", "hidden_size (168) is not a multiple"),
        (H200, "triton", {"hidden_size": 164}, "library", "hidden_size (164) is not a multiple"),
        (
            H200,
            "triton",
            {"moe_intermediate_size": 8},
            "kernels",
            "shared_intermediate_size (24) is not a multiple of 16",
        ),
        (H200, "triton", {"dtype": "float32"}, "library", "dtype float32"),
        (H200, "reference", {}, "library", "experts reference"),
        (CPU, "reference", {}, "library", "experts reference"),
        (replace(CPU, triton=TritonMode.UNUSABLE), "triton", {}, "library", "Triton is not usable"),
        (replace(H200, compute_capability=(8, 9)), "triton", {}, "library", "9.x and 10.x, and"),
    ],
)
def test_the_first_way_that_fits_is_taken(
    machine: Machine, experts: str, changes: dict[str, Any], compute: str, reason: str
) -> None:
    taken, faults = choose(machine, experts, **changes)
    assert taken == compute
    order = list(reversed(SharedCompute))
    assert list(faults) == order[: order.index(taken)]
    assert reason in faults.get(SharedCompute.FP8, "")


def test_in_the_interpreter_only_beside_a_triton_kernel() -> None:
    """A CPU's real runs are in it too, and would wait for it."""
    kernel = replace(experts_class("reference").capabilities, name="own", is_reference=False)
    taken, faults = choose_shared_compute(moe_of(), CPU, kernel)
    assert taken is SharedCompute.LIBRARY
    assert "beside a Triton kernel, not experts own" in faults[SharedCompute.FP8]
    assert choose_shared_compute(moe_of(), H200, kernel)[0] is SharedCompute.FP8


def test_a_kernel_that_others_are_compared_with_is_known_by_what_it_declares() -> None:
    own = replace(experts_class("triton").capabilities, name="own", is_reference=True)
    taken, faults = choose_shared_compute(moe_of(), H200, own)
    assert taken is SharedCompute.LIBRARY
    assert faults[SharedCompute.FP8].startswith("experts own is what others are compared with")
    called_so = replace(experts_class("triton").capabilities, name="reference")
    assert choose_shared_compute(moe_of(), H200, called_so)[0] is SharedCompute.FP8


def test_reference_and_the_audits_stand_ins_alone_are_references() -> None:
    built_in = (n for n in experts_names() if experts_class(n).__module__.startswith("ep_runtime."))
    assert [n for n in built_in if experts_class(n).capabilities.is_reference] == ["reference"]
    with registered_stand_ins(StreamRecorder(), with_triton=False):
        assert all(experts_class(name).capabilities.is_reference for name in EXPERTS)


@pytest.mark.parametrize("hidden_size", [8, 12, 16, 24, 40, 48])
@pytest.mark.parametrize("width", [8, 16, 20])
def test_what_is_taken_is_what_the_kernels_can_read(hidden_size: int, width: int) -> None:
    taken, _ = choose(hidden_size=hidden_size, shared_intermediate_size=width)
    activation = moe_of().experts_activation()
    shapes = {
        is_fp8: SharedShape(hidden_size, width, activation, torch.bfloat16, is_fp8)
        for is_fp8 in (True, False)
    }
    wanted = (
        "fp8" if can_read(shapes[True]) else "kernels" if can_read(shapes[False]) else "library"
    )
    assert taken == wanted


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "as stored, in fp8_block; rows are quantised, products are of e4m3"),
        (
            {"hidden_size": 168},
            "in bfloat16, dequantised from fp8_block; products of few rows by our kernels, of more "
            "by the library",
        ),
        ({"hidden_size": 164}, "in bfloat16, dequantised from fp8_block; products by the library"),
        (
            {"shared_quantization": "none"},
            "in bfloat16; products of few rows by our kernels, of more by the library",
        ),
    ],
)
def test_explain_says_how_it_is_held_and_computed(changes: dict[str, Any], text: str) -> None:
    plan = plan_of(**changes)
    lines = plan.explain().splitlines()
    at = lines.index(f"shared     width {plan.moe.shared_intermediate_size}")
    assert lines[at + 1] == f"  weights {text}"
    told = [r for r in plan.rejections if r.kind == "shared"]
    assert [f"  not {r.name}: {r.reason}" for r in told] == lines[at + 2 : at + 2 + len(told)]


def test_of_a_layer_without_one_nothing_is_told() -> None:
    plan = plan_of(num_shared_experts=0, shared_quantization="none")
    assert plan.shared_compute is SharedCompute.LIBRARY
    assert "shared     none" in plan.explain().splitlines()
    assert not [r for r in plan.rejections if r.kind == "shared"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_expert_gate": True},
        {"activation": "relu2"},
        {"hidden_size": 168},
        {"shared_quantization": "none", "shared_expert_gate": True},
    ],
)
def test_the_plans_bytes_are_those_that_it_holds(changes: dict[str, Any]) -> None:
    """Partial blocks of scales included: 144 rows are two of gate and two of up."""
    plan = plan_of(**changes)
    shared = SharedExpert(plan.moe, torch.device("cpu"), plan.shared_compute)
    held = sum(parameter.nbytes for parameter in shared.parameters())
    assert [rank.shared for rank in plan.bytes_per_rank] == [held]


def test_fp8_products_of_the_shared_expert_count_as_such() -> None:
    assert plan_of().multiplies_fp8_rows
    assert not plan_of(shared_quantization="none").multiplies_fp8_rows
    assert plan_of().to_dict()["shared_compute"] == "fp8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_quantization": "mxfp4"}, r"shared_quantization \(mxfp4\).*none, fp8_block"),
        ({"shared_quantization": "fp9"}, "shared_quantization.*'fp9' is no scheme"),
        ({"num_shared_experts": 0}, r"shared_quantization \(fp8_block\) has no effect without"),
    ],
)
def test_a_scheme_that_no_shared_expert_is_kept_in_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        moe_of(**changes)


def test_the_key_survives_what_writes_a_configuration() -> None:
    moe = moe_of(quantization="fp8_block")
    assert MoEConfig(**moe.model_dump()) == moe
    assert moe.with_quantization(moe.quantization) == moe
    assert moe.model_dump()["shared_quantization"] == "fp8_block"
