"""A checkpoint's configuration by key, as transformers' config object or as config.json's dict."""

from collections.abc import Mapping
from typing import Any

from ep_runtime.kernels.errors import ConfigError

_ABSENT = object()


class HFConfig:
    """Reads a transformers config object or a plain dict by key; says which key is missing."""

    def __init__(self, config: Any, model_type: str) -> None:
        self._config = config
        self.model_type = model_type

    @property
    def is_transformers_config(self) -> bool:
        """Whether it is a config object, which has the family's defaults, and not a plain dict."""
        return not isinstance(self._config, Mapping)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where it is absent or null."""
        if isinstance(self._config, Mapping):
            value = self._config.get(key)
        else:
            value = getattr(self._config, key, None)
        return default if value is None else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise ConfigError(
                f"{key}: is missing in the {self.model_type} configuration; give it, or install "
                "transformers (pip install 'ep-runtime[hf]') for the family's default"
            )
        return value


def with_family_defaults(values: dict[str, Any], model_type: str) -> Any:
    """transformers' config object of config.json's keys; the keys where it is not installed."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return values
    kind = CONFIG_MAPPING[model_type]
    _check_spellings(values, kind.attribute_map)
    try:
        return kind.from_dict(values)
    except Exception as error:  # transformers' validation has no common base
        reason = " ".join(str(error).split())
        raise ConfigError(f"the {model_type} configuration is not valid: {reason}") from error


def _check_spellings(values: Mapping[str, Any], spellings: Mapping[str, str]) -> None:
    """ConfigError where a key and its other spelling both have a value, and not the same."""
    for other, key in spellings.items():
        first, second = values.get(key), values.get(other)
        if first is not None and second is not None and first != second:
            raise ConfigError(
                f"{key} ({first!r}) and {other} ({second!r}) are two spellings of one key and "
                "contradict each other; drop the wrong one"
            )
