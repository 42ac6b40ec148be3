"""Commands that read a benchmark's record: what is no such record, and what a failure leaves."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import experts_peers, symm_mem_launches, symm_mem_plot
from benchmarks.record_file import BENCH, EXPERTS, SYMM_MEM, draw_command, whole_file
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch import bench_plot
from tests.launch.processes import clean_environment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMMITTED = {
    "bench": RESULTS / "cpu_example.json",
    "symm_mem": RESULTS / "symm_mem_launches.json",
    "experts": RESULTS / "experts_mxfp4.json",
}
PLOTS: dict[str, Callable[[list[str]], int]] = {
    "bench": lambda given: draw_command(given, BENCH, bench_plot.write_plot),
    "symm_mem": lambda given: draw_command(given, SYMM_MEM, symm_mem_plot.write_plot),
    "experts": lambda given: experts_peers.main(["plot", *given]),
}
MADE_BY = {"bench": BENCH.made_by, "symm_mem": SYMM_MEM.made_by, "experts": EXPERTS.made_by}


def kernel_times(*given: object) -> int:
    return experts_peers.main(["kernel-times", *map(str, given)])


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """The one line on stderr since the last call."""

    def line() -> str:
        captured = capsys.readouterr()
        assert captured.out == ""
        (one,) = captured.err.splitlines()
        assert one.startswith("error: ")
        return one

    return line


@pytest.fixture(params=list(PLOTS))
def kind(request: pytest.FixtureRequest) -> str:
    pytest.importorskip("matplotlib")
    return str(request.param)


def test_a_record_is_drawn_in_place_of_an_older_picture(kind: str, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"older")
    assert PLOTS[kind]([str(COMMITTED[kind]), str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


def bad_records(folder: Path, kind: str) -> dict[Path, str]:
    """Files that are no record of the kind, and what is said of each."""
    others = [name for name in COMMITTED if name != kind]
    made_by = f"give a record that `{MADE_BY[kind]}` wrote"
    committed = json.loads(COMMITTED[kind].read_text())
    cells = "cells" if kind == "experts" else "cases"
    texts: dict[str, Any] = {
        "list.json": ([1], f"is no such record; {made_by}"),
        "later.json": (committed | {"schema_version": 2}, r"schema_version (2) must be 1"),
        "less.json": ({k: v for k, v in committed.items() if k != cells}, f"KeyError: '{cells}'"),
        "other.json": (committed | {cells: [3]}, "(TypeError: "),
        "unhashable.json": ({"command": []}, "is no such record"),
    }
    expected = {folder / "missing.json": f"cannot be read: No such file or directory; {made_by}"}
    for name, (values, words) in texts.items():
        (folder / name).write_text(json.dumps(values))
        expected[folder / name] = words
    for name, content in (("empty.json", b""), ("picture.json", b"\x89PNG\r\n\x1a\n")):
        (folder / name).write_bytes(content)
        expected[folder / name] = f"is not JSON, or not all of it; {made_by}"
    expected |= {COMMITTED[o]: f"a record of `{MADE_BY[o]}`, which `python " for o in others}
    return expected


def test_what_is_no_such_record_is_named_and_leaves_the_picture_alone(
    kind: str, tmp_path: Path, said: Callable[[], str]
) -> None:
    (tmp_path / "records").mkdir()
    older, new = tmp_path / "older.png", tmp_path / "new.png"
    older.write_bytes(b"older")
    for record, words in bad_records(tmp_path / "records", kind).items():
        for picture in (older, new):
            assert PLOTS[kind]([str(record), str(picture)]) == 2
            line = said()
            assert f"{record}: " in line
            assert words in line
    assert older.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older.png", "records"]


def test_a_place_that_takes_no_picture_is_named(
    kind: str, tmp_path: Path, said: Callable[[], str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    for place, words in {
        "picture.svg": "the picture is a PNG; end its name with .png",
        "none/picture.png": "cannot be written: No such file or directory; name a file in a folder",
        "file/picture.png": "cannot be written: Not a directory",
        "folder.png": "cannot be written: Is a directory",
    }.items():
        assert PLOTS[kind]([str(COMMITTED[kind]), str(tmp_path / place)]) == 2
        assert f"{tmp_path / place}: {words}" in said()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


@pytest.mark.parametrize("given", [[], ["one.json"]])
def test_without_both_files_the_usage_is_shown(
    given: list[str], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PLOTS[kind](given)
    assert caught.value.code == 2
    assert "the following arguments are required: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "program", [["benchmarks/plot_record.py"], ["-m", "benchmarks.plot_record"]]
)
def test_plot_record_runs_as_a_script_and_as_a_module(program: list[str], tmp_path: Path) -> None:
    environment = clean_environment()
    del environment["PYTHONPATH"]
    finished = subprocess.run(
        [sys.executable, *program, str(COMMITTED["symm_mem"]), str(tmp_path / "picture.png")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 2, finished.stderr
    assert "which `python -m benchmarks.symm_mem_plot` draws" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_table_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    (tmp_path / "records").mkdir()
    output = tmp_path / "tuned" / "experts" / "X.json"
    records = bad_records(tmp_path / "records", "experts")
    for record, words in records.items():
        assert kernel_times(record, "--output", output) == 2
        line = said()
        assert f"{record}: " in line
        assert words in line
    assert kernel_times(COMMITTED["experts"], "--output", output) == 2
    line = said()
    assert line.startswith(f"error: {COMMITTED['experts']}: no cell of the records has right times")
    assert "--tables int4_g128,mxfp4,nvfp4,int8_g128 with --implementations ep_runtime," in line
    assert "ep_runtime_marlin, where vLLM's Marlin is installed" in line
    assert [path.name for path in tmp_path.iterdir()] == ["records"]


def record_of_both() -> Any:
    """The committed record with each of its own times as Marlin's too."""
    record = json.loads(COMMITTED["experts"].read_text())
    for cell in record["cells"]:
        own = cell["implementations"]["ep_runtime"]
        cell["implementations"]["ep_runtime_marlin"] = own | {"facts": {"experts": "marlin"}}
    return record


