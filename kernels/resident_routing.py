"""Routing inside a launch: `kernels/routing.py` once more, for the programs of a resident grid.

Shapes: T rows, E experts of the layer, K top-k slots, KP and EP their next powers of two.

A program routes a few rows at a time. What it leaves (`route_rows`) is read back by itself, or,
behind a grid barrier, by all programs; `list_experts` makes of it the local experts that have rows.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_runtime.kernels.routing_choice import LOWEST, best_groups, index_of, rankable


class Routed(NamedTuple):
    """Inside a kernel: rows' slots on this rank.

    ids_ptr: [BLOCK_T, KP] int32 local ids; -1: not here; columns from K on stay unwritten.
    weights_ptr: [BLOCK_T, KP] float32, in any unit. largest_ptr: [BLOCK_T] float32, the largest
    magnitude of a row's local weights, in that unit, 0 without any. factors_ptr: [BLOCK_T] float32,
    what the largest is in the end, normalised and scaled.
    """

    ids_ptr: Any
    weights_ptr: Any
    largest_ptr: Any
    factors_ptr: Any


@triton.jit
def routing_scratch(
    integers_ptr,  # [P, BLOCK_T * KP + 2 * BLOCK_LOCAL] int32, of all programs
    floats_ptr,  # [P, BLOCK_T * (KP + 2)] float32
    program,
    BLOCK_K: tl.constexpr,
    BLOCK_LOCAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """A program's `Routed`, and its [2 * BLOCK_LOCAL] int32 for `list_experts`."""
    SLOTS: tl.constexpr = BLOCK_T * BLOCK_K
    ids_ptr = integers_ptr + program.to(tl.int64) * (SLOTS + 2 * BLOCK_LOCAL)
    weights_ptr = floats_ptr + program.to(tl.int64) * (SLOTS + 2 * BLOCK_T)
    largest_ptr = weights_ptr + SLOTS
    return Routed(ids_ptr, weights_ptr, largest_ptr, largest_ptr + BLOCK_T), ids_ptr + SLOTS


