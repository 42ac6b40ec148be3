"""Marlin's audit without a GPU: its scenarios, its record, and what a lost child costs."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import marlin_jobs, marlin_streams
from benchmarks.marlin_jobs import SCHEMES, column_job, draw_weights, experts_job
from benchmarks.marlin_streams import SCENARIOS, Finding, main, run_all, summary_line
from ep_runtime.kernels.base import Activation, ExpertsShape
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.marlin_weights import marlin_fault, repack_for_marlin
from tests import fake_marlin

# A child of two faults: it is lost in the second scenario that it begins, but for the last one.
CHILD = """
import json, os, sys
from dataclasses import asdict
from benchmarks.marlin_streams import Finding
names = sys.argv[1].split(",")
for number, name in enumerate(names):
    print(json.dumps({"begins": name}), flush=True)
    if number == 1 and name != "d":
        os._exit(7)
    print("a line of a library", flush=True)
    hang = {"after_iterations": 20} if name == "d" else None
    found = Finding(name, num_iterations=9, num_wrong=(0, 0), hang=hang)
    print(json.dumps(asdict(found)), flush=True)
"""


def test_every_scheme_has_a_shared_expert_of_its_own_beside_it() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(set(names)) == len(names)
    for scheme in SCHEMES:
        assert any(name.startswith(f"shared_expert_{scheme}") for name in names)
    assert any(scenario.occupant and scenario.priorities == (0, -3) for scenario in SCENARIOS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_drawn_layers_are_ones_that_the_kernel_takes(scheme: str) -> None:
    shape = ExpertsShape(2, 128, 256, 1, Activation(), torch.bfloat16, scheme=SCHEMES[scheme])
    assert marlin_fault(shape) is None
    weights = draw_weights(shape, 0, torch.device("cpu"))
    assert len(weights.w13) == len(weights.w2) == 2
    assert repack_for_marlin(weights, shape).w13_quant is not None


@pytest.mark.skipif(not is_interpreting(), reason="Triton compiles for CUDA in this process")
def test_jobs_launch_what_they_say_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in of the package's operator, which refuses what the real one does."""
    for name, value in (("DEVICE", torch.device("cpu")), ("HIDDEN", 128), ("WIDTH", 128)):
        monkeypatch.setattr(marlin_jobs, name, value)
    with fake_marlin.registered():
        jobs = [
            experts_job("experts", 1, 3, num_experts=4, top_k=2, scheme=SCHEMES["awq"]),
            experts_job("shared expert", 2, 3, num_experts=1, top_k=1),
            column_job(1),
        ]
        jobs.append(experts_job("again", 1, 3, num_experts=4, top_k=2, locks=jobs[0].locks))
        for job in jobs:
            first, second = job.launch(), job.launch()
            assert torch.equal(first, second)
            assert (first != 0).any()
            assert first.isfinite().all()
    assert jobs[3].locks is jobs[0].locks
    assert jobs[1].locks is not jobs[0].locks


def test_a_child_that_is_lost_takes_its_scenario_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    found: list[dict[str, Any]] = []
    run_all(["a", "b", "c", "d"], 1.0, [sys.executable, "-c", CHILD], found.append)
    assert [one["scenario"] for one in found] == ["a", "b", "c", "d"]
    assert [one["fault"] is not None for one in found] == [False, True, False, False]
    assert found[1]["fault"] == "the process was lost with it, its status 7"
    lines = [summary_line(one) for one in found]
    assert lines[0] == "a: 9 iterations, wrong [0, 0], serial runs that differ 0"
    assert lines[3] == "d: HANGS after 20 iterations"


@pytest.mark.parametrize(("fault", "status"), [(None, 0), ("lost", 1)])
def test_the_record_has_what_was_found_and_where(
    fault: str | None, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def noted(*arguments: Any) -> None:
        given.extend(arguments)
        arguments[-1](asdict(Finding("columns", num_wrong=(0, 3), fault=fault)))

    monkeypatch.setattr(marlin_streams, "run_all", noted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(marlin_streams, "describe_devices", lambda: [{"name": "a GPU"}])
    path = tmp_path / "marlin.json"
    arguments = ["--json", str(path), "--seconds", "2", "--scenarios", "columns,dense"]
    assert main(arguments) == status
    assert given[:2] == [["columns", "dense"], 2.0]
    assert given[2][-3:] == ["--seconds", "2.0", "--child"]
    record = json.loads(path.read_text())
    assert record["devices"] == [{"name": "a GPU"}]
    assert record["scenarios"][0]["num_wrong"] == [0, 3]
    assert record["is_complete"] is False, "dense is missing"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--scenarios", "x"], "--scenarios x: is unknown"), ([], "there is no CUDA device")],
)
def test_what_it_cannot_do_is_refused(
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(arguments)
    assert words in capsys.readouterr().err
