"""Ranks agree on their plan before a layer is built."""

import json
import logging
from collections.abc import Callable
from functools import cache
from itertools import takewhile

import torch.distributed as dist

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.all2all.registry import backend_names
from ep_runtime.disagreement import disagreement
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.registry import experts_names
from ep_runtime.plan import Plan

_CONFIGURED = ("moe", "parallel", "shared_experts", "machine", "backend", "experts")


def agree_plan(plan: Plan, group: EPGroup) -> None:
    """A collective: raises PlanError on every rank of `group` where plans differ.

    group: the context's step_group, so that EP and TP ranks alike agree. The message shows the
    differing keys, each with the values and the ranks that have them.
    What `auto` would have preferred and could not use is logged once a process.
    """
    _log_what_auto_could_not_use(plan)
    if group.process_group is None:
        return
    digests = gather_texts(plan.digest(), group)
    if len(set(digests)) == 1:
        return
    texts = gather_texts(json.dumps(plan.to_dict()), group)
    plans = [dict(_flatten("", json.loads(text))) for text in texts]
    ranks = dist.get_process_group_ranks(group.process_group)
    differing = _differences(plans, ranks, lambda key: key.split(".")[0] in _CONFIGURED)
    # What was derived differs with the configuration: only told where that is equal.
    differing = differing or _differences(plans, ranks, lambda key: True)
    shown_keys = differing[:8]
    if len(differing) > len(shown_keys):
        shown_keys.append(f"and {len(differing) - len(shown_keys)} more keys")
    raise PlanError(
        "ranks disagree about the plan; give every rank the same configuration, code and kind of "
        "machine: " + "; ".join(shown_keys)
    )


def _log_what_auto_could_not_use(plan: Plan) -> None:
    for kind, chosen, order in (
        ("backend", plan.backend, backend_names()),
        ("experts", plan.experts, experts_names()),
    ):
        preferred = list(takewhile(chosen.__ne__, order))
        for rejection in plan.rejections:
            if rejection.kind == kind and rejection.name in preferred:
                _log_once(f"auto takes {kind} {chosen}, not {rejection.name}: {rejection.reason}")


@cache
def _log_once(message: str) -> None:
    logging.getLogger("ep_runtime").info(message)


def _differences(
    plans: list[dict[str, object]], ranks: list[int], wanted: Callable[[str], bool]
) -> list[str]:
    """One text per key that differs: its values, and the ranks that have each."""
    differing = []
    for key in sorted({key for values in plans for key in values if wanted(key)}):
        shown = disagreement([repr(values.get(key, "not there")) for values in plans], ranks)
        if shown is not None:
            differing.append(f"{key}: {shown}")
    return differing


def _flatten(prefix: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flatten(f"{prefix}.{key}", inner)]
    return [(prefix.lstrip("."), value)]
