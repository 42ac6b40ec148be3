"""A file that lists layers for `ep-runtime tune`: YAML, each with the keys of a run's `model.layer`
and local_experts:

    layers:
      - {hidden_size: 4096, moe_intermediate_size: 1536, num_experts: 128, top_k: 8,
         local_experts: 64, quantization: fp8_block}
"""

from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import Field

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.run_config import RunConfig
from ep_runtime.launch.yaml_file import parse_yaml

LIST_FORM = (
    "layers: [{hidden_size: 4096, moe_intermediate_size: 1536, num_experts: 128, top_k: 8, "
    "local_experts: 64, quantization: fp8_block}]"
)


class ListedLayer(MoEConfig):
    """A layer of a list. local_experts: of one rank; None: all of them."""

    local_experts: int | None = Field(default=None, gt=0, strict=True)


@dataclass(frozen=True)
class FoundLayer:
    """A layer of a source. place: what errors call it, as `list.yaml: layer 2 of 3 (...)`.

    local_experts: what its source says that a rank has of it; None: nothing.
    is_listed: of a list, whose local_experts no option replaces.
    """

    place: str
    moe: MoEConfig
    local_experts: int | None = None
    is_listed: bool = False


def read_list(source: str) -> list[FoundLayer] | None:
    """The layers of a file that lists some, whatever its name is; None: it is a run's.

    Raises ConfigError that names the file, and the layer by its number from 1 and its keys.
    """
    values = _read(source)
    if not isinstance(values, dict):
        got = "is blank" if values is None else f"holds {_short(values)}"
        raise ConfigError(
            f"{source}: {got}; it must hold a run's sections or a list of layers, as {LIST_FORM}"
        )
    if "layers" not in values:
        if set(values) & set(RunConfig.model_fields):
            return None
        raise ConfigError(
            f"{source}: has {_short(', '.join(values))}, neither a run's sections nor a list of "
            f"layers, as {LIST_FORM}"
        )
    others = [key for key in values if key != "layers"]
    if others:
        raise ConfigError(
            f"{source}: {others[0]}: has no effect in a list of layers; drop it, or layers"
        )
    listed = values["layers"]
    if not isinstance(listed, list):
        raise ConfigError(f"{source}: layers: must be a list, got {_short(listed)}; as {LIST_FORM}")
    if not listed:
        raise ConfigError(f"{source}: layers: is empty; list at least one, as {LIST_FORM}")
    return [
        _found(entry, f"{source}: layer {number} of {len(listed)}")
        for number, entry in enumerate(listed, 1)
    ]


def _read(source: str) -> Any:
    try:
        return parse_yaml(Path(source).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _found(entry: Any, place: str) -> FoundLayer:
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: must be a layer's keys, got {_short(entry)}; as {LIST_FORM}")
    sizes = ", ".join(f"{key} {value}" for key, value in entry.items())
    place = f"{place} ({_short(sizes)})"
    try:
        layer = ListedLayer(**entry)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    return FoundLayer(place, layer, layer.local_experts, is_listed=True)


def _short(value: Any) -> str:
    """On one line, in 200 characters or fewer."""
    return shorten(value if isinstance(value, str) else repr(value), 200, placeholder=" ...")
