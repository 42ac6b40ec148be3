"""The experts benchmark's record as a picture: the roofline's part of each time, over M."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.experts_cells import TABLES

_MARKERS = "osD^vP"


def lines_of(
    record: Mapping[str, Any], table: str, shape: str
) -> dict[str, list[tuple[int, float]]]:
    """Implementation to its points (M, fraction of the roofline); results that are right only."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in record["cells"]:
        if (cell["table"], cell["shape"]) != (table, shape):
            continue
        for name, entry in cell["implementations"].items():
            if entry["times_us"] is not None and entry["is_right"]:
                point = cell["tokens_per_rank"], entry["fraction_of_roofline"]
                lines.setdefault(name, []).append(point)
    return {name: sorted(points) for name, points in lines.items()}


def write_plot(record: Mapping[str, Any], path: Path) -> None:
    """A row of panels for each table, a column for each shape."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = record["cells"]
    tables = [name for name in TABLES if any(cell["table"] == name for cell in cells)]
    shapes = list(dict.fromkeys(cell["shape"] for cell in cells))
    names = list(dict.fromkeys(name for table in TABLES.values() for name in table.implementations))
    size = 4.0 * max(1, len(shapes)), 3.2 * max(1, len(tables)) + 0.9
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    handles: dict[str, Any] = {}
    for row, table in enumerate(tables):
        for column, shape in enumerate(shapes):
            lines = lines_of(record, table, shape)
            if not lines:
                continue
            axes = figure.add_subplot(len(tables), len(shapes), row * len(shapes) + column + 1)
            for name, points in lines.items():
                number = names.index(name)
                marker = _MARKERS[number % len(_MARKERS)]
                tokens, fractions = zip(*points, strict=True)
                handles[name] = axes.plot(tokens, fractions, marker=marker, color=f"C{number}")[0]
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_ylim(0, 1.1)
            axes.set_title(f"{table}: {shape}", fontsize=9)
            axes.grid(visible=True, alpha=0.3)
            axes.set_xlabel("tokens on each rank")
            if column == 0:
                axes.set_ylabel("roofline time / median")
    if handles:
        ordered = {name: handles[name] for name in names if name in handles}
        figure.legend(list(ordered.values()), list(ordered), loc="outside lower center", ncols=6)
    device = record["environment"]["devices"][-1]["name"]
    figure.suptitle(
        f"Experts kernels, {device}, torch {record['environment']['torch']}", fontsize=10
    )
    figure.savefig(path, dpi=130, format="png")
