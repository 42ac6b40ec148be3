"""The plan: what is chosen and why, what is refused and how, and that ranks agree on it."""

import ast
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime import agreement
from ep_runtime.agreement import agree_plan
from ep_runtime.all2all import registry as backend_registry
from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.registry import backend_names
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels import registry as experts_registry
from ep_runtime.kernels.base import Concurrency, ConcurrencyRule, InputFormat
from ep_runtime.kernels.errors import ConfigError, PlanError, RankFailure
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine, TritonMode
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.shared_expert import SharedExpert
from tests.ep_runtime import stand_ins
from tests.harness import rank_outcomes, run_ranks

ROOT = Path(__file__).parents[2]
H200 = Machine.preset("h200x8")
CPU = Machine("cpu", "cpu", TritonMode.UNUSABLE)
CPU_INTERPRETED = Machine("cpu", "cpu", TritonMode.INTERPRETER)


def _moe(**changes: Any) -> MoEConfig:
    values: dict[str, Any] = {
        "hidden_size": 16,
        "moe_intermediate_size": 24,
        "num_experts": 5,
        "top_k": 2,
        "num_shared_experts": 1,
        "dtype": "float32",
    }
    return MoEConfig(**(values | changes))


def _plan(
    machine: Machine = CPU,
    *,
    moe: MoEConfig | None = None,
    experts: str = "auto",
    shared: SharedExpertsConfig | None = None,
    **parallel: Any,
) -> Plan:
    return resolve_plan(
        moe or _moe(), ParallelConfig(**parallel), machine, experts=experts, shared_experts=shared
    )


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins are choosable in this test alone."""
    monkeypatch.setattr(backend_registry, "_registered", {})
    monkeypatch.setattr(experts_registry, "_registered", {})
    stand_ins.register()


# --- what auto chooses ---


def test_auto_is_local_on_one_rank_and_communicates_on_more() -> None:
    assert _plan().backend == "local"
    assert _plan(dp_size=2).backend == "all_to_all"
    assert _plan(H200, dp_size=8).backend == "symm_mem"
    assert _plan(dp_size=4, ep_size=1).backend == "local"


def _why_not(plan: Plan, name: str) -> str:
    return next(r.reason for r in plan.rejections if r.name == name)


def test_auto_takes_one_sided_backends_only_where_nvlink_joins_the_whole_group() -> None:
    assert _plan(H200, dp_size=4).backend == "symm_mem"
    assert _plan(H200, dp_size=16, ep_size=8).backend == "symm_mem"
    assert _plan(H200, dp_size=3).backend == "symm_mem"
    assert _plan(H200, dp_size=9, ep_size=3).backend == "all_to_all"
    for machine, dp_size, why in (
        (replace(H200, nvlink=False), 8, "it is not so that NVLink joins every two devices"),
        (replace(H200, nvlink=None), 8, "it is unknown whether NVLink joins every two devices"),
        (H200, 16, "an EP group of 16 of 16 ranks does not lie within one host of 8 devices"),
    ):
        plan = _plan(machine, dp_size=dp_size)
        assert plan.backend == "all_to_all"
        assert why in _why_not(plan, "symm_mem")
        assert _plan(machine, dp_size=dp_size, all2all_backend="symm_mem").backend == "symm_mem"


def test_auto_takes_deepep_by_the_number_of_tokens_where_triton_is_missing() -> None:
    machine = replace(H200, packages=("deep_ep",), triton=TritonMode.UNUSABLE)
    moe = _moe(dtype="bfloat16", num_experts=8, hidden_size=2048)
    assert _plan(machine, moe=moe, dp_size=8, max_tokens_per_rank=64).backend == (
        "deepep_low_latency"
    )
    plan = _plan(machine, moe=moe, dp_size=8, max_tokens_per_rank=300)
    assert plan.backend == "deepep_high_throughput"
    assert "max_tokens_per_rank (300) is above 256" in _why_not(plan, "deepep_low_latency")


def test_auto_is_triton_where_it_compiles_and_reference_on_a_cpu() -> None:
    assert _plan(H200).experts == "triton"
    assert _plan(CPU).experts == "reference"
    assert _plan(CPU_INTERPRETED).experts == "reference"
    no_triton = replace(H200, triton=TritonMode.UNUSABLE)
    assert _plan(no_triton).experts == "reference"


def test_a_named_choice_is_kept() -> None:
    plan = _plan(CPU_INTERPRETED, dp_size=2, all2all_backend="naive", experts="triton")
    assert (plan.backend, plan.experts) == ("naive", "triton")


def test_every_alternative_is_kept_with_a_reason(registered: None) -> None:
    for machine in (CPU, H200):
        for dp_size in (1, 4):
            plan = _plan(machine, dp_size=dp_size)
            by_kind: dict[str, set[str]] = {}
            for rejection in plan.rejections:
                assert rejection.reason
                by_kind.setdefault(rejection.kind, set()).add(rejection.name)
            assert by_kind["backend"] == set(backend_names()) - {plan.backend}
            assert by_kind["experts"] == set(experts_names()) - {plan.experts}
            owners = {"none", "runner", "modular_kernel"}
            assert by_kind["owner"] == owners - {plan.ownership.owner}


def _reason(plan: Plan, kind: str, name: str) -> str:
    (found,) = [r.reason for r in plan.rejections if (r.kind, r.name) == (kind, name)]
    return found


def test_a_rejection_names_the_limit_that_decided(registered: None) -> None:
    plan = _plan(dp_size=4)
    assert "ep_size up to 1" in _reason(plan, "backend", "local")
    assert "ep_size is 4" in _reason(plan, "backend", "local")
    assert "TRITON_INTERPRET=1" in _reason(plan, "experts", "triton")
    assert "all_to_all comes first" in _reason(plan, "backend", "naive")
    # Usable by itself, but not with what was chosen on the other side.
    assert "all2all_backend: naive" in _reason(plan, "experts", "mono_certified")
    assert "batched" in _reason(plan, "experts", "batched")
    assert "standard" in _reason(plan, "experts", "batched")
    assert "reference comes first" in _reason(plan, "experts", "certified")
    assert "Triton's interpreter" in _reason(_plan(CPU_INTERPRETED), "experts", "triton")


# --- named choices that cannot be honoured ---


@pytest.mark.parametrize(
    ("machine", "settings", "words"),
    [
        (CPU, {"dp_size": 4, "all2all_backend": "local"}, ["local", "up to 1", "ep_size is 4"]),
        (CPU, {"experts": "triton"}, ["triton", "TRITON_INTERPRET=1"]),
        (
            replace(H200, triton=TritonMode.UNUSABLE),
            {"experts": "triton"},
            ["triton", "pip install triton"],
        ),
        (
            CPU,
            {"dp_size": 2, "all2all_backend": "async_none", "experts": "mono_unsafe"},
            ["mono_unsafe", "async_none", "use all2all_backend: naive or sync"],
        ),
        (
            CPU,
            {"dp_size": 2, "all2all_backend": "batched_none", "experts": "standard_only"},
            ["batched_none", "standard_only", "change all2all_backend or experts"],
        ),
        (
            CPU,
            {"dp_size": 2, "all2all_backend": "naive", "experts": "batched"},
            ["naive", "experts batched", "change all2all_backend or experts"],
        ),
        (
            CPU,
            {
                "experts": "mono_certified",
                "moe": _moe(top_k=1, apply_router_weight_on_input=True),
            },
            ["mono_certified", "apply_router_weight_on_input"],
        ),
        (
            CPU,
            {"dp_size": 2, "all2all_backend": "even"},
            ["num_experts (5)", "ep_size (2)", "all2all_backend: all_to_all"],
        ),
        (CPU, {"all2all_backend": "cuda_only"}, ["cuda_only", "cuda", "device is cpu"]),
        (H200, {"all2all_backend": "packaged"}, ["packaged", "deep_ep", "not installed"]),
        (CPU, {"experts": "half_only"}, ["half_only", "float32", "float16"]),
        (CPU, {"experts": "silu_only", "moe": _moe(activation="relu2")}, ["relu2", "silu"]),
        (CPU, {"experts": "no_bias", "moe": _moe(expert_bias=True)}, ["no_bias", "expert_bias"]),
        (CPU, {"experts": "undeclared"}, ["undeclared", "concurrency"]),
    ],
)
def test_a_named_choice_that_cannot_be_honoured_says_why(
    machine: Machine, settings: dict[str, Any], words: list[str], registered: None
) -> None:
    _register_limited()
    with pytest.raises(PlanError) as caught:
        _plan(machine, **settings)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def _register_limited() -> None:
    backends = {
        "even": {"uneven_experts": False},
        "cuda_only": {"device_types": frozenset({"cuda"})},
        "packaged": {"needs_package": "deep_ep"},
    }
    for name, changes in backends.items():
        base = backend_registry.backend_class("naive")
        declared = replace(base.capabilities, name=name, **changes)  # type: ignore[arg-type]
        cls = type(name, (base,), {"capabilities": declared})
        backend_registry.register_backend(name, cls)
    kernels: dict[str, dict[str, Any]] = {
        "half_only": {"dtypes": frozenset({torch.float16})},
        "silu_only": {"activations": frozenset({"silu"})},
        "no_bias": {"supports_bias": False},
        "standard_only": {"formats": frozenset({InputFormat.STANDARD})},
        "undeclared": {"concurrency": ()},
    }
    for name, changes in kernels.items():
        kernel = experts_class("reference")
        declared_kernel = replace(kernel.capabilities, name=name, **changes)
        cls2 = type(name, (kernel,), {"capabilities": declared_kernel})
        experts_registry.register_experts(name, cls2)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'tritn'.*auto, triton, triton_batched, .*reference"):
        _plan(experts="tritn")
    with pytest.raises(ConfigError, match=r"'nccl'.*auto, local, symm_mem, .*all_to_all, naive"):
        _plan(all2all_backend="nccl")


def test_a_built_in_name_cannot_be_taken() -> None:
    with pytest.raises(ConfigError, match=r"naive.*built in"):
        backend_registry.register_backend("naive", backend_registry.backend_class("naive"))
    with pytest.raises(ConfigError, match=r"reference.*built in"):
        experts_registry.register_experts("reference", experts_class("reference"))


# --- the plan as a value ---


def _one_change_each() -> Iterator[tuple[str, Plan]]:
    moe = {
        "hidden_size": 32,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "top_k": 1,
        "activation": "gelu",
        "scoring": "sigmoid",
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "has_correction_bias": True,
        "router_bias": True,
        "expert_bias": True,
        "num_shared_experts": 2,
        "shared_intermediate_size": 48,
        "shared_expert_gate": True,
        "dtype": "bfloat16",
    }
    for key, value in moe.items():
        yield f"moe.{key}", _plan(moe=_moe(**{key: value}), dp_size=4)
    yield "moe.n_group", _plan(moe=_moe(num_experts=8, n_group=2), dp_size=4)
    yield "moe.topk_group", _plan(moe=_moe(num_experts=8, n_group=4, topk_group=2), dp_size=4)
    yield (
        "moe.n_group to compare with",
        _plan(moe=_moe(num_experts=8, n_group=4, topk_group=1), dp_size=4),
    )
    yield (
        "moe.group_score",
        _plan(moe=_moe(num_experts=8, n_group=2, group_score="top2_sum"), dp_size=4),
    )
    yield (
        "moe.swiglu_limit",
        _plan(moe=_moe(activation="swigluoai", swiglu_limit=7.0), dp_size=4),
    )
    yield (
        "moe.swiglu_alpha",
        _plan(moe=_moe(activation="swigluoai", swiglu_alpha=1.0), dp_size=4),
    )
    yield (
        "moe.activation to compare with",
        _plan(moe=_moe(activation="swigluoai"), dp_size=4),
    )
    yield (
        "moe.apply_router_weight_on_input",
        _plan(moe=_moe(top_k=1, apply_router_weight_on_input=True), dp_size=4),
    )
    yield "moe.quantization", _plan(moe=_moe(quantization="fp8_block"), dp_size=4)
    yield (
        "moe.quantization.group_size",
        _plan(moe=_moe(quantization={"weight": "int4_w4a16", "group_size": 8}), dp_size=4),
    )
    yield "moe.shared_quantization", _plan(moe=_moe(shared_quantization="fp8_block"), dp_size=4)
    yield "parallel.dp_size", _plan(dp_size=8, ep_size=4)
    yield "parallel.tp_size", _plan(dp_size=4, tp_size=2, ep_size=4)
    yield "parallel.ep_size", _plan(dp_size=4, ep_size=2)
    yield "parallel.device", _plan(dp_size=4, device="cpu")
    yield "parallel.all2all_backend", _plan(dp_size=4, all2all_backend="all_to_all")
    yield "parallel.dispatch_dtype", _plan(dp_size=4, dispatch_dtype="model")
    yield "parallel.placement", _plan(dp_size=4, expert_placement_strategy="round_robin")
    yield "parallel.max_tokens_per_rank", _plan(dp_size=4, max_tokens_per_rank=128)
    yield "parallel.timeout_s", _plan(dp_size=4, timeout_s=60)
    yield "experts", _plan(CPU_INTERPRETED, dp_size=4, experts="triton")
    yield "overlap", _plan(dp_size=4, shared=SharedExpertsConfig(overlap="off"))
    yield "token_threshold", _plan(dp_size=4, shared=SharedExpertsConfig(token_threshold=64))
    yield "machine", _plan(replace(CPU, name="another"), dp_size=4)
    yield "nothing", _plan(dp_size=4)


def test_the_digest_changes_with_every_key() -> None:
    plans = dict(_one_change_each())
    changed = {name.split(".")[1] for name in plans if name.startswith("moe.")}
    assert changed >= set(MoEConfig.model_fields)
    by_digest: dict[str, list[str]] = {}
    for name, plan in plans.items():
        by_digest.setdefault(plan.digest(), []).append(name)
    assert all(len(names) == 1 for names in by_digest.values()), by_digest
    assert len(set(plans.values())) == len(plans)


def test_equal_configurations_give_equal_plans_and_digests() -> None:
    assert _plan(dp_size=4) == _plan(dp_size=4)
    assert hash(_plan(dp_size=4)) == hash(_plan(dp_size=4))
    assert _plan(dp_size=4).digest() == _plan(dp_size=4).digest()
    assert len(_plan().digest()) == 64
    int(_plan().digest(), 16)


def _digest(ctx: EPContext) -> str:
    return _plan(dp_size=4).digest()


def test_another_process_finds_the_same_digest() -> None:
    assert run_ranks(_digest, ParallelConfig(device="cpu")) == [_plan(dp_size=4).digest()]


def test_a_plan_survives_json_unchanged() -> None:
    values = _plan(H200, dp_size=4, moe=_moe(shared_expert_gate=True)).to_dict()
    assert json.loads(json.dumps(values)) == values
    assert values["placement"]["experts_of_rank"] == [[0, 1], [2], [3], [4]]
    assert values["owner"]["name"] == "modular_kernel"


def test_a_plan_cannot_change() -> None:
    with pytest.raises(AttributeError):
        _plan().backend = "naive"  # type: ignore[misc]


def test_explain_shows_choices_rejections_owner_and_bytes() -> None:
    plan = _plan(H200, dp_size=4, all2all_backend="all_to_all", moe=_moe(shared_expert_gate=True))
    text = plan.explain()
    lines = text.splitlines()
    assert plan.digest()[:12] in lines[0]
    assert "4 ranks (dp 4 x tp 1), 1 EP group of 4" in lines[0]
    assert any(line.startswith("backend    all_to_all: standard rows, async") for line in lines)
    assert any(line.startswith("experts    triton: modular") for line in lines)
    assert "  rank 0: 2 experts: 0-1" in lines
    assert "  ranks 1-3: 1 expert each: 2-4" in lines
    assert "shared     width 24, with a sigmoid gate" in lines
    assert any("owner, every rank: modular_kernel (asynchronous_backend" in ln for ln in lines)
    assert any(line.startswith("  rows <= 256: combine_window") for line in lines)
    assert any(line.startswith("  more rows: combine_joined") for line in lines)
    for rejection in plan.rejections:
        assert f"  not {rejection.name}: {rejection.reason}" in lines
    # 5 experts of (48 * 16 + 16 * 24) float32: two on rank 0 are 9216 bytes.
    assert any(line.startswith("  rank 0: experts 9.0 KiB") for line in lines)
    assert any(line.startswith("  ranks 1-3: experts 4.5 KiB") for line in lines)


def test_explain_names_the_communication_that_lets_no_shared_expert_run_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ep_runtime.all2all.all_to_all import AllToAllBackend

    rule = ConcurrencyRule(None, Concurrency.UNSAFE, "its kernels wait for peers")
    unsafe = replace(AllToAllBackend.capabilities, communication=rule)
    monkeypatch.setattr(AllToAllBackend, "capabilities", unsafe)
    plan = _plan(H200, dp_size=4, all2all_backend="all_to_all")
    assert plan.ownership.owner == "modular_kernel"
    (line,) = [line for line in plan.explain().splitlines() if "rows <= 256: " in line]
    assert line.startswith("  rows <= 256: combine_joined")
    reason = "the communication of all_to_all is unsafe (its kernels wait for peers)"
    assert reason in line


def test_explain_of_a_layer_without_shared_expert_says_so() -> None:
    lines = _plan(moe=_moe(num_shared_experts=0)).explain().splitlines()
    assert "shared     none" in lines
    assert any("owner, every rank: none (no_shared_expert" in line for line in lines)
    assert any(line.startswith("  any rows: none") for line in lines)


# --- bytes ---


def _measured_bytes(ctx: EPContext, moe: MoEConfig) -> dict[str, int]:
    layer = MoELayer(moe, ctx)

    def size(*modules_or_tensors: Any) -> int:
        tensors = [t for t in modules_or_tensors if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    planned = layer.plan.bytes_per_rank[ctx.ep_rank]
    measured = {
        "experts": size(
            layer.w13,
            layer.w2,
            layer.w13_bias,
            layer.w2_bias,
            *(layer.w13_quant.tensors() if layer.w13_quant else ()),
            *(layer.w2_quant.tensors() if layer.w2_quant else ()),
        ),
        "router": size(*layer.router.parameters()),
        "shared": size(*(layer.shared.parameters() if layer.shared else ())),
    }
    assert {name: getattr(planned, name) for name in measured} == measured
    assert ctx.workspace.num_bytes >= planned.workspace
    return measured


@pytest.mark.parametrize(
    "moe",
    [
        pytest.param(_moe(), id="plain"),
        pytest.param(_moe(num_shared_experts=0, dtype="bfloat16"), id="no_shared"),
        pytest.param(
            _moe(expert_bias=True, router_bias=True, has_correction_bias=True), id="biases"
        ),
        pytest.param(_moe(activation="relu2"), id="not_gated"),
        pytest.param(
            _moe(quantization="fp8_block", moe_intermediate_size=132, expert_bias=True),
            id="fp8_block",
        ),
        pytest.param(
            _moe(
                quantization={
                    "weight": "int4_w4a16",
                    "group_size": 8,
                    "has_zero_points": True,
                    "has_input_order": True,
                }
            ),
            id="int4",
        ),
        pytest.param(
            _moe(quantization="nvfp4", hidden_size=48, moe_intermediate_size=32), id="nvfp4"
        ),
        pytest.param(
            _moe(shared_expert_gate=True, shared_intermediate_size=40, dtype="float16"), id="gate"
        ),
    ],
)
def test_bytes_per_rank_are_those_of_the_tensors_a_layer_holds(moe: MoEConfig) -> None:
    sizes = run_ranks(_measured_bytes, ParallelConfig(dp_size=4, device="cpu"), moe)
    assert [s["experts"] for s in sizes] == [2 * sizes[1]["experts"]] + [sizes[1]["experts"]] * 3


def test_receive_buffers_hold_ep_size_times_max_tokens_per_rank_rows() -> None:
    plan = _plan(dp_size=4, max_tokens_per_rank=32)
    # Rows of 16 float32, and an int32 id and a float32 weight for each of 2 slots.
    assert [rank.receive for rank in plan.bytes_per_rank] == [4 * 32 * (16 * 4 + 2 * 8)] * 4
    assert _plan(max_tokens_per_rank=32).bytes_per_rank[0].receive == 0


# --- agreement ---


def _build_unlike(ctx: EPContext, unlike: dict[str, Any]) -> None:
    moe, shared = _moe(), SharedExpertsConfig()
    experts = "reference"
    if ctx.rank == unlike["rank"]:
        moe = _moe(**unlike.get("moe", {}))
        shared = SharedExpertsConfig(**unlike.get("shared", {}))
        experts = unlike.get("experts", experts)
    started = time.monotonic()
    try:
        MoELayer(moe, ctx, experts=experts, shared_experts=shared)
    except PlanError:
        assert time.monotonic() - started < 10
        raise


@pytest.mark.parametrize(
    ("unlike", "key", "values"),
    [
        (
            {"rank": 1, "shared": {"token_threshold": 128}},
            "shared_experts.token_threshold",
            ("256 on ranks [0, 2]", "128 on ranks [1]"),
        ),
        (
            {"rank": 0, "shared": {"overlap": "off"}},
            "shared_experts.overlap",
            ("'off' on ranks [0]", "'auto' on ranks [1, 2]"),
        ),
        (
            {"rank": 2, "moe": {"hidden_size": 32}},
            "moe.hidden_size",
            ("16 on ranks [0, 1]", "32 on ranks [2]"),
        ),
        (
            {"rank": 2, "moe": {"routed_scaling_factor": 2.5}},
            "moe.routed_scaling_factor",
            ("1.0 on ranks [0, 1]", "2.5 on ranks [2]"),
        ),
        (
            {"rank": 1, "experts": "triton"},
            "experts",
            ("'reference' on ranks [0, 2]", "'triton' on ranks [1]"),
        ),
    ],
)
def test_ranks_that_disagree_all_raise_and_name_key_values_and_ranks(
    unlike: dict[str, Any], key: str, values: tuple[str, str]
) -> None:
    parallel = ParallelConfig(dp_size=3, device="cpu")
    for outcome in rank_outcomes(_build_unlike, parallel, unlike, timeout=30):
        assert isinstance(outcome.error, PlanError), outcome
        assert key in str(outcome.error)
        for value in values:
            assert value in str(outcome.error)
        assert "same configuration" in str(outcome.error)
        assert len(str(outcome.error)) < 400


def test_a_rank_that_finds_no_plan_takes_the_others_with_it() -> None:
    parallel = ParallelConfig(dp_size=2, device="cpu")
    unlike = {"rank": 1, "experts": "tritn"}
    survivor, failed = rank_outcomes(_build_unlike, parallel, unlike, timeout=30)
    assert isinstance(failed.error, ConfigError)
    assert isinstance(survivor.error, RankFailure), survivor
    assert "rank 1" in str(survivor.error)
    assert "tritn" in str(survivor.error)


# --- certificates ---


def _declared_evidence() -> Iterator[tuple[str, str]]:
    for name in ("triton", "reference"):
        for rule in experts_class(name).capabilities.concurrency:
            if rule.concurrency is Concurrency.CERTIFIED:
                yield name, rule.evidence
    for rule in SharedExpert.concurrency_rules:
        yield "shared expert", rule.evidence


@pytest.mark.parametrize(("who", "evidence"), list(_declared_evidence()))
def test_the_test_that_a_certificate_names_exists(who: str, evidence: str) -> None:
    file, name = evidence.split("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in functions, f"{who} names {evidence}"


def test_what_auto_could_not_use_is_logged_once_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = _plan(CPU_INTERPRETED, dp_size=2)
    alone = EPGroup(None, 0, 1, torch.device("cpu"))
    agreement._log_once.cache_clear()  # other tests of this process have said it already
    with caplog.at_level("INFO", logger="ep_runtime"):
        agree_plan(plan, alone)
        agree_plan(plan, alone)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told))
    assert any(
        "auto takes experts reference, not triton: Triton's interpreter" in line for line in told
    )


def test_a_device_memory_that_differs_a_little_is_no_disagreement() -> None:
    assert _plan(H200).digest() == _plan(replace(H200, device_memory_bytes=1)).digest()
    assert _plan(H200).digest() != _plan(replace(H200, name="NVIDIA H100")).digest()


# --- what may be registered ---


class _Inherits(experts_class("reference")):  # type: ignore[misc]
    """Says "reference" of itself."""


class _Overrides(experts_class("reference")):  # type: ignore[misc]
    capabilities = replace(experts_class("reference").capabilities, name="overrides")

    @classmethod
    def concurrency(cls, num_tokens: int) -> Concurrency:
        return Concurrency.UNSAFE


@pytest.mark.parametrize(
    ("name", "cls", "says"),
    [
        ("auto", _Inherits, "'auto' is reserved"),
        ("mine", _Inherits, "declares capabilities.name 'reference'"),
        ("mine", object(), "must be a class with `capabilities`"),
        ("mine", int, "must be a class with `capabilities`"),
        ("overrides", _Overrides, r"declare the rules in capabilities.concurrency"),
    ],
)
def test_what_no_plan_could_use_is_refused_as_it_is_registered(
    name: str, cls: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        experts_registry.register_experts(name, cls)
    assert name not in experts_names()


def test_a_backend_under_another_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"declares capabilities\.name 'naive'"):
        backend_registry.register_backend("mine", backend_registry.backend_class("naive"))
    assert "mine" not in backend_names()


def test_a_certificate_needs_evidence_and_rules_rise() -> None:
    with pytest.raises(ConfigError, match="has no evidence"):
        ConcurrencyRule(None, Concurrency.CERTIFIED, " ")
    capabilities = experts_class("reference").capabilities
    safe = ConcurrencyRule(8, Concurrency.CERTIFIED, "a test")
    for rules in (
        (replace(safe, max_tokens=None), replace(safe, max_tokens=512)),
        (replace(safe, max_tokens=256), safe),
        (safe, safe),
    ):
        with pytest.raises(ConfigError, match="must rise"):
            replace(capabilities, concurrency=rules)
    replace(capabilities, concurrency=(safe, replace(safe, max_tokens=None)))


def test_a_kernel_of_quantised_weights_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = replace(
        experts_class("reference").capabilities,
        name="fp8",
        schemes=frozenset({WeightScheme.FP8_BLOCK}),
    )
    cls = type("Fp8", (experts_class("reference"),), {"capabilities": capabilities})
    monkeypatch.setitem(experts_registry._registered, "fp8", cls)
    with pytest.raises(PlanError, match="stored as fp8_block, and quantization is none"):
        _plan(experts="fp8")


def _plan_of_another_scale(ctx: EPContext) -> None:
    MoELayer(_moe(routed_scaling_factor=1.0 + ctx.rank), ctx)


def test_tp_ranks_agree_on_the_plan_too() -> None:
    for outcome in rank_outcomes(_plan_of_another_scale, ParallelConfig(tp_size=2, ep_size=1)):
        assert isinstance(outcome.error, PlanError), outcome
        assert "moe.routed_scaling_factor" in str(outcome.error)


def test_a_plan_of_another_layer_is_refused() -> None:
    (outcome,) = rank_outcomes(_give_another_plan, ParallelConfig())
    assert isinstance(outcome.error, ConfigError), outcome
    assert "another parallel.dp_size (2, not 1)" in str(outcome.error)


def _give_another_plan(ctx: EPContext) -> None:
    MoELayer(_moe(), ctx, plan=_plan(dp_size=2))
