"""The two projections of all local experts, one launch each, over tiles of aligned slots.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, I intermediate size, E local experts.
A *position* is an index into the aligned order of slots; slot s belongs to row s // K. Batched rows
[E, capacity, H] are taken as [E * capacity, H] with K = 1: there position, slot and row are one.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.align import AlignedSlots
from ep_runtime.kernels.base import Activation, ExpertWeights
from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.tiles import GemmTiles


def project_gate_up(
    hidden_states: Tensor,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    activation: Activation,
    tiles: GemmTiles,
    out: Tensor,
) -> None:
    """First projection with bias and activation: out[p] = act(w13[expert of p] @ row of p).

    hidden_states: [R, H], any strides; rows are gathered by slot.
    out: [N, I] contiguous, in the weights' dtype; positions that hold no slot stay unwritten.
    Sums in float32, float32 products in IEEE precision. Work: 2 * slots * H * 2I FLOPs (half of
    it where not gated); reads each used expert's w13 at least once. Does not wait for the device.
    """
    prepare_launch(hidden_states.device)
    intermediate_size, hidden_size = out.shape[1], hidden_states.shape[1]
    bias = weights.w13_bias
    grid = (aligned.max_tiles * triton.cdiv(intermediate_size, tiles.block_n),)
    _project_gate_up_kernel[grid](
        *_tile_arguments(aligned),
        hidden_states,
        *hidden_states.stride(),
        weights.w13,
        *weights.w13.stride(),
        intermediate_size * weights.w13.stride(1),
        bias,
        *(bias.stride() if bias is not None else (0, 0)),
        out,
        out.shape[0] // hidden_states.shape[0],
        hidden_size,
        intermediate_size,
        activation.alpha,
        activation.limit,
        ACTIVATION=activation.kind.value,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def project_gate_up_reference(
    hidden_states: Tensor,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    activation: Activation,
    out: Tensor,
) -> None:
    """The definition of `project_gate_up`, expert by expert. Waits for the device."""
    top_k = out.shape[0] // hidden_states.shape[0]
    for expert, run in enumerate(_runs(aligned)):
        rows = hidden_states[_slots_of(run, aligned) // top_k]
        projected = rows.float() @ weights.w13[expert].float().T
        if weights.w13_bias is not None:
            projected = projected + weights.w13_bias[expert].float()
        out[run] = apply_activation(projected, activation).to(out.dtype)


def project_down(
    activated: Tensor,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    tiles: GemmTiles,
    out: Tensor,
) -> None:
    """Second projection with bias: out[slot at p] = w2[expert of p] @ activated[p].

    activated: [N, I] contiguous, by position.
    out: [N, H] contiguous, by slot; slots without a local expert stay unwritten. Float32 where the
    slots are still to be weighted, so that a large raw value is before it has to fit float16.
    Work: 2 * slots * I * H FLOPs. Does not wait for the device.
    """
    prepare_launch(activated.device)
    intermediate_size, hidden_size = activated.shape[1], out.shape[1]
    bias = weights.w2_bias
    grid = (aligned.max_tiles * triton.cdiv(hidden_size, tiles.block_n),)
    _project_down_kernel[grid](
        *_tile_arguments(aligned),
        activated,
        weights.w2,
        *weights.w2.stride(),
        bias,
        *(bias.stride() if bias is not None else (0, 0)),
        out,
        hidden_size,
        intermediate_size,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def project_down_reference(
    activated: Tensor, weights: ExpertWeights, aligned: AlignedSlots, *, out: Tensor
) -> None:
    """The definition of `project_down`, expert by expert. Waits for the device."""
    for expert, run in enumerate(_runs(aligned)):
        raw = activated[run].float() @ weights.w2[expert].float().T
        if weights.w2_bias is not None:
            raw = raw + weights.w2_bias[expert].float()
        out[_slots_of(run, aligned)] = raw.to(out.dtype)


def _runs(aligned: AlignedSlots) -> list[slice]:
    """The positions of each expert. Waits for the device."""
    ends = aligned.expert_ends.tolist()
    if aligned.capacity is not None:
        return [slice(e * aligned.capacity, end) for e, end in enumerate(ends)]
    return [slice(start, end) for start, end in pairwise([0, *ends])]


def _slots_of(run: slice, aligned: AlignedSlots) -> Tensor:
    """[n] int64: the slots at an expert's positions."""
    if aligned.capacity is not None:
        return torch.arange(run.start, run.stop, device=aligned.slots.device)
    return aligned.slots[run].long()


def _tile_arguments(aligned: AlignedSlots) -> tuple[Tensor | int | None, ...]:
    return (
        aligned.slots if aligned.capacity is None else None,
        aligned.expert_ends,
        aligned.expert_ends.stride(0),
        aligned.tile_experts,
        aligned.tile_starts,
        aligned.num_tiles,
    )


