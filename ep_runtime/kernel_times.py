"""Measured times of experts kernels, which `auto` goes by where more than one can serve a layer.

A table is of one device. For each layer that was measured (sizes, how its weights are stored) it
has points: tokens on each rank, and microseconds of a whole call of each kernel. A layer takes the
measured one that is nearest to it in log distance, if no size is more than MAX_SIZE_FACTOR away,
with the same storage and dtype; of its points those up to the layer's max_tokens_per_rank. So the
choice depends on configuration and files alone, and is the same on every rank.

Shipped tables are kernels/tuned/experts/*.json, made from records of
benchmarks/experts_peers.py by its command `kernel-times`. A user's own come first:
`register_kernel_times`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from math import exp, log
from pathlib import Path
from typing import Any

from ep_runtime import kernels
from ep_runtime.config import DTYPES
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.kernels.read_fields import read_fields

SHIPPED_TIMES = Path(next(iter(kernels.__path__))) / "tuned" / "experts"
SCHEMA_VERSION = 1
MAX_SIZE_FACTOR = 2.0
# A kernel takes the place of one that comes before it in auto's order only if it gains this much:
# less is within what routing and clocks change.
MIN_GAIN = 0.05
_KEYS = ("schema_version", "device", "sources", "layers")
_SIZES = ("num_local_experts", "hidden_size", "intermediate_size", "top_k")


@dataclass(frozen=True)
class TimedLayer:
    """What was measured. scheme, dtype: by name. group_size: None where the scheme fixes it, or
    where a whole row shares a scale."""

    scheme: str
    group_size: int | None
    dtype: str
    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int

    @classmethod
    def of(cls, shape: ExpertsShape) -> "TimedLayer":
        return cls(
            scheme=str(shape.scheme.weight),
            group_size=shape.scheme.group_size,
            dtype=str(shape.dtype).removeprefix("torch."),
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            top_k=shape.top_k,
        )

    def distance(self, other: "TimedLayer") -> float | None:
        """Sum of the sizes' log ratios; None: too far, or stored otherwise."""
        if (self.scheme, self.group_size, self.dtype) != (
            other.scheme,
            other.group_size,
            other.dtype,
        ):
            return None
        ratios = [abs(log(getattr(self, name) / getattr(other, name))) for name in _SIZES]
        return sum(ratios) if max(ratios) <= log(MAX_SIZE_FACTOR) + 1e-9 else None

    def __str__(self) -> str:
        group = f" group {self.group_size}" if self.group_size else ""
        return (
            f"{self.scheme}{group}, {self.num_local_experts} experts, hidden {self.hidden_size}, "
            f"intermediate {self.intermediate_size}, top-{self.top_k}"
        )


@dataclass(frozen=True)
class TimedPoint:
    """us: (kernel, microseconds of a call), of results that were right."""

    tokens_per_rank: int
    us: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class TimesTable:
    """A table that has been read. name: of its file. sources: the commands that measured it."""

    name: str
    device: str
    sources: tuple[str, ...]
    layers: tuple[tuple[TimedLayer, tuple[TimedPoint, ...]], ...]


@dataclass(frozen=True)
class LayerTimes:
    """What a table has on a layer: the layer measured, and its points within the layer's bound."""

    table: str
    layer: TimedLayer
    points: tuple[TimedPoint, ...]

    def of_both(self, first: str, second: str) -> list[tuple[int, float, float]]:
        """(tokens on each rank, us of the first, us of the second) where both were measured."""
        times = [(point.tokens_per_rank, dict(point.us)) for point in self.points]
        return [(n, us[first], us[second]) for n, us in times if first in us and second in us]


