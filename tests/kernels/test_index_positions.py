"""From positions back to rows, against the definitions: interpreted on the CPU, or on CUDA."""

from dataclasses import replace

import pytest
import torch

from ep_runtime.kernels.align_blocks import AlignedSlots, align_slots
from ep_runtime.kernels.base import StandardExpertInput
from ep_runtime.kernels.index_positions import index_positions, index_positions_reference
from ep_runtime.kernels.sum_slots import sum_slots, sum_slots_reference
from tests.kernels.cases import ExpertsCase, poisoned_workspace

CASES = [
    ExpertsCase("several_tiles_an_expert", num_rows=90, num_experts=3, top_k=3),
    ExpertsCase("one_slot", num_rows=1, num_experts=1, top_k=1),
    ExpertsCase("an_odd_size", num_rows=33, num_experts=6, hidden_size=300),
]


def test_the_example_of_the_docstring(device: torch.device) -> None:
    slots = torch.tensor([0, 4, *[5] * 14, 1, 2, *[5] * 14], dtype=torch.int32, device=device)
    experts, order, num_tiles, num_tall_tiles = (
        torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2], [1, 0], [2], [0])
    )
    aligned = AlignedSlots(slots, experts, order, num_tiles, num_tall_tiles, 2, 16, 5)
    position_experts, slot_positions = (
        torch.full((size,), -9, dtype=torch.int32, device=device) for size in (32, 5)
    )
    index_positions(aligned, position_experts=position_experts, slot_positions=slot_positions)
    assert position_experts.tolist() == [0, 0, *[-1] * 14, 2, 2, *[-1] * 14]
    assert slot_positions.tolist() == [0, 16, 17, -9, 1]


@pytest.mark.parametrize("num_rows", [None, 0, 20])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_positions_and_sums_are_those_of_the_definitions(
    case: ExpertsCase, num_rows: int | None, device: torch.device
) -> None:
    """In poisoned memory; what belongs to no slot is never read."""
    expert_input: StandardExpertInput = case.expert_input(device)
    if num_rows is not None:
        count = torch.tensor([num_rows], dtype=torch.int32, device=device)
        expert_input = replace(expert_input, num_rows=count)
    num_experts, num_slots = case.num_experts, case.num_rows * case.top_k
    workspace = poisoned_workspace(device, 1 << 16)
    aligned = align_slots(
        expert_input, num_local_experts=num_experts, block_m=16, workspace=workspace
    )
    num_positions = aligned.max_tiles * 16
    tables = []
    for index in (index_positions, index_positions_reference):
        experts, positions = (
            torch.full((size,), -9, dtype=torch.int32, device=device)
            for size in (num_positions, num_slots)
        )
        index(aligned, position_experts=experts, slot_positions=positions)
        tables.append((experts, positions))
    assert torch.equal(tables[0][0], tables[1][0])
    assert torch.equal(tables[0][1], tables[1][1])
    outputs = torch.randn(num_positions, case.hidden_size, device=device)
    outputs[tables[0][0] < 0] = torch.nan
    sums = []
    for add in (sum_slots, sum_slots_reference):
        out = torch.full((case.num_rows, case.hidden_size), torch.nan, device=device)
        add(
            outputs,
            expert_input,
            num_local_experts=num_experts,
            out=out,
            slot_positions=tables[0][1],
        )
        sums.append(out)
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6, atol=1e-6)
    assert not sums[0].isnan().any()
