"""4-bit weights as Hopper's packed GEMM reads them: repacked once, when a layer is loaded.

E experts, N output rows, K input columns. A *block* is 128 rows of W as two slabs of 64
(kernels/hopper_packed_values.py): of a gated w13 64 gate rows and the same 64 up rows, else 128
consecutive rows, in such an order that a thread holds a gate and its up, and consecutive columns of
a result:

    row 16 w + 8 h + g of slab i    gated: column 16 w + 2 g + i of gate (h = 0) or up (h = 1)
                                    else: column 32 w + 4 g + 2 i + h

Blocks lie expert by expert, a block's slabs chunk by chunk of 64 columns, so that what a stage
takes is contiguous. N is filled up to whole blocks and K to whole chunks, with scales of 0.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.quant.packing import pack_pairs, unpack_pairs
from ep_runtime.kernels.quant.scheme import MXFP4_GROUP, QuantParameters

SLAB_ROWS = 64
CHUNK_COLUMNS = 64
BLOCK_ROWS = 2 * SLAB_ROWS
MIN_GROUP = CHUNK_COLUMNS // 4
_OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}
# An e2m1 code's bits where bfloat16 has them are its value times 2^-126: scales are kept times
# 2^62, so that their products are weights times 2^-64, which is given back to sums.
E2M1_SCALE = 2.0**62
MAX_EXPONENT = 64  # of scales, so that none becomes infinite
_EXPONENT_BIAS = 127


@dataclass(frozen=True)
class HopperWords:
    """One projection of all experts.

    words: [E, blocks, 4 * chunks, 256] int32; a slab's chunk is two rows. factors: [E, blocks,
    groups, 128] in the layer's dtype, the scales: number 4 (8 w + g) + 2 i + h is of row
    16 w + 8 h + g of slab i; with zero points [.., 256], 128 centres after the scales: a zero point
    plus 128, of float16 plus 1024. num_columns: N, of a gated w13 N / 2. group_size: columns that
    share a scale, a power of two from 16 on; None: all. stored: int4 | e2m1, what a code is; words
    of e2m1 are as `spread_e2m1` leaves them, scales times E2M1_SCALE. global_scales: of nvfp4,
    [E, 2] of a gated w13 (gate, up), else [E, 1], float32, contiguous; they multiply sums.
    """

    words: Tensor
    factors: Tensor
    num_columns: int
    group_size: int | None
    is_gated: bool
    stored: str = "int4"
    global_scales: Tensor | None = None

    @property
    def has_centres(self) -> bool:
        return self.factors.shape[-1] == 2 * BLOCK_ROWS


def offset_of(dtype: torch.dtype) -> int:
    """What the kernel's conversion has added to a code before it subtracts the centre."""
    return _OFFSETS[dtype]


def block_rows(num_columns: int, *, is_gated: bool) -> Tensor:
    """Which row of W each row of each block's slabs is, [blocks, i, w, h, g]; -1 for none."""
    width = SLAB_ROWS if is_gated else BLOCK_ROWS
    num_blocks = -(-num_columns // width)
    block, i, w, h, g = torch.meshgrid(
        *(torch.arange(size) for size in (num_blocks, 2, 4, 2, 8)), indexing="ij"
    )
    if is_gated:
        column = block * width + 16 * w + 2 * g + i
        row = column + h * num_columns
    else:
        column = block * width + 32 * w + 4 * g + 2 * i + h
        row = column
    return torch.where(column < num_columns, row, -1)


def pack_codes(codes: Tensor, rows: Tensor) -> Tensor:
    """One expert's codes [N, K] uint8 below 16 as words [blocks, 4 * chunks, 256] int32."""
    num_chunks = -(-codes.shape[1] // CHUNK_COLUMNS)
    padded = codes.new_zeros((codes.shape[0] + 1, num_chunks * CHUNK_COLUMNS))
    padded[:-1, : codes.shape[1]] = codes
    taken = padded[rows.to(codes.device)]  # row -1 is the one of zeros
    # [blocks, i, w, h, g, chunk, j, c, t, b] to [blocks, chunk, i, w, g, t, j, b, c, h]
    fields = taken.unflatten(-1, (num_chunks, 4, 2, 4, 2)).permute(0, 5, 1, 2, 4, 8, 6, 9, 7, 3)
    words: Tensor = pack_pairs(fields.reshape(rows.shape[0], -1)).view(torch.int32)
    return words.view(rows.shape[0], 4 * num_chunks, 256)


def spread_e2m1(words: Tensor) -> Tensor:
    """Words of e2m1 codes, int32, with bits where few operations make bfloat16 of them.

    Sign, then magnitude, of code p of a half word, to bits: 15, 8 7 6 where bfloat16 has them;
    12, 5 4 3 and 9, 2 1 0 three and six lower; and what is left, 14, 13 11 10.
    """
    places = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))
    spread = torch.zeros_like(words)
    for p, bits in enumerate(places):
        for i, bit in enumerate(bits):
            spread |= ((words >> (4 * p + 3 - i)) & 0x00010001) << bit
    return spread


