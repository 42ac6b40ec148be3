"""Executes a plan: runs the routed experts, and the shared expert where the runner owns it.

Streams, where the runner overlaps: the shared expert is enqueued on the aux stream before the
router; its output was allocated on the main stream before the fork; the join comes before
anything that reads the output, and before an exclusive kernel's launch. The inputs are held by
this call until the join, so no allocator bookkeeping is needed. No collective runs on the aux
stream.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertWeights, MonolithicContext, Routing
from ep_runtime.kernels.errors import PlanError
from ep_runtime.modular_kernel import CallSchedule, ModularKernel
from ep_runtime.monolithic_kernel import MonolithicKernel
from ep_runtime.ownership import Owner, Schedule, SharedExpertToken
from ep_runtime.phases import PhaseTimer
from ep_runtime.plan import Plan
from ep_runtime.router import Router
from ep_runtime.shared_expert import SharedExpert
from ep_runtime.streams import Streams

_ON_AUX = (Schedule.AUX_STREAM, Schedule.AUX_STREAM_BEFORE_EXPERTS)


class MoERunner:
    """Runs one layer's calls as its plan says."""

    def __init__(
        self,
        plan: Plan,
        *,
        router: Router,
        kernel: ModularKernel | MonolithicKernel,
        shared: SharedExpert | None,
        streams: Streams,
        timer: PhaseTimer,
    ) -> None:
        self.plan = plan
        self.kernel = kernel
        self._router = router
        self._shared = shared
        self._streams = streams
        self._timer = timer

    def run(
        self,
        hidden_states: Tensor,
        weights: ExpertWeights,
        *,
        expert_map: Tensor,
        routing: Routing | None,
        rows_per_rank: tuple[int, ...],
    ) -> Tensor:
        """One layer call on this rank's own rows.

        hidden_states: [T, H] contiguous; never written. routing: the caller's, or None to ask the
        router. expert_map: [E] int32 global to local id, -1 elsewhere. rows_per_rank: T of every
        EP rank. Returns a fresh [T, H].
        """
        token = self.plan.draw_token()
        schedule = self.plan.regime(max(rows_per_rank)).schedule
        if schedule not in _ON_AUX:
            routed = self._run_routed(
                hidden_states,
                weights,
                expert_map,
                routing,
                rows_per_rank,
                call=self._call_schedule(schedule, hidden_states, token, _nothing),
            )
            if schedule is Schedule.SERIAL:
                routed.add_(self._run_shared(hidden_states, token, Owner.RUNNER))
            token.finish()
            return routed

        out = torch.empty_like(hidden_states)
        self._streams.fork()
        try:
            with self._streams.on_aux():
                shared = self._run_shared(hidden_states, token, Owner.RUNNER, out=out)
            before_experts = (
                self._streams.join if schedule is Schedule.AUX_STREAM_BEFORE_EXPERTS else _nothing
            )
            routed = self._run_routed(
                hidden_states,
                weights,
                expert_map,
                routing,
                rows_per_rank,
                call=self._call_schedule(schedule, hidden_states, token, before_experts),
            )
        finally:
            self._streams.join()
        routed.add_(shared)
        token.finish()
        return routed

    def _run_routed(
        self,
        hidden_states: Tensor,
        weights: ExpertWeights,
        expert_map: Tensor,
        routing: Routing | None,
        rows_per_rank: tuple[int, ...],
        *,
        call: CallSchedule,
    ) -> Tensor:
        if isinstance(self.kernel, MonolithicKernel):
            if routing is not None:
                raise PlanError(
                    f"topk_ids were given, and experts {self.plan.experts} is monolithic: it "
                    f"routes itself; leave them out or choose a modular kernel"
                )
            with self._timer.phase("router"):
                logits = self._router.logits(hidden_states)
            context = MonolithicContext(
                routing=self._router.spec,
                weights=weights,
                expert_map=expert_map,
                tokens_per_expert=self.kernel.tokens_per_expert,
                correction_bias=self._router.correction_bias,
            )
            return self.kernel.run(
                hidden_states,
                logits,
                context=context,
                rows_per_rank=rows_per_rank,
                before_experts=call.before_experts,
            )
        if routing is None:
            with self._timer.phase("router"):
                routing = self._router(hidden_states)
        if self.plan.moe.apply_router_weight_on_input:
            hidden_states, routing = _weight_inputs(hidden_states, routing)
        return self.kernel.run(
            hidden_states, routing, weights, rows_per_rank=rows_per_rank, call=call
        )

    def _call_schedule(
        self,
        schedule: Schedule,
        hidden_states: Tensor,
        token: SharedExpertToken,
        before_experts: Callable[[], None],
    ) -> CallSchedule:
        def run_shared() -> Tensor:
            return self._run_shared(hidden_states, token, Owner.MODULAR_KERNEL)

        return CallSchedule(schedule, run_shared=run_shared, before_experts=before_experts)

    def _run_shared(
        self, hidden_states: Tensor, token: SharedExpertToken, by: Owner, out: Tensor | None = None
    ) -> Tensor:
        if self._shared is None:
            raise RuntimeError(f"{by} runs a shared expert that the layer does not have")
        if out is None:
            out = torch.empty_like(hidden_states)
        with self._timer.phase("shared"):
            return self._shared.run(hidden_states, token=token, by=by, out=out)


def _nothing() -> None:
    return None


def _weight_inputs(hidden_states: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """Router weights on the input (K = 1): scale a copy of the rows, and weigh by one after."""
    scaled = (hidden_states.float() * routing.topk_weights).to(hidden_states.dtype)
    return scaled, Routing(routing.topk_ids, torch.ones_like(routing.topk_weights))
