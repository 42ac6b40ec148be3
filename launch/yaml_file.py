"""Reading a YAML file strictly: no key twice, no yes/no/on/off as booleans, errors with lines."""

from pathlib import Path
from typing import Any

import yaml

from ep_runtime.kernels.errors import ConfigError

_BOOLEAN_TAG = "tag:yaml.org,2002:bool"


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which `off` is the word and a key given twice is an error."""

    # YAML 1.1 reads on, off, yes and no as booleans; `overlap: off` means the word.
    yaml_implicit_resolvers = {  # noqa: RUF012 (pyyaml's own class attribute)
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag != _BOOLEAN_TAG or first in ("t", "T", "f", "F")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: the key {key!r} must be a word")
            if key in seen:
                raise ConfigError(f"line {line}: the key {key!r} is given twice; drop one")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def parse_yaml(text: str) -> Any:
    """The value of a YAML document, a file's or one `--set` value's.

    Raises ConfigError with the line for broken YAML and for a key given twice.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ConfigError(f"{where}broken YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"broken YAML: {error}") from None


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """The mapping a file holds; anything else is a ConfigError that names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        values = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold sections such as `parallel:`, got {values!r}")
    return values
