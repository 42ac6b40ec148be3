"""Experts over the package deep_gemm, for the standard format and its contiguous layout.

Seven launches: align the slots into runs of whole blocks an expert (many in two), note each
position's expert and each slot's position, permute (and quantise) the rows, GEMM, activate and
quantise, GEMM; then weight and sum. None waits for the device, so a call can be captured into a
CUDA graph, after one that compiled the GEMMs. Those go over as many positions as any routing could
need: in place of the ones that it does not, they multiply nothing, but read rows and write zeros.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.activate_rows import activate_rows
from ep_runtime.kernels.activation import gate_up_columns
from ep_runtime.kernels.align_blocks import (
    AlignedSlots,
    align_slots,
    align_workspace_bytes,
    max_tiles,
)
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
from ep_runtime.kernels.deep_gemm_operands import (
    DeepGemmBase,
    bfloat16_bytes,
    fp8_rows_bytes,
    take_fp8_rows,
    weight_operand,
)
from ep_runtime.kernels.deep_gemm_package import ALIGNMENT, CAPABILITY, PACKAGE
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.index_positions import index_positions
from ep_runtime.kernels.permute import permute_rows
from ep_runtime.kernels.quant.scheme import RowScheme, WeightScheme
from ep_runtime.kernels.row_passes import row_passes, rows_per_pass
from ep_runtime.kernels.sum_slots import sum_slots
from ep_runtime.kernels.workspace import Workspace, aligned_bytes


class DeepGemmExperts(DeepGemmBase):
    """DeepGEMM's contiguous grouped GEMMs over the local experts; weights in fp8 by blocks."""

    capabilities = ExpertsCapabilities(
        name="deep_gemm",
        kind=ExpertsKind.MODULAR,
        formats=frozenset({InputFormat.STANDARD}),
        dtypes=frozenset({torch.bfloat16}),
        device_types=frozenset({"cuda"}),
        activations=frozenset(ActivationKind),
        schemes=frozenset({WeightScheme.FP8_BLOCK}),
        fp8_products=frozenset({WeightScheme.FP8_BLOCK}),
        rows=frozenset(RowScheme),
        needs_triton=True,
        needs_package=PACKAGE,
        compute_capabilities=frozenset({CAPABILITY}),
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.UNSAFE,
                "never reviewed: deep_gemm's GEMMs hold every multiprocessor to their end, and its "
                "settings are the process's",
            ),
        ),
    )

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call of `max_rows` rows or fewer."""
        shape = self.shape
        num_slots = min(max_rows, rows_per_pass(self.shape.top_k)) * shape.top_k
        num_experts = shape.num_local_experts
        if num_slots == 0 or num_experts == 0:
            return 0
        num_positions = max_tiles(num_slots, num_experts, ALIGNMENT) * ALIGNMENT
        tables = align_workspace_bytes(num_slots, num_experts, ALIGNMENT)
        tables += aligned_bytes(4 * num_positions) + aligned_bytes(4 * num_slots)
        # Dead before the outputs are taken.
        first = fp8_rows_bytes(num_positions, shape.hidden_size)
        first += bfloat16_bytes(num_positions, gate_up_columns(shape))
        outputs = bfloat16_bytes(num_positions, shape.hidden_size)
        return tables + fp8_rows_bytes(num_positions, shape.intermediate_size) + max(first, outputs)

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows from num_rows on come out as 0."""
        if not isinstance(expert_input, StandardExpertInput):
            raise PlanError(
                "experts: deep_gemm takes the standard format; choose experts: deep_gemm_batched"
            )
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
        num_experts = weights.w13.shape[0]
        with workspace.frame():
            aligned = align_slots(
                expert_input,
                num_local_experts=num_experts,
                block_m=ALIGNMENT,
                workspace=workspace,
            )
            num_positions = aligned.max_tiles * ALIGNMENT
            position_experts = workspace.take((num_positions,), torch.int32)
            slot_positions = workspace.take((aligned.num_slots,), torch.int32)
            index_positions(
                aligned, position_experts=position_experts, slot_positions=slot_positions
            )
            activated = take_fp8_rows(1, num_positions, self.shape.intermediate_size, workspace)
            with workspace.frame():
                gate_up = self._project_gate_up(
                    expert_input, weights, aligned, position_experts, workspace
                )
                activate_rows(
                    gate_up[None],
                    self.shape.activation,
                    aligned.num_tiles,
                    rows_per_count=ALIGNMENT,
                    out_values=activated.values,
                    out_scales=activated.scales,
                )
            outputs = workspace.take((num_positions, self.shape.hidden_size), torch.bfloat16)
            self.deep_gemm.multiply_contiguous(
                activated.only_batch,
                weight_operand(weights.w2, weights.w2_quant),
                position_experts,
                out=outputs,
            )
            sum_slots(
                outputs,
                expert_input,
                num_local_experts=num_experts,
                out=output,
                slot_positions=slot_positions,
            )

    def _project_gate_up(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        aligned: AlignedSlots,
        position_experts: Tensor,
        workspace: Workspace,
    ) -> Tensor:
        """The first projection [P, 2I] (or [P, I]) of rows in expert order, in the workspace."""
        num_positions = len(position_experts)
        rows = take_fp8_rows(1, num_positions, self.shape.hidden_size, workspace)
        values, scales = rows.only_batch
        permute_rows(expert_input, aligned, out=values, out_scales=scales.T)
        gate_up = workspace.take((num_positions, gate_up_columns(self.shape)), torch.bfloat16)
        self.deep_gemm.multiply_contiguous(
            (values, scales),
            weight_operand(weights.w13, weights.w13_quant),
            position_experts,
            out=gate_up,
        )
        return gate_up
