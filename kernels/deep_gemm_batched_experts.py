"""Experts over the package deep_gemm, for the batched format and its masked layout.

Quantise the rows up to each expert's count where they are not fp8 yet, GEMM, activate and quantise,
GEMM. No launch waits for the device, so a call can be captured into a CUDA graph, after one that
compiled the GEMMs.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ep_runtime.kernels.activate_rows import activate_rows
from ep_runtime.kernels.activation import gate_up_columns
from ep_runtime.kernels.base import (
    BatchedExpertInput,
    ExpertInput,
    ExpertWeights,
    InputFormat,
)
from ep_runtime.kernels.deep_gemm_experts import DeepGemmExperts
from ep_runtime.kernels.deep_gemm_operands import (
    DeepGemmBase,
    Fp8Rows,
    bfloat16_bytes,
    fp8_rows_bytes,
    take_fp8_rows,
    weight_operand,
)
from ep_runtime.kernels.deep_gemm_package import ALIGNMENT
from ep_runtime.kernels.devices import TMA_ALIGNMENT
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.workspace import Workspace


class DeepGemmBatchedExperts(DeepGemmBase):
    """DeepGEMM's masked grouped GEMMs over each expert's own rows; weights in fp8 by blocks.

    A capacity that is a multiple of 128 costs no copies: fp8 rows are then read where they are
    (if one group's scales lie side by side) and the result is written where it stays.
    """

    capabilities = replace(
        DeepGemmExperts.capabilities,
        name="deep_gemm_batched",
        formats=frozenset({InputFormat.BATCHED}),
    )

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call with a capacity of `max_rows` or less."""
        shape = self.shape
        num_rows = shape.num_local_experts * _whole_blocks(max_rows)
        if num_rows == 0:
            return 0
        first = fp8_rows_bytes(num_rows, shape.hidden_size)
        first += bfloat16_bytes(num_rows, gate_up_columns(shape))
        outputs = bfloat16_bytes(num_rows, shape.hidden_size)
        return fp8_rows_bytes(num_rows, shape.intermediate_size) + max(first, outputs)

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows past an expert's count are unspecified.

        hidden_states and scales may have any strides.
        """
        if not isinstance(expert_input, BatchedExpertInput):
            raise PlanError(
                "experts: deep_gemm_batched takes the batched format; choose experts: deep_gemm"
            )
        shape, rows = self.shape, expert_input.hidden_states
        output = torch.empty(rows.shape, dtype=shape.dtype, device=rows.device)
        if output.numel() == 0 or expert_input.num_source_rows == 0:
            return output
        num_experts, capacity, _ = rows.shape
        block_rows = _whole_blocks(capacity)
        counts = expert_input.num_rows_per_expert.contiguous()
        expected_rows = self._expected_rows(expert_input)
        with workspace.frame():
            activated = take_fp8_rows(num_experts, block_rows, shape.intermediate_size, workspace)
            with workspace.frame():
                columns = gate_up_columns(shape)
                gate_up = workspace.take((num_experts, block_rows, columns), torch.bfloat16)
                self.deep_gemm.multiply_masked(
                    self._rows(expert_input, workspace).batches,
                    weight_operand(weights.w13, weights.w13_quant),
                    counts,
                    expected_rows=expected_rows,
                    out=gate_up,
                )
                activate_rows(
                    gate_up,
                    shape.activation,
                    counts,
                    out_values=activated.values,
                    out_scales=activated.scales,
                )
            outputs = output
            if block_rows != capacity:
                outputs = workspace.take(
                    (num_experts, block_rows, shape.hidden_size), torch.bfloat16
                )
            self.deep_gemm.multiply_masked(
                activated.batches,
                weight_operand(weights.w2, weights.w2_quant),
                counts,
                expected_rows=expected_rows,
                out=outputs,
            )
            if outputs is not output:
                output.copy_(outputs[:, :capacity])
        return output

    def _expected_rows(self, expert_input: BatchedExpertInput) -> int:
        """Of an expert, as a power of two: another number is another choice of block sizes, and
        may be another GEMM to compile."""
        num_experts, capacity, _ = expert_input.hidden_states.shape
        expected = capacity
        if expert_input.num_source_rows is not None:
            spread = self.shape.num_experts or num_experts
            expected = expert_input.num_source_rows * self.shape.top_k // spread
        return min(1 << max(expected - 1, 0).bit_length(), _whole_blocks(capacity))

    def _rows(self, expert_input: BatchedExpertInput, workspace: Workspace) -> Fp8Rows:
        """The rows as the masked GEMM reads them; as they are where they are so already."""
        rows, scales = expert_input.hidden_states, expert_input.scales
        num_experts, capacity, hidden_size = rows.shape
        if scales is not None and _can_read(rows, scales):
            return Fp8Rows(rows, scales)
        taken = take_fp8_rows(num_experts, _whole_blocks(capacity), hidden_size, workspace)
        if scales is None:
            counts = expert_input.num_rows_per_expert
            activate_rows(rows, None, counts, out_values=taken.values, out_scales=taken.scales)
        else:
            taken.values.view(torch.uint8)[:, :capacity].copy_(rows.view(torch.uint8))
            taken.scales[:, :capacity].copy_(scales)
        return taken


def _whole_blocks(capacity: int) -> int:
    """The capacity rounded up to whole blocks: one that began in an expert ends in it."""
    return -(-capacity // ALIGNMENT) * ALIGNMENT


def _can_read(rows: Tensor, scales: Tensor) -> bool:
    """Whether fp8 rows are laid out as `Fp8Rows` says, and TMA can read them."""
    _, capacity, groups = scales.shape
    return (
        capacity % ALIGNMENT == 0
        and rows.is_contiguous()
        and scales.stride() == (groups * capacity, 1, capacity)
        and rows.data_ptr() % TMA_ALIGNMENT == 0
        and scales.data_ptr() % TMA_ALIGNMENT == 0
    )
