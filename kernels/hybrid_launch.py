"""Launches the hybrid experts' resident grid: how it is cut, and what its kernel is given."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.base import ExpertWeights, StandardExpertInput
from ep_runtime.kernels.hybrid_kernel import _hybrid_experts_kernel
from ep_runtime.kernels.hybrid_tiers import NF3, NVFP4, tier_weights, tiers_of
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.resident_launch import LaunchArguments, ResidentGrid
from ep_runtime.kernels.resident_tiles import MAX_ROWS, ResidentTiles, block_rows
from ep_runtime.kernels.workspace import Workspace

# TMA and wgmma, without which the per-tier GEMMs are no slower.
_MIN_CAPABILITY = (9, 0)

# A step is a block of NF3 and four of NVFP4.
_STEP = 256
_INTERPRETED_TILES = ResidentTiles((256, _STEP, 1), (256, _STEP, 1), 4, 1)
_LOW_TILES = ResidentTiles((64, _STEP, 4), (64, _STEP, 5), 4, 2)
# Taller blocks of rows leave less shared memory to stages.
_TALL_TILES = ResidentTiles((64, _STEP, 2), (64, _STEP, 3), 4, 1)
# IEEE products run on the scalar units: small tiles, so that they stay in registers.
_FLOAT32_TILES = ResidentTiles((64, _STEP, 1), (64, _STEP, 1), 4, 1)


class HybridGrid(ResidentGrid):
    """The resident launches of one layer; see `ResidentGrid`."""

    experts, instead = "nvfp4_nf3_hybrid", "reference"

    def takes(self, num_rows: int, device: torch.device) -> bool:
        """Whether a call of so many rows goes this way."""
        if num_rows > MAX_ROWS:
            return False
        if device.type != "cuda":
            return is_interpreting() or device.type == "meta"
        return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY

    def tiles(self, num_rows: int) -> ResidentTiles:
        """See `ResidentGrid.tiles`."""
        if is_interpreting():
            return _INTERPRETED_TILES
        if self.shape.dtype is torch.float32:
            return _FLOAT32_TILES
        return _LOW_TILES if block_rows(num_rows) == 16 else _TALL_TILES

    def run(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        workspace: Workspace,
        output: Tensor,
    ) -> None:
        """Compute all rows, at most MAX_ROWS, into `output` [R, H]; one launch. Rows from num_rows
        on come out as 0. A slot's result is not rounded before it is summed."""
        rows = expert_input.hidden_states
        self.launch(
            _hybrid_experts_kernel,
            partial(self._arguments, expert_input, weights, output),
            output=output,
            kind=(
                expert_input.num_rows is None,
                *(
                    tensor.data_ptr() % 16
                    for tensor in (rows, expert_input.topk_ids, expert_input.topk_weights)
                ),
                *(stride % 16 for stride in rows.stride()),
            ),
            workspace=workspace,
        )

    def _arguments(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        output: Tensor,
        workspace: Workspace,
        num_programs: int,
    ) -> LaunchArguments:
        rows, tiles = expert_input.hidden_states, self.tiles(len(output))
        nvfp4, nf3 = tier_weights(weights, NVFP4), tier_weights(weights, NF3)
        arguments = (
            rows,
            *rows.stride(),
            expert_input.topk_ids.to(torch.int32).contiguous(),
            expert_input.topk_weights.contiguous(),
            tiers_of(weights),
            expert_input.num_rows,
            *_projection(nvfp4.w13, nvfp4.w13_quant, nf3.w13, nf3.w13_quant, tiles.gate_up[0]),
            *_projection(nvfp4.w2, nvfp4.w2_quant, nf3.w2, nf3.w2_quant, tiles.down[0]),
            *self.shared_arguments(workspace, num_programs, output),
            weights.num_experts,
            nvfp4.w13.shape[0],
            nvfp4.w13.shape[1],
            self.shape.hidden_size,
            self.shape.intermediate_size,
            *self.activation_arguments(),
        )
        constants = self.shared_constants(len(output), expert_input.topk_ids.shape[1])
        return arguments, constants | {"GATE_UP": tiles.gate_up, "DOWN": tiles.down}


def _projection(
    nvfp4: Tensor,
    nvfp4_quant: QuantParameters | None,
    nf3: Tensor,
    nf3_quant: QuantParameters | None,
    block_n: int,
) -> tuple[Any, ...]:
    """The kernel's arguments of one projection, from words13 to nf3_groups13.

    Of a tier without experts the other's words stand in for a descriptor, which no memory has; they
    are never read by it.
    """
    if nvfp4_quant is None or nf3_quant is None:
        raise ValueError("packed weights have scales; these were not packed")
    return (
        _words(nvfp4 if len(nvfp4) else nf3, packed_layout(NVFP4).words_per_block, block_n),
        nvfp4_quant.scales,
        nvfp4_quant.scales.shape[1],
        nvfp4_quant.global_scales,
        _words(nf3 if len(nf3) else nvfp4, packed_layout(NF3).words_per_block, block_n),
        nf3_quant.scales,
        nf3_quant.scales.shape[1],
    )


def _words(words: Tensor, words_per_block: int, block_n: int) -> TensorDescriptor:
    """[E, rows, words] as [E * rows, words], read in blocks of block_n rows."""
    return TensorDescriptor.from_tensor(words.flatten(0, 1), [block_n, words_per_block])
