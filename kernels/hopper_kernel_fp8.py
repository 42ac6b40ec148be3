"""The Hopper GEMM on e4m3 operands with block scales; kernels/hopper_gemm.py describes it.

A stage is 128 columns of K, so one group of X's scales and one block of W's. The matrix units sum a
block for 128 of the 256 rows of W at a time, 64 x 128 a consumer; that sum is then added, times the
row's and the block's scale, to a float32 result in registers: 2 x 64 registers of results and 64 of
sums. While a consumer adds, the other one has the matrix units, but they share them fairly and so
tend to add at the same time. So a consumer's products follow each other with nothing but additions
between them: waits, releases and scales, loaded a block ahead, lie in the shadow of a product. A
round of the loop ends with the first product of the next block, so that where its operands are is
worked out among the additions, not after the branch.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ep_runtime.kernels.hopper_producer import load_operands
from ep_runtime.kernels.hopper_tiles import (
    allocate_stages,
    finish_columns,
    in_column_order,
    locate_pair,
    next_stage,
    store_layout,
)


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """The stage before this one in the ring.

    Computed, not kept in a name of its own: Triton carries a name through a loop only if a trial
    pass over the body changes its value, and one that is given the carried `stage` before the loop
    and in it, before `stage` moves on, has the same value there both times.
    """
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _load_scales(
    x_scales_ptr,
    w_scales_ptr,
    positions,
    expert,
    block,
    k_block,
    is_pair,
    num_groups,
    num_columns,
    NUM_HALVES: gl.constexpr,
):
    """The scales of one stage: of X [64] by row, of W's first and second 128 rows."""
    x_scales = gl.load(
        x_scales_ptr + positions.to(gl.int64) * num_groups + k_block,
        mask=(positions >= 0) & is_pair,
        other=0.0,
    )
    num_row_blocks = gl.cdiv(num_columns, 128)
    if NUM_HALVES == 2:
        first_block = expert * (2 * num_row_blocks) + block
        second_block = first_block + num_row_blocks
        has_second = is_pair
    else:
        first_block = expert * num_row_blocks + 2 * block
        second_block = first_block + 1
        has_second = is_pair & (2 * block + 1 < num_row_blocks)
    w_ptrs = w_scales_ptr + k_block
    first = gl.load(w_ptrs + first_block.to(gl.int64) * num_groups, mask=is_pair, other=0.0)
    second = gl.load(w_ptrs + second_block.to(gl.int64) * num_groups, mask=has_second, other=0.0)
    return x_scales, first, second


