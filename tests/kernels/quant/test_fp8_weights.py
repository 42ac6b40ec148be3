"""fp8 weights: blocks, channels, whole tensors, and the configurations that say which."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize, dequantize_into
from ep_runtime.kernels.quant.format import Projection, StoredTensorError
from ep_runtime.kernels.quant.fp8_weights import (
    Fp8Format,
    ScaleOf,
    read_compressed_fp8,
    read_fp8,
)
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.quant.storage import stored_shapes, take_experts, tensors_of
from tests.kernels.fp8_cases import quantize_fp8

BLOCK = QuantScheme(WeightScheme.FP8_BLOCK)
CHANNEL = QuantScheme(WeightScheme.FP8_CHANNEL)
# Whole blocks; a partial last one of each kind; gate and up that share a block of their [2I].
SIZES = [(256, 128), (272, 160), (128, 300), (2, 1)]


def random_weight(num_experts: int, rows: int, columns: int) -> Tensor:
    """Rows and columns of very different sizes, so that a scale of another block would show."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(num_experts, rows, columns, generator=generator)
    return weight * torch.logspace(-2, 2, rows)[:, None] * torch.logspace(-1, 1, columns)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("num_parts", [1, 2])
def test_blocks_are_dequantised_as_transformers_does_each_part(
    size: tuple[int, int], num_parts: int
) -> None:
    weight = random_weight(3, *size)
    quantised = quantize_fp8(weight, BLOCK, num_parts)
    shapes = stored_shapes(BLOCK, *size, num_parts=num_parts, dtype=torch.bfloat16)
    stored = {n: (t.shape[1:], t.dtype) for n, t in tensors_of(quantised).items()}
    assert stored == {n: (one.shape, one.dtype) for n, one in shapes.items()}
    parts = zip(
        quantised.values.chunk(num_parts, dim=1),
        quantised.parameters.scales.chunk(num_parts, dim=1),
        strict=True,
    )
    expected = [_dequantize_fp8_weight(v, s, [128, 128], torch.float32) for v, s in parts]
    actual = dequantize(quantised, num_parts)
    assert torch.equal(actual, torch.cat(expected, dim=1))
    # e4m3 has 3 bits after the leading one; below 2^-6 of the scale they are fewer.
    largest = quantised.parameters.scales.max() * 2**-9
    assert bool(((actual - weight).abs() <= weight.abs() / 16 + largest).all())


def test_channels_are_rows_times_their_scale() -> None:
    weight = random_weight(2, 96, 70)
    quantised = quantize_fp8(weight, CHANNEL, 2)
    scales = quantised.parameters.scales
    assert scales.shape == (2, 96)
    assert torch.equal(dequantize(quantised, 2), quantised.values.float() * scales[..., None])
    assert torch.equal(quantised.values.float().abs().amax(2), torch.full((2, 96), 448.0))
    assert bool(
        ((dequantize(quantised, 2) - weight).abs() <= weight.abs() / 16 + scales.max()).all()
    )


def test_zeros_stay_zeros() -> None:
    for scheme in (BLOCK, CHANNEL):
        quantised = quantize_fp8(torch.zeros(1, 130, 130), scheme, 1)
        assert torch.equal(dequantize(quantised), torch.zeros(1, 130, 130))
        assert bool((quantised.parameters.scales == 1).all())


def test_values_and_scales_of_an_expert_are_taken_together() -> None:
    for scheme in (BLOCK, CHANNEL):
        quantised = quantize_fp8(random_weight(4, 144, 130), scheme, 2)
        taken = take_experts(quantised, [3, 1])
        assert torch.equal(dequantize(taken, 2), dequantize(quantised, 2)[[3, 1]])


