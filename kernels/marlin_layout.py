"""Quantised weights as the Marlin GEMM reads them, in plain torch.

N output rows, K input columns, G groups of columns; N is a multiple of 64, K of 16.

A *tile* is 16 columns of K by 64 rows of N, a warp's share of four products m16n8k16 side by side
in N, twice. Of such a product's B operand, lane `4 * c + q` of 32 holds row c of 8 (an output row)
and the columns 2q, 2q + 1, 2q + 8, 2q + 9 of 16 (PTX ISA, matrix fragments for mma.m16n8k16). So of
a tile lane 4c + q reads 16 bytes of 4-bit codes: one 32-bit word for each j of 4, with the codes of

    row 16 j + 8 b + c, column 8 h + 2 q + l,   b, h, l of 2

in its fields, lowest bits first, in the order l, b, h: the kernel turns fields i and i + 4 into a
pair of 16-bit values in one operation, and those are the columns next to each other. Of 8-bit codes
there are two words for each j, one for each b, with fields in the order l, h.

    words  [K / 16, N * 16 * bits / 32]  tiles of one 16 columns side by side, then lanes, then j

Scales and zero points lie [G, N], in an order of the rows of its own for each 64 (or 32) of them:

    grouped          position 8 i + j holds row 8 j + i of 64: what lane 4i + q needs side by side
    one for a row    position 8 i + 2 a + b holds row 8 a + 2 i + b of 32: as sums lie in a lane
    zero points      grouped, then each 8 in the order 0, 2, 4, 6, 1, 3, 5, 7, in a word's fields
    e8m0 scales      grouped, then each 4 in the order 0, 2, 1, 3
    bias             as scales of which there is one for a row

Source: IST-DASLab/marlin, marlin/__init__.py (`_get_perms`); vLLM 0.26.0,
csrc/libtorch_stable/quantization/marlin/gptq_marlin_repack.cu and marlin_template.h, and
vllm/model_executor/layers/quantization/utils/marlin_utils.py.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.quant.packing import pack_pairs, unpack_pairs

TILE_COLUMNS = 16
TILE_ROWS = 64


def words_of(values: Tensor, bits: int) -> Tensor:
    """One expert's codes as words.

    values: as `QuantizedTensor` says, [N, K / 2] or [N, K] uint8. Returns [K / 16, N * bits / 2]
    int32, contiguous.
    """
    codes = unpack_pairs(values) if bits == 4 else values
    num_rows, num_columns = codes.shape
    # [g, j, b, c, tile of K, h, q, l]
    tiles = codes.reshape(num_rows // TILE_ROWS, 4, 2, 8, num_columns // TILE_COLUMNS, 2, 4, 2)
    if bits == 4:
        fields = tiles.permute(4, 0, 3, 6, 1, 7, 2, 5)
        packed = pack_pairs(fields.reshape(num_columns // TILE_COLUMNS, -1))
    else:
        packed = tiles.permute(4, 0, 3, 6, 1, 2, 7, 5).reshape(num_columns // TILE_COLUMNS, -1)
    return packed.contiguous().view(torch.int32)


def grouped_scales(scales: Tensor) -> Tensor:
    """[.., N, G] with several groups as [.., G, N], contiguous."""
    positions: Tensor = scales.mT.unflatten(-1, (-1, 8, 8)).mT
    return positions.flatten(-3).contiguous()


def row_scales(scales: Tensor) -> Tensor:
    """[.., N], one for each row, as [.., N], contiguous."""
    positions: Tensor = scales.unflatten(-1, (-1, 4, 4, 2)).transpose(-3, -2)
    return positions.flatten(-4).contiguous()


def scales_of(scales: Tensor) -> Tensor:
    """[.., N, G] as [.., G, N]: grouped, or one for each row where G is 1."""
    if scales.shape[-1] > 1:
        return grouped_scales(scales)
    return row_scales(scales[..., 0]).unsqueeze(-2)


def zero_point_words(zero_points: Tensor) -> Tensor:
    """4-bit codes [.., N, G] uint8 as [.., G, N / 8] int32, contiguous; also where G is 1."""
    grouped = grouped_scales(zero_points).unflatten(-1, (-1, 4, 2))
    return pack_pairs(grouped.mT.flatten(-3)).contiguous().view(torch.int32)


def e8m0_scales(scales: Tensor) -> Tensor:
    """ue8m0 [.., N, G] uint8 as [.., G, N] float8_e8m0fnu, contiguous; G is at least 2."""
    positions: Tensor = grouped_scales(scales).unflatten(-1, (-1, 2, 2)).mT
    return positions.flatten(-3).contiguous().view(torch.float8_e8m0fnu)
