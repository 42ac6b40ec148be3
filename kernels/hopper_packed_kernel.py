"""The Hopper GEMM on packed weights; kernels/hopper_packed_gemm.py describes it."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
)

from ep_runtime.kernels.dependent_launch import await_predecessor
from ep_runtime.kernels.hopper_packed_epilogue import about_tile, finish_item
from ep_runtime.kernels.hopper_packed_products import (
    AT_GROUP_TILES,
    AT_HEIGHT,
    AT_SCALES_SUMS,
    multiply_scaled,
    multiply_scaling_sums,
    stages_at_a_time,
)
from ep_runtime.kernels.hopper_tiles import (
    allocate_barriers,
    locate_pair,
    next_stage,
)


@gluon.jit
def _multiply_rows(
    given,
    item,
    stage,
    phase,
    parity,
    ROWS: gl.constexpr,
    CONSUMER: gl.constexpr,
    KIND: gl.constexpr,
):
    """An item of whose tile only the first ROWS rows are any; the ring's next place."""
    operands, pointers, sizes, alpha, limit = given
    # Of many rows it has no registers during the products.
    if ROWS <= 32:
        about = about_tile(item, pointers, sizes, ROWS, KIND)
    if KIND[AT_SCALES_SUMS]:
        sums, stage, phase = multiply_scaling_sums(operands, stage, phase, sizes[3], CONSUMER, KIND)
    else:
        sums, stage, phase = multiply_scaled(
            operands, stage, phase, parity, sizes[3], ROWS, CONSUMER, KIND
        )
    if ROWS > 32:
        about = about_tile(item, pointers, sizes, ROWS, KIND)
    finish_item(sums, about, item, pointers, sizes, alpha, limit, CONSUMER, KIND)
    return stage, phase


@gluon.jit
def _item_at(index, order, num_tiles, num_blocks, GROUP_TILES: gl.constexpr):
    """The index-th item, (tile, column block); of cut tiles all items of tall ones come first."""
    order_ptr, order_size, num_tall = order
    if order_ptr is None:
        return locate_pair(index, num_tiles, num_blocks, GROUP_TILES)
    else:
        is_tall = index < num_tall * num_blocks
        within = index - gl.where(is_tall, 0, num_tall * num_blocks)
        height = gl.where(is_tall, num_tall, num_tiles - num_tall)
        rank, block = locate_pair(within, height, num_blocks, GROUP_TILES)
        place = gl.where(is_tall, rank, order_size - 1 - rank)
        is_item = index < num_tiles * num_blocks
        return gl.load(order_ptr + place, mask=is_item, other=0), block


@gluon.jit
def _consume(
    given,  # stages and barriers, pointers, sizes, alpha, limit
    order,  # tile_order, or None where no tile is cut; its size, num_tall_tiles
    CONSUMER: gl.constexpr,
    KIND: gl.constexpr,
):
    """A consumer: 128 or 64 rows of W of each item, products and epilogue.

    Cut tiles that are not tall, of which half or more is empty, are multiplied as half a tile.
    """
    num_tiles, num_blocks, _, _, _ = given[2]
    HEIGHT: gl.constexpr = KIND[AT_HEIGHT]
    GROUP_TILES: gl.constexpr = KIND[AT_GROUP_TILES]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    following = _item_at(gl.program_id(0), order, num_tiles, num_blocks, GROUP_TILES)
    for index in range(gl.program_id(0), num_tiles * num_blocks, gl.num_programs(0)):
        item = following
        # Located an item ahead, so that nothing waits for the load of its tile.
        next_index = index + gl.num_programs(0)
        following = _item_at(next_index, order, num_tiles, num_blocks, GROUP_TILES)
        parity = index // gl.num_programs(0) & 1
        if order[0] is None:
            stage, phase = _multiply_rows(given, item, stage, phase, parity, HEIGHT, CONSUMER, KIND)
        else:
            if index < order[2] * num_blocks:
                stage, phase = _multiply_rows(
                    given, item, stage, phase, parity, HEIGHT, CONSUMER, KIND
                )
            else:
                stage, phase = _multiply_rows(
                    given, item, stage, phase, parity, HEIGHT // 2, CONSUMER, KIND
                )


