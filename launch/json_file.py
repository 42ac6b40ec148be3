"""The file of `--json`."""

import json
from pathlib import Path

from ep_runtime.kernels.errors import ConfigError


def prepare_json_file(path: Path | None) -> None:
    """Make its folder and see that it can be written, before work is spent; None: nothing."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error}") from None


def write_json(path: Path | None, values: object) -> None:
    """Write `values` where the user asked for it; nothing for None."""
    if path is not None:
        prepare_json_file(path)
        path.write_text(json.dumps(values, indent=2) + "\n")
