"""The bounds of concurrency rules: numbers of rows that rise, and None in the last place alone."""

from dataclasses import replace

import pytest

from ep_runtime.kernels.base import Concurrency, ConcurrencyRule, ExpertsCapabilities
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.reference_experts import ReferenceExperts


def declare(*bounds: int | None) -> ExpertsCapabilities:
    rules = tuple(ConcurrencyRule(bound, Concurrency.CERTIFIED, "a test") for bound in bounds)
    return replace(ReferenceExperts.capabilities, concurrency=rules)


@pytest.mark.parametrize("bounds", [(), (None,), (1,), (5,), (5, 6), (5, None), (1, 8, None)])
def test_bounds_that_rise_are_declared(bounds: tuple[int | None, ...]) -> None:
    assert tuple(rule.max_tokens for rule in declare(*bounds).concurrency) == bounds


@pytest.mark.parametrize("bounds", [(5, 5), (6, 5), (6, 5, None), (None, 5), (None, None)])
def test_bounds_that_do_not_rise_are_refused(bounds: tuple[int | None, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        declare(*bounds)
    assert f"max_tokens {list(bounds)} must rise" in str(error.value)


@pytest.mark.parametrize("bounds", [(0,), (-3,), (5, 0), (5, -1), (0, 5), (0, None), (-3, 5, None)])
def test_a_bound_of_no_rows_is_refused(bounds: tuple[int | None, ...]) -> None:
    wrong = next(bound for bound in bounds if bound is not None and bound < 1)
    with pytest.raises(ConfigError) as error:
        declare(*bounds)
    assert f"max_tokens ({wrong}) must be above 0, or None for any number" in str(error.value)
