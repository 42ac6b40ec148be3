"""`quantization` of a layer's configuration: a scheme's name or its keys, to a `QuantScheme`."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme, WeightScheme

_INTEGER = (WeightScheme.INT4, WeightScheme.INT8)
# K must be a multiple: nibbles go in pairs, and a group's scale is for so many columns.
_MULTIPLE = {
    WeightScheme.INT4: 2,
    WeightScheme.MXFP4: 32,
    WeightScheme.NVFP4: 16,
    WeightScheme.NF3: 32,
    WeightScheme.HYBRID: 32,
}
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
        scheme = _from_mapping({"weight": value})
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
    if scheme.weight is WeightScheme.HYBRID:
        others["nvfp4_experts"] = list(scheme.nvfp4_experts)
    if set(others) <= {"weight"}:
        return str(scheme.weight)
    return others | {"weight": str(scheme.weight)}


def check_scheme(
    scheme: QuantScheme, *, num_experts: int, hidden_size: int, moe_intermediate_size: int
) -> None:
    """ValueError where a scheme cannot store weights of these sizes, or so many experts."""
    unknown = [expert for expert in scheme.nvfp4_experts if expert >= num_experts]
    if unknown:
        raise ValueError(
            f"quantization.nvfp4_experts names expert {unknown[0]}, and num_experts is "
            f"{num_experts}"
        )
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
    weight = _weight_scheme(values["weight"])
    experts = values.get("nvfp4_experts")
    if weight is WeightScheme.HYBRID and experts is None:
        raise ValueError(
            f"nvfp4_experts is required with {weight}: the experts in nvfp4; the others are in nf3"
        )
    return QuantScheme(weight, group_size, **flags, nvfp4_experts=_expert_ids(experts or ()))


def _expert_ids(experts: Any) -> tuple[int, ...]:
    is_list = isinstance(experts, list | tuple)
    if not is_list or any(type(one) is not int or one < 0 for one in experts):
        raise ValueError(f"nvfp4_experts must be a list of experts' numbers; got {experts!r}")
    if len(set(experts)) != len(experts):
        raise ValueError(f"nvfp4_experts ({experts!r}) names an expert twice")
    return tuple(sorted(experts))


def _keys_of(weight: WeightScheme) -> tuple[str, ...]:
    """The keys that have an effect with a scheme."""
    if weight in _INTEGER:
        return ("weight", "group_size", "has_zero_points", "has_input_order")
    return ("weight", "nvfp4_experts") if weight is WeightScheme.HYBRID else ("weight",)


def _check_keys(scheme: QuantScheme) -> None:
    for field in fields(scheme):
        value = getattr(scheme, field.name)
        if field.name not in _keys_of(scheme.weight) and value != field.default:
            raise ValueError(
                f"{field.name} ({value!r}) has no effect with {scheme.weight}; drop it"
            )
