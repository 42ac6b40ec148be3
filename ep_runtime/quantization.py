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
HYBRID_METHOD = "nvfp4_nf3_hybrid"
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
        number = self.entry_of(*spellings)
        return None if number is None else self.formats[number][1]

    def entry_of(self, *spellings: str) -> int | None:
        """Which of `formats` a path is under: the first that has any of its spellings."""
        for number, (modules, _) in enumerate(self.formats):
            if any(path in modules for path in spellings):
                return number
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
    elif method == HYBRID_METHOD:
        formats = _hybrid_layers(values)
    elif isinstance(method, str) and method in _READERS:
        formats = _one_format(method, values)
    else:
        raise ConfigError(
            f"quantization_config.quant_method ({method!r}) is not supported; give a checkpoint "
            f"that is not quantised, or by one of: "
            f"{', '.join((*_READERS, _COMPRESSED_TENSORS, HYBRID_METHOD))}"
        )
    has_scales = any(values.get(key) is not None for key in _KV_CACHE_KEYS)
    return CheckpointQuantization(method, formats, has_scales)


def experts_format(
    quantization: CheckpointQuantization, layer: str, modules: Iterable[tuple[str, ...]]
) -> WeightFormat | None:
    """The one format of a layer's routed experts; None where they are not quantised.

    layer: for the message. modules: every expert projection's path, in all its spellings, in one
    order, that on disk first. A list has them in one spelling, so one under which experts would not
    be stored alike is not the list's: `gate`, for Mixtral's router, is in `gate_proj` too. Of
    several that would do the one of the earliest entry counts.
    Raises ConfigError where the spelling on disk does not give all the same.
    """
    alike: list[tuple[int, WeightFormat | None]] = []
    for paths in zip(*modules, strict=True):
        entries = [quantization.entry_of(path) for path in paths]
        formats = [None if n is None else quantization.formats[n][1] for n in entries]
        other = next((i for i, form in enumerate(formats) if form != formats[0]), None)
        if other is None:
            last = len(quantization.formats)
            alike.append((min(last if n is None else n for n in entries), formats[0]))
        elif not alike:
            raise ConfigError(
                f"quantization_config: the routed experts of {layer} are not stored alike "
                f"({paths[0]}: {_named(formats[0])}, {paths[other]}: {_named(formats[other])}); "
                f"experts of a layer must have one format"
            )
    return min(alike, key=lambda one: one[0])[1] if alike else None


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


def _hybrid_layers(
    values: Mapping[str, Any],
) -> tuple[tuple[Modules, WeightFormat | None], ...]:
    """The routed experts of the layers that are named, whatever their paths' spelling."""
    from ep_runtime.kernels.quant.hybrid import read_hybrid

    return tuple(
        (Expressions((rf"(?:.*\.)?layers\.{layer}\.\w+\.experts\b",)), form)
        for layer, form in read_hybrid(values).items()
    )


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
