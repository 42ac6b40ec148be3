"""Records of the experts benchmark as the table that `experts: auto` goes by.

Only this project's own kernels are in it, each measured through its public class: another
project's time says nothing of this project's call of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.experts_cells import SHAPES, TABLES
from benchmarks.experts_contenders import SCHEMES, contender_class
from benchmarks.experts_ratios import right_medians
from ep_runtime.kernel_times import TimedLayer, TimedPoint, TimesTable
from ep_runtime.kernels.errors import ConfigError

_DTYPE = "bfloat16"
_BOTH = ("ep_runtime", "ep_runtime_marlin")
_TABLES_OF_BOTH = [t.name for t in TABLES.values() if set(_BOTH) <= set(t.implementations)]


def times_table(records: Sequence[Mapping[str, Any]], name: str) -> TimesTable:
    """Cells of tables whose rows come as they are, and where two kernels or more were right.

    Raises ConfigError where the records are of several devices, hold a cell twice, or hold none.
    """
    every = [one for record in records for one in record["environment"]["devices"]]
    devices = {one["name"] for one in every if one["device"].startswith("cuda")}
    if len(devices) != 1:
        raise ConfigError(f"the records must be of one device; they are of {sorted(devices)}")
    layers: dict[TimedLayer, dict[int, TimedPoint]] = {}
    for cell in (cell for record in records for cell in record["cells"]):
        us = _kernel_times(cell)
        if TABLES[cell["table"]].baseline is not None or len(us) < 2:
            continue
        points = layers.setdefault(_layer_of(cell), {})
        if cell["tokens_per_rank"] in points:
            place = f"{cell['table']}, {cell['shape']}, {cell['tokens_per_rank']} tokens"
            raise ConfigError(f"the records hold {place} twice; give one of them")
        points[cell["tokens_per_rank"]] = TimedPoint(cell["tokens_per_rank"], us)
    if not layers:
        raise ConfigError(
            "no cell of the records has right times of two of this project's kernels; measure "
            f"--tables {','.join(_TABLES_OF_BOTH)} with --implementations {','.join(_BOTH)}, where "
            f"vLLM's Marlin is installed"
        )
    return TimesTable(
        name=name,
        device=devices.pop(),
        sources=tuple(dict.fromkeys(_source(record) for record in records)),
        layers=tuple(
            (layer, tuple(points[number] for number in sorted(points)))
            for layer, points in layers.items()
        ),
    )


def _kernel_times(cell: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """(name in the registry, us), to a hundredth, of this project's right results."""
    return tuple(
        (cell["implementations"][name]["facts"]["experts"], round(us, 2))
        for name, us in right_medians(cell).items()
        if not contender_class(name).is_peer
    )


def _layer_of(cell: Mapping[str, Any]) -> TimedLayer:
    shape, scheme = SHAPES[cell["shape"]], SCHEMES[TABLES[cell["table"]].scheme]
    return TimedLayer(
        scheme=str(scheme.weight),
        group_size=scheme.group_size,
        dtype=_DTYPE,
        num_local_experts=shape.num_local_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        top_k=shape.top_k,
    )


def _source(record: Mapping[str, Any]) -> str:
    """Example: python -m ... (torch 2.11.0, triton 3.6.0, vllm 0.26.0)."""
    versions = record["environment"]
    named = [f"{n} {versions[n]}" for n in ("torch", "triton", "vllm") if versions.get(n)]
    return f"{record['command_line']} ({', '.join(named)})"
