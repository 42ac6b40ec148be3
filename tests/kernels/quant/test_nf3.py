"""NF3: its values by their formula, its packing, what quantising does, what is refused."""

from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_runtime.kernels.quant.dequantize import dequantize, dequantize_into
from ep_runtime.kernels.quant.format import Projection, StoredTensorError
from ep_runtime.kernels.quant.nf3 import (
    NF3_VALUES,
    ZERO_CODE,
    Nf3Format,
    normal_float_values,
    pack_codes,
    quantize_nf3,
    unpack_codes,
)
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantParameters, QuantScheme
from ep_runtime.kernels.quant.storage import stored_shapes, tensors_of

# QLoRA, appendix E.
NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


def test_the_construction_gives_the_published_values_of_nf4() -> None:
    assert normal_float_values(4) == pytest.approx(NF4, abs=2e-6)


def test_the_values_are_rounded_quantiles_of_a_normal_distribution() -> None:
    """By another inverse, torch's of the error function, and written out for eight values: three
    below 0, 0, four above, the ends at 1 - (1 / 16 + 1 / 14) / 2."""
    end = 1 - (1 / 16 + 1 / 14) / 2
    below = torch.linspace(end, 0.5, 4, dtype=torch.float64)[:-1]
    above = torch.linspace(end, 0.5, 5, dtype=torch.float64)[:-1]

    def quantile(probability: Tensor) -> Tensor:
        return 2**0.5 * torch.erfinv(2 * probability - 1)

    values = torch.cat([-quantile(below), torch.zeros(1), quantile(above)]).sort().values
    values /= values.max()
    assert tuple(values.to(torch.bfloat16).tolist()) == NF3_VALUES
    assert normal_float_values(3) == pytest.approx(values.tolist(), abs=1e-12)


def test_the_steps_of_probability_are_even_on_each_side() -> None:
    cdf, top = NormalDist().cdf, NormalDist().inv_cdf(1 - (1 / 16 + 1 / 14) / 2)
    probabilities = torch.tensor([cdf(value * top) for value in normal_float_values(3)])
    steps = probabilities.diff()
    assert torch.allclose(steps[:3], steps[0].expand(3))
    assert torch.allclose(steps[3:], steps[3].expand(4))


def test_zero_is_exact_and_the_values_fit_16_bits() -> None:
    assert NF3_VALUES[ZERO_CODE] == 0.0
    assert ZERO_CODE == 3
    exact = torch.tensor(NF3_VALUES, dtype=torch.float64)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(exact.to(dtype).double(), exact)


def test_words_are_laid_out_as_the_docstring_says() -> None:
    codes = torch.zeros(32, dtype=torch.uint8)
    codes[:3] = torch.tensor([1, 2, 4])
    assert pack_codes(codes).tolist() == [1, 2, 4]


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 9), words=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_packing_takes_three_bits_a_code_and_loses_nothing(
    rows: int, words: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 8, (rows, 32 * words), generator=generator).to(torch.uint8)
    packed = pack_codes(codes)
    assert packed.dtype is torch.int32
    assert 8 * packed.nbytes == 3 * codes.numel()
    assert torch.equal(unpack_codes(packed), codes)


@pytest.mark.parametrize("columns", [1, 31, 48, 100])
def test_columns_that_no_three_words_hold_are_refused(columns: int) -> None:
    with pytest.raises(ValueError, match=rf"32 columns in three words.* {columns}; give a mult"):
        quantize_nf3(torch.randn(2, columns))


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 20),
    words=st.integers(1, 7),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_each_weight_becomes_the_nearest_value_times_its_groups_largest(
    rows: int, words: int, scale: float, dtype: torch.dtype, seed: int
) -> None:
    """Groups of 64 columns, the last one of 32 where words is odd."""
    generator = torch.Generator().manual_seed(seed)
    weight = (scale * torch.randn(rows, 32 * words, generator=generator)).to(dtype)
    found = dequantize(quantize_nf3(weight))[0]
    table = torch.tensor(NF3_VALUES)
    for start in range(0, 32 * words, 64):
        group = weight[:, start : start + 64].float()
        largest = group.abs().amax(dim=1, keepdim=True).to(torch.bfloat16).float()
        candidates = table * largest.unsqueeze(-1)  # [rows, 1, 8]
        distance = (group.unsqueeze(-1) - candidates).abs()
        error = (group - found[:, start : start + 64]).abs()
        assert (error <= distance.amin(dim=-1) + 1e-6 * largest).all()


def test_zeros_and_groups_of_zeros_stay_zeros() -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(1))
    weight[0, 64:] = 0
    weight[1, 5] = 0
    found = dequantize(quantize_nf3(weight))[0]
    assert (found[0, 64:] == 0).all()
    assert found[1, 5] == 0


def test_what_is_stored_quantises_to_itself() -> None:
    once = quantize_nf3(torch.randn(4, 96, generator=torch.Generator().manual_seed(2)))
    again = quantize_nf3(dequantize(once)[0])
    assert torch.equal(once.values, again.values)
    assert torch.equal(once.parameters.scales, again.parameters.scales)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.ones(2, 64)
    weight[1, 3] = value
    with pytest.raises(ValueError, match="no NF3 form"):
        quantize_nf3(weight)


def test_a_format_converts_what_it_declares_and_refuses_scales_that_cannot_be() -> None:
    stored = quantize_nf3(torch.randn(6, 96, generator=torch.Generator().manual_seed(3)))
    form, projection = Nf3Format(), Projection(6, 96, torch.float32)
    tensors = {"weight": stored.values[0], "scale": stored.parameters.scales[0]}
    for role, one in form.stored(projection).items():
        assert tuple(tensors[role].shape) in one.shapes
        assert tensors[role].dtype in one.dtypes
    converted = form.convert(tensors, projection)
    declared = stored_shapes(form.scheme, 6, 96, num_parts=1, dtype=torch.float32)
    found = {n: (tuple(t.shape), t.dtype) for n, t in tensors_of(converted).items()}
    assert found == {n: ((1, *one.shape), one.dtype) for n, one in declared.items()}
    into = torch.empty(6, 96, dtype=torch.bfloat16)
    dequantize_into(converted, into)
    assert torch.equal(into, dequantize(stored)[0].to(torch.bfloat16))
    for value, message in ((float("nan"), "1 of 12 scales are NaN"), (-1.0, "negative scale")):
        wrong = tensors["scale"].clone()
        wrong[2, 1] = value
        with pytest.raises(StoredTensorError, match=message):
            form.convert({**tensors, "scale": wrong}, projection)


def test_a_weight_of_experts_is_dequantised_expert_by_expert() -> None:
    generator = torch.Generator().manual_seed(4)
    experts = [quantize_nf3(torch.randn(5, 64, generator=generator)) for _ in range(3)]
    joined = QuantizedTensor(
        torch.cat([one.values for one in experts]),
        QuantParameters(torch.cat([one.parameters.scales for one in experts])),
        QuantScheme(experts[0].scheme.weight),
    )
    assert torch.equal(dequantize(joined), torch.cat([dequantize(one) for one in experts]))
