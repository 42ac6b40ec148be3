"""Files of the benchmarks: a record that is read, and what is made of it, whole or not at all."""

import argparse
import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.arguments import status_of
from ep_runtime.kernels.errors import ConfigError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class RecordKind:
    """command: the record's own key. made_by, drawn_by: command lines, without their files."""

    command: str
    made_by: str
    drawn_by: str


BENCH = RecordKind("bench", "ep-runtime bench --json", "python benchmarks/plot_record.py")
SYMM_MEM = RecordKind(
    "symm_mem_launches",
    "python -m benchmarks.symm_mem_launches --json",
    "python -m benchmarks.symm_mem_plot",
)
EXPERTS = RecordKind(
    "experts_peers",
    "python -m benchmarks.experts_peers measure --json",
    "python -m benchmarks.experts_peers plot",
)
KINDS = {kind.command: kind for kind in (BENCH, SYMM_MEM, EXPERTS)}


def read_record(path: Path, kind: RecordKind) -> dict[str, Any]:
    """A record of this kind; a ConfigError names the file, what it is instead, and the cure."""
    cure = f"give a record that `{kind.made_by}` wrote"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {cure}") from None
    except ValueError:
        raise ConfigError(f"{path}: is not JSON, or not all of it; {cure}") from None
    found = record.get("command") if isinstance(record, dict) else None
    if found != kind.command:
        other = KINDS.get(found) if isinstance(found, str) else None
        what = "no such record"
        if other is not None:
            what = f"a record of `{other.made_by}`, which `{other.drawn_by}` draws"
        raise ConfigError(f"{path}: is {what}; {cure}")
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version ({record.get('schema_version')}) must be {SCHEMA_VERSION}; "
            f"measure anew with `{kind.made_by}`"
        )
    return dict(record)


@contextmanager
def naming_records(paths: Sequence[Path], kind: RecordKind) -> Iterator[None]:
    """What is found wrong in the records' values as a ConfigError that names their files."""
    files = ", ".join(map(str, paths))
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{files}: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{files}: not as `{kind.made_by}` writes it ({type(error).__name__}: {error}); "
            "measure anew"
        ) from error


@contextmanager
def whole_file(path: Path, *, makes_folders: bool = False) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place once the block is through.

    Whatever is raised, `path` stays as it was, and neither file nor folder is left behind. Raises
    ConfigError where it cannot be written.
    """
    target = path.resolve()
    part = target.with_name(f".{target.name}.part")
    new_folders = [folder for folder in target.parents if not folder.exists()]
    is_whole = False
    try:
        if makes_folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not os.access(target, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        yield part
        part.replace(target)
        is_whole = True
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written: {error.strerror}; name a file in a folder that exists and "
            "can be written to"
        ) from None
    finally:
        if not is_whole:
            with suppress(OSError):
                part.unlink()
            with suppress(OSError):
                for folder in new_folders:
                    folder.rmdir()


def draw_record(
    record_file: Path,
    picture: Path,
    kind: RecordKind,
    write_plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """Draw a record of this kind as a PNG; an error leaves an older picture as it was."""
    record = read_record(record_file, kind)
    if picture.suffix.lower() != ".png":
        raise ConfigError(f"{picture}: the picture is a PNG; end its name with .png")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"{picture}: needs matplotlib; pip install 'ep-runtime[bench]'")
    with whole_file(picture) as part, naming_records([record_file], kind):
        write_plot(record, part)


def draw_command(
    arguments: Sequence[str],
    kind: RecordKind,
    write_plot: Callable[[dict[str, Any], Path], None],
) -> int:
    """The command line RECORD.json PICTURE.png; its exit status."""
    parser = argparse.ArgumentParser(prog=kind.drawn_by)
    parser.add_argument("record", type=Path, help=f"that `{kind.made_by}` wrote")
    parser.add_argument("picture", type=Path, help="a PNG")
    options = parser.parse_args(arguments)

    def draw() -> int:
        draw_record(options.record, options.picture, kind, write_plot)
        return 0

    return status_of(draw)
