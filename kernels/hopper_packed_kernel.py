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
from ep_runtime.kernels.hopper_packed_layout import E2M1_SCALE
from ep_runtime.kernels.hopper_packed_products import (
    AT_ACTIVATION,
    AT_COLUMN_TAIL,
    AT_CONSUMERS,
    AT_GATHERS,
    AT_GROUP_TILES,
    AT_HEIGHT,
    AT_SCALES_SUMS,
    AT_SLABS,
    AT_SPLIT,
    AT_STORED,
    multiply_scaled,
    multiply_scaling_sums,
    stages_at_a_time,
)
from ep_runtime.kernels.hopper_tiles import (
    allocate_barriers,
    finish_columns,
    locate_pair,
    next_stage,
)

# What sums of products with e2m1 weights lack: their bits are values times 2^-126.
E2M1_SUMS = gl.constexpr(2.0**126 / E2M1_SCALE)


@gluon.constexpr_function
def output_layout(height, num_columns):
    """Who holds what of a consumer's result [height, num_columns]: a thread consecutive ones."""
    registers, width = [], 1
    while width < num_columns // 32:
        registers.append([0, width])
        width *= 2
    registers.append([1, 0])
    row = 8
    while row < height:
        registers.append([row, 0])
        row *= 2
    lanes = [[2, 0], [4, 0], [0, width], [0, 2 * width], [0, 4 * width]]
    warps = [[0, 8 * width], [0, 16 * width]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [height, num_columns])


@gluon.constexpr_function
def width_of(kind):
    """Columns of a consumer's result."""
    return (64 if kind[AT_ACTIVATION] in ("none", "relu2") else 32) * kind[AT_SLABS]


@gluon.jit
def _in_output_order(sums, IS_GATED: gl.constexpr):
    """Accumulators [64, height] of two slabs, or of one, as (gate, up) [height, 64] or [.., 32], or
    twice [height, 128] or [.., 64].

    Rows 16 w + 8 h + g of slab i are columns 16 w + 2 g + i of a gated result, of the gate where h
    is 0, else of the up half; and columns 32 w + 4 g + 2 i + h of another. Of one slab that is
    every second column, or every second two: see `_columns_of_slab`.
    """
    HEIGHT: gl.constexpr = sums[0].shape[1]
    SLABS: gl.constexpr = len(sums)
    if SLABS == 2:
        both = gl.join(sums[0], sums[1]).reshape([4, 2, 8, HEIGHT, 2])  # w, h, g, ., i
        both = both.permute([3, 0, 2, 4, 1])
    else:
        both = sums[0].reshape([4, 2, 8, HEIGHT]).permute([3, 0, 2, 1])
    if IS_GATED:
        LAYOUT: gl.constexpr = output_layout(HEIGHT, 32 * SLABS)
        gate, up = both.reshape([HEIGHT, 32 * SLABS, 2]).split()
        return (
            gl.convert_layout(gate, LAYOUT, assert_trivial=True),
            gl.convert_layout(up, LAYOUT, assert_trivial=True),
        )
    else:
        WIDE: gl.constexpr = output_layout(HEIGHT, 64 * SLABS)
        both = gl.convert_layout(both.reshape([HEIGHT, 64 * SLABS]), WIDE, assert_trivial=True)
        return both, both


@gluon.jit
def _columns_of_slab(ROWS: gl.constexpr, SLAB: gl.constexpr, KIND: gl.constexpr):
    """Of a slab's result: which columns of its block they are."""
    WIDTH: gl.constexpr = width_of(KIND)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, output_layout(ROWS, WIDTH)))
    if WIDTH == 32:
        return 2 * columns + SLAB
    else:
        return 4 * (columns // 2) + 2 * SLAB + columns % 2


@gluon.jit
def _slots_of(item, pointers, sizes, ROWS: gl.constexpr, KIND: gl.constexpr):
    """Of a tile's first ROWS rows: their slots, and the slots' weights if there are any."""
    _, slots_ptr, topk_weights_ptr, _, _, _ = pointers
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, output_layout(ROWS, width_of(KIND))))
    slots = gl.load(slots_ptr + item[0] * KIND[AT_HEIGHT] + rows)
    if topk_weights_ptr is None:
        return (slots,)
    else:
        return slots, gl.load(topk_weights_ptr + slots, mask=slots < sizes[4], other=0.0)


