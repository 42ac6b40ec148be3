"""A call of very many rows as several, so that what it takes of the workspace is bounded.

Shapes: R rows, K slots a row, H hidden size.
"""

from collections.abc import Iterator

from torch import Tensor

from ep_runtime.kernels.base import StandardExpertInput

# Bounds the workspace, which holds every slot's output: 3.5 GiB of those at hidden 7168 in bf16.
# Under EP most slots are empty, so the rows here of a pass may be few: 4 passes of 65536 slots in
# place of one cost 11 % (8 of 256 experts here, 4096 tokens on each of 32 ranks), in partly filled
# last tiles of experts and last waves of programs.
MAX_SLOTS_PER_PASS = 1 << 18


def rows_per_pass(top_k: int) -> int:
    """The most rows of one pass."""
    return max(1, MAX_SLOTS_PER_PASS // top_k)


def row_passes(
    expert_input: StandardExpertInput, output: Tensor
) -> Iterator[tuple[StandardExpertInput, Tensor]]:
    """Rows [n, H] of each pass, in order, and their part of `output` [R, H], a view."""
    step = rows_per_pass(expert_input.topk_ids.shape[1])
    for first in range(0, len(expert_input.hidden_states), step):
        part = slice(first, first + step)
        yield _rows_of(expert_input, part), output[part]


def _rows_of(expert_input: StandardExpertInput, part: slice) -> StandardExpertInput:
    """Some of the rows, as an input of their own."""
    if part.start == 0 and part.stop >= expert_input.hidden_states.shape[0]:
        return expert_input
    num_rows, scales = expert_input.num_rows, expert_input.scales
    num_source_rows = expert_input.num_source_rows
    if num_source_rows is not None:  # the part's share
        all_rows = len(expert_input.hidden_states)
        num_source_rows = num_source_rows * len(expert_input.hidden_states[part]) // all_rows
    return StandardExpertInput(
        hidden_states=expert_input.hidden_states[part],
        topk_ids=expert_input.topk_ids[part],
        topk_weights=expert_input.topk_weights[part],
        num_rows=None if num_rows is None else num_rows - part.start,
        scales=None if scales is None else scales[part],
        num_source_rows=num_source_rows,
    )
