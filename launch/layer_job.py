"""What a rank does for `model.layer`: one layer with seeded weights, against the reference."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_runtime.config import MoEConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.base import Routing
from ep_runtime.launch.report import Check, RankResult, shared_expert_check, worst_of
from ep_runtime.launch.run_config import RunConfig
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.launch.workload import make_routing, make_rows
from ep_runtime.layer import MoELayer
from ep_runtime.plan import Plan
from ep_runtime.reference import reference_layer

# Relative Frobenius error against float32 arithmetic on the same weights.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}
FP8_TOLERANCE = 6e-2  # where the experts compute on fp8 rows, and the reference does not
_RELATIVE_ERROR = "layer: relative error"
_LOST_SLOTS = "layer: routed slots not computed"


@dataclass(frozen=True)
class LayerJob:
    """A built layer and this rank's rows."""

    config: RunConfig
    moe: MoEConfig
    ctx: EPContext

    def run(self) -> tuple[Plan, RankResult]:
        """One call to warm up, one that is timed; the reference is what both are held against."""
        config, moe, ctx = self.config, self.moe, self.ctx
        counts, seed = config.workload.tokens_per_rank or [], config.workload.seed or 0
        num_tokens = counts[ctx.dp_rank]
        started = time.perf_counter()
        layer = MoELayer(
            moe, ctx, experts=config.kernel.experts, shared_experts=config.shared_experts
        )
        weights = SeededWeights(moe, seed=seed, device=ctx.device)
        with torch.no_grad():
            weights.fill(layer)
        loaded = time.perf_counter()
        rows = make_rows(moe, num_tokens, seed=seed, dp_rank=ctx.dp_rank).to(ctx.device)
        routing = make_routing(
            config.workload.routing, moe, num_tokens, seed=seed, dp_rank=ctx.dp_rank
        )
        if routing is not None:
            routing = Routing(routing.topk_ids.to(ctx.device), routing.topk_weights.to(ctx.device))
        first = self._call(layer, rows, routing)
        layer.record_timings(True)
        before = time.perf_counter()
        output = self._call(layer, rows, routing)
        phases = layer.timings
        after = time.perf_counter()
        errors = {}
        if config.check == "layer":
            given = routing or layer.router(rows)
            errors[_RELATIVE_ERROR] = self._relative_error(weights, rows, given, (first, output))
        return layer.plan, RankResult(
            rank=ctx.rank,
            dp_rank=ctx.dp_rank,
            tp_rank=ctx.tp_rank,
            device=str(ctx.device),
            num_prompts=0,
            num_tokens=num_tokens,
            layer_calls=2,
            shared_expert_calls=layer.stats.shared_expert_calls,
            tokens_per_expert=layer.stats.tokens_per_expert.tolist(),
            phase_seconds=phases,
            seconds={"load": loaded - started, "forward": after - before},
            errors=errors,
        )

    def _call(self, layer: MoELayer, rows: Tensor, routing: Routing | None) -> Tensor:
        with self.ctx.step(len(rows)):
            if routing is None:
                output: Tensor = layer(rows)
            else:
                output = layer(rows, topk_ids=routing.topk_ids, topk_weights=routing.topk_weights)
        return output

    def _relative_error(
        self,
        weights: SeededWeights,
        rows: Tensor,
        routing: Routing,
        outputs: Sequence[Tensor],
    ) -> float:
        """The worst output's. The reference has the same ids: a tie that rounds elsewise is not an
        error."""
        if len(rows) == 0:
            return 0.0 if all(output.shape == rows.shape for output in outputs) else float("nan")
        expected = reference_layer(rows, self.moe, routing=routing, **weights.for_reference())
        norm = torch.linalg.norm(expected)
        return worst_of(float(torch.linalg.norm(o.float() - expected) / norm) for o in outputs)


def layer_tolerance(plan: Plan) -> float:
    """How far a layer may be off the reference: more where rows are quantised, as there they are
    not."""
    return FP8_TOLERANCE if plan.multiplies_fp8_rows else TOLERANCES[plan.moe.dtype]


def layer_checks(config: RunConfig, plan: Plan, ranks: Sequence[RankResult]) -> list[Check]:
    """The checks over all ranks' results; none where `check: off`."""
    if config.check == "off":
        return []
    moe = plan.moe
    worst = worst_of(rank.errors[_RELATIVE_ERROR] for rank in ranks)
    computed = sum(sum(rank.tokens_per_expert) for rank in ranks)
    rows = sum(rank.num_tokens for rank in ranks if rank.tp_rank == 0)
    calls = ranks[0].layer_calls
    lost = abs(computed - calls * rows * moe.top_k)
    return [
        Check(_RELATIVE_ERROR, worst, layer_tolerance(plan)),
        Check(_LOST_SLOTS, lost, 0),
        shared_expert_check(ranks, has_shared_expert=moe.has_shared_expert),
    ]
