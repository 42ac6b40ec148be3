"""Experts as Triton kernels for the batched format: cut tiles, two grouped GEMMs.

Three launches on one stream (four where rows are quantised), none of which waits for the device,
all scratch from the workspace: so a call can be captured into a CUDA graph and runs beside other
work. The GEMMs are those of the standard format; rows stay where the backend put them.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.align_batched import (
    align_batched_rows,
    align_batched_workspace_bytes,
    max_batched_tiles,
)
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
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.grouped_gemm import GemmRows, project_down, project_gate_up
from ep_runtime.kernels.hopper_packed_schedule import (
    HopperPackedExpertsTiles,
    choose_tiles_of_packed,
)
from ep_runtime.kernels.packed_projections import project_packed
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles
from ep_runtime.kernels.quant.packed_weights import PACKED_SCHEMES, is_packed
from ep_runtime.kernels.quant.scheme import RowScheme, WeightScheme
from ep_runtime.kernels.tiles import BLOCK_M_HEIGHTS, ExpertsTiles, choose_tiles
from ep_runtime.kernels.triton_base import TritonBase
from ep_runtime.kernels.triton_operands import (
    TRITON_SCHEMES,
    activated_bytes,
    quantised_rows_bytes,
    rows_for,
    take_activated,
)
from ep_runtime.kernels.workspace import Workspace


class TritonBatchedExperts(TritonBase):
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
                "tests/kernels/test_triton_batched_experts.py"
                "::test_two_streams_do_not_disturb_each_other",
                owns="frames of the workspace it is given; no lock, no buffer between calls",
                record="benchmarks/results/audit_triton_batched.json",
            ),
        ),
    )

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call with a capacity of `max_rows` or less, whatever its tiles."""
        shape = self.shape
        num_rows = max_rows * shape.num_local_experts
        if num_rows == 0:
            return 0
        num_experts = shape.num_local_experts

        def position_bytes(height: int) -> int:
            positions = max_batched_tiles(num_experts, max_rows, height) * height
            table_bytes = align_batched_workspace_bytes(num_experts, max_rows, height)
            return table_bytes + activated_bytes(positions, shape)

        return max(map(position_bytes, BLOCK_M_HEIGHTS)) + quantised_rows_bytes(num_rows, shape)

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
        shape = self.shape
        num_experts, capacity, hidden_size = expert_input.hidden_states.shape
        scales = expert_input.scales
        rows = GemmRows(
            expert_input.hidden_states.flatten(0, 1),
            None if scales is None else scales.flatten(0, 1),
        )
        output = torch.empty(
            (num_experts, capacity, hidden_size), dtype=shape.dtype, device=rows.values.device
        )
        if output.numel() == 0 or expert_input.num_source_rows == 0:
            return output
        # In decode far fewer rows come than the capacity allows.
        num_source_rows = expert_input.num_source_rows
        # Rows stay where they are, which the Hopper GEMMs cannot read.
        source_rows = capacity if num_source_rows is None else num_source_rows
        tiles: ExpertsTiles | PackedExpertsTiles | HopperPackedExpertsTiles
        if is_packed(shape.scheme):
            tiles = choose_tiles_of_packed(
                capacity, source_rows, shape, output.device, is_batched=True
            )
        else:
            tiles = choose_tiles(capacity, source_rows, shape, output.device)
        out = output.flatten(0, 1)
        with workspace.frame():
            aligned = align_batched_rows(
                expert_input,
                block_m=tiles.block_m,
                workspace=workspace,
                max_rows=None if num_source_rows is None else num_source_rows * shape.top_k,
            )
            if isinstance(tiles, PackedExpertsTiles | HopperPackedExpertsTiles):
                project_packed(
                    rows,
                    weights,
                    aligned,
                    shape=shape,
                    top_k=1,
                    slot_weights=None,
                    tiles=tiles,
                    workspace=workspace,
                    out=out,
                )
                return output
            activated = take_activated(aligned.max_tiles * tiles.block_m, shape, workspace)
            project_gate_up(
                rows_for(rows, shape, workspace),
                weights,
                aligned,
                top_k=1,
                activation=shape.activation,
                tiles=tiles.gate_up,
                out=activated,
            )
            project_down(activated, weights, aligned, slot_weights=None, tiles=tiles.down, out=out)
        return output
