"""Experts in eager torch with float32 arithmetic: the oracle, and the default on a CPU.

Shapes: R rows, K slots a row, N = R * K slots, H hidden size, I intermediate size.
"""

from dataclasses import replace

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
from ep_runtime.kernels.quant.dequantize import DEQUANTIZED_SCHEMES, dequantize_expert
from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme, RowScheme, WeightScheme
from ep_runtime.kernels.workspace import Workspace


class ReferenceExperts(ModularExperts):
    """One matrix product per local expert that has rows; everything in float32 until the end.

    Quantised weights are dequantised one expert at a time, and only where it has rows.
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
        schemes=frozenset({WeightScheme.NONE, *DEQUANTIZED_SCHEMES}),
        rows=frozenset(RowScheme),
        supports_bias=True,
        is_reference=True,
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.CERTIFIED,
                "tests/kernels/test_reference_experts.py::test_calls_share_no_state",
                owns="scratch from torch's allocator, of the current stream",
                record="benchmarks/results/audit_reference.json",
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
        activation, scheme = self.shape.activation, self.shape.scheme
        with torch.no_grad():
            expert_input = _without_scales(expert_input)
            if isinstance(expert_input, BatchedExpertInput):
                output = run_batched_reference(expert_input, weights, activation, scheme)
            else:
                output = run_standard_reference(expert_input, weights, activation, scheme)
            return output.to(self.shape.dtype)


def _without_scales(expert_input: ExpertInput) -> ExpertInput:
    """Rows in fp8 as float32; others as they are."""
    values, scales = expert_input.hidden_states, expert_input.scales
    if scales is None:
        return expert_input
    # Not above: it imports Triton, without which this kernel runs all the same.
    from ep_runtime.kernels.quant.fp8_rows import dequantize_rows

    rows = dequantize_rows(values.flatten(0, -2), scales.flatten(0, -2), torch.float32)
    return replace(expert_input, hidden_states=rows.view(values.shape), scales=None)


def run_standard_reference(
    expert_input: StandardExpertInput,
    weights: ExpertWeights,
    activation: Activation,
    scheme: QuantScheme = UNQUANTISED,
) -> Tensor:
    """Weighted sum over each row's slots, in the order of the slots.

    Slots are sorted by expert once; each expert's rows are gathered, computed, and laid at their
    sorted position in a float32 [N_valid + 1, H] buffer whose last row is 0, where every slot
    without an expert looks. Returns a fresh [R, H] in the input's dtype.
    """
    rows, ids = expert_input.hidden_states, expert_input.topk_ids
    num_rows, top_k = ids.shape
    num_experts = weights.num_experts
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
            output = _run_expert(expert_rows, weights, expert, activation, scheme)
            torch.mul(output, slot_weights[start:end, None], out=slot_outputs[start:end])

    position = torch.full_like(experts, num_valid)
    position[order] = torch.arange(num_valid, device=ids.device)
    position = position.view(num_rows, top_k)
    total = rows.new_zeros((num_rows, weights.w2.shape[1]), dtype=torch.float32)
    for k in range(top_k):
        total += slot_outputs.index_select(0, position[:, k])
    return total.to(rows.dtype)


def run_batched_reference(
    expert_input: BatchedExpertInput,
    weights: ExpertWeights,
    activation: Activation,
    scheme: QuantScheme = UNQUANTISED,
) -> Tensor:
    """Raw rows of each expert, 0 past its count. Returns a fresh [E_local, capacity, H]."""
    rows = expert_input.hidden_states
    output = rows.new_zeros((*rows.shape[:2], weights.w2.shape[1]))
    for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
        if count:
            raw = _run_expert(rows[expert, :count], weights, expert, activation, scheme)
            output[expert, :count] = raw.to(rows.dtype)
    return output


def _run_expert(
    rows: Tensor,
    weights: ExpertWeights,
    expert: int,
    activation: Activation,
    scheme: QuantScheme,
) -> Tensor:
    """One expert applied to [n, H] rows; returns float32 [n, H]."""
    w13 = dequantize_expert(
        weights.w13,
        weights.w13_quant,
        scheme,
        expert=expert,
        num_parts=2 if activation.is_gated else 1,
    )
    projected = rows.float() @ w13.T
    if weights.w13_bias is not None:
        projected += weights.w13_bias[expert].float()
    w2 = dequantize_expert(weights.w2, weights.w2_quant, scheme, expert=expert, num_parts=1)
    output = apply_activation(projected, activation) @ w2.T
    if weights.w2_bias is not None:
        output += weights.w2_bias[expert].float()
    return output
