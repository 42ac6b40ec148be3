"""The Hopper GEMM on 16-bit operands; kernels/hopper_gemm.py describes it."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ep_runtime.kernels.hopper_producer import NUM_GATHERING_THREADS, load_operands
from ep_runtime.kernels.hopper_tiles import (
    allocate_stages,
    finish_columns,
    in_column_order,
    locate_pair,
    next_stage,
    split_halves,
    store_layout,
)


@gluon.jit
def _multiply_stage(
    operands, stage, phase, acc, CONSUMER: gl.constexpr, GATHERS: gl.constexpr, use_acc
):
    """Wait for a stage and issue its product; returns the accumulator, not yet valid."""
    x_halves, w_stages, full, _, _ = operands
    mbarrier.wait(full.index(stage), phase)
    if GATHERS:
        # The matrix units read through another proxy than the copies by threads wrote.
        fence_async_shared()
    x = x_halves.index(2 * stage + CONSUMER)
    w = w_stages.index(stage).permute([1, 0])
    return warpgroup_mma(x, w, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _finish_previous(acc, empty, previous):
    """Wait for all products but the last one, and release the stage before its."""
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(empty.index(previous))
    return warpgroup_mma_init(acc)


@gluon.jit
def _consume_stages(
    operands,  # stages and barriers
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
    GATHERS: gl.constexpr,
):
    """A consumer: half the rows of each tile, products and epilogue."""
    x_halves, w_stages, full, empty, turn = operands
    tile_experts_ptr, slots_ptr, topk_weights_ptr, bias_ptr, out_ptr = pointers
    num_tiles, num_blocks, num_columns, num_k_blocks, num_slots = sizes
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = x_halves.shape[1]
    COLUMNS: gl.constexpr = w_stages.shape[1]
    BLOCK_N: gl.constexpr = COLUMNS // NUM_HALVES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    STORE: gl.constexpr = store_layout(BLOCK_N, IS_SHUFFLED)
    rows = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, STORE))
    takes_turns = num_k_blocks >= STAGES
    num_pairs = num_tiles * num_blocks
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    parity = gl.to_tensor(0)
    index = gl.program_id(0)
    tile, block = locate_pair(index, num_tiles, num_blocks, GROUP)
    if topk_weights_ptr is not None:
        slots_mask = (rows >= 0) & (index < num_pairs)
        slots = gl.load(slots_ptr + tile * (2 * ROWS) + rows, mask=slots_mask, other=num_slots)
    acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, MMA)
    while index < num_pairs:
        if LEAD > 0 and CONSUMER == 1:
            mbarrier.wait(turn, parity, pred=takes_turns)
        product = _multiply_stage(operands, stage, phase, acc, CONSUMER, GATHERS, use_acc=False)
        previous = stage
        stage, phase = next_stage(stage, phase, STAGES)

        # Loads whose latency the products hide: this tile's weights, the next tile's slots.
        next_index = index + gl.num_programs(0)
        next_tile, next_block = locate_pair(next_index, num_tiles, num_blocks, GROUP)
        row_weights = None
        if topk_weights_ptr is not None:
            row_weights = gl.load(topk_weights_ptr + slots, mask=slots < num_slots, other=0.0)
            slots_mask = (rows >= 0) & (next_index < num_pairs)
            next_slots = gl.load(
                slots_ptr + next_tile * (2 * ROWS) + rows, mask=slots_mask, other=num_slots
            )
        expert = None
        if bias_ptr is not None:
            expert = gl.load(tile_experts_ptr + tile)

        product = _multiply_stage(operands, stage, phase, product, CONSUMER, GATHERS, use_acc=True)
        product = _finish_previous(product, empty, previous)
        if LEAD == 1 and CONSUMER == 0:
            mbarrier.arrive(turn, pred=takes_turns)
        previous = stage
        stage, phase = next_stage(stage, phase, STAGES)
        for k_block in range(2, num_k_blocks):
            product = _multiply_stage(
                operands, stage, phase, product, CONSUMER, GATHERS, use_acc=True
            )
            product = _finish_previous(product, empty, previous)
            if LEAD > 1 and CONSUMER == 0:
                mbarrier.arrive(turn, pred=takes_turns & (k_block == LEAD))
            previous = stage
            stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(empty.index(previous))

        result = in_column_order(acc, IS_SHUFFLED)
        if NUM_HALVES == 2:
            gate, up = split_halves(result)
            gate = gl.convert_layout(gate, STORE)
            up = gl.convert_layout(up, STORE)
        else:
            gate = result
            up = result
        if topk_weights_ptr is not None:
            out_rows = slots.to(gl.int64)
            is_row = slots < num_slots
            slots = next_slots
        else:
            out_rows = tile.to(gl.int64) * (2 * ROWS) + rows
            is_row = rows >= 0
        finish_columns(
            gate,
            up,
            block * BLOCK_N,
            expert,
            out_rows,
            is_row,
            row_weights,
            (bias_ptr, out_ptr, None),
            num_columns,
            alpha,
            limit,
            ACTIVATION,
            NUM_HALVES,
            HAS_COLUMN_TAIL,
        )
        index, tile, block = next_index, next_tile, next_block
        parity ^= 1


@gluon.jit(do_not_specialize=["num_slots"])
def project_kernel(
    x,  # a descriptor of [P, K]; gathered, a pointer to [R, K]
    w_desc,  # [E * N, K], plain or shuffled; 2 * N where gated
    top_k,  # of rows that are gathered by slot, how many slots one has; else None
    row_chunks,  # of the same, how many times 16 bytes apart they are; else None
    tile_experts_ptr,
    num_tiles_ptr,
    slots_ptr,  # or None: neither rows nor out are by slot
    topk_weights_ptr,  # or None: out is by position
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
    GATHERS: gl.constexpr = top_k is not None
    IS_SHUFFLED: gl.constexpr = len(w_desc.block_shape) == 5
    # The thread that expects TMA's bytes; gathering, each thread's copies as well.
    FULL_COUNT: gl.constexpr = 1 + NUM_GATHERING_THREADS if GATHERS else 1
    x_stages, w_stages, full, empty, turn = allocate_stages(w_desc, STAGES, NUM_HALVES, FULL_COUNT)
    fence_async_shared()
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    x_layout: gl.constexpr = x_stages.layout
    x_halves = x_stages._reinterpret(w_desc.dtype, [2 * STAGES, 64, BLOCK_K], x_layout)
    w_wide = w_stages._reinterpret(w_desc.dtype, [STAGES, 256, BLOCK_K], x_layout)

    num_tiles = gl.load(num_tiles_ptr)
    num_blocks = gl.cdiv(num_columns, 256 // NUM_HALVES)
    # Two at least: a consumer's loop has its first two blocks unrolled. TMA fills them with zeros.
    num_k_blocks = gl.maximum(gl.cdiv(k_size, BLOCK_K), 2)
    gl.warp_specialize(
        [
            (
                _consume_stages,
                (
                    (x_halves, w_wide, full, empty, turn),
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
                    GATHERS,
                ),
            ),
            (
                _consume_stages,
                (
                    (x_halves, w_wide, full, empty, turn),
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
                    GATHERS,
                ),
            ),
            (
                load_operands,
                (
                    (x, w_desc, x_stages, w_stages, full, empty),
                    (slots_ptr, num_slots, top_k, row_chunks, k_size) if GATHERS else None,
                    tile_experts_ptr,
                    (num_tiles, num_blocks, num_columns, num_k_blocks),
                    NUM_HALVES,
                    GROUP,
                ),
            ),
        ],
        [4, 4] if GATHERS else [4, 1],
        [232, 40] if GATHERS else [240, 24],
    )
