"""Layers of quantised experts: against the dequantised reference, and what they refuse."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.base import Routing
from ep_runtime.kernels.errors import ConfigError, PlanError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.scheme import QuantParameters, QuantScheme, WeightScheme
from ep_runtime.kernels.quant.storage import take_experts, tensors_of
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.plan import resolve_plan
from ep_runtime.reference import reference_layer
from tests.ep_runtime.stored_experts import SCHEMES, quantized_moe, stored_weights
from tests.harness import run_ranks
from tests.tolerances import TOLERANCES, relative_error

BACKENDS = {1: "auto", 2: "naive", 4: "all_to_all"}  # by number of ranks
ROWS = (9, 4, 0, 7)  # of each rank
DTYPES = ("bfloat16", "float32")
Weights = dict[str, Any]


def rows_and_routing(moe: MoEConfig, rank: int) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(ROWS[rank], moe.hidden_size, generator=generator).to(moe.torch_dtype)
    ids = torch.rand(ROWS[rank], moe.num_experts, generator=generator).argsort(1)[:, : moe.top_k]
    weights = torch.rand(ROWS[rank], moe.top_k, generator=generator)
    return rows, Routing(ids.to(torch.int32), weights)


def run_layers(ctx: EPContext, moes: list[MoEConfig]) -> list[tuple[Tensor, bool]]:
    """Each layer's output for given ids, and whether the rank holds just its own experts."""
    results = []
    for moe in moes:
        weights = stored_weights(moe)
        layer = MoELayer(moe, ctx, experts="reference")
        layer.load_experts(**weights)
        rows, routing = rows_and_routing(moe, ctx.rank)
        output = layer(rows, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
        results.append((output, holds_its_own(layer, weights)))
    return results


def holds_its_own(layer: MoELayer, weights: Weights) -> bool:
    mine = list(layer.local_expert_ids)
    for projection in ("w13", "w2"):
        wanted = tensors_of(take_experts(weights[projection], mine))
        held = layer.expert_tensors(projection)
        if set(held) != set(wanted):
            return False
        for name, tensor in held.items():
            if not torch.equal(tensor.data.view(torch.uint8), wanted[name].view(torch.uint8)):
                return False
    return True


CASES = [(scheme, dtype) for scheme in SCHEMES for dtype in DTYPES]


@cache
def results_on(num_ranks: int) -> list[list[tuple[Tensor, bool]]]:
    moes = [quantized_moe(scheme, dtype=dtype) for scheme, dtype in CASES]
    parallel = ParallelConfig(
        dp_size=num_ranks,
        device="cpu",
        all2all_backend=BACKENDS[num_ranks],
        max_tokens_per_rank=8,
        dispatch_dtype="model",
    )
    return run_ranks(run_layers, parallel, moes)


@pytest.mark.parametrize(("scheme", "dtype"), CASES)
@pytest.mark.parametrize("num_ranks", BACKENDS)
def test_a_layer_computes_what_its_dequantised_weights_do(
    num_ranks: int, scheme: str, dtype: str
) -> None:
    moe = quantized_moe(scheme, dtype=dtype)
    weights = stored_weights(moe)
    plain = {
        **weights,
        "w13": dequantize(weights["w13"], 2),
        "w2": dequantize(weights["w2"]),
    }
    for rank, results in enumerate(results_on(num_ranks)):
        output, is_own = results[CASES.index((scheme, dtype))]
        rows, routing = rows_and_routing(moe, rank)
        expected = reference_layer(rows, moe, routing=routing, **plain)
        assert output.dtype is moe.torch_dtype
        assert is_own
        assert relative_error(output, expected) <= TOLERANCES[moe.torch_dtype]
        assert not ROWS[rank] or 0.1 < float(expected.std()) < 2
        assert torch.equal(reference_layer(rows, moe, routing=routing, **weights), expected)


def test_a_layer_that_is_not_gated_has_one_part() -> None:
    moe = quantized_moe("fp8_block", activation="relu2", dtype="float32")
    weights = stored_weights(moe)
    assert weights["w13"].parameters.scales.shape == (5, 2, 2)  # 192 rows of one part
    rows, routing = rows_and_routing(moe, 0)
    with init_distributed(ParallelConfig(device="cpu")) as ctx:
        layer = MoELayer(moe, ctx)
        layer.load_experts(**weights)
        output = layer(rows, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
    assert layer.plan.experts == "reference"
    expected = reference_layer(rows, moe, routing=routing, **weights)
    assert relative_error(output, expected) <= 1e-5


# --- what is refused ---


@pytest.fixture(scope="module")
def ctx() -> Iterator[EPContext]:
    with init_distributed(ParallelConfig(device="cpu")) as context:
        yield context


def with_parameters(weights: Weights, projection: str, **changes: Any) -> Weights:
    given = weights[projection]
    return {**weights, projection: replace(given, parameters=replace(given.parameters, **changes))}


def poisoned(weights: Weights, expert: int) -> Weights:
    scales = weights["w13"].parameters.scales.clone()
    scales[expert, -1, 0] = torch.nan
    return with_parameters(weights, "w13", scales=scales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda w: {**w, "w13": w["w13"].values.float()},
            r"w13 is Tensor; the layer's quantization is fp8_block, which takes a QuantizedTensor",
            id="plain_tensor",
        ),
        pytest.param(lambda w: {**w, "w2": None}, "w2 is missing; the layer's", id="missing"),
        pytest.param(
            lambda w: {**w, "w2": replace(w["w2"], scheme=QuantScheme())},
            r"w2 is stored as \{weight: none\}, and the layer's quantization is "
            r"\{weight: fp8_block\}; build the layer with that of its tensors",
            id="other_scheme",
        ),
        pytest.param(
            lambda w: with_parameters(w, "w13", scales=w["w13"].parameters.scales[:, :3]),
            r"w13.parameters.scales has shape \[5, 3, 2\]; wanted \[5, 4, 2\]",
            id="scales_of_gate_and_up_together",
        ),
        pytest.param(
            lambda w: with_parameters(w, "w2", scales=w["w2"].parameters.scales[:4]),
            r"w2.parameters.scales has shape \[4, 2, 2\]; wanted \[5, 2, 2\]",
            id="an_expert_without_scales",
        ),
        pytest.param(
            lambda w: with_parameters(w, "w2", scales=w["w2"].parameters.scales.int()),
            "w2.parameters.scales is torch.int32 on cpu; wanted torch.float32",
            id="integer_scales",
        ),
        pytest.param(
            lambda w: with_parameters(w, "w2", zero_points=w["w2"].values.view(torch.uint8)),
            "w2.parameters.zero_points is given, and fp8_block has none",
            id="zero_points",
        ),
        pytest.param(
            lambda w: {**w, "w13": replace(w["w13"], values=w["w13"].values.float())},
            "w13.values is torch.float32 on cpu; wanted torch.float8_e4m3fn",
            id="values_in_float32",
        ),
        pytest.param(
            lambda w: poisoned(w, 3),
            "w13.parameters.scales of expert 3 has a scale that is NaN or infinite",
            id="nan_scale",
        ),
    ],
)
def test_stored_experts_that_do_not_fit_are_named(
    change: Callable[[Weights], Weights], message: str, ctx: EPContext
) -> None:
    moe = quantized_moe("fp8_block")
    layer = MoELayer(moe, ctx)
    weights = stored_weights(moe)
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(1)
    with pytest.raises(ConfigError, match=message):
        layer.load_experts(**change(weights))
    assert all(bool((p.data.view(torch.uint8) == 1).all()) for p in layer.parameters())


