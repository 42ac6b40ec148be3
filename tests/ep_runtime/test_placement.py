"""Which rank holds which expert: exact sets, and that they always are a partition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.placement import STRATEGIES, place_experts


def _experts(strategy: str, num_experts: int, ep_size: int) -> list[tuple[int, ...]]:
    placement = place_experts(strategy, num_experts, ep_size)
    return [placement.experts_of(rank) for rank in range(ep_size)]


def test_linear_29_experts_on_8_ranks_hold_4_4_4_4_4_3_3_3() -> None:
    assert [len(experts) for experts in _experts("linear", 29, 8)] == [4, 4, 4, 4, 4, 3, 3, 3]


def test_linear_5_experts_on_4_ranks_are_contiguous_blocks() -> None:
    assert _experts("linear", 5, 4) == [(0, 1), (2,), (3,), (4,)]


def test_linear_2_experts_on_4_ranks_leave_two_ranks_empty() -> None:
    assert _experts("linear", 2, 4) == [(0,), (1,), (), ()]


def test_round_robin_5_experts_on_2_ranks_alternate() -> None:
    assert _experts("round_robin", 5, 2) == [(0, 2, 4), (1, 3)]


def test_round_robin_2_experts_on_4_ranks_leave_two_ranks_empty() -> None:
    assert _experts("round_robin", 2, 4) == [(0,), (1,), (), ()]


def test_tables_of_ranks_and_local_ids_read_as_documented() -> None:
    linear = place_experts("linear", 5, 2)
    assert linear.rank_of == (0, 0, 0, 1, 1)
    assert linear.local_id_of == (0, 1, 2, 0, 1)
    round_robin = place_experts("round_robin", 5, 2)
    assert round_robin.rank_of == (0, 1, 0, 1, 0)
    assert round_robin.local_id_of == (0, 0, 1, 1, 2)


def test_an_unknown_strategy_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'striped'.*linear, round_robin"):
        place_experts("striped", 4, 2)


@given(
    strategy=st.sampled_from(STRATEGIES),
    num_experts=st.integers(1, 1100),
    ep_size=st.integers(1, 80),
)
def test_every_expert_has_one_place_and_loads_differ_by_at_most_one(
    strategy: str, num_experts: int, ep_size: int
) -> None:
    placement = place_experts(strategy, num_experts, ep_size)
    by_rank = [placement.experts_of(rank) for rank in range(ep_size)]
    assert sorted(e for experts in by_rank for e in experts) == list(range(num_experts))
    sizes = [len(experts) for experts in by_rank]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for rank, experts in enumerate(by_rank):
        assert placement.num_local_experts(rank) == len(experts)
        assert list(experts) == sorted(experts)
        for local_id, expert in enumerate(experts):
            assert placement.rank_of[expert] == rank
            assert placement.local_id_of[expert] == local_id
