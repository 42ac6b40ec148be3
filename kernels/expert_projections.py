"""Both projections of aligned slots, by the kernels that fit their tiles.

Packed weights have GEMMs of their own (kernels/packed_projections.py). For others there are two
ways, chosen by `ExpertsTiles.is_hopper`:
- the Triton GEMMs (kernels/grouped_gemm.py), which gather rows by slot: few rows an expert, any
  device, dtype and size; the definition of the other;
- the warp-specialised Hopper GEMMs (kernels/hopper_gemm.py). They gather rows that are in the
  weights' 16-bit dtype; others a permuting pass first puts in expert order, quantising them on the
  way where the weights are fp8, dequantising them where the rows alone are.

Shapes: R rows, K slots a row, N slots, H hidden size, I intermediate size, P padded positions.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import ExpertsShape, ExpertWeights, StandardExpertInput
from ep_runtime.kernels.grouped_gemm import GemmRows, project_down, project_gate_up
from ep_runtime.kernels.hopper_gemm import (
    Fp8Scales,
    can_gather,
    project_down_hopper,
    project_gate_up_hopper,
)
from ep_runtime.kernels.hopper_packed_schedule import (
    HopperPackedExpertsTiles,
    parts_bytes,
    unpacked_bytes,
)
from ep_runtime.kernels.packed_projections import project_packed
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles
from ep_runtime.kernels.permute import permute_rows
from ep_runtime.kernels.quant.fp8_rows import num_groups
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.sum_slots import PARTS_DTYPE
from ep_runtime.kernels.tiles import HOPPER_BLOCK_M, ExpertsTiles
from ep_runtime.kernels.triton_operands import (
    activated_bytes,
    quantised_rows_bytes,
    rows_for,
    take_activated,
)
from ep_runtime.kernels.workspace import Workspace, aligned_bytes


def project_slots(
    expert_input: StandardExpertInput,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    shape: ExpertsShape,
    tiles: ExpertsTiles | PackedExpertsTiles | HopperPackedExpertsTiles,
    workspace: Workspace,
) -> Tensor:
    """Every local slot's weighted expert output, [N, H] by slot; slots elsewhere stay unwritten.

    Where `num_parts_of` the tiles is more than 1, as many rows a slot, [N * parts, H] in
    PARTS_DTYPE, whose sum it is. The result lives in `workspace`, until its frame ends. Does not
    wait for the device.
    """
    if isinstance(tiles, PackedExpertsTiles | HopperPackedExpertsTiles):
        return _project_packed(expert_input, weights, aligned, shape, tiles, workspace)
    if tiles.is_hopper:
        return _project_on_hopper(expert_input, weights, aligned, shape, tiles, workspace)
    return _project(expert_input, weights, aligned, shape, tiles, workspace)


def num_parts_of(tiles: ExpertsTiles | PackedExpertsTiles | HopperPackedExpertsTiles) -> int:
    """Rows that `project_slots` leaves for each slot: of the parts that K is split into."""
    if isinstance(tiles, HopperPackedExpertsTiles):
        return tiles.down.split_k
    return tiles.split_k if isinstance(tiles, PackedExpertsTiles) else 1


def projections_bytes(num_rows: int, shape: ExpertsShape, num_positions: int, height: int) -> int:
    """What `project_slots` takes at most for `num_positions` in tiles of `height`."""
    num_slots = num_rows * shape.top_k
    slots_bytes = aligned_bytes(num_slots * shape.hidden_size * shape.dtype.itemsize)
    if is_packed(shape.scheme):
        slots_bytes = max(slots_bytes, parts_bytes(num_rows, shape))
    rows_bytes = quantised_rows_bytes(num_rows, shape) + slots_bytes
    if is_packed(shape.scheme):
        rows_bytes += unpacked_bytes(num_rows, shape)
    elif height == HOPPER_BLOCK_M and shape.dtype.itemsize == 2:
        # In expert order, where they are not gathered; dead before the slots' outputs are taken.
        rows_bytes = max(rows_bytes, _ordered_rows_bytes(num_positions, shape))
    return activated_bytes(num_positions, shape) + rows_bytes


def _project(
    expert_input: StandardExpertInput,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    shape: ExpertsShape,
    tiles: ExpertsTiles,
    workspace: Workspace,
) -> Tensor:
    activated = take_activated(aligned.max_tiles * aligned.block_m, shape, workspace)
    rows = GemmRows(expert_input.hidden_states, expert_input.scales)
    project_gate_up(
        rows_for(rows, shape, workspace),
        weights,
        aligned,
        top_k=shape.top_k,
        activation=shape.activation,
        tiles=tiles.gate_up,
        out=activated,
    )
    out = workspace.take((aligned.num_slots, shape.hidden_size), shape.dtype)
    project_down(
        activated,
        weights,
        aligned,
        slot_weights=expert_input.topk_weights.contiguous().flatten(),
        tiles=tiles.down,
        out=out,
    )
    return out


def _project_packed(
    expert_input: StandardExpertInput,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    shape: ExpertsShape,
    tiles: PackedExpertsTiles | HopperPackedExpertsTiles,
    workspace: Workspace,
) -> Tensor:
    num_parts = num_parts_of(tiles)
    dtype = shape.dtype if num_parts == 1 else PARTS_DTYPE
    out = workspace.take((aligned.num_slots * num_parts, shape.hidden_size), dtype)
    project_packed(
        GemmRows(expert_input.hidden_states, expert_input.scales),
        weights,
        aligned,
        shape=shape,
        top_k=shape.top_k,
        slot_weights=expert_input.topk_weights.contiguous().flatten(),
        tiles=tiles,
        workspace=workspace,
        out=out,
    )
    return out


def _project_on_hopper(
    expert_input: StandardExpertInput,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    shape: ExpertsShape,
    tiles: ExpertsTiles,
    workspace: Workspace,
) -> Tensor:
    num_positions = aligned.max_tiles * aligned.block_m
    activated = take_activated(num_positions, shape, workspace)
    with workspace.frame():
        rows = GemmRows(expert_input.hidden_states, expert_input.scales)
        gathers = rows.values.dtype is weights.w13.dtype and can_gather(rows.values)
        if not gathers:
            rows = _take_ordered_rows(num_positions, shape, workspace)
            permute_rows(
                expert_input,
                aligned,
                out=rows.values,
                out_scales=None if rows.scales is None else rows.scales.T,
            )
        project_gate_up_hopper(
            rows.values,
            weights.w13,
            aligned,
            activation=shape.activation,
            out=activated.values,
            bias=weights.w13_bias,
            scales=_scales(rows, weights.w13_quant, activated),
            top_k=expert_input.topk_ids.shape[1] if gathers else None,
            schedule=tiles.gate_up_schedule,
        )
    out = workspace.take((aligned.num_slots, shape.hidden_size), shape.dtype)
    project_down_hopper(
        activated.values,
        weights.w2,
        aligned,
        out=out,
        bias=weights.w2_bias,
        scales=_scales(activated, weights.w2_quant),
        topk_weights=expert_input.topk_weights.contiguous(),
        schedule=tiles.down_schedule,
    )
    return out


def _scales(
    rows: GemmRows, quant: QuantParameters | None, out: GemmRows | None = None
) -> Fp8Scales | None:
    if rows.scales is None or quant is None:
        return None
    return Fp8Scales(rows.scales, quant.scales, None if out is None else out.scales)


def _take_ordered_rows(num_positions: int, shape: ExpertsShape, workspace: Workspace) -> GemmRows:
    """Room for rows in expert order [P, H]; of fp8 weights quantised."""
    if not shape.scheme.is_quantised:
        return GemmRows(workspace.take((num_positions, shape.hidden_size), shape.dtype))
    values = workspace.take((num_positions, shape.hidden_size), torch.float8_e4m3fn)
    groups = num_groups(shape.hidden_size)
    return GemmRows(values, workspace.take((num_positions, groups), torch.float32))


def _ordered_rows_bytes(num_positions: int, shape: ExpertsShape) -> int:
    """What `_take_ordered_rows` takes."""
    if not shape.scheme.is_quantised:
        return aligned_bytes(num_positions * shape.hidden_size * shape.dtype.itemsize)
    scale_bytes = aligned_bytes(4 * num_positions * num_groups(shape.hidden_size))
    return aligned_bytes(num_positions * shape.hidden_size) + scale_bytes