def pick_kernel(
    names: Sequence[str], shape: ExpertsShape, device_name: str, max_tokens: int
) -> tuple[str, dict[str, str]]:
    """The kernel to take of `names`, which are in auto's order, and why not each of the others.

    The first, unless another is faster by more than MIN_GAIN in the geometric mean over the points
    that a table has of both; of several such the one that gains most.
    """
    first, times = names[0], find_times(shape, device_name, max_tokens)
    if times is None:
        return first, {name: f"usable, but {first} comes first in auto's order" for name in names}
    ratios = {name: _ratio(times.of_both(first, name)) for name in names[1:]}
    faster = {n: r for n, r in ratios.items() if r is not None and r < 1 - MIN_GAIN}
    chosen = min(faster, key=lambda name: faster[name], default=first)
    return chosen, {name: _why_not(name, chosen, first, times) for name in names}


def _ratio(times: Sequence[tuple[int, float, float]]) -> float | None:
    """Geometric mean of the second's time over the first's. Example: 1/2 and 2: 1."""
    if not times:
        return None
    return exp(sum(log(second / first) for _, first, second in times) / len(times))


def _why_not(name: str, chosen: str, first: str, times: LayerTimes) -> str:
    both = times.of_both(chosen, name)
    ratio = _ratio(both)
    if ratio is None:
        why = "comes first in auto's order" if chosen == first else f"is faster than {first}"
        return f"usable, but {chosen} {why}, and {times.table} has no times of both"
    tokens = ", ".join(str(number) for number, _, _ in both)
    found = " and ".join(
        f"{kernel} {', '.join(f'{us:.4g}' for us in column)}"
        for kernel, column in (
            (name, [second for _, _, second in both]),
            (chosen, [of_chosen for _, of_chosen, _ in both]),
        )
    )
    measured = f"{times.table} ({times.layer}) has {found} us at {tokens} tokens a rank"
    if ratio < 1 and chosen != first:
        return f"usable, but {chosen} gains more over {first}: {measured}"
    if ratio < 1:
        return (
            f"usable, but {chosen} comes first in auto's order, and {1 - ratio:.0%} is too little "
            f"to leave it for: {measured}"
        )
    return f"usable, but it takes {ratio:.2f} times as long as {chosen}: {measured}"


def find_times(shape: ExpertsShape, device_name: str, max_tokens: int) -> LayerTimes | None:
    """Of the first table of the device with a layer near enough; None without one.

    Points up to `max_tokens` tokens on each rank; where all are above, the lowest.
    """
    if shape.num_local_experts == 0:
        return None
    wanted = TimedLayer.of(shape)
    for table in (*reversed(_registered), *_shipped_tables()):
        if table.device != device_name:
            continue
        near = [(wanted.distance(layer), layer, points) for layer, points in table.layers]
        found = [(far, layer, points) for far, layer, points in near if far is not None]
        if found:
            _, layer, points = min(found, key=lambda one: one[0])
            within = tuple(point for point in points if point.tokens_per_rank <= max_tokens)
            return LayerTimes(table.name, layer, within or points[:1])
    return None


_registered: list[TimesTable] = []


def register_kernel_times(table: TimesTable | str | Path) -> None:
    """Have a table of one's own looked up before the others; the last one registered is first.

    Of this process, for plans made from now on: do so on every rank, since plans must agree. Raises
    ConfigError for a file that is not a table.
    """
    read = table if isinstance(table, TimesTable) else read_kernel_times(table)
    if read in _registered:
        _registered.remove(read)
    _registered.append(read)


def forget_kernel_times() -> None:
    """Undo `register_kernel_times`, as tests do; the shipped tables stay."""
    _registered.clear()


@cache
def _shipped_tables() -> tuple[TimesTable, ...]:
    return tuple(read_kernel_times(path) for path in sorted(SHIPPED_TIMES.glob("*.json")))


