"""Experts as Triton kernels: align, two grouped GEMMs, sum; for the standard format.

Four launches on one stream (one more where rows are quantised, or permuted for the Hopper GEMMs,
one where many slots are aligned, two where packed weights are unpacked), none of which waits for
the device. All scratch is the workspace's, but for a copy of rows that a kernel cannot gather as
they lie: so a call can be captured into a CUDA graph and runs beside other work.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import align_slots, align_workspace_bytes, max_tiles
from ep_runtime.kernels.base import (
    ActivationKind,
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertWeights,
    InputFormat,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.expert_projections import (
    num_parts_of,
    project_slots,
    projections_bytes,
)
from ep_runtime.kernels.hopper_packed_schedule import (
    HopperPackedExpertsTiles,
    choose_tiles_of_packed,
)
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles
from ep_runtime.kernels.quant.packed_weights import PACKED_SCHEMES, is_packed
from ep_runtime.kernels.quant.scheme import RowScheme, WeightScheme
from ep_runtime.kernels.row_passes import row_passes, rows_per_pass
from ep_runtime.kernels.sum_slots import sum_slots
from ep_runtime.kernels.tiles import BLOCK_M_HEIGHTS, ExpertsTiles, choose_tiles
from ep_runtime.kernels.triton_base import TritonBase
from ep_runtime.kernels.triton_operands import TRITON_SCHEMES
from ep_runtime.kernels.workspace import Workspace


class TritonExperts(TritonBase):
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
        schemes=TRITON_SCHEMES,
        rows=frozenset(RowScheme),
        fp8_products=frozenset({WeightScheme.FP8_BLOCK, WeightScheme.FP8_CHANNEL}),
        model_rows_only=PACKED_SCHEMES,
        supports_bias=True,
        needs_triton=True,
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.CERTIFIED,
                "tests/kernels/test_triton_experts.py::test_two_streams_do_not_disturb_each_other",
                owns="frames of the workspace it is given; no lock, no buffer between calls",
                record="benchmarks/results/audit_triton.json",
            ),
        ),
    )

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call of `max_rows` rows or fewer, whatever tiles it is cut into."""
        shape = self.shape
        num_rows = min(max_rows, rows_per_pass(shape.top_k))
        num_slots = num_rows * shape.top_k
        if num_slots == 0 or shape.num_local_experts == 0:
            return 0
        num_experts = shape.num_local_experts

        def bytes_of(height: int) -> int:
            positions = max_tiles(num_slots, num_experts, height) * height
            table_bytes = align_workspace_bytes(num_slots, num_experts, height)
            return table_bytes + projections_bytes(num_rows, shape, positions, height)

        return max(map(bytes_of, BLOCK_M_HEIGHTS))

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows from num_rows on come out as 0.

        Each slot's weighted result is rounded to the layer's dtype before the float32 sum, but
        where it comes in parts (`project_slots`), which are float32.
        """
        if not isinstance(expert_input, StandardExpertInput):
            raise PlanError("experts: triton takes the standard format; choose experts: reference")
        rows, dtype = expert_input.hidden_states, self.shape.dtype
        if expert_input.topk_ids.numel() == 0 or weights.w13.shape[0] == 0:
            return torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        output = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        for part, out in row_passes(expert_input, output):
            self._run_pass(part, weights, workspace, out)
        return output

    def _run_pass(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        workspace: Workspace,
        output: Tensor,
    ) -> None:
        """Compute the rows of one pass into `output` [n, H]."""
        shape = self.shape
        num_experts = weights.w13.shape[0]
        num_rows, num_source_rows = len(expert_input.hidden_states), expert_input.num_source_rows
        tiles: ExpertsTiles | PackedExpertsTiles | HopperPackedExpertsTiles
        if is_packed(shape.scheme):
            tiles = choose_tiles_of_packed(num_rows, num_source_rows, shape, output.device)
        else:
            tiles = choose_tiles(num_rows, num_source_rows, shape, output.device)
        with workspace.frame():
            aligned = align_slots(
                expert_input,
                num_local_experts=num_experts,
                block_m=tiles.block_m,
                workspace=workspace,
            )
            slot_outputs = project_slots(
                expert_input, weights, aligned, shape=shape, tiles=tiles, workspace=workspace
            )
            sum_slots(
                slot_outputs,
                expert_input,
                num_local_experts=num_experts,
                out=output,
                num_parts=num_parts_of(tiles),
            )
