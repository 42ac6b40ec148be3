"""The benchmark of the resident experts without a GPU: its rows, its reader, its record."""

import json
from functools import reduce
from operator import xor
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import resident_experts
from benchmarks.read_experts import ExpertsReader
from benchmarks.resident_contenders import Case, Layer
from benchmarks.resident_experts import cases_of, main, parse_arguments
from ep_runtime.kernels.base import ExpertWeights, RoutingSpec
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.routing import route_tokens
from tests.launch.processes import run_to_end

ROOT = Path(__file__).parents[2]
SIZES = ("--local-experts", "2", "--hidden-size", "32", "--intermediate-size", "16", "--top-k", "2")


@pytest.mark.parametrize("active", [1, 2, 3])
def test_every_row_chooses_the_active_experts_and_others_elsewhere(active: int) -> None:
    layer = Layer(
        torch.device("cpu"), num_local_experts=3, hidden_size=16, intermediate_size=16, top_k=4
    )
    _, logits = layer.make_rows(Case(5, 9, active))
    for ids in route_tokens(logits, RoutingSpec(9, 4), None).topk_ids.tolist():
        assert sorted(i for i in ids if i < 3) == list(range(active))


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (Case(1, 9, 3), None),
        (Case(1, 3, 3), "1 of top_k"),
        (Case(1, 9, 4), "active_experts (4) must be 1 to 3"),
        (Case(1, 9, 0), "active_experts (0) must be 1 to 3"),
    ],
)
def test_a_case_that_no_routing_can_make_says_why(case: Case, fault: str | None) -> None:
    found = case.fault(num_local_experts=3, top_k=4)
    if fault is None:
        assert found is None
    else:
        assert found is not None
        assert fault in found


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_the_reader_reads_each_word_of_the_first_experts_once(num_experts: int, name: str) -> None:
    """On a CPU more words than all programs' blocks together, and no whole number of them."""
    if name == "cpu" and not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process; run `pytest -m gpu`")
    device = torch.device(name)
    w13 = torch.randn(3, 150, 260, device=device).bfloat16()
    w2 = torch.randn(3, 130, 150, device=device).bfloat16()
    read = ExpertsReader(device)(ExpertWeights(w13, w2), num_experts)
    words = w2[:num_experts].view(torch.int16).flatten().tolist()
    assert reduce(xor, read.flatten().tolist()) == reduce(xor, words)


def test_options_that_no_launch_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tokens", "1,65"]) == 2
    assert "--tokens 1,65: a resident launch takes 1 to 64" in capsys.readouterr().err
    assert main(["--active-experts", "1;2"]) == 2
    assert "--active-experts 1;2: numbers with commas, as 1,8" in capsys.readouterr().err


def test_options_of_which_no_case_can_be_made_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(resident_experts, "is_interpreting", lambda: True)
    given = ["--tokens", "3", "--num-experts", "2", "--active-experts", "1", *SIZES]
    assert main([*given, "--json", str(tmp_path / "r.json")]) == 2
    assert "error: no case can be measured; of the first: 1 of top_k" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()


def test_every_combination_is_a_case() -> None:
    options = parse_arguments(
        ["--tokens", "1,8", "--num-experts", "8,256", "--active-experts", "4"]
    )
    assert list(cases_of(options)) == [
        *(Case(1, 8, 4), Case(8, 8, 4)),
        *(Case(1, 256, 4), Case(8, 256, 4)),
    ]


def test_a_record_holds_every_contender_and_what_was_left_out(tmp_path: Path) -> None:
    given = ("--tokens", "3", "--num-experts", "2,3", "--active-experts", "1", *SIZES)
    effort = ("--rounds", "1", "--turn-ms", "0.001")
    finished = run_to_end(
        [*given, *effort, "--json", str(tmp_path / "r.json")],
        ROOT,
        program=("-m", "benchmarks.resident_experts"),
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert record["command_line"].startswith("python -m benchmarks.resident_experts --tokens 3 ")
    assert record["environment"]["torch"] == torch.__version__
    assert record["passed"]
    (left_out,) = record["not_measured"]
    assert left_out["num_experts"] == 2
    assert "1 of top_k (2) slots must go to experts of other ranks" in left_out["reason"]
    (case,) = record["cases"]
    assert case["weight_bytes"] == 3 * 32 * 16 * 2
    contenders = case["contenders"]
    assert list(contenders) == ["triton", "route+triton", "resident", "read"]
    for name, one in contenders.items():
        median = one["times_us"]["median"]
        assert one["tb_per_s"] == pytest.approx(3072 / median / 1e6)
        other = contenders["triton"]["times_us"]["median"]
        assert one["speedup_over"]["triton"] == pytest.approx(other / median)
        assert (one["error"] is None) == (name == "read")
        assert name == "read" or 0 < one["error"]["total"] < 1e-2
