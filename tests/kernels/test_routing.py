"""Routing against the routers of transformers, and the cases that routers have got wrong."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ep_runtime.kernels.base import Routing, RoutingSpec
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.routing import route_tokens

HIDDEN = 32


def by_id(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Slots in rising order of id: routers leave the order within a row open."""
    ids, order = ids.long().sort(dim=-1)
    return ids, weights.gather(1, order)


def assert_agrees(routing: Routing, ids: Tensor, weights: Tensor) -> None:
    actual_ids, actual_weights = by_id(routing.topk_ids, routing.topk_weights)
    expected_ids, expected_weights = by_id(ids, weights)
    assert torch.equal(actual_ids, expected_ids)
    torch.testing.assert_close(actual_weights, expected_weights.float(), rtol=0, atol=1e-6)


def softmax_routers(num_experts: int, top_k: int) -> list[Any]:
    base: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": top_k}
    mixtral = MixtralTopKRouter(MixtralConfig(num_local_experts=num_experts, **base))
    routers = [pytest.param(mixtral, True, id="mixtral")]
    families: list[tuple[str, Any, Any]] = [
        ("qwen2_moe", Qwen2MoeTopKRouter, Qwen2MoeConfig),
        ("qwen3_moe", Qwen3MoeTopKRouter, Qwen3MoeConfig),
        ("olmoe", OlmoeTopKRouter, OlmoeConfig),
    ]
    for name, router, config in families:
        for norm in (True, False):
            made = router(config(num_experts=num_experts, norm_topk_prob=norm, **base))
            routers.append(pytest.param(made, norm, id=name if norm else f"{name}_not_normalised"))
    return routers


@pytest.mark.parametrize(("router", "norm"), softmax_routers(num_experts=16, top_k=4))
def test_softmax_families_agree_with_transformers(router: Any, norm: bool) -> None:
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(64, HIDDEN))
    spec = RoutingSpec(num_experts=16, top_k=4, norm_topk_prob=norm)
    assert_agrees(route_tokens(logits, spec, None), ids, weights)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2_agrees_with_transformers(method: str) -> None:
    torch.manual_seed(1)
    config = DeepseekV2Config(
        hidden_size=HIDDEN, n_routed_experts=32, num_experts_per_tok=5, topk_method=method,
        n_group=8, topk_group=3, routed_scaling_factor=16.0,
    )  # fmt: skip
    router = DeepseekV2TopkRouter(config)
    torch.nn.init.normal_(router.weight)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(64, HIDDEN))
    spec = RoutingSpec(num_experts=32, top_k=5, norm_topk_prob=False, routed_scaling_factor=16.0)
    if method == "group_limited_greedy":
        spec = replace(spec, n_group=8, topk_group=3, group_score="max")
    routing = route_tokens(logits, spec, None)
    actual, expected = by_id(routing.topk_ids, routing.topk_weights), by_id(ids, weights)
    assert torch.equal(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("router_class", "config_class"),
    [
        pytest.param(DeepseekV3TopkRouter, DeepseekV3Config, id="deepseek_v3"),
        pytest.param(Glm4MoeTopkRouter, Glm4MoeConfig, id="glm4_moe"),
    ],
)
@pytest.mark.parametrize(("n_group", "topk_group"), [(8, 4), (1, 1)])
@pytest.mark.parametrize("norm", [True, False])
def test_sigmoid_families_agree_with_transformers(
    router_class: Any, config_class: Any, n_group: int, topk_group: int, norm: bool
) -> None:
    torch.manual_seed(2)
    config = config_class(
        hidden_size=HIDDEN, n_routed_experts=64, num_experts_per_tok=6, n_group=n_group,
        topk_group=topk_group, norm_topk_prob=norm, routed_scaling_factor=2.5,
    )  # fmt: skip
    router = router_class(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.e_score_correction_bias)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(64, HIDDEN))
    spec = RoutingSpec(64, 6, "sigmoid", n_group, topk_group, "top2_sum", norm, 2.5)
    assert_agrees(route_tokens(logits, spec, router.e_score_correction_bias), ids, weights)


