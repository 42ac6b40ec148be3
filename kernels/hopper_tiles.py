"""What the Hopper GEMMs are made of: the ring of stages, their order, the epilogue.

Shapes: P positions in expert order, K columns summed over, N columns of the result, E experts.
kernels/hopper_gemm.py says how the parts work together and why they are so.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_runtime.kernels.errors import PlanError

# Positions of a tile; each of the two consumers takes half.
BLOCK_M = 128
# Rows of W in a stage: a column block, or the gate and up halves of half as wide a one.
STAGE_ROWS = 256
# Columns of K in a stage, in bytes: the width of TMA's swizzle.
STAGE_COLUMN_BYTES = 128
# Consecutive rows of W that are shuffled among themselves, so that stores are wide.
SHUFFLED_ROWS = 32
# One stage is 48 KiB; a program has 227 KiB. With one stage a consumer would wait for itself.
MIN_STAGES, MAX_STAGES = 2, 4


@dataclass(frozen=True)
class HopperSchedule:
    """How a launch is laid out; results do not depend on it.

    num_stages: depth of the ring, MIN_STAGES to MAX_STAGES.
    group_tiles: consecutive row tiles that take all column blocks before the next ones start, so
    that what runs at once shares rows and weights in L2.
    lead_blocks: by how many blocks consumer 1 lets consumer 0 go ahead in each tile (`turn`), below
    num_stages; 0 lets both go.
    is_shuffled: whether W's rows are shuffled for wide stores, where N allows it.
    """

    num_stages: int = MAX_STAGES
    group_tiles: int = 16
    lead_blocks: int = 1
    is_shuffled: bool = True

    def __post_init__(self) -> None:
        if not MIN_STAGES <= self.num_stages <= MAX_STAGES:
            raise PlanError(f"num_stages ({self.num_stages}) must be {MIN_STAGES} to {MAX_STAGES}")
        if not 0 <= self.lead_blocks < self.num_stages:
            raise PlanError(
                f"lead_blocks ({self.lead_blocks}) must be 0 to num_stages - 1 "
                f"({self.num_stages - 1})"
            )
        if self.group_tiles < 1:
            raise PlanError(f"group_tiles ({self.group_tiles}) must be at least 1")


DEFAULT_SCHEDULE = HopperSchedule()
TILE_ROWS = gl.constexpr(BLOCK_M)


def describe_rows(x: Tensor) -> TensorDescriptor:
    """A TMA view of X [P, K] that brings 128 rows and 128 bytes of columns at a time."""
    block_k = STAGE_COLUMN_BYTES // x.element_size()
    layout = gl.NVMMASharedLayout(128, 8 * x.element_size(), 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [BLOCK_M, block_k], layout)


def describe_weights(w: Tensor, num_rows: int, *, is_shuffled: bool) -> TensorDescriptor:
    """A TMA view of W [R, K] that brings `num_rows` rows and 128 bytes of columns at a time.

    Shuffled, the view is [R / 32, j, q, b, K] of row 32 i + 8 q + 2 j + b, so that a box's rows lie
    in the order (i, j, q, b).
    """
    rows, k_size = w.shape
    block_k, bits = STAGE_COLUMN_BYTES // w.element_size(), 8 * w.element_size()
    if not is_shuffled:
        layout = gl.NVMMASharedLayout(128, bits, 2)
        return TensorDescriptor(w, [rows, k_size], [k_size, 1], [num_rows, block_k], layout)
    return TensorDescriptor(
        w,
        [rows // SHUFFLED_ROWS, 4, 4, 2, k_size],
        [SHUFFLED_ROWS * k_size, 2 * k_size, 8 * k_size, k_size, 1],
        [num_rows // SHUFFLED_ROWS, 4, 4, 2, block_k],
        gl.NVMMASharedLayout(128, bits, 5),
    )


def num_column_blocks(num_columns: int, *, is_gated: bool) -> int:
    """Column blocks of a result: 128 gate and 128 up rows of W each, or 256 rows."""
    return -(-num_columns // (STAGE_ROWS // 2 if is_gated else STAGE_ROWS))


@gluon.constexpr_function
def store_layout(num_columns, is_shuffled):
    """Who holds what of a consumer's [64, num_columns] result, registers in column order."""
    if is_shuffled:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16]]
    else:
        registers, lanes = [[0, 1], [8, 0], [0, 8], [0, 16]], [[0, 2], [0, 4]]
    width = 32
    while width < num_columns:
        registers = [*registers, [0, width]]
        width *= 2
    lanes = [*lanes, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, num_columns])


@gluon.jit
def locate_pair(index, num_tiles, num_blocks, GROUP: gl.constexpr):
    """The index-th (row tile, column block): down the rows of a group, then the next block."""
    first_tile = index // (GROUP * num_blocks) * GROUP
    # Past the last pair, where the result is not used, still no division by zero.
    height = gl.maximum(gl.minimum(num_tiles - first_tile, GROUP), 1)
    within = index - first_tile * num_blocks
    return first_tile + within % height, within // height


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    is_last = stage == STAGES - 1
    return gl.where(is_last, 0, stage + 1), phase ^ is_last.to(gl.int32)


