"""Routing in one launch, and the two passes over ids, against their definitions in plain torch."""

import math

import pytest
import torch

from ep_runtime.kernels.base import RoutingSpec
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.fused_routing import FusedRouting, KnownIds, SlotCounter
from ep_runtime.kernels.routing import count_slots, keep_known_ids, route_tokens

SPECS = {
    "softmax": RoutingSpec(60, 4, norm_topk_prob=False),
    "normalised": RoutingSpec(128, 8, norm_topk_prob=True, routed_scaling_factor=2.5),
    "sigmoid with groups": RoutingSpec(64, 6, "sigmoid", 8, 3, "top2_sum", True, 2.5),
    "groups by their best": RoutingSpec(64, 6, "softmax", 8, 3, "max", False, 16.0),
    "sizes that divide nothing": RoutingSpec(9, 5, "sigmoid", 3, 2, "max"),
    "every expert": RoutingSpec(3, 3),
    "one expert": RoutingSpec(1, 1),
    "more than 512": RoutingSpec(600, 7),
}


def logits_of(
    num_rows: int, spec: RoutingSpec, device: torch.device, seed: int = 0
) -> torch.Tensor:
    drawn = torch.randn(num_rows, spec.num_experts, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_launch_routes_as_the_definition(
    spec: RoutingSpec, has_bias: bool, device: torch.device
) -> None:
    logits = logits_of(13, spec, device)
    bias = logits_of(1, spec, device, seed=1)[0] / 4 if has_bias else None
    actual = FusedRouting(spec, device)(logits, bias)
    expected = route_tokens(logits, spec, bias)
    assert torch.equal(actual.topk_ids, expected.topk_ids)
    assert actual.topk_ids.dtype is torch.int32
    torch.testing.assert_close(actual.topk_weights, expected.topk_weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_equal_scores_go_to_the_lower_id(scoring: str, device: torch.device) -> None:
    spec = RoutingSpec(12, 5, scoring, 4, 2, "max")
    routing = FusedRouting(spec, device)(torch.zeros(2, 12, device=device), None)
    assert routing.topk_ids.tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_numbers_are_not_routed_where_the_definition_does_not(
    scoring: str, bad: float, device: torch.device
) -> None:
    spec = RoutingSpec(10, 3, scoring)
    logits = logits_of(4, spec, device)
    logits[1, 7] = bad
    logits[2] = bad
    actual, expected = FusedRouting(spec, device)(logits, None), route_tokens(logits, spec, None)
    assert torch.equal(actual.topk_ids, expected.topk_ids)
    torch.testing.assert_close(actual.topk_weights, expected.topk_weights, rtol=1e-6, atol=1e-7)


def test_no_rows_are_routed_to_no_rows(device: torch.device) -> None:
    routing = FusedRouting(RoutingSpec(8, 2), device)(torch.empty(0, 8, device=device), None)
    assert routing.topk_ids.shape == routing.topk_weights.shape == (0, 2)


def test_logits_of_another_width_are_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ConfigError, match=r"num_experts \(8\)"):
        FusedRouting(RoutingSpec(8, 2), device)(torch.empty(3, 9, device=device), None)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_rows", [0, 1, 700])
def test_ids_outside_the_layer_become_minus_one(
    num_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    given = torch.randint(-3, 20, (3, num_rows), generator=torch.Generator().manual_seed(0)).T
    given = given.to(device, dtype)
    if dtype is torch.int64 and num_rows:
        given[0] = torch.tensor([2**32, 2**40 + 5, -(2**33)])
    actual = KnownIds(16, device)(given)
    assert torch.equal(actual, keep_known_ids(given, 16))
    assert actual.dtype is torch.int32


@pytest.mark.parametrize("num_experts", [0, 1, 8, 128, 300])
@pytest.mark.parametrize(("num_rows", "limit"), [(0, None), (5, None), (700, None), (700, 123)])
def test_slots_are_counted_and_added(
    num_experts: int, num_rows: int, limit: int | None, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    ids = torch.randint(-2, max(num_experts, 1), (num_rows, 6), generator=generator).clamp(min=-1)
    ids = (ids if num_experts else ids.clamp(max=-1)).to(device, torch.int32)
    limits = None if limit is None else torch.tensor([limit], dtype=torch.int32, device=device)
    counts = torch.arange(num_experts, device=device)
    expected = counts.clone()
    counter = SlotCounter(counts)
    for _ in range(2):
        counter(ids, limits)
        count_slots(expected, ids, limits)
    assert torch.equal(counts, expected)
