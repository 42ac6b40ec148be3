"""A backend wrapped around an experts kernel: the only place that knows the order of a call.

    prepare -> dispatch -> experts -> combine

and, where the plan gives the shared expert to the kernel, the shared expert in one of the two
windows in which only communication is in flight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_runtime.all2all.base import All2AllBackend, CombineBias, RoutedTokens
from ep_runtime.kernels.base import (
    BatchedExpertInput,
    ExpertInput,
    ExpertWeights,
    ModularExperts,
    Routing,
)
from ep_runtime.kernels.experts_operators import run_experts
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.ownership import Schedule
from ep_runtime.phases import PhaseTimer
from ep_runtime.small_passes import make_count_slots


@dataclass(frozen=True)
class CallSchedule:
    """What a call does besides its routed experts.

    schedule: the plan's. run_shared: computes the shared expert for all own rows, [T, H]; called
    once, and only under a schedule of the modular kernel's. before_experts: called once, just
    before the first launch of the experts.
    """

    schedule: Schedule
    run_shared: Callable[[], Tensor]
    before_experts: Callable[[], None]


def num_rounds(rows_per_rank: tuple[int, ...], max_tokens_per_rank: int) -> int:
    """Rounds that the rank with most rows needs, so equal on all ranks; at least 1."""
    return max(1, -(-max(rows_per_rank) // max_tokens_per_rank))


def round_rows(num_rows: int, index: int, max_tokens_per_rank: int) -> slice:
    """The own rows of round `index`. Example: 5 rows, 2 a round: 0:2, 2:4, 4:5, 5:5."""
    start = min(num_rows, index * max_tokens_per_rank)
    return slice(start, min(num_rows, start + max_tokens_per_rank))


def rows_in_round(
    rows_per_rank: tuple[int, ...], index: int, max_tokens_per_rank: int
) -> tuple[int, ...]:
    """Every rank's number of rows in round `index`."""
    parts = [round_rows(rows, index, max_tokens_per_rank) for rows in rows_per_rank]
    return tuple(part.stop - part.start for part in parts)


class ModularKernel:
    """One layer's backend and experts kernel.

    tokens_per_expert: [E_local] int64, the slots that landed on each of this rank's experts.
    """

    def __init__(
        self,
        backend: All2AllBackend[Any, Any],
        experts: ModularExperts,
        *,
        max_tokens_per_rank: int,
        workspace: Workspace,
        timer: PhaseTimer,
    ) -> None:
        self.backend = backend
        self.experts = experts
        self.tokens_per_expert = torch.zeros(
            experts.shape.num_local_experts, dtype=torch.int64, device=workspace.device
        )
        self._count_slots = make_count_slots(self.tokens_per_expert)
        self._max_tokens_per_rank = max_tokens_per_rank
        self._workspace = workspace
        self._timer = timer

    def run(
        self,
        hidden_states: Tensor,
        routing: Routing,
        weights: ExpertWeights,
        *,
        rows_per_rank: tuple[int, ...],
        call: CallSchedule,
    ) -> Tensor:
        """Compute the routed experts, and the shared one where the kernel owns it.

        hidden_states: [T, H] own rows; routing: theirs, ids -1 or in range. rows_per_rank: T of
        every EP rank. Returns a fresh [T, H]. Every rank of the group makes the same rounds.
        """
        limit = self._max_tokens_per_rank
        shared: Tensor | None = None
        parts: list[Tensor] = []
        for index in range(num_rounds(rows_per_rank, limit)):
            rows = round_rows(hidden_states.shape[0], index, limit)
            tokens = RoutedTokens(
                hidden_states=hidden_states[rows],
                topk_ids=routing.topk_ids[rows],
                topk_weights=routing.topk_weights[rows],
                rows_per_rank=rows_in_round(rows_per_rank, index, limit),
            )
            part, shared = self._round(tokens, weights, rows, shared, call if index == 0 else None)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _round(
        self,
        tokens: RoutedTokens,
        weights: ExpertWeights,
        rows: slice,
        shared: Tensor | None,
        call: CallSchedule | None,
    ) -> tuple[Tensor, Tensor | None]:
        """One round; returns its rows' result and the shared expert's output for all rows.

        shared: what the first round returned. call: what the first round does besides; None in
        later ones.
        """
        backend, timer = self.backend, self._timer
        schedule = call.schedule if call is not None else Schedule.NONE
        bias_kind = backend.capabilities.combine_bias
        with timer.phase("dispatch"):
            dispatching = backend.dispatch(backend.prepare(tokens))
            if schedule is Schedule.DISPATCH_JOINED:
                dispatching.join()
        if call is not None and schedule in (Schedule.DISPATCH_WINDOW, Schedule.DISPATCH_JOINED):
            shared = call.run_shared()
        with timer.phase("dispatch"):
            expert_input, handle = dispatching.wait()
        if call is not None:
            call.before_experts()
        with timer.phase("experts"), self._workspace.frame():
            output = run_experts(self.experts, expert_input, weights, self._workspace)
        self._refuse_other_shape(output, expert_input)
        self._count(expert_input)

        at_issue = (
            shared[rows] if shared is not None and bias_kind is CombineBias.AT_ISSUE else None
        )
        with timer.phase("combine"):
            combining = backend.combine(output, handle, bias=at_issue)
            if schedule is Schedule.COMBINE_JOINED:
                combining.join()
        if call is not None and schedule in (Schedule.COMBINE_WINDOW, Schedule.COMBINE_JOINED):
            shared = call.run_shared()
        at_join = shared[rows] if shared is not None and bias_kind is CombineBias.AT_JOIN else None
        with timer.phase("combine"):
            part = combining.wait(at_join)
        if shared is not None and bias_kind is CombineBias.NONE:
            part.add_(shared[rows])
        return part, shared

    def _refuse_other_shape(self, output: Tensor, expert_input: ExpertInput) -> None:
        """A backend would read past the end of fewer rows."""
        received = expert_input.hidden_states
        if output.shape != received.shape:
            raise ValueError(
                f"experts {self.experts.capabilities.name} returned {list(output.shape)} for "
                f"received rows {list(received.shape)}; it must return one row for each"
            )

    def _count(self, expert_input: ExpertInput) -> None:
        """Add an experts call's slots to `tokens_per_expert`; no wait for the device."""
        if isinstance(expert_input, BatchedExpertInput):
            self.tokens_per_expert.add_(expert_input.num_rows_per_expert)
        else:
            self._count_slots(expert_input.topk_ids, expert_input.num_rows)
