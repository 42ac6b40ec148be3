"""The experts benchmark's targets, held against the cells of a record."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.experts_cells import TABLES, Target
from benchmarks.experts_ratios import OWN, key_of, right_medians, summary_of


def target_results(table: str, cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each target of the table: what is asked, the ratios that were found, whether it is met.

    cells: of the whole record. A target without a cell to hold against is not met: is_met None.
    """
    return [_result(target, table, cells) for target in TABLES[table].targets]


def _result(target: Target, table: str, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = {
        key_of(cell): _ratio(target, cell, cells)
        for cell in cells
        if cell["table"] == table and target.tokens_per_rank in (None, cell["tokens_per_rank"])
    }
    found = summary_of(ratios)
    asked = {"largest": target.largest, "geometric_mean": target.geometric_mean}
    verdicts = [
        found[name] <= limit
        for name, limit in asked.items()
        if limit is not None and found["cells"]
    ]
    return {
        "over": _title(target),
        "asked": {name: limit for name, limit in asked.items() if limit is not None},
        "found": found,
        "is_met": all(verdicts) if verdicts else None,
    }


def _title(target: Target) -> str:
    """Example: the faster of humming, marlin at 4096 tokens."""
    if target.per_byte_of is not None:
        return f"time per byte of {target.per_byte_of}, where both are bound by memory"
    names = ", ".join(target.over)
    title = names if len(target.over) == 1 else f"the fastest of {names}"
    tokens = target.tokens_per_rank
    return title if tokens is None else f"{title} at {tokens} tokens"


def _ratio(
    target: Target, cell: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]
) -> float | None:
    medians = right_medians(cell)
    own = medians.get(OWN)
    if own is None:
        return None
    if target.per_byte_of is None:
        others = [medians[name] for name in target.over if name in medians]
        return own / min(others) if others else None
    for other in cells:
        same = (other["table"], key_of(other)) == (target.per_byte_of, key_of(cell))
        is_memory = cell["bound"] == other["bound"] == "memory"
        if same and is_memory and (of_other := right_medians(other).get(OWN)):
            per_byte = own / cell["weight_bytes"]
            return float(per_byte / (of_other / other["weight_bytes"]))
    return None
