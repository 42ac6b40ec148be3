"""Who computes the shared expert, and when: two tables of rules, first match wins.

The tables read declared capabilities only, run before anything else does, and are the same on
every rank. `OWNERSHIP_RULES` picks the owner once a plan; `SCHEDULE_RULES` picks the schedule
for each range of row counts in which the answer cannot change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from ep_runtime.all2all.base import BackendCapabilities, CombineBias
from ep_runtime.kernels.base import (
    Concurrency,
    ConcurrencyRule,
    ExpertsCapabilities,
    ExpertsKind,
    concurrency_rule,
)


class Owner(StrEnum):
    NONE = "none"
    RUNNER = "runner"
    MODULAR_KERNEL = "modular_kernel"


class Schedule(StrEnum):
    NONE = "none"
    # The runner's.
    SERIAL = "serial"  # on the main stream, after the routed experts
    AUX_STREAM = "aux_stream"  # beside router, dispatch, experts and combine
    AUX_STREAM_BEFORE_EXPERTS = "aux_stream_before_experts"  # joined before the experts' launch
    # The modular kernel's, on the compute stream.
    COMBINE_WINDOW = "combine_window"  # between issuing and joining combine
    DISPATCH_WINDOW = "dispatch_window"  # between issuing and joining dispatch
    COMBINE_JOINED = "combine_joined"  # combine is joined first; its bias is added as ever
    DISPATCH_JOINED = "dispatch_joined"  # dispatch is joined first

    @property
    def overlaps(self) -> bool:
        """Whether the shared expert may run beside other work of the layer."""
        return self in _OVERLAPPING


_OVERLAPPING = frozenset(
    {
        Schedule.AUX_STREAM,
        Schedule.AUX_STREAM_BEFORE_EXPERTS,
        Schedule.COMBINE_WINDOW,
        Schedule.DISPATCH_WINDOW,
    }
)


@dataclass(frozen=True)
class SharedExpertQuestion:
    """All that the decision depends on.

    shared_concurrency: the shared expert's own rules; counted in own rows.
    overlap: "auto" or "off". token_threshold: most own rows at which overlap is worth it.
    max_tokens_per_rank: rows a rank sends in a round, so a kernel receives at most
    ep_size * max_tokens_per_rank.
    """

    has_shared_expert: bool
    backend: BackendCapabilities
    experts: ExpertsCapabilities
    shared_concurrency: tuple[ConcurrencyRule, ...]
    device_type: str
    ep_size: int
    max_tokens_per_rank: int
    overlap: str
    token_threshold: int


@dataclass(frozen=True)
class OwnershipRule:
    name: str
    applies: Callable[[SharedExpertQuestion], bool]
    owner: Owner
    reason: Callable[[SharedExpertQuestion], str]


OWNERSHIP_RULES: tuple[OwnershipRule, ...] = (
    OwnershipRule(
        "no_shared_expert",
        lambda q: not q.has_shared_expert,
        Owner.NONE,
        lambda q: "the layer has no shared expert",
    ),
    OwnershipRule(
        "monolithic_experts",
        lambda q: q.experts.kind is ExpertsKind.MONOLITHIC,
        Owner.RUNNER,
        lambda q: f"experts {q.experts.name} is monolithic: it has no dispatch/combine window",
    ),
    OwnershipRule(
        "synchronous_backend",
        lambda q: not q.backend.supports_async,
        Owner.RUNNER,
        lambda q: f"backend {q.backend.name} declares supports_async: no",
    ),
    OwnershipRule(
        "asynchronous_backend",
        lambda q: q.backend.supports_async,
        Owner.MODULAR_KERNEL,
        lambda q: f"backend {q.backend.name} declares supports_async: yes",
    ),
)


@dataclass(frozen=True)
class ScheduleFacts:
    """The question for one range of row counts.

    num_tokens: the most own rows of any rank of the group. routed, shared, communication: the rule
    of each side that covers that count.
    """

    question: SharedExpertQuestion
    owner: Owner
    num_tokens: int
    routed: ConcurrencyRule
    shared: ConcurrencyRule
    communication: ConcurrencyRule

    @property
    def window(self) -> Schedule:
        """Where the modular kernel can hide the shared expert, by when its output is needed."""
        if self.question.backend.combine_bias is CombineBias.AT_ISSUE:
            return Schedule.DISPATCH_WINDOW
        return Schedule.COMBINE_WINDOW

    @property
    def joined(self) -> Schedule:
        """The same place without overlap."""
        if self.window is Schedule.DISPATCH_WINDOW:
            return Schedule.DISPATCH_JOINED
        return Schedule.COMBINE_JOINED

    @property
    def not_overlapped(self) -> Schedule:
        return Schedule.SERIAL if self.owner is Owner.RUNNER else self.joined


@dataclass(frozen=True)
class ScheduleRule:
    name: str
    applies: Callable[[ScheduleFacts], bool]
    schedule: Callable[[ScheduleFacts], Schedule]
    reason: Callable[[ScheduleFacts], str]


def _side(kind: str, name: str, rule: ConcurrencyRule) -> str:
    return f"{kind} {name} is {rule.concurrency} ({rule.evidence})"


def _routed_side(f: ScheduleFacts) -> str:
    return _side("experts", f.question.experts.name, f.routed)


def _shared_side(f: ScheduleFacts) -> str:
    return _side("the shared", "expert", f.shared)


def _communication_side(f: ScheduleFacts) -> str:
    return _side("the communication of", f.question.backend.name, f.communication)


SCHEDULE_RULES: tuple[ScheduleRule, ...] = (
    ScheduleRule(
        "no_owner",
        lambda f: f.owner is Owner.NONE,
        lambda f: Schedule.NONE,
        lambda f: "nothing to compute",
    ),
    ScheduleRule(
        "overlap_off",
        lambda f: f.question.overlap == "off",
        lambda f: f.not_overlapped,
        lambda f: "shared_experts.overlap is off",
    ),
    ScheduleRule(
        "above_token_threshold",
        lambda f: f.num_tokens > f.question.token_threshold,
        lambda f: f.not_overlapped,
        lambda f: f"more rows than shared_experts.token_threshold ({f.question.token_threshold})",
    ),
    ScheduleRule(
        "routed_side_unsafe",
        lambda f: f.routed.concurrency is Concurrency.UNSAFE,
        lambda f: f.not_overlapped,
        _routed_side,
    ),
    ScheduleRule(
        "shared_side_unsafe",
        lambda f: f.shared.concurrency is Concurrency.UNSAFE,
        lambda f: f.not_overlapped,
        _shared_side,
    ),
    ScheduleRule(
        "shared_side_exclusive",
        lambda f: f.shared.concurrency is Concurrency.EXCLUSIVE,
        lambda f: f.not_overlapped,
        lambda f: _shared_side(f) + ": communication is joined before its launch",
    ),
    ScheduleRule(
        "communication_not_certified",
        lambda f: f.communication.concurrency is not Concurrency.CERTIFIED,
        lambda f: f.not_overlapped,
        _communication_side,
    ),
    ScheduleRule(
        "modular_kernel_window",
        lambda f: f.owner is Owner.MODULAR_KERNEL,
        lambda f: f.window,
        lambda f: (
            "only communication runs beside it"
            if f.routed.concurrency is Concurrency.CERTIFIED
            else _routed_side(f) + ", and not in flight in that window"
        ),
    ),
    ScheduleRule(
        "one_stream_on_cpu",
        lambda f: f.question.device_type == "cpu",
        lambda f: Schedule.SERIAL,
        lambda f: "a CPU has no second stream",
    ),
    ScheduleRule(
        "routed_side_exclusive",
        lambda f: f.routed.concurrency is Concurrency.EXCLUSIVE,
        lambda f: Schedule.AUX_STREAM_BEFORE_EXPERTS,
        lambda f: _routed_side(f) + ": the aux stream is joined before its launch",
    ),
    ScheduleRule(
        "both_sides_certified",
        lambda f: True,
        lambda f: Schedule.AUX_STREAM,
        lambda f: f"{_routed_side(f)}; {_shared_side(f)}",
    ),
)


@dataclass(frozen=True)
class Regime:
    """The schedule for calls in which no rank has more than `max_tokens` rows (None: any)."""

    max_tokens: int | None
    schedule: Schedule
    rule: str
    reason: str


@dataclass(frozen=True)
class Ownership:
    """The decision: one owner, and a schedule for every number of rows."""

    owner: Owner
    rule: str
    reason: str
    regimes: tuple[Regime, ...]

    def regime(self, num_tokens: int) -> Regime:
        """The regime of a call in which some rank has `num_tokens` rows, and none has more."""
        for regime in self.regimes:
            if regime.max_tokens is None or num_tokens <= regime.max_tokens:
                return regime
        raise LookupError(f"no regime covers {num_tokens} rows")


def decide_ownership(question: SharedExpertQuestion) -> Ownership:
    """Answer both tables. Pure; every rank of a group gets the same answer."""
    rule = next(rule for rule in OWNERSHIP_RULES if rule.applies(question))
    regimes: list[Regime] = []
    for max_tokens in _regime_bounds(question):
        regime = _decide_schedule(question, rule.owner, max_tokens)
        if regimes and (regimes[-1].rule, regimes[-1].reason) == (regime.rule, regime.reason):
            regimes.pop()
        regimes.append(regime)
    return Ownership(rule.owner, rule.name, rule.reason(question), tuple(regimes))


def most_received_rows(question: SharedExpertQuestion, num_tokens: int) -> int:
    """The most rows the experts kernel can get in a round where no rank has more than that."""
    return question.ep_size * min(num_tokens, question.max_tokens_per_rank)


def _decide_schedule(
    question: SharedExpertQuestion, owner: Owner, max_tokens: int | None
) -> Regime:
    num_tokens = max_tokens if max_tokens is not None else _beyond_every_bound(question)
    received = most_received_rows(question, num_tokens)
    facts = ScheduleFacts(
        question=question,
        owner=owner,
        num_tokens=num_tokens,
        routed=concurrency_rule(question.experts.concurrency, received),
        shared=concurrency_rule(question.shared_concurrency, num_tokens),
        communication=concurrency_rule((question.backend.communication,), received),
    )
    rule = next(rule for rule in SCHEDULE_RULES if rule.applies(facts))
    return Regime(max_tokens, rule.schedule(facts), rule.name, rule.reason(facts))


def _finite_bounds(question: SharedExpertQuestion) -> set[int]:
    """Row counts after which some rule may answer differently."""
    bounds = {question.token_threshold, question.max_tokens_per_rank}
    for rule in (*question.experts.concurrency, question.backend.communication):
        if rule.max_tokens is not None:
            bounds.add(rule.max_tokens // question.ep_size)
    for rule in question.shared_concurrency:
        if rule.max_tokens is not None:
            bounds.add(rule.max_tokens)
    return bounds


def _regime_bounds(question: SharedExpertQuestion) -> list[int | None]:
    return [*sorted(_finite_bounds(question)), None]


def _beyond_every_bound(question: SharedExpertQuestion) -> int:
    return max(_finite_bounds(question)) + 1


class SharedExpertToken:
    """The right to run the shared expert once, in one layer call.

    Each call draws one; running the shared expert consumes it. A second run, a run by somebody
    else than the owner, or a call that ends with it unused, raises RuntimeError.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._used_by: Owner | None = None

    def consume(self, by: Owner) -> None:
        """Called by whoever runs the shared expert, just before it does."""
        if self._used_by is not None:
            raise RuntimeError(
                f"the shared expert was run by {self._used_by} already, and {by} runs it again"
            )
        if by is not self._owner or by is Owner.NONE:
            raise RuntimeError(f"the shared expert is owned by {self._owner}, and {by} runs it")
        self._used_by = by

    def finish(self) -> None:
        """Called once at the end of a layer call."""
        if self._owner is not Owner.NONE and self._used_by is None:
            raise RuntimeError(f"the shared expert was not run: its owner is {self._owner}")
