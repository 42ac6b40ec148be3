"""The arithmetic of a benchmark's times, and the order in which backends are measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class Times:
    """Of one call, in microseconds, over n iterations; each iteration counts its slowest rank."""

    median: float
    p90: float
    n: int


def rotated(values: Sequence[ValueT], by: int) -> list[ValueT]:
    """The order of round `by`. Example: (a, b, c) by 1: b, c, a."""
    start = by % len(values) if values else 0
    return [*values[start:], *values[:start]]


def max_over_ranks(seconds_of_rank: Sequence[Sequence[float]]) -> list[float]:
    """Per iteration the slowest rank's seconds. Example: [[1, 5], [3, 2]] gives [3, 5].

    Raises ValueError where ranks have different numbers of iterations.
    """
    return [max(iteration) for iteration in zip(*seconds_of_rank, strict=True)]


def summarise(seconds: Sequence[float]) -> Times:
    """Median and 90th percentile, linear between neighbours. Example: 1..10 s: 5.5 s, 9.1 s."""
    microseconds = np.asarray(seconds, dtype=np.float64) * 1e6
    return Times(
        median=float(np.median(microseconds)),
        p90=float(np.percentile(microseconds, 90)),
        n=len(microseconds),
    )
