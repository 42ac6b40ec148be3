"""`quantization` of a layer's configuration: a scheme's name or its keys, to a `QuantScheme`."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme, WeightScheme

_INTEGER = (WeightScheme.INT4, WeightScheme.INT8)
# K must be a multiple: nibbles go in pairs, and a group's scale is for so many columns.
_MULTIPLE = {WeightScheme.INT4: 2, WeightScheme.MXFP4: 32, WeightScheme.NVFP4: 16}
_KEYS = tuple(field.name for field in fields(QuantScheme))


def parse_scheme(value: Any) -> QuantScheme:
    """A QuantScheme from itself, a scheme's name, or a mapping of its fields.

    Raises ValueError that says what is wrong with which key.
    """
    if value is None:
        return UNQUANTISED
    if isinstance(value, QuantScheme):
        scheme = value
    elif isinstance(value, str):
        scheme = QuantScheme(_weight_scheme(value))
    elif isinstance(value, dict):
        scheme = _from_mapping(value)
    else:
        raise ValueError(f"must be a scheme's name or its keys {', '.join(_KEYS)}; got {value!r}")
    _check_keys(scheme)
    return scheme


def write_scheme(scheme: QuantScheme) -> str | dict[str, Any]:
    """What `parse_scheme` reads back: the name, with the other keys where they are not default."""
    others = {
        field.name: getattr(scheme, field.name)
        for field in fields(scheme)
        if getattr(scheme, field.name) != field.default
    }
    if set(others) <= {"weight"}:
        return str(scheme.weight)
    return others | {"weight": str(scheme.weight)}


def check_scheme(scheme: QuantScheme, *, hidden_size: int, moe_intermediate_size: int) -> None:
    """ValueError where a scheme cannot store weights of these sizes."""
    multiple = _MULTIPLE.get(scheme.weight, 1)
    sizes = {"hidden_size": hidden_size, "moe_intermediate_size": moe_intermediate_size}
    for key, size in sizes.items():
        if size % multiple:
            raise ValueError(
                f"quantization {scheme.weight} needs a {key} that {multiple} divides, got "
                f"{key} ({size})"
            )


def _weight_scheme(name: Any) -> WeightScheme:
    known = [str(scheme) for scheme in WeightScheme]
    if name in known:
        return WeightScheme(name)
    near = get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{name!r} is no scheme; {hint}choose one of: {', '.join(known)}")


def _from_mapping(values: dict[str, Any]) -> QuantScheme:
    unknown = [key for key in values if key not in _KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known keys: {', '.join(_KEYS)}")
    if "weight" not in values:
        raise ValueError("weight is required: the scheme's name")
    group_size = values.get("group_size")
    if group_size is not None and (type(group_size) is not int or group_size < 1):
        raise ValueError(
            f"group_size ({group_size!r}) must be a number of columns from 1 on; leave it out "
            f"where a whole row shares a scale"
        )
    flags = {key: values.get(key, False) for key in ("has_zero_points", "has_input_order")}
    for key, flag in flags.items():
        if type(flag) is not bool:
            raise ValueError(f"{key} must be true or false; got {flag!r}")
    return QuantScheme(_weight_scheme(values["weight"]), group_size, **flags)


def _check_keys(scheme: QuantScheme) -> None:
    if scheme.weight in _INTEGER:
        return
    for field in fields(scheme):
        value = getattr(scheme, field.name)
        if field.name != "weight" and value != field.default:
            raise ValueError(
                f"{field.name} ({value!r}) has no effect with {scheme.weight}; drop it"
            )