def unpack_codes(words: Tensor, rows: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The inverse of `pack_codes`: codes [N, K] uint8."""
    num_blocks, num_chunks = words.shape[0], words.shape[1] // 4
    fields = unpack_pairs(words.contiguous().view(torch.uint8).flatten(1))
    shape = (num_blocks, num_chunks, 2, 4, 8, 4, 4, 2, 2, 2)
    taken = fields.reshape(shape).permute(0, 2, 3, 9, 4, 1, 6, 8, 5, 7)
    codes = fields.new_zeros((num_rows + 1, num_chunks * CHUNK_COLUMNS))
    codes[rows.flatten().to(words.device)] = taken.reshape(-1, num_chunks * CHUNK_COLUMNS)
    return codes[:-1, :num_columns]


def pack_factors(factors: Tensor, rows: Tensor) -> Tensor:
    """One expert's scales or centres [N, groups] as [blocks, groups, 128]."""
    padded = factors.new_zeros((factors.shape[0] + 1, factors.shape[1]))
    padded[:-1] = factors
    taken = padded[rows.to(factors.device)]  # [blocks, i, w, h, g, groups]
    return taken.permute(0, 5, 2, 4, 1, 3).reshape(rows.shape[0], factors.shape[1], BLOCK_ROWS)


def unpack_factors(factors: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The inverse: [N, groups]."""
    fields = factors.unflatten(-1, (4, 8, 2, 2)).permute(
        0, 4, 2, 5, 3, 1
    )  # [blocks, i, w, h, g, .]
    found = factors.new_zeros((num_rows + 1, factors.shape[1]))
    found[rows.flatten().to(factors.device)] = fields.reshape(-1, factors.shape[1])
    return found[:-1]


def pack_hopper_words(
    values: Tensor,
    scales: Tensor,
    group_size: int | None,
    *,
    is_gated: bool,
    zero_points: Tensor | None = None,
    stored: str = "int4",
) -> HopperWords:
    """Repack one projection of all experts, one by one.

    values: [E, N, K / 2] uint8, the even column in the low nibble. scales: [E, N, groups] bf16 or
    fp16. zero_points: the same, uint8 codes. Beside what it returns it takes about 4 * N * K bytes.
    """
    if stored == "e2m1":
        scales = scales * E2M1_SCALE
    num_experts, num_rows, half = values.shape
    num_columns = num_rows // 2 if is_gated else num_rows
    rows = block_rows(num_columns, is_gated=is_gated).to(values.device)
    chunks, parts = -(-2 * half // CHUNK_COLUMNS), 1 if zero_points is None else 2
    words = values.new_empty((num_experts, len(rows), 4 * chunks, 256), dtype=torch.int32)
    factors = scales.new_empty((num_experts, len(rows), scales.shape[2], parts, BLOCK_ROWS))
    for expert in range(num_experts):
        packed = pack_codes(unpack_pairs(values[expert]), rows)
        words[expert] = spread_e2m1(packed) if stored == "e2m1" else packed
        factors[expert, :, :, 0] = pack_factors(scales[expert], rows)
        if zero_points is not None:
            centres = zero_points[expert].to(scales.dtype) + offset_of(scales.dtype)
            factors[expert, :, :, 1] = pack_factors(centres, rows)
    return HopperWords(words, factors.flatten(3), num_columns, group_size, is_gated, stored)


def pack_hopper_weights(weights: ExpertWeights, shape: ExpertsShape) -> ExpertWeights:
    """Both projections as `pack_hopper_words` leaves them; `hopper_words` reads the result.

    The words take the values' place, the factors the scales', in which zero points are then.
    ValueError for weights without scales, CheckpointError for mxfp4 scales above 2^64 or NaN.
    """
    layout = packed_layout(shape.scheme)

    def packed(
        name: str, values: Tensor, quant: QuantParameters | None, is_gated: bool
    ) -> tuple[Tensor, QuantParameters]:
        given = _parameters(quant)
        if given.scales.dtype is torch.uint8:
            _refuse_large_exponents(name, given.scales)
        found = pack_hopper_words(
            values,
            _in_dtype(given.scales, shape.dtype),
            layout.group_size,
            is_gated=is_gated,
            zero_points=given.zero_points,
            stored=layout.stored,
        )
        global_scales = given.global_scales
        if global_scales is not None:
            global_scales = global_scales.contiguous()
        return found.words, QuantParameters(found.factors, global_scales=global_scales)

    w13, w13_quant = packed("w13", weights.w13, weights.w13_quant, shape.activation.is_gated)
    w2, w2_quant = packed("w2", weights.w2, weights.w2_quant, False)
    biases = [
        None if bias is None else bias.contiguous() for bias in (weights.w13_bias, weights.w2_bias)
    ]
    return replace(
        weights,
        w13=w13,
        w2=w2,
        w13_quant=w13_quant,
        w2_quant=w2_quant,
        w13_bias=biases[0],
        w2_bias=biases[1],
    )


def hopper_words(weights: ExpertWeights, shape: ExpertsShape) -> tuple[HopperWords, HopperWords]:
    """w13 and w2 of what `pack_hopper_weights` returned. ValueError for weights without scales."""
    layout = packed_layout(shape.scheme)

    def words_of(
        words: Tensor, quant: QuantParameters | None, num_columns: int, is_gated: bool
    ) -> HopperWords:
        given = _parameters(quant)
        return HopperWords(
            words,
            given.scales,
            num_columns,
            layout.group_size,
            is_gated,
            layout.stored,
            given.global_scales,
        )

    is_gated = shape.activation.is_gated
    return (
        words_of(weights.w13, weights.w13_quant, shape.intermediate_size, is_gated),
        words_of(weights.w2, weights.w2_quant, shape.hidden_size, False),
    )


def _refuse_large_exponents(name: str, scales: Tensor) -> None:
    """scales: [E, N, groups] ue8m0."""
    largest = int(scales.max()) if scales.numel() else 0
    if largest - _EXPONENT_BIAS > MAX_EXPONENT:
        expert, row, group = (int(index[0]) for index in (scales == largest).nonzero(as_tuple=True))
        raise CheckpointError(
            f"{name} scales: expert {expert}, row {row}, columns from {MXFP4_GROUP * group} on "
            f"have the ue8m0 scale {largest} (2^{largest - _EXPONENT_BIAS}; 255 is NaN); experts "
            f"triton takes up to 2^{MAX_EXPONENT}: repair the checkpoint, or choose experts: "
            f"reference"
        )


def exponent_scales(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """ue8m0 scales, s for 2^(s - 127), as bfloat16, which has all of them."""
    bits = torch.where(scales == 0, 1 << 22, scales.int() << 23)
    return bits.view(torch.float32).to(dtype)


def _in_dtype(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales in the layer's dtype; bfloat16 has all ue8m0 and all e4m3 ones."""
    if scales.dtype is torch.uint8:
        return exponent_scales(scales, dtype)
    return scales.to(dtype) if scales.dtype is torch.float8_e4m3fn else scales


def _parameters(quant: QuantParameters | None) -> QuantParameters:
    if quant is None:
        raise ValueError("packed weights have scales; these were given without")
    return quant
