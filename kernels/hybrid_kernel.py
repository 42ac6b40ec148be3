"""The launch of the hybrid experts for few rows: both tiers, both projections and the sum, by one
resident grid.

What kernels/resident_projections.py says of items, steps, shares and owners holds here, and its
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
from ep_runtime.kernels.resident_barrier import ACTIVATED, leave, pass_grid_barrier
from ep_runtime.kernels.resident_projections import project_down_share, project_gate_up_share
from ep_runtime.kernels.resident_routing import list_experts, load_slots

_ACTIVATED: tl.constexpr = tl.constexpr(ACTIVATED)


@triton.jit
def take_slots(
    topk_ids_ptr,  # [T, K] int32 local ids
    topk_weights_ptr,  # [T, K] float32
    tiers_ptr,  # [E] int32, of `QuantParameters`
    num_rows_ptr,  # [1] int32 or None
    num_rows,
    num_experts,
    num_nvfp4,
    ids_ptr,  # [BLOCK_T, KP] int32, out: numbers over both tiers, -1 for no local expert
    weights_ptr,  # [BLOCK_T, KP] float32, out: 0 where there is none
    largest_ptr,  # [BLOCK_T] float32, out: the largest magnitude of a row's weights
    factors_ptr,  # [BLOCK_T] float32, out: the same
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
    tl.store(ids_ptr + out, tl.where(is_local, numbers, -1))
    tl.store(weights_ptr + out, weights)
    largest = tl.max(tl.abs(weights), axis=1)
    tl.store(largest_ptr + rows, largest)
    tl.store(factors_ptr + rows, largest)
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
    integers_ptr,  # [P, BLOCK_T * KP + 2 * BLOCK_LOCAL] int32, scratch
    floats_ptr,  # [P, BLOCK_T * (KP + 2)] float32, scratch
    activated_ptr,  # [A * BLOCK_T, I], scratch
    stride_activated,
    parts_ptr,  # scratch of `project_gate_up_share`
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
    SLOTS: tl.constexpr = BLOCK_T * BLOCK_SLOTS
    GATE_UP_N: tl.constexpr = GATE_UP[0]
    GATE_UP_K: tl.constexpr = GATE_UP[1]
    GATE_UP_STAGES: tl.constexpr = GATE_UP[2]
    DOWN_N: tl.constexpr = DOWN[0]
    DOWN_K: tl.constexpr = DOWN[1]
    DOWN_STAGES: tl.constexpr = DOWN[2]
    program = num_programs - 1 - tl.program_id(0)
    ids_ptr = integers_ptr + program.to(tl.int64) * (SLOTS + 2 * BLOCK_LOCAL)
    used_ptr = ids_ptr + SLOTS
    list_ptr = used_ptr + BLOCK_LOCAL
    weights_ptr = floats_ptr + program.to(tl.int64) * (SLOTS + 2 * BLOCK_T)
    largest_ptr = weights_ptr + SLOTS
    factors_ptr = largest_ptr + BLOCK_T
    take_slots(
        topk_ids_ptr,
        topk_weights_ptr,
        tiers_ptr,
        num_rows_ptr,
        num_rows,
        num_experts,
        num_nvfp4,
        ids_ptr,
        weights_ptr,
        largest_ptr,
        factors_ptr,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
    )
    slots = load_slots(ids_ptr, num_rows, TOP_K, BLOCK_SLOTS, BLOCK_T)
    num_active = list_experts(slots, used_ptr, list_ptr, BLOCK_LOCAL)
    places = tl.arange(0, BLOCK_LOCAL)
    listed = tl.load(list_ptr + places, mask=places < num_active, other=num_experts)
    active_nvfp4 = tl.sum((listed < num_nvfp4).to(tl.int32), axis=0)
    has_failed = project_gate_up_share(
        (
            (words13, scales13_ptr, num_groups13),
            (nf3_words13, nf3_scales13_ptr, nf3_groups13),
            rows_per_expert,
            global_scales13_ptr,
            num_nvfp4,
        ),
        None,
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
        num_rows < 0,
        program,
        num_programs,
        num_rows,
        hidden_size,
        intermediate_size,
        alpha,
        limit,
        ACTIVATION,
        multiply_gate_up_hybrid,
        False,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        GATE_UP_N,
        GATE_UP_K,
        GATE_UP_STAGES,
    )
    has_failed = has_failed | pass_grid_barrier(
        state_ptr, record_ptr, num_programs, limit_ns, 1, _ACTIVATED
    )
    project_down_share(
        (
            (words2, scales2_ptr, num_groups2),
            (nf3_words2, nf3_scales2_ptr, nf3_groups2),
            global_scales2_ptr,
            num_nvfp4,
            active_nvfp4,
        ),
        None,
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
        multiply_down_hybrid,
        False,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        DOWN_N,
        DOWN_K,
        DOWN_STAGES,
    )
    leave(state_ptr, num_programs, MAX_PROGRAMS)
