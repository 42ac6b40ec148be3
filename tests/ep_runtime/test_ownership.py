"""The two tables over the whole space of declared capabilities, and the exactly-once token."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ep_runtime.kernels.base import Concurrency, ConcurrencyRule, concurrency_rule
from ep_runtime.ownership import (
    Owner,
    Schedule,
    SharedExpertQuestion,
    SharedExpertToken,
    decide_ownership,
)
from tests.ep_runtime import ownership_space as space


def test_every_combination_has_the_owner_schedule_and_reason_of_the_tables() -> None:
    assert len(space.questions()) == len(set(space.questions())) == 2 * 3 * 4 * 14 * 6 * 16
    assert space.first_fault() is None


def test_the_space_reaches_every_owner_and_every_schedule() -> None:
    owners: Counter[Owner] = Counter()
    schedules: Counter[Schedule] = Counter()
    for question in space.questions():
        ownership = decide_ownership(question)
        owners[ownership.owner] += 1
        schedules.update({regime.schedule for regime in ownership.regimes})
    assert set(owners) == set(Owner)
    assert set(schedules) == set(Schedule)


def test_the_decision_is_the_same_each_time() -> None:
    for question in space.questions()[::97]:
        assert decide_ownership(question) == decide_ownership(question)


def _question(
    routed: tuple[ConcurrencyRule, ...],
    shared: tuple[ConcurrencyRule, ...],
    *,
    ep_size: int,
    max_tokens_per_rank: int,
    token_threshold: int,
) -> SharedExpertQuestion:
    base = next(
        q
        for q in space.questions()
        if q.has_shared_expert
        and q.device_type == "cuda"
        and q.overlap == "auto"
        and not q.backend.supports_async
        and q.backend.communication == space.COMMUNICATION[0]
    )
    experts = type(base.experts)(**{**vars(base.experts), "concurrency": routed})
    return SharedExpertQuestion(
        has_shared_expert=True,
        backend=base.backend,
        experts=experts,
        shared_concurrency=shared,
        device_type="cuda",
        ep_size=ep_size,
        max_tokens_per_rank=max_tokens_per_rank,
        overlap="auto",
        token_threshold=token_threshold,
    )


@st.composite
def _declared(draw: st.DrawFn) -> tuple[ConcurrencyRule, ...]:
    bounds = sorted(draw(st.sets(st.integers(1, 40), max_size=3)))
    ends: list[int | None] = [*bounds, *([None] if draw(st.booleans()) else [])]
    classes = st.sampled_from(Concurrency)
    return tuple(ConcurrencyRule(end, draw(classes), f"evidence-{end}") for end in ends)


@given(
    routed=_declared(),
    shared=_declared(),
    ep_size=st.integers(1, 5),
    max_tokens_per_rank=st.integers(1, 12),
    token_threshold=st.integers(0, 15),
)
def test_at_every_row_count_the_regime_is_what_the_rules_say_at_that_count(
    routed: tuple[ConcurrencyRule, ...],
    shared: tuple[ConcurrencyRule, ...],
    ep_size: int,
    max_tokens_per_rank: int,
    token_threshold: int,
) -> None:
    question = _question(
        routed,
        shared,
        ep_size=ep_size,
        max_tokens_per_rank=max_tokens_per_rank,
        token_threshold=token_threshold,
    )
    ownership = decide_ownership(question)
    for num_tokens in range(50):
        schedule, _ = space.expected_schedule(question, "runner", num_tokens)
        assert ownership.regime(num_tokens).schedule == schedule, num_tokens


def test_a_launch_has_the_strictest_class_of_any_number_of_rows_it_may_meet() -> None:
    exclusive_when_small = (
        ConcurrencyRule(8, Concurrency.EXCLUSIVE, "resident grid"),
        ConcurrencyRule(None, Concurrency.CERTIFIED, "a test"),
    )
    assert concurrency_rule(exclusive_when_small, 8).concurrency is Concurrency.EXCLUSIVE
    # Up to 9 rows may come; if 5 do, the grid is resident.
    assert concurrency_rule(exclusive_when_small, 9).concurrency is Concurrency.EXCLUSIVE
    certified_when_small = (ConcurrencyRule(8, Concurrency.CERTIFIED, "a test"),)
    assert concurrency_rule(certified_when_small, 8).concurrency is Concurrency.CERTIFIED
    beyond = concurrency_rule(certified_when_small, 9)
    assert beyond.concurrency is Concurrency.UNSAFE
    assert "9 rows" in beyond.evidence
    assert concurrency_rule((), 0).concurrency is Concurrency.UNSAFE


def test_a_call_of_several_rounds_is_not_overlapped_by_the_class_of_its_largest_round() -> None:
    # 12 rows in rounds of 10: the second round launches with 2 rows, where the grid is resident.
    question = _question(
        (
            ConcurrencyRule(8, Concurrency.EXCLUSIVE, "resident grid"),
            ConcurrencyRule(None, Concurrency.CERTIFIED, "a test"),
        ),
        (ConcurrencyRule(None, Concurrency.CERTIFIED, "a test"),),
        ep_size=1,
        max_tokens_per_rank=10,
        token_threshold=100,
    )
    regime = decide_ownership(question).regime(12)
    assert regime.schedule is Schedule.AUX_STREAM_BEFORE_EXPERTS


@pytest.mark.parametrize("owner", [Owner.RUNNER, Owner.MODULAR_KERNEL])
def test_the_token_is_used_once_by_its_owner(owner: Owner) -> None:
    token = SharedExpertToken(owner)
    token.consume(owner)
    token.finish()


@pytest.mark.parametrize("owner", [Owner.RUNNER, Owner.MODULAR_KERNEL])
def test_a_second_run_raises(owner: Owner) -> None:
    token = SharedExpertToken(owner)
    token.consume(owner)
    with pytest.raises(RuntimeError, match=f"run by {owner} already"):
        token.consume(owner)


@pytest.mark.parametrize("first", [Owner.RUNNER, Owner.MODULAR_KERNEL])
def test_a_second_run_by_somebody_else_raises(first: Owner) -> None:
    second = Owner.RUNNER if first is Owner.MODULAR_KERNEL else Owner.MODULAR_KERNEL
    token = SharedExpertToken(first)
    token.consume(first)
    with pytest.raises(RuntimeError, match=f"run by {first} already, and {second}"):
        token.consume(second)


@pytest.mark.parametrize("owner", list(Owner))
@pytest.mark.parametrize("by", list(Owner))
def test_a_run_by_anybody_but_the_owner_raises_and_leaves_the_token_unused(
    owner: Owner, by: Owner
) -> None:
    if by is owner and owner is not Owner.NONE:
        return
    token = SharedExpertToken(owner)
    with pytest.raises(RuntimeError, match=f"owned by {owner}, and {by} runs it"):
        token.consume(by)
    if owner is not Owner.NONE:
        with pytest.raises(RuntimeError, match="was not run"):
            token.finish()


@pytest.mark.parametrize("owner", [Owner.RUNNER, Owner.MODULAR_KERNEL])
def test_a_call_that_ends_without_a_run_raises(owner: Owner) -> None:
    with pytest.raises(RuntimeError, match=f"was not run: its owner is {owner}"):
        SharedExpertToken(owner).finish()


def test_a_layer_without_a_shared_expert_needs_no_run() -> None:
    SharedExpertToken(Owner.NONE).finish()
