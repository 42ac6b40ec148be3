"""The epilogue of the Hopper GEMM on packed weights: from a consumer's accumulators to its rows of
the result (kernels/hopper_packed_gemm.py)."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ep_runtime.kernels.hopper_packed_layout import E2M1_SCALE
from ep_runtime.kernels.hopper_packed_products import (
    AT_ACTIVATION,
    AT_COLUMN_TAIL,
    AT_CONSUMERS,
    AT_GATHERS,
    AT_HEIGHT,
    AT_SLABS,
    AT_SPLIT,
    AT_STORED,
)
from ep_runtime.kernels.hopper_tiles import finish_columns

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
def about_tile(item, pointers, sizes, ROWS: gl.constexpr, KIND: gl.constexpr):
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
def finish_item(
    sums,
    about,  # as `about_tile` gives it
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
    slots = about[0]
    tile_experts_ptr, _, topk_weights_ptr, bias_ptr, global_scales_ptr, out_ptr = pointers
    row_weights = None
    if topk_weights_ptr is not None:
        row_weights = about[1]
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
        gate *= about[-2]
        up *= about[-1]
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
