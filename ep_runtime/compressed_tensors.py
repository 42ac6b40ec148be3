"""`quant_method: compressed-tensors`: groups of modules, each with a scheme of its own.

What the keys mean was read off compressed-tensors 0.20 (`quantization/quant_config.py`,
`quantization/quant_args.py`, `utils/match.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.format import WeightFormat
from ep_runtime.module_lists import AllModules, Expressions, Modules, check_expressions, names_in
from ep_runtime.quantization import import_reader

# Storage format -> fn(the group) -> WeightFormat; its errors begin with a key of the group.
_READERS = {
    "float-quantized": "ep_runtime.kernels.quant.fp8_weights:read_compressed_fp8",
    "naive-quantized": "ep_runtime.kernels.quant.fp8_weights:read_compressed_fp8",
    "pack-quantized": "ep_runtime.kernels.quant.pack_quantized:read_pack_quantized",
    "nvfp4-pack-quantized": "ep_runtime.kernels.quant.nvfp4:read_compressed_nvfp4",
    "mxfp4-pack-quantized": "ep_runtime.kernels.quant.mxfp4:read_compressed_mxfp4",
}
_REGEX = "re:"
_LINEAR = "Linear"  # the class of every module that is stored quantised
# They change what the stored tensors mean.
_REFUSED = ("sparsity_config", "transform_config", "moe_sparsity_config")


@dataclass(frozen=True)
class Paths:
    """Modules by their whole path."""

    entries: frozenset[str]

    def __contains__(self, path: str, /) -> bool:
        return path in self.entries


def read_compressed_tensors(
    values: Mapping[str, Any],
) -> tuple[tuple[Modules, WeightFormat | None], ...]:
    """What is ignored, then the groups of a `quantization_config`: (modules, their format).

    Of groups that all have a module, one that names its path goes before one whose regular
    expression (`re:`) matches it, and that before one for all linear layers (`Linear`).
    ConfigError for what is not supported.
    """
    for key in _REFUSED:
        if values.get(key):
            raise ConfigError(
                f"quantization_config.{key} is not supported; give a checkpoint without it"
            )
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(
            f"quantization_config.config_groups must be a mapping with a group; got {groups!r}"
        )
    # By kind of entry: paths, expressions, classes.
    ignored: list[Modules] = [*_by_kind("ignore", values.get("ignore"))]
    formats: list[list[tuple[Modules, WeightFormat | None]]] = [[], [], []]
    for name, group in groups.items():
        key = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise ConfigError(f"quantization_config.{key} must be a mapping; got {group!r}")
        form = _group_format(key, group, values.get("format"))
        for kind, modules in enumerate(_by_kind(f"{key}.targets", group.get("targets"))):
            formats[kind].append((modules, form))
    return (*((modules, None) for modules in ignored), *formats[0], *formats[1], *formats[2])


def _group_format(key: str, group: Mapping[str, Any], common: Any) -> WeightFormat:
    name = group.get("format") or common
    if not isinstance(name, str) or name not in _READERS:
        raise ConfigError(
            f"quantization_config.{key}.format ({name!r}) is not supported; it must be one of: "
            f"{', '.join(_READERS)}"
        )
    if group.get("output_activations") is not None:
        raise ConfigError(
            f"quantization_config.{key}.output_activations must be absent: quantised outputs are "
            f"not supported"
        )
    try:
        return import_reader(_READERS[name])(group)
    except ConfigError as error:
        raise ConfigError(f"quantization_config.{key}.{error}") from None


def _by_kind(key: str, value: Any) -> tuple[Modules, Modules, Modules]:
    """A list's modules by path, by regular expression, and by class."""
    entries = names_in(key, value)
    found = tuple(e.removeprefix(_REGEX) for e in entries if e.startswith(_REGEX))
    check_expressions(key, found)
    # Another class than Linear's, or one that holds no weight, is a path that no module has.
    paths = Paths(frozenset(e for e in entries if not e.startswith(_REGEX)))
    return paths, Expressions(found), AllModules() if _LINEAR in entries else Paths(frozenset())
