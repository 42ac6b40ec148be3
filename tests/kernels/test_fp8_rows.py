"""Rows in e4m3 with a scale for every 128 columns: bit-equal to their definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.fp8_rows import (
    MIN_AMAX,
    dequantize_rows,
    num_groups,
    quantize_rows,
    quantize_rows_reference,
)

FP8 = torch.float8_e4m3fn


def poisoned(num_rows: int, hidden_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for values and scales, all NaN."""
    values = torch.full((num_rows, hidden_size), 0x7F, dtype=torch.uint8, device=device).view(FP8)
    scales = torch.full((num_rows, num_groups(hidden_size)), torch.nan, device=device)
    return values, scales


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, hidden_size = rows.shape
    values, scales = poisoned(num_rows, hidden_size, rows.device)
    quantize_rows(rows, out_values=values, out_scales=scales)
    return values, scales


def assert_bit_equal(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Any two NaN are equal: a GPU makes only the positive one."""
    (values, scales), (expected_values, expected_scales) = actual, expected
    assert torch.equal(scales.view(torch.int32), expected_scales.contiguous().view(torch.int32))
    is_nan = expected_values.float().isnan()
    assert torch.equal(values.float().isnan(), is_nan)
    bits, expected_bits = values.view(torch.uint8), expected_values.view(torch.uint8)
    assert torch.equal(bits[~is_nan], expected_bits[~is_nan])


def random_rows(num_rows: int, hidden_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Groups of many magnitudes, within a row too."""
    generator = torch.Generator().manual_seed(num_rows + hidden_size)
    rows = torch.randn(num_rows, hidden_size, generator=generator)
    exponents = torch.randint(-20, 12, (num_rows, num_groups(hidden_size)), generator=generator)
    magnitudes = torch.exp2(exponents.float()).repeat_interleave(128, dim=1)[:, :hidden_size]
    return (rows * magnitudes).to(dtype)


@pytest.mark.parametrize("hidden_size", [1, 96, 128, 300, 2880])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference(hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
    rows = random_rows(67, hidden_size, dtype).to(device)
    before = rows.clone()
    assert_bit_equal(quantize(rows), quantize_rows_reference(rows))
    assert torch.equal(rows, before)


def test_many_rows_equal_the_reference(device: torch.device) -> None:
    rows = random_rows(1000, 384, torch.bfloat16).to(device)
    assert_bit_equal(quantize(rows), quantize_rows_reference(rows))


def test_the_definition_written_out(device: torch.device) -> None:
    rows = torch.zeros(1, 130, device=device)
    rows[0, :3] = torch.tensor([2.0, -1.0, 0.3])
    rows[0, 128:] = torch.tensor([-7.0, 0.1])
    values, scales = quantize(rows)
    assert scales.tolist() == [[pytest.approx(2 / 448), pytest.approx(7 / 448)]]
    # 0.3 * 224 is 67.2, between the e4m3 numbers 64 and 72.
    assert values[0, :4].float().tolist() == [448.0, -224.0, 64.0, 0.0]
    assert values[0, 128:].float().tolist() == [-448.0, 6.5]
    back = dequantize_rows(values, scales, torch.float32)
    assert back[0, 0] == 2.0
    assert back[0, 128] == -7.0


@pytest.mark.parametrize("largest", [3.4e38, 1.0, 3.0625, 1e-30, MIN_AMAX, 1e-38, 1e-45])
def test_the_largest_becomes_448_down_to_the_smallest_amax(
    largest: float, device: torch.device
) -> None:
    rows = torch.full((1, 128), -largest, device=device)
    values, scales = quantize(rows)
    assert_bit_equal((values, scales), quantize_rows_reference(rows))
    assert float(scales) >= 2.0**-126, "a normal number, so that it survives any device"
    if largest >= MIN_AMAX:
        assert (values.float() == -448).all()
        assert torch.allclose(dequantize_rows(values, scales, torch.float32), rows, rtol=1e-6)


def test_a_group_of_zeros_dequantises_to_zeros(device: torch.device) -> None:
    rows = random_rows(3, 384).to(device)
    rows[:, 128:256] = 0
    values, scales = quantize(rows)
    back = dequantize_rows(values, scales, torch.float32)
    assert (back[:, 128:256] == 0).all()
    assert torch.isfinite(scales).all()


def test_nan_stays_and_leaves_its_group_alone(device: torch.device) -> None:
    rows = random_rows(3, 256).to(device)
    clean = rows.clone()
    rows[1, 5] = torch.nan
    clean[1, 5] = 0
    values, scales = quantize(rows)
    assert_bit_equal((values, scales), quantize_rows_reference(rows))
    back = dequantize_rows(values, scales, torch.float32)
    assert back.isnan().nonzero().tolist() == [[1, 5]]
    expected = dequantize_rows(*quantize_rows_reference(clean), torch.float32)
    assert torch.equal(back.nan_to_num(0.0), expected)


def test_a_group_of_nan_has_the_scale_of_zeros(device: torch.device) -> None:
    rows = torch.full((1, 128), torch.nan, device=device)
    values, scales = quantize(rows)
    assert values.float().isnan().all()
    assert scales.tolist() == [[2.0**-126]]


@pytest.mark.parametrize("infinity", [torch.inf, -torch.inf])
def test_a_group_with_an_infinity_is_nan(infinity: float, device: torch.device) -> None:
    rows = random_rows(3, 300).to(device)
    rows[1, 130] = infinity
    values, scales = quantize(rows)
    assert_bit_equal((values, scales), quantize_rows_reference(rows))
    is_nan = dequantize_rows(values, scales, torch.float32).isnan()
    assert is_nan[1, 128:256].all()
    assert int(is_nan.sum()) == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantising_loses_little(dtype: torch.dtype, device: torch.device) -> None:
    rows = random_rows(50, 2880, dtype).to(device)
    back = dequantize_rows(*quantize(rows), torch.float32)
    # Three bits behind the leading one: half a step is 1/16, or in the subnormals 2^-10.
    largest = rows.float().abs().unfold(1, 128, 128).amax(-1)  # of the full groups
    scales = largest.repeat_interleave(128, dim=1) / 448
    width = scales.shape[1]
    error = (back - rows.float()).abs()[:, :width]
    bound = (rows.float().abs()[:, :width] / 16).maximum(scales * 2**-10) * 1.0001
    assert (error <= bound).all()


def test_strided_rows_values_and_scales(device: torch.device) -> None:
    wide = random_rows(40, 600).to(device)
    for rows in (wide[:, ::2], wide.T[:300], wide[::3, 7:300], wide[:1].expand(40, 600)):
        expected = quantize_rows_reference(rows)
        num_rows, hidden_size = rows.shape
        values, _ = poisoned(hidden_size, num_rows, device)
        scales = torch.full((num_groups(hidden_size), num_rows), torch.nan, device=device)
        quantize_rows(rows, out_values=values.T, out_scales=scales.T)
        assert_bit_equal((values.T.contiguous(), scales.T.contiguous()), expected)


def test_memory_beside_the_outputs_is_left_alone(device: torch.device) -> None:
    rows = random_rows(5, 300).to(device)
    values, scales = poisoned(7, 320, device)
    quantize_rows(rows, out_values=values[1:6, :300], out_scales=scales[1:6])
    assert_bit_equal((values[1:6, :300], scales[1:6].contiguous()), quantize_rows_reference(rows))
    beside = values.float()
    beside[1:6, :300] = torch.nan
    assert beside.isnan().all()
    assert scales[0].isnan().all()
    assert scales[6].isnan().all()


def test_no_rows_and_no_columns(device: torch.device) -> None:
    for shape in ((0, 300), (3, 0)):
        rows = torch.empty(shape, device=device)
        for values, scales in (quantize(rows), quantize_rows_reference(rows)):
            assert values.shape == shape
            assert scales.shape == (shape[0], -(-shape[1] // 128))
            assert dequantize_rows(values, scales, torch.float32).shape == shape


@pytest.mark.skipif(not is_interpreting(), reason="takes 4.3 GB of a GPU, none of a CPU's")
def test_an_offset_beyond_2_31_elements() -> None:
    memory = torch.empty(2**31 + 4096, dtype=torch.float16)  # hardly any of it ever touched
    rows = memory.as_strided((3, 300), (2**30, 1))
    rows.copy_(random_rows(3, 300))
    assert_bit_equal(quantize(rows), quantize_rows_reference(rows))


@pytest.mark.parametrize(
    ("values_shape", "scales_shape", "message"),
    [
        ((3, 299), (3, 3), r"out_values is torch.float8_e4m3fn \[3, 299\]; rows \[3, 300\] need"),
        ((3, 300), (3, 2), r"out_scales is torch.float32 \[3, 2\]; rows .* need .* \[3, 3\]"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(
    values_shape: tuple[int, int], scales_shape: tuple[int, int], message: str
) -> None:
    values, scales = torch.empty(values_shape, dtype=FP8), torch.empty(scales_shape)
    with pytest.raises(ValueError, match=message):
        quantize_rows(torch.empty(3, 300), out_values=values, out_scales=scales)


@pytest.mark.skipif(not is_interpreting(), reason="a property of the CPU run")
@given(bits=st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=300))
@settings(deadline=None, max_examples=60)
def test_any_bfloat16_bits_equal_the_reference(bits: list[int]) -> None:
    signed = [b - 2**16 if b >= 2**15 else b for b in bits]
    rows = torch.tensor([signed], dtype=torch.int16).view(torch.bfloat16)
    actual, expected = quantize(rows), quantize_rows_reference(rows)
    assert_bit_equal(actual, expected)
    lost = ~rows.isfinite() & ~dequantize_rows(*actual, torch.float32).isnan()
    assert not lost.any()
