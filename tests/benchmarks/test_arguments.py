"""Options that a benchmark cannot run with are one line and exit status 2, never a traceback."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from benchmarks import (
    experts_peers,
    marlin_streams,
    overlap_trace,
    resident_experts,
    symm_mem_launches,
)
from benchmarks.arguments import status_of
from ep_runtime.kernels.errors import ConfigError, EPRuntimeError, PlanError, RankFailure

MAINS: dict[str, Callable[[Sequence[str]], int]] = {
    "experts_peers": experts_peers.main,
    "resident_experts": resident_experts.main,
    "symm_mem_launches": symm_mem_launches.main,
    "marlin_streams": marlin_streams.main,
    "overlap_trace": overlap_trace.main,
}
SMALL = ("--tokens-per-rank", "1", "--hidden-size", "16", "--num-experts", "2", "--top-k", "2")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def status(name: str, *arguments: str) -> object:
    """As the shell sees it, whether the parser or the command refuses."""
    try:
        return MAINS[name](arguments)
    except SystemExit as exit:
        return exit.code


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        *[
            ("symm_mem_launches", ["--tokens-per-rank", text], f"{text!r}: positive numbers with")
            for text in ("a", "0", "1,-8", "1,", "1;8", "1.5")
        ],
        *[
            ("symm_mem_launches", [option, "0"], "0: must be a whole number above 0")
            for option in ("--ranks", "--hidden-size", "--num-experts", "--top-k")
        ],
        *[
            ("resident_experts", [option, text], f"{text}: must be a whole number above 0")
            for option in ("--local-experts", "--hidden-size", "--top-k", "--rounds")
            for text in ("0", "x")
        ],
        ("resident_experts", ["--turn-ms", "0"], "0: must be a number above 0"),
        ("resident_experts", ["--tokens", "1,x"], "--tokens 1,x: numbers with commas"),
        ("experts_peers", ["measure", "--tokens-per-rank", "a"], "'a': positive numbers with"),
        ("experts_peers", ["measure", "--rounds", "0"], "0: must be a whole number above 0"),
        ("experts_peers", ["measure", "--turn-ms", "nan"], "nan: must be a number above 0"),
        ("experts_peers", ["warm", "--processes", "0"], "0: must be a whole number above 0"),
        ("marlin_streams", ["--seconds", "-1"], "-1: must be a number above 0"),
        ("marlin_streams", ["--scenarios", "none"], "--scenarios none: is unknown"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_option_is_one_line(
    name: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(name, *arguments) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert "error: " in last


@without_gpu
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("experts_peers", ["measure"]),
        ("experts_peers", ["compile"]),
        ("marlin_streams", []),
        ("overlap_trace", []),
    ],
)
def test_a_benchmark_of_a_gpu_says_that_there_is_none(
    name: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(name, *arguments) == 2
    assert "CUDA device" in capsys.readouterr().err.splitlines()[-1]


def test_what_a_launch_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As without a GPU and without TRITON_INTERPRET."""

    def refuse(*given: Any) -> None:
        raise PlanError("a Triton kernel was given tensors on the CPU")

    monkeypatch.setattr(symm_mem_launches, "measure_copy", lambda device: None)
    monkeypatch.setattr(symm_mem_launches, "measure_case", refuse)
    monkeypatch.setattr(symm_mem_launches, "VirtualRanks", lambda *given: None)
    assert status("symm_mem_launches", *SMALL) == 2
    said = capsys.readouterr().err
    assert said == "error: a Triton kernel was given tensors on the CPU\n"


@pytest.mark.parametrize("error", [ConfigError, PlanError, RankFailure])
def test_every_error_of_ours_is_a_line_and_others_are_not_hidden(
    error: type[EPRuntimeError], capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        raise error("what and why")

    assert status_of(run) == 2
    assert capsys.readouterr().err == "error: what and why\n"
    assert status_of(lambda: 1) == 1

    def fail() -> int:
        raise RuntimeError("a fault of the program")

    with pytest.raises(RuntimeError, match="a fault of the program"):
        status_of(fail)
