"""A table's JSON values as dataclasses. Nothing here needs Triton."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ep_runtime.kernels.errors import PlanError

DataT = TypeVar("DataT")


def read_fields(
    cls: type[DataT], values: Any, place: str, given: Mapping[str, Any] | None = None
) -> DataT:
    """A dataclass from its fields by name; nested ones too. given: fields that are parsed already.

    Raises ValueError that names the place and the key: unknown, missing or of a wrong type; and
    TypeError for a field whose type cannot be checked, unless it is given.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{place} must be a mapping; got {values!r}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{place}.{unknown[0]} is an unknown key; known: {', '.join(known)}")
    missing = [name for name, field in known.items() if name not in values and _is_needed(field)]
    if missing:
        raise ValueError(f"{place} needs the key {missing[0]}")
    types, parsed = get_type_hints(cls), dict(given or {})
    for name, value in values.items():
        if name not in parsed:
            parsed[name] = _read(types[name], value, f"{place}.{name}")
    try:
        return cls(**parsed)
    except PlanError as error:
        raise ValueError(f"{place}: {error}") from None


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _read(kind: Any, value: Any, place: str, or_null: str = "") -> Any:
    """kind: bool, int, float, str, a dataclass, or one of them or None. or_null: of the message."""
    if get_origin(kind) in (Union, UnionType):
        if value is None and NoneType in get_args(kind):
            return None
        kinds = [one for one in get_args(kind) if one is not NoneType]
        if len(kinds) != 1:
            raise TypeError(f"{place}: values of {kind} are of several types; give it parsed")
        return _read(kinds[0], value, place, ", or null")
    if isinstance(kind, type) and is_dataclass(kind):
        return read_fields(kind, value, place)
    if kind not in (int, float, bool, str):
        raise TypeError(f"{place}: no type of JSON is a {kind}; give it parsed")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{place} ({value!r}) must be of type {kind.__name__}{or_null}")
    return value
