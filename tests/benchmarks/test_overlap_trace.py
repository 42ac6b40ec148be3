"""The record of the overlap's trace, from made-up times."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import overlap_trace
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan
from tests.ep_runtime.overlap_trace import (
    NUM_RANKS,
    NUM_TOKENS,
    TRACED,
    KernelSpan,
    kernel_spans,
)
from tests.ep_runtime.test_overlap_trace import made_trace
from tests.ep_runtime.virtual_layer import plan_virtual_layer


def traced(start_us: float) -> Any:
    """In place of a trace: a shared expert that begins there."""

    def trace_layer(overlap: str) -> tuple[Plan, list[KernelSpan]]:
        plan = plan_virtual_layer(
            TRACED,
            NUM_RANKS,
            torch.device("cpu"),
            experts="reference",
            overlap=overlap,
            max_tokens=NUM_TOKENS,
        )
        return plan, kernel_spans(made_trace(start_us if overlap == "auto" else 160, 30))

    return trace_layer


@pytest.mark.parametrize(("start_us", "status"), [(60, 0), (160, 1)])
def test_the_record_has_both_schedules_and_says_whether_it_overlapped(
    start_us: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap_trace, "trace_layer", traced(start_us))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: Machine.preset("h200x8").name)
    path = tmp_path / "trace.json"
    assert overlap_trace.main(["--json", str(path)]) == status
    record = json.loads(path.read_text())
    assert record["passed"] is (status == 0)
    assert record["overlap"]["schedule"] == "combine_window"
    assert record["no_overlap"]["schedule"] == "combine_joined"
    assert record["overlap"]["windows"][0]["beside_put_us"] == (30 if status == 0 else 0)
    assert "faults" not in record["no_overlap"]
    assert len(record["overlap"]["kernels"]) == len(kernel_spans(made_trace(60, 30)))
