"""The DeepEP backends: on a CPU over a stand-in for deep_ep, on GPUs over the package itself."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from ep_runtime.all2all.base import BackendCapabilities, CombineBias, EPGroup
from ep_runtime.all2all.deepep_high_throughput import DeepEPHighThroughputBackend
from ep_runtime.all2all.deepep_low_latency import (
    HIDDEN_SIZES,
    DeepEPLowLatencyBackend,
    fold_equal_ids,
)
from ep_runtime.all2all.deepep_package import bind_deep_ep, deep_ep_generation
from ep_runtime.all2all.registry import register_backend
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.base import NEVER_REVIEWED, Concurrency, ConcurrencyRule, InputFormat
from ep_runtime.kernels.errors import CapacityError, ConfigError, PlanError
from ep_runtime.layer import MoELayer
from ep_runtime.machine import PRESETS
from ep_runtime.ownership import Owner, Schedule
from ep_runtime.plan import resolve_plan
from ep_runtime.reference import reference_layer
from tests import fake_deep_ep
from tests.all2all.contract import (
    ContractCase,
    assert_close,
    check_bias_rule,
    check_case,
    check_graph,
    coded_experts,
    contract_cases,
    expected_output,
    expert_factors,
    seeded_rows,
)
from tests.all2all.test_contract import LATE_S, time_calls_before_a_late_peer
from tests.harness import require_gpus, run_ranks

Backend = type[DeepEPLowLatencyBackend] | type[DeepEPHighThroughputBackend]
BF16 = torch.bfloat16
BACKENDS: dict[str, Backend] = {
    "low_latency": DeepEPLowLatencyBackend,
    "high_throughput": DeepEPHighThroughputBackend,
}


def bf16_cases(capabilities: BackendCapabilities) -> list[ContractCase]:
    """The contract's cases in DeepEP's dtype, and some of its own."""
    cases = [c for c in contract_cases(capabilities) if c.dtype is not torch.float16]
    cases += [
        ContractCase("a hidden size that needs no padding", (3, 5), hidden_size=2048),
        ContractCase("a hidden size just above a compiled one", (3, 5), hidden_size=2049),
        ContractCase("an odd bound on the rows", (7, 5), max_tokens_per_rank=5),
        ContractCase("as many rows as the bound, all slots routed", (16, 16), routing="full"),
        ContractCase("one rank with repeated ids", (5,), routing="one_expert"),
    ]
    return [replace(case, dtype=BF16) for case in cases]


CASES = [
    pytest.param(name, case, id=f"{name}: {case.name}")
    for name, cls in BACKENDS.items()
    for case in bf16_cases(cls.capabilities)
]


def on_cpu(name: str) -> Backend:
    """A backend that declares the CPU and needs nothing installed; the code is the product's."""
    cls = BACKENDS[name]
    declared = replace(
        cls.capabilities, name=f"cpu_{name}", device_types=frozenset({"cpu"}), needs_package=None
    )
    return type(f"CPU{cls.__name__}", (cls,), {"capabilities": declared})


def with_fake(ctx: EPContext, fn: Callable[..., Any], *args: Any) -> Any:
    """fn(ctx, *args) on a rank where deep_ep is the stand-in and both backends run on a CPU."""
    fake_deep_ep.install()
    for name in BACKENDS:
        register_backend(f"cpu_{name}", on_cpu(name))
    return fn(ctx, *args)


def run_with_fake(fn: Callable[..., Any], name: str, case: ContractCase, *args: Any) -> list[Any]:
    backend = f"cpu_{name}"
    return run_ranks(with_fake, case.parallel(backend), fn, backend, case, *args)


def group_of(size: int) -> EPGroup:
    return EPGroup(None, 0, size, torch.device("cpu"))


def build(name: str, *, ep_size: int = 2, **changes: Any) -> Any:
    case = ContractCase("shape", (1,) * ep_size, **({"dtype": BF16} | changes))
    return on_cpu(name)(group_of(ep_size), case.shape())


@pytest.mark.parametrize(("name", "case"), CASES)
def test_backend_meets_the_contract(name: str, case: ContractCase) -> None:
    run_with_fake(check_case, name, case)