def test_missing_parameters_of_a_scheme_are_named(ctx: EPContext) -> None:
    moe = quantized_moe("int4")
    layer, weights = MoELayer(moe, ctx), stored_weights(moe)
    with pytest.raises(ConfigError, match=r"w2\.parameters\.zero_points is missing; int4_w4a16"):
        layer.load_experts(**with_parameters(weights, "w2", zero_points=None))


def with_value(weights: Weights, name: str, value: float, *, dtype: torch.dtype) -> Weights:
    """One entry of expert 3's tensor beside w13 replaced."""
    tensor = getattr(weights["w13"].parameters, name).to(dtype, copy=True)
    tensor[3].view(-1)[1] = value
    return with_parameters(weights, "w13", **{name: tensor})


@pytest.mark.parametrize(
    ("scheme", "name", "value", "dtype", "message"),
    [
        pytest.param(
            "int8_act_order", "input_order", 10_000, torch.int32, "must name every", id="outside"
        ),
        pytest.param(
            "int8_act_order", "input_order", -1, torch.int32, "must name every", id="unread"
        ),
        pytest.param(
            "int4", "scales", 1e38, torch.float32, "has a scale that is NaN", id="cast_to_infinity"
        ),
        pytest.param("mxfp4", "scales", 255, torch.uint8, "has a scale that is NaN", id="ue8m0"),
    ],
)
def test_values_that_cannot_be_right_are_named(
    scheme: str, name: str, value: float, dtype: torch.dtype, message: str, ctx: EPContext
) -> None:
    moe = quantized_moe(scheme, dtype="float16")
    weights = with_value(stored_weights(moe), name, value, dtype=dtype)
    layer = MoELayer(moe, ctx, experts="reference")
    with pytest.raises(ConfigError, match=rf"w13\.parameters\.{name} of expert 3 {message}"):
        layer.load_experts(**weights)


