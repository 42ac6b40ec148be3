"""One candidate in a benchmark: its plan, its layer, and the probes that measure its parts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ep_runtime.agreement import agree_plan
from ep_runtime.all2all.base import All2AllBackend, RoutedTokens
from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.all2all.registry import backend_class
from ep_runtime.config import MoEConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.base import (
    ExpertInput,
    ModularExperts,
)
from ep_runtime.kernels.errors import EPRuntimeError, RankFailure
from ep_runtime.kernels.registry import experts_class
from ep_runtime.launch.bench_config import BenchConfig, Candidate
from ep_runtime.launch.bench_inputs import NUM_INPUT_SETS, Case
from ep_runtime.launch.bench_probe import (
    Call,
    EagerProbe,
    GraphProbe,
    MarkedGraphProbe,
    Probe,
    make_clock,
)
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan, resolve_plan

_EXCHANGE = {"dispatch": (0, 1), "combine": (1, 2), "dispatch_combine": (0, 2)}
_LAYER_PARTS = frozenset({"experts", "shared", "layer"})


@dataclass(frozen=True)
class Skipped:
    """A backend or a part that is not measured, and why."""

    reason: str


def plan_contender(
    config: BenchConfig, moe: MoEConfig, candidate: Candidate, machine: Machine
) -> Plan:
    """A candidate's plan. Raises PlanError or ConfigError where there is none."""
    return resolve_plan(moe, config.parallel(candidate), machine, experts=config.experts)


class Contender:
    """A built backend, and the layer around it where a part needs one."""

    def __init__(
        self,
        candidate: Candidate,
        plan: Plan,
        ctx: EPContext,
        config: BenchConfig,
        weights_of: "Contender | None",
    ) -> None:
        """weights_of: one of the same layer, whose weights are used instead of drawing them."""
        self.candidate, self.plan, self.ctx, self.config = candidate, plan, ctx, config
        self.backend: All2AllBackend[Any, Any] = ctx.backend(plan.backend, plan.backend_shape())
        self.layer: MoELayer | None = None
        if _LAYER_PARTS & set(config.parts):
            self.layer = MoELayer(plan.moe, ctx, plan=plan)
            self._fill(self.layer, weights_of.layer if weights_of is not None else None)
        self.mode, self.mode_reason = config.mode, ""
        if config.mode == "graph" and not self.backend.capabilities.supports_cuda_graph:
            self.mode, self.mode_reason = "eager", f"{plan.backend} cannot be captured"
        self._clock = make_clock(ctx.device)

    @torch.no_grad()
    def _fill(self, layer: MoELayer, source: MoELayer | None) -> None:
        # A kernel may have taken the source's weights into a form of its own.
        if source is None or any(parameter.is_meta for parameter in source.parameters()):
            weights = SeededWeights(self.plan.moe, seed=self.config.seed, device=self.ctx.device)
            weights.fill(layer)
            return
        for parameter, filled in zip(layer.parameters(), source.parameters(), strict=True):
            parameter.data = filled.data
        layer.finish_loading()

    def actual(self) -> dict[str, Any]:
        """What was measured, as JSON values."""
        ownership = self.plan.ownership
        most_rows = self.plan.parallel.max_tokens_per_rank
        return {
            "mode": self.mode,
            "mode_reason": self.mode_reason,
            "experts": self.plan.experts,
            "rows": str(self.plan.rows),
            "format": str(self.backend.capabilities.format),
            "max_tokens_per_rank": most_rows,
            "shared_owner": str(ownership.owner),
        }

    def schedule(self, case: Case) -> str:
        """The shared expert's schedule in a call of that many rows."""
        return str(self.plan.regime(case.tokens_per_rank).schedule)

    def output(self, case: Case, tokens: RoutedTokens) -> Tensor | None:
        """What the layer gives for an input set, [T, H]; None where it cannot be called."""
        if self.layer is None or self._layer_fault(case) is not None:
            return None
        return self._call_layer(tokens, case.routing)

    def probes(
        self, case: Case, sets: Sequence[RoutedTokens]
    ) -> tuple[list[Probe], dict[str, Skipped]]:
        """What measures the configured parts; and the parts that cannot be measured.

        Calls the backend, so all ranks call it, in the same order.
        """
        wanted = self.config.parts
        probes: list[Probe] = []
        skipped: dict[str, Skipped] = {}
        received = [self._receive(tokens) for tokens in sets]
        exchange = self._exchange_call(sets, [output for _, output in received])
        marked: dict[str, tuple[int, int]] = {
            part: between for part, between in _EXCHANGE.items() if part in wanted
        }
        if self.mode == "graph" and marked.pop("dispatch_combine", None) is not None:
            whole = GraphProbe(exchange, "dispatch_combine", self._clock)
            probes.append(whole)
        if marked:
            kind = MarkedGraphProbe if self.mode == "graph" else EagerProbe
            probes.append(kind(exchange, marked, self._clock))
        inputs = [expert_input for expert_input, _ in received]
        for part in wanted:
            if part in _EXCHANGE:
                continue
            call = self._part_call(part, case, sets, inputs)
            if isinstance(call, Skipped):
                skipped[part] = call
            elif self.mode == "graph":
                probes.append(GraphProbe(call, part, self._clock))
            else:
                probes.append(EagerProbe(call, {part: (0, 1)}, self._clock))
        for probe in probes:
            self._warm_up(probe)
        return probes, skipped

    def _warm_up(self, probe: Probe) -> None:
        """Compile and allocate, eagerly: what is captured must have run before."""
        if isinstance(probe, GraphProbe | MarkedGraphProbe):
            for index in range(max(self.config.warmup, NUM_INPUT_SETS)):
                probe.call(index, lambda: None)
            self._clock.synchronize()
        probe.run(self.config.warmup)

    def _receive(self, tokens: RoutedTokens) -> tuple[ExpertInput, Tensor]:
        """What one set brings here, copied; and random rows in the shape of its results."""
        received, handle = self.backend.dispatch(self.backend.prepare(tokens)).wait()
        expert_input = _copied(received) if "experts" in self.config.parts else received
        output = torch.randn(
            received.hidden_states.shape, dtype=self.plan.moe.torch_dtype, device=self.ctx.device
        )
        self.backend.combine(output, handle).wait()
        return expert_input, output

    def _exchange_call(self, sets: Sequence[RoutedTokens], outputs: Sequence[Tensor]) -> Call:
        backend = self.backend

        def call(index: int, mark: Any) -> Tensor:
            index %= len(sets)
            mark()
            _, handle = backend.dispatch(backend.prepare(sets[index])).wait()
            mark()
            combined: Tensor = backend.combine(outputs[index], handle).wait()
            mark()
            return combined

        return call

    def _part_call(
        self,
        part: str,
        case: Case,
        sets: Sequence[RoutedTokens],
        inputs: Sequence[ExpertInput],
    ) -> Call | Skipped:
        layer = self.layer
        if layer is None:
            raise RuntimeError(f"{part} needs a layer")
        if part == "experts":
            return self._experts_call(layer, inputs)
        if part == "shared":
            return self._shared_call(layer, sets)
        fault = self._layer_fault(case)
        if fault is not None:
            return Skipped(fault)

        def call(index: int, mark: Any) -> Tensor:
            tokens = sets[index % len(sets)]
            mark()
            output = self._call_layer(tokens, case.routing)
            mark()
            return output

        return call

    def _layer_fault(self, case: Case) -> str | None:
        is_modular = issubclass(experts_class(self.plan.experts), ModularExperts)
        if is_modular or case.routing == "model":
            return None
        return f"experts {self.plan.experts} is monolithic and routes itself; use routing: model"

    def _call_layer(self, tokens: RoutedTokens, routing: str) -> Tensor:
        layer = cast(MoELayer, self.layer)
        rows = tokens.hidden_states
        with self.ctx.step(rows.shape[0], counts=tokens.rows_per_rank):
            if routing == "model":
                output: Tensor = layer(rows)
            else:
                output = layer(rows, topk_ids=tokens.topk_ids, topk_weights=tokens.topk_weights)
        return output

    def _experts_call(self, layer: MoELayer, inputs: Sequence[ExpertInput]) -> Call | Skipped:
        experts, weights = layer.experts, layer.expert_weights
        if not isinstance(experts, ModularExperts):
            return Skipped(
                f"experts {self.plan.experts} is monolithic: it has no launch of its own"
            )
        workspace = self.ctx.workspace

        def call(index: int, mark: Any) -> Tensor:
            expert_input = inputs[index % len(inputs)]
            mark()
            with workspace.frame():
                output = experts.run(expert_input, weights, workspace)
            mark()
            return output

        return call

    def _shared_call(self, layer: MoELayer, sets: Sequence[RoutedTokens]) -> Call | Skipped:
        shared, plan = layer.shared, self.plan
        if shared is None:
            return Skipped("num_shared_experts is 0")

        def call(index: int, mark: Any) -> Tensor:
            rows = sets[index % len(sets)].hidden_states
            mark()
            out = torch.empty_like(rows)
            shared.run(rows, token=plan.draw_token(), by=plan.ownership.owner, out=out)
            mark()
            return out

        return call