def test_gpt_oss_softmax_over_the_chosen_is_softmax_and_renormalise() -> None:
    torch.manual_seed(3)
    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=32, num_experts_per_tok=4)
    router = GptOssTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.normal_(router.bias)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(64, HIDDEN))
    assert_agrees(route_tokens(logits, RoutingSpec(32, 4), None), ids, weights)


def test_correction_bias_is_not_rounded_to_bf16() -> None:
    spec = RoutingSpec(num_experts=4, top_k=2, scoring="sigmoid")
    bias = torch.tensor([7.000, 6.995, 7.001, 7.010])
    routing = route_tokens(torch.zeros(1, 4), spec, bias)
    assert routing.topk_ids.tolist() == [[3, 2]]
    assert routing.topk_weights.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("norm", "weight"), [(False, 0.4), (True, 1.0)])
def test_correction_bias_selects_but_never_weights(norm: bool, weight: float) -> None:
    logits = torch.tensor([[0.5, 0.4]]).logit()
    spec = RoutingSpec(num_experts=2, top_k=1, scoring="sigmoid", norm_topk_prob=norm)
    routing = route_tokens(logits, spec, torch.tensor([0.0, 5.0]))
    assert routing.topk_ids.tolist() == [[1]]
    assert routing.topk_weights.item() == pytest.approx(weight, abs=1e-6)


def test_renormalising_zeros_gives_zero() -> None:
    spec = RoutingSpec(num_experts=6, top_k=3, scoring="sigmoid")
    routing = route_tokens(torch.full((2, 6), -200.0), spec, None)
    assert routing.topk_ids.tolist() == [[0, 1, 2]] * 2
    assert routing.topk_weights.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_one_slot_normalised_weighs_one(scoring: str) -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(4))
    routing = route_tokens(logits, RoutingSpec(8, 1, scoring), None)
    torch.testing.assert_close(routing.topk_weights, torch.ones(50, 1))


def test_normalising_is_per_row_and_scaling_comes_after() -> None:
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(5))
    spec = RoutingSpec(8, 3, routed_scaling_factor=2.5)
    routing = route_tokens(logits, spec, None)
    torch.testing.assert_close(routing.topk_weights.sum(1), torch.full((50,), 2.5))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_nan", [1, 8])
def test_a_nan_row_is_not_routed(scoring: str, num_nan: int) -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(6))
    clean = route_tokens(logits, RoutingSpec(8, 2, scoring, 4, 2), None)
    logits[1, :num_nan] = torch.nan
    routing = route_tokens(logits, RoutingSpec(8, 2, scoring, 4, 2), None)
    assert routing.topk_ids[1].tolist() == [-1, -1]
    assert routing.topk_weights[1].tolist() == [0.0, 0.0]
    assert torch.equal(routing.topk_ids[::2], clean.topk_ids[::2])
    assert torch.equal(routing.topk_weights[::2], clean.topk_weights[::2])


def test_winners_above_255_keep_their_ids() -> None:
    logits = torch.zeros(1, 384)
    logits[0, 383], logits[0, 256], logits[0, 300] = 9.0, 8.0, 7.0
    routing = route_tokens(logits, RoutingSpec(384, 3), None)
    assert routing.topk_ids.tolist() == [[383, 256, 300]]
    assert routing.topk_ids.dtype is torch.int32


@pytest.mark.parametrize("num_experts", [3, 5, 96, 257])
def test_any_number_of_experts(num_experts: int) -> None:
    logits = torch.randn(40, num_experts, generator=torch.Generator().manual_seed(num_experts))
    routing = route_tokens(logits, RoutingSpec(num_experts, 3), None)
    values, ids = logits.softmax(-1).topk(3)
    assert_agrees(routing, ids, values / values.sum(-1, keepdim=True))


def test_all_experts_chosen() -> None:
    routing = route_tokens(torch.randn(9, 5), RoutingSpec(5, 5), None)
    assert routing.topk_ids.sort(1).values.tolist() == [[0, 1, 2, 3, 4]] * 9


