"""A tile table as the JSON that `kernels/tile_tables.py` reads back, and its file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from ep_runtime.kernels.errors import EPRuntimeError
from ep_runtime.kernels.tile_tables import SCHEMA_VERSION, TileTable, TunedLayer
from ep_runtime.launch.json_file import prepare_file

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


def check_output(path: Path) -> None:
    """See that `write_table` can write the file, or raise ConfigError; leaves none behind."""
    target = path.resolve()
    for file in (target,) if _is_special(target) else (target, _partial(target)):
        prepare_file("--output", file)


def write_table(path: Path, values: Mapping[str, Any]) -> None:
    """Write the file whole: what it held stays where the new text cannot be written.

    Raises EPRuntimeError then.
    """
    target = path.resolve()
    text = json.dumps(values, indent=2) + "\n"
    try:
        if _is_special(target):
            target.write_text(text)
            return
        partial = _partial(target)
        try:
            partial.write_text(text)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise EPRuntimeError(f"--output {path}: cannot be written: {error}") from None


def _is_special(target: Path) -> bool:
    """A pipe or a device, which no other file can take the place of."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _partial(target: Path) -> Path:
    """Beside the target, since only within one file system a file takes another's place."""
    return target.with_name(f"{target.name}.partial")


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
