"""Tables of measured tiles: what `ep-runtime tune` writes, and how a call finds its own in them.

A table is of one device and one Triton version, which compiles the tiles; on any other it is not
used. For each layer (sizes, scheme, dtype) it has points: rows an expert, and the tiles that were
the fastest there, or none where the rule's were. A call takes, of the points for which the rule has
the same height of tiles and the same GEMMs as for its own expected rows an expert, the nearest in
log distance, if it is no more than MAX_REACH away. So what a call runs on depends on sizes alone,
and nothing is measured in a forward pass. Compiled are the tiles of the points that calls take, and
of packed weights what `split_down` makes of them for few slots; nothing for a number of tokens.

Shipped tables are kernels/tuned/*.json. A user's own come first: `register_tile_table`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import torch
import triton

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles, rule_packed_tiles
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.kernels.read_fields import read_fields
from ep_runtime.kernels.tile_checks import (
    TUNED_PACKED_SCHEMES,
    check_packed_tiles,
    check_tiles,
)
from ep_runtime.kernels.tiles import ExpertsTiles, rule_regime

SHIPPED_TABLES = Path(__file__).parent / "tuned"
SCHEMA_VERSION = 1
# A factor: of few rows the rule has one height over decades, and points may be missing.
MAX_REACH = 4.0
_KEYS = ("schema_version", "device", "triton", "source", "layers")


@dataclass(frozen=True)
class TunedLayer:
    """What a layer's tiles depend on, beside the device.

    scheme, dtype: by name, as `fp8_block` and `bfloat16`. num_local_experts: of one rank.
    group_size, has_zero_points: of packed integers; None: a whole row shares a scale.
    """

    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    is_gated: bool
    scheme: str
    dtype: str
    group_size: int | None = None
    has_zero_points: bool = False

    @classmethod
    def of(cls, shape: ExpertsShape) -> "TunedLayer":
        return cls(
            num_local_experts=shape.num_local_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            is_gated=shape.activation.is_gated,
            scheme=str(shape.scheme.weight),
            dtype=str(shape.dtype).removeprefix("torch."),
            group_size=shape.scheme.group_size,
            has_zero_points=shape.scheme.has_zero_points,
        )


@dataclass(frozen=True)
class TunedPoint:
    """One measurement.

    rows_per_expert: expected rows of an expert. tiles: the fastest; None where the rule's were, or
    the gain was too small. us: of both projections with them; rule_us: with the rule's tiles.
    roofline_fraction: time that reading the weights or the products
    take at least at the rates in the table's `source`, over us; no hard limit, so it may pass 1.
    """

    rows_per_expert: float
    tiles: ExpertsTiles | PackedExpertsTiles | None
    us: float
    rule_us: float
    roofline_fraction: float


@dataclass(frozen=True)
class TileTable:
    """A table that has been read. name: of its file. source: how it was measured."""

    name: str
    device: str
    triton: str
    source: str
    layers: tuple[tuple[TunedLayer, tuple[TunedPoint, ...]], ...]

    def points_of(self, layer: TunedLayer) -> tuple[TunedPoint, ...]:
        """Empty where the table does not have the layer."""
        return dict(self.layers).get(layer, ())


_registered: list[TileTable] = []


def register_tile_table(table: TileTable | str | Path) -> None:
    """Have a table of one's own looked up before the others; the last one registered is first.

    Of this process, for layers that are called from now on. Raises ConfigError for a file that is
    not a table.
    """
    read = table if isinstance(table, TileTable) else read_tile_table(table)
    if read in _registered:
        _registered.remove(read)
    _registered.append(read)
    _points_by_regime.cache_clear()
    _find_points.cache_clear()


def forget_tile_tables() -> None:
    """Undo `register_tile_table`, as tests do; the shipped tables stay."""
    _registered.clear()
    _points_by_regime.cache_clear()
    _find_points.cache_clear()


def tuned_tiles(expected: float, shape: ExpertsShape, device: torch.device) -> ExpertsTiles | None:
    """A table's tiles for a call with `expected` rows an expert; None: the rule decides."""
    tiles = _tuned(expected, shape, device)
    return tiles if isinstance(tiles, ExpertsTiles) else None


def tuned_packed_tiles(
    expected: float, shape: ExpertsShape, device: torch.device
) -> PackedExpertsTiles | None:
    """The same of packed weights."""
    tiles = _tuned(expected, shape, device)
    return tiles if isinstance(tiles, PackedExpertsTiles) else None


def _tuned(
    expected: float, shape: ExpertsShape, device: torch.device
) -> ExpertsTiles | PackedExpertsTiles | None:
    if device.type != "cuda" or is_interpreting() or expected <= 0:
        return None
    by_regime = _points_by_regime(shape, device)
    if not by_regime:
        return None
    point = nearest_point(by_regime.get(_regime(expected, shape, device), ()), expected)
    return None if point is None else point.tiles


def _regime(expected: float, shape: ExpertsShape, device: torch.device) -> tuple[int, bool]:
    """The rule's height, and whether it takes the Hopper GEMMs."""
    if is_packed(shape.scheme):
        return rule_packed_tiles(expected, shape).block_m, False
    return rule_regime(expected, shape, device)


@cache
def _points_by_regime(
    shape: ExpertsShape, device: torch.device
) -> dict[tuple[int, bool], list[TunedPoint]]:
    found: dict[tuple[int, bool], list[TunedPoint]] = {}
    for point in find_points(shape, _device_name(device), triton.__version__)[1]:
        regime = _regime(point.rows_per_expert, shape, device)
        found.setdefault(regime, []).append(point)
    return found


