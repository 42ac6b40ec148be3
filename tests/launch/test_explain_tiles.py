"""`explain` says which GEMM a layer of packed weights gets, and refuses a table without effect."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.tile_tables import forget_tile_tables
from ep_runtime.launch.explain import explain_plan
from ep_runtime.machine import Machine
from tests.launch.configs import write_config

H200 = Machine.preset("h200x8")
HOPPER = "  tiles: the packed Hopper GEMM, by its own rule; tile tables have no effect"
INT4 = "{weight: int4_w4a16, group_size: 128}"
INT8 = "{weight: int8_w8a16, group_size: 128}"


@pytest.fixture
def explain(tmp_path: Path) -> Any:
    """The lines, of a machine that is told to the command by a doctor's file."""

    def lines_of(quantization: str, machine: Machine, *overrides: str) -> list[str]:
        sizes = "hidden_size: 1152, moe_intermediate_size: 640, num_experts: 4, top_k: 2"
        text = f"model: {{layer: {{{sizes}, quantization: {quantization}}}}}\n"
        file = write_config(tmp_path, f"{text}workload: {{tokens_per_rank: [1]}}\n")
        told = tmp_path / "doctor.json"
        told.write_text(json.dumps({"machine": machine.to_dict()}))
        return explain_plan(str(file), overrides, machine=str(told)).explain().splitlines()

    yield lines_of
    forget_tile_tables()


@pytest.fixture
def with_table(tmp_path: Path) -> str:
    values = {"schema_version": 1, "device": "A", "triton": "1", "source": "a test", "layers": []}
    (tmp_path / "t.json").write_text(json.dumps(values))
    return "kernel.tile_table=" + str(tmp_path / "t.json")


@pytest.mark.parametrize("quantization", [INT4, "mxfp4"])
def test_the_packed_hopper_gemm_is_told_by_the_machine_that_is_named(
    quantization: str, explain: Any
) -> None:
    assert HOPPER in explain(quantization, H200)
    other = replace(H200, name="NVIDIA A100", compute_capability=(8, 0))
    (line,) = (one for one in explain(quantization, other) if one.startswith("  tiles"))
    assert line.startswith("  tiles: the packed Triton GEMM, the rule: no table of NVIDIA A100")


@pytest.mark.parametrize("quantization", [INT4, "mxfp4"])
def test_a_table_for_a_layer_that_has_no_tiles_is_refused(
    quantization: str, explain: Any, with_table: str
) -> None:
    said = (
        r"kernel.tile_table \(.*t.json\) has no effect on NVIDIA H200: .*packed Hopper GEMM.*drop"
    )
    with pytest.raises(PlanError, match=said):
        explain(quantization, H200, with_table)
    explain(quantization, replace(H200, compute_capability=(8, 0)), with_table)
    explain(INT8, H200, with_table)


def test_a_table_for_a_kernel_without_tiles_is_refused(explain: Any, with_table: str) -> None:
    ready = replace(H200, packages=("vllm",))
    with pytest.raises(PlanError, match="has no effect on NVIDIA H200: experts marlin, which has"):
        explain(INT8, ready, with_table, "kernel.experts=marlin")