def read_kernel_times(path: str | Path) -> TimesTable:
    """Read and check a table; a ConfigError names the file, the place in it and the cure."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError("the file is empty")
        return _parse_table(json.loads(text), Path(path).name)
    except (OSError, ValueError) as error:
        cure = "write it anew" if isinstance(error, OSError) else "delete it, or write it anew"
        raise ConfigError(
            f"table of kernels' times {path}: {error}; {cure} with "
            f"`python -m benchmarks.experts_peers kernel-times`"
        ) from None


def times_values(table: TimesTable) -> dict[str, Any]:
    """The JSON that `read_kernel_times` reads back."""
    return {
        "schema_version": SCHEMA_VERSION,
        "device": table.device,
        "sources": list(table.sources),
        "layers": [
            {field.name: getattr(layer, field.name) for field in fields(layer)}
            | {
                "points": [
                    {"tokens_per_rank": point.tokens_per_rank, "us": dict(point.us)}
                    for point in points
                ]
            }
            for layer, points in table.layers
        ],
    }


def _parse_table(values: Any, name: str) -> TimesTable:
    if not isinstance(values, dict) or set(values) != set(_KEYS):
        keys = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"has the keys {keys}; it needs {', '.join(_KEYS)}")
    if values["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version ({values['schema_version']}) must be {SCHEMA_VERSION}")
    if not isinstance(values["device"], str) or not values["device"]:
        raise ValueError(f"device ({values['device']!r}) must be a name")
    for key in ("sources", "layers"):
        if not isinstance(values[key], list) or not values[key]:
            raise ValueError(f"{key} must be a list of at least one")
    layers = tuple(_parse_layer(v, f"layers[{i}]") for i, v in enumerate(values["layers"]))
    known = [layer for layer, _ in layers]
    if twice := next((layer for layer in known if known.count(layer) > 1), None):
        raise ValueError(f"layers has {twice} twice; drop one")
    return TimesTable(name, values["device"], tuple(map(str, values["sources"])), layers)


def _parse_layer(values: Any, place: str) -> tuple[TimedLayer, tuple[TimedPoint, ...]]:
    if not isinstance(values, dict) or not isinstance(values.get("points"), list):
        raise ValueError(f"{place} needs the key points, a list")
    layer = read_fields(TimedLayer, {k: v for k, v in values.items() if k != "points"}, place)
    for name in _SIZES:
        if getattr(layer, name) < 1:
            raise ValueError(f"{place}.{name} ({getattr(layer, name)}) must be above 0")
    for name, known in (("scheme", list(WeightScheme)), ("dtype", list(DTYPES))):
        if getattr(layer, name) not in known:
            raise ValueError(
                f"{place}.{name} ({getattr(layer, name)}) must be one of {', '.join(known)}"
            )
    size = layer.group_size
    if size is not None and size < 1:
        raise ValueError(f"{place}.group_size ({size!r}) must be a number above 0, or null")
    points = tuple(_parse_point(v, f"{place}.points[{i}]") for i, v in enumerate(values["points"]))
    tokens = [point.tokens_per_rank for point in points]
    if not points or tokens != sorted(set(tokens)) or tokens[0] < 1:
        raise ValueError(f"{place}.points: tokens_per_rank ({tokens}) must rise from 1 or more")
    return layer, points


def _parse_point(values: Any, place: str) -> TimedPoint:
    if not isinstance(values, dict) or set(values) != {"tokens_per_rank", "us"}:
        raise ValueError(f"{place} needs the keys tokens_per_rank and us, and no others")
    number, us = values["tokens_per_rank"], values["us"]
    if type(number) is not int:
        raise ValueError(f"{place}.tokens_per_rank ({number!r}) must be a whole number")
    if not isinstance(us, Mapping) or not us:
        raise ValueError(f"{place}.us ({us!r}) must be kernels' times by name")
    for name, time in us.items():
        if type(time) not in (int, float) or not 0 < time < float("inf"):
            raise ValueError(f"{place}.us.{name} ({time!r}) must be above 0")
    return TimedPoint(number, tuple((name, float(time)) for name, time in us.items()))
