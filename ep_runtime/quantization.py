"""A checkpoint's `quantization_config`: which modules are stored in which format, which are not.

Reads the value in config.json alone; that the files agree is checked when names get their places
(`ep_runtime/name_map.py`).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.format import WeightFormat
from ep_runtime.module_lists import (
    AllModules,
    Expressions,
    Modules,
    NoneOf,
    Substrings,
    Subtrees,
    check_expressions,
    globs,
    names_in,
)

# quant_method -> fn(quantization_config) -> WeightFormat. A new format is one file and one line
# here, or in ep_runtime/compressed_tensors.py.
_READERS = {
    "fp8": "ep_runtime.kernels.quant.fp8_weights:read_fp8",
    "gptq": "ep_runtime.kernels.quant.gptq:read_gptq",
    "awq": "ep_runtime.kernels.quant.awq:read_awq",
    "mxfp4": "ep_runtime.kernels.quant.mxfp4:read_mxfp4",
    "modelopt": "ep_runtime.kernels.quant.nvfp4:read_modelopt",
}
_COMPRESSED_TENSORS = "compressed-tensors"
_CONFIG_KEYS = ("quantization_config", "compression_config")  # the second is older
_EXCLUSION_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
_KV_CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
# Scales of a KV cache in fp8: beside the attention or one of its projections.
_KV_CACHE_SCALES = re.compile(
    r"\.self_attn\.((attn\.)?(q|k|v|kv|prob)_scale|(q|k|v)_proj\.(output_scale|(k|v)_scale))$"
)


@dataclass(frozen=True)
class CheckpointQuantization:
    """What `quantization_config` says of a checkpoint.

    method: its quant_method. formats: (modules, how their weights are stored; None: plain); the
    first that has a module counts, and one that is in none is plain.
    has_kv_cache_scales: the checkpoint may hold scales of a KV cache; they are not used.
    """

    method: str
    formats: tuple[tuple[Modules, WeightFormat | None], ...]
    has_kv_cache_scales: bool = False

    def format_of(self, *spellings: str) -> WeightFormat | None:
        """The format of a linear layer by its path; None: a plain weight.

        spellings: of the one path; an entry has it where it has any of them.
        """
        for modules, form in self.formats:
            if any(path in modules for path in spellings):
                return form
        return None

    def is_unused(self, name: str) -> bool:
        """Whether a tensor is one that nothing here reads, and rightly so."""
        return self.has_kv_cache_scales and _KV_CACHE_SCALES.search(name) is not None


def read_quantization(config: Any) -> CheckpointQuantization | None:
    """The quantisation of config.json (as a dict, or transformers' object); None: not quantised.

    Raises ConfigError: a method, or a value of a method's key, that is not supported.
    """
    values = _quantization_values(config)
    if values is None:
        return None
    method = values.get("quant_method")
    if method == _COMPRESSED_TENSORS:
        from ep_runtime.compressed_tensors import read_compressed_tensors

        formats = read_compressed_tensors(values)
    elif isinstance(method, str) and method in _READERS:
        formats = _one_format(method, values)
    else:
        raise ConfigError(
            f"quantization_config.quant_method ({method!r}) is not supported; give a checkpoint "
            f"that is not quantised, or by one of: {', '.join((*_READERS, _COMPRESSED_TENSORS))}"
        )
    has_scales = any(values.get(key) is not None for key in _KV_CACHE_KEYS)
    return CheckpointQuantization(method, formats, has_scales)


def experts_format(
    quantization: CheckpointQuantization, layer: str, modules: Iterable[tuple[str, ...]]
) -> WeightFormat | None:
    """The one format of a layer's routed experts; None where they are not quantised.

    layer: for the message. modules: every expert projection's path, in all its spellings.
    Raises ConfigError where they do not all have the same.
    """
    first: tuple[str, WeightFormat | None] | None = None
    for spellings in modules:
        path, found = spellings[0], quantization.format_of(*spellings)
        if first is None:
            first = path, found
        elif found != first[1]:
            raise ConfigError(
                f"quantization_config: the routed experts of {layer} are not stored alike "
                f"({first[0]}: {_named(first[1])}, {path}: {_named(found)}); experts of a layer "
                f"must have one format"
            )
    return first[1] if first is not None else None


def import_reader(path: str) -> Callable[[Mapping[str, Any]], WeightFormat]:
    """`module:function` of a format's reader."""
    module, name = path.split(":")
    function: Callable[[Mapping[str, Any]], WeightFormat] = getattr(import_module(module), name)
    return function


def _one_format(
    method: str, values: Mapping[str, Any]
) -> tuple[tuple[Modules, WeightFormat | None], ...]:
    """One format for all modules but those that the method's own lists leave out or change."""
    read = import_reader(_READERS[method])
    entries = tuple(name for key in _EXCLUSION_KEYS for name in names_in(key, values.get(key)))
    formats: list[tuple[Modules, WeightFormat | None]] = []
    if method == "gptq":
        formats += _gptq_modules(values, read)
        values = {key: value for key, value in values.items() if key != "dynamic"}
    if entries and method in ("gptq", "awq"):
        formats.append((Substrings(entries), None))
    elif entries and method == "modelopt":
        formats.append((globs(entries), None))
    elif entries:
        check_expressions(" or ".join(_EXCLUSION_KEYS[:2]), entries)
        formats.append((Subtrees(entries), None))
    return (*formats, (AllModules(), read(values)))


def _gptq_modules(
    values: Mapping[str, Any], read: Callable[[Mapping[str, Any]], WeightFormat]
) -> list[tuple[Modules, WeightFormat | None]]:
    """GPTQModel's `dynamic` (regular expressions; `-:` leaves modules out, others give settings of
    their own), then AutoGPTQ's list of what is quantised at all."""
    formats: list[tuple[Modules, WeightFormat | None]] = []
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"quantization_config.dynamic must be a mapping; got {dynamic!r}")
    common = {key: value for key, value in values.items() if key != "dynamic"}
    for entry, own in dynamic.items():
        if not isinstance(own or {}, Mapping):
            raise ConfigError(
                f"quantization_config.dynamic.{entry} must be a mapping of a module's own "
                f"settings; got {own!r}"
            )
        expression = entry.removeprefix("-:").removeprefix("+:")
        check_expressions("dynamic", (expression,))
        is_left_out = entry.startswith("-:")
        form = None if is_left_out else read({**common, **(own or {})})
        formats.append((Expressions((expression,)), form))
    key = "modules_in_block_to_quantize"
    listed = names_in(key, values.get(key))
    if listed:
        formats.append((NoneOf(Substrings(listed)), None))
    return formats


def _named(form: WeightFormat | None) -> str:
    return "not quantised" if form is None else str(form.scheme.weight)


def _quantization_values(config: Any) -> dict[str, Any] | None:
    for key in _CONFIG_KEYS:
        is_mapping = isinstance(config, Mapping)
        value = config.get(key) if is_mapping else getattr(config, key, None)
        if value is None:
            continue
        if hasattr(value, "to_dict"):  # transformers' object
            value = value.to_dict()
        if not isinstance(value, dict):
            raise ConfigError(f"{key} must be a mapping with quant_method; got {value!r}")
        return dict(value)
    return None
