"""Weights packed for Hopper's packed GEMM as 16-bit weights again, of all local experts at once.

Where an expert gets thousands of rows the matrix units are the limit, and converting its weights
for each tile of rows costs more than to do so once and to multiply as kernels/hopper_gemm.py does.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.hopper_packed_layout import (
    HopperWords,
    block_rows,
    offset_of,
    unpack_codes,
    unpack_factors,
)
from ep_runtime.kernels.interpreter import prepare_launch


def unpack_weight(packed: HopperWords, out: Tensor) -> None:
    """One projection of all experts: out[e, n, k] = scale * (code - zero point), rounded once.

    out: [E, N, K] in the scales' dtype, contiguous; all of it is written. Of a gated w13 N is 2 I,
    gate rows first, and the weights are those that the packed GEMM multiplies. Does not wait for
    the device.
    """
    prepare_launch(out.device)
    num_experts, num_rows, num_columns = out.shape
    blocks, words_per_chunk = packed.words.shape[1], 4 * packed.words.shape[3]
    num_chunks = packed.words.shape[2] // 4
    if out.numel() == 0:
        return
    _unpack_kernel[(num_experts * blocks, num_chunks)](
        packed.words,
        packed.factors,
        out,
        blocks,
        num_rows,
        packed.num_columns,
        num_columns,
        packed.factors.shape[2],
        OFFSET=offset_of(packed.factors.dtype),
        GROUP=packed.group_size or 0,
        HAS_CENTRES=packed.has_centres,
        IS_GATED=packed.is_gated,
        WORDS=words_per_chunk,
        num_warps=4,
        **launch_options(out.device),
    )


def unpack_weight_reference(packed: HopperWords, out: Tensor) -> None:
    """Definition of `unpack_weight`."""
    num_experts, num_rows, num_columns = out.shape
    rows = block_rows(packed.num_columns, is_gated=packed.is_gated)
    offset = offset_of(packed.factors.dtype)
    for expert in range(num_experts):
        codes = unpack_codes(packed.words[expert], rows, num_rows, num_columns).float()
        scales, *centres = packed.factors[expert].unflatten(-1, (-1, 128)).unbind(-2)
        wide = packed.group_size or num_columns
        zeros = torch.full_like(scales, offset + 8) if not centres else centres[0]
        zeros, scales = (
            unpack_factors(factors, rows, num_rows)
            .float()
            .repeat_interleave(wide, 1)[:, :num_columns]
            for factors in (zeros, scales)
        )
        out[expert] = ((codes + offset - zeros) * scales).to(out.dtype)


@triton.jit
def _unpack_kernel(  # type: ignore[no-untyped-def]
    words_ptr,  # [E * blocks, chunks * WORDS] int32
    factors_ptr,  # [E * blocks, groups, 128, or 256 with centres]
    out_ptr,  # [E, N, K]
    blocks_per_expert,
    num_rows,
    num_columns,  # of the result, of a gated w13 half of its rows
    k_size,
    num_groups,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_CENTRES: tl.constexpr,
    IS_GATED: tl.constexpr,
    WORDS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One block of 128 rows, one chunk of 64 columns, as pairs of columns [128, 32]."""
    await_predecessor(IS_DEPENDENT)
    block = tl.program_id(0)
    chunk = tl.program_id(1)
    expert = block // blocks_per_expert
    # A slab's row 16 w + 8 h + g, and a pair's first column 16 j + 8 c + 2 t.
    row = tl.arange(0, 128)
    slab, w, h, g = row // 64, row // 16 % 4, row // 8 % 2, row % 8
    pair = tl.arange(0, 32)
    j, c, t = pair // 8, pair // 4 % 2, pair % 4
    word = ((slab * 4 + w) * 8 + g)[:, None] * 16 + (t * 4 + j)[None, :]
    first_word = (block.to(tl.int64) * tl.num_programs(1) + chunk) * WORDS
    words = tl.load(words_ptr + first_word + word)
    shift = 4 * (2 * c[None, :] + h[:, None])
    group = 0
    if GROUP > 0:
        group = chunk * 64 // GROUP
    parts: tl.constexpr = 2 if HAS_CENTRES else 1
    first_factor = (block.to(tl.int64) * num_groups + group) * (128 * parts)
    factor_ptrs = factors_ptr + first_factor + 4 * (8 * w + g) + 2 * slab + h
    scales = tl.load(factor_ptrs).to(tl.float32)[:, None]
    zeros = tl.load(factor_ptrs + 128).to(tl.float32)[:, None] - OFFSET if HAS_CENTRES else 8.0
    even = (((words >> shift) & 15).to(tl.float32) - zeros) * scales
    odd = (((words >> (shift + 16)) & 15).to(tl.float32) - zeros) * scales
    values = tl.join(even, odd).reshape(128, 64).to(out_ptr.dtype.element_ty)
    within = block % blocks_per_expert
    if IS_GATED:
        column = within * 64 + 16 * w + 2 * g + slab
        out_row = column + h * num_columns
    else:
        column = within * 128 + 32 * w + 4 * g + 2 * slab + h
        out_row = column
    columns = chunk * 64 + tl.arange(0, 64)
    out_rows = expert.to(tl.int64) * num_rows + out_row
    mask = (column < num_columns)[:, None] & (columns < k_size)[None, :]
    tl.store(out_ptr + out_rows[:, None] * k_size + columns[None, :], values, mask=mask)
