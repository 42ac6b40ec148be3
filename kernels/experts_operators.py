"""An experts kernel's call as a torch operator, where somebody looks at operators.

Two operators, `ep_runtime::run_experts` and `ep_runtime::run_monolithic_experts`, serve every
kernel, whatever it launches inside: they read rows, routing and weights, write the workspace (and
the counts), and return the rows. A kernel that is torch code throughout needs none.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ep_runtime.kernels.base import (
    BatchedExpertInput,
    ExpertInput,
    ExpertsCapabilities,
    ExpertWeights,
    ModularExperts,
    MonolithicContext,
    MonolithicExperts,
    RoutingSpec,
    StandardExpertInput,
)
from ep_runtime.kernels.observed import handle_of, is_observed, owner_of
from ep_runtime.kernels.workspace import Workspace

AnyT = TypeVar("AnyT")


def run_experts(
    experts: ModularExperts,
    expert_input: ExpertInput,
    weights: ExpertWeights,
    workspace: Workspace,
) -> Tensor:
    """`experts.run`, through its operator where somebody looks."""
    if not (is_observed(expert_input.hidden_states) and _launches(experts.capabilities)):
        return experts.run(expert_input, weights, workspace)
    routing: tuple[Tensor | None, ...]
    if isinstance(expert_input, StandardExpertInput):
        routing = (expert_input.topk_ids, expert_input.topk_weights, expert_input.num_rows)
    else:
        routing = (expert_input.num_rows_per_expert,)
    output: Tensor = torch.ops.ep_runtime.run_experts(
        expert_input.hidden_states,
        expert_input.scales,
        routing,
        flatten_tensors(weights),
        workspace.rest,
        expert_input.num_source_rows,
        handle_of(experts),
        handle_of(weights),
    )
    return output


def run_monolithic_experts(
    experts: MonolithicExperts,
    hidden_states: Tensor,
    router_logits: Tensor,
    *,
    context: MonolithicContext,
    workspace: Workspace,
) -> Tensor:
    """`experts.run`, through its operator where somebody looks."""
    if not (is_observed(hidden_states) and _launches(experts.capabilities)):
        return experts.run(hidden_states, router_logits, context=context, workspace=workspace)
    output: Tensor = torch.ops.ep_runtime.run_monolithic_experts(
        hidden_states,
        router_logits,
        context.expert_map,
        context.correction_bias,
        flatten_tensors(context.weights),
        context.tokens_per_expert,
        workspace.rest,
        json.dumps(asdict(context.routing)),
        handle_of(experts),
        handle_of(context.weights),
    )
    return output


def _launches(capabilities: ExpertsCapabilities) -> bool:
    """Whether a kernel does what torch's dispatcher does not see."""
    return capabilities.needs_triton or capabilities.needs_package is not None


def flatten_tensors(value: object) -> list[Tensor]:
    """Every tensor of a value, in the order of the fields of its dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in flatten_tensors(part)]
    if is_dataclass(value):
        return flatten_tensors([getattr(value, field.name) for field in fields(value)])
    return []


def rebuild_tensors(like: AnyT, flat: Sequence[Tensor]) -> AnyT:
    """A value as `like` with other tensors: what `flatten_tensors` gives of it is `flat`."""
    tensors = iter(flat)
    return cast(AnyT, _replace_tensors(like, tensors))


def _replace_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, (tuple, list)):
        return type(value)(_replace_tensors(part, tensors) for part in value)
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        parts = {name: _replace_tensors(getattr(value, name), tensors) for name in names}
        return type(value)(**parts)  # type: ignore[misc]
    return value


@torch.library.custom_op("ep_runtime::run_experts", mutates_args=("workspace",))
def _run_experts(
    hidden_states: Tensor,
    scales: Tensor | None,
    routing: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    workspace: Tensor,
    num_source_rows: int | None,
    kernel: int,
    weights_layout: int,
) -> Tensor:
    """routing: topk_ids, topk_weights, num_rows of standard rows; the counts of batched ones.
    weights_layout: handle of the ExpertWeights whose tensors these are, or stand for.
    """
    experts: ModularExperts = owner_of(kernel)
    expert_input: ExpertInput
    first, *others = routing
    assert first is not None  # by run_experts
    if others:
        topk_weights, num_rows = others
        assert topk_weights is not None  # by run_experts
        expert_input = StandardExpertInput(
            hidden_states, first, topk_weights, num_rows, scales, num_source_rows
        )
    else:
        expert_input = BatchedExpertInput(hidden_states, first, num_source_rows, scales)
    given: ExpertWeights = rebuild_tensors(owner_of(weights_layout), weights)
    return experts.run(expert_input, given, Workspace.over(workspace))


@_run_experts.register_fake
def _(
    hidden_states: Tensor,
    scales: Tensor | None,
    routing: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    workspace: Tensor,
    num_source_rows: int | None,
    kernel: int,
    weights_layout: int,
) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape, dtype=owner_of(kernel).shape.dtype)


@torch.library.custom_op(
    "ep_runtime::run_monolithic_experts", mutates_args=("tokens_per_expert", "workspace")
)
def _run_monolithic_experts(
    hidden_states: Tensor,
    router_logits: Tensor,
    expert_map: Tensor,
    correction_bias: Tensor | None,
    weights: Sequence[Tensor],
    tokens_per_expert: Tensor,
    workspace: Tensor,
    routing: str,
    kernel: int,
    weights_layout: int,
) -> Tensor:
    """routing: the fields of a RoutingSpec as JSON."""
    experts: MonolithicExperts = owner_of(kernel)
    context = MonolithicContext(
        routing=RoutingSpec(**json.loads(routing)),
        weights=rebuild_tensors(owner_of(weights_layout), weights),
        expert_map=expert_map,
        tokens_per_expert=tokens_per_expert,
        correction_bias=correction_bias,
    )
    return experts.run(
        hidden_states, router_logits, context=context, workspace=Workspace.over(workspace)
    )


@_run_monolithic_experts.register_fake
def _(
    hidden_states: Tensor,
    router_logits: Tensor,
    expert_map: Tensor,
    correction_bias: Tensor | None,
    weights: Sequence[Tensor],
    tokens_per_expert: Tensor,
    workspace: Tensor,
    routing: str,
    kernel: int,
    weights_layout: int,
) -> Tensor:
    return torch.empty_like(hidden_states)
