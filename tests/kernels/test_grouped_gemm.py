"""Each launch of the triton experts against its own definition, on poisoned outputs."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots, align_slots_reference
from ep_runtime.kernels.base import ActivationKind, ExpertWeights
from ep_runtime.kernels.grouped_gemm import (
    GemmRows,
    item_at,
    project_down,
    project_down_reference,
    project_gate_up,
    project_gate_up_reference,
)
from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, quantize_rows_reference
from ep_runtime.kernels.quant.scheme import FP8_GROUP, QuantParameters
from ep_runtime.kernels.sum_slots import sum_slots, sum_slots_reference
from ep_runtime.kernels.tiles import GemmTiles, choose_tiles
from ep_runtime.kernels.triton_operands import prepare_triton_weights
from tests.kernels.cases import EXPERTS_CASES, ExpertsCase
from tests.tolerances import E4M3_PRODUCTS, assert_close, relative_error

CASES = [case for case in EXPERTS_CASES if case.num_rows < 50]
PLAIN = GemmTiles(64, 64, num_warps=4, num_stages=1)
# Every switch of the launch; one program goes through all items, so groups have several tiles.
TILES = {
    "ordinary": PLAIN,
    "swapped": replace(PLAIN, swap_operands=True),
    "grouped": replace(PLAIN, group_tiles=4, programs_per_sm=1),
    "flattened": replace(PLAIN, group_tiles=3, programs_per_sm=1, flatten=True),
}


def aligned_of(case: ExpertsCase, device: torch.device, block_m: int = 16) -> AlignedSlots:
    return align_slots_reference(
        case.expert_input(device), num_local_experts=case.num_experts, block_m=block_m
    )


def poisoned(*size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(size, torch.nan, dtype=torch.float32, device=device).to(dtype)


def poisoned_rows(
    num_rows: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """NaN, with rows that TMA can read."""
    width = -(-num_columns // 16) * 16
    return poisoned(num_rows, width, dtype=dtype, device=device)[:, :num_columns]


def compare_gate_up(case: ExpertsCase, tiles: GemmTiles, device: torch.device) -> None:
    aligned = aligned_of(case, device)
    rows, weights = GemmRows(case.expert_input(device).hidden_states), case.weights(device)
    out = poisoned_rows(len(aligned.slots), case.intermediate_size, case.dtype, device)
    expected = out.clone()
    arguments: dict[str, Any] = {"top_k": case.top_k, "activation": case.shape.activation}
    prepared = prepare_triton_weights(weights)
    project_gate_up(rows, prepared, aligned, tiles=tiles, out=GemmRows(out), **arguments)
    project_gate_up_reference(rows, weights, aligned, out=expected, **arguments)
    assert torch.equal(out.isnan(), expected.isnan()), "wrote padding, or not a slot"
    assert_close(out.nan_to_num(), expected.nan_to_num())


def compare_down(case: ExpertsCase, tiles: GemmTiles, device: torch.device) -> None:
    aligned = aligned_of(case, device)
    weights, num_slots = case.weights(device), case.num_rows * case.top_k
    activated = poisoned_rows(len(aligned.slots), case.intermediate_size, case.dtype, device)
    is_slot = aligned.slots < num_slots
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(int(is_slot.sum()), case.intermediate_size, generator=generator)
    activated[is_slot] = values.to(device, case.dtype)
    slot_weights = case.expert_input(device).topk_weights.flatten()
    for weighted in (slot_weights, None):
        out = poisoned(num_slots, case.hidden_size, dtype=torch.float32, device=device)
        expected = out.clone()
        rows, prepared = GemmRows(activated), prepare_triton_weights(weights)
        project_down(rows, prepared, aligned, slot_weights=weighted, tiles=tiles, out=out)
        project_down_reference(rows, weights, aligned, slot_weights=weighted, out=expected)
        assert torch.equal(out.isnan(), expected.isnan()), "wrote a slot without expert, or not one"
        # float32 out of float32 sums, whatever the dtype of the operands.
        assert_close(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gate_up_equals_its_definition(case: ExpertsCase, device: torch.device) -> None:
    compare_gate_up(case, choose_tiles(case.num_rows, None, case.shape, device).gate_up, device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_down_equals_its_definition(case: ExpertsCase, device: torch.device) -> None:
    compare_down(case, choose_tiles(case.num_rows, None, case.shape, device).down, device)


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
def test_every_kind_of_tiles_gives_the_same(tiles: GemmTiles, device: torch.device) -> None:
    case = ExpertsCase(
        "tiles", 40, 3, hidden_size=200, intermediate_size=136, dtype=torch.bfloat16, has_bias=True
    )
    compare_gate_up(case, tiles, device)
    compare_down(case, tiles, device)


def quantized_weights(case: ExpertsCase, scheme: str, device: torch.device) -> ExpertWeights:
    """Random e4m3 values and scales: of every 128 x 128 block, or of every output row."""
    generator = torch.Generator().manual_seed(11)
    parts = 2 if case.shape.activation.is_gated else 1

    def random(num_rows: int, num_columns: int, parts: int) -> tuple[Tensor, QuantParameters]:
        values = torch.randn(case.num_experts, num_rows, num_columns, generator=generator)
        blocks = parts * -(-num_rows // parts // FP8_GROUP), -(-num_columns // FP8_GROUP)
        size = (case.num_experts, *blocks) if scheme == "block" else (case.num_experts, num_rows)
        scales = (0.5 + torch.rand(size, generator=generator)) / num_columns**0.5
        return values.to(device).to(torch.float8_e4m3fn), QuantParameters(scales.to(device))

    plain = case.weights(device)
    w13, w13_quant = random(parts * case.intermediate_size, case.hidden_size, parts)
    w2, w2_quant = random(case.hidden_size, case.intermediate_size, 1)
    return replace(plain, w13=w13, w2=w2, w13_quant=w13_quant, w2_quant=w2_quant)


def dequantized(weights: ExpertWeights, parts: int) -> ExpertWeights:
    """float32 weights; a part's last blocks may be partial, the next part's start afresh."""

    def widen(values: Tensor, quant: QuantParameters | None, parts: int) -> Tensor:
        assert quant is not None
        if quant.scales.dim() == 2:
            return values.float() * quant.scales[..., None]
        rows_of_part = values.shape[1] // parts
        blocks = quant.scales.chunk(parts, dim=1)
        by_row = [b.repeat_interleave(FP8_GROUP, dim=1)[:, :rows_of_part] for b in blocks]
        columns = torch.cat(by_row, dim=1).repeat_interleave(FP8_GROUP, dim=2)
        return values.float() * columns[:, :, : values.shape[2]]

    return ExpertWeights(
        widen(weights.w13, weights.w13_quant, parts),
        widen(weights.w2, weights.w2_quant, 1),
        weights.w13_bias,
        weights.w2_bias,
    )


FP8_CASES = [
    ExpertsCase("fp8_even", 19, 5, 256, 384, dtype=torch.bfloat16),
    ExpertsCase("fp8_odd_sizes", 19, 3, 300, 208, dtype=torch.bfloat16, has_bias=True),
    ExpertsCase("fp8_relu2", 7, 3, 160, 144, dtype=torch.bfloat16, kind=ActivationKind.RELU2),
]
FP8_TILES = {name: replace(tiles, block_n=128, block_k=128) for name, tiles in TILES.items()}


@pytest.mark.parametrize("tiles", FP8_TILES.values(), ids=FP8_TILES)
@pytest.mark.parametrize("scheme", ["block", "channel"])
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_fp8_projections_equal_their_definitions(
    case: ExpertsCase, scheme: str, tiles: GemmTiles, device: torch.device
) -> None:
    """Of the same quantised operands, so only the order of the sums differs."""
    aligned, expert_input = aligned_of(case, device), case.expert_input(device)
    is_slot = aligned.slots < aligned.num_slots
    weights = quantized_weights(case, scheme, device)
    plain = dequantized(weights, 2 if case.shape.activation.is_gated else 1)
    rows = GemmRows(*quantize_rows_reference(expert_input.hidden_states))
    arguments: dict[str, Any] = {"top_k": case.top_k, "activation": case.shape.activation}
    num_positions, inner = len(aligned.slots), case.intermediate_size
    unquantised = poisoned_rows(num_positions, inner, torch.float32, device)
    project_gate_up(
        rows,
        prepare_triton_weights(weights),
        aligned,
        tiles=tiles,
        out=GemmRows(unquantised),
        **arguments,
    )
    expected = unquantised.clone()
    project_gate_up_reference(rows, plain, aligned, out=expected, **arguments)
    limit = E4M3_PRODUCTS[device.type]
    assert relative_error(unquantised[is_slot], expected[is_slot]) < limit
    assert unquantised[~is_slot].isnan().all()

    values = poisoned_rows(num_positions, inner, torch.float8_e4m3fn, device)
    scales = poisoned(-(-inner // FP8_GROUP), num_positions, dtype=torch.float32, device=device).T
    activated = GemmRows(values, scales)
    project_gate_up(
        rows, prepare_triton_weights(weights), aligned, tiles=tiles, out=activated, **arguments
    )
    definition = quantize_rows_reference(unquantised[is_slot])
    assert torch.equal(values[is_slot].float(), definition[0].float())
    torch.testing.assert_close(scales[is_slot], definition[1])
    assert values[~is_slot].isnan().all()
    assert scales[~is_slot].isnan().all()

    slot_weights = expert_input.topk_weights.flatten()
    out = poisoned(aligned.num_slots, case.hidden_size, dtype=torch.float32, device=device)
    expected = out.clone()
    project_down(
        activated,
        prepare_triton_weights(weights),
        aligned,
        slot_weights=slot_weights,
        tiles=tiles,
        out=out,
    )
    readable = GemmRows(dequantize_rows(values, scales, torch.float32))
    project_down_reference(readable, plain, aligned, slot_weights=slot_weights, out=expected)
    assert torch.equal(out.isnan(), expected.isnan())
    assert relative_error(out.nan_to_num(), expected.nan_to_num()) < limit


@pytest.mark.parametrize("tiles", TILES.values(), ids=TILES)
def test_fp8_rows_of_unquantised_weights_are_dequantised(
    tiles: GemmTiles, device: torch.device
) -> None:
    case = ExpertsCase("fp8_rows", 19, 3, 300, 96, dtype=torch.bfloat16)
    aligned, weights = aligned_of(case, device), case.weights(device)
    rows = GemmRows(*quantize_rows_reference(case.expert_input(device).hidden_states))
    out = poisoned_rows(len(aligned.slots), 96, torch.bfloat16, device)
    expected = out.clone()
    arguments: dict[str, Any] = {"top_k": case.top_k, "activation": case.shape.activation}
    project_gate_up(
        rows, prepare_triton_weights(weights), aligned, tiles=tiles, out=GemmRows(out), **arguments
    )
    project_gate_up_reference(rows, weights, aligned, out=expected, **arguments)
    assert_close(out.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("num_rows", [None, 0, 5])
def test_the_sum_equals_its_definition(num_rows: int | None, device: torch.device) -> None:
    case = ExpertsCase("sum", hidden_size=300, top_k=3)
    expert_input = case.expert_input(device)
    if num_rows is not None:
        bound = torch.tensor([num_rows], dtype=torch.int32, device=device)
        expert_input = replace(expert_input, num_rows=bound)
    valid = (expert_input.topk_ids >= 0).flatten()
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(19 * 3, 300, generator=generator).to(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        slot_outputs = poisoned(19 * 3, 300, dtype=dtype, device=device)
        slot_outputs[valid] = values[valid].to(dtype)
        out = poisoned(300, 19, dtype=dtype, device=device).T  # a strided output
        expected = torch.empty_like(out)
        arguments: dict[str, Any] = {"num_local_experts": case.num_experts}
        sum_slots(slot_outputs, expert_input, out=out, **arguments)
        sum_slots_reference(slot_outputs, expert_input, out=expected, **arguments)
        assert torch.equal(out, expected)
        assert not out.isnan().any()


@triton.jit
def _list_items_kernel(out_ptr, num_tiles, num_blocks, NUM_ITEMS: tl.constexpr):
    for item in range(NUM_ITEMS):
        tile, block = item_at(item, num_tiles, num_blocks, 2)
        tl.store(out_ptr + 2 * item, tile)
        tl.store(out_ptr + 2 * item + 1, block)


def test_items_come_in_the_order_of_the_docstring(device: torch.device) -> None:
    out = torch.full((6, 2), -1, dtype=torch.int32, device=device)
    prepare_launch(device)
    _list_items_kernel[(1,)](out, 3, 2, NUM_ITEMS=6)
    assert out.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [2, 1]]
