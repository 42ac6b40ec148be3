"""A monolithic experts kernel: routing and experts in one launch, no dispatch/combine window.

On one EP rank it takes the rows as they are; on several it runs behind a backend that gathers
rows and router logits, and its partial sums are added and scattered back.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ep_runtime.all2all.base import GatheringBackend
from ep_runtime.kernels.base import MonolithicContext, MonolithicExperts
from ep_runtime.kernels.experts_operators import run_monolithic_experts
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.modular_kernel import num_rounds, round_rows, rows_in_round
from ep_runtime.phases import PhaseTimer


class MonolithicKernel:
    """One layer's monolithic kernel. backend: None on one EP rank."""

    def __init__(
        self,
        backend: GatheringBackend[object, object] | None,
        experts: MonolithicExperts,
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
        self._max_tokens_per_rank = max_tokens_per_rank
        self._workspace = workspace
        self._timer = timer

    def run(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        context: MonolithicContext,
        rows_per_rank: tuple[int, ...],
        before_experts: Callable[[], None],
    ) -> Tensor:
        """[T, H] own rows and their [T, E] float32 logits to a fresh [T, H].

        before_experts: called once, just before the first launch and after the first gather.
        """
        limit = self._max_tokens_per_rank
        parts: list[Tensor] = []
        for index in range(num_rounds(rows_per_rank, limit)):
            rows = round_rows(hidden_states.shape[0], index, limit)
            counts = rows_in_round(rows_per_rank, index, limit)
            hidden, logits = hidden_states[rows], router_logits[rows]
            if self.backend is not None:
                with self._timer.phase("dispatch"):
                    hidden = self.backend.gather_rows(hidden, counts)
                    logits = self.backend.gather_rows(logits, counts)
            if index == 0:
                before_experts()
            with self._timer.phase("experts"), self._workspace.frame():
                part = run_monolithic_experts(
                    self.experts, hidden, logits, context=context, workspace=self._workspace
                )
            if self.backend is not None:
                with self._timer.phase("combine"):
                    part = self.backend.sum_scatter_rows(part, counts)
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
