"""What `benchmarks.resident_experts` measures: cases, rows and weights for them, contenders."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.read_experts import ExpertsReader
from ep_runtime.all2all.expert_ids import IdTable
from ep_runtime.kernels.base import (
    Activation,
    ExpertsShape,
    ExpertWeights,
    MonolithicContext,
    RoutingSpec,
    StandardExpertInput,
)
from ep_runtime.kernels.fused_routing import FusedRouting, SlotCounter
from ep_runtime.kernels.reference_experts import run_standard_reference
from ep_runtime.kernels.resident_experts import ResidentExperts
from ep_runtime.kernels.routing import route_tokens
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace

DTYPE = torch.bfloat16
NUM_WEIGHT_SETS = 2
# Logits are uniform in [0, 1) beside these, so that they decide alone.
_CHOSEN_HERE, _CHOSEN_ELSEWHERE, _NOT_CHOSEN = 4.0, 2.0, -4.0


@dataclass(frozen=True)
class Case:
    """tokens: T. num_experts: of the layer. active_experts: those of this rank that have rows."""

    tokens: int
    num_experts: int
    active_experts: int

    def fault(self, num_local_experts: int, top_k: int) -> str | None:
        """Why no routing can make it; None where one can."""
        most_here = min(num_local_experts, top_k)
        if not 0 < self.active_experts <= most_here:
            return f"active_experts ({self.active_experts}) must be 1 to {most_here}"
        elsewhere, needed = self.num_experts - num_local_experts, top_k - self.active_experts
        if elsewhere < needed:
            return (
                f"{needed} of top_k ({top_k}) slots must go to experts of other ranks, of which "
                f"there are {elsewhere}"
            )
        return None


class Layer:
    """This rank's experts, as the first ids of each layer that a case asks for."""

    def __init__(
        self,
        device: torch.device,
        *,
        num_local_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
    ) -> None:
        self.device = device
        self.num_local_experts, self.top_k = num_local_experts, top_k
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.sets = [self._make_weights() for _ in range(NUM_WEIGHT_SETS)]

    def _make_weights(self) -> ExpertWeights:
        hidden, width = self.hidden_size, self.intermediate_size

        def random(rows: int, columns: int) -> Tensor:
            size = (self.num_local_experts, rows, columns)
            weight = torch.empty(size, dtype=DTYPE, device=self.device)
            return weight.normal_(std=columns**-0.5)

        return ExpertWeights(random(2 * width, hidden), random(hidden, width))

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size * DTYPE.itemsize

    def shape(self, num_experts: int) -> ExpertsShape:
        return ExpertsShape(
            self.num_local_experts,
            self.hidden_size,
            self.intermediate_size,
            self.top_k,
            Activation(),
            DTYPE,
            num_experts=num_experts,
        )

    def make_rows(self, case: Case) -> tuple[Tensor, Tensor]:
        """[T, H] and [T, E] logits by which every row chooses the first active_experts."""
        active, local = case.active_experts, self.num_local_experts
        logits = torch.rand(case.tokens, case.num_experts, device=self.device)
        logits[:, :active] += _CHOSEN_HERE
        logits[:, active:local] += _NOT_CHOSEN
        logits[:, local : local + self.top_k - active] += _CHOSEN_ELSEWHERE
        rows = torch.randn(case.tokens, self.hidden_size, device=self.device)
        return rows.to(DTYPE), logits


class CaseRun:
    """The contenders of one case, each as a function of the number of a weight set."""

    def __init__(self, layer: Layer, case: Case) -> None:
        self.layer, self.case = layer, case
        device, shape = layer.device, layer.shape(case.num_experts)
        spec = RoutingSpec(case.num_experts, layer.top_k)
        self.rows, self.logits = layer.make_rows(case)
        self.expert_map = torch.full((case.num_experts,), -1, dtype=torch.int32, device=device)
        self.expert_map[: layer.num_local_experts] = torch.arange(layer.num_local_experts)
        self.local_ids = IdTable(self.expert_map)
        counts = torch.zeros(layer.num_local_experts, dtype=torch.int64, device=device)
        routing = route_tokens(self.logits, spec, None)
        self.given = StandardExpertInput(
            self.rows, self.local_ids.look_up(routing.topk_ids), routing.topk_weights
        )
        self._route, self._count = FusedRouting(spec, device), SlotCounter(counts)
        self._triton, self.resident = TritonExperts(shape), ResidentExperts(shape)
        self._reader = ExpertsReader(device)
        sizes = [kernel.workspace_bytes(case.tokens) for kernel in (self._triton, self.resident)]
        self._workspace = Workspace(device, max(sizes))
        self._contexts = [
            MonolithicContext(
                spec, self.resident.prepare_weights(weights), self.expert_map, counts.clone()
            )
            for weights in layer.sets
        ]
        self._prepared = [self._triton.prepare_weights(weights) for weights in layer.sets]

    def contenders(self) -> dict[str, Callable[[int], Tensor]]:
        return {
            "triton": lambda index: self._run_triton(self.given, index),
            "route+triton": self._route_and_run_triton,
            "resident": lambda index: self.resident.run(
                self.rows, self.logits, context=self._contexts[index], workspace=self._workspace
            ),
            "read": lambda index: self._reader(self.layer.sets[index], self.case.active_experts),
        }

    def _run_triton(self, given: StandardExpertInput, index: int) -> Tensor:
        return self._triton.run(given, self._prepared[index], self._workspace)

    def _route_and_run_triton(self, index: int) -> Tensor:
        routing = self._route(self.logits, None)
        local_ids = self.local_ids.look_up(routing.topk_ids)
        self._count(local_ids, None)
        given = StandardExpertInput(self.rows, local_ids, routing.topk_weights)
        return self._run_triton(given, index)

    def expected(self) -> list[Tensor]:
        """[T, H] float32 of each weight set."""
        wide = StandardExpertInput(self.rows.float(), self.given.topk_ids, self.given.topk_weights)
        return [run_standard_reference(wide, w, Activation()) for w in self.layer.sets]
