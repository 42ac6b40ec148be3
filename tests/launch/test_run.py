"""`ep-runtime run` end to end: its own ranks, torchrun's, mpirun's; and how failures end it."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.configs import LAYER, TINY, write_config
from tests.launch.processes import (
    FAULTY_PROGRAM,
    PROGRAM,
    clean_environment,
    launcher_command,
    run_to_end,
)

FOUR_RANKS = ["--set", "parallel.tp_size=2", "--set", "parallel.ep_size=4"]


def passed_report(finished: subprocess.CompletedProcess[str], folder: Path) -> dict[str, Any]:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    assert report["passed"]
    assert all(check["value"] <= check["limit"] for check in report["checks"])
    return report


def test_run_starts_two_ranks_and_compares_logits_and_tokens(tmp_path: Path) -> None:
    config = write_config(tmp_path, TINY, prompts="one prompt for two ranks\n")
    (tmp_path / "here").mkdir()
    finished = run_to_end(["run", str(config), "--json", "here/out.json"], tmp_path)
    report = passed_report(finished, tmp_path)
    assert json.loads((tmp_path / "here" / "out.json").read_text()) == report
    assert set(report) == {
        *("schema_version", "command", "environment", "config", "plan"),
        *("ranks", "checks", "passed", "timings"),
    }
    first, second = report["ranks"]
    assert (first["num_prompts"], first["num_tokens"]) == (1, len("one prompt for two ranks"))
    assert (second["num_prompts"], second["num_tokens"]) == (0, 0)
    assert len(first["generated_tokens"][0]) == 3
    assert second["generated_tokens"] == []
    # Two layers in the prompt's forward and in each of three steps, on both ranks.
    assert [rank["shared_expert_calls"] for rank in report["ranks"]] == [8, 8]
    names = [check["name"] for check in report["checks"]]
    assert sum(name.startswith("logits") for name in names) == 2
    assert any(name.startswith("greedy") for name in names)
    assert "modular_kernel" in finished.stdout
    assert (tmp_path / "out" / "rank1.log").exists()
    assert (tmp_path / "out" / "config.yaml").exists()


def test_run_interprets_triton_for_its_ranks_and_honours_python_o(tmp_path: Path) -> None:
    config = write_config(tmp_path, LAYER.replace("[7, 0]", "[3, 0], routing: hotspot"))
    finished = run_to_end(
        ["run", str(config), "--set", "kernel.experts=triton"], tmp_path, program=["-O", *PROGRAM]
    )
    report = passed_report(finished, tmp_path)
    assert report["plan"]["experts"] == "triton"
    assert report["plan"]["machine"]["triton"] == "interpreter"
    loads = [rank["tokens_per_expert"] for rank in report["ranks"]]
    assert loads == [[6, 6, 0, 0, 0], [0, 0, 0, 0, 0]]  # 3 rows, to experts 0 and 1, two calls


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("mpirun", marks=pytest.mark.mpi)])
def test_run_joins_two_ranks_of_a_launcher(launcher: str, tmp_path: Path) -> None:
    config = write_config(tmp_path, LAYER)
    finished = run_to_end(["run", str(config)], tmp_path, launcher=launcher, num_ranks=2)
    report = passed_report(finished, tmp_path)
    assert [rank["num_tokens"] for rank in report["ranks"]] == [7, 0]
    assert finished.stdout.count("shared expert calls off") == 1, "only rank 0 talks"


def test_run_joins_four_ranks_of_torchrun_with_a_whole_model(tmp_path: Path) -> None:
    config = write_config(tmp_path, TINY, prompts="first\nthe second prompt\nthird\n")
    finished = run_to_end(
        ["run", str(config), *FOUR_RANKS], tmp_path, launcher="torchrun", num_ranks=4
    )
    report = passed_report(finished, tmp_path)
    tokens = [rank["num_tokens"] for rank in report["ranks"]]
    assert tokens == [len("first") + len("the second prompt")] * 2 + [len("third")] * 2


@pytest.mark.mpi
def test_run_joins_four_ranks_of_mpirun(tmp_path: Path) -> None:
    config = write_config(tmp_path, LAYER)
    finished = run_to_end(
        ["run", str(config), *FOUR_RANKS], tmp_path, launcher="mpirun", num_ranks=4
    )
    report = passed_report(finished, tmp_path)
    assert [rank["num_tokens"] for rank in report["ranks"]] == [7, 7, 0, 0]


def failed_run(
    tmp_path: Path, fault: str, faulty_rank: int, launcher: str = "none"
) -> tuple[subprocess.CompletedProcess[str], float]:
    """The finished run and the seconds from the fault to its end."""
    config = write_config(tmp_path, LAYER)
    finished = run_to_end(
        ["run", str(config)],
        tmp_path,
        launcher=launcher,
        num_ranks=2,
        program=FAULTY_PROGRAM,
        FAULT=fault,
        FAULTY_RANK=str(faulty_rank),
        FAULT_FILE=str(tmp_path / "fault"),
    )
    moment, pid = (tmp_path / "fault").read_text().split()
    assert not Path("/proc", pid).exists(), "the faulty rank is still there"
    return finished, time.time() - float(moment)


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_killed_rank_ends_the_run_by_name(faulty_rank: int, tmp_path: Path) -> None:
    finished, seconds = failed_run(tmp_path, "kill", faulty_rank)
    assert finished.returncode == 1
    said = f"ep-runtime: rank {faulty_rank} was killed by SIGKILL; logs of the ranks: out\n"
    assert finished.stderr == said
    assert seconds < 30


def test_a_raising_rank_ends_the_run_with_one_message(tmp_path: Path) -> None:
    finished, seconds = failed_run(tmp_path, "raise", 1)
    assert finished.returncode == 1
    cause = "rank 1 failed: ValueError: a tensor of the wrong kind"
    assert finished.stderr == f"ep-runtime: {cause}; logs of the ranks: out\n"
    assert seconds < 20
    assert "commit_fault" in (tmp_path / "out" / "rank1.log").read_text(), "no traceback"


@pytest.mark.mpi
def test_a_raising_rank_under_mpirun_is_told_of_once(tmp_path: Path) -> None:
    finished, seconds = failed_run(tmp_path, "raise", 1, launcher="mpirun")
    assert finished.returncode == 1
    said = finished.stdout + finished.stderr
    assert said.count("rank 1 failed: ValueError: a tensor of the wrong kind") == 1
    assert seconds < 20


def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    config = write_config(tmp_path, LAYER)
    fault = tmp_path / "fault"
    process = subprocess.Popen(
        [*launcher_command("none", 2, FAULTY_PROGRAM), "run", str(config)],
        cwd=tmp_path,
        env=clean_environment(FAULT="sleep", FAULTY_RANK="1", FAULT_FILE=str(fault)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 150
    while not (fault.exists() and fault.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT
    assert said == "ep-runtime: interrupted by SIGINT; all ranks ended\n"
    assert not Path("/proc", fault.read_text().split()[1]).exists()
