"""The products of Hopper's packed GEMM: units of 64 x 64 weights, converted beside the matrix unit.

kernels/hopper_packed_gemm.py says how they belong together. A block of W is 128 rows, two slabs; a
*unit* is 64 columns of one of them, units 2 i and 2 i + 1 of a block's stage are chunk i of both. A
consumer has both slabs of a block, or one; its *steps* are its units of a stage, in order.
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
    from_word,
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
AT_LEAD = gl.constexpr(8)
AT_STORED = gl.constexpr(9)
AT_CHUNK_GROUPS = gl.constexpr(10)  # of columns, of a chunk: 1, 2 or 4
AT_SLABS = gl.constexpr(11)  # of a consumer
AT_SPLIT = gl.constexpr(12)  # parts of K that a column block's items have


@gluon.constexpr_function
def unit_of(step, consumer, slabs):
    """A consumer's step as a unit of its block."""
    return step if slabs == 2 else 2 * step + consumer % 2


@gluon.constexpr_function
def stages_at_a_time(num_chunks, slabs, is_full):
    """Stages whose products `multiply_scaled` runs without a break: of eight steps where a tile of
    128 rows is full, else of four, since there are more kinds of code then."""
    return max(1, (8 if is_full else 4) // (num_chunks * slabs))


@gluon.jit
def _locate(operands, stage, UNIT: gl.constexpr, CONSUMER: gl.constexpr, KIND: gl.constexpr):
    """Where a unit's words are, and the first of its group's factors."""
    _, word_stages, factor_stages, full, _, _ = operands
    BLOCKS: gl.constexpr = KIND[AT_CONSUMERS] * KIND[AT_SLABS] // 2
    COPIES: gl.constexpr = full.shape[0] * BLOCKS
    UNITS: gl.constexpr = word_stages.shape[0] // COPIES
    GROUPS: gl.constexpr = factor_stages.shape[0] // (COPIES * KIND[AT_PARTS])
    # Both slabs have a chunk's groups in common.
    FIRST: gl.constexpr = UNIT // 2 * (2 * GROUPS) // UNITS
    part = stage * BLOCKS + CONSUMER * KIND[AT_SLABS] // 2
    return part * UNITS + UNIT, (part * GROUPS + FIRST) * KIND[AT_PARTS]


@gluon.jit
def _factors_at(operands, at, UNIT: gl.constexpr, KIND: gl.constexpr):
    """Of a unit's slab, from factors `at` on: of the upper and of the lower rows, [32, 1] each, or
    by word [32, 32] where a chunk has more than one group of columns."""
    factors = split_factors(operands[2].index(at).load(FACTORS))[UNIT % 2]
    for group in gl.static_range(1, KIND[AT_CHUNK_GROUPS]):
        following = operands[2].index(at + group * KIND[AT_PARTS]).load(FACTORS)
        following = split_factors(following)[UNIT % 2]
        factors = from_word(factors, following, 4 * group // KIND[AT_CHUNK_GROUPS])
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
    total, part, operands, stage, STEP: gl.constexpr, CONSUMER: gl.constexpr, KIND: gl.constexpr
):
    """total + a group's sum of products, times its scales: the group that STEP ends."""
    UNIT: gl.constexpr = unit_of(STEP, CONSUMER, KIND[AT_SLABS])
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
    """An item's products, of which a group's sum is scaled: each slab's [64, height], ring's place.

    Conversions are half as long so, and a low tile's sums few. A unit is converted while the
    product of the one before it runs, into the other of two sums: of the other slab, or where a
    consumer has one slab of every second chunk.
    """
    x_stages, _, factor_stages, full, empty, _ = operands
    STAGES: gl.constexpr = full.shape[0]
    HEIGHT: gl.constexpr = x_stages.shape[1]
    CHUNKS: gl.constexpr = x_stages.shape[0] // STAGES
    SLABS: gl.constexpr = KIND[AT_SLABS]
    STEPS: gl.constexpr = SLABS * CHUNKS
    # Chunks whose products are summed before a scale multiplies the sum.
    SUMMED: gl.constexpr = (
        CHUNKS * STAGES * (KIND[AT_CONSUMERS] * SLABS // 2) * KIND[AT_PARTS]
    ) // factor_stages.shape[0]
    # The number of chunks that begin sums of a group; as many end them.
    FIRST: gl.constexpr = 2 // SLABS
    DTYPE: gl.constexpr = x_stages.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEIGHT, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    acc0 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    acc1 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    total0 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    total1 = gl.full([64, HEIGHT], 0.0, gl.float32, MMA)
    mbarrier.wait(full.index(stage), phase)
    if KIND[AT_GATHERS]:
        fence_async_shared()
    fetched = _fetch(operands, stage, unit_of(0, CONSUMER, SLABS), CONSUMER, KIND)
    ready = _convert(fetched, OPERAND, DTYPE, KIND)
    for k_block in range(num_k_blocks):
        for step in gl.static_range(STEPS):
            x = x_stages.index(stage * CHUNKS + step // SLABS).permute([1, 0])
            use_acc = step // SLABS % SUMMED >= FIRST
            if step % 2 == 0:
                acc0 = warpgroup_mma(ready, x, acc0, use_acc=use_acc, is_async=True)
            else:
                acc1 = warpgroup_mma(ready, x, acc1, use_acc=use_acc, is_async=True)
            if step > 0:
                acc0, acc1 = warpgroup_mma_wait(1, deps=[acc0, acc1])
                if (step - 1) // SLABS % SUMMED >= SUMMED - FIRST:
                    if step % 2 == 1:
                        total0 = _scale_sum(total0, acc0, operands, stage, step - 1, CONSUMER, KIND)
                    else:
                        total1 = _scale_sum(total1, acc1, operands, stage, step - 1, CONSUMER, KIND)
            if step + 1 < STEPS:
                fetched = _fetch(
                    operands, stage, unit_of(step + 1, CONSUMER, SLABS), CONSUMER, KIND
                )
                ready = _convert(fetched, OPERAND, DTYPE, KIND)
            else:
                done = stage
                stage, phase = next_stage(stage, phase, STAGES)
                mbarrier.wait(full.index(stage), phase, pred=k_block + 1 < num_k_blocks)
                if KIND[AT_GATHERS]:
                    fence_async_shared()
                fetched = _fetch(operands, stage, unit_of(0, CONSUMER, SLABS), CONSUMER, KIND)
                ready = _convert(fetched, OPERAND, DTYPE, KIND)
                acc0, acc1, ready = warpgroup_mma_wait(0, deps=[acc0, acc1, ready])
                total1 = _scale_sum(total1, acc1, operands, done, step, CONSUMER, KIND)
                mbarrier.arrive(empty.index(done))
    if SLABS == 2:
        return (total0, total1), stage, phase
    else:
        return (total0 + total1,), stage, phase


@gluon.jit
def _first_rows(x_stages, at, ROWS: gl.constexpr):
    """Of a chunk of x, as the right operand [64, ROWS]."""
    chunk = x_stages.index(at)
    if x_stages.shape[1] != ROWS:
        chunk = chunk.slice(0, ROWS)
    return chunk.permute([1, 0])


@gluon.jit
def _release(operands, stage, k_block, takes_turns, CONSUMER: gl.constexpr, KIND: gl.constexpr):
    """Give a stage back whose products are done; and, from consumer 0, the turn to consumer 1."""
    mbarrier.arrive(operands[4].index(stage))
    if KIND[AT_LEAD] > 0 and CONSUMER == 0:
        mbarrier.arrive(operands[5], pred=takes_turns & (k_block == KIND[AT_LEAD] - 1))


@gluon.jit
def _zeros(ROWS: gl.constexpr, SLABS: gl.constexpr):
    """Sums of each slab [64, ROWS]."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if SLABS == 2:
        return (
            gl.full([64, ROWS], 0.0, gl.float32, MMA),
            gl.full([64, ROWS], 0.0, gl.float32, MMA),
        )
    else:
        return (gl.full([64, ROWS], 0.0, gl.float32, MMA),)


@gluon.jit
def _wait_for_others(sums):
    """Sums, when of their products only the last one is under way."""
    waited = warpgroup_mma_wait(1, deps=sums)
    if len(sums) == 1:
        return (waited,)
    else:
        return waited


@gluon.jit
def _add_product(sums, at: gl.constexpr, weights, x, use_acc):
    """Sums, of which that at `at` gets a product that is under way."""
    added = warpgroup_mma(weights, x, sums[at], use_acc=use_acc, is_async=True)
    return sums[:at] + (added,) + sums[at + 1 :]  # noqa: RUF005 - Triton has no starred items


@gluon.jit
def multiply_scaled(
    operands,
    stage,
    phase,
    parity,
    num_k_blocks,
    ROWS: gl.constexpr,
    CONSUMER: gl.constexpr,
    KIND: gl.constexpr,
):
    """An item's products with scaled weights, of the first ROWS rows of its tile.

    Each slab's sums [64, ROWS] and the ring's next place. Of three units at a time one multiplies,
    the next becomes a fragment, and of the one after it words are fetched, so that conversions are
    between a unit's products, also from stage to stage. After `stages_at_a_time`, of which the ring
    is given a multiple, products end before the next begin: ptxas runs all products one by one
    where one is still under way at the loop's end while a fragment is made. Consumer 1 waits for
    its turn in items of this parity, when consumer 0 has finished LEAD stages of its own: then the
    epilogue of each is under the other's products.
    """
    x_stages, _, _, full, _, turn = operands
    STAGES: gl.constexpr = full.shape[0]
    CHUNKS: gl.constexpr = x_stages.shape[0] // STAGES
    SLABS: gl.constexpr = KIND[AT_SLABS]
    STEPS: gl.constexpr = SLABS * CHUNKS
    BLOCKS: gl.constexpr = stages_at_a_time(CHUNKS, SLABS, ROWS == 128)
    LEAD: gl.constexpr = KIND[AT_LEAD]
    DTYPE: gl.constexpr = x_stages.dtype
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    sums = _zeros(ROWS, SLABS)
    takes_turns = num_k_blocks >= STAGES
    if LEAD > 0 and CONSUMER == 1:
        mbarrier.wait(turn, parity, pred=takes_turns)
    mbarrier.wait(full.index(stage), phase)
    if KIND[AT_GATHERS]:
        fence_async_shared()
    ready = _convert(
        _fetch(operands, stage, unit_of(0, CONSUMER, SLABS), CONSUMER, KIND), OPERAND, DTYPE, KIND
    )
    fetched = _fetch(operands, stage, unit_of(1, CONSUMER, SLABS), CONSUMER, KIND)
    for first_block in range(0, num_k_blocks, BLOCKS):
        done = stage
        for part in gl.static_range(BLOCKS):
            k_block = first_block + part
            following, following_phase = next_stage(stage, phase, STAGES)
            for step in gl.static_range(STEPS):
                at = stage * CHUNKS + step // SLABS
                use_acc = (k_block > 0) | (step >= SLABS)
                x = _first_rows(x_stages, at, ROWS)
                sums = _add_product(sums, step % SLABS, ready, x, use_acc)
                if part + step > 0:
                    sums = _wait_for_others(sums)
                    if step == 0:
                        _release(operands, done, k_block - 1, takes_turns, CONSUMER, KIND)
                ready = _convert(fetched, OPERAND, DTYPE, KIND)
                if step + 2 < STEPS:
                    fetched = _fetch(
                        operands, stage, unit_of(step + 2, CONSUMER, SLABS), CONSUMER, KIND
                    )
                else:
                    if step + 2 == STEPS:
                        more = k_block + 1 < num_k_blocks
                        mbarrier.wait(full.index(following), following_phase, pred=more)
                        if KIND[AT_GATHERS]:
                            fence_async_shared()
                    fetched = _fetch(
                        operands,
                        following,
                        unit_of(step + 2 - STEPS, CONSUMER, SLABS),
                        CONSUMER,
                        KIND,
                    )
            done = stage
            stage, phase = following, following_phase
        # The fragment among them: it is made before the wait.
        waited = warpgroup_mma_wait(0, deps=sums + (ready,))  # noqa: RUF005
        sums = waited[:SLABS]
        ready = waited[SLABS]
        _release(operands, done, first_block + BLOCKS - 1, takes_turns, CONSUMER, KIND)
    return sums, stage, phase
