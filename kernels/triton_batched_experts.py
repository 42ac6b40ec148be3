"""Experts as Triton kernels for the batched format: cut tiles, two grouped GEMMs.

Three launches on one stream, none of which waits for the device, all scratch from the workspace:
so a call can be captured into a CUDA graph and runs beside other work. The GEMMs are those of the
standard format; rows stay where the backend put them.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.align import align_batched_rows, align_batched_workspace_bytes
from ep_runtime.kernels.base import (
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
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.grouped_gemm import project_down, project_gate_up
from ep_runtime.kernels.tiles import choose_tiles
from ep_runtime.kernels.workspace import Workspace, aligned_bytes


class TritonBatchedExperts(ModularExperts):
    """Grouped GEMMs over each expert's own rows; equal inputs give bit-equal results.

    On a CPU it runs in Triton's interpreter, for tests.
    """

    capabilities = ExpertsCapabilities(
        name="triton_batched",
        kind=ExpertsKind.MODULAR,
        formats=frozenset({InputFormat.BATCHED}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        device_types=frozenset({"cpu", "cuda"}),
        activations=frozenset(ActivationKind),
        supports_bias=True,
        needs_triton=True,
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.CERTIFIED,
                "tests/kernels/test_triton_batched_experts.py"
                "::test_two_streams_do_not_disturb_each_other",
            ),
        ),
    )

    def workspace_bytes(self, max_rows: int) -> int:
        """Exactly what a call with a capacity of `max_rows` takes; smaller ones take no more."""
        shape = self.shape
        num_rows = max_rows * shape.num_local_experts
        if num_rows == 0:
            return 0
        return align_batched_workspace_bytes(max_rows, shape.num_local_experts) + aligned_bytes(
            num_rows * shape.intermediate_size * shape.dtype.itemsize
        )

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows past an expert's count stay unwritten memory.

        hidden_states may have any strides; where those of expert and row do not merge, as they do
        in a contiguous tensor and in a slice of its columns, it is copied.
        """
        if not isinstance(expert_input, BatchedExpertInput):
            raise PlanError(
                "experts: triton_batched takes the batched format; choose experts: triton"
            )
        num_experts, capacity, hidden_size = expert_input.hidden_states.shape
        rows = expert_input.hidden_states.flatten(0, 1)
        output = torch.empty(
            (num_experts, capacity, hidden_size), dtype=rows.dtype, device=rows.device
        )
        if output.numel() == 0 or expert_input.num_source_rows == 0:
            return output
        # In decode far fewer rows come than the capacity allows.
        num_source_rows = expert_input.num_source_rows
        most_rows = capacity if num_source_rows is None else min(capacity, num_source_rows)
        tiles = choose_tiles(most_rows, self.shape)
        with workspace.frame():
            aligned = align_batched_rows(
                expert_input,
                block_m=tiles.block_m,
                workspace=workspace,
                max_rows=None if num_source_rows is None else num_source_rows * self.shape.top_k,
            )
            activated = workspace.take((len(rows), self.shape.intermediate_size), rows.dtype)
            project_gate_up(
                rows,
                weights,
                aligned,
                activation=self.shape.activation,
                tiles=tiles,
                out=activated,
            )
            project_down(activated, weights, aligned, tiles=tiles, out=output.flatten(0, 1))
        return output
