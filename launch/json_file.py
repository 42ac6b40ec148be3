"""The file of `--json`."""

import json
from pathlib import Path

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
        is_new = not target.exists()
        path.open("ab").close()
        if is_new:
            target.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error}") from None


def _is_same(folder: Path, other: Path) -> bool:
    return folder.resolve() == other.resolve()


def write_json(path: Path | None, values: object) -> None:
    """Write `values` where the user asked for it; nothing for None."""
    if path is not None:
        prepare_json_file(path)
        path.write_text(json.dumps(values, indent=2) + "\n")
