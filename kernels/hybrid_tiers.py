"""Hybrid experts for larger batches: each tier's grouped GEMMs over its own experts, then one sum.

A slot belongs to one tier. Each tier aligns its own slots, skipping the other's as it skips slots
of other ranks, and its GEMMs (kernels/packed_projections.py) write the results by slot into one
buffer; so a row's slots are summed once, in float32 and in the order of the slots, whatever tier
each is of.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, E local experts, of which E4 are in
NVFP4 and E3 in NF3.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.align_blocks import align_slots, align_workspace_bytes, max_tiles
from ep_runtime.kernels.base import ExpertsShape, ExpertWeights, StandardExpertInput
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.grouped_gemm import GemmRows
from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.packed_projections import project_packed
from ep_runtime.kernels.packed_schedule import PACKED_HEIGHTS, choose_packed_tiles
from ep_runtime.kernels.quant.packed_weights import pack_weight, packed_layout
from ep_runtime.kernels.quant.scheme import QuantParameters, QuantScheme, WeightScheme
from ep_runtime.kernels.sum_slots import sum_slots
from ep_runtime.kernels.triton_operands import activated_bytes
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

NVFP4, NF3 = QuantScheme(WeightScheme.NVFP4), QuantScheme(WeightScheme.NF3)


@dataclass(frozen=True)
class Tier:
    """One tier's experts as a layer of its own: their scheme, packed weights, and slots.

    topk_ids: [R, K] int32, places in this tier; -1 for a slot of the other, or of another rank.
    """

    scheme: QuantScheme
    weights: ExpertWeights
    topk_ids: Tensor


def pack_hybrid_weights(weights: ExpertWeights) -> ExpertWeights:
    """Both tiers' weights as the packed kernels read them (kernels/quant/packed_weights.py), in the
    same fields. ValueError for weights that are no hybrid's."""
    w13, w13_quant = _pack_projection(weights.w13, weights.w13_quant)
    w2, w2_quant = _pack_projection(weights.w2, weights.w2_quant)
    return ExpertWeights(w13=w13, w2=w2, w13_quant=w13_quant, w2_quant=w2_quant)


def _pack_projection(
    values: Tensor, quant: QuantParameters | None
) -> tuple[Tensor, QuantParameters]:
    if quant is None or quant.tiers is None or quant.nf3_values is None or quant.nf3_scales is None:
        raise ValueError("hybrid weights have two tiers; these have not")
    words, nvfp4 = pack_weight(
        values,
        QuantParameters(quant.scales, global_scales=quant.global_scales),
        packed_layout(NVFP4),
    )
    nf3_words, nf3 = pack_weight(
        quant.nf3_values, QuantParameters(quant.nf3_scales), packed_layout(NF3)
    )
    return words, replace(nvfp4, nf3_values=nf3_words, nf3_scales=nf3.scales, tiers=quant.tiers)


def tier_weights(weights: ExpertWeights, scheme: QuantScheme) -> ExpertWeights:
    """Views of one tier's packed weights, as `pack_triton_weights` leaves those of its scheme."""

    def of_tier(values: Tensor, quant: QuantParameters | None) -> tuple[Tensor, QuantParameters]:
        if quant is None or quant.nf3_values is None or quant.nf3_scales is None:
            raise ValueError("hybrid weights have two tiers; these have not")
        if scheme.weight is WeightScheme.NF3:
            return quant.nf3_values, QuantParameters(quant.nf3_scales)
        return values, QuantParameters(quant.scales, global_scales=quant.global_scales)

    w13, w13_quant = of_tier(weights.w13, weights.w13_quant)
    w2, w2_quant = of_tier(weights.w2, weights.w2_quant)
    return ExpertWeights(w13=w13, w2=w2, w13_quant=w13_quant, w2_quant=w2_quant)


def run_tiers(
    expert_input: StandardExpertInput,
    weights: ExpertWeights,
    shape: ExpertsShape,
    workspace: Workspace,
    output: Tensor,
) -> None:
    """Compute all rows into `output` [R, H].

    weights: as `pack_hybrid_weights` leaves them. Takes `tiers_bytes`. Does not wait for the
    device. Each slot's weighted result is rounded to the layer's dtype before the float32 sum.
    """
    num_slots = expert_input.topk_ids.numel()
    with workspace.frame():
        slot_outputs = workspace.take((num_slots, shape.hidden_size), shape.dtype)
        slot_weights = expert_input.topk_weights.contiguous().flatten()
        for tier in _split(expert_input, weights, workspace):
            own_input = replace(expert_input, topk_ids=tier.topk_ids)
            own_shape = replace(shape, scheme=tier.scheme)
            tiles = choose_packed_tiles(
                len(expert_input.hidden_states),
                expert_input.num_source_rows,
                own_shape,
                output.device,
            )
            with workspace.frame():
                aligned = align_slots(
                    own_input,
                    num_local_experts=tier.weights.w13.shape[0],
                    block_m=tiles.block_m,
                    workspace=workspace,
                )
                project_packed(
                    GemmRows(expert_input.hidden_states, expert_input.scales),
                    tier.weights,
                    aligned,
                    shape=own_shape,
                    top_k=expert_input.topk_ids.shape[1],
                    slot_weights=slot_weights,
                    tiles=tiles,
                    workspace=workspace,
                    out=slot_outputs,
                )
        sum_slots(slot_outputs, expert_input, num_local_experts=weights.num_experts, out=output)