@pytest.mark.parametrize("tokens", [(3, 5), (0, 4), (4,), (0,)], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_bias_is_added_once_where_declared_and_refused_elsewhere(
    name: str, tokens: tuple[int, ...]
) -> None:
    run_with_fake(check_bias_rule, name, ContractCase("bias", tokens, dtype=BF16))


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_return_before_the_peers_arrive(name: str) -> None:
    case = ContractCase("async", (3, 5), dtype=BF16)
    times, _ = run_with_fake(time_calls_before_a_late_peer, name, case)
    dispatched, waited, combined, joined = times
    assert max(dispatched, combined) < LATE_S / 2 < min(waited, joined)


def test_declared_capabilities_are_those_of_the_design() -> None:
    low, high = (cls.capabilities for cls in BACKENDS.values())
    assert (low.name, high.name) == ("deepep_low_latency", "deepep_high_throughput")
    assert (low.format, high.format) == (InputFormat.BATCHED, InputFormat.STANDARD)
    assert low.supports_async
    assert high.supports_async
    assert (low.combine_bias, high.combine_bias) == (CombineBias.NONE, CombineBias.AT_ISSUE)
    assert (low.supports_cuda_graph, high.supports_cuda_graph) == (True, False)
    for capabilities in (low, high):
        assert not capabilities.uneven_experts
        assert capabilities.device_types == {"cuda"}
        assert capabilities.needs_package == "deep_ep"


# --- what DeepEP cannot serve is refused where the backend is built ---


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("low_latency", {"dtype": torch.float32}, ["dtype float32", "use dtype: bfloat16"]),
        ("low_latency", {"dtype": torch.float16}, ["dtype float16", "use dtype: bfloat16"]),
        ("high_throughput", {"dtype": torch.float32}, ["dtype float32", "use dtype: bfloat16"]),
        ("low_latency", {"top_k": 12, "num_experts": 16}, ["top_k (12)", "11"]),
        ("high_throughput", {"top_k": 33, "num_experts": 64}, ["top_k (33)", "32"]),
        ("low_latency", {"hidden_size": 8193}, ["hidden_size (8193)", "8192"]),
        ("low_latency", {"ep_size": 3, "num_experts": 6}, ["1, 2, 4, 8", "ep_size is 3"]),
        ("high_throughput", {"ep_size": 16, "num_experts": 16}, ["1, 2, 4, 8", "ep_size is 16"]),
        ("low_latency", {"num_experts": 7}, ["num_experts (7)", "ep_size (2)"]),
        ("high_throughput", {"num_experts": 7}, ["num_experts (7)", "ep_size (2)"]),
    ],
)
def test_a_shape_that_its_kernels_do_not_take_is_refused_by_name(
    name: str, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        build(name, **changes)
    for word in [f"all2all_backend cpu_{name}", "all2all_backend: all_to_all", *words]:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("name", "hidden_size", "padded_size"),
    [
        ("low_latency", 1, 2048),
        ("low_latency", 2880, 3072),
        ("low_latency", 7168, 7168),
        ("low_latency", 7169, 8192),
        ("high_throughput", 1, 256),
        ("high_throughput", 2880, 3072),
        ("high_throughput", 7168, 7168),
    ],
)
def test_hidden_sizes_are_padded_to_the_next_that_kernels_take(
    name: str, hidden_size: int, padded_size: int
) -> None:
    backend = build(name, ep_size=1, hidden_size=hidden_size)
    case = ContractCase("rows", (3,), hidden_size=max(hidden_size, 2), dtype=BF16)
    tokens = replace(seeded_rows(case, 0, 0, torch.device("cpu")), rows_per_rank=(3,))
    rows = tokens.hidden_states[:, :hidden_size]
    prepared = backend.prepare(replace(tokens, hidden_states=rows))
    assert prepared.hidden_states.shape == (3, padded_size)
    assert torch.equal(prepared.hidden_states[:, :hidden_size], rows)
    assert prepared.topk_ids.dtype is torch.int64
    assert HIDDEN_SIZES == fake_deep_ep.HIDDEN_SIZES


def refuse_rows_above_the_bound(ctx: EPContext, name: str, case: ContractCase) -> None:
    backend = ctx.backend(name, replace(case, max_tokens_per_rank=4).shape())
    rows = seeded_rows(case, ctx.dp_rank, 0, ctx.device)
    with pytest.raises(CapacityError, match=r"\(4\) rows on a rank; call in rounds"):
        backend.prepare(replace(rows, rows_per_rank=case.tokens))


def test_more_rows_than_the_low_latency_buffer_holds_are_refused() -> None:
    run_with_fake(refuse_rows_above_the_bound, "low_latency", ContractCase("5", (5, 1), dtype=BF16))


def refuse_short_queues(ctx: EPContext, name: str, case: ContractCase) -> None:
    with pytest.raises(PlanError, match=r"max_tokens_per_rank \(511\).*NVSHMEM_QP_DEPTH.* 510"):
        ctx.backend(name, replace(case, max_tokens_per_rank=511).shape())
    ctx.backend(name, replace(case, max_tokens_per_rank=510).shape())


