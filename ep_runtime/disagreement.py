"""Which ranks have which value, for the errors of ranks that must agree."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def ranks_by_value(values: Sequence[Value], ranks: Sequence[int]) -> dict[Value, list[int]]:
    """Each value with the ranks that have it, in the order of their first.

    values[i] is what ranks[i] has. Example: a, b, a of ranks 4, 5, 6: {a: [4, 6], b: [5]}.
    """
    found: dict[Value, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        found.setdefault(value, []).append(rank)
    return found


def disagreement(values: Sequence[Hashable], ranks: Sequence[int]) -> str | None:
    """The values and who has each; None where all ranks have one.

    Example: a, b, a of ranks 4, 5, 6: "a on ranks [4, 6], b on ranks [5]".
    """
    found = ranks_by_value(values, ranks)
    if len(found) < 2:
        return None
    return ", ".join(f"{value} on ranks {members}" for value, members in found.items())
