"""Experts as Triton kernels: align, two grouped GEMMs, weighted sum; for the standard format.

Five steps on one stream, none of which waits for the device, all scratch from the workspace: so a
call can be captured into a CUDA graph and runs beside other work.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.align import align_slots, align_workspace_bytes
from ep_runtime.kernels.base import (
    ActivationKind,
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
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.grouped_gemm import project_down, project_gate_up
from ep_runtime.kernels.tiles import choose_tiles
from ep_runtime.kernels.weighted_sum import sum_weighted_slots
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

# Bounds the workspace, which holds every slot's float32 output: 1.8 GiB of those at hidden 7168.
# A pass of so many slots is limited by arithmetic, so reading the weights again costs little.
MAX_SLOTS_PER_PASS = 65536


class TritonExperts(ModularExperts):
    """Grouped GEMMs over the local experts; equal inputs give bit-equal results.

    On a CPU it runs in Triton's interpreter, for tests.
    """

    capabilities = ExpertsCapabilities(
        name="triton",
        kind=ExpertsKind.MODULAR,
        formats=frozenset({InputFormat.STANDARD}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        device_types=frozenset({"cpu", "cuda"}),
        activations=frozenset(ActivationKind),
        supports_bias=True,
        needs_triton=True,
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.CERTIFIED,
                "tests/kernels/test_triton_experts.py::test_two_streams_do_not_disturb_each_other",
            ),
        ),
    )

    def workspace_bytes(self, max_rows: int) -> int:
        """Exactly what a call of `max_rows` rows takes; calls of fewer rows take no more."""
        shape = self.shape
        num_slots = min(max_rows, self._rows_per_pass()) * shape.top_k
        if num_slots == 0 or shape.num_local_experts == 0:
            return 0
        return (
            align_workspace_bytes(num_slots, shape.num_local_experts)
            + aligned_bytes(num_slots * shape.intermediate_size * shape.dtype.itemsize)
            + aligned_bytes(num_slots * shape.hidden_size * torch.float32.itemsize)
        )

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows from num_rows on come out as 0."""
        if not isinstance(expert_input, StandardExpertInput):
            raise PlanError("experts: triton takes the standard format; choose experts: reference")
        rows = expert_input.hidden_states
        if expert_input.topk_ids.numel() == 0 or weights.w13.shape[0] == 0:
            return torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device)
        output = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        for first in range(0, rows.shape[0], self._rows_per_pass()):
            part = slice(first, first + self._rows_per_pass())
            self._run_pass(_rows_of(expert_input, part), weights, workspace, output[part])
        return output

    def _rows_per_pass(self) -> int:
        return max(1, MAX_SLOTS_PER_PASS // self.shape.top_k)

    def _run_pass(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        workspace: Workspace,
        output: Tensor,
    ) -> None:
        """Compute the rows of one pass into `output` [n, H]."""
        rows, num_slots = expert_input.hidden_states, expert_input.topk_ids.numel()
        num_experts = weights.w13.shape[0]
        tiles = choose_tiles(rows.shape[0], self.shape)
        with workspace.frame():
            aligned = align_slots(
                expert_input,
                num_local_experts=num_experts,
                block_m=tiles.block_m,
                workspace=workspace,
            )
            activated = workspace.take((num_slots, self.shape.intermediate_size), rows.dtype)
            project_gate_up(
                rows,
                weights,
                aligned,
                activation=self.shape.activation,
                tiles=tiles,
                out=activated,
            )
            slot_outputs = workspace.take((num_slots, rows.shape[1]), torch.float32)
            project_down(activated, weights, aligned, tiles=tiles, out=slot_outputs)
            sum_weighted_slots(
                slot_outputs, expert_input, num_local_experts=num_experts, out=output
            )


def _rows_of(expert_input: StandardExpertInput, part: slice) -> StandardExpertInput:
    """Some of the rows, as an input of their own."""
    if part.start == 0 and part.stop >= expert_input.hidden_states.shape[0]:
        return expert_input
    num_rows = expert_input.num_rows
    return StandardExpertInput(
        hidden_states=expert_input.hidden_states[part],
        topk_ids=expert_input.topk_ids[part],
        topk_weights=expert_input.topk_weights[part],
        num_rows=None if num_rows is None else num_rows - part.start,
    )
