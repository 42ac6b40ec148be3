"""Every combination of declared capabilities, and what the design's two tables say of each.

The tables are written out here a second time, from docs/design.md section 5, in terms of plain
names and brute force over row counts. `fault_of` compares one decision with them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from ep_runtime.all2all.base import BackendCapabilities, CombineBias
from ep_runtime.kernels.base import (
    ActivationKind,
    Concurrency,
    ConcurrencyRule,
    ExpertsCapabilities,
    ExpertsKind,
    InputFormat,
)
from ep_runtime.ownership import Ownership, SharedExpertQuestion, decide_ownership

TOKEN_THRESHOLD = 6
MAX_TOKENS_PER_RANK = 10
# Below, at and above the threshold, the receive capacity, every declared bound and its quarter.
ROW_COUNTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1000)


def _rules(*pairs: tuple[int | None, Concurrency]) -> tuple[ConcurrencyRule, ...]:
    return tuple(ConcurrencyRule(n, c, f"evidence-{n}-{c}") for n, c in pairs)


_ALWAYS = [_rules((None, concurrency)) for concurrency in Concurrency]
ROUTED_RULES = (
    *_ALWAYS,
    _rules((8, Concurrency.EXCLUSIVE), (None, Concurrency.CERTIFIED)),
    _rules((8, Concurrency.CERTIFIED), (None, Concurrency.EXCLUSIVE)),
    _rules((8, Concurrency.CERTIFIED), (20, Concurrency.UNSAFE), (None, Concurrency.CERTIFIED)),
    _rules((3, Concurrency.EXCLUSIVE), (16, Concurrency.CERTIFIED)),
)
SHARED_RULES = (
    *_ALWAYS,
    _rules((4, Concurrency.EXCLUSIVE), (None, Concurrency.CERTIFIED)),
    _rules((4, Concurrency.CERTIFIED), (None, Concurrency.UNSAFE)),
    _rules((5, Concurrency.CERTIFIED)),
)
# A backend declares one; the last covers up to 12 received rows alone.
COMMUNICATION = (*(rules[0] for rules in _ALWAYS), *_rules((12, Concurrency.CERTIFIED)))


@cache
def questions() -> tuple[SharedExpertQuestion, ...]:
    """The whole space, far-apart combinations next to each other."""
    space = list(_enumerate())
    stride = 7919  # a prime that does not divide the length
    return tuple(space[i * stride % len(space)] for i in range(len(space)))


def _enumerate() -> Iterator[SharedExpertQuestion]:
    backends = [
        BackendCapabilities(
            name="the-backend",
            format=InputFormat.STANDARD,
            supports_async=supports_async,
            combine_bias=combine_bias,
            uneven_experts=True,
            supports_cuda_graph=False,
            communication=communication,
        )
        for supports_async, combine_bias, communication in product(
            (False, True), CombineBias, COMMUNICATION
        )
    ]
    kernels = [
        ExpertsCapabilities(
            name="the-kernel",
            kind=kind,
            formats=frozenset(InputFormat),
            dtypes=frozenset({torch.float32}),
            device_types=frozenset({"cpu", "cuda"}),
            activations=frozenset(ActivationKind),
            concurrency=rules,
        )
        for kind, rules in product(ExpertsKind, ROUTED_RULES)
    ]
    for backend, kernel, shared, has_shared, device_type, ep_size, overlap in product(
        backends, kernels, SHARED_RULES, (False, True), ("cpu", "cuda"), (1, 4), ("auto", "off")
    ):
        yield SharedExpertQuestion(
            has_shared_expert=has_shared,
            backend=backend,
            experts=kernel,
            shared_concurrency=shared,
            device_type=device_type,
            ep_size=ep_size,
            max_tokens_per_rank=MAX_TOKENS_PER_RANK,
            overlap=overlap,
            token_threshold=TOKEN_THRESHOLD,
        )


# --- the two tables, again ---


def expected_owner(q: SharedExpertQuestion) -> tuple[str, str]:
    """First table: the owner, and what its reason must name."""
    if not q.has_shared_expert:
        return "none", "no shared expert"
    if q.experts.kind == "monolithic":
        return "runner", q.experts.name
    if not q.backend.supports_async:
        return "runner", q.backend.name
    return "modular_kernel", q.backend.name


@dataclass(frozen=True)
class Side:
    """The class that holds for every launch a call can make, and the evidence that may be given."""

    concurrency: str
    evidence: frozenset[str]


_ORDER = ("certified", "exclusive", "unsafe")


@cache
def strictest_declared(rules: tuple[ConcurrencyRule, ...], most_rows: int) -> Side:
    """Ask for every number of rows from 0 to `most_rows`: a launch may meet any of them."""
    found: list[tuple[str, str]] = []
    for rows in range(most_rows + 1):
        for rule in rules:
            if rule.max_tokens is None or rows <= rule.max_tokens:
                found.append((str(rule.concurrency), rule.evidence))
                break
        else:
            found.append(("unsafe", "not declared"))
    worst = max((concurrency for concurrency, _ in found), key=_ORDER.index)
    return Side(worst, frozenset(evidence for c, evidence in found if c == worst))


def expected_schedule(
    q: SharedExpertQuestion, owner: str, num_tokens: int
) -> tuple[str, frozenset[str]]:
    """Second table: the schedule of a call where the rank with most rows has `num_tokens`.

    With it come the words of which the reason must hold at least one: whatever by itself decides.
    """
    if owner == "none":
        return "none", frozenset({"nothing"})
    routed = strictest_declared(
        q.experts.concurrency, q.ep_size * min(num_tokens, q.max_tokens_per_rank)
    )
    shared = strictest_declared(q.shared_concurrency, num_tokens)
    communication = strictest_declared(
        (q.backend.communication,), q.ep_size * min(num_tokens, q.max_tokens_per_rank)
    )
    in_dispatch_window = q.backend.combine_bias == "at_issue"

    deciders: set[str] = set()
    if q.overlap == "off":
        deciders.add("overlap is off")
    if num_tokens > q.token_threshold:
        deciders.add(f"token_threshold ({q.token_threshold})")
    if routed.concurrency == "unsafe":
        deciders |= {f"experts {q.experts.name} is unsafe ({e}" for e in routed.evidence}
    if shared.concurrency in ("unsafe", "exclusive"):
        deciders |= {f"shared expert is {shared.concurrency} ({e}" for e in shared.evidence}
    if communication.concurrency != "certified":
        deciders |= {
            f"communication of {q.backend.name} is {communication.concurrency} ({e}"
            for e in communication.evidence
        }
    if deciders:
        if owner == "runner":
            return "serial", frozenset(deciders)
        return ("dispatch_joined" if in_dispatch_window else "combine_joined"), frozenset(deciders)

    named = {f"experts {q.experts.name} is {routed.concurrency} ({e}" for e in routed.evidence}
    if owner == "modular_kernel":
        if routed.concurrency == "certified":
            named = {"only communication"}
        return ("dispatch_window" if in_dispatch_window else "combine_window"), frozenset(named)
    if q.device_type == "cpu":
        return "serial", frozenset({"CPU"})
    if routed.concurrency == "exclusive":
        return "aux_stream_before_experts", frozenset(named)
    return "aux_stream", frozenset(named)


def unsafe_overlap(q: SharedExpertQuestion, schedule: str, num_tokens: int) -> str | None:
    """What a schedule would break, said without the second table."""
    on_aux = schedule in ("aux_stream", "aux_stream_before_experts")
    in_window = schedule in ("combine_window", "dispatch_window")
    if not (on_aux or in_window):
        return None
    routed = strictest_declared(
        q.experts.concurrency, q.ep_size * min(num_tokens, q.max_tokens_per_rank)
    ).concurrency
    shared = strictest_declared(q.shared_concurrency, num_tokens).concurrency
    communication = strictest_declared(
        (q.backend.communication,), q.ep_size * min(num_tokens, q.max_tokens_per_rank)
    ).concurrency
    if communication != "certified":
        return f"{schedule} beside communication that is {communication}"
    if "unsafe" in (routed, shared):
        return f"{schedule} beside an unsafe side"
    if shared == "exclusive":
        return f"{schedule} of a shared expert that needs the whole device"
    if schedule == "aux_stream" and routed == "exclusive":
        return "the aux stream is not joined before an exclusive launch"
    if q.overlap == "off" or num_tokens > q.token_threshold:
        return f"{schedule} against overlap off or the threshold"
    if on_aux and q.device_type == "cpu":
        return "an aux stream on a CPU"
    if in_window and (not q.backend.supports_async or q.experts.kind == "monolithic"):
        return f"{schedule} where there is no window"
    return None


def fault_of(q: SharedExpertQuestion) -> str | None:
    """How `decide_ownership` differs from the tables; None where it does not."""
    ownership = decide_ownership(q)
    owner, named = expected_owner(q)
    if ownership.owner != owner:
        return f"owner {ownership.owner}, wanted {owner}"
    if named not in ownership.reason:
        return f"the owner's reason {ownership.reason!r} does not name {named!r}"
    fault = _fault_of_regimes(ownership)
    if fault:
        return fault
    for num_tokens in ROW_COUNTS:
        regime = ownership.regime(num_tokens)
        schedule, words = expected_schedule(q, owner, num_tokens)
        if regime.schedule != schedule:
            return f"{num_tokens} rows: {regime.schedule} by {regime.rule}, wanted {schedule}"
        if not any(word in regime.reason for word in words):
            return f"{num_tokens} rows: reason {regime.reason!r} names none of {sorted(words)}"
        fault = unsafe_overlap(q, regime.schedule, num_tokens)
        if fault:
            return f"{num_tokens} rows: {fault}"
        if regime.schedule.overlaps != (
            regime.schedule
            in ("aux_stream", "aux_stream_before_experts", "combine_window", "dispatch_window")
        ):
            return f"{regime.schedule}.overlaps is {regime.schedule.overlaps}"
    return None


def _fault_of_regimes(ownership: Ownership) -> str | None:
    bounds = [regime.max_tokens for regime in ownership.regimes]
    finite = [bound for bound in bounds if bound is not None]
    if not bounds or bounds[-1] is not None or len(finite) != len(bounds) - 1:
        return f"regimes end at {bounds}, wanted one open end"
    if finite != sorted(set(finite)):
        return f"regime bounds {finite} do not rise"
    return None


def first_fault() -> str | None:
    """The first question of the space that is answered wrongly, with how."""
    for q in questions():
        fault = fault_of(q)
        if fault:
            return f"{fault}; {q}"
    return None
