"""Both projections of aligned slots on packed weights, for rows of either format.

On Hopper by kernels/hopper_packed_gemm.py, where kernels/hopper_packed_schedule.py says so, else by
the Triton kernels (kernels/packed_gemm.py). Weights are packed for one of them, once.
"""

from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import ExpertsShape, ExpertWeights
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.grouped_gemm import GemmRows
from ep_runtime.kernels.hopper_gemm import (
    can_gather,
    project_down_hopper,
    project_gate_up_hopper,
)
from ep_runtime.kernels.hopper_packed_gemm import (
    project_down_hopper_packed,
    project_gate_up_hopper_packed,
)
from ep_runtime.kernels.hopper_packed_layout import (
    HopperWords,
    hopper_words,
    pack_hopper_weights,
)
from ep_runtime.kernels.hopper_packed_schedule import HopperPackedExpertsTiles, takes_hopper_packed
from ep_runtime.kernels.hopper_packed_unpack import unpack_weight
from ep_runtime.kernels.packed_gemm import project_down_packed, project_gate_up_packed
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.triton_operands import pack_triton_weights, take_activated
from ep_runtime.kernels.workspace import Workspace


def prepare_packed_weights(weights: ExpertWeights, shape: ExpertsShape) -> ExpertWeights:
    """Weights of a packed scheme as `project_packed` reads them on their device; all repacked.

    ValueError for a scheme without a packed layout, and for weights without scales.
    """
    if takes_hopper_packed(shape, weights.w13.device):
        return pack_hopper_weights(weights, shape)
    return pack_triton_weights(weights, shape.scheme)


def project_packed(
    rows: GemmRows,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    shape: ExpertsShape,
    top_k: int,
    slot_weights: Tensor | None,
    tiles: PackedExpertsTiles | HopperPackedExpertsTiles,
    workspace: Workspace,
    out: Tensor,
) -> None:
    """out[s] = slot's weight * (expert of s)(row of s), for every local slot s.

    rows: [R, H], any strides (on Hopper rows that start at no multiple of 16 bytes are copied);
    slot s belongs to row s // top_k. weights: as `prepare_packed_weights` leaves them, tiles of the
    same way. slot_weights: [N] float32 or None. out: [N, H], contiguous, or where the tiles split K
    [N * split_k, H] float32; slots elsewhere stay unwritten. Takes `activated_bytes` and
    `unpacked_bytes`. PlanError for rows that are not in the layer's dtype. Does not wait for the
    device.
    """
    if rows.scales is not None:
        raise PlanError(
            f"rows came as {rows.values.dtype} with scales, and with weights stored as "
            f"{shape.scheme.weight} they must be in the layer's dtype; use dispatch_dtype: model"
        )
    if isinstance(tiles, HopperPackedExpertsTiles):
        _project_on_hopper(
            rows.values, weights, aligned, shape, top_k, slot_weights, tiles, workspace, out
        )
        return
    layout = packed_layout(shape.scheme)
    activated = take_activated(aligned.max_tiles * aligned.block_m, shape, workspace).values
    project_gate_up_packed(
        rows.values,
        weights,
        aligned,
        layout=layout,
        top_k=top_k,
        activation=shape.activation,
        tiles=tiles.gate_up,
        out=activated,
    )
    project_down_packed(
        activated,
        weights,
        aligned,
        layout=layout,
        slot_weights=slot_weights,
        tiles=tiles.down,
        split_k=tiles.split_k,
        out=out,
    )


def _project_on_hopper(
    rows: Tensor,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    shape: ExpertsShape,
    top_k: int,
    slot_weights: Tensor | None,
    tiles: HopperPackedExpertsTiles,
    workspace: Workspace,
    out: Tensor,
) -> None:
    activated = take_activated(aligned.max_tiles * aligned.block_m, shape, workspace).values
    w13, w2 = hopper_words(weights, shape)
    if not can_gather(rows):
        rows = rows.clone(memory_format=torch.contiguous_format)
    first: dict[str, Any] = {"activation": shape.activation, "out": activated, "top_k": top_k}
    first["bias"], second_bias = weights.w13_bias, weights.w2_bias
    if tiles.unpacks:
        with workspace.frame():
            plain = _unpack(w13, shape.hidden_size, workspace)
            project_gate_up_hopper(rows, plain, aligned, **first)
        with workspace.frame():
            plain = _unpack(w2, shape.intermediate_size, workspace)
            project_down_hopper(
                activated, plain, aligned, out=out, bias=second_bias, topk_weights=slot_weights
            )
        return
    project_gate_up_hopper_packed(rows, w13, aligned, schedule=tiles.gate_up, **first)
    project_down_hopper_packed(
        activated,
        w2,
        aligned,
        out=out,
        topk_weights=slot_weights,
        bias=second_bias,
        schedule=tiles.down,
    )


def _unpack(packed: HopperWords, num_columns: int, workspace: Workspace) -> Tensor:
    """16-bit weights [E, N, K] in the workspace, within `unpacked_bytes`."""
    num_rows = packed.num_columns * (2 if packed.is_gated else 1)
    size = (packed.words.shape[0], num_rows, num_columns)
    plain = workspace.take(size, packed.factors.dtype)
    unpack_weight(packed, plain)
    return plain
