"""Each rule of the two tables, spoilt in every way: the check over the whole space must notice."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from ep_runtime import ownership
from ep_runtime.kernels.base import ConcurrencyRule, concurrency_rule
from ep_runtime.ownership import (
    OWNERSHIP_RULES,
    SCHEDULE_RULES,
    Owner,
    Schedule,
    ScheduleFacts,
)
from tests.ep_runtime import ownership_space as space

AnyT = TypeVar("AnyT")

# Mutants that answer every question as the table does, and why.
EQUIVALENT = {
    ("ownership", "asynchronous_backend", "always"): (
        "the rule before it took every synchronous backend, so all that is left applies"
    ),
    ("schedule", "both_sides_certified", "always"): "it is the last rule and applies always",
}


def _opposite(applies: Callable[[AnyT], bool]) -> Callable[[AnyT], bool]:
    return lambda asked: not applies(asked)


def _always(schedule: Schedule) -> Callable[[ScheduleFacts], Schedule]:
    return lambda facts: schedule


def _ownership_mutants() -> Iterator[tuple[str, str, tuple[object, ...]]]:
    for i, rule in enumerate(OWNERSHIP_RULES):
        mutants = {
            "never": replace(rule, applies=lambda q: False),
            "always": replace(rule, applies=lambda q: True),
            "the opposite": replace(rule, applies=_opposite(rule.applies)),
            "without a reason": replace(rule, reason=lambda q: ""),
        }
        mutants |= {
            f"owner {owner}": replace(rule, owner=owner)
            for owner in Owner
            if owner is not rule.owner
        }
        for name, mutant in mutants.items():
            yield rule.name, name, (*OWNERSHIP_RULES[:i], mutant, *OWNERSHIP_RULES[i + 1 :])


def _schedule_mutants() -> Iterator[tuple[str, str, tuple[object, ...]]]:
    for i, rule in enumerate(SCHEDULE_RULES):
        mutants = {
            "never": replace(rule, applies=lambda f: False),
            "always": replace(rule, applies=lambda f: True),
            "the opposite": replace(rule, applies=_opposite(rule.applies)),
            "without a reason": replace(rule, reason=lambda f: ""),
        }
        mutants |= {
            f"schedule {schedule}": replace(rule, schedule=_always(schedule))
            for schedule in Schedule
            if schedule not in _right_of(rule.name)
        }
        for name, mutant in mutants.items():
            yield rule.name, name, (*SCHEDULE_RULES[:i], mutant, *SCHEDULE_RULES[i + 1 :])


def _right_of(rule_name: str) -> set[Schedule]:
    """The one schedule that a rule always gives; a rule that chooses has none."""
    return {
        "no_owner": {Schedule.NONE},
        "one_stream_on_cpu": {Schedule.SERIAL},
        "routed_side_exclusive": {Schedule.AUX_STREAM_BEFORE_EXPERTS},
        "both_sides_certified": {Schedule.AUX_STREAM},
    }.get(rule_name, set())


MUTANTS = [("ownership", *m) for m in _ownership_mutants()] + [
    ("schedule", *m) for m in _schedule_mutants()
]


def _notices() -> bool:
    try:
        return space.first_fault() is not None
    except StopIteration:  # no rule was left for a question
        return True


@pytest.mark.parametrize(
    ("table", "rule", "change", "rules"), [pytest.param(*m, id="-".join(m[:3])) for m in MUTANTS]
)
def test_a_spoilt_rule_is_noticed(
    table: str,
    rule: str,
    change: str,
    rules: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attribute = "OWNERSHIP_RULES" if table == "ownership" else "SCHEDULE_RULES"
    monkeypatch.setattr(ownership, attribute, rules)
    assert _notices() == ((table, rule, change) not in EQUIVALENT)


def test_every_equivalent_mutant_listed_is_one_that_was_tried() -> None:
    assert set(EQUIVALENT) <= {(table, rule, change) for table, rule, change, _ in MUTANTS}


@pytest.mark.parametrize("i", range(len(OWNERSHIP_RULES)))
def test_a_missing_ownership_rule_is_noticed(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (*OWNERSHIP_RULES[:i], *OWNERSHIP_RULES[i + 1 :])
    monkeypatch.setattr(ownership, "OWNERSHIP_RULES", rules)
    assert _notices()


@pytest.mark.parametrize("i", range(len(SCHEDULE_RULES)))
def test_a_missing_schedule_rule_is_noticed(i: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (*SCHEDULE_RULES[:i], *SCHEDULE_RULES[i + 1 :])
    monkeypatch.setattr(ownership, "SCHEDULE_RULES", rules)
    assert _notices()


def _only_the_declared_bounds(question: ownership.SharedExpertQuestion) -> list[int | None]:
    return [question.token_threshold, None]


def test_forgetting_the_bounds_at_which_classes_change_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ownership, "_regime_bounds", _only_the_declared_bounds)
    assert _notices()


def test_counting_own_rows_instead_of_received_ones_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ownership, "most_received_rows", lambda question, num_tokens: num_tokens)
    assert _notices()


def test_taking_the_class_of_the_count_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_that_covers(rules: Sequence[ConcurrencyRule], num_tokens: int) -> ConcurrencyRule:
        for rule in rules:
            if rule.max_tokens is None or num_tokens <= rule.max_tokens:
                return rule
        return concurrency_rule((), num_tokens)

    monkeypatch.setattr(ownership, "concurrency_rule", first_that_covers)
    assert _notices()
