"""The definitions of the Hopper GEMM's two projections (kernels/hopper_gemm.py), in plain torch.

Shapes: P positions, R rows, K columns summed over, N and I columns of the results, E experts.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation
from ep_runtime.kernels.hopper_gemm import ExpertTiles, Fp8Scales
from ep_runtime.kernels.quant.scheme import FP8_GROUP


def project_gate_up_hopper_reference(
    hidden_states: Tensor,
    w13: Tensor,
    tiles: ExpertTiles,
    *,
    activation: Activation,
    bias: Tensor | None = None,
    scales: Fp8Scales | None = None,
    top_k: int | None = None,
) -> Tensor:
    """The definition of `project_gate_up_hopper`: [P, I] float32, NaN where it does not write.

    Not rounded, nor quantised. Waits for the device.
    """
    x = hidden_states if top_k is None else _gather_rows(hidden_states, tiles, top_k)
    num_parts = 2 if activation.is_gated else 1
    out = _unwritten(x.shape[0], w13.shape[1] // num_parts, x.device)
    for rows, projected in _projected_tiles(x, w13, tiles, bias, scales, num_parts):
        out[rows] = apply_activation(projected, activation)
    return out


def project_down_hopper_reference(
    activated: Tensor,
    w2: Tensor,
    tiles: ExpertTiles,
    *,
    bias: Tensor | None = None,
    scales: Fp8Scales | None = None,
    topk_weights: Tensor | None = None,
) -> Tensor:
    """The definition of `project_down_hopper`: [num_slots or P, N] float32, NaN where unwritten.

    Waits for the device.
    """
    num_rows = activated.shape[0] if topk_weights is None else topk_weights.numel()
    out = _unwritten(num_rows, w2.shape[1], activated.device)
    for rows, raw in _projected_tiles(activated, w2, tiles, bias, scales, 1):
        if topk_weights is None:
            out[rows] = raw
            continue
        slots = tiles.slots[rows].long()
        is_slot = slots < num_rows
        slots = slots[is_slot]
        out[slots] = raw[is_slot] * topk_weights.flatten()[slots, None]
    return out


def _gather_rows(x: Tensor, tiles: ExpertTiles, top_k: int) -> Tensor:
    """x of R rows by position, [P, K], 0 where no slot is. Waits for the device."""
    slots = tiles.slots[: int(tiles.num_tiles) * tiles.block_m].long()
    is_slot = slots < x.shape[0] * top_k
    out = x.new_zeros(tiles.slots.numel(), x.shape[1])
    out[: slots.numel()][is_slot] = x[slots[is_slot] // top_k]
    return out


def _unwritten(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    return torch.full((num_rows, num_columns), torch.nan, device=device)


def _projected_tiles(
    x: Tensor,
    w: Tensor,
    tiles: ExpertTiles,
    bias: Tensor | None,
    scales: Fp8Scales | None,
    num_parts: int,
) -> Iterator[tuple[slice, Tensor]]:
    """Positions of each tile and its product with bias in float32. Waits for the device."""
    for tile, expert in enumerate(tiles.tile_experts[: int(tiles.num_tiles)].tolist()):
        rows = slice(tile * tiles.block_m, (tile + 1) * tiles.block_m)
        left, right = x[rows].float(), w[expert].float()
        if scales is not None:
            left *= _widen(scales.rows[rows], left.shape[1], dim=1)
            blocks = _widen(scales.weights[expert], right.shape[1], dim=1)
            part_rows = right.shape[0] // num_parts
            right *= torch.cat([_widen(b, part_rows, dim=0) for b in blocks.chunk(num_parts)])
        projected = left @ right.T
        yield rows, projected if bias is None else projected + bias[expert].float()


def _widen(scales: Tensor, size: int, *, dim: int) -> Tensor:
    """Each scale 128 times along `dim`, cut to `size`."""
    return scales.repeat_interleave(FP8_GROUP, dim=dim).narrow(dim, 0, size)
