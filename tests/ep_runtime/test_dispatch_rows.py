"""How rows travel to the experts: what is chosen, what is refused, and who is told."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from ep_runtime.all2all import registry as backend_registry
from ep_runtime.all2all.base import BackendCapabilities, landed_bytes, sent_row_bytes
from ep_runtime.all2all.registry import backend_class, backend_names, register_backend
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernels import registry as experts_registry
from ep_runtime.kernels.base import ExpertsKind
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.quant.scheme import QuantScheme, RowScheme, WeightScheme
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.registry import register_experts
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan, resolve_plan

H200 = Machine.preset("h200x8")
BOTH = frozenset(RowScheme)
MODEL_ONLY = frozenset({RowScheme.MODEL})
BLOCKS = QuantScheme(WeightScheme.FP8_BLOCK)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that differ in the rows they take, choosable in a test of this file alone."""
    monkeypatch.setattr(backend_registry, "_registered", {})
    monkeypatch.setattr(experts_registry, "_registered", {})
    for name, changes in (
        ("takes_both", {"rows": BOTH}),
        ("takes_model", {"rows": MODEL_ONLY}),
        ("takes_fp8", {"rows": frozenset({RowScheme.FP8_GROUP})}),
        ("at_once", {"rows": BOTH, "kind": ExpertsKind.MONOLITHIC}),
    ):
        schemes = frozenset(WeightScheme)
        values: dict[str, Any] = {
            "name": name,
            "schemes": schemes,
            "fp8_products": frozenset({WeightScheme.FP8_BLOCK, WeightScheme.FP8_CHANNEL}),
            **changes,
        }
        capabilities = replace(ReferenceExperts.capabilities, **values)
        register_experts(name, type(name, (ReferenceExperts,), {"capabilities": capabilities}))


def plan(
    experts: str = "takes_both",
    *,
    scheme: QuantScheme | None = None,
    backend: str = "symm_mem",
    hidden_size: int = 256,
    **parallel: Any,
) -> Plan:
    moe = MoEConfig(
        hidden_size=hidden_size,
        moe_intermediate_size=128,
        num_experts=8,
        top_k=2,
        quantization=scheme or QuantScheme(),
    )
    config = ParallelConfig(**{"dp_size": 4, "all2all_backend": backend, **parallel})
    return resolve_plan(moe, config, H200, experts=experts)


def why_not(chosen: Plan) -> tuple[str, str]:
    return next((r.name, r.reason) for r in chosen.rejections if r.kind == "dispatch")


def test_built_in_backends_declare_how_they_can_send_rows() -> None:
    can_both = {n for n in backend_names() if backend_class(n).capabilities.row_schemes == BOTH}
    assert can_both == {"symm_mem", "deepep_low_latency"}
    assert all(
        RowScheme.MODEL in backend_class(n).capabilities.row_schemes for n in backend_names()
    )


@pytest.mark.parametrize("scheme", WeightScheme)
def test_auto_sends_fp8_exactly_where_the_kernel_multiplies_fp8_rows(scheme: WeightScheme) -> None:
    quantised = QuantScheme(
        scheme, group_size=128 if scheme in ("int4_w4a16", "int8_w8a16") else None
    )
    chosen = plan(scheme=quantised)
    in_fp8 = scheme in (WeightScheme.FP8_BLOCK, WeightScheme.FP8_CHANNEL)
    wanted = RowScheme.FP8_GROUP if in_fp8 else RowScheme.MODEL
    assert chosen.rows is chosen.backend_shape().rows is wanted
    other, reason = why_not(chosen)
    assert other == ("model" if wanted is RowScheme.FP8_GROUP else "fp8")
    assert f"quantization: {scheme}" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "all_to_all"}, "backend all_to_all sends rows as model"),
        ({"experts": "takes_model"}, "experts takes_model takes rows as model"),
        (
            {"experts": "reference"},
            "experts reference does not multiply such rows (quantization: fp8_block)",
        ),
        ({"experts": "at_once", "backend": "naive"}, "backend naive sends rows as model"),
        ({"dispatch_dtype": "model"}, "dispatch_dtype is model"),
    ],
)
def test_rows_stay_in_the_layers_dtype_where_either_side_cannot_or_the_user_says_so(
    changes: dict[str, Any], reason: str
) -> None:
    chosen = plan(scheme=BLOCKS, **changes)
    assert chosen.rows is RowScheme.MODEL
    assert why_not(chosen) == ("fp8", reason)