@gluon.jit
def allocate_barriers(STAGES: gl.constexpr, FULL_COUNT: gl.constexpr, EMPTY_COUNT: gl.constexpr):
    """The barriers full [STAGES, 1], empty [STAGES + 1, 1] and turn [1], set up; turn is the last
    of empty.

    On its own, turn would be dead as soon as it is set up where no consumer is given it, and Triton
    would put what the partitions are given into its memory. A barrier's memory must not be used for
    anything else before `mbarrier.inval` (PTX), and does not bear it: when the GPU turned to
    another process and back, the barrier's word stood in the place of the number of tiles.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    turn = empty.index(STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FULL_COUNT)
        mbarrier.init(empty.index(i), count=EMPTY_COUNT)
    mbarrier.init(turn, count=1)
    return full, empty, turn


@gluon.jit
def allocate_stages(
    w_desc, STAGES: gl.constexpr, NUM_HALVES: gl.constexpr, FULL_COUNT: gl.constexpr
):
    """The ring: X [STAGES, 128, .] and W [STAGES * NUM_HALVES, box], barriers, ready to use."""
    dtype: gl.constexpr = w_desc.dtype
    x_shape: gl.constexpr = [STAGES, TILE_ROWS, w_desc.block_shape[-1]]
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    # Gluon has no starred expressions.
    w_shape: gl.constexpr = [STAGES * NUM_HALVES] + w_desc.block_shape  # noqa: RUF005
    x_stages = gl.allocate_shared_memory(dtype, x_shape, x_layout)
    w_stages = gl.allocate_shared_memory(dtype, w_shape, w_desc.layout)
    full, empty, turn = allocate_barriers(STAGES, FULL_COUNT, 2)
    return x_stages, w_stages, full, empty, turn


@gluon.jit
def in_column_order(acc, IS_SHUFFLED: gl.constexpr):
    """An accumulator as a tensor whose columns are W's rows; moves nothing between threads."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if IS_SHUFFLED:
        acc = acc.reshape([ROWS, COLUMNS // 32, 4, 4, 2]).permute([0, 1, 3, 2, 4])
        acc = acc.reshape([ROWS, COLUMNS])
    return gl.convert_layout(acc, store_layout(COLUMNS, IS_SHUFFLED))


@gluon.jit
def split_halves(result):
    """[rows, 2 n] as its left and right [rows, n], registers in the order of `store_layout`."""
    ROWS: gl.constexpr = result.shape[0]
    COLUMNS: gl.constexpr = result.shape[1] // 2
    return result.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()


@gluon.jit
def activate(gate, up, alpha, limit, ACTIVATION: gl.constexpr):
    """`apply_activation` on float32 halves; comparisons are written so that a NaN stays one."""
    if ACTIVATION == "silu":
        return gate / (1 + gl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1 + gl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "swigluoai":
        if limit is not None:
            gate = gl.where(gate > limit, limit, gate)
            up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        return (up + 1) * gate / (1 + gl.exp(-alpha * gate))
    else:
        gl.static_assert(ACTIVATION == "none" or ACTIVATION == "relu2")
        if ACTIVATION == "relu2":
            gate = gl.where(gate < 0, 0.0, gate)
            gate = gate * gate
        return gate


@gluon.jit
def finish_columns(
    gate,  # [rows, n] float32 in `store_layout`
    up,  # likewise, of gated activations
    first_column,
    expert,
    out_rows,  # [rows] int64
    is_row,
    row_weights,  # [rows] float32, or None
    pointers,
    num_columns,
    alpha,
    limit,
    ACTIVATION: gl.constexpr,
    NUM_HALVES: gl.constexpr,
    HAS_COLUMN_TAIL: gl.constexpr,
    columns=None,  # [n], which they are from first_column on; else in order
):
    """Bias, activation, router weight, quantisation, store: of n columns from first_column on."""
    bias_ptr, out_ptr, out_scales_ptr = pointers
    LAYOUT: gl.constexpr = gate.type.layout
    COLUMNS: gl.constexpr = gate.shape[1]
    # Every second column is that of a slab of two, at most.
    WIDTH: gl.constexpr = COLUMNS if columns is None else 2 * COLUMNS
    if columns is None:
        columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    is_column = columns < (num_columns - first_column if HAS_COLUMN_TAIL else WIDTH)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert.to(gl.int64) * (NUM_HALVES * num_columns) + first_column
        gate_bias = gl.load(bias_ptrs + columns, mask=is_column, other=0.0).to(gl.float32)
        gate += gl.expand_dims(gate_bias, 0)
        if NUM_HALVES == 2:
            up_ptrs = bias_ptrs + num_columns + columns
            up_bias = gl.load(up_ptrs, mask=is_column, other=0.0).to(gl.float32)
            up += gl.expand_dims(up_bias, 0)
    result = activate(gate, up, alpha, limit, ACTIVATION)
    if row_weights is not None:
        result *= gl.expand_dims(row_weights, 1)
    mask = gl.expand_dims(is_row, 1) & gl.expand_dims(is_column, 0)
    if out_scales_ptr is not None:
        # As `quantize_group` of kernels/quant/fp8_rows.py; these columns are one group.
        gl.static_assert(COLUMNS == 128)
        if HAS_COLUMN_TAIL:
            result = gl.where(mask, result, 0.0)
        numbers = gl.where(result == result, gl.abs(result), 0.0)
        amax = gl.maximum(gl.max(numbers, axis=1), 448.0 * 2.0**-126)
        scales = gl.div_rn(amax, 448.0)
        result *= gl.expand_dims(gl.div_rn(448.0, amax), 1)
        num_groups = gl.cdiv(num_columns, 128)
        scale_ptrs = out_scales_ptr + out_rows * num_groups + first_column // 128
        # The second half of an ungated block may lie wholly past the last column.
        gl.store(scale_ptrs, scales, mask=is_row & (first_column < num_columns))
    offsets = gl.expand_dims(out_rows * num_columns, 1) + gl.expand_dims(columns, 0)
    gl.store(out_ptr + first_column + offsets, result.to(out_ptr.dtype.element_ty), mask=mask)
