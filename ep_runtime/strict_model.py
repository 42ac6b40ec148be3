"""Base of every configuration value: frozen, no unknown keys, errors that name the user's key."""

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ep_runtime.kernels.errors import ConfigError


class InvalidValues(ConfigError):
    """The faults of one construction; `faults` pairs a key's path with what is wrong with it."""

    def __init__(self, faults: list[tuple[tuple[str, ...], str]]) -> None:
        self.faults = faults
        super().__init__("; ".join(_one_fault(path, text) for path, text in faults))


class StrictModel(BaseModel):
    """A frozen pydantic model whose construction raises ConfigError.

    The message names each key with its full dotted path (`parallel.dp_size`), also where models
    are nested.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidValues(_faults(error, type(self))) from None


def _one_fault(path: tuple[str, ...], text: str) -> str:
    return f"{'.'.join(path)}: {text}" if path else text


def _faults(error: ValidationError, model: type[BaseModel]) -> list[tuple[tuple[str, ...], str]]:
    """Per fault: the key's path, and the value, what is wanted, the nearest key if unknown."""
    faults: list[tuple[tuple[str, ...], str]] = []
    for fault in error.errors():
        path = tuple(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _known_keys(model, path[:-1])
            if path[-1] in known:
                faults.append((path, "given twice, here under a second name; drop one"))
                continue
            near = get_close_matches(path[-1], known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            faults.append((path, f"unknown key; {hint}"))
        elif fault["type"] == "missing":
            faults.append((path, "is required"))
        elif fault["type"] == "value_error":
            inner = fault["ctx"]["error"]
            if isinstance(inner, InvalidValues):
                faults += [((*path, *below), text) for below, text in inner.faults]
            else:
                faults.append((path, str(inner)))
        else:
            faults.append((path, f"{fault['msg']} (got {fault['input']!r})"))
    return faults


def _known_keys(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The keys a model (or the model nested at `path`) accepts, aliases included."""
    current: type[BaseModel] | None = model
    for part in path:
        field = current.model_fields.get(part) if current else None
        current = _model_in(field.annotation) if field else None
    if current is None:
        return []
    keys: list[str] = []
    for name, field in current.model_fields.items():
        keys.append(name)
        choices = getattr(field.validation_alias, "choices", ())
        keys += [str(alias) for alias in choices if alias != name]
    return keys


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model inside an annotation such as `Layer | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None
