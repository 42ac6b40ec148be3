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

How a step's weights are multiplied is the caller's: MULTIPLY_GATE_UP and MULTIPLY_DOWN are device
functions as those of kernels/resident_projections.py, and take the caller's `weights`.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ep_runtime.kernels.grouped_gemm import activate
from ep_runtime.kernels.resident_barrier import (
    ACTIVATED,
    DOWN_SHARED,
    GATE_UP_SHARED,
    announce,
    leave,
    pass_grid_barrier,
    set_flag,
    wait_for_flag,
)
from ep_runtime.kernels.resident_routing import load_ratios

_GATE_UP_SHARED: tl.constexpr = tl.constexpr(GATE_UP_SHARED)
_ACTIVATED: tl.constexpr = tl.constexpr(ACTIVATED)
_DOWN_SHARED: tl.constexpr = tl.constexpr(DOWN_SHARED)


class Sizes(NamedTuple):
    """Inside a kernel: T, H, I, and the rows of an expert's first projection."""

    num_rows: Any
    hidden_size: Any
    intermediate_size: Any
    rows_per_expert: Any


@triton.jit
def first_step(num_steps, program, num_programs):
    """Where a program's share begins; that of program + 1 is where it ends.

    Programs without a share come last. Example: 10 steps, 4 programs: 0, 2, 5, 7, 10.
    """
    used = tl.minimum(num_steps, num_programs)
    return (num_steps.to(tl.int64) * tl.minimum(program, used) // tl.maximum(used, 1)).to(tl.int32)


@triton.jit
def _own_share(num_steps, grid):
    """Where this program's share begins and ends."""
    begin = first_step(num_steps, grid.program, grid.num_programs)
    return begin, first_step(num_steps, grid.program + 1, grid.num_programs)


@triton.jit
def _leave_part(
    total, other, parts_ptr, inside, grid, has_failed, NUM_SUMS: tl.constexpr, SET: tl.constexpr
):
    """Leave what this program has of an item's sums, [BLOCK_N, BLOCK_T] each, to its owner.

    other: the second sum of two. parts_ptr: [P, NUM_SUMS, BLOCK_N, BLOCK_T] float32. inside: the
    offsets in a sum. SET: of flags, one for each projection.
    """
    part_ptrs = parts_ptr + grid.program.to(tl.int64) * (NUM_SUMS * total.numel) + inside
    tl.store(part_ptrs, tl.where(has_failed, float("nan"), total))
    if NUM_SUMS == 2:
        tl.store(part_ptrs + total.numel, other)
    set_flag(grid, SET)


@triton.jit
def _add_parts(
    total,
    other,
    parts_ptr,
    inside,
    grid,
    has_failed,
    last,
    item,
    steps,
    num_steps,
    NUM_SUMS: tl.constexpr,
    SET: tl.constexpr,
    PHASE: tl.constexpr,
):
    """Add what other programs have left of an item's sums to what this one, its owner, has.

    last: the first step that is theirs. steps: of each item; num_steps: of all. Returns the sums,
    and whether a wait has failed, has_failed included.
    """
    program = grid.program + 1
    while last < steps:
        has_failed = wait_for_flag(grid, program, has_failed, SET, PHASE)
        part_ptrs = parts_ptr + program.to(tl.int64) * (NUM_SUMS * total.numel) + inside
        total += tl.load(part_ptrs, cache_modifier=".cg")
        if NUM_SUMS == 2:
            other += tl.load(part_ptrs + total.numel, cache_modifier=".cg")
        program += 1
        last = first_step(num_steps, program, grid.num_programs) - item * steps
    return total, other, has_failed


@triton.jit
def _project_gate_up_share(
    weights,
    bias_ptr,  # [E, rows_per_expert] or None
    x,  # (pointer to [T, H], stride of rows, of columns)
    routed,
    list_ptr,  # of `list_experts`
    num_active,
    activated,  # (pointer to [A * BLOCK_T, I], out; stride of rows)
    parts_ptr,  # [P, 2, BLOCK_N, BLOCK_T] float32, scratch of all programs
    grid,
    has_failed,
    sizes,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    MULTIPLY: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program's share of the first projection; whether a wait has failed, also before."""
    announce(grid)
    IS_GATED: tl.constexpr = ACTIVATION != "relu2"
    NUM_SUMS: tl.constexpr = 2 if IS_GATED else 1
    BLOCK_N: tl.constexpr = TILE[0]
    activated_ptr, stride_activated = activated
    num_blocks = tl.cdiv(sizes.intermediate_size, BLOCK_N)
    steps = tl.cdiv(sizes.hidden_size, TILE[1])
    num_steps = num_active * num_blocks * steps
    begin, end = _own_share(num_steps, grid)
    rows = tl.arange(0, BLOCK_T)
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + rows[None, :]
    for item in tl.range(begin // steps, tl.cdiv(end, steps)):
        first = tl.maximum(begin - item * steps, 0)
        last = tl.minimum(end - item * steps, steps)
        place = item // num_blocks
        block = item % num_blocks
        expert = tl.load(list_ptr + place)
        gate, up = MULTIPLY(weights, x, expert, block, first, last, sizes, IS_GATED, BLOCK_T, TILE)
        if first > 0:
            _leave_part(gate, up, parts_ptr, inside, grid, has_failed, NUM_SUMS, 0)
        else:
            gate, up, has_failed = _add_parts(
                gate,
                up,
                parts_ptr,
                inside,
                grid,
                has_failed,
                last,
                item,
                steps,
                num_steps,
                NUM_SUMS,
                0,
                _GATE_UP_SHARED,
            )
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = (columns < sizes.intermediate_size)[:, None]
            if bias_ptr is not None:
                bias_ptrs = bias_ptr + expert.to(tl.int64) * sizes.rows_per_expert
                bias_ptrs += columns[:, None]
                gate += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
                if IS_GATED:
                    bias_ptrs += sizes.intermediate_size
                    up += tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
            result = activate(gate, up, alpha, limit, ACTIVATION)
            is_here, ratios = load_ratios(
                expert, routed, sizes.num_rows, TOP_K, BLOCK_SLOTS, BLOCK_T
            )
            result = tl.where(is_here[None, :], result * ratios[None, :], 0.0)
            result = tl.where(has_failed, float("nan"), result)
            out_rows = (place * BLOCK_T + rows).to(tl.int64)
            out_ptrs = activated_ptr + out_rows[None, :] * stride_activated + columns[:, None]
            tl.store(out_ptrs, result.to(activated_ptr.dtype.element_ty), mask=is_column)
    return has_failed


@triton.jit
def _project_down_share(
    weights,
    bias_ptr,  # [E, H] or None
    activated,
    routed,
    list_ptr,
    num_active,
    out_ptr,  # [T, H] contiguous, out
    parts_ptr,  # [P, BLOCK_N, BLOCK_T] float32, scratch of all programs
    grid,
    has_failed,
    sizes,
    MULTIPLY: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program's share of the second projection, and of the output; the arguments are those of
    `_project_gate_up_share`."""
    BLOCK_N: tl.constexpr = TILE[0]
    real_steps = num_active * tl.cdiv(sizes.intermediate_size, TILE[1])
    # One that does nothing where no expert has rows: the output is written all the same.
    steps = tl.maximum(real_steps, 1)
    num_steps = tl.cdiv(sizes.hidden_size, BLOCK_N) * steps
    begin, end = _own_share(num_steps, grid)
    rows = tl.arange(0, BLOCK_T)
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + rows[None, :]
    is_row = rows < sizes.num_rows
    for block in tl.range(begin // steps, tl.cdiv(end, steps)):
        first = tl.maximum(begin - block * steps, 0)
        last = tl.minimum(end - block * steps, steps)
        last_real = tl.minimum(last, real_steps)
        result = MULTIPLY(
            weights, activated, list_ptr, block, first, last_real, sizes, BLOCK_T, TILE
        )
        if first > 0:
            _leave_part(result, result, parts_ptr, inside, grid, has_failed, 1, 1)
        else:
            result, _, has_failed = _add_parts(
                result,
                result,
                parts_ptr,
                inside,
                grid,
                has_failed,
                last,
                block,
                steps,
                num_steps,
                1,
                1,
                _DOWN_SHARED,
            )
            columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = columns < sizes.hidden_size
            if bias_ptr is not None:
                for place in range(num_active):
                    expert = tl.load(list_ptr + place)
                    is_here, ratios = load_ratios(
                        expert, routed, sizes.num_rows, TOP_K, BLOCK_SLOTS, BLOCK_T
                    )
                    bias_ptrs = bias_ptr + expert.to(tl.int64) * sizes.hidden_size + columns
                    bias = tl.load(bias_ptrs, mask=is_column, other=0.0).to(tl.float32)
                    result += tl.where(is_here[None, :], ratios[None, :] * bias[:, None], 0.0)
            largest = tl.load(routed.largest_ptr + rows, mask=is_row, other=0.0)
            factors = tl.load(routed.factors_ptr + rows, mask=is_row, other=0.0)
            result = tl.where((largest == 0)[None, :], 0.0, result * factors[None, :])
            result = tl.where(has_failed, float("nan"), result)
            out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * sizes.hidden_size + columns[:, None]
            mask = is_row[None, :] & is_column[:, None]
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def project_shares(
    gate_up,  # (weights, bias [E, rows_per_expert] or None)
    down,  # (weights, bias [E, H] or None)
    x,  # (pointer to [T, H], stride of rows, of columns)
    routed,
    list_ptr,  # of `list_experts`
    num_active,
    activated,  # (pointer to [A * BLOCK_T, I], stride of rows), scratch
    parts_ptr,  # [P, max(2 * BLOCK_N of GATE_UP, BLOCK_N of DOWN), BLOCK_T] float32, scratch
    out_ptr,  # [T, H] contiguous, out
    grid,
    has_failed,
    sizes,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    MULTIPLY_GATE_UP: tl.constexpr,
    MULTIPLY_DOWN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GATE_UP: tl.constexpr,  # (BLOCK_N, BLOCK_K, and what else the multiplication reads)
    DOWN: tl.constexpr,
    BARRIER: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr,
):
    """All that a program does once it knows the rows' experts: its share of both projections, a
    grid barrier between them, and the leaving.

    has_failed: whether a wait before has. BARRIER: the number of this grid barrier in the launch.
    """
    has_failed = _project_gate_up_share(
        gate_up[0],
        gate_up[1],
        x,
        routed,
        list_ptr,
        num_active,
        activated,
        parts_ptr,
        grid,
        has_failed,
        sizes,
        alpha,
        limit,
        ACTIVATION,
        MULTIPLY_GATE_UP,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        GATE_UP,
    )
    has_failed = has_failed | pass_grid_barrier(grid, BARRIER, _ACTIVATED)
    _project_down_share(
        down[0],
        down[1],
        activated,
        routed,
        list_ptr,
        num_active,
        out_ptr,
        parts_ptr,
        grid,
        has_failed,
        sizes,
        MULTIPLY_DOWN,
        TOP_K,
        BLOCK_SLOTS,
        BLOCK_T,
        DOWN,
    )
    leave(grid, MAX_PROGRAMS)