@pytest.mark.parametrize("scheme", [BLOCK, CHANNEL], ids=["block", "channel"])
def test_dequantising_in_pieces_gives_the_same(
    scheme: QuantScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ep_runtime.kernels.quant.dequantize.PIECE_BYTES", 4 * 200 * 128)
    quantised = quantize_fp8(random_weight(1, 300, 200), scheme, 1)
    out = torch.full((300, 200), torch.nan, dtype=torch.bfloat16)
    dequantize_into(quantised, out)
    assert torch.equal(out, dequantize(quantised)[0].bfloat16())


@pytest.mark.parametrize(
    ("scale_of", "scales", "expected"),
    [
        (ScaleOf.TENSOR, torch.tensor(2.0), [2.0, 2.0, 2.0]),
        (ScaleOf.TENSOR, torch.tensor([0.5], dtype=torch.bfloat16), [0.5, 0.5, 0.5]),
        (ScaleOf.CHANNEL, torch.tensor([[1.0], [2.0], [4.0]]).half(), [1.0, 2.0, 4.0]),
        (ScaleOf.CHANNEL, torch.tensor([1.0, 2.0, 4.0]), [1.0, 2.0, 4.0]),
        (ScaleOf.BLOCK, torch.tensor([[8.0]]).to(torch.float8_e8m0fnu), [8.0, 8.0, 8.0]),
    ],
)
def test_every_stored_scale_is_a_multiplier(
    scale_of: ScaleOf, scales: Tensor, expected: list[float]
) -> None:
    form, projection = Fp8Format(scale_of, (".weight_scale",)), Projection(3, 5, torch.bfloat16)
    stored = form.stored(projection)["scale"]
    assert tuple(scales.shape) in stored.shapes
    assert scales.dtype in stored.dtypes
    ones = torch.ones(3, 5, dtype=torch.float8_e4m3fn)
    converted = form.convert({"weight": ones, "scale": scales}, projection)
    assert dequantize(converted)[0].tolist() == [[scale] * 5 for scale in expected]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(value: float) -> None:
    form = Fp8Format(ScaleOf.BLOCK, (".weight_scale_inv",))
    scales = torch.tensor([[1.0], [value]])
    tensors = {"weight": torch.ones(200, 3, dtype=torch.float8_e4m3fn), "scale": scales}
    with pytest.raises(StoredTensorError, match="scale: 1 of 2 scales are NaN or infinite"):
        form.convert(tensors, Projection(200, 3, torch.bfloat16))


def test_configurations_say_what_a_scale_belongs_to() -> None:
    deepseek = {"fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert read_fp8(deepseek).scale_of is ScaleOf.BLOCK
    assert read_fp8({**deepseek, "scale_fmt": "ue8m0"}) == read_fp8(deepseek)
    auto_fp8 = read_fp8({"activation_scheme": "static"})
    assert (auto_fp8.scale_of, auto_fp8.has_activation_scales) == (ScaleOf.TENSOR, True)
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
    dynamic = {"num_bits": 8, "type": "float", "dynamic": True}
    channel = read_compressed_fp8({"weights": weights, "input_activations": dynamic})
    assert (channel.scale_of, channel.has_activation_scales) == (ScaleOf.CHANNEL, False)
    static = {"num_bits": 8, "type": "float", "dynamic": False}
    assert read_compressed_fp8(
        {"weights": weights, "input_activations": static}
    ).has_activation_scales
    assert not read_compressed_fp8({"weights": weights}).has_activation_scales


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, r"quantization_config.fmt \('e5m2'\) must be 'e4m3'"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size \(\[64, 128\]\) must be \[128, 128"),
        ({"activation_scheme": "none"}, "activation_scheme"),
        ({"scale_fmt": "fp16"}, "scale_fmt"),
        ({"expert_dtype": "fp4"}, "expert_dtype"),
        ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
    ],
)
def test_what_fp8_does_not_read_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_fp8(changes)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"num_bits": 4}, r"^weights.num_bits \(4\)"),
        ({"type": "int"}, r"^weights.type \('int'\)"),
        ({"strategy": "group"}, r"^weights.strategy \('group'\)"),
        ({"strategy": "block"}, r"^weights.block_structure \(None\) must be \[128, 128\]"),
        ({"symmetric": False}, r"^weights.symmetric \(False\)"),
    ],
)
def test_what_compressed_fp8_does_not_read_is_refused_by_name(
    group: dict[str, Any], message: str
) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    with pytest.raises(ConfigError, match=message):
        read_compressed_fp8({"weights": {**weights, **group}})
    int8 = {"num_bits": 8, "type": "int"}
    with pytest.raises(ConfigError, match=r"^input_activations.type \('int'\)"):
        read_compressed_fp8({"weights": weights, "input_activations": int8})
