"""How far a result may be from its reference, and how the distance is measured."""

import torch
from torch import Tensor

# Largest relative Frobenius error of a result computed in a dtype against a float32 reference.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}

# Sums of e4m3 products on a GPU: Hopper keeps about 14 bits of a sum (DeepSeek-V3's
# technical report, arXiv 2412.19437, section 3.3.2), which gave 1.2e-4 to 2.0e-4 on an H200.
E4M3_PRODUCTS = {"cpu": 1e-5, "cuda": 5e-4}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, both Frobenius norms, in float64; NaN stays NaN."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    difference = float((actual.double() - expected.double()).norm())
    norm = float(expected.double().norm())
    return difference / norm if norm else difference


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Hold `actual` to the tolerance of its dtype."""
    error = relative_error(actual, expected)
    limit = TOLERANCES[actual.dtype]
    assert error <= limit, f"relative error {error:.2e} > {limit:.0e} for {actual.dtype}"
