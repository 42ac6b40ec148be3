"""Which ranks have which value."""

import pytest

from ep_runtime.disagreement import disagreement, ranks_by_value


@pytest.mark.parametrize(
    ("values", "ranks", "grouped", "text"),
    [
        (("a", "b", "a"), (4, 5, 6), {"a": [4, 6], "b": [5]}, "a on ranks [4, 6], b on ranks [5]"),
        ((2, 1), (0, 1), {2: [0], 1: [1]}, "2 on ranks [0], 1 on ranks [1]"),
        ((7, 7, 7), (1, 2, 3), {7: [1, 2, 3]}, None),
        ((), (), {}, None),
    ],
)
def test_equal_values_share_a_group_in_the_order_of_their_first_rank(
    values: tuple[object, ...],
    ranks: tuple[int, ...],
    grouped: dict[object, list[int]],
    text: str | None,
) -> None:
    found = ranks_by_value(values, ranks)
    assert list(found.items()) == list(grouped.items())
    assert disagreement(values, ranks) == text


def test_every_rank_has_a_value() -> None:
    with pytest.raises(ValueError, match="zip"):
        ranks_by_value(("a",), (0, 1))
