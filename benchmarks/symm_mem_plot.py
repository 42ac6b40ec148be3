"""The record of symm_mem_launches.py as a picture: microseconds over tokens a rank.

Where the GPU machine has no matplotlib:

    python -m benchmarks.symm_mem_plot RECORD.json PICTURE.png
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.record_file import SYMM_MEM, draw_command

WHOLE_CALL, FLOOR, HOST = "whole call, graph", "floor of all bytes", "host, eager"
_MARKERS = "osD^"


def lines_of(record: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Name to its points (tokens a rank, microseconds): each launch, then what a call takes.

    WHOLE_CALL and FLOOR are missing in a record of a CPU, which measures neither.
    """
    lines: dict[str, list[tuple[int, float]]] = {}
    for case in record["cases"]:
        launches = case["launches"]
        floors = [one["floor_us"] for one in launches if one["floor_us"] is not None]
        values = {one["name"]: one["us"] for one in launches}
        values[WHOLE_CALL] = case["call_us"]
        values[FLOOR] = sum(floors) if floors else None
        values[HOST] = case["host_us"]["call"]
        for name, us in values.items():
            if us is not None:
                lines.setdefault(name, []).append((case["tokens_per_rank"], us))
    return {name: sorted(points) for name, points in lines.items()}


def write_plot(record: Mapping[str, Any], path: Path) -> None:
    """One panel, both axes logarithmic: launches as solid lines, the call's limits as dashed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    of_a_call = {WHOLE_CALL: "k-", FLOOR: "k:", HOST: "k--"}
    lines = lines_of(record)
    for number, (name, points) in enumerate(lines.items()):
        tokens, times = zip(*points, strict=True)
        if name in of_a_call:
            axes.plot(tokens, times, of_a_call[name], marker=".", label=name)
        else:
            axes.plot(tokens, times, marker=_MARKERS[number % len(_MARKERS)], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({tokens for points in lines.values() for tokens, _ in points}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens a rank")
    axes.set_ylabel("slowest virtual rank, median (us)")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    requested, environment = record["requested"], record["environment"]
    figure.suptitle(
        f"symm_mem, {requested['ranks']} virtual ranks on one {record['device']}, torch "
        f"{environment['torch']}, triton {environment['triton']}\n"
        f"{requested['num_experts']} experts, top-{requested['top_k']}, hidden "
        f"{requested['hidden_size']}, {requested['dtype']}, {requested['routing']} routing",
        fontsize=10,
    )
    figure.savefig(path, dpi=130, format="png")


if __name__ == "__main__":
    sys.exit(draw_command(sys.argv[1:], SYMM_MEM, write_plot))