def nearest_point(points: Sequence[TunedPoint], expected: float) -> TunedPoint | None:
    """The nearest in log distance; of two equally near the one of fewer rows. None: all too far.

    Example: points at 1 and 16; 3.9 takes 1, 4.1 takes 16, 63 takes 16, 65 none.
    """

    def distance(point: TunedPoint) -> float:
        return abs(log(expected / point.rows_per_expert))

    near = [point for point in points if distance(point) <= log(MAX_REACH) * (1 + 1e-9)]
    return min(near, key=lambda p: (distance(p), p.rows_per_expert), default=None)


def find_points(
    shape: ExpertsShape, device_name: str, triton_version: str
) -> tuple[str, tuple[TunedPoint, ...]]:
    """The name of the first table with the layer, and its points; "" and none without one."""
    return _find_points(TunedLayer.of(shape), device_name, triton_version)


@cache
def _find_points(
    layer: TunedLayer, device_name: str, triton_version: str
) -> tuple[str, tuple[TunedPoint, ...]]:
    for table in (*reversed(_registered), *_shipped_tables()):
        if (table.device, table.triton) == (device_name, triton_version):
            points = table.points_of(layer)
            if points:
                return table.name, points
    return "", ()


@cache
def _shipped_tables() -> tuple[TileTable, ...]:
    return tuple(read_tile_table(path) for path in sorted(SHIPPED_TABLES.glob("*.json")))


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def read_tile_table(path: str | Path) -> TileTable:
    """Read and check a table; a ConfigError names the file, the place in it and the cure."""
    try:
        values = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"tile table {path}: cannot be read: {error}") from None
    try:
        return _parse_table(values, Path(path).name)
    except ValueError as error:
        raise ConfigError(
            f"tile table {path}: {error}; write it anew with `ep-runtime tune`"
        ) from None


def _parse_table(values: Any, name: str) -> TileTable:
    if not isinstance(values, dict) or set(values) != set(_KEYS):
        keys = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"has the keys {keys}; it needs {', '.join(_KEYS)}")
    if values["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"schema_version ({values['schema_version']}) must be {SCHEMA_VERSION}")
    for key in ("device", "triton", "source"):
        if not isinstance(values[key], str) or not values[key]:
            raise ValueError(f"{key} ({values[key]!r}) must be a text")
    if not isinstance(values["layers"], list):
        raise ValueError("layers must be a list")
    layers = tuple(_parse_layer(v, f"layers[{i}]") for i, v in enumerate(values["layers"]))
    known = [layer for layer, _ in layers]
    twice = next((layer for layer in known if known.count(layer) > 1), None)
    if twice is not None:
        raise ValueError(f"layers has {twice} twice; drop one")
    return TileTable(name, values["device"], values["triton"], values["source"], layers)


def _parse_layer(values: Any, place: str) -> tuple[TunedLayer, tuple[TunedPoint, ...]]:
    if not isinstance(values, dict) or "points" not in values:
        raise ValueError(f"{place} needs the key points")
    layer = read_fields(
        TunedLayer, {k: v for k, v in values.items() if k not in ("points", "rejected")}, place
    )
    for name in ("num_local_experts", "hidden_size", "intermediate_size", "group_size"):
        size = getattr(layer, name)
        if size is not None and size < 1:
            raise ValueError(f"{place}.{name} ({size}) must be above 0")
    if not isinstance(values["points"], list) or not values["points"]:
        raise ValueError(f"{place}.points must be a list of at least one point")
    points = []
    for index, value in enumerate(values["points"]):
        points.append(_parse_point(value, layer, f"{place}.points[{index}]"))
    rows = [point.rows_per_expert for point in points]
    if rows != sorted(set(rows)):
        raise ValueError(f"{place}.points: rows_per_expert ({rows}) must rise")
    return layer, tuple(points)


def _parse_point(values: Any, layer: TunedLayer, place: str) -> TunedPoint:
    if not isinstance(values, dict) or "tiles" not in values:
        raise ValueError(f"{place} needs the key tiles; null where the rule's are the fastest")
    tiles = None if values["tiles"] is None else _parse_tiles(values["tiles"], layer, place)
    point = read_fields(TunedPoint, {**values, "tiles": None}, place, given={"tiles": tiles})
    for key in ("rows_per_expert", "us", "rule_us", "roofline_fraction"):
        if not 0 < getattr(point, key) < float("inf"):
            raise ValueError(f"{place}.{key} ({getattr(point, key)}) must be above 0")
    return point


def _parse_tiles(values: Any, layer: TunedLayer, place: str) -> ExpertsTiles | PackedExpertsTiles:
    of_layer: dict[str, Any] = {
        "scheme": layer.scheme,
        "dtype": layer.dtype,
        "is_gated": layer.is_gated,
    }
    if layer.scheme in TUNED_PACKED_SCHEMES:
        packed = read_fields(PackedExpertsTiles, values, f"{place}.tiles")
        check_packed_tiles(packed, f"{place}.tiles", **of_layer)
        return packed
    tiles = read_fields(ExpertsTiles, values, f"{place}.tiles")
    check_tiles(
        tiles,
        f"{place}.tiles",
        **of_layer,
        hidden_size=layer.hidden_size,
        intermediate_size=layer.intermediate_size,
    )
    return tiles
