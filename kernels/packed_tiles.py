"""A block of packed weights inside a kernel: its scales and zero points, and its products.

A block is FIELDS * KW columns of x, KW of them for each field of its words [BLOCK_N, KW] int16:
field i of word j is column i * KW + j. So the words of a block, shifted and masked as they lie
(kernels/packed_values.py), are FIELDS left operands [BLOCK_N, KW] of the matrix unit, each in the
registers it wants them in, and nothing moves between threads. FIELDS is 4 of 4-bit codes, 2 of
8-bit ones, and 16 of NF3's, whose words are three planes (kernels/packed_nf3.py). A block has 1, 2
or 4 groups of columns with one scale, whole fields each.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ep_runtime.kernels.packed_nf3 import load_nf3_words
from ep_runtime.kernels.packed_values import centre_of, values_of


@triton.constexpr_function
def scales_per_block(group, fields, words_per_block):
    """group: columns that share a scale, 0 for a whole row."""
    columns = fields * words_per_block
    return 1 if group == 0 or group >= columns else columns // group


@triton.jit
def load_words(words, row, first, STORED: tl.constexpr, FIELDS: tl.constexpr, KW: tl.constexpr):
    """The words [BLOCK_N, KW] of the block whose first column is `first`; of nf3 three planes."""
    if STORED == "nf3":
        return load_nf3_words(words, row, first, KW)
    else:
        return words.load([row, first // FIELDS])


@triton.jit
def load_scales(scales_ptr, offsets, stride_group, is_row, SCALES: tl.constexpr):
    """Of SCALES groups from the one at `offsets` on, [BLOCK_N, 1] each; 1 where the caller scales
    (scales_ptr is None)."""
    if scales_ptr is None:
        return (tl.full([1, 1], 1, tl.float32),)
    else:
        s0 = tl.load(scales_ptr + offsets, mask=is_row, other=0.0)[:, None]
        if SCALES == 1:
            return (s0,)
        else:
            s1 = tl.load(scales_ptr + offsets + stride_group, mask=is_row, other=0.0)[:, None]
            if SCALES == 2:
                return (s0, s1)
            else:
                tl.static_assert(SCALES == 4)
                offsets += 2 * stride_group
                s2 = tl.load(scales_ptr + offsets, mask=is_row, other=0.0)[:, None]
                s3 = tl.load(scales_ptr + offsets + stride_group, mask=is_row, other=0.0)[:, None]
                return (s0, s1, s2, s3)


@triton.jit
def scale_values(scales):
    """Loaded scales as float32; uint8 ones are powers of two (ue8m0), s for 2^(s - 127)."""
    if scales.dtype == tl.uint8:
        bits = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)
        return bits.to(tl.float32, bitcast=True)
    else:
        return scales.to(tl.float32)


@triton.jit
def load_centres(
    zeros_ptr,
    offsets,
    stride_group,
    is_row,
    SCALES: tl.constexpr,
    STORED: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """What `values_of` subtracts, as `load_scales`; the code's middle where zeros_ptr is None."""
    if zeros_ptr is None:
        middle: tl.constexpr = 128 if STORED == "int8" else 8
        return (tl.full([1, 1], centre_of(STORED, DTYPE) + middle, DTYPE),)
    else:
        c0 = _load_centre(zeros_ptr + offsets, is_row, STORED, DTYPE)
        if SCALES == 1:
            return (c0,)
        else:
            c1 = _load_centre(zeros_ptr + offsets + stride_group, is_row, STORED, DTYPE)
            if SCALES == 2:
                return (c0, c1)
            else:
                tl.static_assert(SCALES == 4)
                offsets += 2 * stride_group
                c2 = _load_centre(zeros_ptr + offsets, is_row, STORED, DTYPE)
                c3 = _load_centre(zeros_ptr + offsets + stride_group, is_row, STORED, DTYPE)
                return (c0, c1, c2, c3)


@triton.jit
def _load_centre(zero_ptrs, is_row, STORED: tl.constexpr, DTYPE: tl.constexpr):
    zeros = tl.load(zero_ptrs, mask=is_row, other=0)
    return (zeros.to(tl.float32) + centre_of(STORED, DTYPE)).to(DTYPE)[:, None]


@triton.jit
def multiply_block(
    words,
    x,
    scales,
    centres,
    total,
    STORED: tl.constexpr,
    FIELDS: tl.constexpr,
    VALUES_FIRST: tl.constexpr,
):
    """total + the block's products, scaled group by group.

    words: [BLOCK_N, KW] int16, as `load_words` gives them. x: the block's columns, FIELDS of
    [BLOCK_M, KW]. scales, centres: as loaded. total: [BLOCK_N, BLOCK_M] float32. VALUES_FIRST: all
    words become values before the first product (neither with e4m3 scales nor of nf3).

    The scales multiply a group's sums, not its weights: of a tile of 16 rows that is an eighth of
    the work, and it rounds nothing. e4m3 ones, of 16 columns each, do multiply e2m1 weights: two
    bits times four fit 16-bit floats, and all products are then one sum.
    """
    DTYPE: tl.constexpr = x[0].dtype
    if scales[0].dtype == tl.float8e4nv:
        tl.static_assert(STORED == "e2m1" and len(scales) == FIELDS)
        for i in tl.static_range(FIELDS):
            values = values_of(words, centres[0], i, STORED, DTYPE) * scales[i].to(DTYPE)
            total = tl.dot(values, x[i].T, total, input_precision="ieee")
        return total
    w = (values_of(words, centres[0], 0, STORED, DTYPE),)
    if VALUES_FIRST:
        w = _values_of_block(words, centres, STORED, FIELDS, DTYPE)
    part = tl.dot(w[0], x[0].T, input_precision="ieee")
    for i in tl.static_range(1, FIELDS):
        if VALUES_FIRST:
            values = w[i]
        else:
            values = values_of(words, centres[i * len(centres) // FIELDS], i, STORED, DTYPE)
        if i * len(scales) % FIELDS == 0:
            total += part * scale_values(scales[i * len(scales) // FIELDS - 1])
            part = tl.dot(values, x[i].T, input_precision="ieee")
        else:
            part = tl.dot(values, x[i].T, part, input_precision="ieee")
    return total + part * scale_values(scales[len(scales) - 1])


@triton.jit
def _values_of_block(
    words, centres, STORED: tl.constexpr, FIELDS: tl.constexpr, DTYPE: tl.constexpr
):
    """All fields: FIELDS of [BLOCK_N, KW]."""
    w0 = values_of(words, centres[0], 0, STORED, DTYPE)
    w1 = values_of(words, centres[len(centres) // FIELDS], 1, STORED, DTYPE)
    if FIELDS == 2:
        return (w0, w1)
    else:
        tl.static_assert(FIELDS == 4)
        w2 = values_of(words, centres[2 * len(centres) // FIELDS], 2, STORED, DTYPE)
        w3 = values_of(words, centres[3 * len(centres) // FIELDS], 3, STORED, DTYPE)
        return (w0, w1, w2, w3)
