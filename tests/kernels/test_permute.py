"""Permuted rows against their definition, bit by bit; padding as zeros, nothing else touched."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.align_batched import align_batched_rows_reference
from ep_runtime.kernels.align_blocks import AlignedSlots, align_slots_reference
from ep_runtime.kernels.base import BatchedExpertInput, ExpertInput, StandardExpertInput
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.permute import permute_rows, permute_rows_reference
from ep_runtime.kernels.quant.fp8_rows import num_groups, quantize_rows_reference

FP8 = torch.float8_e4m3fn
BF16 = torch.bfloat16
NUM_EXPERTS = 5
MODES = [
    (torch.float32, torch.float32),
    (BF16, BF16),
    (torch.float16, torch.float16),
    (BF16, FP8),
    (torch.float32, FP8),
    (FP8, FP8),
    (FP8, BF16),
    (FP8, torch.float32),
]


def random_rows(
    *size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Rows of many magnitudes; of e4m3, their scales."""
    generator = torch.Generator().manual_seed(sum(size))
    rows = torch.randn(size, generator=generator) * torch.rand(size[0], *[1] * (len(size) - 1))
    if dtype is not FP8:
        return rows.to(device, dtype), None
    values, scales = quantize_rows_reference(rows.flatten(0, -2))
    return values.view(size).to(device), scales.view(*size[:-1], -1).to(device)


def standard_input(
    num_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device, top_k: int = 2
) -> StandardExpertInput:
    """A third of the rows have no expert here, and hold NaN; so do those past num_rows."""
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(-1, NUM_EXPERTS, (num_rows, top_k), generator=generator)
    ids[::3] = -1
    rows, scales = random_rows(num_rows, hidden_size, dtype=dtype, device=device)
    valid_rows = max(num_rows - 3, 0)
    for part in (slice(0, None, 3), slice(valid_rows, None)):
        if dtype is FP8:
            rows[part].view(torch.uint8).fill_(0x7F)
        else:
            rows[part] = torch.nan
    bound = torch.tensor([valid_rows], dtype=torch.int32, device=device)
    ids = ids.to(device, torch.int32)
    return StandardExpertInput(rows, ids, torch.rand(ids.shape), bound, scales)


