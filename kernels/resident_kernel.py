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

from ep_runtime.kernels.resident_barrier import ACTIVATED, ROUTED, leave, pass_grid_barrier
from ep_runtime.kernels.resident_projections import (
    multiply_down,
    multiply_gate_up,
    project_down_share,
    project_gate_up_share,
)
from ep_runtime.kernels.resident_routing import list_experts, load_slots, route_rows

_ROUTED: tl.constexpr = tl.constexpr(ROUTED)
_ACTIVATED: tl.constexpr = tl.constexpr(ACTIVATED)


@triton.jit
def route_and_list(
    logits_ptr,
    stride_logits_row,
    correction_bias_ptr,
    expert_map_ptr,
    num_experts,
    routed_scaling_factor,
    integers_ptr,  # [P, BLOCK_T * BLOCK_SLOTS + 2 * BLOCK_LOCAL] int32, scratch
    floats_ptr,  # [P, BLOCK_T * (BLOCK_SLOTS + 2)] float32, scratch
    tokens_per_expert_ptr,  # [E_local] int64, added to
    state_ptr,
    record_ptr,
    limit_ns,
    program,
    num_programs,
    num_rows,
    ROUTING: tl.constexpr,  # what `route_rows` takes from SCORING to GROUP_SCORE
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_LOCAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROUTES_ALL: tl.constexpr,
):
    """Phase 1: (ids, weights, largest, factors), the list of experts, how many, whether failed.

    ROUTES_ALL: every program routes all rows, of which there are at most BLOCK_ROWS.
    """
    SCORING: tl.constexpr = ROUTING[0]
    NORM_TOPK_PROB: tl.constexpr = ROUTING[1]
    NORM_EPSILON: tl.constexpr = ROUTING[2]
    N_GROUP: tl.constexpr = ROUTING[3]
    BLOCK_GROUPS: tl.constexpr = ROUTING[4]
    TOPK_GROUP: tl.constexpr = ROUTING[5]
    GROUP_SCORE: tl.constexpr = ROUTING[6]
    SLOTS: tl.constexpr = BLOCK_T * BLOCK_SLOTS
    own_integers_ptr = integers_ptr + program.to(tl.int64) * (SLOTS + 2 * BLOCK_LOCAL)
    ids_ptr = integers_ptr
    weights_ptr = floats_ptr
    if ROUTES_ALL:
        ids_ptr = own_integers_ptr
        weights_ptr = floats_ptr + program.to(tl.int64) * (SLOTS + 2 * BLOCK_T)
    used_ptr = own_integers_ptr + SLOTS
    list_ptr = used_ptr + BLOCK_LOCAL
    largest_ptr = weights_ptr + SLOTS
    factors_ptr = largest_ptr + BLOCK_T
    first_row = program * 0 if ROUTES_ALL else program * BLOCK_ROWS
    stride = BLOCK_ROWS if ROUTES_ALL else num_programs * BLOCK_ROWS
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
            ids_ptr,
            weights_ptr,
            largest_ptr,
            factors_ptr,
            SCORING,
            NORM_TOPK_PROB,
            NORM_EPSILON,
            N_GROUP,
            BLOCK_GROUPS,
            TOPK_GROUP,
            GROUP_SCORE,
            TOP_K,
            BLOCK_SLOTS,
            BLOCK_ROWS,
            BLOCK_EXPERTS,
        )
    if ROUTES_ALL:
        tl.debug_barrier()
        has_failed = num_rows < 0
    else:
        has_failed = pass_grid_barrier(state_ptr, record_ptr, num_programs, limit_ns, 1, _ROUTED)
    slots = load_slots(ids_ptr, num_rows, TOP_K, BLOCK_SLOTS, BLOCK_T)
    # What was not written is no expert.
    slots = tl.where(has_failed, -1, slots)
    if program == 0:
        one = tl.full([SLOTS], 1, tl.int64)
        tl.atomic_add(tokens_per_expert_ptr + slots, one, mask=slots >= 0, sem="relaxed")
    num_active = list_experts(slots, used_ptr, list_ptr, BLOCK_LOCAL)
    return ids_ptr, weights_ptr, largest_ptr, factors_ptr, list_ptr, num_active, has_failed


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
    GATE_UP_N: tl.constexpr = GATE_UP[0]
    GATE_UP_K: tl.constexpr = GATE_UP[1]
    GATE_UP_STAGES: tl.constexpr = GATE_UP[2]
    GATE_UP_IS_WHOLE: tl.constexpr = GATE_UP[3]
    DOWN_N: tl.constexpr = DOWN[0]
    DOWN_K: tl.constexpr = DOWN[1]
    DOWN_STAGES: tl.constexpr = DOWN[2]
    DOWN_IS_WHOLE: tl.constexpr = DOWN[3]
    program = num_programs - 1 - tl.program_id(0)
    ids_ptr, weights_ptr, largest_ptr, factors_ptr, list_ptr, num_active, has_failed = (
        route_and_list(
            logits_ptr,
            stride_logits_row,
            correction_bias_ptr,
            expert_map_ptr,
            num_experts,
            routed_scaling_factor,
            integers_ptr,
            floats_ptr,
            tokens_per_expert_ptr,
            state_ptr,
            record_ptr,
            limit_ns,
            program,
            num_programs,
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
    )
    has_failed = project_gate_up_share(
        (w13, rows_per_expert),
        w13_bias_ptr,
        rows_per_expert,
        x_ptr,
        stride_x_row,
        stride_x_col,
        (ids_ptr, weights_ptr, largest_ptr),
        list_ptr,
        num_active,
        activated_ptr,
        stride_activated,
        parts_ptr,
        state_ptr,
        record_ptr,
        limit_ns,
        has_failed,
        program,
        num_programs,
        num_rows,
        hidden_size,
        intermediate_size,
        alpha,
        limit,
        ACTIVATION,
        multiply_gate_up,
        GATE_UP_IS_WHOLE,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        GATE_UP_N,
        GATE_UP_K,
        GATE_UP_STAGES,
    )
    NUMBER: tl.constexpr = 1 if ROUTES_ALL else 2
    has_failed = has_failed | pass_grid_barrier(
        state_ptr, record_ptr, num_programs, limit_ns, NUMBER, _ACTIVATED
    )
    project_down_share(
        (w2,),
        w2_bias_ptr,
        activated_ptr,
        stride_activated,
        (ids_ptr, weights_ptr, largest_ptr, factors_ptr),
        list_ptr,
        num_active,
        out_ptr,
        parts_ptr,
        state_ptr,
        record_ptr,
        limit_ns,
        has_failed,
        program,
        num_programs,
        num_rows,
        hidden_size,
        intermediate_size,
        multiply_down,
        DOWN_IS_WHOLE,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        DOWN_N,
        DOWN_K,
        DOWN_STAGES,
    )
    leave(state_ptr, num_programs, MAX_PROGRAMS)
