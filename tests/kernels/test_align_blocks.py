"""Aligning into whole tiles against its definition: indices exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.kernels import align_blocks, align_chunks
from ep_runtime.kernels.align_batched import (
    align_batched_rows,
    align_batched_rows_reference,
    align_batched_workspace_bytes,
    max_batched_tiles,
)
from ep_runtime.kernels.align_blocks import (
    AlignedSlots,
    align_slots,
    align_slots_reference,
    align_workspace_bytes,
    max_tiles,
)
from ep_runtime.kernels.base import BatchedExpertInput, StandardExpertInput
from ep_runtime.kernels.interpreter import is_interpreting
from tests.kernels.cases import poisoned_workspace


@pytest.fixture(params=["program_each_expert", "program_each_chunk"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the two kernels, whichever the number of slots would choose on this device."""
    few = request.param == "program_each_expert"
    monkeypatch.setattr(align_blocks, "_has_few_slots", lambda num_slots: few)
    return str(request.param)


def input_of(ids: torch.Tensor, num_rows: int | None = None) -> StandardExpertInput:
    bound = None
    if num_rows is not None:
        bound = torch.tensor([num_rows], dtype=torch.int32, device=ids.device)
    unused = torch.empty(0, device=ids.device)
    return StandardExpertInput(unused, ids, unused, bound)


def batched_input_of(
    counts: list[int], capacity: int, device: torch.device | None = None
) -> BatchedExpertInput:
    rows = torch.empty(len(counts), capacity, 0, device=device)
    return BatchedExpertInput(rows, torch.tensor(counts, dtype=torch.int32, device=device))


def align(expert_input: StandardExpertInput, num_experts: int, block_m: int) -> AlignedSlots:
    """Align in a poisoned workspace of exactly the promised size."""
    ids = expert_input.topk_ids
    num_bytes = align_workspace_bytes(ids.numel(), num_experts, block_m)
    workspace = poisoned_workspace(ids.device, num_bytes)
    aligned = align_slots(
        expert_input, num_local_experts=num_experts, block_m=block_m, workspace=workspace
    )
    assert not workspace.overflowed
    assert workspace.peak_bytes == workspace.num_bytes
    return aligned


def align_batched(
    expert_input: BatchedExpertInput, block_m: int, max_rows: int | None = None
) -> AlignedSlots:
    """The same for batched rows."""
    num_experts, capacity, _ = expert_input.hidden_states.shape
    num_bytes = align_batched_workspace_bytes(num_experts, capacity, block_m, max_rows)
    workspace = poisoned_workspace(expert_input.hidden_states.device, num_bytes)
    aligned = align_batched_rows(
        expert_input, block_m=block_m, workspace=workspace, max_rows=max_rows
    )
    assert not workspace.overflowed
    assert workspace.peak_bytes == workspace.num_bytes
    return aligned


def assert_equal(aligned: AlignedSlots, expected: AlignedSlots) -> None:
    """Bit-equal where written; everything behind it still as the poison left it."""
    num_tiles = int(expected.num_tiles)
    assert aligned.num_tiles.tolist() == [num_tiles]
    assert num_tiles <= aligned.max_tiles == expected.max_tiles
    assert (aligned.block_m, aligned.num_slots) == (expected.block_m, expected.num_slots)
    for table, written in (
        (aligned.slots, expected.slots),
        (aligned.tile_experts, expected.tile_experts),
    ):
        assert table.dtype is torch.int32
        assert torch.equal(table[: len(written)], written)
        assert (table[len(written) :] == -1).all(), "past the last tile nothing is written"
    assert len(aligned.slots) == aligned.max_tiles * aligned.block_m
    assert len(aligned.tile_experts) == aligned.max_tiles
    num_tall = int(expected.num_tall_tiles)
    assert aligned.num_tall_tiles.tolist() == [num_tall]
    tall, unwritten, others = aligned.tile_order.split(
        [num_tall, aligned.max_tiles - num_tiles, num_tiles - num_tall]
    )
    assert torch.equal(torch.cat([tall, others]), expected.tile_order)
    assert (unwritten == -1).all(), "between tall and other tiles nothing is written"


def assert_equals_reference(
    expert_input: StandardExpertInput, num_experts: int, block_m: int
) -> AlignedSlots:
    aligned = align(expert_input, num_experts, block_m)
    expected = align_slots_reference(expert_input, num_local_experts=num_experts, block_m=block_m)
    assert_equal(aligned, expected)
    return aligned


def assert_batched_equals_reference(
    expert_input: BatchedExpertInput, block_m: int, max_rows: int | None = None
) -> AlignedSlots:
    aligned = align_batched(expert_input, block_m, max_rows)
    expected = align_batched_rows_reference(expert_input, block_m=block_m, max_rows=max_rows)
    assert_equal(aligned, expected)
    return aligned


