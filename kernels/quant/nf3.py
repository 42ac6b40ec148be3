"""NF3: the 3-bit quantiles of a normal distribution, a bfloat16 scale for every 64 columns.

NF-k is k-bit NormalFloat. Its 2^k values are normal quantiles at even steps of probability, taken
separately below and above zero so that zero itself is one of them: 2^(k-1) from the lowest to 0,
2^(k-1) + 1 from 0 to the highest, and the zero they share counted once. The lowest and the highest
stand at probabilities d and 1 - d, d the mean of 1 / (2 * 2^k) and 1 / (2 * (2^k - 1)), and all are
divided by the highest, so that they span -1 to 1. Source: Dettmers, Pagnoni, Holtzman, Zettlemoyer,
QLoRA (2023), section 3 and, for the ends, the values of its appendix E, which k = 4 gives.

Of k = 3 the values are then rounded to bfloat16, so that 16-bit kernels compute with exactly these
and not with roundings of their own. Code 3 is 0.

N output rows, K input columns; a group is 64 columns of a row, the last one of what is left:

    weight[n, k] = NF3_VALUES[code[n, k]] * scale[n, k // 64]

Codes go 32 to three 32-bit words, 3 bits each with none to spare: bit j of word p is bit p of
column j's code. So K is a multiple of 32.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from statistics import NormalDist

import torch
from torch import Tensor

from ep_runtime.kernels.quant.format import (
    Projection,
    StoredTensor,
    StoredTensorError,
    WeightFormat,
    check_finite,
)
from ep_runtime.kernels.quant.scheme import (
    NF3_GROUP,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.storage import nf3_words

BITS = 3
CODES_PER_WORDS = 32  # columns that three words hold


def normal_float_values(bits: int) -> tuple[float, ...]:
    """The 2^bits values of NF-k, rising from -1 to 1, in float64. bits: 2 or more."""
    quantile, half = NormalDist().inv_cdf, 2 ** (bits - 1)
    end = (1 / (4 * half) + 1 / (4 * half - 2)) / 2
    below = [quantile(end + (0.5 - end) * i / (half - 1)) for i in range(half - 1)]
    above = [quantile(0.5 + (0.5 - end) * i / half) for i in range(1, half + 1)]
    return tuple(value / above[-1] for value in (*below, 0.0, *above))


NF3_VALUES: tuple[float, ...] = tuple(
    torch.tensor(normal_float_values(BITS), dtype=torch.float64).to(torch.bfloat16).tolist()
)
ZERO_CODE = NF3_VALUES.index(0.0)


def quantize_nf3(weight: Tensor) -> QuantizedTensor:
    """One projection [N, K] of any float dtype as NF3 (E = 1): the nearest value of each weight.

    A group's scale is its largest magnitude, in bfloat16. Raises ValueError for weights that are
    NaN, infinite or beyond bfloat16, and where 32 does not divide K. Takes about 16 bytes a weight.
    """
    rows, columns = weight.shape
    padded = weight.new_zeros((rows, ceil(columns / NF3_GROUP) * NF3_GROUP), dtype=torch.float32)
    padded[:, :columns] = weight
    groups = padded.unflatten(1, (-1, NF3_GROUP))
    scales = groups.abs().amax(dim=2).to(torch.bfloat16)
    if not bool(torch.isfinite(scales.float()).all()):
        raise ValueError("weights that are NaN, infinite or beyond bfloat16 have no NF3 form")
    divisors = scales.float().unsqueeze(2)
    normalised = torch.where(divisors > 0, groups / divisors, 0.0)
    values = torch.tensor(NF3_VALUES, device=weight.device)
    middles = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(normalised.flatten(1), middles).to(torch.uint8)
    words = pack_codes(codes[:, :columns])
    return QuantizedTensor(
        words[None], QuantParameters(scales[None]), QuantScheme(WeightScheme.NF3)
    )


def dequantize_nf3(weight: QuantizedTensor, num_parts: int = 1) -> Tensor:
    """The weight [E, N, K] in float32. num_parts changes nothing: rows of all parts are alike."""
    table = torch.tensor(NF3_VALUES, dtype=torch.float32, device=weight.device)
    values = table[unpack_codes(weight.values).int()]
    scales = weight.parameters.scales.float().repeat_interleave(NF3_GROUP, dim=-1)
    return values * scales[..., : values.shape[-1]]


def pack_codes(codes: Tensor) -> Tensor:
    """Codes [..., K] uint8 below 8 as [..., 3 * K / 32] int32 words.

    Raises ValueError where 32 does not divide K.

    Example: of codes 1, 2, 4 and 29 times 0 the words are 1, 2 and 4.
    """
    if codes.shape[-1] % CODES_PER_WORDS:
        raise ValueError(
            f"NF3 stores {CODES_PER_WORDS} columns in three words, and these weights have "
            f"{codes.shape[-1]}; give a multiple"
        )
    bits = torch.arange(CODES_PER_WORDS, dtype=torch.int32, device=codes.device)
    blocks = codes.unflatten(-1, (-1, CODES_PER_WORDS)).to(torch.int32)
    planes = [(((blocks >> plane) & 1) << bits).sum(-1, dtype=torch.int32) for plane in range(BITS)]
    return torch.stack(planes, dim=-1).flatten(-2)


def unpack_codes(words: Tensor) -> Tensor:
    """The inverse: words [..., 3 * W] int32 as codes [..., 32 * W] uint8."""
    bits = torch.arange(CODES_PER_WORDS, dtype=torch.int32, device=words.device)
    planes = (words.unflatten(-1, (-1, BITS)).unsqueeze(-1) >> bits) & 1  # [..., W, 3, 32]
    codes: Tensor = planes[..., 0, :] | (planes[..., 1, :] << 1) | (planes[..., 2, :] << 2)
    return codes.flatten(-2).to(torch.uint8)


@dataclass(frozen=True)
class Nf3Format(WeightFormat):
    """A linear layer's `weight_nf3` int32 [N, 3 * K / 32] and `weight_scale` bfloat16
    [N, ceil(K / 64)]."""

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(WeightScheme.NF3)

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        rows, columns = projection.rows, projection.columns
        return {
            "weight": StoredTensor(
                (".weight_nf3",), ((rows, nf3_words(columns)),), frozenset({torch.int32})
            ),
            "scale": StoredTensor(
                (".weight_scale",),
                ((rows, ceil(columns / NF3_GROUP)),),
                frozenset({torch.bfloat16}),
            ),
        }

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        check_finite("scale", tensors["scale"])
        if bool((tensors["scale"] < 0).any()):
            raise StoredTensorError("scale", "has a negative scale; each is a largest magnitude")
        return QuantizedTensor(
            tensors["weight"][None], QuantParameters(tensors["scale"][None]), self.scheme
        )
