"""A benchmark's record as a picture: latency over tokens a rank, one line a backend."""

import importlib.util
from pathlib import Path
from typing import Any

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.bench_record import PART_TITLES, hardware, label_of, varied_keys
from ep_runtime.launch.json_file import prepare_file

_MARKERS = "osD^vPX*<>"
_MOST_COLUMNS = 3


def prepare_plot_file(path: Path | None, output_dir: str | None = None) -> None:
    """See that the picture can be made and written, before work is spent; None: nothing."""
    if path is None:
        return
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: is written as PNG; end its name with .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; pip install 'ep-runtime[bench]'")
    prepare_file("--plot", path, output_dir)


def lines_of(record: dict[str, Any], part: str) -> dict[str, list[tuple[int, float]]]:
    """Label to its points (tokens a rank, median microseconds), in order of tokens.

    A label is the backend with the dispatch_dtype asked for, its mode where that is not the one
    asked for, then whatever else the cases differ in.
    """
    varied = varied_keys(record)
    lines: dict[str, list[tuple[int, float]]] = {}
    for entry in record["cases"]:
        if entry["part"] != part or entry["times_us"] is None:
            continue
        mode = entry["actual"]["mode"]
        others = [mode] if mode != record["requested"]["mode"] else []
        others += [f"{key} {entry[key]}" for key in varied]
        label = ", ".join([label_of(entry), *others])
        point = entry["tokens_per_rank"], entry["times_us"]["median"]
        lines.setdefault(label, []).append(point)
    return {label: sorted(points) for label, points in lines.items()}


def write_plot(record: dict[str, Any], path: Path) -> None:
    """One panel a measured part, both axes logarithmic; the hardware is in the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = {part: lines_of(record, part) for part in record["requested"]["parts"]}
    parts = [part for part, of_part in lines.items() if of_part]
    labels = list(dict.fromkeys(label for part in parts for label in lines[part]))
    num_columns = max(1, min(_MOST_COLUMNS, len(parts)))
    num_rows = max(1, -(-len(parts) // num_columns))
    figure = Figure(figsize=(4.6 * num_columns, 3.6 * num_rows + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    for index, part in enumerate(parts):
        axes = figure.add_subplot(num_rows, num_columns, index + 1)
        for label, points in lines[part].items():
            number = labels.index(label)
            tokens, times = zip(*points, strict=True)
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(tokens, times, marker=marker, color=f"C{number % 10}", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sorted({tokens for points in lines[part].values() for tokens, _ in points}))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("tokens a rank")
        axes.set_ylabel("latency, slowest rank, median (us)")
        axes.set_title(PART_TITLES.get(part, part))
        axes.grid(visible=True, which="both", alpha=0.3)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=num_columns
        )
    figure.suptitle(f"{hardware(record)}\n{_sizes(record)}", fontsize=10)
    figure.savefig(path, dpi=130, format="png")


def _sizes(record: dict[str, Any]) -> str:
    """What all cases have in common."""
    requested, varied = record["requested"], varied_keys(record)
    keys = ("num_experts", "top_k", "hidden_size", "moe_intermediate_size", "dtype", "routing")
    same = [f"{key} {requested[key][0]}" for key in keys if key not in varied]
    return ", ".join([*same, requested["mode"]])