@gluon.jit
def _gather_chunk(pointers, is_row, k, k_size, x_stage):
    """64 columns of a tile's rows into shared memory; 0 on padding and past the last column."""
    LAYOUT: gl.constexpr = pointers.type.layout
    chunks = (k + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))) // 8
    mask = is_row & gl.expand_dims(chunks < k_size // 8, 0)
    async_copy.async_copy_global_to_shared(x_stage, pointers + k, mask=mask)


@gluon.jit
def _load(
    operands,
    gather,
    tile_experts_ptr,
    order,
    sizes,
    NUM_BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    split,  # parts of K that a column block's items have, or None for 1
):
    x, words, factors, x_stages, word_boxes, factor_boxes, full, empty = operands
    num_tiles, num_blocks, blocks_per_expert, num_k_blocks = sizes
    STAGES: gl.constexpr = full.shape[0]
    HEIGHT: gl.constexpr = x_stages.shape[1]
    CHUNKS: gl.constexpr = x_stages.shape[0] // STAGES
    BLOCK_K: gl.constexpr = 64 * CHUNKS
    W_BYTES: gl.constexpr = words.block_type.nbytes + factors.block_type.nbytes
    STAGE_BYTES: gl.constexpr = W_BYTES + (CHUNKS * x.block_type.nbytes if gather is None else 0)
    GATHER: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for index in range(gl.program_id(0), num_tiles * num_blocks, gl.num_programs(0)):
        tile, block = _item_at(index, order, num_tiles, num_blocks, GROUP_TILES)
        expert = gl.load(tile_experts_ptr + tile)
        if split is not None:
            first_k_block = block % split * num_k_blocks
            block = block // split
        w_block = expert * blocks_per_expert + block * NUM_BLOCKS
        if gather is not None:
            slots_ptr, num_slots, top_k, row_chunks, k_size = gather
            rows = gl.arange(0, HEIGHT, gl.SliceLayout(1, GATHER))
            columns = gl.arange(0, 64, gl.SliceLayout(0, GATHER))
            slots = gl.load(slots_ptr + tile * HEIGHT + rows)
            row_ptrs = x + (slots // top_k).to(gl.int64) * row_chunks * 8
            pointers = gl.expand_dims(row_ptrs, 1) + gl.expand_dims(columns, 0)
            is_row = gl.expand_dims(slots < num_slots, 1)
        for of_part in range(num_k_blocks):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, STAGE_BYTES)
            k_block = of_part
            if split is not None:
                k_block = first_k_block + of_part
            w_at = [w_block, k_block * (4 * CHUNKS), 0]
            tma.async_copy_global_to_shared(words, w_at, bar, word_boxes.index(stage))
            s_at = [w_block, k_block * BLOCK_K // GROUP, 0]
            tma.async_copy_global_to_shared(factors, s_at, bar, factor_boxes.index(stage))
            for chunk in gl.static_range(CHUNKS):
                k = k_block * BLOCK_K + 64 * chunk
                x_stage = x_stages.index(stage * CHUNKS + chunk)
                if gather is None:
                    tma.async_copy_global_to_shared(x, [tile * HEIGHT, k], bar, x_stage)
                else:
                    _gather_chunk(pointers, is_row, k, k_size, x_stage)
            if gather is not None:
                async_copy.mbarrier_arrive(bar, increment_count=False)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["order_size", "num_slots"])
def project_packed_kernel(
    x,  # a descriptor of [P, K]; gathered, a pointer to [R, K]
    words,  # a descriptor of [E * blocks, 4 * chunks, 256] int32
    factors,  # a descriptor of [E * blocks, groups, 128, or 256 with centres]
    top_k,
    row_chunks,
    tile_experts_ptr,
    tile_order_ptr,  # None where no tile is cut
    order_size,
    num_tiles_ptr,
    num_tall_tiles_ptr,
    slots_ptr,
    topk_weights_ptr,  # or None
    bias_ptr,  # or None
    global_scales_ptr,  # [E, 2] of gated weights, else [E, 1], float32; or None
    out_ptr,  # by position where rows are gathered, else by slot, or by slot and part of K
    num_slots,
    num_columns,
    k_size,
    alpha,
    limit,
    ACTIVATION: gl.constexpr,
    HEIGHT: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr,
    SLABS: gl.constexpr,
    HAS_COLUMN_TAIL: gl.constexpr,
    GROUP_TILES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    SCALES_SUMS: gl.constexpr,
    LEAD: gl.constexpr,
    STORED: gl.constexpr,
    SPLIT: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,
):
    GATHERS: gl.constexpr = top_k is not None
    IS_GATED: gl.constexpr = ACTIVATION != "none" and ACTIVATION != "relu2"
    FULL_COUNT: gl.constexpr = 129 if GATHERS else 1
    X_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    GROUPS: gl.constexpr = factors.block_shape[1]
    PARTS: gl.constexpr = factors.block_shape[2] // 128
    DTYPE: gl.constexpr = factors.dtype
    C: gl.constexpr = NUM_CONSUMERS
    B: gl.constexpr = C * SLABS // 2  # blocks of an item
    FACTOR_BOXES: gl.constexpr = [STAGES, B, GROUPS, 128 * PARTS]
    x_stages = gl.allocate_shared_memory(DTYPE, [STAGES * CHUNKS, HEIGHT, 64], X_LAYOUT)
    word_boxes = gl.allocate_shared_memory(gl.int32, [STAGES, B, 4 * CHUNKS, 256], words.layout)
    factor_boxes = gl.allocate_shared_memory(DTYPE, FACTOR_BOXES, factors.layout)
    full, empty, turn = allocate_barriers(STAGES, FULL_COUNT, C)
    fence_async_shared()
    await_predecessor(IS_DEPENDENT)
    word_stages = word_boxes._reinterpret(gl.int16, [STAGES * B * CHUNKS * 2, 32, 32], PLAIN)
    factor_stages = factor_boxes._reinterpret(DTYPE, [STAGES * B * GROUPS * PARTS, 32, 4], PLAIN)
    num_tiles = gl.load(num_tiles_ptr)
    order = (tile_order_ptr, order_size, gl.load(num_tall_tiles_ptr))
    COLUMNS: gl.constexpr = 64 if IS_GATED else 128
    blocks_per_expert = gl.cdiv(num_columns, COLUMNS)
    num_blocks = gl.cdiv(num_columns, COLUMNS * B)
    BLOCKS: gl.constexpr = 1 if SCALES_SUMS else stages_at_a_time(CHUNKS, SLABS, HEIGHT == 128)
    # Of a part, all of one length: past the end all is 0. `columns_of_part` says the same.
    num_k_blocks = gl.cdiv(k_size, 64 * CHUNKS * BLOCKS * SPLIT) * BLOCKS
    if SPLIT > 1:
        num_blocks *= SPLIT
    operands = (x_stages, word_stages, factor_stages, full, empty, turn)
    pointers = (
        tile_experts_ptr,
        slots_ptr,
        topk_weights_ptr,
        bias_ptr,
        global_scales_ptr,
        out_ptr,
    )
    sizes = (num_tiles, num_blocks, num_columns, num_k_blocks, num_slots)
    load_arguments = (
        (x, words, factors, x_stages, word_boxes, factor_boxes, full, empty),
        (slots_ptr, num_slots, top_k, row_chunks, k_size) if GATHERS else None,
        tile_experts_ptr,
        order,
        (num_tiles, num_blocks, blocks_per_expert, num_k_blocks),
        B,
        GROUP,
        GROUP_TILES,
        SPLIT if SPLIT > 1 else None,
    )
    LOADERS: gl.constexpr = 4 if GATHERS else 1
    LOADER_REGISTERS: gl.constexpr = 40 if GATHERS else 24
    R: gl.constexpr = CONSUMER_REGISTERS
    given = (operands, pointers, sizes, alpha, limit)
    KIND: gl.constexpr = (
        C,
        ACTIVATION,
        HAS_COLUMN_TAIL,
        GROUP_TILES,
        GATHERS,
        SCALES_SUMS,
        PARTS,
        HEIGHT,
        LEAD if C == 2 else 0,
        STORED,
        GROUPS // CHUNKS if GROUPS > CHUNKS else 1,
        SLABS,
        SPLIT,
    )
    if C == 1:
        gl.warp_specialize(
            [(_consume, (given, order, 0, KIND)), (_load, load_arguments)],
            [LOADERS],
            [LOADER_REGISTERS],
        )
    elif C == 2:
        gl.warp_specialize(
            [
                (_consume, (given, order, 0, KIND)),
                (_consume, (given, order, 1, KIND)),
                (_load, load_arguments),
            ],
            [4, LOADERS],
            [R, LOADER_REGISTERS],
        )
    else:
        gl.static_assert(C == 4)
        gl.warp_specialize(
            [
                (_consume, (given, order, 0, KIND)),
                (_consume, (given, order, 1, KIND)),
                (_consume, (given, order, 2, KIND)),
                (_consume, (given, order, 3, KIND)),
                (_load, load_arguments),
            ],
            [4, 4, 4, LOADERS],
            [R, R, R, LOADER_REGISTERS],
        )