def tiers_bytes(num_rows: int, shape: ExpertsShape) -> int:
    """What `run_tiers` takes at most; never less for more rows."""
    num_slots, num_experts = num_rows * shape.top_k, shape.num_local_experts

    def of_height(height: int) -> int:
        positions = max_tiles(num_slots, num_experts, height) * height
        table_bytes = align_workspace_bytes(num_slots, num_experts, height)
        return table_bytes + activated_bytes(positions, replace(shape, scheme=NVFP4))

    ids_bytes = 2 * aligned_bytes(4 * num_slots)
    slots_bytes = aligned_bytes(num_slots * shape.hidden_size * shape.dtype.itemsize)
    return ids_bytes + slots_bytes + max(map(of_height, PACKED_HEIGHTS))


def _split(
    expert_input: StandardExpertInput, weights: ExpertWeights, workspace: Workspace
) -> Iterator[Tier]:
    """The tiers that have experts here; their ids live in `workspace`."""
    ids = expert_input.topk_ids.contiguous()
    nvfp4_ids, nf3_ids = (workspace.take(tuple(ids.shape), torch.int32) for _ in range(2))
    split_ids(ids, tiers_of(weights), nvfp4_ids=nvfp4_ids, nf3_ids=nf3_ids)
    for scheme, own_ids in ((NVFP4, nvfp4_ids), (NF3, nf3_ids)):
        own = tier_weights(weights, scheme)
        if own.w13.shape[0]:
            yield Tier(scheme, own, own_ids)


def tiers_of(weights: ExpertWeights) -> Tensor:
    """[E] int32, as `QuantParameters.tiers` says."""
    tiers = None if weights.w13_quant is None else weights.w13_quant.tiers
    if tiers is None:
        raise ValueError("hybrid weights have tiers; these have none")
    return tiers


def split_ids(ids: Tensor, tiers: Tensor, *, nvfp4_ids: Tensor, nf3_ids: Tensor) -> None:
    """Each slot's place in the tier of its expert, -1 in the other one's ids.

    ids: [R, K] int32 or int64 local ids, contiguous; outside [0, E): -1 in both. tiers: [E] int32.
    nvfp4_ids, nf3_ids: [R, K] int32, contiguous, written whole. One launch; does not wait for the
    device.

    Example: tiers 0, -1, 1 and ids 2, 1, -1 give 1, -1, -1 and -1, 0, -1.
    """
    prepare_launch(ids.device)
    block = 1024
    _split_ids_kernel[(max(1, triton.cdiv(ids.numel(), block)),)](
        ids,
        tiers,
        nvfp4_ids,
        nf3_ids,
        ids.numel(),
        tiers.shape[0],
        BLOCK=block,
        **launch_options(ids.device),
    )


def split_ids_reference(ids: Tensor, tiers: Tensor, *, nvfp4_ids: Tensor, nf3_ids: Tensor) -> None:
    """The definition of `split_ids`."""
    is_local = (ids >= 0) & (ids < len(tiers))
    places = tiers[torch.where(is_local, ids, 0).long()]
    nvfp4_ids.copy_(torch.where(is_local & (places >= 0), places, -1))
    nf3_ids.copy_(torch.where(is_local & (places < 0), ~places, -1))


@triton.jit(do_not_specialize=["num_slots"])
def _split_ids_kernel(
    ids_ptr,  # [N]
    tiers_ptr,  # [E] int32
    nvfp4_ids_ptr,  # [N]
    nf3_ids_ptr,  # [N]
    num_slots,
    num_experts,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program, BLOCK slots."""
    await_predecessor(IS_DEPENDENT)
    slots = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_slot = slots < num_slots
    ids = tl.load(ids_ptr + slots, mask=is_slot, other=-1)
    is_local = (ids >= 0) & (ids < num_experts)
    places = tl.load(tiers_ptr + ids, mask=is_local, other=0)
    tl.store(nvfp4_ids_ptr + slots, tl.where(is_local & (places >= 0), places, -1), mask=is_slot)
    tl.store(nf3_ids_ptr + slots, tl.where(is_local & (places < 0), ~places, -1), mask=is_slot)