def test_a_table_that_cannot_be_written_is_named_and_leaves_nothing(
    tmp_path: Path, said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, older = tmp_path / "r.json", tmp_path / "older.json"
    record.write_text(json.dumps(record_of_both()))
    older.write_text("older")
    for output, words in {
        tmp_path / "X.txt": "tables are looked up as *.json; end its name so",
        record / "X.json": "cannot be written: File exists",
    }.items():
        assert kernel_times(record, "--output", output) == 2
        line = said()
        assert f"{output}: {words}" in line

    def refuse(path: Path) -> None:
        raise ConfigError("no table")

    with monkeypatch.context() as patched:
        patched.setattr(experts_peers, "read_kernel_times", refuse)
        for output in (older, tmp_path / "new" / "experts" / "X.json"):
            assert kernel_times(record, "--output", output) == 2
            assert said() == "error: no table"
    assert older.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["older.json", "r.json"]
    assert kernel_times(record, "--output", older) == 0
    assert "layers" in json.loads(older.read_text())


def test_launches_are_not_measured_for_a_picture_that_cannot_be(said: Callable[[], str]) -> None:
    pytest.importorskip("matplotlib")
    assert symm_mem_launches.main(["--plot", "picture.svg"]) == 2
    assert "picture.svg: is written as PNG" in said()


def test_a_disk_that_is_full_leaves_the_older_file(tmp_path: Path) -> None:
    older = tmp_path / "older.png"
    older.write_bytes(b"older")

    def fail(error: BaseException) -> None:
        with whole_file(older) as part:
            part.write_bytes(b"half")
            raise error

    with pytest.raises(ConfigError, match=r"older.png: cannot be written: No space left"):
        fail(OSError(28, "No space left on device"))
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    assert older.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [older]


def test_a_link_to_a_picture_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.png").write_bytes(b"older")
    (tmp_path / "link.png").symlink_to("real.png")
    with whole_file(tmp_path / "link.png") as part:
        part.write_bytes(b"newer")
    assert (tmp_path / "link.png").is_symlink()
    assert (tmp_path / "real.png").read_bytes() == b"newer"
