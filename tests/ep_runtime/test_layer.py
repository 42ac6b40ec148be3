"""A layer against a direct computation, its errors, its statistics, and calls that follow calls."""

import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.plan import resolve_plan
from tests.harness import run_ranks

HIDDEN, WIDTH, EXPERTS, TOP_K = 24, 20, 5, 2
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


def _moe(**changes: Any) -> MoEConfig:
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "num_shared_experts": 1,
        "shared_expert_gate": True,
        "dtype": "float32",
    }
    return MoEConfig(**(values | changes))


def _weights(moe: MoEConfig, seed: int = 0) -> dict[str, Any]:
    """Full tensors, of the layer's dtype already, so that both sides start from the same."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = moe.torch_dtype) -> Tensor:
        values: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return values.to(dtype)

    gated = 1 if moe.activation == "relu2" else 2
    hidden, width, num_experts = moe.hidden_size, moe.moe_intermediate_size, moe.num_experts
    shared_width = moe.shared_intermediate_size
    weights: dict[str, Any] = {
        "w13": normal(num_experts, gated * width, hidden),
        "w2": normal(num_experts, hidden, width),
        "router": 4 * normal(num_experts, hidden, dtype=torch.float32),
    }
    if moe.expert_bias:
        weights["w13_bias"] = normal(num_experts, gated * width)
        weights["w2_bias"] = normal(num_experts, hidden)
    if moe.router_bias:
        weights["router_bias"] = normal(num_experts, dtype=torch.float32)
    if moe.has_correction_bias:
        weights["correction_bias"] = normal(num_experts, dtype=torch.float32)
    if moe.has_shared_expert:
        weights["shared"] = {
            "w13": normal(gated * shared_width, hidden),
            "w2": normal(hidden, shared_width),
            "gate": normal(1, hidden) if moe.shared_expert_gate else None,
        }
    return weights


def _rows(num_rows: int, moe: MoEConfig, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(num_rows, moe.hidden_size, generator=generator).to(moe.torch_dtype)


def _ids(num_rows: int, moe: MoEConfig, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(200 + seed)
    scores = torch.rand(num_rows, moe.num_experts, generator=generator)
    weights = torch.rand(num_rows, moe.top_k, generator=generator) + 0.1
    return scores.argsort(dim=1)[:, : moe.top_k], weights


# --- the direct computation: one row and one slot at a time, in float64 ---


def _activated(moe: MoEConfig, projected: Tensor) -> Tensor:
    if moe.activation == "relu2":
        return projected.clamp(min=0) ** 2
    half = projected.shape[0] // 2
    gate, up = projected[:half], projected[half:]
    if moe.activation == "swigluoai":
        if moe.swiglu_limit is not None:
            gate = gate.clamp(max=moe.swiglu_limit)
            up = up.clamp(-moe.swiglu_limit, moe.swiglu_limit)
        return (up + 1) * gate / (1 + torch.exp(-moe.swiglu_alpha * gate))
    return gate / (1 + torch.exp(-gate)) * up


def _direct_routing(moe: MoEConfig, weights: dict[str, Any], x: Tensor) -> list[tuple[int, float]]:
    logits = weights["router"].double() @ x
    if moe.router_bias:
        logits = logits + weights["router_bias"].double()
    scores = 1 / (1 + torch.exp(-logits)) if moe.scoring == "sigmoid" else logits.softmax(0)
    choice = scores + weights["correction_bias"].double() if moe.has_correction_bias else scores
    chosen = choice.argsort(descending=True)[: moe.top_k].tolist()
    total = sum(scores[e].item() for e in chosen) if moe.norm_topk_prob else 1.0
    return [(e, scores[e].item() / total * moe.routed_scaling_factor) for e in chosen]


def _direct(
    moe: MoEConfig, weights: dict[str, Any], rows: Tensor, routing: tuple[Tensor, Tensor] | None
) -> Tensor:
    output = torch.zeros(rows.shape, dtype=torch.float64)
    for t, x in enumerate(rows.double()):
        slots = _direct_routing(moe, weights, x)
        if routing is not None:
            slots = list(zip(routing[0][t].tolist(), routing[1][t].tolist(), strict=True))
        for expert, weight in slots:
            if not 0 <= expert < moe.num_experts:
                continue
            on_input = weight if moe.apply_router_weight_on_input else 1.0
            projected = weights["w13"][expert].double() @ (x * on_input)
            if moe.expert_bias:
                projected = projected + weights["w13_bias"][expert].double()
            y = weights["w2"][expert].double() @ _activated(moe, projected)
            if moe.expert_bias:
                y = y + weights["w2_bias"][expert].double()
            output[t] += y * (1.0 if moe.apply_router_weight_on_input else weight)
        if moe.has_shared_expert:
            shared = weights["shared"]
            y = shared["w2"].double() @ _activated(moe, shared["w13"].double() @ x)
            if shared["gate"] is not None:
                y = y / (1 + torch.exp(-(shared["gate"].double() @ x)))
            output[t] += y
    return output


def _assert_close(output: Tensor, wanted: Tensor, dtype: str) -> None:
    assert output.shape == wanted.shape
    assert not output.isnan().any()
    error = (output.double() - wanted).norm()
    assert error <= TOLERANCES[dtype] * wanted.norm(), (error / wanted.norm()).item()


# --- numbers ---

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "not_gated": {"activation": "relu2"},
    "biases": {"expert_bias": True, "router_bias": True},
    "gpt_oss": {"activation": "swigluoai", "swiglu_limit": 0.3, "expert_bias": True},
    "deepseek": {
        "scoring": "sigmoid",
        "has_correction_bias": True,
        "routed_scaling_factor": 2.5,
    },
    "not_normalised": {"norm_topk_prob": False, "shared_expert_gate": False},
    "no_shared": {"num_shared_experts": 0, "shared_expert_gate": False},
    "k_1_on_the_input": {"top_k": 1, "apply_router_weight_on_input": True},
    "k_is_e": {"top_k": EXPERTS},
    "two_experts": {"num_experts": 2},
}


def _numbers(ctx: EPContext, num_rows: tuple[int, ...], experts: str) -> None:
    for name, changes in LAYERS.items():
        moe = _moe(**changes)
        weights = _weights(moe)
        rows = _rows(num_rows[ctx.dp_rank], moe, ctx.dp_rank)
        ids, router_weights = _ids(len(rows), moe, ctx.dp_rank)
        if len(rows):
            ids[0, 0] = -1  # not routed
            ids[-1, -1] = moe.num_experts  # just outside
            router_weights[0, 0] = float("nan")
        layer = MoELayer(moe, ctx, experts=experts)
        assert layer.plan.backend == ctx.parallel.all2all_backend
        layer.load_experts(**weights)
        # ids near a tie may differ where the router reads rounded rows: float32 layers alone.
        routings: list[tuple[Tensor, Tensor] | None] = [(ids, router_weights)]
        routings += [(ids.int(), router_weights)]
        routings += [None] if moe.dtype == "float32" else []
        for routing in routings:
            output = layer(
                rows,
                topk_ids=None if routing is None else routing[0],
                topk_weights=None if routing is None else routing[1],
            )
            assert output.dtype == moe.torch_dtype, name
            _assert_close(output, _direct(moe, weights, rows, routing), moe.dtype)


@pytest.mark.parametrize(
    ("parallel", "num_rows"),
    [
        pytest.param({"all2all_backend": "local"}, (9,), id="local"),
        pytest.param({"all2all_backend": "all_to_all"}, (9,), id="all_to_all_1"),
        pytest.param({"dp_size": 2, "all2all_backend": "naive"}, (9, 4), id="naive_2"),
        pytest.param({"dp_size": 2, "all2all_backend": "all_to_all"}, (9, 4), id="all_to_all_2"),
        pytest.param(
            {"dp_size": 2, "tp_size": 2, "all2all_backend": "naive"}, (3, 6), id="naive_dp_2_tp_2"
        ),
        pytest.param(
            {
                "dp_size": 4,
                "all2all_backend": "all_to_all",
                "expert_placement_strategy": "round_robin",
                "max_tokens_per_rank": 4,
            },
            (9, 0, 4, 1),
            id="all_to_all_4_round_robin_rounds",
        ),
        pytest.param(
            {"dp_size": 8, "all2all_backend": "all_to_all"},
            (9, 0, 4, 1, 2, 0, 3, 5),
            id="all_to_all_8",
        ),
        pytest.param(
            {"dp_size": 4, "tp_size": 2, "all2all_backend": "naive"},
            (3, 6, 0, 1),
            id="naive_dp_4_tp_2",
        ),
    ],
)
def test_a_layer_equals_the_direct_computation(
    parallel: dict[str, Any], num_rows: tuple[int, ...]
) -> None:
    run_ranks(_numbers, ParallelConfig(device="cpu", **parallel), num_rows, "reference")


def _strided(ctx: EPContext) -> None:
    moe = _moe()
    weights = _weights(moe)
    wide = _rows(6, _moe(hidden_size=2 * HIDDEN), ctx.rank)
    inputs = {
        "every second column": wide[:, ::2],
        "a wide row's slice": wide[:, 3 : 3 + HIDDEN],
        "a transposed view": wide[:, :HIDDEN].t().contiguous().t(),
        "an expanded row": wide[:1, :HIDDEN].expand(6, HIDDEN),
        "every second row": wide.repeat(2, 1)[::2, :HIDDEN],
    }
    ids, router_weights = _ids(6, moe, ctx.rank)
    strided_ids = ids.repeat_interleave(2, dim=1)[:, ::2]
    strided_weights = router_weights.t().contiguous().t()
    layer = MoELayer(moe, ctx)
    layer.load_experts(**weights)
    for name, rows in inputs.items():
        before = wide.clone()
        output = layer(rows, topk_ids=strided_ids, topk_weights=strided_weights)
        assert output.is_contiguous(), name
        assert torch.equal(wide, before), name
        _assert_close(output, _direct(moe, weights, rows, (ids, router_weights)), "float32")


@pytest.mark.parametrize("backend", ["naive", "all_to_all"])
def test_strided_inputs_give_the_same_numbers_and_are_not_written(backend: str) -> None:
    run_ranks(_strided, ParallelConfig(dp_size=2, device="cpu", all2all_backend=backend))


def _later_calls(ctx: EPContext) -> None:
    moe = _moe()
    weights = _weights(moe)
    layer = MoELayer(moe, ctx)
    layer.load_experts(**weights)
    rows = _rows(64, moe, ctx.rank)
    ids, router_weights = _ids(64, moe, ctx.rank)
    first = layer(rows, topk_ids=ids, topk_weights=router_weights)
    kept = first.clone()
    many, (many_ids, many_weights) = _rows(800, moe, 7), _ids(800, moe, 7)
    second = layer(many, topk_ids=many_ids, topk_weights=many_weights)
    assert second.shape == (800, HIDDEN)
    assert torch.equal(first, kept), "an output changed in a later call"
    again = layer(rows, topk_ids=ids, topk_weights=router_weights)
    assert torch.equal(again, kept), "equal calls gave different bits"
    assert again.data_ptr() != first.data_ptr()
    _assert_close(
        second[::97], _direct(moe, weights, many, (many_ids, many_weights))[::97], "float32"
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"all2all_backend": "local"},
        {"dp_size": 2, "all2all_backend": "naive"},
        {"dp_size": 2, "all2all_backend": "all_to_all"},
        {"dp_size": 2, "all2all_backend": "all_to_all", "max_tokens_per_rank": 1000},
    ],
    ids=str,
)
def test_an_output_of_64_rows_stays_what_it_was_after_800(parallel: dict[str, Any]) -> None:
    run_ranks(_later_calls, ParallelConfig(device="cpu", **parallel))


def _step(ctx: EPContext) -> None:
    moe = _moe()
    weights = _weights(moe)
    layer = MoELayer(moe, ctx)
    layer.load_experts(**weights)
    rows = _rows(3 * ctx.rank, moe, ctx.rank)
    alone = layer(rows)
    with ctx.step(len(rows)):
        agreed = layer(rows)
    with ctx.step(len(rows), counts=(0, 3)):
        given = layer(rows)
    assert torch.equal(alone, agreed)
    assert torch.equal(alone, given)
    assert layer.stats.shared_expert_calls == 3


def test_a_step_changes_who_counts_and_nothing_else() -> None:
    run_ranks(_step, ParallelConfig(dp_size=2, device="cpu"))


def _stats(ctx: EPContext, num_rows: tuple[int, ...]) -> tuple[int, list[int], list[int]]:
    moe = _moe()
    layer = MoELayer(moe, ctx)
    layer.load_experts(**_weights(moe))
    ids, weights = _ids(num_rows[ctx.rank], moe, ctx.rank)
    ids[:1, 0] = -1
    for _ in range(2):
        layer(_rows(len(ids), moe, ctx.rank), topk_ids=ids, topk_weights=weights)
    counts = layer.stats.tokens_per_expert
    assert counts.dtype == torch.int64
    held_elsewhere = sorted(set(range(EXPERTS)) - set(layer.local_expert_ids))
    assert counts[held_elsewhere].sum() == 0
    sent = [int((ids == e).sum()) for e in range(EXPERTS)]
    return layer.stats.shared_expert_calls, counts.tolist(), sent


@pytest.mark.parametrize("backend", ["naive", "all_to_all"])
def test_statistics_count_every_slot_where_it_landed(backend: str) -> None:
    parallel = ParallelConfig(
        dp_size=2, device="cpu", all2all_backend=backend, max_tokens_per_rank=3
    )
    results = run_ranks(_stats, parallel, (7, 2))
    assert [calls for calls, _, _ in results] == [2, 2]
    landed = torch.tensor([counts for _, counts, _ in results]).sum(0)
    sent = torch.tensor([sent for _, _, sent in results]).sum(0)
    assert landed.tolist() == (2 * sent).tolist()


# --- errors ---


def _refusals(ctx: EPContext) -> None:
    moe = _moe(expert_bias=True, has_correction_bias=True, router_bias=True)
    weights = _weights(moe)
    layer = MoELayer(moe, ctx)
    x = torch.zeros(3, HIDDEN)
    with pytest.raises(ConfigError, match="call load_experts, or finish_loading"):
        layer(x)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"w13": weights["w13"][:4]}, rf"w13 has shape \[4, .*wanted \[{EXPERTS}, {2 * WIDTH}"),
        ({"w2": weights["w2"].transpose(1, 2)}, rf"w2 .*wanted \[{EXPERTS}, {HIDDEN}, {WIDTH}\]"),
        ({"router": weights["router"].t()}, rf"router .*wanted \[{EXPERTS}, {HIDDEN}\]"),
        ({"w13_bias": None}, "w13_bias is missing"),
        ({"w2_bias": weights["w13_bias"]}, "w2_bias has shape"),
        ({"router_bias": None}, "router_bias is missing"),
        ({"correction_bias": None}, "correction_bias is missing"),
        ({"correction_bias": torch.zeros(4)}, r"correction_bias has shape \[4\]; wanted \[5\]"),
        ({"shared": None}, r'shared\["w13"\] is missing'),
        ({"shared": weights["shared"] | {"gate": None}}, r'shared\["gate"\] is missing'),
        ({"shared": weights["shared"] | {"w2": torch.zeros(1, 1)}}, r'shared\["w2"\] has shape'),
        ({"shared": weights["shared"] | {"w1": None}}, r"\['w1'\].*w13, w2, gate"),
    ]
    for changes, message in wrong:
        with pytest.raises(ConfigError, match=message):
            layer.load_experts(**(weights | changes))
    plain = MoELayer(_moe(num_shared_experts=0, shared_expert_gate=False), ctx)
    needed = {key: weights[key] for key in ("w13", "w2", "router")}
    for key in ("w13_bias", "w2_bias", "router_bias", "correction_bias", "shared"):
        name = r'shared\["w13"\]' if key == "shared" else key
        with pytest.raises(ConfigError, match=f"{name} is given.*leave it out"):
            plain.load_experts(**needed, **{key: weights[key]})

    layer.load_experts(**weights)
    ids, router_weights = _ids(3, moe, 0)
    calls: list[tuple[Tensor, dict[str, Any], str]] = [
        (torch.zeros(3, HIDDEN + 1), {}, rf"hidden_states .*\[3, {HIDDEN + 1}\].*\[T, {HIDDEN}\]"),
        (torch.zeros(HIDDEN), {}, r"hidden_states has shape \[24\]"),
        (x.bfloat16(), {}, "hidden_states is torch.bfloat16.*torch.float32"),
        (x, {"topk_ids": ids}, "topk_ids and topk_weights"),
        (x, {"topk_weights": router_weights}, "topk_ids and topk_weights"),
        (
            x,
            {"topk_ids": ids[:2], "topk_weights": router_weights},
            r"topk_ids has shape \[2, 2\]; wanted \[3, 2\]",
        ),
        (
            x,
            {"topk_ids": ids, "topk_weights": router_weights[:, :1]},
            r"topk_weights has shape \[3, 1\]",
        ),
        (x, {"topk_ids": ids.short(), "topk_weights": router_weights}, "topk_ids is torch.int16"),
        (
            x,
            {"topk_ids": ids, "topk_weights": router_weights.bfloat16()},
            "topk_weights is torch.bfloat16; wanted float32",
        ),
    ]
    for rows, given, message in calls:
        with pytest.raises(ConfigError, match=message):
            layer(rows, **given)
    machine = Machine.detect("cpu")
    plan = resolve_plan(moe, ctx.parallel, machine)
    with pytest.raises(ConfigError, match="in the plan given"):
        MoELayer(moe, ctx, experts="reference", plan=plan)
    with pytest.raises(ConfigError, match="in the plan given"):
        MoELayer(moe, ctx, shared_experts=SharedExpertsConfig(), plan=plan)


def test_what_a_layer_cannot_take_is_refused_by_name() -> None:
    run_ranks(_refusals, ParallelConfig(device="cpu"))


def _unrouted(ctx: EPContext) -> None:
    moe = _moe(num_shared_experts=0, shared_expert_gate=False)
    layer = MoELayer(moe, ctx)
    layer.load_experts(**_weights(moe))
    ids = torch.tensor([[-1, -1], [-5, EXPERTS], [2**31 - 1, -(2**31)], [0, 4]])
    outside = torch.tensor([[-1, -1], [-5, EXPERTS], [2**40, -(2**40)], [2**32, 2**32 + 1]])
    weights = torch.full((4, 2), float("inf"))
    weights[3] = 1.0
    for given in (ids, ids.int()):
        output = layer(_rows(4, moe, 0), topk_ids=given, topk_weights=weights)
        assert torch.equal(output[:3], torch.zeros(3, HIDDEN))
        assert output[3].abs().sum() > 0
    output = layer(_rows(4, moe, 0), topk_ids=outside, topk_weights=weights)
    assert torch.equal(output, torch.zeros(4, HIDDEN)), "an id beyond int32 wrapped around"
    assert layer.stats.tokens_per_expert.sum() in (0, 2, 4), "each rank counts its own"


@pytest.mark.parametrize("backend", ["local", "naive", "all_to_all"])
def test_ids_out_of_range_on_both_sides_contribute_exactly_nothing(backend: str) -> None:
    dp_size = 1 if backend == "local" else 2
    run_ranks(_unrouted, ParallelConfig(dp_size=dp_size, device="cpu", all2all_backend=backend))


def _poisoned(ctx: EPContext) -> None:
    moe = _moe()
    layer = MoELayer(moe, ctx, experts="triton")
    layer.load_experts(**_weights(moe))
    rows = _rows(3, moe, ctx.rank)
    clean = layer(rows)
    ctx.workspace.reserve(4096)
    with ctx.workspace.frame():
        ctx.workspace.take((ctx.workspace.num_bytes,), torch.uint8).fill_(255)
    assert torch.equal(layer(rows), clean)


def test_a_poisoned_workspace_does_not_change_a_bit() -> None:
    run_ranks(_poisoned, ParallelConfig(dp_size=2, device="cpu", all2all_backend="naive"))


def test_record_timings_counts_every_phase_only_while_it_is_on() -> None:
    run_ranks(_timed, ParallelConfig(device="cpu"))


def _timed(ctx: EPContext) -> None:
    moe = _moe()
    layer = MoELayer(moe, ctx)
    layer.load_experts(**_weights(moe))
    layer(_rows(3, moe, 0))
    phases = ("router", "dispatch", "experts", "combine", "shared")
    assert layer.timings == dict.fromkeys(phases, 0.0)
    layer.record_timings(True)
    layer(_rows(3, moe, 0))
    timed = layer.timings
    assert all(timed[phase] > 0 for phase in phases), timed
    layer.record_timings(False)
    layer(_rows(3, moe, 0))
    assert layer.timings == timed


# --- one GPU ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_overlap_on_or_off_and_a_graph_give_the_same_bits(dtype: str) -> None:
    moe = _moe(
        hidden_size=1024,
        moe_intermediate_size=768,
        num_experts=16,
        top_k=4,
        num_shared_experts=2,
        dtype=dtype,
    )
    weights = _weights(moe)
    with init_distributed(ParallelConfig(device="cuda")) as ctx:
        layers = {}
        for overlap in ("auto", "off"):
            layer = MoELayer(
                moe,
                ctx,
                experts="triton",
                shared_experts=SharedExpertsConfig.model_validate({"overlap": overlap}),
            )
            layer.load_experts(**weights)
            layers[overlap] = layer
        on, off = layers["auto"], layers["off"]
        assert str(on.plan.regime(64).schedule) == "aux_stream"
        assert str(off.plan.regime(64).schedule) == "serial"
        for num_rows, repeat in product((0, 1, 64, 256, 300), range(10)):
            rows = _rows(num_rows, moe, repeat).to(ctx.device)
            before = rows.clone()
            assert torch.equal(on(rows), off(rows)), num_rows
            assert torch.equal(rows, before)
        rows = _rows(8, moe, 3)
        _assert_close(on(rows.to(ctx.device)).cpu(), _direct(moe, weights, rows, None), dtype)
        _assert_graph_replays(ctx, on, moe)


def _assert_graph_replays(ctx: EPContext, layer: MoELayer, moe: MoEConfig) -> None:
    static = _rows(64, moe, 0).to(ctx.device)
    with ctx.step(64, counts=(64,)):
        side = torch.cuda.Stream(ctx.device)
        side.wait_stream(torch.cuda.current_stream(ctx.device))
        with torch.cuda.stream(side):
            layer(static)
        torch.cuda.current_stream(ctx.device).wait_stream(side)
        calls = layer.stats.shared_expert_calls
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(static)
    assert layer.stats.shared_expert_calls == calls + 1
    for seed in range(20):
        rows = _rows(64, moe, seed).to(ctx.device)
        static.copy_(rows)
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, layer(rows)), seed


def _half_wrong_load(ctx: EPContext) -> None:
    moe = _moe()
    layer = MoELayer(moe, ctx)
    good = _weights(moe)
    layer.load_experts(**good)
    rows = _rows(5, moe, 0)
    before = layer(rows)
    other = _weights(moe, seed=1)
    for key, bad, says in (
        ("router", torch.zeros(1, 2), "router has shape"),
        ("router", other["router"].long(), "router is torch.int64 on cpu; wanted"),
        ("router", other["router"].numpy(), "router is <class 'numpy.ndarray'>; wanted"),
        ("w2", other["w2"].to("meta"), "w2 is torch.float32 on meta; wanted a tensor with data"),
    ):
        with pytest.raises(ConfigError, match=re.escape(says)):
            layer.load_experts(**(other | {key: bad}))
        assert torch.equal(layer(rows), before), key


def test_a_load_that_is_refused_changes_nothing() -> None:
    run_ranks(_half_wrong_load, ParallelConfig())


def _out_of_order(ctx: EPContext) -> str:
    moe = _moe()
    layers = [MoELayer(moe, ctx) for _ in range(2)]
    for layer in layers:
        layer.load_experts(**_weights(moe))
    order = layers if ctx.rank == 0 else layers[::-1]
    with pytest.raises(ConfigError) as caught:
        order[0](_rows(3, moe, 0))
    return str(caught.value)


def test_ranks_in_different_layers_are_told_so_on_every_rank() -> None:
    for message in run_ranks(_out_of_order, ParallelConfig(dp_size=2)):
        assert "ranks [0], ranks [1] are in different calls" in message
