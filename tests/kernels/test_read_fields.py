"""Values of a JSON file become a dataclass's fields, of exactly the types it declares."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from ep_runtime.kernels.read_fields import read_fields


@dataclass(frozen=True)
class Inner:
    size: int | None


@dataclass(frozen=True)
class Outer:
    count: int
    share: float
    name: str
    is_on: bool
    most: int | None = None
    scale: float | None = None
    inner: Inner | None = None


@dataclass(frozen=True)
class Undecided:
    either: int | str


@dataclass(frozen=True)
class Several:
    sizes: tuple[int, ...]


GIVEN = {"count": 3, "share": 0.5, "name": "x", "is_on": True}


def read(**changes: Any) -> Outer:
    """What a file with these values gives."""
    return read_fields(Outer, json.loads(json.dumps({**GIVEN, **changes})), "at")


def test_values_of_the_declared_types_are_read() -> None:
    assert read() == Outer(3, 0.5, "x", True)
    assert read(share=2, most=7, scale=3, inner={"size": None}) == Outer(
        3, 2.0, "x", True, 7, 3.0, Inner(None)
    )
    assert type(read(scale=3).scale) is float
    assert read(most=None, scale=None, inner=None) == read()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *[("count", value, "must be of type int") for value in ("3", 3.0, True, None, [3])],
        *[("share", value, "must be of type float") for value in ("0.5", True, None)],
        *[("name", value, "must be of type str") for value in (3, None)],
        *[("is_on", value, "must be of type bool") for value in (1, 0, "true", None)],
        *[("most", value, "must be of type int, or null") for value in ("128", 128.0, True, [4])],
        *[("scale", value, "must be of type float, or null") for value in ("0.5", False)],
    ],
)
def test_another_type_is_an_error_that_names_the_key(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"^at.{key} ") as error:
        read(**{key: value})
    assert str(error.value) == f"at.{key} ({value!r}) {said}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": "4"}, r"^at\.inner\.size \('4'\) must be of type int, or null$"),
        ({"sizes": 4}, r"^at\.inner\.sizes is an unknown key"),
        (4, r"^at\.inner must be a mapping; got 4$"),
    ],
)
def test_an_error_in_a_nested_field_names_its_place(given: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(inner=given)


@pytest.mark.parametrize(("cls", "key"), [(Undecided, "either"), (Several, "sizes")])
def test_a_field_of_a_type_that_cannot_be_checked_is_never_read(cls: type, key: str) -> None:
    with pytest.raises(TypeError, match=f"at.{key}"):
        read_fields(cls, {key: 3}, "at")
    assert read_fields(cls, {key: None}, "at", given={key: 3}) == cls(3)
