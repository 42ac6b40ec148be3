"""The Hopper GEMM: what it compiles to and its definition, without a GPU; its results with one."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime.kernels.base import Activation, ActivationKind
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.hopper_gemm import (
    FP8,
    Fp8Scales,
    can_gather,
    check_hopper_gemm,
    project_down_hopper,
    project_gate_up_hopper,
)
from ep_runtime.kernels.hopper_reference import (
    project_down_hopper_reference,
    project_gate_up_hopper_reference,
)
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.quant.fp8_rows import quantize_rows_reference
from tests.kernels.hopper_cases import (
    HOPPER_CASES,
    SILU,
    HopperCase,
    Tiles,
    quantise_operands,
    randn,
    spread_rows,
)
from tests.tolerances import assert_close

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = 227 * 1024
FP8_CASES = [
    replace(case, inner=max(case.inner, 64)) for case in HOPPER_CASES if case.hidden % 16 == 0
]


def poisoned(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(size, torch.nan, device="cuda").to(dtype)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """expected: float32, NaN where nothing is to be written."""
    assert torch.equal(actual.isnan(), expected.isnan()), "wrote a row too many, or too few"
    assert_close(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_first_projection_equals_its_definition(case: HopperCase) -> None:
    device = torch.device("cuda")
    tiles = case.tiles(device)
    positions, num_experts = tiles.slots.numel(), len(case.rows)
    x = randn(positions, case.hidden, seed=1, device=device)
    x[tiles.slots >= case.num_slots] = 0
    size, scale = (num_experts, case.projected, case.hidden), case.hidden**-0.5
    w13 = randn(*size, seed=2, device=device, scale=scale)
    bias = randn(num_experts, case.projected, seed=3, device=device) if case.has_bias else None
    arguments: dict[str, Any] = {"activation": case.activation, "bias": bias}
    out = poisoned(positions, case.inner)
    project_gate_up_hopper(x, w13, tiles, out=out, schedule=case.schedule, **arguments)
    assert_same(out, project_gate_up_hopper_reference(x, w13, tiles, **arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(("top_k", "gap"), [(1, 0), (3, 24), (8, 64)])
@pytest.mark.parametrize("case", HOPPER_CASES, ids=str)
def test_first_projection_of_gathered_rows_equals_its_definition(
    case: HopperCase, top_k: int, gap: int
) -> None:
    """Slots without a position, rows that none uses, what lies between rows: all NaN."""
    device = torch.device("cuda")
    num_rows = case.num_source_rows(top_k)
    tiles = case.tiles(device, num_rows * top_k)
    positions, num_experts = tiles.slots.numel(), len(case.rows)
    x = spread_rows(tiles, num_rows, case.hidden, top_k=top_k, gap=gap, device=device)
    size, scale = (num_experts, case.projected, case.hidden), case.hidden**-0.5
    w13 = randn(*size, seed=2, device=device, scale=scale)
    bias = randn(num_experts, case.projected, seed=3, device=device) if case.has_bias else None
    arguments: dict[str, Any] = {"activation": case.activation, "bias": bias, "top_k": top_k}
    out = poisoned(positions, case.inner)
    project_gate_up_hopper(x, w13, tiles, out=out, schedule=case.schedule, **arguments)
    assert_same(out, project_gate_up_hopper_reference(x, w13, tiles, **arguments))


@pytest.mark.gpu
def test_gathered_and_ordered_rows_give_bit_equal_results() -> None:
    """Many tiles a program, every row in 4 slots: a stage used too early would differ."""
    device = torch.device("cuda")
    case = HopperCase("repeated", (3000, 500, 0, 1200, 7, 2000), 2048, 1024)
    num_rows = case.num_source_rows(4)
    tiles = case.tiles(device, num_rows * 4)
    x = spread_rows(tiles, num_rows, case.hidden, top_k=4, gap=8, device=device)
    w13 = randn(6, 2 * case.inner, case.hidden, seed=2, device=device)
    num_written = int(tiles.num_tiles) * 128
    slots = tiles.slots[:num_written].long()
    ordered = torch.zeros(tiles.slots.numel(), case.hidden, device=device, dtype=x.dtype)
    is_slot = slots < num_rows * 4
    ordered[:num_written][is_slot] = x[slots[is_slot] // 4]
    expected = poisoned(len(ordered), case.inner)
    project_gate_up_hopper(ordered, w13, tiles, activation=SILU, out=expected)
    for _ in range(5):
        out = poisoned(len(ordered), case.inner)
        project_gate_up_hopper(x, w13, tiles, activation=SILU, out=out, top_k=4)
        assert torch.equal(out[:num_written], expected[:num_written])


@pytest.mark.gpu
@pytest.mark.parametrize("is_quantised", [True, False])
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_first_projection_of_e4m3_equals_its_definition(
    case: HopperCase, is_quantised: bool
) -> None:
    device = torch.device("cuda")
    tiles = case.tiles(device)
    positions, num_experts = tiles.slots.numel(), len(case.rows)
    size, scale = (num_experts, case.projected, case.hidden), case.hidden**-0.5
    x, w13, scales = quantise_operands(
        randn(positions, case.hidden, seed=1, device=device),
        randn(*size, seed=2, device=device, scale=scale),
        num_parts=case.projected // case.inner,
    )
    bias = randn(num_experts, case.projected, seed=3, device=device) if case.has_bias else None
    arguments: dict[str, Any] = {"activation": case.activation, "bias": bias}
    expected = project_gate_up_hopper_reference(x, w13, tiles, scales=scales, **arguments)
    if not is_quantised:
        out = poisoned(positions, case.inner)
        project_gate_up_hopper(x, w13, tiles, out=out, scales=scales, **arguments)
        assert_same(out, expected)
        return
    out_scales = poisoned(positions, -(-case.inner // 128), dtype=torch.float32)
    out = poisoned(positions, case.inner, dtype=FP8)
    scales = replace(scales, out=out_scales)
    project_gate_up_hopper(
        x, w13, tiles, out=out, scales=scales, schedule=case.schedule, **arguments
    )
    wide = out_scales.repeat_interleave(128, dim=1)[:, : case.inner]
    actual = out.float() * wide
    assert torch.equal(actual.isnan(), expected.isnan())
    # Three bits of mantissa: a relative error of up to 1/16, 1/16/sqrt(3) in the mean square.
    error = (actual - expected).nan_to_num().norm() / expected.nan_to_num().norm().clamp_min(1e-9)
    assert float(error) < 0.04
    largest = torch.nn.functional.pad(expected.abs(), (0, -case.inner % 128))
    largest = largest.unflatten(1, (-1, 128)).amax(-1)
    assert_close(out_scales.nan_to_num().bfloat16(), (largest / 448.0).nan_to_num())


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 2.0**-46, 0.0], ids=["usual", "tiny", "zero"])
def test_groups_are_quantised_to_the_bit_as_rows_are(scale: float) -> None:
    """One product a result and scales that are powers of two: nothing before it is rounded."""
    device = torch.device("cuda")
    squared = Activation(ActivationKind.RELU2)
    case = HopperCase("exact", (128,), 256, 256, activation=squared)
    tiles = case.tiles(device)
    x = torch.zeros(tiles.slots.numel(), case.hidden, device=device)
    x[:, 0] = 1
    w13 = randn(1, case.projected, case.hidden, seed=2, device=device)
    row_scales = torch.ones(len(x), 2, device=device)
    scales = Fp8Scales(row_scales, torch.full((1, 2, 2), scale, device=device))
    x, w13 = x.to(FP8), w13.to(FP8)
    arguments: dict[str, Any] = {"activation": squared}
    exact = project_gate_up_hopper_reference(x, w13, tiles, scales=scales, **arguments)
    out_scales = poisoned(len(exact), case.inner // 128, dtype=torch.float32)
    out = poisoned(len(exact), case.inner, dtype=FP8)
    scales = replace(scales, out=out_scales)
    project_gate_up_hopper(x, w13, tiles, out=out, scales=scales, **arguments)
    is_row = ~exact[:, 0].isnan()
    values, value_scales = quantize_rows_reference(exact[is_row])
    assert torch.equal(out_scales[is_row], value_scales)
    assert torch.equal(out[is_row].float(), values.float())


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("by_slot", [True, False])
@pytest.mark.parametrize("case", FP8_CASES, ids=str)
def test_second_projection_equals_its_definition(
    case: HopperCase, by_slot: bool, is_fp8: bool
) -> None:
    device = torch.device("cuda")
    tiles = case.tiles(device)
    positions, num_experts = tiles.slots.numel(), len(case.rows)
    activated = randn(positions, case.inner, seed=1, device=device)
    w2 = randn(num_experts, case.hidden, case.inner, seed=2, device=device)
    scales: Fp8Scales | None = None
    if is_fp8:
        activated, w2, scales = quantise_operands(activated, w2, num_parts=1)
    bias = randn(num_experts, case.hidden, seed=3, device=device) if case.has_bias else None
    weights = torch.rand(case.num_slots, device=device) if by_slot else None
    out = poisoned(case.num_slots if by_slot else positions, case.hidden)
    arguments: dict[str, Any] = {"bias": bias, "topk_weights": weights, "scales": scales}
    project_down_hopper(activated, w2, tiles, out=out, schedule=case.schedule, **arguments)
    assert_same(out, project_down_hopper_reference(activated, w2, tiles, **arguments))


@pytest.mark.gpu
def test_outputs_past_2_to_31_elements_are_written_in_place() -> None:
    """600,064 rows of 4096 columns, of which the last tile's are compared."""
    device = torch.device("cuda")
    case = HopperCase("far", (600_064,), 4096, 64)
    tiles = case.tiles(device)
    activated = randn(tiles.slots.numel(), case.inner, seed=1, device=device)
    w2 = randn(1, case.hidden, case.inner, seed=2, device=device)
    out = poisoned(tiles.slots.numel(), case.hidden)
    project_down_hopper(activated, w2, tiles, out=out)
    last = slice(599_936, 600_064)
    assert last.stop * case.hidden > 2**31
    assert_close(out[last], activated[last].float() @ w2[0].float().T)
    assert out[last.stop :].isnan().all()


