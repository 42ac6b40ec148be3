"""The runner with every owner and schedule: who computed what, how often, and in which order."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext, tp_slice
from ep_runtime.kernels.errors import PlanError
from ep_runtime.layer import MoELayer
from ep_runtime.ownership import Owner, Schedule
from tests.ep_runtime import stand_ins
from tests.ep_runtime.coded import (
    HIDDEN,
    POWERS_OF_TEN,
    SHARED_DIGIT,
    build_layer,
    coded_config,
    coded_output,
    coded_routing,
    coded_rows,
    coded_weights,
)
from tests.ep_runtime.recording import RecordingStreams, record_collectives, take_events
from tests.harness import run_ranks

STANDARD_BACKENDS = ("naive", "all_to_all", "sync", "async_none", "async_at_issue", "async_at_join")
BATCHED_BACKENDS = ("batched_none", "batched_at_issue", "batched_at_join")
MODULAR_KERNELS = ("certified", "exclusive", "unsafe")
MONOLITHIC_KERNELS = ("mono_certified", "mono_exclusive", "mono_unsafe")
# The machine that is planned for, and shared_experts.overlap.
SETTINGS = (("cpu", "auto"), ("cuda", "auto"), ("cuda", "off"))
ROWS = {1: (5,), 2: (3, 5), 4: (3, 0, 5, 1)}


@dataclass(frozen=True)
class Pair:
    """A backend and a kernel that fit together."""

    backend: str
    experts: str

    @property
    def is_monolithic(self) -> bool:
        return self.experts in MONOLITHIC_KERNELS

    @property
    def owner(self) -> Owner:
        if self.is_monolithic or self.backend in ("local", "naive", "sync"):
            return Owner.RUNNER
        return Owner.MODULAR_KERNEL


def _pairs(ep_size: int) -> Iterator[Pair]:
    local = ("local",) if ep_size == 1 else ()
    for backend, experts in product((*local, *STANDARD_BACKENDS), MODULAR_KERNELS):
        yield Pair(backend, experts)
    for backend in BATCHED_BACKENDS:
        yield Pair(backend, "batched")
    for backend, experts in product((*local, "naive", "sync"), MONOLITHIC_KERNELS):
        yield Pair(backend, experts)


def _parallel(dp_size: int, **changes: Any) -> ParallelConfig:
    return ParallelConfig(dp_size=dp_size, device="cpu", **changes)


def _call(layer: MoELayer, rows: Tensor, routing: tuple[Tensor, Tensor] | None) -> Tensor:
    """Call the layer; its input must come back bit-identical, its output fresh."""
    before = rows.clone()
    ids, weights = routing or (None, None)
    output: Tensor = layer(rows, topk_ids=ids, topk_weights=weights)
    assert torch.equal(rows, before), "the caller's rows were written"
    assert output.shape == rows.shape
    assert output.dtype == rows.dtype
    assert rows.numel() == 0 or output.data_ptr() != rows.data_ptr()
    return output


# --- 11x: every owner, every schedule ---


def _eleven(ctx: EPContext, num_rows: tuple[int, ...]) -> set[tuple[str, str]]:
    """Routed 10x + shared 1x, and one call of the shared expert, for every pair."""
    stand_ins.register()
    moe = coded_config(5, 2)
    weights = coded_weights(moe, [10.0] * 5, 1.0)
    rows = coded_rows(num_rows[ctx.rank], ctx.rank)
    seen = set()
    for pair, (device, overlap) in product(_pairs(ctx.world_size), SETTINGS):
        layer = build_layer(
            ctx,
            moe,
            backend=pair.backend,
            experts=pair.experts,
            device=device,
            overlap=overlap,
        )
        layer.load_experts(**weights)
        assert layer.plan.ownership.owner is pair.owner, pair
        routing = None if pair.is_monolithic else coded_routing(len(rows), moe, ctx.rank, 0.5)
        for calls in (1, 2):
            output = _call(layer, rows, routing)
            torch.testing.assert_close(output, 11 * rows, rtol=1e-6, atol=0, msg=str(pair))
            assert layer.stats.shared_expert_calls == calls, pair
        seen.add((str(pair.owner), str(layer.plan.regime(max(num_rows)).schedule)))
    return seen


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_routed_10x_and_shared_1x_are_11x_in_one_call_for_every_owner_and_schedule(
    ep_size: int,
) -> None:
    seen = run_ranks(_eleven, _parallel(ep_size), ROWS[ep_size])
    runner = {("runner", s) for s in ("serial", "aux_stream", "aux_stream_before_experts")}
    places = ("combine_window", "dispatch_window", "combine_joined", "dispatch_joined")
    kernel = {("modular_kernel", s) for s in places}
    assert seen == [runner | kernel] * ep_size


# --- coded experts: every share can be read off ---


def _digits(ctx: EPContext, num_rows: tuple[int, ...]) -> None:
    stand_ins.register()
    moe = coded_config(5, 2)
    weights = coded_weights(moe, POWERS_OF_TEN, SHARED_DIGIT)
    rows = coded_rows(num_rows[ctx.dp_rank], ctx.dp_rank)
    ids, router_weights = coded_routing(len(rows), moe, ctx.dp_rank)
    if len(rows):
        ids[0] = torch.tensor([2, 2])  # equal ids count twice
        ids[-1, 0] = -1
    wanted = coded_output(rows, ids, router_weights, POWERS_OF_TEN, SHARED_DIGIT)
    for pair, device in product(_pairs(ctx.parallel.ep_size), ("cpu", "cuda")):
        if pair.is_monolithic:
            continue
        layer = build_layer(ctx, moe, backend=pair.backend, experts=pair.experts, device=device)
        layer.load_experts(**weights)
        output = _call(layer, rows, (ids, router_weights))
        assert torch.equal(output, wanted), (pair, device, output[:, 0], wanted[:, 0])
        assert layer.stats.shared_expert_calls == 1, pair


CASES = {
    "unequal_2": (_parallel(2), (3, 5)),
    "unequal_4": (_parallel(4), (3, 0, 5, 1)),
    "none_on_the_second": (_parallel(2), (4, 0)),
    "none_on_the_first": (_parallel(2), (0, 4)),
    "none_anywhere": (_parallel(2), (0, 0)),
    "rounds": (_parallel(2, max_tokens_per_rank=2), (5, 3)),
    "rounds_and_an_empty_rank": (_parallel(2, max_tokens_per_rank=2), (0, 5)),
    "rounds_alone": (_parallel(1, max_tokens_per_rank=2), (5,)),
    "round_robin": (_parallel(2, expert_placement_strategy="round_robin"), (3, 5)),
    "tp_2": (_parallel(1, tp_size=2), (5,)),
    "tp_2_one_row": (_parallel(1, tp_size=2), (1,)),
    "dp_2_tp_2": (_parallel(2, tp_size=2), (3, 5)),
    "two_groups_of_2": (_parallel(4, ep_size=2), (3, 5, 0, 2)),
    "tp_2_in_groups_of_1": (_parallel(1, tp_size=2, ep_size=1), (5,)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_share_arrives_once_and_the_shared_expert_sees_own_rows(case: str) -> None:
    parallel, num_rows = CASES[case]
    run_ranks(_digits, parallel, num_rows)


def _monolithic_digits(ctx: EPContext, num_rows: tuple[int, ...]) -> None:
    stand_ins.register()
    moe = coded_config(5, 1)
    weights = coded_weights(moe, POWERS_OF_TEN, SHARED_DIGIT)
    rows = coded_rows(num_rows[ctx.dp_rank], ctx.dp_rank)
    # The first of the largest of columns 1..5.
    ids = rows[:, 1:6].argmax(dim=1, keepdim=True)
    wanted = coded_output(rows, ids, torch.ones(ids.shape), POWERS_OF_TEN, SHARED_DIGIT)
    own = tp_slice(len(rows), ctx.parallel.tp_size, ctx.tp_rank)
    for pair, device in product(_pairs(ctx.parallel.ep_size), ("cpu", "cuda")):
        layer = build_layer(ctx, moe, backend=pair.backend, experts=pair.experts, device=device)
        layer.load_experts(**weights)
        output = _call(layer, rows, None)
        assert torch.equal(output, wanted), (pair, device, output[:, 0], wanted[:, 0])
        assert layer.stats.shared_expert_calls == 1, pair
        counts = layer.stats.tokens_per_expert
        if ctx.parallel.ep_size == 1:
            assert counts.tolist() == ids[own].flatten().bincount(minlength=5).tolist()


@pytest.mark.parametrize("case", CASES)
def test_a_kernel_that_routes_itself_gives_the_same_shares_as_the_router(case: str) -> None:
    parallel, num_rows = CASES[case]
    run_ranks(_monolithic_digits, parallel, num_rows)


def _three_layers_in_a_row(ctx: EPContext, cases: tuple[tuple[int, int], ...]) -> None:
    stand_ins.register()
    moe = coded_config(5, 2)
    scales = (1.0, 2.0, 4.0)
    for pair in _pairs(ctx.world_size):
        layers = [build_layer(ctx, moe, backend=pair.backend, experts=pair.experts) for _ in scales]
        for scale, layer in zip(scales, layers, strict=True):
            layer.load_experts(**coded_weights(moe, [10.0 * scale] * 5, scale))
        for num_rows in cases:
            rows = coded_rows(num_rows[ctx.rank], ctx.rank)
            routing = None if pair.is_monolithic else coded_routing(len(rows), moe, 7, 0.5)
            outputs = [_call(layer, rows, routing) for layer in layers]
            for scale, output in zip(scales, outputs, strict=True):
                torch.testing.assert_close(output, rows * 11 * scale, rtol=1e-6, atol=0)
        assert [layer.stats.shared_expert_calls for layer in layers] == [len(cases)] * 3


def test_an_empty_rank_goes_through_three_layers_with_the_others() -> None:
    run_ranks(_three_layers_in_a_row, _parallel(2), ((4, 0), (0, 4), (0, 0)))


# --- what the router scales, and what the gate does ---

# Changes to the layer, and the factor that then takes x to the output.
SCALED: dict[str, tuple[dict[str, Any], float]] = {
    "factor": ({"routed_scaling_factor": 2.5}, 26.0),
    # Every expert is chosen, so the scores sum to 1 without being normalised.
    "not_normalised": (
        {"routed_scaling_factor": 2.5, "norm_topk_prob": False, "top_k": 5},
        26.0,
    ),
    "gate_logit_0": ({"shared_expert_gate": True}, 10.5),
    "gate_and_factor": ({"shared_expert_gate": True, "routed_scaling_factor": 2.5}, 25.5),
    "no_shared_expert": ({"num_shared_experts": 0, "routed_scaling_factor": 2.5}, 25.0),
}


def _scaled(ctx: EPContext, changes: dict[str, Any], factor: float) -> None:
    stand_ins.register()
    moe = coded_config(5, **({"top_k": 2} | changes))
    has_shared = moe.has_shared_expert
    weights = coded_weights(moe, [10.0] * 5, 1.0 if has_shared else None)
    rows = coded_rows(3 + 2 * ctx.rank, ctx.rank)
    for pair, overlap in product(_pairs(ctx.world_size), ("auto", "off")):
        layer = build_layer(
            ctx, moe, backend=pair.backend, experts=pair.experts, device="cuda", overlap=overlap
        )
        layer.load_experts(**weights)
        assert layer.plan.ownership.owner is (pair.owner if has_shared else Owner.NONE)
        output = _call(layer, rows, None)
        torch.testing.assert_close(output, rows * factor, rtol=1e-5, atol=0)
        assert layer.stats.shared_expert_calls == has_shared, pair


@pytest.mark.parametrize("case", SCALED)
def test_the_routed_factor_and_the_gate_touch_their_own_part_only(case: str) -> None:
    run_ranks(_scaled, _parallel(2), *SCALED[case])


# --- overlap on or off: the same bits ---


def _random_weights(moe: MoEConfig) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    width, shared = moe.moe_intermediate_size, moe.shared_intermediate_size
    return {
        "w13": normal(moe.num_experts, 2 * width, HIDDEN),
        "w2": normal(moe.num_experts, HIDDEN, width),
        "router": normal(moe.num_experts, HIDDEN),
        "shared": {
            "w13": normal(2 * shared, HIDDEN),
            "w2": normal(HIDDEN, shared),
            "gate": normal(1, HIDDEN),
        },
    }


def _bits(ctx: EPContext, num_rows: tuple[int, ...]) -> None:
    stand_ins.register()
    rows = torch.randn(
        num_rows[ctx.rank], HIDDEN, generator=torch.Generator().manual_seed(ctx.rank)
    )
    for dtype in ("float32", "bfloat16"):
        moe = coded_config(5, 2, dtype=dtype, shared_expert_gate=True)
        weights = _random_weights(moe)
        for pair in _pairs(ctx.world_size):
            outputs = []
            for device, overlap in SETTINGS:
                layer = build_layer(
                    ctx,
                    moe,
                    backend=pair.backend,
                    experts=pair.experts,
                    device=device,
                    overlap=overlap,
                )
                layer.load_experts(**weights)
                outputs.append(_call(layer, rows.to(moe.torch_dtype), None))
            assert all(torch.equal(outputs[0], other) for other in outputs[1:]), pair
            assert not outputs[0].isnan().any()


@pytest.mark.parametrize(
    ("parallel", "num_rows"),
    [
        pytest.param(_parallel(1), (7,), id="one_rank"),
        pytest.param(_parallel(2), (3, 5), id="two_ranks"),
        pytest.param(_parallel(2, max_tokens_per_rank=2), (3, 5), id="rounds"),
    ],
)
def test_overlap_on_or_off_gives_the_same_bits(
    parallel: ParallelConfig, num_rows: tuple[int, ...]
) -> None:
    run_ranks(_bits, parallel, num_rows)


# --- the order of things, on a simulated CUDA device ---


def _events(
    ctx: EPContext, backend: str, experts: str, num_tokens: int, **settings: Any
) -> list[str]:
    moe = coded_config(5, 2)
    layer = build_layer(ctx, moe, backend=backend, experts=experts, device="cuda", **settings)
    layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
    rows = coded_rows(num_tokens, ctx.rank)
    take_events()
    output = _call(layer, rows, None)
    torch.testing.assert_close(output, 11 * rows, rtol=1e-6, atol=0)
    return take_events()


@dataclass(frozen=True)
class Order:
    backend: str
    experts: str
    events: str
    overlap: str = "auto"


_DISPATCHED = "dispatch, join dispatch"
_COMBINED = "combine, join combine"
ORDERS = {
    Schedule.AUX_STREAM: Order(
        "sync",
        "certified",
        f"fork, shared on aux, {_DISPATCHED}, experts, {_COMBINED}, join aux",
    ),
    Schedule.AUX_STREAM_BEFORE_EXPERTS: Order(
        "sync",
        "exclusive",
        f"fork, shared on aux, {_DISPATCHED}, join aux, experts, {_COMBINED}, join aux",
    ),
    Schedule.SERIAL: Order("sync", "unsafe", f"{_DISPATCHED}, experts, {_COMBINED}, shared"),
    Schedule.COMBINE_WINDOW: Order(
        "async_none", "certified", f"{_DISPATCHED}, experts, combine, shared, join combine"
    ),
    Schedule.COMBINE_JOINED: Order(
        "async_none", "unsafe", f"{_DISPATCHED}, experts, {_COMBINED}, shared"
    ),
    Schedule.DISPATCH_WINDOW: Order(
        "async_at_issue", "certified", f"dispatch, shared, join dispatch, experts, {_COMBINED}"
    ),
    Schedule.DISPATCH_JOINED: Order(
        "async_at_issue", "unsafe", f"{_DISPATCHED}, shared, experts, {_COMBINED}"
    ),
}
MORE_ORDERS = {
    "at_join_window": Order("async_at_join", "certified", ORDERS[Schedule.COMBINE_WINDOW].events),
    "at_join_joined": Order("async_at_join", "unsafe", ORDERS[Schedule.COMBINE_JOINED].events),
    # The exclusive kernel is done when combine is issued, and starts when dispatch has landed.
    "exclusive_at_issue": Order(
        "async_at_issue", "exclusive", ORDERS[Schedule.DISPATCH_WINDOW].events
    ),
    "exclusive_none": Order("async_none", "exclusive", ORDERS[Schedule.COMBINE_WINDOW].events),
    "overlap_off_sync": Order("sync", "certified", ORDERS[Schedule.SERIAL].events, overlap="off"),
    "overlap_off_async": Order(
        "async_none", "certified", ORDERS[Schedule.COMBINE_JOINED].events, overlap="off"
    ),
    "overlap_off_at_issue": Order(
        "async_at_issue", "certified", ORDERS[Schedule.DISPATCH_JOINED].events, overlap="off"
    ),
    "monolithic_exclusive": Order(
        "naive", "mono_exclusive", "fork, shared on aux, join aux, experts, join aux"
    ),
    "monolithic_certified": Order(
        "naive", "mono_certified", "fork, shared on aux, experts, join aux"
    ),
    "monolithic_unsafe": Order("naive", "mono_unsafe", "experts, shared"),
}


def test_the_orders_below_are_one_for_each_schedule() -> None:
    assert set(ORDERS) == set(Schedule) - {Schedule.NONE}


def _events_of_orders(ctx: EPContext, orders: tuple[Order, ...]) -> list[str]:
    stand_ins.register()
    return [
        ", ".join(_events(ctx, order.backend, order.experts, 4, overlap=order.overlap))
        for order in orders
    ]


def test_each_schedule_runs_in_its_order() -> None:
    orders = (*ORDERS.values(), *MORE_ORDERS.values())
    for found in run_ranks(_events_of_orders, _parallel(2), orders):
        assert found == [order.events for order in orders]


# Token counts, thresholds, and (backend, kernel) whose launches need the whole device.
LAUNCHES = tuple(
    product(
        (1, 8, 256, 3072),
        (256, 4096),
        (("local", "exclusive"), ("local", "mono_exclusive"), ("async_at_issue", "exclusive")),
    )
)


def _events_of_launches(ctx: EPContext) -> list[list[str]]:
    stand_ins.register()
    return [
        _events(ctx, backend, experts, num_tokens, token_threshold=threshold)
        for num_tokens, threshold, (backend, experts) in LAUNCHES
    ]


@pytest.mark.parametrize("max_tokens_per_rank", [256, 4096])
def test_aux_stream_and_communication_are_joined_before_every_exclusive_launch(
    max_tokens_per_rank: int,
) -> None:
    parallel = _parallel(1, max_tokens_per_rank=max_tokens_per_rank)
    (found,) = run_ranks(_events_of_launches, parallel)
    for (num_tokens, threshold, (backend, _)), events in zip(LAUNCHES, found, strict=True):
        assert events.count("experts") == -(-num_tokens // max_tokens_per_rank)
        assert _exclusive_launches_are_alone(events), events
        assert ("fork" in events) == (backend == "local" and num_tokens <= threshold)


def _exclusive_launches_are_alone(events: list[str]) -> bool:
    in_flight: set[str] = set()
    for event in events:
        if event == "shared on aux":
            in_flight.add("aux")
        elif event in ("dispatch", "combine"):
            in_flight.add(event)
        elif event.startswith("join "):
            in_flight.discard(event.removeprefix("join "))
        elif event == "experts" and in_flight:
            return False
    return not in_flight


def _no_collective_on_aux(ctx: EPContext) -> list[list[str]]:
    stand_ins.register()
    record_collectives()
    moe = coded_config(5, 2)
    found = []
    for pair in _pairs(ctx.world_size):
        layer = build_layer(ctx, moe, backend=pair.backend, experts=pair.experts, device="cuda")
        layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
        take_events()
        _call(layer, coded_rows(4, ctx.rank), None)
        found.append(take_events())
    return found


def test_the_aux_stream_carries_the_shared_expert_and_no_collective() -> None:
    for found in run_ranks(_no_collective_on_aux, _parallel(2)):
        assert all("collective" in events for events in found)
        on_aux = {event for events in found for event in events if event.endswith("on aux")}
        assert on_aux == {"shared on aux"}


def _failing_routed_part(ctx: EPContext) -> list[str]:
    stand_ins.register()
    moe = coded_config(5, 2)
    layer = build_layer(ctx, moe, backend="local", experts="raising", device="cuda")
    layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
    take_events()
    with pytest.raises(ArithmeticError, match="the experts kernel failed"):
        layer(coded_rows(4, 0))
    return take_events()


def test_the_aux_stream_is_joined_when_the_routed_part_fails() -> None:
    (events,) = run_ranks(_failing_routed_part, _parallel(1))
    assert events == ["fork", "shared on aux", "experts", "join aux"]


def _short_experts(ctx: EPContext) -> None:
    stand_ins.register()
    moe = coded_config(5, 2)
    for backend in ("local", "all_to_all"):
        layer = build_layer(ctx, moe, backend=backend, experts="short")
        layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
        received = re.escape(f"short returned [3, {moe.hidden_size}] for received rows [4,")
        with pytest.raises(ValueError, match=received):
            layer(coded_rows(4, 0))


def test_experts_that_return_too_few_rows_are_named_before_a_backend_reads_them() -> None:
    run_ranks(_short_experts, _parallel(1))


def _hundred_layers(ctx: EPContext) -> tuple[int, int]:
    stand_ins.register()
    moe = coded_config(5, 2)
    forks = 0
    for _ in range(100):
        layer = build_layer(ctx, moe, backend="local", experts="certified", device="cuda")
        layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
        take_events()
        _call(layer, coded_rows(2, 0), None)
        forks += take_events().count("fork")
    return RecordingStreams.num_made, forks


def test_a_hundred_layers_share_one_aux_stream() -> None:
    assert run_ranks(_hundred_layers, _parallel(1)) == [(1, 100)]


# --- what cannot be ---


def _given_ids(ctx: EPContext) -> None:
    stand_ins.register()
    moe = coded_config(5, 2)
    rows = coded_rows(3, ctx.rank)
    ids, weights = coded_routing(3, moe, 0)
    for experts, device in product(MONOLITHIC_KERNELS, ("cpu", "cuda")):
        layer = build_layer(ctx, moe, backend="naive", experts=experts, device=device)
        layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
        with pytest.raises(PlanError, match=rf"topk_ids.*{experts}.*monolithic"):
            layer(rows, topk_ids=ids, topk_weights=weights)
        assert torch.allclose(layer(rows), 11 * rows)


def test_given_ids_are_refused_by_a_kernel_that_routes_itself_and_the_layer_goes_on() -> None:
    run_ranks(_given_ids, _parallel(2))


def _spoilt(ctx: EPContext) -> None:
    stand_ins.register()
    moe = coded_config(5, 2)
    for backend in ("local", "async_none", "async_at_issue"):
        layer = build_layer(ctx, moe, backend=backend, experts="certified")
        layer.load_experts(**coded_weights(moe, [10.0] * 5, 1.0))
        assert layer.shared is not None
        run = layer.shared.run

        def never(hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return torch.zeros_like(hidden_states)

        def twice(hidden_states: Tensor, run: Any = run, **kwargs: Any) -> Tensor:
            run(hidden_states, **kwargs)
            return run(hidden_states, **kwargs)  # type: ignore[no-any-return]

        layer.shared.run = never  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="was not run"):
            layer(coded_rows(3, 0))
        layer.shared.run = twice  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="already"):
            layer(coded_rows(3, 0))
        layer.shared.run = run  # type: ignore[method-assign]
        assert torch.allclose(layer(coded_rows(3, 0)), 11 * coded_rows(3, 0))


def test_a_shared_expert_that_runs_never_or_twice_raises() -> None:
    run_ranks(_spoilt, _parallel(1))