@gluon.jit
def _consume_scaled_stages(
    operands,  # stages and barriers
    scale_pointers,
    pointers,
    sizes,
    alpha,
    limit,
    CONSUMER: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NUM_HALVES: gl.constexpr,
    HAS_COLUMN_TAIL: gl.constexpr,
    IS_SHUFFLED: gl.constexpr,
    GROUP: gl.constexpr,
    LEAD: gl.constexpr,
):
    """A consumer: half the rows of each tile, products and epilogue."""
    x_halves, w_halves, full, empty, turn = operands
    x_scales_ptr, w_scales_ptr, out_scales_ptr = scale_pointers
    tile_experts_ptr, slots_ptr, topk_weights_ptr, bias_ptr, out_ptr = pointers
    num_tiles, num_blocks, num_columns, num_k_blocks, num_slots = sizes
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_halves.shape[1]
    COLUMNS: gl.constexpr = w_halves.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    STORE: gl.constexpr = store_layout(COLUMNS, IS_SHUFFLED)
    rows = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    mma_rows = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    takes_turns = num_k_blocks >= STAGES
    num_pairs = num_tiles * num_blocks
    zeros = gl.full([ROWS, COLUMNS], 0.0, gl.float32, MMA)
    product = zeros
    # False, which the compiler cannot know: so a product has to stay in the registers of the one
    # before, scaled by then, instead of in 64 more, which there are not (11 to 90 were spilled).
    never = num_k_blocks < 0
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    index = gl.program_id(0)
    is_pair = index < num_pairs
    tile, block = locate_pair(index, num_tiles, num_blocks, GROUP)
    expert = gl.load(tile_experts_ptr + tile, mask=is_pair, other=0)
    x_scales, first_scale, second_scale = _load_scales(
        x_scales_ptr,
        w_scales_ptr,
        tile * (2 * ROWS) + mma_rows,
        expert,
        block,
        0,
        is_pair,
        num_k_blocks,
        num_columns,
        NUM_HALVES,
    )
    if slots_ptr is not None:
        slots_mask = (rows >= 0) & is_pair
        slots = gl.load(slots_ptr + tile * (2 * ROWS) + rows, mask=slots_mask, other=num_slots)
    mbarrier.wait(full.index(stage), phase, pred=is_pair)
    while index < num_pairs:
        next_index = index + gl.num_programs(0)
        has_next = next_index < num_pairs
        next_tile, next_block = locate_pair(next_index, num_tiles, num_blocks, GROUP)
        next_expert = gl.load(tile_experts_ptr + next_tile, mask=has_next, other=0)
        row_weights = None
        if slots_ptr is not None:
            row_weights = gl.load(topk_weights_ptr + slots, mask=slots < num_slots, other=0.0)
            slots_mask = (rows >= 0) & has_next
            next_slots = gl.load(
                slots_ptr + next_tile * (2 * ROWS) + rows, mask=slots_mask, other=num_slots
            )
        if LEAD > 0 and CONSUMER == 1:
            mbarrier.wait(turn, parity, pred=takes_turns)
        first = zeros
        second = zeros
        x = x_halves.index(2 * stage + CONSUMER)
        w = w_halves.index(2 * stage).permute([1, 0])
        product = warpgroup_mma(x, w, product, use_acc=never, is_async=True)
        for k_block in range(num_k_blocks - 1):
            # While a product runs: whatever else there is to do, so that nothing but additions lies
            # between two. The next stage's scales are loaded, and the stage before goes back.
            first_factors = x_scales * first_scale
            second_factors = x_scales * second_scale
            x_scales, first_scale, second_scale = _load_scales(
                x_scales_ptr,
                w_scales_ptr,
                tile * (2 * ROWS) + mma_rows,
                expert,
                block,
                k_block + 1,
                True,
                num_k_blocks,
                num_columns,
                NUM_HALVES,
            )
            mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=k_block > 0)
            if LEAD > 0 and CONSUMER == 0:
                mbarrier.arrive(turn, pred=takes_turns & (k_block == LEAD))
            # Else the compiler puts one between the products, where nothing hides it.
            gl.thread_barrier()
            product = warpgroup_mma_wait(0, deps=[product])
            first += product * gl.expand_dims(first_factors, 1)
            first = warpgroup_mma_wait(0, deps=[first])
            x = x_halves.index(2 * stage + CONSUMER)
            w = w_halves.index(2 * stage + 1).permute([1, 0])
            product = warpgroup_mma(x, w, product, use_acc=never, is_async=True)
            stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(full.index(stage), phase)
            product = warpgroup_mma_wait(0, deps=[product])
            second += product * gl.expand_dims(second_factors, 1)
            second = warpgroup_mma_wait(0, deps=[second])
            x = x_halves.index(2 * stage + CONSUMER)
            w = w_halves.index(2 * stage).permute([1, 0])
            product = warpgroup_mma(x, w, product, use_acc=never, is_async=True)

        # The last stage of this pair; scales and stage are waited for of the next pair's first.
        first_factors = x_scales * first_scale
        second_factors = x_scales * second_scale
        x_scales, first_scale, second_scale = _load_scales(
            x_scales_ptr,
            w_scales_ptr,
            next_tile * (2 * ROWS) + mma_rows,
            next_expert,
            next_block,
            0,
            has_next,
            num_k_blocks,
            num_columns,
            NUM_HALVES,
        )
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)), pred=num_k_blocks > 1)
        if LEAD > 0 and CONSUMER == 0:
            mbarrier.arrive(turn, pred=takes_turns & (num_k_blocks - 1 == LEAD))
        gl.thread_barrier()
        product = warpgroup_mma_wait(0, deps=[product])
        first += product * gl.expand_dims(first_factors, 1)
        first = warpgroup_mma_wait(0, deps=[first])
        x = x_halves.index(2 * stage + CONSUMER)
        w = w_halves.index(2 * stage + 1).permute([1, 0])
        product = warpgroup_mma(x, w, product, use_acc=never, is_async=True)
        stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase, pred=has_next)
        product = warpgroup_mma_wait(0, deps=[product])
        second += product * gl.expand_dims(second_factors, 1)
        second = warpgroup_mma_wait(0, deps=[second])
        mbarrier.arrive(empty.index(stage_before(stage, STAGES)))
        gl.thread_barrier()

        if slots_ptr is not None:
            out_rows = slots.to(gl.int64)
            is_row = slots < num_slots
            slots = next_slots
        else:
            out_rows = tile.to(gl.int64) * (2 * ROWS) + rows
            is_row = rows >= 0
        first = in_column_order(first, IS_SHUFFLED)
        second = in_column_order(second, IS_SHUFFLED)
        for half in gl.static_range(3 - NUM_HALVES):
            finish_columns(
                first if half == 0 else second,
                second,
                (block * (3 - NUM_HALVES) + half) * COLUMNS,
                expert,
                out_rows,
                is_row,
                row_weights,
                (bias_ptr, out_ptr, out_scales_ptr),
                num_columns,
                alpha,
                limit,
                ACTIVATION,
                NUM_HALVES,
                HAS_COLUMN_TAIL,
            )
        index, tile, block, expert = next_index, next_tile, next_block, next_expert
        parity ^= 1