@pytest.mark.gpu
def test_equal_calls_give_bit_equal_results() -> None:
    device = torch.device("cuda")
    case = HopperCase("repeated", (3000, 500, 0, 1200), 1024, 2048)
    tiles = case.tiles(device)
    x = randn(tiles.slots.numel(), case.hidden, seed=1, device=device)
    w13 = randn(4, 2 * case.inner, case.hidden, seed=2, device=device)
    first, *others = (poisoned(len(x), case.inner) for _ in range(5))
    num_written = int(tiles.num_tiles) * 128
    for out in (first, *others):
        project_gate_up_hopper(x, w13, tiles, activation=SILU, out=out)
    assert all(torch.equal(first[:num_written], other[:num_written]) for other in others)


def test_definition_weights_by_slot_and_leaves_padding_out() -> None:
    """Expert e multiplies by e + 1; slots 2 and 0 belong to expert 0, slot 1 to expert 1."""
    slots = torch.full((256,), 3, dtype=torch.int32)
    slots[0], slots[1], slots[128] = 2, 0, 1
    tiles = Tiles(slots, torch.tensor([0, 1]), torch.tensor([2]))
    activated = torch.ones(256, 8, dtype=torch.bfloat16)
    w2 = torch.eye(8, dtype=torch.bfloat16) * torch.tensor([1, 2]).view(2, 1, 1)
    weights = torch.tensor([[0.5, 3.0, 4.0]])
    out = project_down_hopper_reference(activated, w2, tiles, topk_weights=weights)
    assert out[:, 0].tolist() == [0.5, 6.0, 4.0]


