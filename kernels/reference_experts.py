"""Experts in eager torch with float32 arithmetic: the oracle, and the default on a CPU.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, I intermediate size.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    BatchedExpertInput,
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertWeights,
    InputFormat,
    ModularExperts,
    StandardExpertInput,
)
from ep_runtime.kernels.workspace import Workspace


class ReferenceExperts(ModularExperts):
    """One matrix product per local expert that has rows; everything in float32 until the end.

    Waits for the device once a call, to read how many rows each expert has; so it cannot be
    captured into a CUDA graph. Takes no workspace.
    """

    capabilities = ExpertsCapabilities(
        name="reference",
        kind=ExpertsKind.MODULAR,
        formats=frozenset(InputFormat),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        device_types=frozenset({"cpu", "cuda"}),
        activations=frozenset(ActivationKind),
        supports_bias=True,
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.CERTIFIED,
                "tests/kernels/test_reference_experts.py::test_calls_share_no_state",
            ),
        ),
    )

    def workspace_bytes(self, max_rows: int) -> int:
        """None: its scratch comes from torch's allocator."""
        return 0

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows that nobody wrote come out as 0. Keeps no gradients."""
        with torch.no_grad():
            if isinstance(expert_input, BatchedExpertInput):
                return run_batched_reference(expert_input, weights, self.shape.activation)
            return run_standard_reference(expert_input, weights, self.shape.activation)


def run_standard_reference(
    expert_input: StandardExpertInput, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """Weighted sum over each row's slots, in the order of the slots.

    Slots are sorted by expert once; each expert's rows are gathered, computed, and laid at their
    sorted position in a float32 [N_valid + 1, H] buffer whose last row is 0, where every slot
    without an expert looks. Returns a fresh [R, H] in the input's dtype.
    """
    rows, ids = expert_input.hidden_states, expert_input.topk_ids
    num_rows, top_k = ids.shape
    num_experts = weights.w13.shape[0]
    is_valid = (ids >= 0) & (ids < num_experts)
    if expert_input.num_rows is not None:
        is_valid &= torch.arange(num_rows, device=ids.device)[:, None] < expert_input.num_rows
    experts = torch.where(is_valid, ids, num_experts).flatten().long()
    order = experts.argsort(stable=True)
    counts = experts.bincount(minlength=num_experts + 1)[:num_experts].tolist()

    num_valid = sum(counts)
    order = order[:num_valid]
    slot_rows = torch.div(order, top_k, rounding_mode="floor")
    slot_weights = expert_input.topk_weights.flatten()[order].float()
    slot_outputs = rows.new_zeros((num_valid + 1, weights.w2.shape[1]), dtype=torch.float32)
    end = 0
    for expert, count in enumerate(counts):
        if count:
            start, end = end, end + count
            expert_rows = rows.index_select(0, slot_rows[start:end])
            output = _run_expert(expert_rows, weights, expert, activation)
            torch.mul(output, slot_weights[start:end, None], out=slot_outputs[start:end])

    position = torch.full_like(experts, num_valid)
    position[order] = torch.arange(num_valid, device=ids.device)
    position = position.view(num_rows, top_k)
    total = rows.new_zeros((num_rows, weights.w2.shape[1]), dtype=torch.float32)
    for k in range(top_k):
        total += slot_outputs.index_select(0, position[:, k])
    return total.to(rows.dtype)


def run_batched_reference(
    expert_input: BatchedExpertInput, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """Raw rows of each expert, 0 past its count. Returns a fresh [E_local, capacity, H]."""
    rows = expert_input.hidden_states
    output = rows.new_zeros((*rows.shape[:2], weights.w2.shape[1]))
    for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
        if count:
            raw = _run_expert(rows[expert, :count], weights, expert, activation)
            output[expert, :count] = raw.to(rows.dtype)
    return output


def _run_expert(
    rows: Tensor, weights: ExpertWeights, expert: int, activation: Activation
) -> Tensor:
    """One expert applied to [n, H] rows; returns float32 [n, H]."""
    projected = rows.float() @ weights.w13[expert].float().T
    if weights.w13_bias is not None:
        projected += weights.w13_bias[expert].float()
    output = apply_activation(projected, activation) @ weights.w2[expert].float().T
    if weights.w2_bias is not None:
        output += weights.w2_bias[expert].float()
    return output
