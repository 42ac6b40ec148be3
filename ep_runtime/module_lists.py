"""Lists of modules, as writers of quantised checkpoints spell them: `path in modules`.

A module's path has no `.weight`: `model.layers.3.mlp.experts.5.up_proj`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property
from typing import Any, Protocol

from ep_runtime.kernels.errors import ConfigError

_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # the end of a path's component


class Modules(Protocol):
    def __contains__(self, path: str, /) -> bool: ...


class AllModules:
    """Every linear layer."""

    def __contains__(self, path: str, /) -> bool:
        return True


@dataclass(frozen=True)
class Expressions:
    """Paths that a regular expression matches from the start on."""

    entries: tuple[str, ...]

    def __contains__(self, path: str, /) -> bool:
        return bool(self.entries) and self._expression.match(path) is not None

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        return re.compile("|".join(f"(?:{entry})" for entry in self.entries))


@dataclass(frozen=True)
class Subtrees:
    """transformers' way (`should_convert_module`): an entry names a module and all below it, is a
    regular expression for that, or ends a path."""

    entries: tuple[str, ...]

    def __contains__(self, path: str, /) -> bool:
        return path.endswith(self.entries) or path in self._expressions

    @cached_property
    def _expressions(self) -> Expressions:
        return Expressions(tuple(f"(?:{entry}){_BOUNDARY}" for entry in self.entries))


@dataclass(frozen=True)
class Substrings:
    """AutoAWQ's and AutoGPTQ's way: an entry is anywhere in a path."""

    entries: tuple[str, ...]

    def __contains__(self, path: str, /) -> bool:
        return any(entry in path for entry in self.entries)


@dataclass(frozen=True)
class NoneOf:
    """Every path that is not in a list."""

    modules: Modules

    def __contains__(self, path: str, /) -> bool:
        return path not in self.modules


def globs(entries: Iterable[str]) -> Expressions:
    """modelopt's way: `*` stands for anything, and what is below a module goes with it."""
    ends = re.escape(translate("")[-2:])  # how this Python ends a translated pattern
    bodies = (re.sub(rf"{ends}$", "", translate(entry)) for entry in entries)
    return Expressions(tuple(f"{body}{_BOUNDARY}" for body in bodies))


def names_in(key: str, value: Any) -> tuple[str, ...]:
    """The names in a list, or in lists within it; absent: none. ConfigError for anything else."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple | set):
        raise ConfigError(f"quantization_config.{key} must be a list of names; got {value!r}")
    return tuple(name for entry in value for name in names_in(key, entry))


def check_expressions(key: str, entries: Iterable[str]) -> None:
    """ConfigError where an entry is no regular expression."""
    for entry in entries:
        try:
            re.compile(entry)
        except re.error as error:
            raise ConfigError(
                f"quantization_config.{key}: {entry!r} is no regular expression: {error}"
            ) from None
