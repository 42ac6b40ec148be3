"""The experts benchmark's record: its head, the comparisons drawn from its cells, and tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from benchmarks.experts_cells import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    SHAPES,
    TABLES,
)
from benchmarks.experts_contenders import contender_class
from benchmarks.experts_data import ERROR_LIMITS
from benchmarks.experts_ratios import OWN, geometric_mean, key_of, right_medians, summary_of
from benchmarks.experts_targets import target_results
from ep_runtime.launch.environment import describe_devices, describe_versions, package_version

SCHEMA_VERSION = 1
PEER_PACKAGES = ("vllm", "tokenspeed-triton-kernels", "humming-kernels")
METHOD = {
    "time": "events around replays of a CUDA graph of 8 calls (above 128 tokens: of 2), divided by "
    "them",
    "order": "in each round every implementation has a turn, in an order rotated by the round's "
    "number; median and percentiles over all replays",
    "rotation": "calls take turns among input sets and weight sets; neighbours share neither",
    "counted": "quantising activations, alignment, both GEMMs, activation, weighted sum",
    "roofline": "the larger of the active experts' weight bytes and FLOPs, each over its rate in "
    "limits",
    "right": "relative Frobenius errors of the whole result and of its worst row against float32 "
    "with the same dequantised weights, every input set, within error_limits",
    "ratio": "this project's median over the other's, of results that are right",
}


def build_record(
    command_line: str,
    requested: Mapping[str, Any],
    *,
    ceilings: Mapping[str, Any],
    l2_bytes: int,
) -> dict[str, Any]:
    """A record without cells."""
    packages = {name: package_version(name) for name in PEER_PACKAGES}
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "experts_peers",
        "command_line": command_line,
        "environment": describe_versions() | packages | {"devices": describe_devices()},
        "requested": dict(requested),
        "method": METHOD,
        "limits": {"bytes_per_second": BYTES_PER_SECOND, "flops_per_second": FLOPS_PER_SECOND},
        "error_limits": ERROR_LIMITS,
        "ceilings": dict(ceilings),
        "l2_bytes": l2_bytes,
        "shapes": {name: vars(shape) for name, shape in SHAPES.items()},
        "cells": [],
        "not_measured": [],
        "summary": {},
    }


def add_ratios(entry: dict[str, Any]) -> dict[str, Any]:
    """Give a cell its fastest right peer, and this project's time over each other's."""
    medians = right_medians(entry)
    peers = {name: us for name, us in medians.items() if contender_class(name).is_peer}
    fastest = min(peers, key=lambda name: peers[name], default=None)
    own = medians.get(OWN)
    others = {name: own / us for name, us in medians.items() if own and name != OWN}
    return entry | {
        "fastest_peer": fastest,
        "ratio_to_fastest_peer": own / peers[fastest] if own and fastest else None,
        "ratio_to": others,
    }


def summarise_cells(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By table: ratios to the fastest peer and to each other one, fractions of the roofline, and
    what its targets ask for."""
    summary = {}
    for name in TABLES:
        of_table = [cell for cell in cells if cell["table"] == name]
        if not of_table:
            continue
        others = dict.fromkeys(other for cell in of_table for other in cell["ratio_to"])
        fractions = {
            implementation: geometric_mean(
                cell["implementations"][implementation]["fraction_of_roofline"]
                for cell in of_table
                if cell["implementations"].get(implementation, {}).get("times_us")
            )
            for implementation in TABLES[name].implementations
        }
        summary[name] = {
            "fastest_peer": summary_of({key_of(c): c["ratio_to_fastest_peer"] for c in of_table}),
            "other": {
                other: summary_of({key_of(cell): cell["ratio_to"].get(other) for cell in of_table})
                for other in others
            },
            "fraction_of_roofline": fractions,
            "targets": target_results(name, cells),
        }
    return summary


def print_record(record: Mapping[str, Any], console: Console) -> None:
    """A table for each of the record's, its summary, and why something is missing."""
    for name, table in TABLES.items():
        cells = [cell for cell in record["cells"] if cell["table"] == name]
        if not cells:
            continue
        shown = [
            implementation
            for implementation in table.implementations
            if any(
                cell["implementations"].get(implementation, {}).get("times_us") for cell in cells
            )
        ]
        grid = Grid(
            "shape", "M", "roofline", *shown, "ratio", title=f"{table.title}: us (fraction)"
        )
        for cell in cells:
            ratio = cell["ratio_to"].get(table.baseline or cell["fastest_peer"])
            grid.add_row(
                cell["shape"],
                str(cell["tokens_per_rank"]),
                f"{cell['roofline_us']:.1f}",
                *(_cell_text(cell["implementations"].get(other)) for other in shown),
                "-" if ratio is None else f"{ratio:.3f}",
            )
        console.print(grid, markup=False)
        for line in _summary_lines(record["summary"].get(name, {})):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in _notes(record):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cell_text(entry: Mapping[str, Any] | None) -> str:
    if entry is None or entry["times_us"] is None:
        return "-"
    mark = "" if entry["is_right"] else " WRONG"
    return f"{entry['times_us']['median']:.1f} ({entry['fraction_of_roofline']:.2f}){mark}"


def _summary_lines(summary: Mapping[str, Any]) -> list[str]:
    lines = []
    compared = {"the fastest peer": summary.get("fastest_peer")} | summary.get("other", {})
    for other, ratios in compared.items():
        if ratios and ratios["cells"]:
            lines.append(
                f"over {other}: geometric mean {ratios['geometric_mean']:.3f}, largest "
                f"{ratios['largest']:.3f} ({ratios['worst_cell']}), {ratios['cells']} cells"
            )
    for target in summary.get("targets", ()):
        found, asked = target["found"], target["asked"]
        compared = ", ".join(
            f"{name.replace('_', ' ')} {found[name]:.3f} (at most {limit:.3g})"
            if found["cells"]
            else f"{name.replace('_', ' ')} at most {limit:.3g}"
            for name, limit in asked.items()
        )
        verdict = {True: "met", False: "MISSED", None: "no cell to hold against"}[target["is_met"]]
        lines.append(f"target over {target['over']}: {compared}, {found['cells']} cells: {verdict}")
    return lines


def _notes(record: Mapping[str, Any]) -> list[str]:
    """One line per reason."""
    lines = [
        f"skipped: {cell['table']}: {name}: {entry['skip_reason']}"
        for cell in record["cells"]
        for name, entry in cell["implementations"].items()
        if entry["skip_reason"] is not None
    ]
    lines += [f"not measured: {one['cell']}: {one['reason']}" for one in record["not_measured"]]
    twice_the_cache = 2 * record["l2_bytes"]
    lines += [
        f"weights in rotation may stay in the cache: {cell['table']}: {key_of(cell)}"
        for cell in record["cells"]
        if cell["rotated_weight_bytes"] < twice_the_cache
    ]
    rates = [
        f"{name} {rate:.4g}"
        for name, rate in record["ceilings"].items()
        if not isinstance(rate, str)
    ]
    return [*dict.fromkeys(lines), f"this device in this run: {', '.join(rates)}"]