def test_definition_gathers_rows_by_slot_and_pads_with_zeros() -> None:
    """Three rows of two slots; row 1 is used twice, row 2, of NaN, not at all."""
    slots = torch.full((256,), 6, dtype=torch.int32)
    slots[:3] = torch.tensor([3, 0, 2])
    tiles = Tiles(slots, torch.tensor([0]), torch.tensor([1]))
    x = torch.tensor([1.0, 2.0, torch.nan]).view(3, 1).expand(3, 8).bfloat16()
    w13 = torch.eye(8, dtype=torch.bfloat16).view(1, 8, 8)
    relu2 = Activation(ActivationKind.RELU2)
    out = project_gate_up_hopper_reference(x, w13, tiles, activation=relu2, top_k=2)
    assert out[:4, 0].tolist() == [4.0, 1.0, 4.0, 0.0]
    assert torch.equal(out[3:128], torch.zeros(125, 8))
    assert out[128:].isnan().all()


def test_rows_are_gathered_where_16_bytes_can_be_copied_at_once() -> None:
    rows = torch.zeros(5, 80, dtype=torch.bfloat16)
    assert can_gather(rows)
    assert can_gather(rows[:, 8:72])
    assert can_gather(rows[::2].half())
    assert not can_gather(rows[:, 4:68]), "starts between multiples of 16 bytes"
    assert not can_gather(rows[:, :76]), "ends between them"
    assert not can_gather(torch.zeros(5, 84, dtype=torch.bfloat16)[:, :80])
    assert not can_gather(torch.zeros(80, 80, dtype=torch.bfloat16).T)
    assert not can_gather(rows.to(FP8))