def batched_input(
    counts: list[int], capacity: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> BatchedExpertInput:
    rows, scales = random_rows(len(counts), capacity, hidden_size, dtype=dtype, device=device)
    counts_there = torch.tensor(counts, dtype=torch.int32, device=device)
    return BatchedExpertInput(rows, counts_there, scales=scales)


def with_poison(aligned: AlignedSlots) -> AlignedSlots:
    """The reference's tables as a kernel leaves them: as long as bounded, poison at the end."""
    num_positions = aligned.max_tiles * aligned.block_m
    slots = aligned.slots.new_full((num_positions,), -1)
    slots[: len(aligned.slots)] = aligned.slots
    return replace(aligned, slots=slots)


def align(expert_input: ExpertInput, block_m: int = 16) -> AlignedSlots:
    if isinstance(expert_input, BatchedExpertInput):
        return with_poison(align_batched_rows_reference(expert_input, block_m=block_m))
    return with_poison(
        align_slots_reference(expert_input, num_local_experts=NUM_EXPERTS, block_m=block_m)
    )


def poisoned(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = torch.Size(size).numel() * dtype.itemsize
    memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device)
    return memory.view(dtype).view(size)


Outputs = tuple[Tensor, Tensor | None]


def outputs(
    aligned: AlignedSlots, hidden_size: int, dtype: torch.dtype, extra_rows: int = 0
) -> Outputs:
    num_positions = aligned.max_tiles * aligned.block_m + extra_rows
    device = aligned.slots.device
    out = poisoned(num_positions, hidden_size, dtype=dtype, device=device)
    if dtype is not FP8:
        return out, None
    groups = num_groups(hidden_size)
    return out, poisoned(groups, num_positions, dtype=torch.float32, device=device)


def bits(tensor: Tensor) -> Tensor:
    """To be compared exactly, NaN too."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.contiguous().view(kinds[tensor.dtype.itemsize])


def assert_equals_reference(expert_input: ExpertInput, aligned: AlignedSlots, out: Outputs) -> None:
    """Bit-equal in the whole memory of the outputs, so also where nothing may be written."""
    expected = tuple(None if tensor is None else tensor.clone() for tensor in out)
    before = expert_input.hidden_states.clone()
    permute_rows(expert_input, aligned, out=out[0], out_scales=out[1])
    assert expected[0] is not None
    permute_rows_reference(expert_input, aligned, out=expected[0], out_scales=expected[1])
    assert torch.equal(bits(out[0]), bits(expected[0]))
    if out[1] is not None and expected[1] is not None:
        assert torch.equal(bits(out[1]), bits(expected[1]))
    assert torch.equal(bits(expert_input.hidden_states), bits(before))


@pytest.mark.parametrize(("rows_dtype", "out_dtype"), MODES)
@pytest.mark.parametrize("hidden_size", [128, 300, 2880])
def test_every_mode_equals_the_reference(
    rows_dtype: torch.dtype, out_dtype: torch.dtype, hidden_size: int, device: torch.device
) -> None:
    expert_input = standard_input(70, hidden_size, rows_dtype, device)
    aligned = align(expert_input)
    assert_equals_reference(expert_input, aligned, outputs(aligned, hidden_size, out_dtype))


@pytest.mark.parametrize(("rows_dtype", "out_dtype"), MODES)
def test_batched_rows_of_every_mode(
    rows_dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> None:
    expert_input = batched_input([0, 1, 20, 16, 5], 20, 300, rows_dtype, device)
    aligned = align(expert_input)
    assert_equals_reference(expert_input, aligned, outputs(aligned, 300, out_dtype))


def test_the_order_written_out(device: torch.device) -> None:
    # The example of AlignedSlots: slots 0, 1, 2 of rows 0, 0, 1; experts 0, 2, 2.
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
    ids = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32, device=device)
    expert_input = StandardExpertInput(rows, ids, torch.ones(2, 2, device=device))
    aligned = align(expert_input)
    out, _ = outputs(aligned, 2, torch.float32)
    permute_rows(expert_input, aligned, out=out)
    assert out[0].tolist() == [1, 2]
    assert (out[1:16] == 0).all()
    assert out[16:18].tolist() == [[1, 2], [3, 4]]
    assert (out[18:32] == 0).all()
    assert out[32:].isnan().all()


@pytest.mark.parametrize("block_m", [16, 32, 128])
def test_tiles_of_every_height_and_room_to_spare(block_m: int, device: torch.device) -> None:
    expert_input = standard_input(150, 300, BF16, device, top_k=3)
    aligned = align(expert_input, block_m)
    assert_equals_reference(expert_input, aligned, outputs(aligned, 300, FP8, extra_rows=7))


def test_strided_rows_scales_and_outputs(device: torch.device) -> None:
    for rows_dtype, out_dtype in ((BF16, BF16), (BF16, FP8), (FP8, FP8), (FP8, BF16)):
        wide = standard_input(40, 600, rows_dtype, device)
        scales = wide.scales
        expert_input = replace(
            wide,
            hidden_states=wide.hidden_states[:, ::2],
            scales=None if scales is None else scales.T.contiguous().T[:, ::2][:, :3],
        )
        aligned = align(expert_input)
        out, out_scales = outputs(aligned, 640, out_dtype)
        if out_scales is not None:  # position by position, as [P, G] rows
            out_scales = poisoned(out.shape[0], 4, dtype=torch.float32, device=device).T[:3]
        assert_equals_reference(expert_input, aligned, (out[:, 20:320], out_scales))
        beside = torch.cat([bits(out)[:, :20], bits(out)[:, 320:]], dim=1)
        assert (beside == bits(poisoned(1, dtype=out_dtype, device=device))).all()


def test_strided_batched_rows(device: torch.device) -> None:
    whole = batched_input([3, 9, 0], 9, 256, FP8, device)
    assert whole.scales is not None
    expert_input = replace(
        whole,
        hidden_states=whole.hidden_states.transpose(0, 1).contiguous().transpose(0, 1),
        scales=whole.scales.permute(0, 2, 1).contiguous().permute(0, 2, 1),
    )
    aligned = align(expert_input)
    for dtype in (FP8, BF16):
        assert_equals_reference(expert_input, aligned, outputs(aligned, 256, dtype))


def test_nan_and_infinities_stay_visible(device: torch.device) -> None:
    rows = torch.ones(2, 256, dtype=BF16, device=device)
    rows[0, 3], rows[1, 200] = torch.nan, torch.inf
    ids = torch.zeros(2, 1, dtype=torch.int32, device=device)
    expert_input = StandardExpertInput(rows, ids, torch.ones(2, 1, device=device))
    aligned = align(expert_input)
    copy, _ = outputs(aligned, 256, BF16)
    permute_rows(expert_input, aligned, out=copy)
    assert torch.equal(bits(copy[:2]), bits(rows))
    out, out_scales = outputs(aligned, 256, FP8)
    permute_rows(expert_input, aligned, out=out, out_scales=out_scales)
    assert out[0].float().isnan().nonzero().tolist() == [[3]]
    assert out_scales is not None
    assert out_scales[1, 1] == torch.inf


def test_no_valid_slot_touches_nothing(device: torch.device) -> None:
    for num_rows in (0, 6):
        expert_input = standard_input(num_rows, 256, BF16, device)
        expert_input.topk_ids.fill_(-1)
        aligned = align(expert_input)
        out, out_scales = outputs(aligned, 256, FP8)
        permute_rows(expert_input, aligned, out=out, out_scales=out_scales)
        assert out_scales is not None
        assert (bits(out) == 0xFF).all()
        assert (bits(out_scales) == -1).all()


@pytest.mark.skipif(not is_interpreting(), reason="takes 15 GB of a GPU, none of a CPU's")
def test_offsets_beyond_2_31_elements() -> None:
    # Memory that is never touched is not there: row 2, position 16 and group 2 are 2^31 away.
    rows = torch.empty(2**31 + 300, dtype=FP8).as_strided((3, 300), (2**30, 1))
    values, scales = quantize_rows_reference(torch.randn(3, 300))
    rows.copy_(values)
    ids = torch.tensor([[0], [-1], [1]], dtype=torch.int32)
    expert_input = StandardExpertInput(rows, ids, torch.ones(3, 1), scales=scales)
    aligned = align(expert_input)
    out = torch.empty(3 * 2**31, dtype=FP8).as_strided((48, 300), (2**27, 1))
    out_scales = torch.empty(2**31 + 48).as_strided((3, 48), (2**30, 1))
    permute_rows(expert_input, aligned, out=out, out_scales=out_scales)
    for position, row in ((0, 0), (16, 2)):
        assert torch.equal(bits(out[position]), bits(values[row]))
        assert torch.equal(out_scales[:, position], scales[row])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.empty(64, 300)}, "cannot be permuted to torch.float32"),
        ({"out_scales": torch.empty(3, 64)}, "out of torch.bfloat16 came with scales"),
        (
            {"out": torch.empty(64, 300, dtype=FP8)},
            "out of torch.float8_e4m3fn came without scales",
        ),
        ({"out": torch.empty(31, 300, dtype=BF16)}, r"out is \[31, 300\]; 4 tiles of 16"),
        ({"out": torch.empty(64, 301, dtype=BF16)}, r"need \[64, 300\]"),
        (
            {"out": torch.empty(64, 300, dtype=FP8), "out_scales": torch.empty(64, 3)},
            r"out_scales is torch.float32 \[64, 3\]; it must be torch.float32 \[3, 64\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    rows = torch.zeros(2, 300, dtype=BF16)
    ids = torch.tensor([[0, 2], [2, -1]], dtype=torch.int32)
    expert_input = StandardExpertInput(rows, ids, torch.ones(2, 2))
    aligned = align(expert_input)
    arguments = {"out": torch.empty(64, 300, dtype=BF16)} | change
    with pytest.raises(ValueError, match=message):
        permute_rows(expert_input, aligned, **arguments)


def test_e4m3_rows_without_scales_are_refused() -> None:
    rows = torch.zeros(2, 128, dtype=FP8)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    expert_input = StandardExpertInput(rows, ids, torch.ones(2, 1))
    aligned = align(expert_input)
    with pytest.raises(
        ValueError, match=r"hidden_states of torch\.float8_e4m3fn came without scales"
    ):
        permute_rows(expert_input, aligned, out=torch.empty(64, 128, dtype=BF16))
