"""The examples run, alone and under torchrun; the out-of-tree backend meets the contract."""

import runpy
from pathlib import Path

import pytest

import ep_runtime as ep
from ep_runtime.distributed import EPContext
from examples.out_of_tree_backend import BroadcastBackend
from tests.all2all.contract import ContractCase, check_bias_rule, check_case, contract_cases
from tests.harness import run_ranks
from tests.launch.processes import ROOT, run_to_end

CASES = contract_cases(BroadcastBackend.capabilities)


def check_registered(ctx: EPContext, case: ContractCase) -> None:
    ep.register_backend("broadcast", BroadcastBackend)
    check_case(ctx, "broadcast", case)


def check_registered_bias_rule(ctx: EPContext, case: ContractCase) -> None:
    ep.register_backend("broadcast", BroadcastBackend)
    check_bias_rule(ctx, "broadcast", case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_out_of_tree_backend_meets_the_contract(case: ContractCase) -> None:
    run_ranks(check_registered, case.parallel("broadcast"), case)


def test_out_of_tree_backend_refuses_a_bias() -> None:
    case = ContractCase("bias", (3, 5))
    run_ranks(check_registered_bias_rule, case.parallel("broadcast"), case)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("layer_in_six_lines", "rank 0: [5, 64], load ["),
        ("whole_model", "rank 0: 26 tokens go on with ["),
        ("out_of_tree_backend", "rank 0: broadcast gave [3, 64]"),
    ],
)
def test_example_runs_alone(
    name: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", [name])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out


def test_example_runs_under_torchrun(tmp_path: Path) -> None:
    program = [str(ROOT / "examples" / "layer_in_six_lines.py")]
    finished = run_to_end([], tmp_path, launcher="torchrun", num_ranks=2, program=program)
    assert finished.returncode == 0, finished.stderr
    assert "rank 0: [5, 64], load [" in finished.stdout
    assert "rank 1: [6, 64], load [" in finished.stdout