@triton.jit
def route_rows(
    first_row,
    num_rows,
    logits_ptr,  # [T, E] float32
    stride_logits_row,
    correction_bias_ptr,  # [E] float32 or None
    expert_map_ptr,  # [E] int32: local id, or -1
    num_experts,
    routed_scaling_factor,
    routed,  # out: `Routed`, weights in scores, neither normalised nor scaled
    ROUTING: tl.constexpr,  # as it is taken apart here
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Route rows first_row .. first_row + BLOCK_ROWS; those from num_rows on are not routed."""
    SCORING: tl.constexpr = ROUTING[0]
    NORM_TOPK_PROB: tl.constexpr = ROUTING[1]
    NORM_EPSILON: tl.constexpr = ROUTING[2]
    N_GROUP: tl.constexpr = ROUTING[3]
    BLOCK_GROUPS: tl.constexpr = ROUTING[4]
    TOPK_GROUP: tl.constexpr = ROUTING[5]
    GROUP_SCORE: tl.constexpr = ROUTING[6]
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_row = rows < num_rows
    is_expert = experts < num_experts
    row_ptrs = logits_ptr + rows.to(tl.int64) * stride_logits_row
    logits = tl.load(
        row_ptrs[:, None] + experts[None, :],
        mask=is_row[:, None] & is_expert[None, :],
        other=float("-inf"),
    )
    # Of rows that are not there too a softmax, only so that nothing warns of it.
    logits = tl.where(is_row[:, None], logits, 0.0)
    num_nan = tl.sum((logits != logits).to(tl.int32), axis=1)
    highest = tl.max(logits, axis=1)
    if SCORING == "softmax":
        powers = tl.where(is_expert[None, :], tl.exp(logits - highest[:, None]), 0.0)
        total = tl.sum(powers, axis=1)
        scores = powers / total[:, None]
        # Not a number where a logit is none, where the highest is inf, where all are -inf.
        is_routed = is_row & (num_nan == 0) & (total == total)
    else:
        tl.static_assert(SCORING == "sigmoid")
        total = highest
        scores = tl.sigmoid(logits)
        is_routed = is_row & (num_nan == 0)
    choice = scores
    if correction_bias_ptr is not None:
        bias = tl.load(correction_bias_ptr + experts, mask=is_expert, other=0.0)
        choice += bias[None, :]
    if N_GROUP > 1:
        within = tl.where(is_expert[None, :], choice, float("-inf"))
        is_best = best_groups(
            within,
            experts,
            num_experts // N_GROUP,
            N_GROUP,
            BLOCK_GROUPS,
            TOPK_GROUP,
            GROUP_SCORE,
        )
        choice = tl.where(is_best, choice, float("-inf"))
    ranked = tl.where(is_expert[None, :], rankable(choice, experts[None, :]), LOWEST)
    weight_sum = tl.zeros([BLOCK_ROWS], tl.float32)
    largest = tl.zeros([BLOCK_ROWS], tl.float32)
    for k in range(TOP_K):
        best = index_of(tl.max(ranked, axis=1))
        ranked = tl.where(experts[None, :] == best[:, None], LOWEST, ranked)
        logit = tl.load(row_ptrs + best, mask=is_row, other=0.0)
        weight = tl.exp(logit - highest) / total if SCORING == "softmax" else tl.sigmoid(logit)
        local = tl.load(expert_map_ptr + best, mask=is_routed, other=-1)
        weight_sum += weight
        largest = tl.where(local >= 0, tl.maximum(largest, weight), largest)
        tl.store(routed.ids_ptr + rows * BLOCK_K + k, local)
        tl.store(routed.weights_ptr + rows * BLOCK_K + k, weight)
    factors = largest
    if NORM_TOPK_PROB:
        factors = factors / (weight_sum + NORM_EPSILON)
    tl.store(routed.largest_ptr + rows, largest)
    tl.store(routed.factors_ptr + rows, factors * routed_scaling_factor)


@triton.jit
def load_slots(
    routed,
    num_rows,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Local ids of all slots, [BLOCK_T * KP]; -1 where there is none."""
    slots = tl.arange(0, BLOCK_T * BLOCK_K)
    is_slot = (slots // BLOCK_K < num_rows) & (slots % BLOCK_K < TOP_K)
    return tl.load(routed.ids_ptr + slots, mask=is_slot, other=-1)


@triton.jit
def list_experts(
    slots,  # of `load_slots`
    used_ptr,  # [2 * BLOCK_LOCAL] int32, scratch of this program
    BLOCK_LOCAL: tl.constexpr,
):
    """The local experts that have rows, in rising order, and how many they are.

    BLOCK_LOCAL: a power of two, not below the number of local experts.
    """
    list_ptr = used_ptr + BLOCK_LOCAL
    experts = tl.arange(0, BLOCK_LOCAL)
    tl.store(used_ptr + experts, tl.zeros([BLOCK_LOCAL], tl.int32))
    tl.debug_barrier()
    tl.store(used_ptr + slots, tl.full(slots.shape, 1, tl.int32), mask=slots >= 0)
    tl.debug_barrier()
    used = tl.load(used_ptr + experts)
    tl.store(list_ptr + tl.cumsum(used, axis=0) - used, experts, mask=used > 0)
    tl.debug_barrier()
    return list_ptr, tl.sum(used, axis=0)


@triton.jit
def load_ratios(
    expert,
    routed,
    num_rows,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Of each row [BLOCK_T]: whether it has a slot for a local expert, and that slot's weight over
    the largest of the row."""
    rows = tl.arange(0, BLOCK_T)
    slots = rows[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    is_slot = (rows < num_rows)[:, None] & (tl.arange(0, BLOCK_K) < TOP_K)[None, :]
    is_here = tl.load(routed.ids_ptr + slots, mask=is_slot, other=-1) == expert
    weights = tl.where(is_here, tl.load(routed.weights_ptr + slots, mask=is_slot, other=0.0), 0.0)
    largest = tl.load(routed.largest_ptr + rows, mask=rows < num_rows, other=0.0)
    ratios = tl.sum(weights, axis=1) / tl.where(largest > 0, largest, 1.0)
    return tl.max(is_here.to(tl.int32), axis=1) > 0, ratios
