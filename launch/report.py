"""The result of a run as values: per rank, per check, and as the JSON report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isnan, nan
from typing import Any

from ep_runtime.launch.environment import describe_versions
from ep_runtime.launch.run_config import RunConfig
from ep_runtime.plan import Plan

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Check:
    """One number and its inclusive limit; NaN does not pass."""

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def worst_of(errors: Iterable[float]) -> float:
    """The largest; NaN where one is, 0 of none."""
    found = list(errors)
    return nan if any(isnan(error) for error in found) else max(found, default=0.0)


@dataclass(frozen=True)
class RankResult:
    """What one rank did.

    layer_calls, shared_expert_calls: over all MoE layers of the rank. tokens_per_expert: [E]
    slots that landed on each expert this rank holds, 0 for others, over all MoE layers;
    tokens_per_expert_of_layer: of a model, by the decoder layer's number.
    phase_seconds: router, dispatch, experts, combine, shared. seconds: load, forward, decode.
    """

    rank: int
    dp_rank: int
    tp_rank: int
    device: str
    num_prompts: int
    num_tokens: int
    layer_calls: int
    shared_expert_calls: int
    tokens_per_expert: list[int]
    phase_seconds: dict[str, float]
    seconds: dict[str, float]
    tokens_per_expert_of_layer: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    generated_tokens: list[list[int]] = field(default_factory=list)


def shared_expert_check(ranks: Sequence[RankResult], *, has_shared_expert: bool) -> Check:
    """The most any rank's count of shared expert runs is off one per layer call."""
    off = [abs(r.shared_expert_calls - r.layer_calls * has_shared_expert) for r in ranks]
    return Check("shared expert calls off one per layer call", max(off), 0)


def build_report(
    config: RunConfig,
    plan: Plan,
    ranks: Sequence[RankResult],
    checks: Sequence[Check],
    timings: Mapping[str, float],
) -> dict[str, Any]:
    """The JSON report; `passed` is true where every check passed (or none was asked for)."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "run",
        "environment": describe_versions(),
        "config": config.model_dump(mode="json", exclude_none=True),
        "plan": plan.to_dict(),
        "ranks": [asdict(rank) for rank in ranks],
        "checks": [check.to_dict() for check in checks],
        "passed": all(check.passed for check in checks),
        "timings": dict(timings),
    }
