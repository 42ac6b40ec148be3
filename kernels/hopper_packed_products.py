"""The products of Hopper's packed GEMM: units of 64 x 64 weights, converted beside the matrix unit.

kernels/hopper_packed_gemm.py says how they belong together. A consumer has 128 rows of W as two
slabs; a *unit* is 64 columns of one of them, units 2 i and 2 i + 1 of a stage are chunk i of both.
`operands` are the stages (x [S * chunks, height, 64], words [.., 32, 32], factors [.., 32, 4]) and
the barriers full, empty and turn.
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

from ep_runtime.kernels.hopper_packed_values import (
    FACTORS,
    WORDS,
    fragment_of,
    of_halves,
    split_factors,
)
from ep_runtime.kernels.hopper_tiles import next_stage

# What a launch is, and where it stands in KIND.
AT_CONSUMERS = gl.constexpr(0)
AT_ACTIVATION = gl.constexpr(1)
AT_COLUMN_TAIL = gl.constexpr(2)
AT_GROUP_TILES = gl.constexpr(3)
AT_GATHERS = gl.constexpr(4)
AT_SCALES_SUMS = gl.constexpr(5)
AT_PARTS = gl.constexpr(6)  # of a group's factors: scales, centres
AT_HEIGHT = gl.constexpr(7)
AT_CUTS_TILES = gl.constexpr(8)
AT_LEAD = gl.constexpr(9)
AT_STORED = gl.constexpr(10)
AT_SHORT_GROUPS = gl.constexpr(11)  # whether a chunk has two groups


@gluon.jit
def _locate(operands, stage, UNIT: gl.constexpr, CONSUMER: gl.constexpr, KIND: gl.constexpr):
    """Where a unit's words are, and the first of its group's factors."""
    _, word_stages, factor_stages, full, _, _ = operands
    COPIES: gl.constexpr = full.shape[0] * KIND[AT_CONSUMERS]
    UNITS: gl.constexpr = word_stages.shape[0] // COPIES
    GROUPS: gl.constexpr = factor_stages.shape[0] // (COPIES * KIND[AT_PARTS])
    # Both slabs have a chunk's groups in common.
    FIRST: gl.constexpr = UNIT // 2 * (2 * GROUPS) // UNITS
    part = stage * KIND[AT_CONSUMERS] + CONSUMER
    return part * UNITS + UNIT, (part * GROUPS + FIRST) * KIND[AT_PARTS]


@gluon.jit
def _factors_at(operands, at, UNIT: gl.constexpr, KIND: gl.constexpr):
    """Of a unit's slab, from factors `at` on: of the upper and of the lower rows, [32, 1] each, or
    by word [32, 32] where a chunk has two groups of columns."""
    factors = split_factors(operands[2].index(at).load(FACTORS))[UNIT % 2]
    if KIND[AT_SHORT_GROUPS]:
        factors = of_halves(
            factors, split_factors(operands[2].index(at + KIND[AT_PARTS]).load(FACTORS))[UNIT % 2]
        )
    return factors


@gluon.jit
def _fetch(operands, stage, UNIT: gl.constexpr, CONSUMER: gl.constexpr, KIND: gl.constexpr):
    """What makes a unit's fragment: words [32, 32], scales unless they multiply sums, centres."""
    words_at, factors_at = _locate(operands, stage, UNIT, CONSUMER, KIND)
    words = operands[1].index(words_at).load(WORDS)
    if KIND[AT_PARTS] == 2:
        centres = _factors_at(operands, factors_at + 1, UNIT, KIND)
        if KIND[AT_SCALES_SUMS]:
            return words, centres
        else:
            return words, _factors_at(operands, factors_at, UNIT, KIND), centres
    elif KIND[AT_SCALES_SUMS]:
        return (words,)
    else:
        return words, _factors_at(operands, factors_at, UNIT, KIND)


@gluon.jit
def _convert(fetched, OPERAND: gl.constexpr, DTYPE: gl.constexpr, KIND: gl.constexpr):
    """A unit as the matrix unit's left operand [64, 64]."""
    if KIND[AT_PARTS] == 2:
        if KIND[AT_SCALES_SUMS]:
            return fragment_of(fetched[0], None, fetched[1], OPERAND, DTYPE, KIND[AT_STORED])
        else:
            return fragment_of(fetched[0], fetched[1], fetched[2], OPERAND, DTYPE, KIND[AT_STORED])
    elif KIND[AT_SCALES_SUMS]:
        return fragment_of(fetched[0], None, None, OPERAND, DTYPE, KIND[AT_STORED])
    else:
        return fragment_of(fetched[0], fetched[1], None, OPERAND, DTYPE, KIND[AT_STORED])


