"""AWQ: the order of a word's fields, zero points, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.awq import AwqFormat, read_awq, unpack_rows
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.format import Projection, StoredTensorError
from ep_runtime.kernels.quant.packing import unpack_pairs
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from tests.kernels.quant.agreement import check_agreement, read
from tests.kernels.quant.writers import quantize_int, write_awq

WORD = 0x75316420


def test_the_fields_of_a_word_read_0_to_7() -> None:
    assert unpack_rows(torch.tensor([[WORD]], dtype=torch.int32)).tolist() == [list(range(8))]


def test_eight_different_zero_points_each_go_to_their_row() -> None:
    """Codes 15 in all rows, zero points 0 to 7: 15, 14, ... 8."""
    tensors = {
        "qweight": torch.full((2, 1), -1, dtype=torch.int32),
        "qzeros": torch.tensor([[WORD]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    converted = AwqFormat(None).convert(tensors, Projection(8, 2, torch.float32))
    assert dequantize(converted)[0].tolist() == [[15 - row] * 2 for row in range(8)]


@settings(deadline=None, max_examples=40)
@given(
    group_size=st.sampled_from([32, 64, 128, -1]),
    num_words=st.integers(1, 5),
    half_columns=st.integers(1, 150),
    seed=st.integers(0, 2**31),
)
def test_any_awq_weight_is_what_its_writer_meant(
    group_size: int, num_words: int, half_columns: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8 * num_words, 2 * half_columns, generator=generator)
    written = write_awq(weight, group_size=group_size)
    converted = check_agreement(read_awq(written.config), written)
    quantized = quantize_int(weight, bits=4, group_size=group_size, is_symmetric=False)
    zeros = converted.parameters.zero_points
    assert zeros is not None
    assert torch.equal(unpack_pairs(converted.values)[0].int(), quantized.codes)
    assert torch.equal(zeros[0].int(), quantized.zeros)


def test_scales_take_the_dtype_of_the_layer() -> None:
    written = write_awq(torch.randn(8, 128))
    converted = read(read_awq(written.config), written, torch.bfloat16)
    scales = written.tensors[".scales"].T.to(torch.bfloat16)
    assert torch.equal(converted.parameters.scales[0], scales)


def test_a_bias_other_than_0_is_refused() -> None:
    written = write_awq(torch.randn(8, 128))
    written.tensors[".bias"] = torch.ones(8).half()
    with pytest.raises(StoredTensorError, match="bias: is not 0"):
        read(read_awq(written.config), written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, r"quantization_config.bits \(8\) must be 4; quantise again with 4 bits"),
        ({"version": "gemv"}, r"quantization_config.version \('gemv'\) must be 'gemm'; pack"),
        ({"version": None, "format": "gemv_fast"}, r"format \('gemv_fast'\) must be 'gemm'"),
        ({"backend": "llm-awq"}, r"quantization_config.backend \('llm-awq'\) packs in another"),
        ({"group_size": None}, r"quantization_config.group_size \(None\) must be the number"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(
    change: dict[str, Any], message: str
) -> None:
    config = {"bits": 4, "group_size": -1, "version": "GEMM", "backend": "auto"}
    assert read_awq(config).scheme == QuantScheme(WeightScheme.INT4, None, has_zero_points=True)
    with pytest.raises(ConfigError, match=message):
        read_awq({**config, **change})