def random_ids(num_slots: int, num_experts: int, top_k: int = 1) -> torch.Tensor:
    """Local ids, -1 and others out of range on both sides."""
    generator = torch.Generator().manual_seed(num_slots)
    ids = torch.randint(-2, num_experts + 2, (num_slots // top_k, top_k), generator=generator)
    return ids.to(torch.int32)


@pytest.mark.parametrize("num_experts", [1, 3, 64, 128, 160, 257, 512, 1024, 1025])
@pytest.mark.parametrize("num_slots", [0, 1, 4, 33, 1024])
def test_each_valid_slot_exactly_once(
    device: torch.device, num_experts: int, num_slots: int
) -> None:
    ids = random_ids(num_slots, num_experts).to(device)
    aligned = assert_equals_reference(input_of(ids), num_experts, block_m=16)
    placed = aligned.slots[: 16 * int(aligned.num_tiles)].tolist()
    valid = [s for s, expert in enumerate(ids.flatten().tolist()) if 0 <= expert < num_experts]
    assert sorted(slot for slot in placed if slot != num_slots) == valid


@pytest.mark.parametrize(("num_experts", "num_slots"), [(1, 0), (3, 1), (40, 33), (20, 1024)])
def test_a_program_for_each_expert_places_the_same(
    device: torch.device, num_experts: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align_blocks, "_has_few_slots", lambda num_slots: True)
    ids = random_ids(num_slots, num_experts).to(device)
    assert_equals_reference(input_of(ids), num_experts, block_m=16)


def test_experts_counted_in_several_blocks(
    device: torch.device, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align_chunks, "MAX_BLOCK_EXPERTS", 32)
    for num_experts in (32, 37):
        ids = random_ids(1000, num_experts).to(device)
        assert_equals_reference(input_of(ids), num_experts, block_m=16)


def test_docstring_example(device: torch.device, kernel: str) -> None:
    ids = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32, device=device)
    aligned = align(input_of(ids), 3, block_m=16)
    assert aligned.num_slots == 4
    assert aligned.num_tiles.tolist() == [2]
    assert aligned.max_tiles == 3
    assert aligned.tile_experts[:2].tolist() == [0, 2]
    assert aligned.num_tall_tiles.tolist() == [0]
    assert aligned.tile_order.tolist() == [-1, 1, 0]
    assert aligned.slots[:32].tolist() == [0] + 15 * [4] + [1, 2] + 14 * [4]
    assert (aligned.slots[32:] == -1).all()


@pytest.mark.parametrize("num_rows", [-1, 0, 1, 700, 1500, 1501, 2**31 - 1])
def test_rows_from_num_rows_on_are_left_out(
    device: torch.device, kernel: str, num_rows: int
) -> None:
    ids = torch.randint(0, 7, (1500, 2), generator=torch.Generator().manual_seed(1))
    expert_input = input_of(ids.to(device, torch.int32), num_rows)
    aligned = assert_equals_reference(expert_input, 7, block_m=64)
    placed = aligned.slots[: 64 * int(aligned.num_tiles)]
    assert int((placed != 3000).sum()) == 2 * min(max(num_rows, 0), 1500)


@pytest.mark.parametrize("block_m", [16, 32, 128])
def test_tiles_of_more_than_half_come_from_the_front_and_others_from_the_back(
    device: torch.device, kernel: str, block_m: int
) -> None:
    half = block_m // 2
    counts = [1, half, half + 1, block_m, 0, block_m + half, block_m + half + 1, 2 * block_m + 1]
    experts = torch.arange(8).repeat_interleave(torch.tensor(counts))
    order = torch.randperm(len(experts), generator=torch.Generator().manual_seed(3))
    ids = experts[order].to(device, torch.int32)[:, None]
    aligned = assert_equals_reference(input_of(ids), 8, block_m)
    # Tiles of (1), (half), (half + 1), (full), (full, half), (full, half + 1), (full, full, 1).
    tall, others = [2, 3, 4, 6, 7, 8, 9], [0, 1, 5, 10]
    assert aligned.num_tall_tiles.tolist() == [len(tall)]
    assert aligned.tile_order[: len(tall)].tolist() == tall
    assert aligned.tile_order[-len(others) :].flip(0).tolist() == others
    rows = batched_input_of(counts, max(counts), device)
    batched = assert_batched_equals_reference(rows, block_m)
    assert batched.tile_order[: len(tall)].tolist() == tall
    assert batched.tile_order[-len(others) :].flip(0).tolist() == others


@pytest.mark.parametrize("max_programs", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [None, 0, 513, 2200, 4500])
def test_chunks_of_several_blocks(
    device: torch.device,
    max_programs: int,
    num_rows: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(align_blocks, "_has_few_slots", lambda num_slots: False)
    monkeypatch.setattr(align_chunks, "MAX_PROGRAMS", max_programs)
    ids = random_ids(9000, 33, top_k=2).to(device)  # 18 blocks placed, three counted
    assert_equals_reference(input_of(ids, num_rows), 33, block_m=128)


def test_all_slots_of_one_expert(device: torch.device, kernel: str) -> None:
    ids = torch.full((600, 4), 5, dtype=torch.int32, device=device)
    aligned = assert_equals_reference(input_of(ids), 9, block_m=32)
    assert aligned.slots[:2400].tolist() == list(range(2400))
    assert aligned.num_tiles.tolist() == aligned.num_tall_tiles.tolist() == [75]


@pytest.mark.parametrize("num_experts", [0, 9])
def test_no_valid_slot_gives_no_tile(device: torch.device, kernel: str, num_experts: int) -> None:
    ids = torch.tensor([[-1, 99], [2**31 - 1, -(2**31)]], dtype=torch.int32, device=device)
    aligned = assert_equals_reference(input_of(ids), num_experts, block_m=32)
    assert aligned.num_tiles.tolist() == aligned.num_tall_tiles.tolist() == [0]


def test_no_slot_still_writes_num_tiles(device: torch.device, kernel: str) -> None:
    for shape in ((0, 4), (4, 0)):
        ids = torch.empty(shape, dtype=torch.int32, device=device)
        aligned = align(input_of(ids, 0), 9, block_m=16)
        assert aligned.num_tiles.tolist() == aligned.num_tall_tiles.tolist() == [0]


def test_int64_and_strided_ids(device: torch.device, kernel: str) -> None:
    wide = torch.randint(-1, 5, (40, 8), generator=torch.Generator().manual_seed(2)).to(device)
    assert_equals_reference(input_of(wide[:, ::2]), 5, block_m=16)
    assert_equals_reference(input_of(wide.T.to(torch.int32)), 5, block_m=16)
    assert_equals_reference(input_of(wide[:1].expand(40, 8)), 5, block_m=16)
    large = wide.clone()
    large[0, 0] = 2**32  # would be expert 0 if it were cut to 32 bits
    large[0, 1] = -(2**32) + 1
    assert_equals_reference(input_of(large), 5, block_m=16)


@pytest.mark.skipif(not is_interpreting(), reason="takes 8.6 GB of a GPU, none of a CPU's")
def test_slot_numbers_up_to_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(align_chunks, "MAX_PROGRAMS", 2)
    # Stride 0 and memory that is never touched: nothing of the size is really there.
    num_rows = (2**31 - 1) // 8
    ids = torch.tensor([[3, 0, 1, -1, 1, 3, 3, 9]], dtype=torch.int32).expand(num_rows, 8)
    bound = torch.tensor([2], dtype=torch.int32)
    unused = torch.empty(0)
    aligned = align_slots(
        StandardExpertInput(unused, ids, unused, bound),
        num_local_experts=4,
        block_m=16,
        workspace=poisoned_workspace(torch.device("cpu"), 0),
    )
    sentinel = 2**31 - 8
    assert aligned.num_tiles.tolist() == [3]
    assert aligned.tile_experts[:3].tolist() == [0, 1, 3]
    assert aligned.slots[:16].tolist() == [1, 9, *14 * [sentinel]]
    assert aligned.slots[16:32].tolist() == [2, 4, 10, 12, *12 * [sentinel]]
    assert aligned.slots[32:48].tolist() == [0, 5, 6, 8, 13, 14, *10 * [sentinel]]


def test_more_slots_than_int32_are_refused() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**28, 8)
    with pytest.raises(ValueError, match=r"has 2147483648 slots; the limit is 2147483647"):
        align_slots(
            input_of(ids),
            num_local_experts=1,
            block_m=16,
            workspace=poisoned_workspace(ids.device, 0),
        )


def test_more_slots_take_no_less_workspace() -> None:
    for block_m in (16, 128):
        sizes = [align_workspace_bytes(n, 40, block_m) for n in range(0, 3000, 7)]
        assert sizes == sorted(sizes)
        sizes = [align_batched_workspace_bytes(40, n, block_m) for n in range(0, 300)]
        assert sizes == sorted(sizes)


@pytest.mark.skipif(not is_interpreting(), reason="a property of the CPU run")
@given(
    num_experts=st.integers(1, 12),
    block_m=st.sampled_from([16, 32, 128]),
    top_k=st.integers(1, 4),
    few=st.booleans(),
    data=st.data(),
)
@settings(deadline=None, max_examples=20)
def test_alignment_properties(
    num_experts: int, block_m: int, top_k: int, few: bool, data: st.DataObject
) -> None:
    row = st.lists(st.integers(-2, num_experts + 1), min_size=top_k, max_size=top_k)
    rows = data.draw(st.lists(row, max_size=30))
    num_rows = data.draw(st.none() | st.integers(0, len(rows)))
    ids = torch.tensor(rows, dtype=torch.int32).view(-1, top_k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(align_blocks, "_has_few_slots", lambda num_slots: few)
        aligned = align(input_of(ids, num_rows), num_experts, block_m)
    flat = [expert for row in rows[:num_rows] for expert in row]
    valid = [s for s, expert in enumerate(flat) if 0 <= expert < num_experts]
    num_tiles = int(aligned.num_tiles)
    assert num_tiles <= max_tiles(ids.numel(), num_experts, block_m) == aligned.max_tiles
    positions = aligned.slots[: num_tiles * block_m].tolist()
    assert [s for s in positions if s != ids.numel()] == sorted(valid, key=lambda s: (flat[s], s))
    tall: list[int] = []
    for tile, expert in enumerate(aligned.tile_experts[:num_tiles].tolist()):
        inside = positions[tile * block_m : (tile + 1) * block_m]
        real = [s for s in inside if s != ids.numel()]
        assert real == inside[: len(real)]
        assert {flat[s] for s in real} == {expert}
        tall += [tile] if len(real) > block_m // 2 else []
    num_tall = int(aligned.num_tall_tiles)
    assert aligned.tile_order[:num_tall].tolist() == tall
    others = aligned.tile_order.flip(0)[: num_tiles - num_tall].tolist()
    assert others == [tile for tile in range(num_tiles) if tile not in tall]


@pytest.mark.parametrize("block_m", [16, 128])
def test_batched_rows_of_every_kind_of_count(device: torch.device, block_m: int) -> None:
    counts = [0, 1, 16, 17, 129, 300, 0, 128]
    aligned = assert_batched_equals_reference(batched_input_of(counts, 300, device), block_m)
    placed = aligned.slots[: block_m * int(aligned.num_tiles)].tolist()
    real = [slot for slot in placed if slot != 8 * 300]
    assert real == [e * 300 + i for e, count in enumerate(counts) for i in range(count)]


def test_batched_counts_are_clamped_to_the_capacity(device: torch.device) -> None:
    clamped = batched_input_of([5, 0, 3], 5, device)
    beyond = batched_input_of([2**31 - 1, -7, 3], 5, device)
    aligned = assert_batched_equals_reference(beyond, 16)
    assert_equal(aligned, align_batched_rows_reference(clamped, block_m=16))


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (3, 8)])
def test_no_batched_row_gives_no_tile(device: torch.device, shape: tuple[int, int]) -> None:
    num_experts, capacity = shape
    aligned = assert_batched_equals_reference(
        batched_input_of(num_experts * [0], capacity, device), 16
    )
    assert aligned.num_tiles.tolist() == aligned.num_tall_tiles.tolist() == [0]


