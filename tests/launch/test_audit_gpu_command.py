"""`ep-runtime audit streams --device cuda`: exit status and report, on a CPU for the GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ep_runtime import audit_co_run
from ep_runtime.audit_gpu import GpuResult
from ep_runtime.audit_gpu_checks import GpuAuditOptions
from ep_runtime.audit_streams import AuditCase, audited_machine
from ep_runtime.config import MoEConfig
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.launch import audit_gpu_command
from ep_runtime.launch.audit_gpu_command import GpuReport
from ep_runtime.launch.cli import app
from tests.ep_runtime.gpu_stand_in import CpuGpu
from tests.launch.configs import ONE_RANK, write_config
from tests.launch.test_audit_command import NO_EFFECT

Audit = Callable[..., tuple[int, str]]
CONFIG = ONE_RANK.replace("float32", "bfloat16")


@pytest.fixture
def audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Audit:
    """Runs the command in an empty folder, over a small layer: its exit status, what it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(audit_gpu_command, "this_gpu", CpuGpu)
    monkeypatch.setattr(audit_gpu_command, "gpu_machine", lambda: audited_machine(with_triton=True))
    monkeypatch.setattr(audit_co_run, "CO_RUN_ROWS", (1, 2, 3))
    path = write_config(tmp_path, CONFIG)

    def run(*arguments: str) -> tuple[int, str]:
        words = ["audit", "streams", str(path), "--device", "cuda", *arguments]
        monkeypatch.setattr(sys, "argv", ["ep-runtime", *words])
        with pytest.raises(SystemExit) as ended:
            app(words)
        written = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, written.out + written.err

    return run


STRESS = ("--checks", "allocator,co_run", "--backends", "local,all_to_all", "--iterations", "60")


def test_a_clean_run_ends_with_0_and_a_report(audit: Audit, tmp_path: Path) -> None:
    status, said = audit(*STRESS, "--experts", "reference,deep_gemm", "--json", "audit.json")
    assert status == 0, said
    assert "nothing was found" in said
    assert "a GPU that is not there" in said
    assert "deep_gemm" in said.partition("Not run")[2]
    record = json.loads((tmp_path / "audit.json").read_text())
    assert (record["schema_version"], record["device"], record["passed"]) == (1, "cuda", True)
    assert (record["hang"], record["is_complete"]) == (None, True)
    assert record["command_line"].startswith("ep-runtime audit streams ")
    assert record["options"]["iterations"] == 60
    assert len(record["cannot_see"]) == 4
    ran = [check for check in record["checks"] if check["skip_reason"] is None]
    found = [(c["check"], c["backend"], c["experts"], c["num_iterations"]) for c in ran]
    assert ("allocator", "local", "reference", 1) in found
    assert ("allocator", "all_to_all", "reference", 1) in found
    assert ("co_run", "local", "reference", 60) in found
    assert all((c["num_wrong"], c["faults"]) == (0, []) for c in ran)
    assert all(c["concurrency"] == "certified" for c in ran)


def test_a_run_that_is_ended_from_outside_leaves_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    moe = MoEConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4, top_k=2)
    report = GpuReport(moe, GpuAuditOptions(), Console(), path, "a GPU")
    report.add(GpuResult("co_run", AuditCase("local", "triton", "auto"), num_iterations=7))
    record = json.loads(path.read_text())
    assert record["checks"][0]["num_iterations"] == 7
    assert (record["is_complete"], record["passed"]) == (False, False)


def test_wrong_bits_end_with_1(
    audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ReferenceExperts.run
    num_calls = [0]

    def moody(self: Any, *arguments: Any) -> torch.Tensor:
        num_calls[0] += 1
        return run(self, *arguments) + (num_calls[0] % 10 == 0)

    monkeypatch.setattr(ReferenceExperts, "run", moody)
    status, said = audit(*STRESS, "--experts", "reference", "--json", "audit.json")
    assert status == 1, said
    assert "FAILED: see above" in said
    record = json.loads((tmp_path / "audit.json").read_text())
    assert record["passed"] is False
    assert any(check["num_wrong"] > 0 for check in record["checks"])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--checks", "racecheck"), "--checks racecheck: is unknown; choose among sanitizer"),
        (("--iterations", "0"), "--iterations (0) must be above 0"),
        (("--backends", "nccl"), "--backends nccl: is unknown; choose among: local"),
        (
            ("--experts", "triton_batched", "--backends", "local", "--checks", "sanitizer"),
            "could be audited",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_with_2(
    audit: Audit, arguments: tuple[str, ...], wanted: str
) -> None:
    status, said = audit(*arguments)
    assert status == 2, said
    assert wanted in said


@pytest.mark.parametrize(("override", "cure"), NO_EFFECT)
def test_an_override_of_what_is_not_audited_is_refused(
    audit: Audit, override: str, cure: str
) -> None:
    status, said = audit(*STRESS, "--set", "model.layer.top_k=1", "--set", override)
    assert status == 2, said
    assert f"--set {override!r}: has no effect on an audit, which reads model.* alone" in said
    assert cure in said


def test_an_override_of_the_layer_is_audited(audit: Audit, tmp_path: Path) -> None:
    override = ("--set", "model.layer.top_k=1", "--json", "audit.json")
    status, said = audit(*STRESS, "--experts", "reference", *override)
    assert status == 0, said
    assert json.loads((tmp_path / "audit.json").read_text())["layer"]["top_k"] == 1


HANG = """
import time
from pathlib import Path
from rich.console import Console
from ep_runtime.audit_gpu import GpuResult
from ep_runtime.audit_gpu_checks import GpuAuditOptions
from ep_runtime.audit_streams import AuditCase
from ep_runtime.audit_watchdog import Watchdog
from ep_runtime.config import MoEConfig
from ep_runtime.launch.audit_gpu_command import GpuReport
moe = MoEConfig(hidden_size=32, moe_intermediate_size=32, num_experts=4, top_k=2)
report = GpuReport(moe, GpuAuditOptions(), Console(width=200), Path("hang.json"), "a GPU")
report.add(GpuResult("co_run", AuditCase("local", "triton", "auto"), num_iterations=7))
with Watchdog(0.3, report.hang) as watchdog:
    watchdog.step("co-run of marlin, iteration 3")
    time.sleep(60)
"""


def test_a_hang_is_in_the_report_and_ends_the_process(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, "-c", HANG],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment,
    )
    assert ended.returncode == 1, ended.stderr
    assert "it hangs: co-run of marlin, iteration 3 has not ended after 0.3 s" in ended.stdout
    record = json.loads((tmp_path / "hang.json").read_text())
    assert record["hang"] == {"step": "co-run of marlin, iteration 3", "limit_s": 0.3}
    assert record["passed"] is False
    assert record["checks"][0]["num_iterations"] == 7


def test_without_a_gpu_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        app(["audit", "streams", str(write_config(tmp_path, CONFIG)), "--device", "cuda"])
    assert ended.value.code == 2
    assert "--device cuda: there is no CUDA device; leave --device out" in capfd.readouterr().err
