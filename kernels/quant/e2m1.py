"""e2m1, the 4-bit float of MXFP4 and NVFP4: sign, two exponent bits, one mantissa bit.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3: codes 0 to 7 are 0, 0.5, 1,
1.5, 2, 3, 4, 6, and bit 3 is the sign. It has neither infinities nor NaN.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ep_runtime.kernels.quant.packing import unpack_pairs

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))


def e2m1_values(pairs: Tensor) -> Tensor:
    """Packed codes [..., K / 2] uint8, the even column in the low nibble, as float32 [..., K]."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=pairs.device)
    return table[unpack_pairs(pairs).int()]


def e2m1_codes(values: Tensor) -> Tensor:
    """The nearest codes [..., K] uint8 of float32 values [..., K], a tie to the even one; beyond 6
    it is 6."""
    magnitudes = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for code, (low, high) in enumerate(pairwise(_MAGNITUDES)):
        middle = (low + high) / 2
        codes += magnitudes >= middle if code % 2 else magnitudes > middle
    return codes | (values < 0).to(torch.uint8) << 3


def scale_groups(values: Tensor, scales: Tensor) -> Tensor:
    """Each group of columns times its scale: values [..., K] and scales [..., G], K / G columns."""
    grouped = values.reshape(*scales.shape, values.shape[-1] // scales.shape[-1])
    return (grouped * scales.unsqueeze(-1)).flatten(-2)