def test_an_order_that_names_a_column_twice_is_refused(ctx: EPContext) -> None:
    moe = quantized_moe("int8_act_order")
    weights = stored_weights(moe)
    order = weights["w2"].parameters.input_order.clone()
    order[4, 0] = order[4, 1]
    with pytest.raises(ConfigError, match=r"w2\.parameters\.input_order of expert 4 must name"):
        MoELayer(moe, ctx, experts="reference").load_experts(
            **with_parameters(weights, "w2", input_order=order)
        )


def test_stored_experts_for_a_plain_layer_are_refused(ctx: EPContext) -> None:
    weights = stored_weights(quantized_moe("fp8_block"))
    plain = MoEConfig(**{**quantized_moe("fp8_block").model_dump(), "quantization": "none"})
    with pytest.raises(ConfigError, match=r"w13 is a QuantizedTensor \(fp8_block\), and the layer"):
        MoELayer(plain, ctx).load_experts(**weights)


def test_scales_of_another_dtype_are_converted(ctx: EPContext) -> None:
    moe = quantized_moe("int4")
    weights = stored_weights(moe)
    parameters: QuantParameters = weights["w2"].parameters
    layer = MoELayer(moe, ctx)
    layer.load_experts(**with_parameters(weights, "w2", scales=parameters.scales.float()))
    assert layer.w2_quant is not None
    assert torch.equal(layer.w2_quant.scales, parameters.scales)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_kernel_that_does_not_take_a_scheme_is_passed_over_and_refused_by_name(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ep_runtime.kernels.registry import _registered, experts_class

    reference = experts_class("reference")
    capabilities = replace(
        reference.capabilities, name="plain", schemes=frozenset({WeightScheme.NONE})
    )
    monkeypatch.setitem(
        _registered, "plain", type("Plain", (reference,), {"capabilities": capabilities})
    )
    moe, machine = quantized_moe(scheme), Machine.detect("cpu")
    plan = resolve_plan(moe, ParallelConfig(), machine)
    assert plan.experts == "reference"
    stored = moe.quantization.weight
    reasons = {r.name: r.reason for r in plan.rejections if r.kind == "experts"}
    assert reasons["plain"] == f"it takes weights stored as none, and quantization is {stored}"
    assert f", experts {stored}" in plan.explain()
    with pytest.raises(PlanError, match=f"experts plain cannot be used: .* is {stored}"):
        resolve_plan(moe, ParallelConfig(), machine, experts="plain")
