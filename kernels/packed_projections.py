"""Both projections of aligned slots on packed weights, for rows of either format."""

from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import ExpertsShape, ExpertWeights
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.grouped_gemm import GemmRows
from ep_runtime.kernels.packed_gemm import project_down_packed, project_gate_up_packed
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.triton_operands import take_activated
from ep_runtime.kernels.workspace import Workspace


def project_packed(
    rows: GemmRows,
    weights: ExpertWeights,
    aligned: AlignedSlots,
    *,
    shape: ExpertsShape,
    top_k: int,
    slot_weights: Tensor | None,
    tiles: PackedExpertsTiles,
    workspace: Workspace,
    out: Tensor,
) -> None:
    """out[s] = slot's weight * (expert of s)(row of s), for every local slot s.

    rows: [R, H], any strides; slot s belongs to row s // top_k. weights: as `pack_triton_weights`
    leaves them. slot_weights: [N] float32 or None. out: [N, H], contiguous; slots elsewhere stay
    unwritten. Takes `activated_bytes`. PlanError for rows that are not in the layer's dtype. Does
    not wait for the device.
    """
    if rows.scales is not None:
        raise PlanError(
            f"rows came as {rows.values.dtype} with scales, and with weights stored as "
            f"{shape.scheme.weight} they must be in the layer's dtype; use dispatch_dtype: model"
        )
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
        out=out,
    )
