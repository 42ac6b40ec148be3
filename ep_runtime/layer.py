"""One MoE layer on one rank: what a user builds, loads and calls."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ep_runtime.agreement import agree_plan
from ep_runtime.all2all.base import GatheringBackend
from ep_runtime.all2all.expert_ids import local_expert_map
from ep_runtime.config import MoEConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext, tp_slice
from ep_runtime.given_weights import check_shared, is_wanted, own_experts
from ep_runtime.kernels.base import (
    Experts,
    ExpertWeights,
    ModularExperts,
    MonolithicExperts,
    Routing,
)
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantParameters
from ep_runtime.kernels.quant.storage import (
    StoredShape,
    empty_hybrid,
    empty_stored,
    stored_shapes,
)
from ep_runtime.kernels.registry import experts_class
from ep_runtime.machine import Machine
from ep_runtime.modular_kernel import ModularKernel
from ep_runtime.monolithic_kernel import MonolithicKernel
from ep_runtime.phases import PhaseTimer
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.prepared_weights import named_tensors, without_stored
from ep_runtime.router import Router
from ep_runtime.runner import MoERunner
from ep_runtime.shared_expert import SharedExpert
from ep_runtime.small_passes import make_keep_known_ids


class LayerStats:
    """What a layer has done on this rank, since it was built."""

    def __init__(
        self,
        shared: SharedExpert | None,
        kernel: ModularKernel | MonolithicKernel,
        local_expert_ids: tuple[int, ...],
        num_experts: int,
    ) -> None:
        self._shared = shared
        self._kernel = kernel
        self._local_expert_ids = local_expert_ids
        self._num_experts = num_experts

    @property
    def shared_expert_calls(self) -> int:
        """Runs of the shared expert on this rank; a CUDA graph counts at capture."""
        return self._shared.calls if self._shared is not None else 0

    @property
    def tokens_per_expert(self) -> Tensor:
        """[E] int64 on the CPU: slots that landed on each expert this rank holds, 0 for others,
        so that the sum over an EP group is the group's load. Waits for the device."""
        counts = torch.zeros(self._num_experts, dtype=torch.int64)
        counts[list(self._local_expert_ids)] = self._kernel.tokens_per_expert.cpu()
        return counts


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer that holds this rank's experts only.

    Building it is a collective of its EP and TP groups: ranks that disagree about the plan all
    raise PlanError. Fill the weights with `load_experts`, or in place and then `finish_loading`.

    w13: [E_local, 2I, H], gate rows first, then up ([E_local, I, H] where not gated);
    w2: [E_local, H, I]; w13_bias, w2_bias: [E_local, 2I], [E_local, H] or None, in the layer's
    dtype; local expert i is global expert `local_expert_ids[i]`. With `moe.quantization` w13 and w2
    hold the stored values, and w13_quant, w2_quant (else None) what belongs to them, as
    `QuantizedTensor` says. Once loaded, those that the kernel keeps in a form of its own are here
    without memory (on meta); `load_experts` brings them back to load others.
    """

    def __init__(
        self,
        moe: MoEConfig,
        ctx: EPContext,
        *,
        experts: str = "auto",
        shared_experts: SharedExpertsConfig | None = None,
        plan: Plan | None = None,
    ) -> None:
        """plan: one that the group has agreed on already (`load_model` does, once for all layers);
        then `experts` and `shared_experts` are the plan's and must be left out."""
        super().__init__()
        if plan is None:
            machine = Machine.detect(ctx.device.type)
            plan = resolve_plan(
                moe, ctx.parallel, machine, experts=experts, shared_experts=shared_experts
            )
            agree_plan(plan, ctx.step_group)
        elif experts != "auto" or shared_experts is not None:
            raise ConfigError("experts and shared_experts are in the plan given; leave them out")
        else:
            _refuse_other_plan(plan, moe, ctx)
        self.moe, self.plan, self.ctx = moe, plan, ctx
        self._number = ctx.number_layer()
        self.placement = plan.placement
        self.local_expert_ids = plan.placement.experts_of(ctx.ep_rank)
        self._allocate_weights(moe, ctx.device)
        self._expert_map = local_expert_map(plan.placement, ctx.ep_group)
        self.router = Router(moe, ctx.device)
        self._keep_known_ids = make_keep_known_ids(moe.num_experts, ctx.device)
        self.shared: SharedExpert | None = None
        if moe.has_shared_expert:
            self.shared = SharedExpert(moe, ctx.device, plan.shared_compute)
        self._timer = PhaseTimer(ctx.streams)
        kernel = self._build_kernel(plan, ctx)
        self._runner = MoERunner(
            plan,
            router=self.router,
            kernel=kernel,
            shared=self.shared,
            streams=ctx.streams,
            timer=self._timer,
        )
        self.stats = LayerStats(self.shared, kernel, self.local_expert_ids, moe.num_experts)
        self._weights: ExpertWeights | None = None

    def _allocate_weights(self, moe: MoEConfig, device: torch.device) -> None:
        width, hidden = moe.moe_intermediate_size, moe.hidden_size
        num_parts = 2 if moe.experts_activation().is_gated else 1
        rows13 = width * num_parts

        def allocate(name: str, shapes: Mapping[str, StoredShape]) -> None:
            for key, tensor in self._empty(shapes, device).items():
                attribute = name if key == "values" else f"{name}_{key}"
                setattr(self, attribute, nn.Parameter(tensor, requires_grad=False))

        def plain(*shape: int) -> dict[str, StoredShape]:
            return {"values": StoredShape(shape, moe.torch_dtype)}

        self._shapes13, self._shapes2 = plain(rows13, hidden), plain(hidden, width)
        if (scheme := moe.quantization).is_quantised:
            dtype = moe.torch_dtype
            self._shapes13 = stored_shapes(scheme, rows13, hidden, num_parts=num_parts, dtype=dtype)
            self._shapes2 = stored_shapes(scheme, hidden, width, num_parts=1, dtype=dtype)
        self.w13: nn.Parameter
        self.w2: nn.Parameter
        allocate("w13", self._shapes13)
        allocate("w2", self._shapes2)
        self.w13_bias: nn.Parameter | None = None
        self.w2_bias: nn.Parameter | None = None
        if moe.expert_bias:
            allocate("w13_bias", plain(rows13))
            allocate("w2_bias", plain(hidden))

    def _empty(self, shapes: Mapping[str, StoredShape], device: torch.device) -> dict[str, Tensor]:
        """Memory for this rank's experts, by name."""
        experts, scheme = self.local_expert_ids, self.moe.quantization
        if "tiers" in shapes:
            return empty_hybrid(shapes, scheme, experts, device)
        return empty_stored(shapes, len(experts), device)

    def expert_tensors(self, projection: str) -> dict[str, Tensor]:
        """Of `w13` or `w2`, to be filled in place: `values`, and of a quantised layer what belongs
        to them under its name in `QuantParameters`; each [E_local, ...]."""
        names = self._shapes13 if projection == "w13" else self._shapes2
        tensors = {
            name: cast(
                Tensor, getattr(self, projection if name == "values" else f"{projection}_{name}")
            )
            for name in names
        }
        self._refuse_without_memory(tensors.values())
        return tensors

    def _refuse_without_memory(self, tensors: Iterable[Tensor]) -> None:
        if any(tensor.is_meta for tensor in tensors):
            raise ConfigError(
                f"the experts' weights are loaded, and experts {self.plan.experts} keeps them in "
                f"a form of its own; call load_experts to replace them"
            )

    @property
    def experts(self) -> Experts:
        """The kernel."""
        return self._experts

    @property
    def expert_weights(self) -> ExpertWeights:
        """The weights as the kernel takes them. Raises ConfigError before they are loaded."""
        if self._weights is None:
            raise ConfigError(
                "the layer has no weights yet; call load_experts, or finish_loading after filling "
                "w13, w2 and the rest in place"
            )
        return self._weights

    @property
    def w13_quant(self) -> QuantParameters | None:
        """What belongs to w13's stored values; None where the experts are not quantised.

        Raises ConfigError once the kernel keeps them in a form of its own.
        """
        return self._parameters_of("w13")

    @property
    def w2_quant(self) -> QuantParameters | None:
        """As `w13_quant`."""
        return self._parameters_of("w2")

    def _parameters_of(self, projection: str) -> QuantParameters | None:
        if not self.moe.quantization.is_quantised:
            return None
        tensors = self.expert_tensors(projection)
        del tensors["values"]
        return QuantParameters(**tensors)

    def _build_kernel(self, plan: Plan, ctx: EPContext) -> ModularKernel | MonolithicKernel:
        experts = experts_class(plan.experts)(plan.experts_shape(ctx.ep_rank))
        limit = ctx.parallel.max_tokens_per_rank
        ctx.workspace.reserve(experts.workspace_bytes(ctx.parallel.ep_size * limit))
        shape = plan.backend_shape()
        self._experts = experts
        ctx.watch_experts(experts)
        if isinstance(experts, MonolithicExperts):
            gathering: Any = ctx.backend(plan.backend, shape) if ctx.ep_group.size > 1 else None
            return MonolithicKernel(
                cast(GatheringBackend[object, object] | None, gathering),
                experts,
                max_tokens_per_rank=limit,
                workspace=ctx.workspace,
                timer=self._timer,
            )
        return ModularKernel(
            ctx.backend(plan.backend, shape),
            cast(ModularExperts, experts),
            max_tokens_per_rank=limit,
            workspace=ctx.workspace,
            timer=self._timer,
        )

    @torch.no_grad()
    def load_experts(
        self,
        *,
        w13: Tensor | QuantizedTensor,
        w2: Tensor | QuantizedTensor,
        router: Tensor,
        correction_bias: Tensor | None = None,
        router_bias: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        shared: Mapping[str, Tensor | QuantizedTensor | None] | None = None,
    ) -> None:
        """Take full (global) tensors and keep this rank's part, in the layer's dtype.

        w13: [E, 2I, H] ([E, I, H] where not gated); w2: [E, H, I]; with `moe.quantization` both
        are QuantizedTensors of its scheme, of all E experts; router: [E, H];
        correction_bias, router_bias: [E]; w13_bias: [E, 2I]; w2_bias: [E, H];
        shared: {"w13": [2S, H], "w2": [H, S], "gate": [1, H] or None}; with
        `moe.shared_quantization` w13 and w2 are QuantizedTensors of its scheme (E = 1).
        Raises ConfigError, before anything is copied, where a tensor is missing, not wanted, of
        another shape, or not of real floating-point numbers.
        """
        mine = list(self.local_expert_ids)
        shared = dict(shared or {})
        unknown = set(shared) - {"w13", "w2", "gate"}
        if unknown:
            raise ConfigError(f"shared has the keys {sorted(unknown)}; known are w13, w2, gate")
        num_experts = self.moe.num_experts
        stored: list[tuple[str, dict[str, Tensor]]] = []
        owned: list[tuple[str, Any, Any]] = []
        for name, given, shapes in (("w13", w13, self._shapes13), ("w2", w2, self._shapes2)):
            if self.moe.quantization.is_quantised:
                own = own_experts(
                    name,
                    given,
                    shapes=shapes,
                    scheme=self.moe.quantization,
                    num_experts=num_experts,
                    experts=mine,
                )
                stored.append((name, own))
            else:
                owned.append((name, getattr(self, name), given))
        owned += [
            ("w13_bias", self.w13_bias, w13_bias),
            ("w2_bias", self.w2_bias, w2_bias),
        ]
        whole: list[tuple[str, Any, Any]] = [
            ("router", self.router.weight, router),
            ("router_bias", self.router.bias, router_bias),
            ("correction_bias", self.router.correction_bias, correction_bias),
        ]
        wanted_owned = [t for t in owned if is_wanted(*t, num_experts=num_experts)]
        wanted_whole = [t for t in whole if is_wanted(*t)]
        is_stored = self.moe.shared_quantization.is_quantised
        for name in ("gate",) if is_stored else ("w13", "w2", "gate"):
            target = getattr(self.shared, name) if self.shared is not None else None
            is_wanted(f'shared["{name}"]', target, shared.get(name))
        if is_stored:
            check_shared(shared, self.moe)
        if any(parameter.is_meta for parameter in self.parameters()):
            self._weights = None  # the new ones take their memory
            self._allocate_weights(self.moe, self.ctx.device)
        for name, tensors in stored:
            places = self.expert_tensors(name)
            for key, tensor in tensors.items():
                places[key].copy_(tensor)
        for name, _, given in wanted_owned:
            getattr(self, name).copy_(given[mine])
        for _, target, given in wanted_whole:
            target.copy_(given)
        if self.shared is not None:
            self.shared.fill(shared)
        self.finish_loading()

    @torch.no_grad()
    def finish_loading(self) -> None:
        """Bring the weights, which were filled in place, into the kernel's layout.

        Of a tensor that the kernel copied only its copy stays; see `without_stored`.
        """
        w13, w2 = self.expert_tensors("w13")["values"], self.expert_tensors("w2")["values"]
        stored = ExpertWeights(w13, w2, self.w13_bias, self.w2_bias, self.w13_quant, self.w2_quant)
        self._refuse_without_memory(named_tensors(stored).values())
        self._weights = self._experts.prepare_weights(stored)
        for name, parameter in without_stored(stored, self._weights).items():
            setattr(self, name, parameter)

    @torch.no_grad()
    def forward(
        self,
        hidden_states: Tensor,
        *,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer for this rank's rows: a fresh [T, H] of the input's dtype.

        hidden_states: [T, H]; T may be 0 and differ between DP ranks; the TP ranks of a DP group
        hold the same rows. topk_ids: [T, K] int32 or int64 global ids, one outside
        [0, num_experts) contributes 0; topk_weights: [T, K] float32, final: neither normalised
        nor scaled. Both or neither; without them the layer's router decides.
        A collective of the EP group (and of the TP group): every rank calls, in the same order.
        """
        weights = self.expert_weights
        self._check_input(hidden_states)
        routing = self._given_routing(hidden_states, topk_ids, topk_weights)
        num_tokens = hidden_states.shape[0]
        rows_per_rank = self.ctx.rows_per_rank(num_tokens, call=self._number)
        own = tp_slice(num_tokens, self.ctx.parallel.tp_size, self.ctx.tp_rank)
        if routing is not None:
            routing = Routing(routing.topk_ids[own], routing.topk_weights[own])
        output = self._runner.run(
            hidden_states[own].contiguous(),
            weights,
            expert_map=self._expert_map,
            routing=routing,
            rows_per_rank=rows_per_rank,
        )
        return self.ctx.gather_tp_slices(output, num_tokens)

    def record_timings(self, enabled: bool) -> None:
        """Start or stop timing the phases of each call."""
        self._timer.enabled = enabled

    @property
    def timings(self) -> dict[str, float]:
        """Seconds in router, dispatch, experts, combine and shared, summed over timed calls."""
        return self._timer.seconds()

    def _check_input(self, hidden_states: Tensor) -> None:
        hidden, dtype = self.moe.hidden_size, self.moe.torch_dtype
        if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden:
            raise ConfigError(
                f"hidden_states has shape {list(hidden_states.shape)}; wanted [T, {hidden}]"
            )
        if hidden_states.dtype != dtype:
            raise ConfigError(
                f"hidden_states is {hidden_states.dtype}; the layer's dtype is {dtype}"
            )
        if hidden_states.device != self.ctx.device:
            raise ConfigError(
                f"hidden_states is on {hidden_states.device}; the layer is on {self.ctx.device}"
            )

    def _given_routing(
        self, hidden_states: Tensor, topk_ids: Tensor | None, topk_weights: Tensor | None
    ) -> Routing | None:
        if topk_ids is None and topk_weights is None:
            return None
        if topk_ids is None or topk_weights is None:
            raise ConfigError("topk_ids and topk_weights are given together, or neither")
        wanted = (hidden_states.shape[0], self.moe.top_k)
        for name, given in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            if given.device != hidden_states.device:
                raise ConfigError(
                    f"{name} is on {given.device}; hidden_states is on {hidden_states.device}"
                )
            if tuple(given.shape) != wanted:
                raise ConfigError(
                    f"{name} has shape {list(given.shape)}; wanted {list(wanted)} = [T, top_k]"
                )
        if topk_ids.dtype not in (torch.int32, torch.int64):
            raise ConfigError(f"topk_ids is {topk_ids.dtype}; wanted int32 or int64")
        if topk_weights.dtype != torch.float32:
            raise ConfigError(f"topk_weights is {topk_weights.dtype}; wanted float32")
        return Routing(self._keep_known_ids(topk_ids), topk_weights)


def _refuse_other_plan(plan: Plan, moe: MoEConfig, ctx: EPContext) -> None:
    """A plan may name another backend than the context's; the layer and the ranks are its own."""
    unlike = [] if plan.moe == moe else ["moe"]
    unlike += [
        f"parallel.{key} ({getattr(plan.parallel, key)}, not {getattr(ctx.parallel, key)})"
        for key in ("dp_size", "tp_size", "ep_size", "max_tokens_per_rank")
        if getattr(plan.parallel, key) != getattr(ctx.parallel, key)
    ]
    if unlike:
        raise ConfigError(
            f"the plan given was made for another {', '.join(unlike)}; resolve one for this layer"
        )
