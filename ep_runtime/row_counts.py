"""How many rows each rank has, and which of a DP group's rows a TP rank works on."""

from collections.abc import Sequence
from dataclasses import dataclass

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import gather_integer_rows
from ep_runtime.config import ParallelConfig
from ep_runtime.disagreement import ranks_by_value
from ep_runtime.kernels.errors import ConfigError


@dataclass(frozen=True)
class RowCounts:
    """What the ranks agreed on for one forward.

    num_tokens: rows of this rank's DP group. rows_per_rank: rows of each EP rank's slice.
    any_rows: whether any rank that takes part in the agreement has rows.
    """

    num_tokens: int
    rows_per_rank: tuple[int, ...]
    any_rows: bool


def refuse_negative_rows(num_tokens: int, where: str = "") -> None:
    """ConfigError where a number of rows is below 0."""
    if num_tokens < 0:
        raise ConfigError(f"num_tokens is {num_tokens}{where}; a rank has 0 rows or more")


def tp_slice(num_tokens: int, tp_size: int, tp_rank: int) -> slice:
    """The contiguous rows of a TP rank: ceil(num_tokens / tp_size) each, the last may have none.

    Example: 5 rows on 4 ranks: [0, 2), [2, 4), [4, 5), [5, 5).
    """
    rows = -(-num_tokens // tp_size)
    start = min(tp_rank * rows, num_tokens)
    return slice(start, min(start + rows, num_tokens))


def slice_counts(tokens_of: Sequence[int], first_rank: int, tp_size: int) -> tuple[int, ...]:
    """Rows of each rank's slice, where tokens_of[i] is what rank first_rank + i holds whole.

    Example: tp_size 2, ranks 0.. hold 5, 5, 8, 8 rows: (3, 2, 4, 4).
    """
    slices = [
        tp_slice(tokens, tp_size, (first_rank + i) % tp_size) for i, tokens in enumerate(tokens_of)
    ]
    return tuple(part.stop - part.start for part in slices)


def agree_row_counts(
    num_tokens: int, parallel: ParallelConfig, *, call: int, world_rank: int, group: EPGroup
) -> RowCounts:
    """Gather every rank's row count; a collective of `group`.

    call: an int64 that is the same on ranks that make the same call. group: the smallest one that
    holds whole EP groups and whole TP groups. Raises ConfigError on all of its ranks where a count
    is negative, ranks make different calls, or the TP ranks of a DP group hold different numbers
    of rows.
    """
    tokens_of, calls = zip(*gather_integer_rows((num_tokens, call), group), strict=True)
    first_rank, tp_size = world_rank - group.rank, parallel.tp_size
    _refuse_different_calls(calls, first_rank)
    for rank, tokens in enumerate(tokens_of, first_rank):
        refuse_negative_rows(tokens, f" on rank {rank}")
    for start in range(0, group.size, tp_size):
        held = tokens_of[start : start + tp_size]
        if len(set(held)) > 1:
            ranks = list(range(first_rank + start, first_rank + start + tp_size))
            raise ConfigError(
                f"num_tokens is {list(held)} on ranks {ranks}, the TP ranks of one DP group; with "
                f"tp_size ({tp_size}) they must hold the same rows"
            )
    first_of_ep_group = group.rank // parallel.ep_size * parallel.ep_size
    members = tokens_of[first_of_ep_group : first_of_ep_group + parallel.ep_size]
    rows_per_rank = slice_counts(members, first_rank + first_of_ep_group, tp_size)
    return RowCounts(num_tokens, rows_per_rank, any_rows=any(tokens_of))


def _refuse_different_calls(calls: Sequence[int], first_rank: int) -> None:
    ranks_of_call = ranks_by_value(calls, range(first_rank, first_rank + len(calls)))
    if len(ranks_of_call) > 1:
        shown = ", ".join(f"ranks {ranks}" for ranks in ranks_of_call.values())
        raise ConfigError(
            f"{shown} are in different calls (another layer, or ctx.step and a layer outside of "
            f"it); every rank makes the same calls in the same order"
        )