@gluon.jit(do_not_specialize=["num_slots"])
def project_fp8_kernel(
    x_desc,  # [P, K] e4m3
    w_desc,  # [E * N, K] e4m3, plain or shuffled; 2 * N where gated
    x_scales_ptr,  # [P, ceil(K / 128)] float32
    w_scales_ptr,  # [E, ceil(N / 128), ceil(K / 128)] float32; gated: gate's, then up's
    out_scales_ptr,  # [P, ceil(N / 128)] float32 of an e4m3 out, or None
    tile_experts_ptr,
    num_tiles_ptr,
    slots_ptr,  # or None: out is by position
    topk_weights_ptr,  # or None, as slots_ptr
    bias_ptr,  # [E, N] or None; 2 * N where gated
    out_ptr,  # [P or num_slots, N]
    num_slots,
    num_columns,
    k_size,
    alpha,
    limit,
    ACTIVATION: gl.constexpr,
    NUM_HALVES: gl.constexpr,
    HAS_COLUMN_TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    LEAD: gl.constexpr,
):
    """One program a multiprocessor, of any number; each takes every num_programs-th pair."""
    TILE_ROWS: gl.constexpr = x_desc.block_shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_shape[1]
    IS_SHUFFLED: gl.constexpr = len(w_desc.block_shape) == 5
    dtype: gl.constexpr = x_desc.dtype
    x_stages, w_stages, full, empty, turn = allocate_stages(w_desc, STAGES, NUM_HALVES, 1)
    fence_async_shared()
    x_halves = x_stages._reinterpret(dtype, [2 * STAGES, TILE_ROWS // 2, BLOCK_K], x_desc.layout)
    w_halves = w_stages._reinterpret(dtype, [2 * STAGES, 128, BLOCK_K], x_desc.layout)

    num_tiles = gl.load(num_tiles_ptr)
    num_blocks = gl.cdiv(num_columns, 256 // NUM_HALVES)
    num_k_blocks = gl.cdiv(k_size, BLOCK_K)
    gl.warp_specialize(
        [
            (
                _consume_scaled_stages,
                (
                    (x_halves, w_halves, full, empty, turn),
                    (x_scales_ptr, w_scales_ptr, out_scales_ptr),
                    (tile_experts_ptr, slots_ptr, topk_weights_ptr, bias_ptr, out_ptr),
                    (num_tiles, num_blocks, num_columns, num_k_blocks, num_slots),
                    alpha,
                    limit,
                    0,
                    ACTIVATION,
                    NUM_HALVES,
                    HAS_COLUMN_TAIL,
                    IS_SHUFFLED,
                    GROUP,
                    LEAD,
                ),
            ),
            (
                _consume_scaled_stages,
                (
                    (x_halves, w_halves, full, empty, turn),
                    (x_scales_ptr, w_scales_ptr, out_scales_ptr),
                    (tile_experts_ptr, slots_ptr, topk_weights_ptr, bias_ptr, out_ptr),
                    (num_tiles, num_blocks, num_columns, num_k_blocks, num_slots),
                    alpha,
                    limit,
                    1,
                    ACTIVATION,
                    NUM_HALVES,
                    HAS_COLUMN_TAIL,
                    IS_SHUFFLED,
                    GROUP,
                    LEAD,
                ),
            ),
            (
                load_operands,
                (
                    (x_desc, w_desc, x_stages, w_stages, full, empty),
                    None,
                    tile_experts_ptr,
                    (num_tiles, num_blocks, num_columns, num_k_blocks),
                    NUM_HALVES,
                    GROUP,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )
