"""Each launch of the triton experts against its own definition, on poisoned outputs."""

import pytest
import torch

from ep_runtime.kernels.align import AlignedSlots, align_slots_reference
from ep_runtime.kernels.grouped_gemm import (
    project_down,
    project_down_reference,
    project_gate_up,
    project_gate_up_reference,
)
from ep_runtime.kernels.tiles import GemmTiles, choose_tiles
from ep_runtime.kernels.weighted_sum import sum_weighted_slots, sum_weighted_slots_reference
from tests.kernels.cases import EXPERTS_CASES, ExpertsCase
from tests.tolerances import assert_close

CASES = [case for case in EXPERTS_CASES if case.num_rows < 50]


def prepared(case: ExpertsCase, device: torch.device) -> tuple[AlignedSlots, GemmTiles]:
    tiles = choose_tiles(case.num_rows, case.shape)
    aligned = align_slots_reference(
        case.expert_input(device), num_local_experts=case.num_experts, block_m=tiles.block_m
    )
    return aligned, tiles


def poisoned(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(size, torch.nan, dtype=dtype, device=device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_up_equals_its_definition(case: ExpertsCase, device: torch.device) -> None:
    aligned, tiles = prepared(case, device)
    rows, weights, activation = (
        case.expert_input(device).hidden_states,
        case.weights(device),
        case.shape.activation,
    )
    size = (case.num_rows * case.top_k, case.intermediate_size)
    out = poisoned(*size, dtype=case.dtype, device=device)
    expected = out.clone()
    project_gate_up(rows, weights, aligned, activation=activation, tiles=tiles, out=out)
    project_gate_up_reference(rows, weights, aligned, activation=activation, out=expected)
    num_valid = len(aligned.slots)
    assert_close(out[:num_valid], expected[:num_valid])
    assert out[num_valid:].isnan().all(), "wrote beyond the valid positions"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_down_equals_its_definition(case: ExpertsCase, device: torch.device) -> None:
    aligned, tiles = prepared(case, device)
    weights, num_slots = case.weights(device), case.num_rows * case.top_k
    num_valid = len(aligned.slots)
    activated = poisoned(num_slots, case.intermediate_size, dtype=case.dtype, device=device)
    generator = torch.Generator().manual_seed(9)
    activated[:num_valid] = torch.randn(num_valid, case.intermediate_size, generator=generator).to(
        device, case.dtype
    )
    out = poisoned(num_slots, case.hidden_size, dtype=torch.float32, device=device)
    expected = out.clone()
    project_down(activated, weights, aligned, tiles=tiles, out=out)
    project_down_reference(activated, weights, aligned, out=expected)
    assert torch.equal(out.isnan(), expected.isnan()), "wrote a slot that has no expert, or not one"
    # float32 out of float32 sums, whatever the dtype of the operands.
    assert_close(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("num_rows", [None, 0, 5])
def test_weighted_sum_equals_its_definition(num_rows: int | None, device: torch.device) -> None:
    case = ExpertsCase("sum", hidden_size=300, top_k=3)
    expert_input = case.expert_input(device)
    if num_rows is not None:
        bound = torch.tensor([num_rows], dtype=torch.int32, device=device)
        expert_input = expert_input.__class__(
            expert_input.hidden_states, expert_input.topk_ids, expert_input.topk_weights, bound
        )
    slot_outputs = poisoned(19 * 3, 300, dtype=torch.float32, device=device)
    valid = (expert_input.topk_ids >= 0).flatten()
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(19 * 3, 300, generator=generator).to(device)
    slot_outputs[valid] = values[valid]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = poisoned(300, 19, dtype=dtype, device=device).T  # a strided output
        expected = torch.empty_like(out)
        arguments = {"num_local_experts": case.num_experts}
        sum_weighted_slots(slot_outputs, expert_input, out=out, **arguments)
        sum_weighted_slots_reference(slot_outputs, expert_input, out=expected, **arguments)
        assert_close(out, expected)
        assert not out.isnan().any()
