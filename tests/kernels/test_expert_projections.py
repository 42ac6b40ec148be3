"""The triton experts on the Hopper GEMMs: what these are given, and in how much workspace.

On the CPU the definitions (kernels/hopper_reference.py) stand in for the kernels.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels import expert_projections, triton_experts
from ep_runtime.kernels.base import ActivationKind, StandardExpertInput
from ep_runtime.kernels.hopper_gemm import project_gate_up_hopper
from ep_runtime.kernels.hopper_reference import (
    project_down_hopper_reference,
    project_gate_up_hopper_reference,
)
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.permute import permute_rows
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, quantize_rows_reference
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.tiles import HOPPER_BLOCK_M, choose_tiles
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.tolerances import assert_close

CASES = [
    ExpertsCase("top_3", 150, 3, 64, 32, top_k=3, dtype=torch.bfloat16, has_bias=True),
    ExpertsCase("top_1", 33, 4, 128, 64, 1, torch.float16, ActivationKind.RELU2),
]
# Of the first and of the second projection.
SCHEDULES = [HopperSchedule(num_stages=3), HopperSchedule(lead_blocks=2)]


class Hopper:
    """What the two projections were given, and whether a permuting pass ran."""

    def __init__(self) -> None:
        self.top_ks: list[int | None] = []
        self.schedules: list[HopperSchedule] = []
        self.permutes = 0

    def gate_up(
        self,
        rows: Tensor,
        w13: Tensor,
        tiles: Any,
        *,
        out: Tensor,
        schedule: HopperSchedule,
        **given: Any,
    ) -> None:
        self.schedules.append(schedule)
        expected = project_gate_up_hopper_reference(rows, w13, tiles, **given)
        _write(out, expected)

    def down(
        self,
        rows: Tensor,
        w2: Tensor,
        tiles: Any,
        *,
        out: Tensor,
        schedule: HopperSchedule,
        **given: Any,
    ) -> None:
        self.schedules.append(schedule)
        _write(out, project_down_hopper_reference(rows, w2, tiles, **given))


def _write(out: Tensor, expected: Tensor) -> None:
    is_written = ~expected.isnan().any(1)
    out[is_written] = expected[is_written].to(out.dtype)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Hopper:
    found = Hopper()

    def choose(*given: Any) -> Any:
        return replace(
            choose_tiles(*given),
            block_m=HOPPER_BLOCK_M,
            is_hopper=True,
            gate_up_schedule=SCHEDULES[0],
            down_schedule=SCHEDULES[1],
        )

    gate_up: Callable[..., None] = found.gate_up
    if device.type == "cuda":
        gate_up = project_gate_up_hopper

    def noting_gate_up(*given: Any, top_k: int | None, **named: Any) -> None:
        found.top_ks.append(top_k)
        gate_up(*given, top_k=top_k, **named)

    def noting_permute(*given: Any, **named: Any) -> None:
        found.permutes += 1
        permute_rows(*given, **named)

    monkeypatch.setattr(triton_experts, "choose_tiles", choose)
    monkeypatch.setattr(expert_projections, "project_gate_up_hopper", noting_gate_up)
    monkeypatch.setattr(expert_projections, "permute_rows", noting_permute)
    if device.type == "cpu":
        monkeypatch.setattr(expert_projections, "project_down_hopper", found.down)
    return found


def check(case: ExpertsCase, expert_input: StandardExpertInput, rows: Tensor) -> None:
    """Run in exactly the promised workspace, all NaN; rows: what the reference gets."""
    device, kernel = rows.device, TritonExperts(case.shape)
    workspace = poisoned_workspace(device, kernel.workspace_bytes(case.num_rows))
    output = kernel.run(expert_input, case.weights(device), workspace)
    assert not workspace.overflowed
    plain = replace(expert_input, hidden_states=rows, scales=None)
    expected = ReferenceExperts(case.shape).run(plain, case.weights(device), Workspace(device))
    assert_close(output, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_in_the_weights_dtype_are_gathered_without_a_pass(
    case: ExpertsCase, hopper: Hopper, device: torch.device
) -> None:
    expert_input = case.expert_input(device)
    expert_input.hidden_states[(expert_input.topk_ids < 0).all(1)] = torch.nan
    clean = expert_input.hidden_states.nan_to_num()
    check(case, expert_input, clean)
    assert (hopper.top_ks, hopper.permutes) == ([case.top_k], 0)
    assert device.type == "cuda" or hopper.schedules == SCHEDULES, "the tiles' own"


def test_rows_with_gaps_between_them_are_gathered(hopper: Hopper, device: torch.device) -> None:
    case = CASES[0]
    expert_input = case.expert_input(device)
    dense = expert_input.hidden_states
    wide = torch.full((len(dense), 96), torch.nan, dtype=dense.dtype, device=device)
    wide[:, 8:72] = dense
    check(case, replace(expert_input, hidden_states=wide[:, 8:72]), dense)
    assert (hopper.top_ks, hopper.permutes) == ([3], 0)


def test_rows_that_no_16_byte_copy_fits_are_permuted(hopper: Hopper, device: torch.device) -> None:
    case = CASES[0]
    expert_input = case.expert_input(device)
    dense = expert_input.hidden_states
    wide = torch.full((len(dense), 96), torch.nan, dtype=dense.dtype, device=device)
    wide[:, 4:68] = dense
    check(case, replace(expert_input, hidden_states=wide[:, 4:68]), dense)
    assert (hopper.top_ks, hopper.permutes) == ([None], 1)


def test_e4m3_rows_are_permuted_and_dequantised(hopper: Hopper, device: torch.device) -> None:
    case = CASES[0]
    expert_input = case.expert_input(device)
    values, scales = quantize_rows_reference(expert_input.hidden_states)
    rows = dequantize_rows(values, scales, case.dtype)
    check(case, replace(expert_input, hidden_states=values, scales=scales), rows)
    assert (hopper.top_ks, hopper.permutes) == ([None], 1)