def test_fp8_by_name_needs_no_quantised_weights() -> None:
    chosen = plan(dispatch_dtype="fp8")
    assert chosen.rows is RowScheme.FP8_GROUP
    assert why_not(chosen) == ("model", "dispatch_dtype is fp8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"backend": "naive"},
            ["all2all_backend naive", "sends rows as model", "dispatch_dtype is"],
        ),
        ({"experts": "takes_model"}, ["experts takes_model", "takes rows as model"]),
        ({"experts": "at_once", "backend": "symm_mem"}, ["experts at_once", "takes rows as model"]),
    ],
)
def test_fp8_by_name_is_refused_with_the_cure_where_a_named_side_cannot(
    changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        plan(dispatch_dtype="fp8", **changes)
    for word in [*words, "use dispatch_dtype: auto"]:
        assert word in str(caught.value)


def test_fp8_by_name_makes_auto_pass_over_what_cannot() -> None:
    chosen = plan("auto", backend="auto", dispatch_dtype="fp8")
    assert RowScheme.FP8_GROUP in backend_class(chosen.backend).capabilities.row_schemes
    passed_over = {r.name: r.reason for r in chosen.rejections if r.kind == "backend"}
    assert "sends rows as model, and dispatch_dtype is fp8" in passed_over["all_to_all"]


def test_a_kernel_that_takes_fp8_rows_alone_goes_with_no_backend_that_sends_others() -> None:
    with pytest.raises(
        PlanError, match="sends rows as model here, and experts takes_fp8 takes fp8"
    ):
        plan("takes_fp8")
    assert plan("takes_fp8", scheme=BLOCKS).rows is RowScheme.FP8_GROUP


def test_the_choice_is_in_explain_and_in_the_digest() -> None:
    as_model, in_fp8 = plan(scheme=BLOCKS, dispatch_dtype="model"), plan(scheme=BLOCKS)
    lines = in_fp8.explain().splitlines()
    index = lines.index(
        "dispatch   rows as fp8: in e4m3, with a float32 scale for every 128 columns"
    )
    assert lines[index + 1].startswith(
        "  not model: experts takes_both multiplies fp8 rows (quantization: fp8_block)"
    )
    assert "dispatch   rows as model: in bfloat16" in as_model.explain().splitlines()
    assert in_fp8.to_dict()["rows"] == "fp8"
    changed = replace(in_fp8, rows=RowScheme.MODEL)
    assert len({as_model.digest(), in_fp8.digest(), changed.digest()}) == 3


@pytest.mark.parametrize(("hidden_size", "in_fp8"), [(256, 264), (300, 312), (1, 5)])
def test_a_row_in_fp8_is_a_byte_a_column_and_four_a_scale(hidden_size: int, in_fp8: int) -> None:
    assert sent_row_bytes(hidden_size, torch.bfloat16, RowScheme.MODEL) == 2 * hidden_size
    assert sent_row_bytes(hidden_size, torch.bfloat16, RowScheme.FP8_GROUP) == in_fp8


def test_what_a_plan_says_it_receives_follows_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    named = replace(backend_class("all_to_all").capabilities, name="both", row_schemes=BOTH)
    assert isinstance(named, BackendCapabilities)
    register_backend("both", type("both", (backend_class("all_to_all"),), {"capabilities": named}))
    chosen = plan(backend="both", dispatch_dtype="fp8", hidden_size=256)
    rows = 4 * 256
    assert chosen.bytes_per_rank[0].receive == rows * (264 + 2 * 8)
    assert landed_bytes(chosen.backend_shape(), 0) == rows * (264 + 2 * 8)
