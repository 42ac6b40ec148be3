"""The launch of the resident experts: routing, both projections and the sum, by one grid.

Shapes: T rows (at most BLOCK_T), E experts of the layer, K top-k slots, H hidden size, I
intermediate size, A local experts that have rows, P programs.

The phases, and what stands between them:
1. Routing. Each program routes all rows for itself where they are few, which costs less than a
   barrier; else some programs route some rows each, and a grid barrier follows.
2. First projection, with the activation. Then a grid barrier: from here on every program reads what
   all have computed.
3. Second projection, summed over experts as well, and the output.

Every program must run at the same time as all others, or the barriers never open: the host takes
no more programs than the driver says are co-resident (kernels/resident_grid.py), and nothing else
may hold multiprocessors (`Concurrency.EXCLUSIVE`).
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ep_runtime.kernels.resident_barrier import ROUTED, own_grid, pass_grid_barrier
from ep_runtime.kernels.resident_projections import multiply_down, multiply_gate_up
from ep_runtime.kernels.resident_routing import (
    list_experts,
    load_slots,
    route_rows,
    routing_scratch,
)
from ep_runtime.kernels.resident_shares import Sizes, project_shares

_ROUTED: tl.constexpr = tl.constexpr(ROUTED)


@triton.jit
def route_and_list(
    logits_ptr,
    stride_logits_row,
    correction_bias_ptr,
    expert_map_ptr,
    num_experts,
    routed_scaling_factor,
    integers_ptr,  # of `routing_scratch`
    floats_ptr,
    tokens_per_expert_ptr,  # [E_local] int64, added to
    grid,
    num_rows,
    ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_LOCAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROUTES_ALL: tl.constexpr,
):
    """Phase 1: `Routed`, the list of experts, how many, whether a wait has failed.

    ROUTES_ALL: every program routes all rows, of which there are at most BLOCK_ROWS.
    """
    routed, used_ptr = routing_scratch(
        integers_ptr, floats_ptr, grid.program, BLOCK_SLOTS, BLOCK_LOCAL, BLOCK_T
    )
    if not ROUTES_ALL:
        routed, _ = routing_scratch(
            integers_ptr, floats_ptr, grid.program * 0, BLOCK_SLOTS, BLOCK_LOCAL, BLOCK_T
        )
    first_row = grid.program * 0 if ROUTES_ALL else grid.program * BLOCK_ROWS
    stride = BLOCK_ROWS if ROUTES_ALL else grid.num_programs * BLOCK_ROWS
    for row in tl.range(first_row, num_rows, stride):
        route_rows(
            row,
            num_rows,
            logits_ptr,
            stride_logits_row,
            correction_bias_ptr,
            expert_map_ptr,
            num_experts,
            routed_scaling_factor,
            routed,
            ROUTING,
            TOP_K,
            BLOCK_SLOTS,
            BLOCK_ROWS,
            BLOCK_EXPERTS,
        )
    if ROUTES_ALL:
        tl.debug_barrier()
        has_failed = num_rows < 0
    else:
        has_failed = pass_grid_barrier(grid, 1, _ROUTED)
    slots = load_slots(routed, num_rows, TOP_K, BLOCK_SLOTS, BLOCK_T)
    # What was not written is no expert.
    slots = tl.where(has_failed, -1, slots)
    if grid.program == 0:
        one = tl.full(slots.shape, 1, tl.int64)
        tl.atomic_add(tokens_per_expert_ptr + slots, one, mask=slots >= 0, sem="relaxed")
    list_ptr, num_active = list_experts(slots, used_ptr, BLOCK_LOCAL)
    return routed, list_ptr, num_active, has_failed


@triton.jit(
    do_not_specialize=["num_rows", "num_programs", "limit_ns"],
    do_not_specialize_on_alignment=["num_experts"],
)
def _resident_experts_kernel(
    x_ptr,  # [T, H]
    stride_x_row,
    stride_x_col,
    logits_ptr,  # [T, E] float32
    stride_logits_row,
    correction_bias_ptr,  # [E] float32 or None
    expert_map_ptr,  # [E] int32
    tokens_per_expert_ptr,  # [E_local] int64
    w13,  # descriptor of [E_local * rows_per_expert, H]
    w13_bias_ptr,  # [E_local, rows_per_expert] or None
    w2,  # descriptor of [E_local * H, I]
    w2_bias_ptr,  # [E_local, H] or None
    integers_ptr,
    floats_ptr,
    activated_ptr,
    stride_activated,
    parts_ptr,
    out_ptr,  # [T, H]
    state_ptr,  # [STATE_WORDS] int64
    record_ptr,  # [1] int64
    limit_ns: tl.int64,
    num_programs,
    num_rows,
    num_experts,
    rows_per_expert,
    hidden_size,
    intermediate_size,
    routed_scaling_factor,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    ROUTING: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_LOCAL: tl.constexpr,
    ROUTES_ALL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GATE_UP: tl.constexpr,  # (BLOCK_N, BLOCK_K, stages, whether BLOCK_K divides H)
    DOWN: tl.constexpr,  # (BLOCK_N, BLOCK_K, stages, whether BLOCK_K divides I)
    MAX_PROGRAMS: tl.constexpr,
):
    """num_programs: of the grid. limit_ns: of each wait."""
    grid = own_grid(num_programs, state_ptr, record_ptr, limit_ns)
    routed, list_ptr, num_active, has_failed = route_and_list(
        logits_ptr,
        stride_logits_row,
        correction_bias_ptr,
        expert_map_ptr,
        num_experts,
        routed_scaling_factor,
        integers_ptr,
        floats_ptr,
        tokens_per_expert_ptr,
        grid,
        num_rows,
        ROUTING,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_ROWS,
        BLOCK_EXPERTS,
        BLOCK_LOCAL,
        BLOCK_T,
        ROUTES_ALL,
    )
    project_shares(
        (w13, w13_bias_ptr),
        (w2, w2_bias_ptr),
        (x_ptr, stride_x_row, stride_x_col),
        routed,
        list_ptr,
        num_active,
        (activated_ptr, stride_activated),
        parts_ptr,
        out_ptr,
        grid,
        has_failed,
        Sizes(num_rows, hidden_size, intermediate_size, rows_per_expert),
        alpha,
        limit,
        ACTIVATION,
        multiply_gate_up,
        multiply_down,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        GATE_UP,
        DOWN,
        1 if ROUTES_ALL else 2,
        MAX_PROGRAMS,
    )
