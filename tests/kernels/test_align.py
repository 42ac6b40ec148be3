"""Aligning against its definition: indices exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.kernels.align import (
    AlignedSlots,
    align_slots,
    align_slots_reference,
    align_workspace_bytes,
    max_tiles,
)
from ep_runtime.kernels.base import StandardExpertInput
from ep_runtime.kernels.interpreter import is_interpreting
from tests.kernels.cases import poisoned_workspace


def input_of(ids: torch.Tensor, num_rows: int | None = None) -> StandardExpertInput:
    bound = None
    if num_rows is not None:
        bound = torch.tensor([num_rows], dtype=torch.int32, device=ids.device)
    unused = torch.empty(0, device=ids.device)
    return StandardExpertInput(unused, ids, unused, bound)


def align(
    expert_input: StandardExpertInput, num_experts: int, block_m: int
) -> tuple[AlignedSlots, list[int]]:
    """Align in a poisoned workspace of exactly the promised size; gives the valid slots too."""
    ids = expert_input.topk_ids
    workspace = poisoned_workspace(ids.device, align_workspace_bytes(ids.numel(), num_experts))
    aligned = align_slots(
        expert_input, num_local_experts=num_experts, block_m=block_m, workspace=workspace
    )
    assert not workspace.overflowed
    assert workspace.peak_bytes == workspace.num_bytes
    return aligned, aligned.slots[: int(aligned.expert_ends[-1])].tolist()


def assert_equals_reference(
    expert_input: StandardExpertInput, num_experts: int, block_m: int
) -> None:
    aligned, slots = align(expert_input, num_experts, block_m)
    expected = align_slots_reference(expert_input, num_local_experts=num_experts, block_m=block_m)
    num_tiles = int(expected.num_tiles)
    assert int(aligned.num_tiles) == num_tiles <= aligned.max_tiles
    assert slots == expected.slots.tolist()
    assert torch.equal(aligned.expert_ends, expected.expert_ends)
    assert torch.equal(aligned.tile_experts[:num_tiles], expected.tile_experts)
    assert torch.equal(aligned.tile_starts[:num_tiles], expected.tile_starts)


@pytest.mark.parametrize("num_experts", [1, 3, 64, 128, 160, 257, 512, 1024, 1025])
@pytest.mark.parametrize("num_slots", [0, 1, 4, 33, 1024])
def test_each_valid_slot_exactly_once(
    device: torch.device, num_experts: int, num_slots: int
) -> None:
    generator = torch.Generator().manual_seed(num_slots)
    ids = torch.randint(-2, num_experts + 2, (num_slots, 1), generator=generator)
    ids = ids.to(device, torch.int32)
    _, slots = align(input_of(ids), num_experts, block_m=16)
    flat = ids.flatten().tolist()
    assert sorted(slots) == [s for s, expert in enumerate(flat) if 0 <= expert < num_experts]
    assert_equals_reference(input_of(ids), num_experts, block_m=16)


def test_docstring_example(device: torch.device) -> None:
    ids = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32, device=device)
    aligned, slots = align(input_of(ids), 3, block_m=16)
    assert slots == [0, 1, 2]
    assert aligned.expert_ends.tolist() == [1, 1, 3]
    assert aligned.num_tiles.tolist() == [2]
    assert aligned.tile_experts[:2].tolist() == [0, 2]
    assert aligned.tile_starts[:2].tolist() == [0, 1]


@pytest.mark.parametrize("num_rows", [0, 1, 700, 1500])
def test_rows_from_num_rows_on_are_left_out(device: torch.device, num_rows: int) -> None:
    # 3000 slots: several chunks, on the CPU too.
    ids = torch.randint(0, 7, (1500, 2), generator=torch.Generator().manual_seed(1))
    expert_input = input_of(ids.to(device, torch.int32), num_rows)
    _, slots = align(expert_input, 7, block_m=64)
    assert len(slots) == 2 * num_rows
    assert_equals_reference(expert_input, 7, block_m=64)


def test_all_slots_of_one_expert(device: torch.device) -> None:
    ids = torch.full((600, 4), 5, dtype=torch.int32, device=device)
    aligned, slots = align(input_of(ids), 9, block_m=32)
    assert slots == list(range(2400))
    assert aligned.tile_starts[:75].tolist() == list(range(0, 2400, 32))


def test_no_valid_slot_gives_no_tile(device: torch.device) -> None:
    ids = torch.tensor([[-1, 99], [2**31 - 1, -(2**31)]], dtype=torch.int32, device=device)
    aligned, slots = align(input_of(ids), 9, block_m=32)
    assert slots == []
    assert aligned.num_tiles.tolist() == [0]


def test_int64_and_strided_ids(device: torch.device) -> None:
    wide = torch.randint(-1, 5, (40, 8), generator=torch.Generator().manual_seed(2)).to(device)
    assert_equals_reference(input_of(wide[:, ::2]), 5, block_m=16)
    assert_equals_reference(input_of(wide.T.to(torch.int32)), 5, block_m=16)
    large = wide.clone()
    large[0, 0] = 2**32  # would be expert 0 if it were cut to 32 bits
    assert_equals_reference(input_of(large), 5, block_m=16)


def test_more_slots_take_no_less_workspace() -> None:
    sizes = [align_workspace_bytes(n, 40) for n in range(0, 3000, 7)]
    assert sizes == sorted(sizes)


@pytest.mark.skipif(not is_interpreting(), reason="a property of the CPU run")
@given(
    num_experts=st.integers(1, 40),
    block_m=st.sampled_from([16, 32, 128]),
    top_k=st.integers(1, 4),
    data=st.data(),
)
@settings(deadline=None, max_examples=25)
def test_alignment_properties(
    num_experts: int, block_m: int, top_k: int, data: st.DataObject
) -> None:
    row = st.lists(st.integers(-2, num_experts + 1), min_size=top_k, max_size=top_k)
    rows = data.draw(st.lists(row, max_size=30))
    num_rows = data.draw(st.none() | st.integers(0, len(rows)))
    ids = torch.tensor(rows, dtype=torch.int32).view(-1, top_k)
    aligned, slots = align(input_of(ids, num_rows), num_experts, block_m)
    flat = [expert for row in rows[:num_rows] for expert in row]
    valid = [s for s, expert in enumerate(flat) if 0 <= expert < num_experts]
    assert slots == sorted(valid, key=lambda s: (flat[s], s))
    num_tiles = int(aligned.num_tiles)
    assert num_tiles <= max_tiles(ids.numel(), num_experts, block_m) == aligned.max_tiles
    covered = []
    for expert, start in zip(
        aligned.tile_experts[:num_tiles].tolist(),
        aligned.tile_starts[:num_tiles].tolist(),
        strict=True,
    ):
        tile = slots[start : min(start + block_m, int(aligned.expert_ends[expert]))]
        assert tile
        assert {flat[s] for s in tile} == {expert}
        covered += tile
    assert covered == slots