@gluon.jit
def _about_tile(item, pointers, sizes, ROWS: gl.constexpr, KIND: gl.constexpr):
    """What `_slots_of` gives, then the global scales of the tile's expert if there are any: of gate
    and up, of ungated weights the one twice."""
    tile_experts_ptr, _, _, _, global_scales_ptr, _ = pointers
    of_rows = _slots_of(item, pointers, sizes, ROWS, KIND)
    if global_scales_ptr is None:
        return of_rows
    else:
        PARTS: gl.constexpr = 2 if width_of(KIND) == 32 * KIND[AT_SLABS] else 1
        first_ptr = global_scales_ptr + PARTS * gl.load(tile_experts_ptr + item[0])
        of_expert = (gl.load(first_ptr), gl.load(first_ptr + PARTS - 1))
        return of_rows + of_expert


@gluon.jit
def _add_bias(sums, bias_ptr, expert, first_column, columns, num_columns, is_first):
    """Sums [rows, n] of ungated weights, plus their columns' bias in the first part of K alone.

    columns: [n] from first_column on, or None, as `finish_columns` takes them.
    """
    if columns is None:
        columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    bias_ptrs = bias_ptr + expert.to(gl.int64) * num_columns + first_column
    mask = (columns < num_columns - first_column) & is_first
    bias = gl.load(bias_ptrs + columns, mask=mask, other=0.0)
    return sums + gl.expand_dims(bias.to(gl.float32), 0)


@gluon.jit
def _finish(
    sums,
    about_tile,  # as `_about_tile` gives it
    item,  # its tile and column block, with parts of K: block * SPLIT + part
    pointers,
    sizes,
    alpha,
    limit,
    CONSUMER: gl.constexpr,
    KIND: gl.constexpr,
):
    """Epilogue of each slab's sums [64, n]: of a tile's first n rows."""
    tile, block = item
    slots = about_tile[0]
    tile_experts_ptr, _, topk_weights_ptr, bias_ptr, global_scales_ptr, out_ptr = pointers
    row_weights = None
    if topk_weights_ptr is not None:
        row_weights = about_tile[1]
    _, _, num_columns, _, num_slots = sizes
    ROWS: gl.constexpr = sums[0].shape[1]
    SLABS: gl.constexpr = KIND[AT_SLABS]
    SPLIT: gl.constexpr = KIND[AT_SPLIT]
    ACTIVATION: gl.constexpr = KIND[AT_ACTIVATION]
    IS_GATED: gl.constexpr = width_of(KIND) == 32 * SLABS
    BLOCK: gl.constexpr = 64 if IS_GATED else 128
    rows = gl.arange(0, ROWS, slots.type.layout)
    expert = None
    if bias_ptr is not None:
        expert = gl.load(tile_experts_ptr + tile)
    gate, up = _in_output_order(sums, IS_GATED)
    if KIND[AT_STORED] == "e2m1":
        gate *= E2M1_SUMS
        up *= E2M1_SUMS
    if global_scales_ptr is not None:
        gate *= about_tile[-2]
        up *= about_tile[-1]
    columns = None
    if SLABS == 1:
        columns = _columns_of_slab(ROWS, CONSUMER % 2, KIND)
    out_rows = slots
    if SPLIT > 1:
        part = block % SPLIT
        block = block // SPLIT
        out_rows = slots.to(gl.int64) * SPLIT + part
        if bias_ptr is not None:
            first = (block * (KIND[AT_CONSUMERS] * SLABS // 2) + CONSUMER * SLABS // 2) * BLOCK
            gate = _add_bias(gate, bias_ptr, expert, first, columns, num_columns, part == 0)
    finish_columns(
        gate,
        up,
        (block * (KIND[AT_CONSUMERS] * SLABS // 2) + CONSUMER * SLABS // 2) * BLOCK,
        expert,
        # The first projection gathers rows, and its results stay by position.
        tile.to(gl.int64) * KIND[AT_HEIGHT] + rows if KIND[AT_GATHERS] else out_rows.to(gl.int64),
        slots < num_slots,
        row_weights,
        (bias_ptr if SPLIT == 1 else None, out_ptr, None),
        num_columns,
        alpha,
        limit,
        ACTIVATION,
        2 if IS_GATED else 1,
        KIND[AT_COLUMN_TAIL],
        columns,
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
        about_tile = _about_tile(item, pointers, sizes, ROWS, KIND)
    if KIND[AT_SCALES_SUMS]:
        sums, stage, phase = multiply_scaling_sums(operands, stage, phase, sizes[3], CONSUMER, KIND)
    else:
        sums, stage, phase = multiply_scaled(
            operands, stage, phase, parity, sizes[3], ROWS, CONSUMER, KIND
        )
    if ROWS > 32:
        about_tile = _about_tile(item, pointers, sizes, ROWS, KIND)
    _finish(sums, about_tile, item, pointers, sizes, alpha, limit, CONSUMER, KIND)
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