def test_rows_that_cannot_be_gathered_are_refused() -> None:
    tiles = Tiles(torch.zeros(128), torch.tensor([0]), torch.tensor([1]))
    x, w13 = torch.zeros(5, 68).bfloat16()[:, 4:], torch.zeros(1, 64, 64).bfloat16()
    out = torch.zeros(128, 32).bfloat16()
    with pytest.raises(PlanError, match=r"multiples of 16 bytes.*strides \(68, 1\)"):
        project_gate_up_hopper(x, w13, tiles, activation=SILU, out=out, top_k=2)


def test_definition_scales_rows_by_group_and_weights_by_block_of_each_part() -> None:
    """Ones everywhere: 128 columns of scale 1, then 32 of scale 10; gate's blocks 1, up's 2."""
    tiles = Tiles(torch.zeros(128), torch.tensor([0]), torch.tensor([1]))
    x, w13 = torch.ones(128, 160).to(FP8), torch.ones(1, 2 * 32, 160).to(FP8)
    rows = torch.tensor([[1.0, 10.0]]).expand(128, 2).contiguous()
    scales = Fp8Scales(rows, torch.tensor([[[1.0, 1.0], [2.0, 2.0]]]))
    out = project_gate_up_hopper_reference(x, w13, tiles, activation=SILU, scales=scales)
    total = 128 * 1.0 + 32 * 10.0  # of which silu is the same in float32
    assert out.unique().tolist() == [total * (2 * total)]


@pytest.mark.parametrize(
    ("k_size", "dtype", "block_m", "message"),
    [
        (2048, torch.float32, 128, "bfloat16, float16 or e4m3, not torch.float32"),
        (300, torch.bfloat16, 128, "rows of 300 .* multiple of 16 bytes"),
        (2040, FP8, 128, "rows of 2040 .* multiple of 16 bytes"),
        (2048, torch.bfloat16, 64, "tiles of 128 positions, not 64"),
    ],
)
def test_operands_that_tma_cannot_read_are_refused(
    k_size: int, dtype: torch.dtype, block_m: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_hopper_gemm(k_size, dtype, block_m)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_stages": 1}, r"num_stages \(1\) must be 2 to 4"),
        (
            {"num_stages": 2, "lead_blocks": 2},
            r"lead_blocks \(2\) must be 0 to num_stages - 1 \(1\)",
        ),
        ({"group_tiles": 0}, r"group_tiles \(0\) must be at least 1"),
    ],
)
def test_schedules_that_would_never_end_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        HopperSchedule(**fields)  # type: ignore[arg-type]


def test_it_compiles_for_sm_90_into_what_it_was_written_for() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    stores = {entry["name"]: entry["stores"] for entry in report}
    assert stores == {
        "silu": ["st.global.v4.b32"],
        "swigluoai with bias, not shuffled": ["st.global.b16"],
        "down with bias and a tail": ["st.global.v4.b32"],
        "gathered: silu": ["st.global.v4.b32"],
        "gathered: odd chunks, top 1": ["st.global.b16"],
        "fp8: silu, quantised": ["st.global.b32", "st.global.v2.b32"],  # a scale; 8 values
        "fp8: down": ["st.global.v4.b32"],
        "nobody leads": ["st.global.v4.b32"],
        "fp8: nobody leads": ["st.global.v4.b32"],
    }
    for entry in report:
        products = ["m64n128k32.f32.e4m3"] if entry["is_fp8"] else ["m64n256k16.f32.bf16"]
        assert entry["products"] == products, entry
        assert entry["shared_bytes"] <= MAX_SHARED_BYTES, entry
        assert entry["num_warps"] == 12, entry
        assert entry["dead_barriers"] == [], entry
        assert "serialized" not in entry["assembler"], entry
        assert " 0 bytes spill stores, 0 bytes spill loads" in entry["assembler"], entry
        assert set(entry["registers"]) >= ({40, 232} if entry["gathers"] else {24, 240}), entry
        assert entry["narrow_copies"] == 0, entry
        # 8 a thread and stage, of 128 rows in 128 threads; a fence in each of a consumer's waits.
        copies, arrive, fences = (8, 1, 1 + 2 * 3) if entry["gathers"] else (0, 0, 1)
        assert (entry["copies"], entry["copies_arrive"]) == (copies, arrive), entry
        assert entry["proxy_fences"] == fences, entry
        assert ("129" in entry["full_counts"]) is entry["gathers"], entry