def test_masked_groups_are_never_chosen() -> None:
    # The bias pushes every choice of the chosen group below zero, where a mask of 0 would win.
    spec = RoutingSpec(8, 3, "sigmoid", n_group=2, topk_group=1, group_score="top2_sum")
    bias = torch.tensor([-3.0] * 4 + [-4.0] * 4)
    routing = route_tokens(torch.zeros(5, 8), spec, bias)
    assert routing.topk_ids.tolist() == [[0, 1, 2]] * 5


def test_equal_scores_go_to_the_lower_id() -> None:
    routing = route_tokens(torch.zeros(100, 257), RoutingSpec(257, 8), None)
    assert routing.topk_ids.tolist() == [list(range(8))] * 100
    grouped = route_tokens(torch.zeros(2, 64), RoutingSpec(64, 4, "softmax", 8, 2), None)
    assert grouped.topk_ids.tolist() == [[0, 1, 2, 3]] * 2


def test_no_rows() -> None:
    routing = route_tokens(torch.empty(0, 8), RoutingSpec(8, 2, n_group=4, topk_group=2), None)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (0, 2)


def test_logits_and_bias_are_not_written() -> None:
    logits, bias = torch.randn(4, 8), torch.randn(8)
    before = logits.clone(), bias.clone()
    route_tokens(logits, RoutingSpec(8, 2, "sigmoid", 4, 2, "top2_sum", True, 2.5), bias)
    assert torch.equal(logits, before[0])
    assert torch.equal(bias, before[1])


def test_bf16_logits_give_float32_weights() -> None:
    logits = torch.randn(20, 8).bfloat16()
    routing = route_tokens(logits, RoutingSpec(8, 2), None)
    expected = route_tokens(logits.float(), RoutingSpec(8, 2), None)
    assert routing.topk_weights.dtype is torch.float32
    assert torch.equal(routing.topk_weights, expected.topk_weights)


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=12, max_size=12), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.sampled_from(["softmax", "sigmoid"]),
)
@settings(deadline=None, max_examples=60)
def test_choice_equals_sorting_in_python(
    rows: list[list[int]], topk_group: int, top_k: int, scoring: str
) -> None:
    spec = RoutingSpec(12, top_k, scoring, n_group=4, topk_group=topk_group)
    logits = torch.tensor(rows, dtype=torch.float32)
    routing = route_tokens(logits, spec, None)
    for row, ids in zip(rows, routing.topk_ids.tolist(), strict=True):
        best = [max(row[3 * group : 3 * group + 3]) for group in range(4)]
        groups = sorted(range(4), key=lambda group: (-best[group], group))[:topk_group]
        allowed = [expert for expert in range(12) if expert // 3 in groups]
        assert ids == sorted(allowed, key=lambda expert: (-row[expert], expert))[:top_k]


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (RoutingSpec(8, 9), "top_k (9)"),
        (RoutingSpec(8, 0), "top_k (0)"),
        (RoutingSpec(8, 2, scoring="tanh"), "scoring ('tanh')"),
        (RoutingSpec(8, 2, n_group=2, group_score="mean"), "group_score ('mean')"),
        (RoutingSpec(8, 2, n_group=3), "n_group (3)"),
        (RoutingSpec(8, 2, n_group=4, topk_group=5), "topk_group (5)"),
        (RoutingSpec(8, 3, n_group=4, topk_group=1), "top_k (3)"),
        (RoutingSpec(8, 2, n_group=8, topk_group=2, group_score="top2_sum"), "n_group (8)"),
        (RoutingSpec(9, 2), "num_experts (9)"),
    ],
)
def test_a_spec_that_fits_no_row_is_refused(spec: RoutingSpec, named: str) -> None:
    with pytest.raises(ConfigError) as error:
        route_tokens(torch.zeros(1, 8), spec, None)
    assert named in str(error.value)


def test_a_bias_of_another_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="correction_bias"):
        route_tokens(torch.zeros(1, 8), RoutingSpec(8, 2), torch.zeros(7))
