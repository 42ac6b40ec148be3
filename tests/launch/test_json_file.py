"""Looking whether a file can be written, from several processes at once."""

import multiprocessing
from pathlib import Path

import pytest

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.json_file import prepare_json_file, write_json


def _look_often(path: Path) -> None:
    for _ in range(2000):
        prepare_json_file(path)


@pytest.mark.parametrize("held", [None, "what it held"])
def test_ranks_that_look_at_one_file_at_once_all_find_it_writable(
    tmp_path: Path, held: str | None
) -> None:
    path = tmp_path / "out.json"
    if held is not None:
        path.write_text(held)
    ranks = [multiprocessing.Process(target=_look_often, args=(path,)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    assert (path.read_text() if path.exists() else None) == held


def test_what_is_not_finite_is_null_wherever_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"a": [float("nan"), {"b": (float("inf"), 1.5)}], "c": 2})
    assert "".join(path.read_text().split()) == '{"a":[null,{"b":[null,1.5]}],"c":2}'


def test_a_folder_is_no_file_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--json .*: cannot be written"):
        prepare_json_file(tmp_path)
