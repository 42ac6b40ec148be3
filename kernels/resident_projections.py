"""Both projections of few rows, shared out evenly among the programs of a resident grid.

Shapes: T rows (at most BLOCK_T), H hidden size, I intermediate size, A local experts that have
rows, P programs; W weights of one projection, cut into blocks of BLOCK_N output columns, and those
into steps of BLOCK_K columns of the sum.

There is no alignment and no gathering: every block of weights is multiplied with all rows, since
the matrix unit takes 16 of them at no cost beside the reading of the weights, and what a row has
nothing to do with is dropped afterwards.

The steps of a projection lie in a row, item by item (an item is a block of output columns, of one
expert in the first projection, of all experts in the second), and each program takes the same share
of them: P programs read for the same time, whatever A is. An item that lies in the shares of
several programs is summed by its owner, the program with its first steps: the others leave their
parts in memory and set a flag. An owner comes to that item at the end of its share, and the next
program at the beginning of its own, so nobody waits for long. Owners have lower numbers than those
they wait for, and number 0 is the last program of the grid: run one after another from the first
on, as the interpreter does, none would wait for one that has not run. All sums have a fixed order.

The first projection leaves act(gate, up), multiplied by the row's weight for the expert over the
row's largest: so that the second one, whose sum runs over experts too, sums the slots with the
columns, in float32, and needs one factor a row in the end. In 16-bit floats the larger slots keep
their precision that way however small the weights are.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ep_runtime.kernels.grouped_gemm import activate
from ep_runtime.kernels.resident_barrier import (
    DOWN_SHARED,
    GATE_UP_SHARED,
    announce,
    set_flag,
    wait_for_flag,
)
from ep_runtime.kernels.resident_routing import load_ratios

_GATE_UP_SHARED: tl.constexpr = tl.constexpr(GATE_UP_SHARED)
_DOWN_SHARED: tl.constexpr = tl.constexpr(DOWN_SHARED)


@triton.jit
def first_step(num_steps, program, num_programs):
    """Where a program's share begins; that of program + 1 is where it ends.

    Programs without a share come last. Example: 10 steps, 4 programs: 0, 2, 5, 7, 10.
    """
    used = tl.minimum(num_steps, num_programs)
    return (num_steps.to(tl.int64) * tl.minimum(program, used) // tl.maximum(used, 1)).to(tl.int32)


@triton.jit
def multiply_gate_up(
    weights,  # (descriptor of [E * rows_per_expert, H], rows_per_expert)
    x_ptr,  # [T, H]
    stride_x_row,
    stride_x_col,
    expert,
    block,
    first,
    last,
    num_rows,
    hidden_size,
    intermediate_size,
    IS_GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Steps first .. last of an item of the first projection: gate and up, [BLOCK_N, BLOCK_T]."""
    w13, rows_per_expert = weights
    rows = tl.arange(0, BLOCK_T)
    offsets = tl.arange(0, BLOCK_K)
    is_row = (rows < num_rows)[:, None]
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row
    gate_row = expert * rows_per_expert + block * BLOCK_N
    gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        columns = step * BLOCK_K + offsets
        mask = is_row if IS_WHOLE else is_row & (columns < hidden_size)[None, :]
        x = tl.load(x_ptrs + columns[None, :] * stride_x_col, mask=mask, other=0.0)
        gate = tl.dot(w13.load([gate_row, step * BLOCK_K]), x.T, gate, input_precision="ieee")
        if IS_GATED:
            w_up = w13.load([gate_row + intermediate_size, step * BLOCK_K])
            up = tl.dot(w_up, x.T, up, input_precision="ieee")
    return gate, up


