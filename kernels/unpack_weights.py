"""Packed weights back to the layer's dtype, one launch: for a GEMM that reads them many times.

With many rows an expert's weights are turned into 16-bit values once a tile of rows; where there
are more than a few such tiles it is cheaper to do so once and to run the GEMM of unquantised
weights (kernels/grouped_gemm.py) on the result.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.packed_tiles import (
    load_centres,
    load_scales,
    scale_values,
    scales_per_block,
)
from ep_runtime.kernels.packed_values import values_of
from ep_runtime.kernels.quant.packed_weights import PackedLayout
from ep_runtime.kernels.quant.scheme import QuantParameters

_BLOCK_ROWS = 32


def unpack_weights(
    words: Tensor, quant: QuantParameters, layout: PackedLayout, *, out: Tensor
) -> None:
    """out = (code - zero point) * scale, the product in float32, rounded once.

    words: [E, N, blocks * KW] int16 and quant: as `pack_weight` leaves them. out: [E, N, K], rows
    contiguous, any dtype. Moves the words and out once. Does not wait for the device.
    """
    prepare_launch(words.device)
    num_experts, num_rows, num_columns = out.shape
    row_blocks = triton.cdiv(num_rows, _BLOCK_ROWS)
    _unpack_weights_kernel[(num_experts * row_blocks, layout.num_blocks(num_columns))](
        words,
        words.shape[2],
        quant.scales,
        quant.scales.shape[1],
        quant.zero_points,
        quant.global_scales,
        1 if quant.global_scales is None else quant.global_scales.shape[1],
        out,
        *out.stride()[:2],
        num_rows,
        num_columns,
        STORED=layout.stored,
        FIELDS=layout.fields_per_word,
        GROUP=layout.group_size or 0,
        KW=layout.words_per_block,
        BLOCK_N=_BLOCK_ROWS,
        num_warps=4,
    )


@triton.jit
def _unpack_weights_kernel(
    words_ptr,  # [E, N, num_words] int16
    num_words,
    scales_ptr,  # [E, G, N]
    num_groups,
    zeros_ptr,  # the same, uint8, or None
    global_scales_ptr,  # [E, num_parts] float32, or None
    num_parts,
    out_ptr,  # [E, N, K]
    stride_out_expert,
    stride_out_row,
    num_rows,
    num_columns,
    STORED: tl.constexpr,
    FIELDS: tl.constexpr,
    GROUP: tl.constexpr,
    KW: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_N rows of one expert, one block of columns."""
    SCALES: tl.constexpr = scales_per_block(GROUP, FIELDS, KW)
    row_blocks = tl.cdiv(num_rows, BLOCK_N)
    expert = (tl.program_id(0) // row_blocks).to(tl.int64)
    rows = tl.program_id(0) % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    is_row = rows < num_rows
    k = tl.arange(0, KW)
    word_ptrs = (
        words_ptr + (expert * num_rows + rows[:, None]) * num_words + block * KW + k[None, :]
    )
    words = tl.load(word_ptrs, mask=is_row[:, None], other=0)
    group = expert * num_groups
    if GROUP > 0:
        group += block * FIELDS * KW // GROUP
    offsets = group * num_rows + rows
    scales = load_scales(scales_ptr, offsets, num_rows, is_row, SCALES)
    centres = load_centres(zeros_ptr, offsets, num_rows, is_row, SCALES, STORED, tl.float32)
    global_scales = tl.full([1, 1], 1, tl.float32)
    if global_scales_ptr is not None:
        parts = expert * num_parts + rows // (num_rows // num_parts)
        global_scales = tl.load(global_scales_ptr + parts, mask=is_row, other=0.0)[:, None]
    out_ptrs = out_ptr + expert * stride_out_expert + rows.to(tl.int64)[:, None] * stride_out_row
    for i in tl.static_range(FIELDS):
        columns = (FIELDS * block + i) * KW + k
        values = values_of(words, centres[i * len(centres) // FIELDS], i, STORED, tl.float32)
        values *= scale_values(scales[i * SCALES // FIELDS]) * global_scales
        mask = is_row[:, None] & (columns < num_columns)[None, :]
        tl.store(out_ptrs + columns[None, :], values.to(out_ptr.dtype.element_ty), mask=mask)
