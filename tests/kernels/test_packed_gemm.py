"""Both projections on packed weights against their definitions, on poisoned outputs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import align_slots_reference
from ep_runtime.kernels.base import ActivationKind
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.grouped_gemm import (
    GemmRows,
    project_down_reference,
    project_gate_up_reference,
)
from ep_runtime.kernels.packed_gemm import project_down_packed, project_gate_up_packed
from ep_runtime.kernels.packed_schedule import PackedTiles
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.triton_operands import pack_triton_weights
from tests.kernels.cases import ExpertsCase
from tests.kernels.packed_cases import MXFP4, NVFP4, PackedCase, int4, int8
from tests.kernels.packed_parts import expected_parts
from tests.tolerances import relative_error

# Blocks of columns that divide nothing either, and more than one group of tiles.
PLAIN = PackedTiles(64, num_warps=4, num_stages=1)
EARLY = PackedTiles(128, num_warps=4, num_stages=1, values_first=True, group_tiles=3)
SIZES = ExpertsCase("sizes_that_divide_nothing", 13, 2, 300, 72, dtype=torch.bfloat16)
EVEN = replace(SIZES, hidden_size=320, intermediate_size=96)
BIASED = replace(SIZES, has_bias=True)
FLOAT16 = replace(SIZES, dtype=torch.float16)
FLOAT32 = replace(SIZES, dtype=torch.float32)
RELU2 = replace(EVEN, has_bias=True, kind=ActivationKind.RELU2)
WIDE = replace(SIZES, hidden_size=72, intermediate_size=296)  # w2's rows are more than a block
LONG = replace(SIZES, hidden_size=700, num_experts=1)
CASES = [
    (PackedCase("int4", SIZES, int4()), 16, EARLY),
    (PackedCase("int4_zeros_bias_float16", replace(FLOAT16, has_bias=True), int4(64)), 16, PLAIN),
    (PackedCase("int4_zeros_float32", FLOAT32, int4(has_zero_points=True)), 16, PLAIN),
    (PackedCase("int4_groups_of_32", BIASED, int4(32, has_zero_points=True)), 64, EARLY),
    (PackedCase("int4_groups_of_64", WIDE, int4(64, has_zero_points=True)), 32, EARLY),
    (PackedCase("int4_groups_of_512_cover_two_blocks", LONG, int4(512)), 16, PLAIN),
    (PackedCase("int4_one_scale_a_row", RELU2, int4(None)), 16, PLAIN),
    (PackedCase("int4_one_zero_a_row", SIZES, int4(None, has_zero_points=True)), 16, EARLY),
    (PackedCase("int8", SIZES, int8()), 16, PLAIN),
    (
        PackedCase(
            "int8_zeros_float16", replace(WIDE, dtype=torch.float16), int8(64, has_zero_points=True)
        ),
        16,
        EARLY,
    ),
    (PackedCase("int8_zeros_float32", FLOAT32, int8(32, has_zero_points=True)), 64, PLAIN),
    (PackedCase("int8_one_scale_a_row", BIASED, int8(None)), 16, EARLY),
    (PackedCase("mxfp4", EVEN, MXFP4), 16, EARLY),
    (PackedCase("mxfp4_relu2", replace(RELU2, hidden_size=64), MXFP4), 64, PLAIN),
    (PackedCase("nvfp4", EVEN, NVFP4), 16, EARLY),
    (PackedCase("nvfp4_relu2_float16", replace(RELU2, dtype=torch.float16), NVFP4), 64, PLAIN),
]

NAMES = [str(packed) for packed, _, _ in CASES]


def poisoned(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    return torch.full((num_rows, num_columns), torch.nan, device=device)


@pytest.mark.parametrize(("packed", "block_m", "tiles"), CASES, ids=NAMES)
def test_packed_projections_equal_their_definitions(
    packed: PackedCase, block_m: int, tiles: PackedTiles, device: torch.device
) -> None:
    """float32 out of float32 sums, so only the order of the sums differs."""
    case, expert_input = packed.case, packed.case.expert_input(device)
    aligned = align_slots_reference(
        expert_input, num_local_experts=case.num_experts, block_m=block_m
    )
    stored = packed.weights(device)
    plain, layout = packed.dequantized(stored), packed_layout(packed.scheme)
    words = pack_triton_weights(stored, packed.scheme)
    is_slot = aligned.slots < aligned.num_slots

    out = poisoned(len(aligned.slots), case.intermediate_size, device)
    expected = out.clone()
    arguments: dict[str, Any] = {"top_k": case.top_k, "activation": case.shape.activation}
    rows = expert_input.hidden_states
    project_gate_up_packed(rows, words, aligned, layout=layout, tiles=tiles, out=out, **arguments)
    project_gate_up_reference(GemmRows(rows), plain, aligned, out=expected, **arguments)
    assert_only_slots_and_close(out, expected)

    activated = poisoned(len(aligned.slots), case.intermediate_size, device).to(case.dtype)
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(int(is_slot.sum()), case.intermediate_size, generator=generator)
    activated[is_slot] = values.to(device, case.dtype)
    out = poisoned(aligned.num_slots, case.hidden_size, device)
    expected = out.clone()
    slot_weights = None if case.has_bias else expert_input.topk_weights.flatten()
    arguments = {"slot_weights": slot_weights}
    project_down_packed(activated, words, aligned, layout=layout, tiles=tiles, out=out, **arguments)
    project_down_reference(GemmRows(activated), plain, aligned, out=expected, **arguments)
    assert_only_slots_and_close(out, expected)

    # In parts; of some cases the last is empty.
    blocks = layout.num_blocks(case.intermediate_size)
    for split_k in {2, min(blocks, 3)} - {1}:
        columns = -(-blocks // split_k) * layout.columns_per_block
        expected = expected_parts(plain, activated, aligned, slot_weights, columns, split_k)
        out = poisoned(len(expected), case.hidden_size, device)
        project_down_packed(
            activated,
            words,
            aligned,
            layout=layout,
            tiles=tiles,
            split_k=split_k,
            out=out,
            **arguments,
        )
        assert_only_slots_and_close(out, expected)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "split_k", "message"),
    [
        (8, torch.bfloat16, 0, r"split_k \(0\) parts, at least one"),
        (8, torch.float32, 2, r"out \(8, 300\) must have a row for each of 8 slots and of"),
        (16, torch.bfloat16, 2, r"out torch.bfloat16 of split_k \(2\) parts must be torch.float32"),
    ],
)
def test_another_out_is_refused(
    num_rows: int, dtype: torch.dtype, split_k: int, message: str
) -> None:
    packed = CASES[0][0]
    case = replace(packed.case, num_rows=4)
    expert_input, device = case.expert_input(torch.device("cpu")), torch.device("cpu")
    aligned = align_slots_reference(expert_input, num_local_experts=2, block_m=16)
    with pytest.raises(PlanError, match=message):
        project_down_packed(
            torch.zeros(len(aligned.slots), case.intermediate_size, dtype=case.dtype),
            pack_triton_weights(packed.weights(device), packed.scheme),
            aligned,
            layout=packed_layout(packed.scheme),
            slot_weights=None,
            tiles=PLAIN,
            split_k=split_k,
            out=torch.zeros(num_rows, case.hidden_size, dtype=dtype),
        )


def assert_only_slots_and_close(out: Tensor, expected: Tensor) -> None:
    assert torch.equal(out.isnan(), expected.isnan()), "wrote a place of no slot, or not all"
    assert relative_error(out.nan_to_num(), expected.nan_to_num()) < 1e-5
