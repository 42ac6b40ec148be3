"""How quantised weights are repacked for the packed kernels."""

import pytest
import torch

from ep_runtime.kernels.quant.packed_weights import (
    PackedLayout,
    pack_weight,
    packed_layout,
    unpack_words,
)
from ep_runtime.kernels.quant.packing import unpack_pairs
from ep_runtime.kernels.quant.scheme import QuantParameters, QuantScheme, WeightScheme
from tests.kernels.cases import ExpertsCase
from tests.kernels.packed_cases import MXFP4, PackedCase, int4, int8

CASE = ExpertsCase("any", num_experts=2)
CPU = torch.device("cpu")
ONE = QuantParameters(torch.ones(1, 1, 1))


def test_words_of_four_bits_are_laid_out_as_the_docstring_says() -> None:
    pairs = torch.tensor([[[0x10, 0x32, 0x54, 0x76]]], dtype=torch.uint8)
    words, quant = pack_weight(pairs, ONE, PackedLayout("int4", 2, None))
    assert words.tolist() == [[[0x6420, 0x7531]]]
    assert quant.scales.shape == (1, 1, 1)


def test_words_of_eight_bits_are_laid_out_as_the_docstring_says() -> None:
    codes = torch.tensor([[[0x10, 0x32, 0x54, 0x76]]], dtype=torch.uint8)
    words, _ = pack_weight(codes, ONE, PackedLayout("int8", 2, None))
    assert words.tolist() == [[[0x5410, 0x7632]]]


def test_four_bits_lose_nothing_and_are_filled_up_with_zeros() -> None:
    weight = PackedCase("odd", CASE, int4(64, has_zero_points=True)).quantized(5, 300, CPU)
    layout = packed_layout(weight.scheme)
    words, quant = pack_weight(weight.values, weight.parameters, layout)
    assert words.shape == (2, 5, 2 * 64)
    assert torch.equal(unpack_words(words, 300, layout), unpack_pairs(weight.values))
    assert not unpack_words(words, 512, layout)[..., 300:].any()
    assert quant.scales.shape == (2, 8, 5)
    assert torch.equal(quant.scales[:, :5].mT, weight.parameters.scales)
    assert not quant.scales[:, 5:].any()


def test_eight_bits_lose_nothing_and_are_filled_up_with_zeros() -> None:
    weight = PackedCase("odd", CASE, int8(64)).quantized(5, 301, CPU)
    layout = packed_layout(weight.scheme)
    words, quant = pack_weight(weight.values, weight.parameters, layout)
    assert words.shape == (2, 5, 3 * 64)
    assert torch.equal(unpack_words(words, 301, layout), weight.values)
    assert not unpack_words(words, 384, layout)[..., 301:].any()
    assert quant.scales.shape == (2, 6, 5)


def test_inputs_are_not_written() -> None:
    weight = PackedCase("small", CASE, MXFP4).quantized(5, 64, CPU)
    before = weight.values.clone()
    words, _ = pack_weight(weight.values, weight.parameters, packed_layout(MXFP4))
    words.fill_(-1)
    assert torch.equal(weight.values, before)


@pytest.mark.parametrize("group_size", [16, 96, 2048])
def test_a_group_size_that_no_block_fits_is_refused(group_size: int) -> None:
    with pytest.raises(ValueError, match=rf"group_size \({group_size}\) is not among its 32, 64"):
        packed_layout(QuantScheme(WeightScheme.INT4, group_size))


def test_an_order_of_columns_is_refused() -> None:
    with pytest.raises(ValueError, match=r"act-order.*choose experts: auto"):
        packed_layout(QuantScheme(WeightScheme.INT4, 128, has_input_order=True))


def test_other_schemes_have_no_layout() -> None:
    with pytest.raises(ValueError, match="fp8_block have no packed layout"):
        packed_layout(QuantScheme(WeightScheme.FP8_BLOCK))