@triton.jit
def multiply_down(
    weights,  # (descriptor of [E * H, I],)
    activated_ptr,  # [A * BLOCK_T, I], rows stride_activated apart
    stride_activated,
    list_ptr,
    block,
    first,
    last,
    hidden_size,
    intermediate_size,
    IS_WHOLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Steps first .. last of an item of the second projection, [BLOCK_N, BLOCK_T]."""
    (w2,) = weights
    offsets = tl.arange(0, BLOCK_K)
    steps_per_expert = tl.cdiv(intermediate_size, BLOCK_K)
    row_ptrs = activated_ptr + tl.arange(0, BLOCK_T)[:, None] * stride_activated
    result = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    expert = 0
    if first < last:
        expert = tl.load(list_ptr + first // steps_per_expert)
    for step in tl.range(first, last, num_stages=NUM_STAGES):
        place = step // steps_per_expert
        column = step % steps_per_expert * BLOCK_K
        # Not in every step: what a load of the loop needs to be loaded would halve its depth.
        if column == 0:
            expert = tl.load(list_ptr + place)
        x_ptrs = row_ptrs + place * BLOCK_T * stride_activated + column + offsets[None, :]
        if IS_WHOLE:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(column + offsets < intermediate_size)[None, :], other=0.0)
        w = w2.load([expert * hidden_size + block * BLOCK_N, column])
        result = tl.dot(w, x.T, result, input_precision="ieee")
    return result


@triton.jit
def project_gate_up_share(
    weights,  # what MULTIPLY takes
    bias_ptr,  # [E, rows_per_expert] or None
    rows_per_expert,
    x_ptr,
    stride_x_row,
    stride_x_col,
    routed,  # (ids, weights, largest), of `route_rows`
    list_ptr,  # of `list_experts`
    num_active,
    activated_ptr,  # [A * BLOCK_T, I], out
    stride_activated,
    parts_ptr,  # [P, 2, BLOCK_N, BLOCK_T] float32, scratch of all programs
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
    ACTIVATION: tl.constexpr,
    MULTIPLY: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program's share of the first projection; whether a wait has failed, has_failed included.

    MULTIPLY: a device function as `multiply_gate_up`, of whatever weights.
    """
    announce(state_ptr)
    is_gated: tl.constexpr = ACTIVATION != "relu2"
    PART: tl.constexpr = 2 * BLOCK_N * BLOCK_T
    num_blocks = tl.cdiv(intermediate_size, BLOCK_N)
    steps = tl.cdiv(hidden_size, BLOCK_K)
    num_steps = num_active * num_blocks * steps
    begin = first_step(num_steps, program, num_programs)
    end = first_step(num_steps, program + 1, num_programs)
    rows = tl.arange(0, BLOCK_T)
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + rows[None, :]
    for item in tl.range(begin // steps, tl.cdiv(end, steps)):
        first = tl.maximum(begin - item * steps, 0)
        last = tl.minimum(end - item * steps, steps)
        place = item // num_blocks
        block = item % num_blocks
        expert = tl.load(list_ptr + place)
        gate, up = MULTIPLY(
            weights,
            x_ptr,
            stride_x_row,
            stride_x_col,
            expert,
            block,
            first,
            last,
            num_rows,
            hidden_size,
            intermediate_size,
            is_gated,
            IS_WHOLE,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
            NUM_STAGES,
        )
        if first > 0:
            gate = tl.where(has_failed, float("nan"), gate)
            part_ptrs = parts_ptr + program.to(tl.int64) * PART + inside
            tl.store(part_ptrs, gate)
            if is_gated:
                tl.store(part_ptrs + BLOCK_N * BLOCK_T, up)
            set_flag(state_ptr, program, 0)
        else:
            owner_of_rest = program + 1
            while last < steps:
                has_failed = has_failed | wait_for_flag(
                    state_ptr,
                    record_ptr,
                    owner_of_rest,
                    num_programs,
                    tl.where(has_failed, 0, limit_ns),
                    0,
                    _GATE_UP_SHARED,
                )
                part_ptrs = parts_ptr + owner_of_rest.to(tl.int64) * PART + inside
                gate += tl.load(part_ptrs, cache_modifier=".cg")
                if is_gated:
                    up += tl.load(part_ptrs + BLOCK_N * BLOCK_T, cache_modifier=".cg")
                owner_of_rest += 1
                last = first_step(num_steps, owner_of_rest, num_programs) - item * steps
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = (columns < intermediate_size)[:, None]
            if bias_ptr is not None:
                bias_ptrs = bias_ptr + expert.to(tl.int64) * rows_per_expert + columns[:, None]
                gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
                if is_gated:
                    bias_ptrs += intermediate_size
                    up += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
            result = activate(gate, up, alpha, limit, ACTIVATION)
            is_here, ratios = load_ratios(
                expert, routed[0], routed[1], routed[2], num_rows, TOP_K, BLOCK_SLOTS, BLOCK_T
            )
            result = tl.where(is_here[None, :], result * ratios[None, :], 0.0)
            result = tl.where(has_failed, float("nan"), result)
            out_rows = (place * BLOCK_T + rows).to(tl.int64)
            out_ptrs = activated_ptr + out_rows[None, :] * stride_activated + columns[:, None]
            tl.store(out_ptrs, result.to(activated_ptr.dtype.element_ty), mask=is_column)
    return has_failed


@triton.jit
def project_down_share(
    weights,  # what MULTIPLY takes
    bias_ptr,  # [E, H] or None
    activated_ptr,
    stride_activated,
    routed,  # (ids, weights, largest, factors), of `route_rows`
    list_ptr,
    num_active,
    out_ptr,  # [T, H] contiguous, out
    parts_ptr,  # [P, BLOCK_N, BLOCK_T] float32, scratch of all programs
    state_ptr,
    record_ptr,
    limit_ns,
    has_failed,
    program,
    num_programs,
    num_rows,
    hidden_size,
    intermediate_size,
    MULTIPLY: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program's share of the second projection, and of the output; the arguments are those of
    `project_gate_up_share`, MULTIPLY is as `multiply_down`."""
    PART: tl.constexpr = BLOCK_N * BLOCK_T
    real_steps = num_active * tl.cdiv(intermediate_size, BLOCK_K)
    # One that does nothing where no expert has rows: the output is written all the same.
    steps = tl.maximum(real_steps, 1)
    num_steps = tl.cdiv(hidden_size, BLOCK_N) * steps
    begin = first_step(num_steps, program, num_programs)
    end = first_step(num_steps, program + 1, num_programs)
    rows = tl.arange(0, BLOCK_T)
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + rows[None, :]
    is_row = rows < num_rows
    for block in tl.range(begin // steps, tl.cdiv(end, steps)):
        first = tl.maximum(begin - block * steps, 0)
        last = tl.minimum(end - block * steps, steps)
        result = MULTIPLY(
            weights,
            activated_ptr,
            stride_activated,
            list_ptr,
            block,
            first,
            tl.minimum(last, real_steps),
            hidden_size,
            intermediate_size,
            IS_WHOLE,
            BLOCK_T,
            BLOCK_N,
            BLOCK_K,
            NUM_STAGES,
        )
        if first > 0:
            result = tl.where(has_failed, float("nan"), result)
            tl.store(parts_ptr + program.to(tl.int64) * PART + inside, result)
            set_flag(state_ptr, program, 1)
        else:
            owner_of_rest = program + 1
            while last < steps:
                has_failed = has_failed | wait_for_flag(
                    state_ptr,
                    record_ptr,
                    owner_of_rest,
                    num_programs,
                    tl.where(has_failed, 0, limit_ns),
                    1,
                    _DOWN_SHARED,
                )
                part_ptrs = parts_ptr + owner_of_rest.to(tl.int64) * PART + inside
                result += tl.load(part_ptrs, cache_modifier=".cg")
                owner_of_rest += 1
                last = first_step(num_steps, owner_of_rest, num_programs) - block * steps
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = columns < hidden_size
            if bias_ptr is not None:
                for place in range(num_active):
                    expert = tl.load(list_ptr + place)
                    is_here, ratios = load_ratios(
                        expert,
                        routed[0],
                        routed[1],
                        routed[2],
                        num_rows,
                        TOP_K,
                        BLOCK_SLOTS,
                        BLOCK_T,
                    )
                    bias_ptrs = bias_ptr + expert.to(tl.int64) * hidden_size + columns
                    bias = tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
                    result += tl.where(is_here[None, :], ratios[None, :] * bias[:, None], 0.0)
            largest = tl.load(routed[2] + rows, mask=is_row, other=0.0)
            factors = tl.load(routed[3] + rows, mask=is_row, other=0.0)
            result = tl.where((largest > 0)[None, :], result * factors[None, :], 0.0)
            result = tl.where(has_failed, float("nan"), result)
            out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * hidden_size + columns[:, None]
            mask = is_row[None, :] & is_column[:, None]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
    return has_failed
