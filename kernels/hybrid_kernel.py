"""The launch of the hybrid experts for few rows: both tiers, both projections and the sum, by one
resident grid.

What kernels/resident_shares.py says of items, steps, shares and owners holds here, and its
code runs: only how a step's weights are multiplied differs (kernels/hybrid_projections.py). The
phases:
1. Each program reads all rows' ids for itself, which are few, into scratch of its own.
2. First projection, with the activation. Then a grid barrier: from here on every program reads what
   all have computed.
3. Second projection, summed over experts as well, and the output.

Every program must run at the same time as all others, or the barrier never opens: the host takes no
more programs than the driver says are co-resident, and nothing else may hold multiprocessors.

Shapes: T rows (at most BLOCK_T), K slots a row, KP its next power of two, H hidden size, I
intermediate size, E4 and E3 local experts in NVFP4 and in NF3, A of all of them that have rows,
P programs.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ep_runtime.kernels.hybrid_projections import multiply_down_hybrid, multiply_gate_up_hybrid
from ep_runtime.kernels.resident_barrier import own_grid
from ep_runtime.kernels.resident_routing import list_experts, load_slots, routing_scratch
from ep_runtime.kernels.resident_shares import Sizes, project_shares


@triton.jit
def take_slots(
    topk_ids_ptr,  # [T, K] int32 local ids
    topk_weights_ptr,  # [T, K] float32
    tiers_ptr,  # [E] int32, of `QuantParameters`
    num_rows_ptr,  # [1] int32 or None
    num_rows,
    num_experts,
    num_nvfp4,
    routed,  # out: `Routed`, ids as numbers over both tiers, weights as they are given
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Given routing in the form that kernels/resident_routing.py leaves its own in."""
    num_written = num_rows
    if num_rows_ptr is not None:
        num_written = tl.minimum(num_rows, tl.load(num_rows_ptr))
    rows = tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_SLOTS)
    is_slot = (rows < num_written)[:, None] & (columns < TOP_K)[None, :]
    slots = rows[:, None] * TOP_K + columns[None, :]
    ids = tl.load(topk_ids_ptr + slots, mask=is_slot, other=-1)
    is_local = (ids >= 0) & (ids < num_experts)
    places = tl.load(tiers_ptr + ids, mask=is_local, other=0)
    numbers = tl.where(places >= 0, places, num_nvfp4 + ~places)
    weights = tl.load(topk_weights_ptr + slots, mask=is_local, other=0.0)
    out = rows[:, None] * BLOCK_SLOTS + columns[None, :]
    tl.store(routed.ids_ptr + out, tl.where(is_local, numbers, -1))
    tl.store(routed.weights_ptr + out, weights)
    largest = tl.max(tl.abs(weights), axis=1)
    tl.store(routed.largest_ptr + rows, largest)
    tl.store(routed.factors_ptr + rows, largest)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["num_rows", "num_programs", "limit_ns", "num_nvfp4"])
def _hybrid_experts_kernel(
    x_ptr,  # [T, H]
    stride_x_row,
    stride_x_col,
    topk_ids_ptr,  # [T, K] int32
    topk_weights_ptr,  # [T, K] float32
    tiers_ptr,  # [E] int32
    num_rows_ptr,  # [1] int32 or None
    words13,  # descriptor of [E4 * rows_per_expert, words] int16
    scales13_ptr,  # [E4, groups, rows_per_expert] e4m3
    num_groups13,
    global_scales13_ptr,  # [E4, parts] float32
    nf3_words13,  # descriptor of [E3 * rows_per_expert, words] int16
    nf3_scales13_ptr,  # [E3, groups, rows_per_expert] bfloat16
    nf3_groups13,
    words2,  # the same of w2, rows H
    scales2_ptr,
    num_groups2,
    global_scales2_ptr,  # [E4, 1]
    nf3_words2,
    nf3_scales2_ptr,
    nf3_groups2,
    integers_ptr,  # of `routing_scratch`
    floats_ptr,
    activated_ptr,  # [A * BLOCK_T, I], scratch
    stride_activated,
    parts_ptr,  # of `project_shares`
    out_ptr,  # [T, H]
    state_ptr,  # [STATE_WORDS] int64
    record_ptr,  # [1] int64
    limit_ns: tl.int64,
    num_programs,
    num_rows,
    num_experts,
    num_nvfp4,
    rows_per_expert,
    hidden_size,
    intermediate_size,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_LOCAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GATE_UP: tl.constexpr,  # (BLOCK_N, BLOCK_K, stages)
    DOWN: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """num_programs: of the grid. limit_ns: of each wait."""
    grid = own_grid(num_programs, state_ptr, record_ptr, limit_ns)
    routed, used_ptr = routing_scratch(
        integers_ptr, floats_ptr, grid.program, BLOCK_SLOTS, BLOCK_LOCAL, BLOCK_T
    )
    take_slots(
        topk_ids_ptr,
        topk_weights_ptr,
        tiers_ptr,
        num_rows_ptr,
        num_rows,
        num_experts,
        num_nvfp4,
        routed,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
    )
    slots = load_slots(routed, num_rows, TOP_K, BLOCK_SLOTS, BLOCK_T)
    list_ptr, num_active = list_experts(slots, used_ptr, BLOCK_LOCAL)
    places = tl.arange(0, BLOCK_LOCAL)
    listed = tl.load(list_ptr + places, mask=places < num_active, other=num_experts)
    active_nvfp4 = tl.sum((listed < num_nvfp4).to(tl.int32), axis=0)
    nvfp4_13 = (words13, scales13_ptr, num_groups13)
    nf3_13 = (nf3_words13, nf3_scales13_ptr, nf3_groups13)
    nvfp4_2 = (words2, scales2_ptr, num_groups2)
    nf3_2 = (nf3_words2, nf3_scales2_ptr, nf3_groups2)
    project_shares(
        ((nvfp4_13, nf3_13, global_scales13_ptr, num_nvfp4), None),
        ((nvfp4_2, nf3_2, global_scales2_ptr, num_nvfp4, active_nvfp4), None),
        (x_ptr, stride_x_row, stride_x_col),
        routed,
        list_ptr,
        num_active,
        (activated_ptr, stride_activated),
        parts_ptr,
        out_ptr,
        grid,
        num_rows < 0,
        Sizes(num_rows, hidden_size, intermediate_size, rows_per_expert),
        alpha,
        limit,
        ACTIVATION,
        multiply_gate_up_hybrid,
        multiply_down_hybrid,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        GATE_UP,
        DOWN,
        1,
        MAX_PROGRAMS,
    )