def test_a_bound_on_the_rows_bounds_the_tiles(device: torch.device) -> None:
    expert_input = batched_input_of([0, 20, 0, 3], 1024, device)
    aligned = assert_batched_equals_reference(expert_input, 16, max_rows=23)
    assert aligned.max_tiles == 1 + 4 == max_batched_tiles(4, 1024, 16, 23)
    assert aligned.num_tiles.tolist() == [3]


def test_tiles_past_a_bound_that_is_too_low_are_never_written(device: torch.device) -> None:
    aligned = align_batched(batched_input_of([40, 40, 40], 64, device), 16, max_rows=20)
    assert aligned.max_tiles == 4
    assert aligned.num_tiles.tolist() == [4]
    assert aligned.tile_experts.tolist() == [0, 0, 0, 1]
    assert aligned.num_tall_tiles.tolist() == [3]
    assert aligned.tile_order.tolist() == [0, 1, 3, 2]
    assert aligned.slots[48:].tolist() == list(range(64, 80))


def test_batched_experts_in_several_blocks_and_long_runs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align_chunks, "MAX_BLOCK_EXPERTS", 32)
    counts = [5000 if e in (31, 33) else e % 3 for e in range(35)]
    strided = torch.tensor(counts, dtype=torch.int32, device=device)[:, None].expand(35, 2)
    rows = torch.empty(35, 5000, 0, device=device)
    expert_input = BatchedExpertInput(rows, strided.contiguous()[:, 1])
    assert_batched_equals_reference(expert_input, 128)


def test_more_batched_rows_than_int32_are_refused() -> None:
    rows = torch.empty(1, 1, 1).expand(2**16, 2**15, 1)
    expert_input = BatchedExpertInput(rows, torch.zeros(2**16, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"has 2147483648 rows; the limit is 2147483647"):
        align_batched_rows(
            expert_input, block_m=16, workspace=poisoned_workspace(torch.device("cpu"), 0)
        )
