"""Seeded inputs for experts kernels, and the plainest possible answer to compare with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.workspace import Workspace


@dataclass(frozen=True)
class ExpertsCase:
    """One experts layer and the rows it receives; the name reads as the test's id."""

    name: str
    num_rows: int = 19
    num_experts: int = 5
    hidden_size: int = 128
    intermediate_size: int = 96
    top_k: int = 2
    dtype: torch.dtype = torch.float32
    kind: ActivationKind = ActivationKind.SILU
    limit: float | None = None
    has_bias: bool = False
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape(
            num_local_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            top_k=self.top_k,
            activation=Activation(self.kind, limit=self.limit),
            dtype=self.dtype,
            has_bias=self.has_bias,
        )

    def _random(self, *size: int, salt: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*size, generator=generator)

    def weights(self, device: torch.device) -> ExpertWeights:
        """Scaled so that every layer's values stay near 1."""
        num_experts, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        projected = 2 * inner if self.shape.activation.is_gated else inner

        def put(tensor: Tensor) -> Tensor:
            return tensor.to(device, self.dtype)

        return ExpertWeights(
            w13=put(self._random(num_experts, projected, hidden, salt=1) / hidden**0.5),
            w2=put(self._random(num_experts, hidden, inner, salt=2) / inner**0.5),
            w13_bias=put(self._random(num_experts, projected, salt=3)) if self.has_bias else None,
            w2_bias=put(self._random(num_experts, hidden, salt=4)) if self.has_bias else None,
        )

    def expert_input(self, device: torch.device) -> StandardExpertInput:
        """Ids of every kind: local, repeated within a row, and -1 (its weight is then NaN)."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(
            -1, self.num_experts, (self.num_rows, self.top_k), generator=generator
        ).to(torch.int32)
        topk_weights = torch.rand(self.num_rows, self.top_k, generator=generator)
        topk_weights[ids < 0] = torch.nan
        rows = self._random(self.num_rows, self.hidden_size, salt=5)
        return StandardExpertInput(
            rows.to(device, self.dtype), ids.to(device), topk_weights.to(device)
        )


def naive_experts(
    expert_input: StandardExpertInput, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """Row by row and slot by slot in float64: [R, H] float64 on the CPU, 0 past num_rows."""
    rows = expert_input.hidden_states.double().cpu()
    ids = expert_input.topk_ids.tolist()
    topk_weights = expert_input.topk_weights.double().cpu()
    num_rows = len(ids) if expert_input.num_rows is None else int(expert_input.num_rows.item())
    result = torch.zeros_like(rows)
    for row in range(num_rows):
        for slot, expert in enumerate(ids[row]):
            if 0 <= expert < weights.w13.shape[0]:
                output = naive_expert(rows[row], weights, expert, activation)
                result[row] += topk_weights[row, slot] * output
    return result


def naive_expert(
    row: Tensor, weights: ExpertWeights, expert: int, activation: Activation
) -> Tensor:
    """One expert on one float64 row; the activation in float32, as it is defined."""
    projected = weights.w13[expert].double().cpu() @ row
    if weights.w13_bias is not None:
        projected += weights.w13_bias[expert].double().cpu()
    activated = apply_activation(projected.float(), activation).double()
    output = weights.w2[expert].double().cpu() @ activated
    if weights.w2_bias is not None:
        output += weights.w2_bias[expert].double().cpu()
    return output


def large_raw_values(
    device: torch.device,
) -> tuple[StandardExpertInput, ExpertWeights, ExpertsShape]:
    """One float16 expert whose raw output is 1e5 everywhere, and a row that weights it by .1."""
    size = 64
    shape = ExpertsShape(1, size, size, 1, Activation(ActivationKind.RELU2), torch.float16)
    weights = ExpertWeights(
        torch.full((1, size, size), 10 / size, dtype=torch.float16, device=device),
        torch.full((1, size, size), 15.625, dtype=torch.float16, device=device),
    )
    expert_input = StandardExpertInput(
        torch.ones(2, size, dtype=torch.float16, device=device),
        torch.zeros(2, 1, dtype=torch.int32, device=device),
        torch.full((2, 1), 0.1, device=device),
    )
    return expert_input, weights, shape


def poisoned_workspace(device: torch.device, num_bytes: int) -> "RecordingWorkspace":
    """A workspace of all-ones bits: NaN as floats, -1 as integers."""
    workspace = RecordingWorkspace(device, num_bytes)
    workspace._block.fill_(255)
    return workspace


class RecordingWorkspace(Workspace):
    """Notes how far the arena was filled and whether a take did not fit."""

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        super().__init__(device, num_bytes)
        self.peak_bytes = 0
        self.overflowed = False

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = super().take(shape, dtype)
        self.peak_bytes = max(self.peak_bytes, self._offset)
        inside = tensor.untyped_storage().data_ptr() == self._block.untyped_storage().data_ptr()
        self.overflowed |= not inside
        return tensor


# What every kernel for the standard format must get right.
EXPERTS_CASES = [
    ExpertsCase("float32"),
    ExpertsCase("bfloat16", dtype=torch.bfloat16),
    ExpertsCase("float16", dtype=torch.float16),
    ExpertsCase("hidden_300_intermediate_160", hidden_size=300, intermediate_size=160),
    ExpertsCase("hidden_2880_intermediate_416", 7, 3, 2880, 416, dtype=torch.bfloat16),
    ExpertsCase("gelu", kind=ActivationKind.GELU),
    ExpertsCase("swigluoai_without_limit", kind=ActivationKind.SWIGLUOAI),
    ExpertsCase("swigluoai_with_limit", kind=ActivationKind.SWIGLUOAI, limit=0.7),
    ExpertsCase("relu2", kind=ActivationKind.RELU2),
    ExpertsCase("bias", has_bias=True),
    ExpertsCase(
        "relu2_bias_float16", dtype=torch.float16, kind=ActivationKind.RELU2, has_bias=True
    ),
    ExpertsCase("one_row", num_rows=1),
    ExpertsCase("one_expert", num_experts=1, top_k=1),
    ExpertsCase("more_slots_than_experts", num_experts=3, top_k=7),
    ExpertsCase("more_experts_than_slots", num_rows=3, num_experts=40),
    ExpertsCase("many_rows", num_rows=300, num_experts=3, hidden_size=48, intermediate_size=32),
    ExpertsCase("intermediate_1", intermediate_size=1),
    ExpertsCase("hidden_1", hidden_size=1),
]