@gluon.jit
def _scale_sum(
    total, part, operands, stage, UNIT: gl.constexpr, CONSUMER: gl.constexpr, KIND: gl.constexpr
):
    """total + a group's sum of products, times its scales: the group that UNIT ends."""
    _, factors_at = _locate(operands, stage, UNIT, CONSUMER, KIND)
    upper, lower = _factors_at(operands, factors_at, UNIT, KIND)
    scales = gl.join(upper, lower).reshape([4, 8, 2]).permute([0, 2, 1]).reshape([64])
    scales = gl.convert_layout(scales, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return total + part * gl.expand_dims(scales.to(gl.float32), 1)


@gluon.jit
def multiply_scaling_sums(
    operands,
    stage,
    phase,
    num_k_blocks,
    CONSUMER: gl.constexpr,
    KIND: gl.constexpr,
):
    """An item's products, of which a group's sum is scaled: both slabs' [64, height], ring's place.

    Conversions are half as long so, and a low tile's sums few. A unit is converted while the
    product of the one before it runs.
    """
    x_stages, _, factor_stages, full, empty, _ = operands
    STAGES: gl.constexpr = full.shape[0]
    HEIGHT: gl.constexpr = x_stages.shape[1]
    CHUNKS: gl.constexpr = x_stages.shape[0] // STAGES
    UNITS: gl.constexpr = 2 * CHUNKS
    # Chunks whose products are summed before a scale multiplies the sum.
    SUMMED: gl.constexpr = (
        CHUNKS * STAGES * KIND[AT_CONSUMERS] * KIND[AT_PARTS] // factor_stages.shape[0]
    )
    DTYPE: gl.constexpr = x_stages.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc0 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    acc1 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    total0 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    total1 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    mbarrier.wait(full.index(stage), phase)
    ready = _convert(_fetch(operands, stage, 0, CONSUMER, KIND), OPERAND, DTYPE, KIND)
    for k_block in range(num_k_blocks):
        if KIND[AT_GATHERS]:
            fence_async_shared()
        for unit in gl.static_range(UNITS):
            x = x_stages.index(stage * CHUNKS + unit // 2).permute([1, 0])
            use_acc = unit // 2 % SUMMED > 0
            if unit % 2 == 0:
                acc0 = warpgroup_mma(ready, x, acc0, use_acc=use_acc, is_async=True)
            else:
                acc1 = warpgroup_mma(ready, x, acc1, use_acc=use_acc, is_async=True)
            if unit > 0:
                acc0, acc1 = warpgroup_mma_wait(1, deps=[acc0, acc1])
                if (unit - 1) // 2 % SUMMED == SUMMED - 1:
                    if unit % 2 == 1:
                        total0 = _scale_sum(total0, acc0, operands, stage, unit - 1, CONSUMER, KIND)
                    else:
                        total1 = _scale_sum(total1, acc1, operands, stage, unit - 1, CONSUMER, KIND)
            if unit + 1 < UNITS:
                fetched = _fetch(operands, stage, unit + 1, CONSUMER, KIND)
                ready = _convert(fetched, OPERAND, DTYPE, KIND)
            else:
                done = stage
                stage, phase = next_stage(stage, phase, STAGES)
                mbarrier.wait(full.index(stage), phase, pred=k_block + 1 < num_k_blocks)
                fetched = _fetch(operands, stage, 0, CONSUMER, KIND)
                ready = _convert(fetched, OPERAND, DTYPE, KIND)
                acc0, acc1, ready = warpgroup_mma_wait(0, deps=[acc0, acc1, ready])
                total1 = _scale_sum(total1, acc1, operands, done, unit, CONSUMER, KIND)
                mbarrier.arrive(empty.index(done))
    return total0, total1, stage, phase


@gluon.jit
def _rows_of(x_stages, at, FIRST: gl.constexpr, ROWS: gl.constexpr):
    """Rows FIRST to FIRST + ROWS - 1 of a chunk of x, as the right operand [64, ROWS]."""
    chunk = x_stages.index(at)
    if x_stages.shape[1] != ROWS:
        chunk = chunk.slice(FIRST, ROWS)
    return chunk.permute([1, 0])


@gluon.jit
def multiply_scaled(
    operands,
    stage,
    phase,
    parity,
    num_k_blocks,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    CONSUMER: gl.constexpr,
    KIND: gl.constexpr,
):
    """An item's products with scaled weights, of the first FIRST rows and the SECOND after them.

    Both slabs' sums [64, FIRST], both of [64, SECOND] (where that is 0 the first again), the ring's
    next place. Of three units at a time one multiplies, the next becomes a fragment, and of the one
    after it words are fetched, so that conversions are between a unit's products, also from stage
    to stage. Consumer 1 waits for its turn in items of this parity, when consumer 0 has finished
    LEAD stages of its own: then the epilogue of each is under the other's products. ptxas runs all
    products one by one where one is still under way at the loop's end while a fragment is made.
    """
    x_stages, _, _, full, empty, turn = operands
    STAGES: gl.constexpr = full.shape[0]
    CHUNKS: gl.constexpr = x_stages.shape[0] // STAGES
    UNITS: gl.constexpr = 2 * CHUNKS
    LEAD: gl.constexpr = KIND[AT_LEAD]
    DTYPE: gl.constexpr = x_stages.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
    REST: gl.constexpr = FIRST if SECOND == 0 else SECOND
    REST_MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    REST_OPERAND: gl.constexpr = gl.DotOperandLayout(0, REST_MMA, 2)
    acc0 = gl.full([64, FIRST], 0.0, gl.float32, MMA)
    acc1 = gl.full([64, FIRST], 0.0, gl.float32, MMA)
    if SECOND > 0:
        rest0 = gl.full([64, REST], 0.0, gl.float32, REST_MMA)
        rest1 = gl.full([64, REST], 0.0, gl.float32, REST_MMA)
    takes_turns = num_k_blocks >= STAGES
    if LEAD > 0 and CONSUMER == 1:
        mbarrier.wait(turn, parity, pred=takes_turns)
    mbarrier.wait(full.index(stage), phase)
    ready = _convert(_fetch(operands, stage, 0, CONSUMER, KIND), OPERAND, DTYPE, KIND)
    fetched = _fetch(operands, stage, 1, CONSUMER, KIND)
    for k_block in range(num_k_blocks):
        if KIND[AT_GATHERS]:
            fence_async_shared()
        following, following_phase = next_stage(stage, phase, STAGES)
        for unit in gl.static_range(UNITS):
            at = stage * CHUNKS + unit // 2
            x = _rows_of(x_stages, at, 0, FIRST)
            use_acc = (k_block > 0) | (unit > 1)
            if unit % 2 == 0:
                acc0 = warpgroup_mma(ready, x, acc0, use_acc=use_acc, is_async=True)
            else:
                acc1 = warpgroup_mma(ready, x, acc1, use_acc=use_acc, is_async=True)
            if SECOND > 0:
                rest = gl.convert_layout(ready, REST_OPERAND, assert_trivial=True)
                x = _rows_of(x_stages, at, FIRST, REST)
                if unit % 2 == 0:
                    rest0 = warpgroup_mma(rest, x, rest0, use_acc=use_acc, is_async=True)
                else:
                    rest1 = warpgroup_mma(rest, x, rest1, use_acc=use_acc, is_async=True)
            if unit > 0:
                if SECOND > 0:
                    acc0, acc1, rest0, rest1 = warpgroup_mma_wait(
                        2, deps=[acc0, acc1, rest0, rest1]
                    )
                else:
                    acc0, acc1 = warpgroup_mma_wait(1, deps=[acc0, acc1])
            ready = _convert(fetched, OPERAND, DTYPE, KIND)
            if unit + 2 < UNITS:
                fetched = _fetch(operands, stage, unit + 2, CONSUMER, KIND)
            else:
                if unit + 2 == UNITS:
                    more = k_block + 1 < num_k_blocks
                    mbarrier.wait(full.index(following), following_phase, pred=more)
                fetched = _fetch(operands, following, unit + 2 - UNITS, CONSUMER, KIND)
        if SECOND > 0:
            acc0, acc1, rest0, rest1, ready = warpgroup_mma_wait(
                0, deps=[acc0, acc1, rest0, rest1, ready]
            )
        else:
            acc0, acc1, ready = warpgroup_mma_wait(0, deps=[acc0, acc1, ready])
        mbarrier.arrive(empty.index(stage))
        if LEAD > 0 and CONSUMER == 0:
            mbarrier.arrive(turn, pred=takes_turns & (k_block == LEAD - 1))
        stage, phase = following, following_phase
    if SECOND > 0:
        return acc0, acc1, rest0, rest1, stage, phase
    else:
        return acc0, acc1, acc0, acc1, stage, phase
