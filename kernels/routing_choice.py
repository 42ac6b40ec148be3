"""The choice among scores inside a kernel: the largest, of equal ones the lowest index; groups.

`kernels/routing.py` defines it.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-(1 << 62) * 2 + 1)
_INDEX_MASK: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@triton.jit
def rankable(values, indices):
    """int64 that rise with float32 values and, of equal ones, fall with the index."""
    bits = values.to(tl.int32, bitcast=True)
    rising = tl.where(bits < 0, bits ^ _INDEX_MASK, bits).to(tl.int64)
    return rising << 32 | (indices ^ _INDEX_MASK).to(tl.int64)


@triton.jit
def index_of(ranked):
    """The index in what `rankable` made."""
    return (ranked & _INDEX_MASK).to(tl.int32) ^ _INDEX_MASK


@triton.jit
def best_groups(
    choice,  # [rows, EP] float32, -inf past the experts
    experts,  # [EP]
    group_size,
    N_GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    GROUP_SCORE: tl.constexpr,
):
    """Whether an expert's group is among its row's TOPK_GROUP best, [rows, EP]."""
    BLOCK_ROWS: tl.constexpr = choice.shape[0]
    groups = tl.arange(0, BLOCK_GROUPS)
    group_of = (experts // group_size)[None, :]
    scores = tl.full([BLOCK_ROWS, BLOCK_GROUPS], float("-inf"), tl.float32)
    for group in range(N_GROUP):
        members = tl.where(group_of == group, choice, float("-inf"))
        score = tl.max(members, axis=1)
        if GROUP_SCORE == "top2_sum":
            best = index_of(tl.max(rankable(members, experts[None, :]), axis=1))
            others = tl.where(experts[None, :] == best[:, None], float("-inf"), members)
            score += tl.max(others, axis=1)
        scores = tl.where(groups[None, :] == group, score[:, None], scores)
    ranked = tl.where(groups[None, :] < N_GROUP, rankable(scores, groups[None, :]), LOWEST)
    is_best = tl.zeros(choice.shape, tl.int1)
    for _ in range(TOPK_GROUP):
        best = index_of(tl.max(ranked, axis=1))
        ranked = tl.where(groups[None, :] == best[:, None], LOWEST, ranked)
        is_best = is_best | (group_of == best[:, None])
    return is_best
