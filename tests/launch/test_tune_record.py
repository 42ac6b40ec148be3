"""The file of `ep-runtime tune`: whole, or not there."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime.kernels.errors import ConfigError, EPRuntimeError
from ep_runtime.launch import tune_command
from ep_runtime.launch.cli import app
from ep_runtime.launch.tune_record import check_output, write_table

ARGUMENTS = ["--hidden-size", "64", "--intermediate-size", "64", "--num-experts", "4"]


def fail(*given: object) -> Any:
    raise EPRuntimeError("the search ended")


@pytest.fixture
def fails_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU, up to the first compilation."""
    monkeypatch.setattr(tune_command, "is_interpreting", lambda: False)
    monkeypatch.setattr(tune_command, "refuse_what_has_no_tiles", lambda *given, **named: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune_command, "compile_jobs", fail)


@pytest.mark.usefixtures("fails_late")
@pytest.mark.parametrize("before", [None, "what it held"])
def test_a_run_that_fails_leaves_the_file_as_it_was(
    before: str | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    if before is not None:
        path.write_text(before)
    with pytest.raises(SystemExit) as ended:
        app(["tune", *ARGUMENTS, "--top-k", "2", "--output", str(path)])
    assert ended.value.code == 1
    assert "the search ended" in capfd.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ([path.name] if before else [])
    assert before is None or path.read_text() == before


def test_an_output_that_could_not_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--output .*missing/table.json: cannot be written"):
        check_output(tmp_path / "missing" / "table.json")
    with pytest.raises(ConfigError, match=r"--output .*: cannot be written"):
        check_output(tmp_path)
    (tmp_path / "table.json.partial").mkdir()
    with pytest.raises(ConfigError, match=r"--output .*partial: cannot be written"):
        check_output(tmp_path / "table.json")
    assert not (tmp_path / "table.json").exists()


def test_a_table_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    write_table(path, {"layers": [1]})
    whole: Callable[..., int] = Path.write_text

    def half(self: Path, text: str) -> int:
        whole(self, text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(EPRuntimeError, match=r"--output .*table.json: cannot be written: .*28"):
        write_table(path, {"layers": [1, 2]})
    assert json.loads(path.read_text()) == {"layers": [1]}
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link_to_the_table(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    check_output(link)
    assert link.is_symlink()
    assert not target.exists()
    write_table(link, {"layers": []})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"layers": []}


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_output(path)
        write_table(path, {"layers": [3]})
        assert json.loads(os.read(reader, 1000)) == {"layers": [3]}
    finally:
        os.close(reader)
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]
