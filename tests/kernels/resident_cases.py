"""Layers, rows and router logits for the resident experts, and what they must give."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    ExpertsShape,
    ExpertWeights,
    MonolithicContext,
    RoutingSpec,
    StandardExpertInput,
)
from ep_runtime.kernels.reference_experts import run_standard_reference
from ep_runtime.kernels.resident_experts import ResidentExperts
from ep_runtime.kernels.routing import route_tokens
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase, RecordingWorkspace, poisoned_workspace


@dataclass(frozen=True)
class ResidentCase:
    """One layer, of which this rank has `num_local_experts` of `routing.num_experts` experts."""

    name: str
    routing: RoutingSpec
    num_rows: int = 5
    num_local_experts: int = 5
    hidden_size: int = 128
    intermediate_size: int = 96
    dtype: torch.dtype = torch.float32
    activation: Activation = field(default_factory=Activation)
    has_bias: bool = False
    has_correction_bias: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape(
            num_local_experts=self.num_local_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            top_k=self.routing.top_k,
            activation=self.activation,
            dtype=self.dtype,
            has_bias=self.has_bias,
            num_experts=self.routing.num_experts,
        )

    def weights(self, device: torch.device) -> ExpertWeights:
        case = ExpertsCase(
            self.name,
            num_experts=self.num_local_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            top_k=self.routing.top_k,
            dtype=self.dtype,
            kind=self.activation.kind,
            limit=self.activation.limit,
            has_bias=self.has_bias,
            seed=int(torch.randint(2**31, ())),
        )
        return case.weights(device)


@dataclass
class ResidentCall:
    """What one call is given, fresh random numbers each time it is made."""

    case: ResidentCase
    hidden_states: Tensor
    logits: Tensor
    context: MonolithicContext

    @classmethod
    def random(cls, case: ResidentCase, device: torch.device) -> "ResidentCall":
        spec = case.routing
        local = torch.randperm(spec.num_experts)[: case.num_local_experts]
        expert_map = torch.full((spec.num_experts,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(case.num_local_experts, dtype=torch.int32)
        bias = torch.randn(spec.num_experts, device=device) if case.has_correction_bias else None
        weights = ResidentExperts(case.shape).prepare_weights(case.weights(device))
        return cls(
            case,
            torch.randn(case.num_rows, case.hidden_size).to(device, case.dtype),
            torch.randn(case.num_rows, spec.num_experts).to(device),
            MonolithicContext(
                routing=spec,
                weights=weights,
                expert_map=expert_map.to(device),
                tokens_per_expert=torch.zeros(
                    case.num_local_experts, dtype=torch.int64, device=device
                ),
                correction_bias=bias,
            ),
        )

    def local_rows(self) -> StandardExpertInput:
        """The rows with the slots that the definition of routing gives them here."""
        routing = route_tokens(self.logits, self.case.routing, self.context.correction_bias)
        ids = routing.topk_ids.long()
        local = torch.where(ids >= 0, self.context.expert_map[ids.clamp(min=0)], -1)
        return StandardExpertInput(self.hidden_states, local.to(torch.int32), routing.topk_weights)

    def expected(self) -> Tensor:
        """[T, H] float32, of float32 products."""
        rows, weights = self.local_rows(), self.context.weights
        wide = replace(rows, hidden_states=rows.hidden_states.float())
        return run_standard_reference(wide, weights, self.case.activation)

    def expected_counts(self) -> Tensor:
        local = self.local_rows().topk_ids
        return torch.bincount(local[local >= 0].long(), minlength=self.case.num_local_experts)

    def run(
        self, kernel: ResidentExperts | None = None, workspace: Workspace | None = None
    ) -> Tensor:
        """In a poisoned workspace of exactly the promised size, which must suffice."""
        kernel = kernel or ResidentExperts(self.case.shape)
        if workspace is None:
            num_bytes = kernel.workspace_bytes(self.case.num_rows)
            workspace = poisoned_workspace(self.hidden_states.device, num_bytes)
        output = kernel.run(
            self.hidden_states, self.logits, context=self.context, workspace=workspace
        )
        assert not (isinstance(workspace, RecordingWorkspace) and workspace.overflowed)
        return output


def _softmax(num_experts: int = 12, top_k: int = 3) -> RoutingSpec:
    return RoutingSpec(num_experts, top_k)


_GROUPED = RoutingSpec(16, 3, "softmax", n_group=4, topk_group=2, norm_topk_prob=False)
_DEEPSEEK = RoutingSpec(
    20, 4, "sigmoid", 5, 2, "top2_sum", norm_topk_prob=True, routed_scaling_factor=2.5
)

CASES = [
    ResidentCase("softmax", _softmax()),
    ResidentCase("bfloat16", _softmax(), dtype=torch.bfloat16),
    ResidentCase("float16", _softmax(), dtype=torch.float16),
    ResidentCase("one_row", _softmax(), num_rows=1),
    ResidentCase("most_rows", _softmax(), num_rows=64),
    ResidentCase("groups_by_their_best", _GROUPED, num_rows=9),
    ResidentCase("deepseek", _DEEPSEEK, num_rows=17, has_correction_bias=True),
    ResidentCase("sigmoid_unscaled", RoutingSpec(7, 2, "sigmoid", norm_topk_prob=False)),
    ResidentCase("correction_bias_softmax", _softmax(), has_correction_bias=True),
    ResidentCase("top_1", _softmax(6, 1)),
    ResidentCase("every_expert", _softmax(5, 5)),
    ResidentCase("one_expert", _softmax(1, 1), num_local_experts=1),
    ResidentCase("more_experts_than_slots", _softmax(257, 2), num_rows=2, num_local_experts=40),
    ResidentCase("hidden_300_intermediate_97", _softmax(), hidden_size=300, intermediate_size=97),
    ResidentCase("sizes_of_1", _softmax(), hidden_size=1, intermediate_size=1),
    ResidentCase("gelu", _softmax(), activation=Activation(ActivationKind.GELU)),
    ResidentCase(
        "swigluoai",
        _softmax(),
        activation=Activation(ActivationKind.SWIGLUOAI, limit=0.7),
        has_bias=True,
    ),
    ResidentCase("relu2", _softmax(), activation=Activation(ActivationKind.RELU2)),
    ResidentCase(
        "relu2_bias", _softmax(), activation=Activation(ActivationKind.RELU2), has_bias=True
    ),
]
