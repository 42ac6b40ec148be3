"""A tile table as the JSON that `kernels/tile_tables.py` reads back."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from ep_runtime.kernels.tile_tables import SCHEMA_VERSION, TileTable, TunedLayer

_DIGITS = {"us": 2, "rule_us": 2, "roofline_fraction": 3, "rows_per_expert": 6}


def table_values(
    table: TileTable, rejected: Mapping[TunedLayer, Sequence[str]] | None = None
) -> dict[str, Any]:
    """JSON values; what has its default is left out. rejected: a layer's wrong candidates."""
    rejected = rejected or {}
    layers = []
    for layer, points in table.layers:
        values = _values(layer) | {"points": [_values(point) for point in points]}
        if rejected.get(layer):
            values["rejected"] = list(rejected[layer])
        layers.append(values)
    return {
        "schema_version": SCHEMA_VERSION,
        "device": table.device,
        "triton": table.triton,
        "source": table.source,
        "layers": layers,
    }


def _values(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return value
    found = {}
    for field in fields(value):
        member = getattr(value, field.name)
        if field.default is not MISSING and member == field.default:
            continue
        if isinstance(member, float):
            member = round(member, _DIGITS.get(field.name, 6))
        found[field.name] = _values(member)
    return found