def test_more_rows_than_the_queues_hold_are_refused_with_the_variable() -> None:
    run_with_fake(refuse_short_queues, "low_latency", ContractCase("q", (1, 1), dtype=BF16))


# --- which deep_ep is installed ---


@pytest.mark.parametrize(
    ("names", "generation", "message"),
    [
        (("Buffer", "ElasticBuffer"), "V2", r"generation V2 \(deep_ep.ElasticBuffer\)"),
        (("EPBuffer",), "V2.5", r"generation V2.5 \(deep_ep.EPBuffer\)"),
        ((), None, "is not DeepEP"),
    ],
)
def test_other_generations_are_refused_by_name(
    names: tuple[str, ...],
    generation: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = fake_deep_ep.module_with(*names)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    assert deep_ep_generation(module) == generation
    with pytest.raises(PlanError, match=message):
        bind_deep_ep("deepep_low_latency")


def test_v1_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    assert bind_deep_ep("deepep_low_latency") is fake_deep_ep
    assert deep_ep_generation(fake_deep_ep) == "V1"


def test_a_missing_package_names_the_extra_and_the_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(PlanError, match=r"ep-runtime\[deepep\].*LD_LIBRARY_PATH"):
        bind_deep_ep("deepep_low_latency")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_buffer_that_cannot_be_made_names_the_variables(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("deep_ep")

    class Broken(fake_deep_ep.Buffer):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("nvshmem initialization failed\nmore")

    module.Buffer = Broken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    with pytest.raises(ConfigError, match=r"initialization failed; it needs.*NVSHMEM_REMOTE"):
        build(name)


# --- the traps ---


def check_output(ctx: EPContext, name: str, case: ContractCase) -> None:
    """The output alone, whichever way the slots travelled."""
    backend = ctx.backend(name, case.shape())
    rows = seeded_rows(case, ctx.dp_rank, 0, ctx.device)
    tokens = replace(rows, rows_per_rank=case.tokens)
    received, handle = backend.dispatch(backend.prepare(tokens)).wait()
    factors = expert_factors(case.placement().experts_of(ctx.ep_rank), ctx.device)
    output = backend.combine(coded_experts(received, factors, case.dtype), handle).wait()
    assert_close(output, expected_output(rows), case.dtype)


@pytest.mark.parametrize("tokens", [(4, 4), (4,)], ids=str)
def test_repeated_ids_that_would_overflow_an_expert_are_folded(tokens: tuple[int, ...]) -> None:
    case = ContractCase(
        "repeated", tokens, top_k=3, routing="one_expert", max_tokens_per_rank=4, dtype=BF16
    )
    run_with_fake(check_output, "low_latency", case)


def test_folding_keeps_the_first_of_equal_ids_with_the_sum_of_the_weights() -> None:
    ids = torch.tensor([[2, 5, 2], [-1, 3, -1]], dtype=torch.int32)
    weights = torch.tensor([[0.1, 0.2, 0.3], [torch.nan, 0.5, torch.nan]])
    folded, summed = fold_equal_ids(ids, weights)
    assert folded.tolist() == [[2, 5, -1], [-1, 3, -1]]
    torch.testing.assert_close(summed[0, :2], torch.tensor([0.4, 0.2]))
    assert summed[1, 1] == 0.5


def interleave_calls(ctx: EPContext, name: str, case: ContractCase) -> None:
    """Two calls at once, joined in order, are right; a third finds no room and is told so."""
    backend = ctx.backend(name, case.shape())
    factors = expert_factors(case.placement().experts_of(ctx.ep_rank), ctx.device)
    rows = [seeded_rows(case, ctx.dp_rank, layer, ctx.device) for layer in range(3)]
    prepared = [backend.prepare(replace(r, rows_per_rank=case.tokens)) for r in rows]
    first, second = (backend.dispatch(p) for p in prepared[:2])
    outputs = []
    received, handle = first.wait()
    combining = backend.combine(coded_experts(received, factors, case.dtype), handle)
    received, handle = second.wait()
    outputs.append(combining.wait())
    outputs.append(backend.combine(coded_experts(received, factors, case.dtype), handle).wait())
    for output, row in zip(outputs, rows, strict=False):
        assert_close(output, expected_output(row), case.dtype)

    dispatched = [backend.dispatch(p) for p in prepared]
    with pytest.raises(RuntimeError, match="holds the results of 2 calls, and 2 came after"):
        dispatched[0].wait()


def test_two_low_latency_calls_may_overlap_and_a_third_is_refused() -> None:
    run_with_fake(interleave_calls, "low_latency", ContractCase("calls", (3, 5), dtype=BF16))


@pytest.mark.parametrize("name", BACKENDS)
def test_one_rank_needs_no_deep_ep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    build(name, ep_size=1).close()


# --- whole layers and plans ---

MOE = MoEConfig(
    hidden_size=64,
    moe_intermediate_size=32,
    num_experts=4,
    top_k=2,
    num_shared_experts=1,
    dtype="bfloat16",
)


def schedule_of(name: str, communication: ConcurrencyRule | None = None) -> Schedule:
    """The shared expert's: its window only where the backend's kernels are certified to have
    company. communication: in place of what the backend declares."""
    is_low = "low" in name
    declared = BACKENDS["low_latency" if is_low else "high_throughput"].capabilities.communication
    if (communication or declared).concurrency is Concurrency.CERTIFIED:
        return Schedule.COMBINE_WINDOW if is_low else Schedule.DISPATCH_WINDOW
    return Schedule.COMBINE_JOINED if is_low else Schedule.DISPATCH_JOINED


def check_layer(ctx: EPContext, name: str, case: ContractCase, experts: str) -> None:
    """Router to output, the shared expert included, in rounds, against one process in float32."""
    generator = torch.Generator().manual_seed(0)

    def weight(*size: int) -> torch.Tensor:
        scaled: torch.Tensor = torch.randn(*size, generator=generator) / size[-1] ** 0.5
        return scaled.to(BF16)

    weights: dict[str, Any] = {
        "w13": weight(4, 64, 64),
        "w2": weight(4, 64, 32),
        "router": weight(4, 64).float(),
        "shared": {"w13": weight(64, 64), "w2": weight(64, 32), "gate": None},
    }
    layer = MoELayer(MOE, ctx, experts=experts)
    layer.load_experts(**weights)
    assert layer.plan.ownership.owner is Owner.MODULAR_KERNEL
    assert layer.plan.regime(8).schedule is schedule_of(name)
    rows = weight(case.tokens[ctx.dp_rank] + 1, 64)[1:] * 8
    output = layer(rows.to(ctx.device)).cpu()
    assert_close(output, reference_layer(rows, MOE, **weights), BF16)
    assert layer.stats.shared_expert_calls == 1


@pytest.mark.parametrize(
    ("name", "experts"),
    [("low_latency", "triton_batched"), ("high_throughput", "reference")],
)
def test_a_layer_with_a_shared_expert_equals_the_reference(name: str, experts: str) -> None:
    case = ContractCase("layer", (5, 0), max_tokens_per_rank=4)
    run_with_fake(check_layer, name, case, experts)


H200_WITH_DEEP_EP = replace(PRESETS["h200x8"], packages=("deep_ep",))


def plan_backend(backend: str, **changes: Any) -> tuple[str, str]:
    moe = MOE.model_copy(update=changes)
    parallel = ParallelConfig(dp_size=8, device="cuda", all2all_backend=backend)
    placed = MoEConfig(**(moe.model_dump() | {"num_experts": 8}))
    plan = resolve_plan(placed, parallel, H200_WITH_DEEP_EP, shared_experts=SharedExpertsConfig())
    return plan.backend, plan.experts


def test_plans_pair_each_backend_with_the_kernel_of_its_format() -> None:
    assert plan_backend("deepep_low_latency") == ("deepep_low_latency", "triton_batched")
    assert plan_backend("deepep_high_throughput") == ("deepep_high_throughput", "triton")
    assert plan_backend("auto")[0] == "symm_mem"


@pytest.mark.parametrize("backend", ["deepep_low_latency", "deepep_high_throughput"])
def test_a_plan_refuses_what_the_backend_would(backend: str) -> None:
    with pytest.raises(PlanError, match=r"dtype float32.*use dtype: bfloat16"):
        plan_backend(backend, dtype="float32")


def test_without_the_package_a_plan_names_it() -> None:
    parallel = ParallelConfig(dp_size=2, device="cuda", all2all_backend="deepep_low_latency")
    with pytest.raises(PlanError, match="needs the package deep_ep"):
        resolve_plan(MOE, parallel, PRESETS["h200x8"])


# --- the package itself ---


def require_deep_ep(case: ContractCase) -> None:
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("deep_ep is not installed: pip install 'ep-runtime[deepep]'")
    require_gpus(case.parallel("local").world_size)


@pytest.mark.multigpu
@pytest.mark.parametrize(("name", "case"), CASES)
def test_on_gpus_the_backend_meets_the_contract(name: str, case: ContractCase) -> None:
    require_deep_ep(case)
    backend = f"deepep_{name}"
    run_ranks(check_case, case.parallel(backend, "cuda"), backend, case)


@pytest.mark.multigpu
@pytest.mark.parametrize("tokens", [(3, 5), (0, 4)], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_on_gpus_the_bias_rule_holds(name: str, tokens: tuple[int, ...]) -> None:
    case = ContractCase("bias", tokens, dtype=BF16)
    require_deep_ep(case)
    backend = f"deepep_{name}"
    run_ranks(check_bias_rule, case.parallel(backend, "cuda"), backend, case)


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_on_gpus_a_captured_low_latency_call_replays_on_other_rows(num_ranks: int) -> None:
    case = ContractCase("graph", (6,) * num_ranks, dtype=BF16)
    require_deep_ep(case)
    backend = "deepep_low_latency"
    run_ranks(check_graph, case.parallel(backend, "cuda"), backend, case)


@pytest.mark.multigpu
def test_on_gpus_repeated_ids_that_would_overflow_an_expert_are_folded() -> None:
    case = ContractCase(
        "repeated", (4, 4), top_k=3, routing="one_expert", max_tokens_per_rank=4, dtype=BF16
    )
    require_deep_ep(case)
    backend = "deepep_low_latency"
    run_ranks(check_output, case.parallel(backend, "cuda"), backend, case)


@pytest.mark.multigpu
@pytest.mark.parametrize("experts", ["triton_batched", "reference"])
@pytest.mark.parametrize("name", BACKENDS)
def test_on_gpus_a_layer_equals_the_reference(name: str, experts: str) -> None:
    if name == "high_throughput" and experts == "triton_batched":
        experts = "triton"
    case = ContractCase("layer", (5, 0), max_tokens_per_rank=4, dtype=BF16)
    require_deep_ep(case)
    backend = f"deepep_{name}"
    run_ranks(check_layer, case.parallel(backend, "cuda"), backend, case, experts)


WIDE = MoEConfig(
    hidden_size=2048,
    moe_intermediate_size=512,
    num_experts=8,
    top_k=4,
    num_shared_experts=1,
    shared_intermediate_size=4096,
    dtype="bfloat16",
)
TRIED = ConcurrencyRule(None, Concurrency.CERTIFIED, "what this test is to show", owns="to see")


def compare_window_with_joined(ctx: EPContext, name: str, iterations: int) -> None:
    """The shared expert beside DeepEP's kernels in flight, which ranks enter at different times."""
    cls = BACKENDS["low_latency" if "low" in name else "high_throughput"]
    generator = torch.Generator().manual_seed(0)

    def weight(*size: int) -> torch.Tensor:
        scaled: torch.Tensor = torch.randn(*size, generator=generator) / size[-1] ** 0.5
        return scaled

    weights: dict[str, Any] = {
        "w13": weight(8, 1024, 2048),
        "w2": weight(8, 2048, 512),
        "router": weight(8, 2048),
        "shared": {"w13": weight(8192, 2048), "w2": weight(2048, 4096), "gate": None},
    }
    given = [weight(count, 2048).to(ctx.device, BF16) * 40 for count in (64, 7, 33)]
    declared, wanted = cls.capabilities, list[torch.Tensor]()
    for rule in (NEVER_REVIEWED[0], TRIED):
        cls.capabilities = replace(declared, communication=rule)
        layer = MoELayer(WIDE, ctx)
        layer.load_experts(**weights)
        assert layer.plan.regime(64).schedule is schedule_of(name, rule)
        if not wanted:
            wanted = [layer(rows) for rows in given]
        num_wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
        for number in range(iterations):
            index = number % len(given)
            torch.cuda._sleep((number * 7919 + ctx.rank * 104729) % 200_000)
            output = layer(given[index])
            num_wrong += (output.view(torch.int16) != wanted[index].view(torch.int16)).any()
        assert num_wrong.item() == 0, rule.concurrency
    cls.capabilities = declared


@pytest.mark.multigpu
@pytest.mark.parametrize("name", BACKENDS)
def test_on_gpus_the_shared_expert_in_the_window_changes_no_bit(name: str) -> None:
    case = ContractCase("window", (64, 64), dtype=BF16, max_tokens_per_rank=64)
    require_deep_ep(case)
    backend = f"deepep_{name}"
    run_ranks(compare_window_with_joined, case.parallel(backend, "cuda"), name, 500, timeout=200)
