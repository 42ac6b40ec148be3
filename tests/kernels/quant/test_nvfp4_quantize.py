"""Quantising to NVFP4: against the writer of the tests, which follows modelopt's code."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.e2m1 import E2M1_VALUES, e2m1_codes
from ep_runtime.kernels.quant.nvfp4 import quantize_nvfp4
from ep_runtime.kernels.quant.storage import stored_shapes, tensors_of
from tests.kernels.quant.writers import write_modelopt_nvfp4


def test_codes_are_the_nearest_and_a_tie_goes_to_the_even_one() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, 0.26, -0.76, -0.25, -9.0])
    codes = e2m1_codes(values)
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 1, 8 + 2, 8, 8 + 7]
    every = torch.tensor(E2M1_VALUES)
    expected = [*range(8), 0, *range(9, 16)]  # -0.0 is not below 0
    assert e2m1_codes(every).tolist() == expected


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 12),
    groups=st.integers(1, 9),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 2**31),
)
def test_a_weight_is_as_near_as_the_other_writers(
    rows: int, groups: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = scale * torch.randn(rows, 16 * groups, generator=generator)
    stored = quantize_nvfp4(weight)
    declared = stored_shapes(stored.scheme, rows, 16 * groups, num_parts=1, dtype=torch.float32)
    found = {n: (tuple(t.shape), t.dtype) for n, t in tensors_of(stored).items()}
    assert found == {n: ((1, *one.shape), one.dtype) for n, one in declared.items()}
    error = (dequantize(stored)[0] - weight).norm()
    other = (write_modelopt_nvfp4(weight).weight - weight).norm()
    assert float(error) <= 1.001 * float(other) + 1e-12


def test_groups_of_zeros_and_whole_weights_of_zeros_stay_zeros() -> None:
    weight = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    weight[1, 16:32] = 0
    assert (dequantize(quantize_nvfp4(weight))[0][1, 16:32] == 0).all()
    stored = quantize_nvfp4(torch.zeros(2, 16))
    assert stored.parameters.global_scales is not None
    assert stored.parameters.global_scales.tolist() == [[1.0]]
    assert (dequantize(stored) == 0).all()


def test_what_cannot_be_stored_is_refused() -> None:
    with pytest.raises(ValueError, match=r"every 16 columns.* 40; give a multiple"):
        quantize_nvfp4(torch.randn(2, 40))
    with pytest.raises(ValueError, match="no NVFP4 form"):
        quantize_nvfp4(torch.full((2, 16), torch.nan))
