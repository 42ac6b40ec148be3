"""Reads a checkpoint's `quantization_config`, or a part of it; errors begin with the key."""

from collections.abc import Mapping
from typing import Any

from ep_runtime.kernels.errors import ConfigError


class QuantizationSettings:
    """settings: the mapping; null is the same as absent. path: what its keys are under, or ''."""

    def __init__(self, settings: Mapping[str, Any], path: str = "quantization_config") -> None:
        self._settings = settings
        self._path = path

    def key(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def error(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"{self.key(key)} {reason}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self._settings.get(key)
        return default if value is None else value

    def section(self, key: str) -> "QuantizationSettings":
        """The mapping under a key; empty where there is none."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, f"({value!r}) must be a mapping with keys of its own")
        return QuantizationSettings(value, self.key(key))

    def flag(self, key: str, default: bool | None = None) -> bool:
        """true or false; default None: it must be there."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"({value!r}) must be true or false")
        return value

    def choice(self, key: str, allowed: tuple[Any, ...], *, default: Any = None, cure: str) -> Any:
        """Which of `allowed` the value is, of its type too; ConfigError with the cure for none."""
        value = self.get(key, default)
        for one in allowed:
            if _is_same(value, one):
                return one
        wanted = " or ".join("absent" if one is None else repr(one) for one in allowed)
        raise self.error(key, f"({value!r}) must be {wanted}; {cure}")

    def group_size(self, key: str = "group_size") -> int | None:
        """Columns that share a scale; None for -1, a whole row."""
        value = self.get(key)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.error(
                key,
                f"({value!r}) must be the number of columns that share a scale, or -1 for a whole "
                "row",
            )
        return None if value == -1 else value


def _is_same(value: Any, wanted: Any) -> bool:
    """Equal, and of the same type: 4.0 and true are not 4 and 1. But a whole number may stand for a
    float, a tuple for a list, and a StrEnum's member for its text."""
    if isinstance(wanted, list):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(wanted)
            and all(map(_is_same, value, wanted))
        )
    if isinstance(wanted, str):
        return isinstance(value, str) and value == wanted
    is_number = type(wanted) is float and type(value) is int
    return (is_number or type(value) is type(wanted)) and bool(value == wanted)
