"""The two projections of all local experts on packed weights, one launch each.

What kernels/grouped_gemm.py says of slots, positions, tiles and items holds here; so do its
letters. The weights are int16 words of two or four codes each (kernels/quant/packed_weights.py),
which a program turns into the matrix unit's left operand in registers (kernels/packed_tiles.py), so
that every tile is computed transposed: BLOCK_N output columns are the rows of the product, the
tile's rows its columns.
"""

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import Activation, ExpertWeights
from ep_runtime.kernels.dependent_launch import launch_options
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.packed_kernels import (
    project_down_packed_kernel,
    project_gate_up_packed_kernel,
)
from ep_runtime.kernels.packed_schedule import PackedTiles
from ep_runtime.kernels.quant.packed_weights import PackedLayout
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.sum_slots import PARTS_DTYPE


def project_gate_up_packed(
    rows: Tensor,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    layout: PackedLayout,
    top_k: int,
    activation: Activation,
    tiles: PackedTiles,
    out: Tensor,
) -> None:
    """`project_gate_up` on packed weights: out[p] = act(w13[expert of p] @ row of p).

    rows: [R, H] in the layer's dtype, any strides. weights: as `pack_weight` leaves them, with this
    layout. out: [P, I], rows contiguous; padding and positions past the last tile stay unwritten.
    Reads each used expert's words at least once. Does not wait for the device.
    """
    prepare_launch(rows.device)
    intermediate_size, hidden_size = out.shape[1], rows.shape[1]
    num_items = aligned.max_tiles * triton.cdiv(intermediate_size, tiles.block_n)
    quant = _quant_of(weights.w13_quant)
    project_gate_up_packed_kernel[(max(1, num_items),)](
        aligned.slots,
        aligned.tile_experts,
        aligned.num_tiles,
        aligned.num_slots,
        top_k,
        rows,
        *rows.stride(),
        _words_descriptor(weights.w13, layout, tiles),
        weights.w13.shape[1],
        quant.scales,
        quant.scales.shape[1],
        quant.zero_points,
        quant.global_scales,
        weights.w13_bias,
        out,
        out.stride(0),
        hidden_size,
        intermediate_size,
        activation.alpha,
        activation.limit,
        ACTIVATION=activation.kind.value,
        BLOCK_M=aligned.block_m,
        **_tile_constants(layout, tiles),
        **launch_options(rows.device),
    )


def project_down_packed(
    activated: Tensor,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    layout: PackedLayout,
    slot_weights: Tensor | None,
    tiles: PackedTiles,
    split_k: int = 1,
    out: Tensor,
) -> None:
    """`project_down` on packed weights: out[slot of p] = slot's weight * (w2 @ activated[p]).

    activated: [P, I] by position, rows a multiple of TMA_ALIGNMENT bytes apart. weights: as
    `pack_weight` leaves them, with this layout. slot_weights: [N] float32 or None. out: [N, H],
    contiguous, by slot; slots without a local expert stay unwritten. With split_k parts it is
    [N * split_k, H] in PARTS_DTYPE, and row s * split_k + p is slot s's over the p-th part of whole
    blocks of K, weighted; the bias is in part 0. Does not wait for the device. PlanError for
    another out.
    """
    if split_k < 1 or len(out) != aligned.num_slots * split_k:
        raise PlanError(
            f"out {tuple(out.shape)} must have a row for each of {aligned.num_slots} slots and of "
            f"split_k ({split_k}) parts, at least one"
        )
    if split_k > 1 and out.dtype != PARTS_DTYPE:
        raise PlanError(f"out {out.dtype} of split_k ({split_k}) parts must be {PARTS_DTYPE}")
    prepare_launch(activated.device)
    intermediate_size, hidden_size = activated.shape[1], out.shape[1]
    num_items = aligned.max_tiles * triton.cdiv(hidden_size, tiles.block_n) * split_k
    quant = _quant_of(weights.w2_quant)
    project_down_packed_kernel[(max(1, num_items),)](
        aligned.slots,
        aligned.tile_experts,
        aligned.num_tiles,
        aligned.num_slots,
        TensorDescriptor.from_tensor(activated, [aligned.block_m, layout.words_per_block]),
        _words_descriptor(weights.w2, layout, tiles),
        quant.scales,
        quant.scales.shape[1],
        quant.zero_points,
        quant.global_scales,
        weights.w2_bias,
        slot_weights,
        out,
        intermediate_size,
        hidden_size,
        BLOCK_M=aligned.block_m,
        SPLIT=split_k,
        **_tile_constants(layout, tiles),
        **launch_options(out.device),
    )


def _quant_of(quant: QuantParameters | None) -> QuantParameters:
    if quant is None:
        raise ValueError("packed weights have scales; these were not packed")
    return quant


def _words_descriptor(words: Tensor, layout: PackedLayout, tiles: PackedTiles) -> TensorDescriptor:
    """[E, rows, words] as [E * rows, words], read a block of tiles.block_n rows at a time."""
    return TensorDescriptor.from_tensor(
        words.flatten(0, 1), [tiles.block_n, layout.words_per_block]
    )


def _tile_constants(layout: PackedLayout, tiles: PackedTiles) -> dict[str, int | bool | str]:
    return {
        "STORED": layout.stored,
        "FIELDS": layout.fields_per_word,
        "GROUP": layout.group_size or 0,
        "KW": layout.words_per_block,
        "VALUES_FIRST": tiles.values_first,
        "BLOCK_N": tiles.block_n,
        "GROUP_TILES": tiles.group_tiles,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
