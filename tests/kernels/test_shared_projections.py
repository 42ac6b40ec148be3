"""The shared expert's products against their definitions: every way, on poisoned outputs."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from ep_runtime.kernels import shared_projections
from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation, ActivationKind
from ep_runtime.kernels.dense_gemm import (
    DenseTiles,
    DenseWeight,
    activate_splits,
    activate_splits_reference,
    multiply,
)
from ep_runtime.kernels.grouped_gemm import GemmRows
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, num_groups, quantize_rows_reference
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.shared_projections import (
    SharedProjections,
    SharedShape,
    SharedTiles,
    can_read,
    choose_shared_tiles,
)
from tests.kernels.fp8_cases import quantize_fp8
from tests.kernels.test_operators import Watcher
from tests.tolerances import E4M3_PRODUCTS, assert_close, relative_error

FP8_BLOCK = QuantScheme(WeightScheme.FP8_BLOCK)
SILU = Activation()
ACTIVATIONS = [
    *(Activation(kind) for kind in ActivationKind),
    Activation(ActivationKind.SWIGLUOAI, limit=0.7),
]


@dataclass(frozen=True)
class Weights:
    """As the kernels take them, and what they stand for: [2I, H] and [H, I] float32."""

    w13: DenseWeight
    w2: DenseWeight
    plain13: Tensor
    plain2: Tensor


def weights_of(shape: SharedShape, device: torch.device, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def weight(num_rows: int, num_columns: int, num_parts: int) -> tuple[DenseWeight, Tensor]:
        values = torch.randn(1, num_rows, num_columns, generator=generator) / num_columns**0.5
        if not shape.is_fp8:
            rounded = values[0].to(device, shape.dtype)
            return DenseWeight(rounded, num_parts=num_parts), rounded.float()
        stored = quantize_fp8(values, FP8_BLOCK, num_parts)
        scales = stored.parameters.scales[0].to(device)
        dense = DenseWeight(stored.values[0].to(device), scales, num_parts)
        return dense, dequantize(stored, num_parts)[0].to(device)

    w13, plain13 = weight(shape.num_parts * shape.width, shape.hidden_size, shape.num_parts)
    w2, plain2 = weight(shape.hidden_size, shape.width, 1)
    return Weights(w13, w2, plain13, plain2)


def rows_of(num_rows: int, shape: SharedShape, device: torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, shape.hidden_size, generator=generator)
    return rows.to(device, shape.dtype)


def poisoned(num_rows: int, shape: SharedShape, device: torch.device) -> Tensor:
    return torch.full((num_rows, shape.hidden_size), torch.nan, device=device, dtype=shape.dtype)


def rounded(rows: Tensor, shape: SharedShape) -> Tensor:
    """float32 as the second product reads it: quantised, or rounded to the dtype."""
    if shape.is_fp8:
        return dequantize_rows(*quantize_rows_reference(rows), torch.float32)
    return rows.to(shape.dtype).float()


def defined(rows: Tensor, weights: Weights, shape: SharedShape) -> Tensor:
    """[T, H] float32, of rows and activated rows that are rounded as they are stored."""
    gate_up = linear(rounded(rows.float(), shape), weights.plain13)
    activated = rounded(apply_activation(gate_up, shape.activation), shape)
    return linear(activated, weights.plain2)


def assert_defined(out: Tensor, rows: Tensor, weights: Weights, shape: SharedShape) -> None:
    assert_close(out, defined(rows, weights, shape))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    ("activation", "num_rows"),
    [*((activation, 17) for activation in ACTIVATIONS), (SILU, 1), (SILU, 150)],
    ids=str,
)
def test_the_output_is_the_gated_mlp_of_every_row(
    is_fp8: bool, activation: Activation, num_rows: int, device: torch.device
) -> None:
    """Sizes that neither a tile nor a block of scales divides."""
    shape = SharedShape(208, 144, activation, torch.bfloat16, is_fp8)
    weights, rows = weights_of(shape, device), rows_of(num_rows, shape, device)
    before, out = rows.clone(), poisoned(num_rows, shape, device)
    SharedProjections(shape, device).run(rows, weights.w13, weights.w2, out=out)
    assert torch.equal(rows, before)
    assert_defined(out, rows, weights, shape)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    ("dtype", "split_k", "swap_operands"),
    [
        (torch.bfloat16, 1, True),
        (torch.float16, 3, True),
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 8, False),
    ],
)
def test_however_it_is_cut_the_result_is_the_same(
    is_fp8: bool, dtype: torch.dtype, split_k: int, swap_operands: bool, device: torch.device
) -> None:
    """With 8 splits of 5 steps some have none, which leave 0."""
    shape = SharedShape(640, 128, SILU, dtype, is_fp8)
    weights, rows = weights_of(shape, device), rows_of(20, shape, device)
    tiles = DenseTiles(16, 64, 128, num_warps=4, num_stages=2, swap_operands=swap_operands)
    out = poisoned(20, shape, device)
    SharedProjections(shape, device).run_few(
        rows,
        weights.w13,
        weights.w2,
        tiles=SharedTiles(replace(tiles, split_k=split_k), tiles),
        out=out,
    )
    assert_defined(out, rows, weights, shape)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_a_product_has_a_sum_of_each_range_of_columns(is_fp8: bool, device: torch.device) -> None:
    shape = SharedShape(384, 80, SILU, torch.bfloat16, is_fp8)
    weights, rows = weights_of(shape, device), rows_of(5, shape, device)
    given, values = GemmRows(rows), rows.float()
    if is_fp8:
        given = GemmRows(*quantize_rows_reference(rows))
        values = dequantize_rows(given.values, given.scales, torch.float32)  # type: ignore[arg-type]
    tiles = DenseTiles(16, 32, 128, 4, 1, split_k=2, swap_operands=True)
    out = torch.full((2, 5, 160), torch.nan, device=device)
    multiply(given, weights.w13, tiles=tiles, out=out)
    limit = E4M3_PRODUCTS[device.type] if is_fp8 else 1e-5
    for split, columns in enumerate((slice(256), slice(256, 384))):
        wanted = linear(values[:, columns], weights.plain13[:, columns])
        assert relative_error(out[split], wanted) <= limit


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_splits_are_added_and_activated_as_defined(
    activation: Activation, is_fp8: bool, device: torch.device
) -> None:
    num_rows, width = 70, 300
    parts = 2 if activation.is_gated else 1
    splits = torch.randn(3, num_rows, parts * width, device=device)
    splits[:, 2, :7] = 0
    sides = []
    for run in (activate_splits, activate_splits_reference):
        if is_fp8:
            values = torch.full((num_rows, width), 0xFF, dtype=torch.uint8, device=device)
            scales = torch.full((num_groups(width), num_rows), torch.nan, device=device)
            out = GemmRows(values.view(torch.float8_e4m3fn), scales.T)
        else:
            out = GemmRows(torch.full((num_rows, width), torch.nan, device=device).bfloat16())
        run(splits, activation, out=out)
        is_plain = out.scales is None
        sides.append(
            out.values.float()
            if is_plain
            else dequantize_rows(out.values, out.scales, torch.float32)  # type: ignore[arg-type]
        )
    # exp and erf may differ in their last bit, and a value then falls to the next code.
    torch.testing.assert_close(sides[0], sides[1], rtol=0.13 if is_fp8 else 0.01, atol=1e-3)
    assert relative_error(sides[0], sides[1]) <= 2e-3


def test_a_row_of_nan_stays_its_own(device: torch.device) -> None:
    for is_fp8 in (False, True):
        shape = SharedShape(128, 128, SILU, torch.bfloat16, is_fp8)
        weights, rows = weights_of(shape, device), rows_of(9, shape, device)
        rows[4] = torch.nan
        out = poisoned(9, shape, device)
        SharedProjections(shape, device).run(rows, weights.w13, weights.w2, out=out)
        assert out[4].isnan().all()
        assert not out[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()


def test_rows_and_outputs_may_have_any_strides(device: torch.device) -> None:
    shape = SharedShape(128, 128, SILU, torch.bfloat16)
    weights, wide = weights_of(shape, device), rows_of(6, replace(shape, hidden_size=257), device)
    for is_fp8 in (False, True):
        shape = replace(shape, is_fp8=is_fp8)
        weights = weights_of(shape, device)
        rows = wide[:, 1:129]  # at an odd address, an odd number of columns apart
        out = torch.full((6, 256), torch.nan, device=device, dtype=torch.bfloat16)[:, ::2]
        SharedProjections(shape, device).run(rows, weights.w13, weights.w2, out=out)
        assert_defined(out, rows, weights, shape)


def test_no_rows_are_no_launch(device: torch.device) -> None:
    shape = SharedShape(128, 128, SILU, torch.bfloat16, is_fp8=True)
    weights, rows = weights_of(shape, device), rows_of(0, shape, device)
    SharedProjections(shape, device).run(rows, weights.w13, weights.w2, out=rows.clone())


@pytest.mark.parametrize(
    ("changes", "is_readable"),
    [
        ({}, True),
        ({"hidden_size": 100}, False),
        ({"width": 100}, False),
        ({"hidden_size": 104, "width": 8}, True),
        ({"hidden_size": 104, "is_fp8": True}, False),
        ({"hidden_size": 112, "width": 48, "is_fp8": True}, True),
        ({"dtype": torch.float32}, False),
    ],
)
def test_rows_must_be_a_multiple_of_16_bytes(changes: dict[str, Any], is_readable: bool) -> None:
    shape = replace(SharedShape(128, 128, SILU, torch.bfloat16), **changes)
    assert can_read(shape) is is_readable
    if not is_readable:
        with pytest.raises(ValueError, match="cannot read a shared expert"):
            SharedProjections(shape, torch.device("cpu"))


def test_of_16_bits_many_rows_are_left_to_the_library_and_none_of_fp8() -> None:
    half = SharedShape(128, 128, SILU, torch.bfloat16)
    device = torch.device("cpu")
    taken = [SharedProjections(half, device).takes_rows(n) for n in (1, 32, 33)]
    assert taken == [True, True, False]
    assert SharedProjections(replace(half, is_fp8=True), device).takes_rows(100_000)


def test_an_operator_is_seen_with_what_it_writes(device: torch.device) -> None:
    shape = SharedShape(128, 128, SILU, torch.bfloat16, is_fp8=True)
    weights, rows = weights_of(shape, device), rows_of(3, shape, device)
    out = poisoned(3, shape, device)
    projections = SharedProjections(shape, device)
    with Watcher() as watcher:
        projections.run(rows, weights.w13, weights.w2, out=out)
    assert watcher.ours == ["ep_runtime::run_shared_projections"]
    written = watcher.seen["ep_runtime::run_shared_projections"]
    assert {name: tensor.data_ptr() for name, tensor in written.items()} == {"out": out.data_ptr()}
    assert_defined(out, rows, weights, shape)


@pytest.mark.parametrize("num_rows", [1, 8, 33, 64, 128, 400])
@pytest.mark.parametrize(
    ("hidden_size", "width"), [(7168, 2048), (2048, 2816), (3584, 20480), (5120, 1536), (64, 16)]
)
def test_tiles_fill_a_device_and_fit_a_multiprocessor(
    num_rows: int, hidden_size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_projections, "is_interpreting", lambda: False)
    for is_fp8 in (False, True):
        shape = SharedShape(hidden_size, width, SILU, torch.bfloat16, is_fp8)
        tiles = choose_shared_tiles(num_rows, shape, torch.device("meta"))
        assert tiles.down.split_k == 1
        assert tiles.gate_up.block_m == tiles.down.block_m
        for one in (tiles.gate_up, tiles.down):
            itemsize = 1 if is_fp8 else 2
            stage_bytes = (one.block_m + one.block_n) * one.block_k * itemsize
            assert stage_bytes * one.num_stages <= 220 * 1024
        one = tiles.gate_up
        ring_bytes = (one.block_m + one.block_n) * one.block_k * itemsize * one.num_stages
        places = 132 * (2 if ring_bytes <= 112 * 1024 else 1)
        blocks = 2 * -(-width // one.block_n) * -(-num_rows // one.block_m)
        assert blocks * one.split_k <= max(places, blocks)
        if (hidden_size, width, num_rows) == (7168, 2048, 8):
            assert blocks * one.split_k == (256 if is_fp8 else 128)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 600, 1000, 70_000])
def test_the_hopper_gemms_take_any_number_of_rows(num_rows: int) -> None:
    """70,000 are more than the tables have."""
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("no Hopper GPU")
    for activation in (SILU, Activation(ActivationKind.RELU2)):
        shape = SharedShape(1024, 272, activation, torch.bfloat16, is_fp8=True)
        weights, rows = weights_of(shape, device), rows_of(num_rows, shape, device)
        out = poisoned(num_rows, shape, device)
        SharedProjections(shape, device).run_on_hopper(rows, weights.w13, weights.w2, out=out)
        assert_defined(out, rows, weights, shape)
