"""Routing, and the two passes over ids of a call, in single launches: plain torch takes 5 to 14.

The definitions are in kernels/routing.py: `FusedRouting` is `route_tokens`, `KnownIds` is
`keep_known_ids`, `SlotCounter` is `count_slots`.

Shapes: T rows, E experts, K top-k slots.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.base import Routing, RoutingSpec
from ep_runtime.kernels.launch import PreparedLaunch
from ep_runtime.kernels.routing import NORM_EPSILON, check_routing
from ep_runtime.kernels.routing_choice import LOWEST, best_groups, index_of, rankable

_BLOCK_SLOTS = 1024


class FusedRouting:
    """`route_tokens` of one spec, in one launch a call."""

    def __init__(self, spec: RoutingSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._launch: PreparedLaunch | None = None

    def __call__(self, logits: Tensor, correction_bias: Tensor | None) -> Routing:
        """logits: [T, E] float32, contiguous. correction_bias: [E] float32 or None.

        Ids and weights as `route_tokens` gives them, but for the last bit of a score; so two scores
        that are equal but for it may change places. Does not wait for the device. Raises as it.
        """
        check_routing(logits, self.spec, correction_bias)
        num_rows, top_k = logits.shape[0], self.spec.top_k
        ids = logits.new_empty((num_rows, top_k), dtype=torch.int32)
        weights = torch.empty_like(ids, dtype=torch.float32)
        if num_rows:
            if self._launch is None:
                self._launch = _prepare_routing(self.spec, self.device)
            self._launch((num_rows,), logits, correction_bias, ids, weights)
        return Routing(ids, weights)


def _prepare_routing(spec: RoutingSpec, device: torch.device) -> PreparedLaunch:
    return PreparedLaunch(
        _route_kernel,
        device,
        options={"num_warps": 1 if spec.num_experts <= 512 else 4},
        num_experts=spec.num_experts,
        routed_scaling_factor=float(spec.routed_scaling_factor),
        SCORING=spec.scoring,
        NORM_TOPK_PROB=spec.norm_topk_prob,
        NORM_EPSILON=NORM_EPSILON,
        N_GROUP=spec.n_group,
        BLOCK_GROUPS=triton.next_power_of_2(spec.n_group),
        TOPK_GROUP=spec.topk_group,
        GROUP_SCORE=spec.group_score,
        TOP_K=spec.top_k,
        BLOCK_K=triton.next_power_of_2(spec.top_k),
        BLOCK_EXPERTS=triton.next_power_of_2(spec.num_experts),
    )


class KnownIds:
    """`keep_known_ids` of one number of experts, in one launch a call."""

    def __init__(self, num_experts: int, device: torch.device) -> None:
        self._launch = PreparedLaunch(
            _keep_known_ids_kernel,
            device,
            options={"num_warps": 4},
            num_experts=num_experts,
            BLOCK_SLOTS=_BLOCK_SLOTS,
        )

    def __call__(self, topk_ids: Tensor) -> Tensor:
        """topk_ids: [T, K] int32 or int64."""
        given = topk_ids.contiguous()
        ids = torch.empty_like(given, dtype=torch.int32)
        num_slots = given.numel()
        if num_slots:
            self._launch((triton.cdiv(num_slots, _BLOCK_SLOTS),), given, ids, num_slots)
        return ids


class SlotCounter:
    """`count_slots` into one tensor of counts, in one launch a call."""

    def __init__(self, counts: Tensor) -> None:
        """counts: [E_local] int64, kept and added to."""
        self.counts = counts
        self._launch = PreparedLaunch(
            _count_slots_kernel,
            counts.device,
            options={"num_warps": 4},
            counts_ptr=counts,
            num_experts=counts.numel(),
            BLOCK_SLOTS=_BLOCK_SLOTS,
            BLOCK_EXPERTS=triton.next_power_of_2(counts.numel() + 1),
        )

    def __call__(self, topk_ids: Tensor, num_rows: Tensor | None) -> None:
        """topk_ids: [R, K] int32. num_rows: [1] int32 or None."""
        num_slots = topk_ids.numel()
        if num_slots and self.counts.numel():
            ids = topk_ids.contiguous()
            grid = (triton.cdiv(num_slots, _BLOCK_SLOTS),)
            self._launch(grid, ids, num_rows, num_slots, ids.shape[1])


@triton.jit
def _route_kernel(
    logits_ptr,  # [T, E] float32
    correction_bias_ptr,  # [E] float32 or None
    ids_ptr,  # [T, K] int32, out
    weights_ptr,  # [T, K] float32, out
    num_experts,
    routed_scaling_factor,
    SCORING: tl.constexpr,
    NORM_TOPK_PROB: tl.constexpr,
    NORM_EPSILON: tl.constexpr,
    N_GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_EXPERTS)
    is_expert = (experts < num_experts)[None, :]
    logits = tl.load(logits_ptr + row * num_experts + experts[None, :], mask=is_expert, other=0.0)
    if SCORING == "softmax":
        highest = tl.max(tl.where(is_expert, logits, float("-inf")), axis=1)
        powers = tl.where(is_expert, tl.exp(logits - highest[:, None]), 0.0)
        scores = powers / tl.sum(powers, axis=1)[:, None]
    else:
        tl.static_assert(SCORING == "sigmoid")
        scores = tl.sigmoid(logits)
    is_routed = tl.sum((is_expert & (scores != scores)).to(tl.int32), axis=1) == 0
    choice = scores
    if correction_bias_ptr is not None:
        choice += tl.load(correction_bias_ptr + experts[None, :], mask=is_expert, other=0.0)
    if N_GROUP > 1:
        within = tl.where(is_expert, choice, float("-inf"))
        group_size = num_experts // N_GROUP
        is_best = best_groups(
            within, experts, group_size, N_GROUP, BLOCK_GROUPS, TOPK_GROUP, GROUP_SCORE
        )
        choice = tl.where(is_best, choice, float("-inf"))
    ranked = tl.where(is_expert, rankable(choice, experts[None, :]), LOWEST)
    slots = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.full([1, BLOCK_K], -1, dtype=tl.int32)
    weights = tl.zeros([1, BLOCK_K], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        best = index_of(tl.max(ranked, axis=1))
        is_taken = experts[None, :] == best[:, None]
        weight = tl.sum(tl.where(is_taken, scores, 0.0), axis=1)
        ranked = tl.where(is_taken, LOWEST, ranked)
        ids = tl.where(slots == k, best[:, None], ids)
        weights = tl.where(slots == k, weight[:, None], weights)
    if NORM_TOPK_PROB:
        weights /= tl.sum(weights, axis=1)[:, None] + NORM_EPSILON
    weights *= routed_scaling_factor
    offsets = row * TOP_K + slots
    is_slot = slots < TOP_K
    tl.store(ids_ptr + offsets, tl.where(is_routed[:, None], ids, -1), mask=is_slot)
    tl.store(weights_ptr + offsets, tl.where(is_routed[:, None], weights, 0.0), mask=is_slot)


@triton.jit(do_not_specialize=["num_slots"])
def _keep_known_ids_kernel(
    given_ptr,  # [N] int32 or int64
    ids_ptr,  # [N] int32, out
    num_slots,
    num_experts,
    BLOCK_SLOTS: tl.constexpr,
):
    """One program a block of slots."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    is_slot = slots < num_slots
    given = tl.load(given_ptr + slots, mask=is_slot, other=-1)
    is_known = (given >= 0) & (given < num_experts)
    tl.store(ids_ptr + slots, tl.where(is_known, given, -1).to(tl.int32), mask=is_slot)


@triton.jit(do_not_specialize=["num_slots"])
def _count_slots_kernel(
    ids_ptr,  # [R, K] int32, local; -1: not here
    num_rows_ptr,  # [1] or None
    num_slots,
    top_k,
    counts_ptr,  # [E_local] int64, added to
    num_experts,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """One program a block of slots: a histogram, of which the last bin takes what is not here."""
    slots = tl.program_id(0).to(tl.int64) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    is_slot = slots < num_slots
    if num_rows_ptr is not None:
        is_slot &= slots < tl.load(num_rows_ptr).to(tl.int64) * top_k
    ids = tl.load(ids_ptr + slots, mask=is_slot, other=-1)
    counts = tl.histogram(tl.where(ids >= 0, ids, BLOCK_EXPERTS - 1), BLOCK_EXPERTS)
    experts = tl.arange(0, BLOCK_EXPERTS)
    has_slots = (experts < num_experts) & (counts > 0)
    tl.atomic_add(counts_ptr + experts, counts.to(tl.int64), mask=has_slots, sem="relaxed")