def build_contender(
    candidate: Candidate,
    moe: MoEConfig,
    ctx: EPContext,
    config: BenchConfig,
    weights_of: Contender | None,
) -> Contender | Skipped:
    """A contender, or why there is none: on all ranks the same. A collective of the EP group."""
    machine = Machine.detect(ctx.device.type)
    plan: Plan | None = None
    fault = ""
    try:
        plan = plan_contender(config, moe, candidate, machine)
    except (EPRuntimeError, ImportError) as error:
        fault = reason_of(error, candidate.backend)
    skipped = _skip_where_any_rank_must(fault, ctx)
    if skipped is not None or plan is None:
        return skipped or Skipped(fault)
    agree_plan(plan, ctx.ep_group)
    contender: Contender | None = None
    try:
        contender = Contender(candidate, plan, ctx, config, weights_of)
    except RankFailure:
        raise
    except (EPRuntimeError, ImportError) as error:
        fault = reason_of(error, candidate.backend)
    return _skip_where_any_rank_must(fault, ctx) or cast(Contender, contender)


def reason_of(error: Exception, backend: str) -> str:
    """An error's sentence without the name that it is told beside."""
    text = " ".join(str(error).split())
    return text.removeprefix(f"all2all_backend {backend} cannot be used: ")


def _skip_where_any_rank_must(fault: str, ctx: EPContext) -> Skipped | None:
    for rank, told in enumerate(gather_texts(fault, ctx.ep_group)):
        if told:
            return Skipped(told if told == fault else f"EP rank {rank}: {told}")
    return None


def _copied(received: ExpertInput) -> ExpertInput:
    """Views of a backend's buffer are only valid until the call's combine."""
    tensors: dict[str, Any] = {
        name: value.clone() for name, value in vars(received).items() if isinstance(value, Tensor)
    }
    return replace(received, **tensors)


def candidates_of(config: BenchConfig, registered: Sequence[str]) -> list[Candidate]:
    """The named backends, or all, each with every dispatch_dtype. An unknown name is a ConfigError
    that lists the known ones."""
    for name in config.backends or ():
        backend_class(name)
    names = registered if config.backends is None else config.backends
    return [Candidate(name, rows) for name in names for rows in config.dispatch_dtype]
