"""The files that a command writes: see early that it can, and write JSON."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from ep_runtime.kernels.errors import ConfigError


def prepare_json_file(path: Path | None, output_dir: str | None = None) -> None:
    """See that it can be written, before work is spent; None: nothing."""
    if path is not None:
        prepare_file("--json", path, output_dir)


def prepare_file(option: str, path: Path, output_dir: str | None = None) -> None:
    """See that the file of a command-line option can be written, or raise ConfigError.

    Its folder must be there, or be output_dir, which is then made. Leaves no file that was not
    there.
    """
    try:
        if output_dir is not None and _is_same(path.parent, Path(output_dir).expanduser()):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not path.parent.is_dir():
            raise ConfigError(
                f"{option} {path}: cannot be written: {path.parent} is not a folder that exists; "
                "make it first"
            )
        target = path.resolve()  # a link stays one
        try:
            target.open("xb").close()
            target.unlink(missing_ok=True)
        except FileExistsError:
            with suppress(FileNotFoundError):  # another rank looked, and it can be written
                os.close(os.open(target, os.O_WRONLY | os.O_APPEND))
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error}") from None


def _is_same(folder: Path, other: Path) -> bool:
    return folder.resolve() == other.resolve()


def write_json(path: Path | None, values: object, *, option: str = "--json") -> None:
    """Write `values` where `option` asks for it, or raise ConfigError; nothing for None.

    NaN and infinities, which JSON has not, become null.
    """
    if path is None:
        return
    text = json.dumps(_finite(values), indent=2, allow_nan=False) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error}") from None


def _finite(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_finite(value) for value in values]
    return None if isinstance(values, float) and not isfinite(values) else values