@triton.jit
def _load_tile(
    slots_ptr,
    expert_ends_ptr,
    stride_ends,
    tile_experts_ptr,
    tile_starts_ptr,
    tile,
    BLOCK_M: tl.constexpr,
):
    """A tile's expert (int64), its positions (int64), which of them hold a slot, and the slots."""
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    positions = (tl.load(tile_starts_ptr + tile) + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_slot = positions < tl.load(expert_ends_ptr + expert * stride_ends)
    if slots_ptr is not None:
        slots = tl.load(slots_ptr + positions, mask=is_slot, other=0)
    else:
        slots = positions  # of batched rows
    return expert, positions, is_slot, slots


@triton.jit
def _activate(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """`apply_activation` on float32 halves; comparisons are written so that a NaN stays one."""
    if ACTIVATION == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "swigluoai":
        if limit is not None:
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        return (up + 1) * gate * tl.sigmoid(alpha * gate)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        positive = tl.where(gate < 0, 0.0, gate)
        return positive * positive


@triton.jit(do_not_specialize=["stride_ends"])
def _project_gate_up_kernel(
    slots_ptr,  # [N], or None of batched rows
    expert_ends_ptr,
    stride_ends,
    tile_experts_ptr,
    tile_starts_ptr,
    num_tiles_ptr,
    x_ptr,  # [R, H]
    stride_x_row,
    stride_x_col,
    w13_ptr,  # [E, 2I, H], or [E, I, H] where not gated
    stride_w_expert,
    stride_w_row,
    stride_w_col,
    up_offset,  # elements from an expert's gate rows to its up rows
    bias_ptr,  # [E, 2I] or None
    stride_bias_expert,
    stride_bias_col,
    out_ptr,  # [N, I]
    top_k,
    hidden_size,
    intermediate_size,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a tile and block of intermediate columns; gate and up side by side."""
    num_blocks = tl.cdiv(intermediate_size, BLOCK_N)
    tile = tl.program_id(0) // num_blocks
    if tile >= tl.load(num_tiles_ptr):
        return
    expert, positions, is_slot, slots = _load_tile(
        slots_ptr, expert_ends_ptr, stride_ends, tile_experts_ptr, tile_starts_ptr, tile, BLOCK_M
    )
    is_gated: tl.constexpr = ACTIVATION != "relu2"
    rows = (slots // top_k).to(tl.int64)
    columns = (tl.program_id(0) % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_column = columns < intermediate_size
    k_offsets = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + rows[:, None] * stride_x_row + k_offsets[None, :] * stride_x_col
    w_ptrs = w13_ptr + expert * stride_w_expert + columns[None, :] * stride_w_row
    w_ptrs += k_offsets[:, None] * stride_w_col
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, hidden_size, BLOCK_K):
        is_k = first + k_offsets < hidden_size
        x = tl.load(x_ptrs, mask=is_slot[:, None] & is_k[None, :], other=0.0)
        w_mask = is_k[:, None] & is_column[None, :]
        w_gate = tl.load(w_ptrs, mask=w_mask, other=0.0)
        gate = tl.dot(x, w_gate, gate, input_precision="ieee")
        if is_gated:
            w_up = tl.load(w_ptrs + up_offset, mask=w_mask, other=0.0)
            up = tl.dot(x, w_up, up, input_precision="ieee")
        x_ptrs += BLOCK_K * stride_x_col
        w_ptrs += BLOCK_K * stride_w_col
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * stride_bias_expert + columns * stride_bias_col
        gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if is_gated:
            bias_ptrs += intermediate_size * stride_bias_col
            up += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    result = _activate(gate, up, alpha, limit, ACTIVATION)
    out_ptrs = out_ptr + positions[:, None] * intermediate_size + columns[None, :]
    out_mask = is_slot[:, None] & is_column[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["stride_ends"])
def _project_down_kernel(
    slots_ptr,  # [N], or None of batched rows
    expert_ends_ptr,
    stride_ends,
    tile_experts_ptr,
    tile_starts_ptr,
    num_tiles_ptr,
    x_ptr,  # [N, I], by position
    w2_ptr,  # [E, H, I]
    stride_w_expert,
    stride_w_row,
    stride_w_col,
    bias_ptr,  # [E, H] or None
    stride_bias_expert,
    stride_bias_col,
    out_ptr,  # [N, H], by slot
    hidden_size,
    intermediate_size,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a tile and block of hidden columns."""
    num_blocks = tl.cdiv(hidden_size, BLOCK_N)
    tile = tl.program_id(0) // num_blocks
    if tile >= tl.load(num_tiles_ptr):
        return
    expert, positions, is_slot, slots = _load_tile(
        slots_ptr, expert_ends_ptr, stride_ends, tile_experts_ptr, tile_starts_ptr, tile, BLOCK_M
    )
    columns = (tl.program_id(0) % num_blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    is_column = columns < hidden_size
    k_offsets = tl.arange(0, BLOCK_K).to(tl.int64)
    x_ptrs = x_ptr + positions[:, None] * intermediate_size + k_offsets[None, :]
    w_ptrs = w2_ptr + expert * stride_w_expert + columns[None, :] * stride_w_row
    w_ptrs += k_offsets[:, None] * stride_w_col
    result = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in range(0, intermediate_size, BLOCK_K):
        is_k = first + k_offsets < intermediate_size
        x = tl.load(x_ptrs, mask=is_slot[:, None] & is_k[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=is_k[:, None] & is_column[None, :], other=0.0)
        result = tl.dot(x, w, result, input_precision="ieee")
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_w_col
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert * stride_bias_expert + columns * stride_bias_col
        result += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + slots.to(tl.int64)[:, None] * hidden_size + columns[None, :]
    out_mask = is_slot[:, None] & is_column[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=out_mask)
