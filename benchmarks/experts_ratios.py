"""How times of the experts benchmark's cells are compared."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

OWN = "ep_runtime"


def right_medians(cell: Mapping[str, Any]) -> dict[str, float]:
    """Implementation to its median in microseconds, of results that are right."""
    return {
        name: one["times_us"]["median"]
        for name, one in cell["implementations"].items()
        if one["times_us"] is not None and one["is_right"]
    }


def geometric_mean(values: Iterable[float]) -> float | None:
    """None of no values. Example: 1 and 4: 2."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else None


def summary_of(ratio_of_cell: Mapping[str, float | None]) -> dict[str, Any]:
    """cells: how many have one. worst_cell: where the largest is."""
    known = {cell: ratio for cell, ratio in ratio_of_cell.items() if ratio is not None}
    worst_cell = max(known, key=lambda cell: known[cell], default=None)
    return {
        "cells": len(known),
        "geometric_mean": geometric_mean(known.values()),
        "largest": known[worst_cell] if worst_cell else None,
        "worst_cell": worst_cell,
    }


def key_of(cell: Mapping[str, Any]) -> str:
    """Of a cell within its table."""
    return f"{cell['shape']}, {cell['tokens_per_rank']} tokens"
