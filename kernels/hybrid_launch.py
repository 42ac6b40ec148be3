"""Launches the hybrid experts' resident grid: how it is cut, how many programs it has, its scratch.

The host asks the driver once for a kind of launch how many programs are co-resident, takes scratch
from the workspace, and launches. Nothing waits for the device, so a call can be captured; the first
one of a kind compiles and must not be.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights, StandardExpertInput
from ep_runtime.kernels.errors import RankFailure
from ep_runtime.kernels.hybrid_kernel import _hybrid_experts_kernel
from ep_runtime.kernels.hybrid_tiers import NF3, NVFP4, tier_weights, tiers_of
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.resident_barrier import MAX_PROGRAMS, STATE_WORDS, FailedBarrier
from ep_runtime.kernels.resident_grid import co_resident_programs
from ep_runtime.kernels.resident_tiles import MAX_ROWS, block_rows
from ep_runtime.kernels.tiles import TMA_ALIGNMENT
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

WAIT_LIMIT_S = 100.0
# The interpreter runs programs one after another: a second one would be waited for in vain.
_INTERPRETED_PROGRAMS = 1
# Of any device at most; more programs than MAX_PROGRAMS are never launched.
_MAX_MULTIPROCESSORS = 160
# TMA and wgmma, without which the per-tier GEMMs are no slower.
_MIN_CAPABILITY = (9, 0)
# Rows of a tile at least: of 8, a thread's part of x would be too small to be loaded ahead.
_MIN_HEIGHT = 16


@dataclass(frozen=True)
class _Tiles:
    """One program's tiles: (block_n, block_k, stages) of the two projections."""

    gate_up: tuple[int, int, int]
    down: tuple[int, int, int]
    num_warps: int
    programs_per_sm: int


# A step is a block of NF3 and four of NVFP4.
_STEP = 256
_INTERPRETED_TILES = _Tiles((256, _STEP, 1), (256, _STEP, 1), 4, 1)
_TILES = _Tiles((64, _STEP, 4), (64, _STEP, 5), 4, 2)
# Taller blocks of rows leave less shared memory to stages.
_TALL_TILES = _Tiles((64, _STEP, 2), (64, _STEP, 3), 4, 1)
# IEEE products run on the scalar units: small tiles, so that they stay in registers.
_FLOAT32_TILES = _Tiles((64, _STEP, 1), (64, _STEP, 1), 4, 1)


@dataclass(frozen=True)
class _Scratch:
    """Shapes of what a launch takes from the workspace."""

    integers: tuple[int, int]
    floats: tuple[int, int]
    activated: tuple[int, int]
    parts: tuple[int, int]

    def num_bytes(self, dtype: torch.dtype) -> int:
        total = aligned_bytes(self.activated[0] * self.activated[1] * dtype.itemsize)
        for rows, columns in (self.integers, self.floats, self.parts):
            total += aligned_bytes(4 * rows * columns)
        return total


class HybridGrid:
    """The resident launches of one layer.

    wait_limit_s: of each wait inside a launch; one that lasts longer ends the launch with NaN, and
    the next call with RankFailure.
    """

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape = shape
        self.wait_limit_s = WAIT_LIMIT_S
        self._states: WeakKeyDictionary[Workspace, Tensor] = WeakKeyDictionary()
        self._num_programs: dict[tuple[object, ...], int] = {}
        self._record: Tensor | None = None

    def takes(self, num_rows: int, device: torch.device) -> bool:
        """Whether a call of so many rows goes this way."""
        if num_rows > MAX_ROWS:
            return False
        if device.type != "cuda":
            return is_interpreting() or device.type == "meta"
        return torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY

    def check(self) -> None:
        """Raise RankFailure once a wait inside a launch of this layer has run out."""
        if self._record is None:
            return
        words: np.ndarray[Any, Any] = self._record.numpy()
        failed = FailedBarrier.from_record(int(words[0]))
        if failed is not None:
            raise RankFailure(
                f"experts nvfp4_nf3_hybrid: {failed} after {self.wait_limit_s:g} s; other work "
                f"held multiprocessors of the device beside its launch. Outputs since then are "
                f"NaN. Join all streams before the launch, or choose experts: reference"
            )

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call of up to `max_rows` rows that goes this way, on any device."""
        most = min(max_rows, MAX_ROWS)
        heights = {_height(rows) for rows in range(1, most + 1)}

        def bytes_of(height: int) -> int:
            programs = _INTERPRETED_PROGRAMS
            if not is_interpreting():
                wanted = self._tiles(height).programs_per_sm * _MAX_MULTIPROCESSORS
                programs = min(wanted, MAX_PROGRAMS)
            return self._scratch(height, programs).num_bytes(self.shape.dtype)

        return max(map(bytes_of, heights))

    def _tiles(self, num_rows: int) -> _Tiles:
        """Of a launch of so many rows."""
        if is_interpreting():
            return _INTERPRETED_TILES
        if self.shape.dtype is torch.float32:
            return _FLOAT32_TILES
        return _TILES if num_rows <= _MIN_HEIGHT else _TALL_TILES

    def run(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        workspace: Workspace,
        output: Tensor,
    ) -> None:
        """Compute all rows, at most MAX_ROWS, into `output` [R, H]; one launch. Rows from num_rows
        on come out as 0. A slot's result is not rounded before it is summed."""
        device = output.device
        prepare_launch(device)
        num_programs = self._grid_size(expert_input, weights)
        with workspace.frame():
            arguments, constants = self._arguments(
                expert_input, weights, workspace, num_programs, output
            )
            _hybrid_experts_kernel[(num_programs,)](*arguments, **constants)

    def _scratch(self, num_rows: int, num_programs: int) -> _Scratch:
        shape, tiles, block_t = self.shape, self._tiles(num_rows), _height(num_rows)
        slots = block_t * triton.next_power_of_2(shape.top_k)
        most_active = min(shape.num_local_experts, block_t * shape.top_k)
        per_unit = TMA_ALIGNMENT // shape.dtype.itemsize
        return _Scratch(
            integers=(num_programs, slots + 2 * triton.next_power_of_2(shape.num_local_experts)),
            floats=(num_programs, slots + 2 * block_t),
            activated=(most_active * block_t, -(-shape.intermediate_size // per_unit) * per_unit),
            parts=(num_programs, max(2 * tiles.gate_up[0], tiles.down[0]) * block_t),
        )

    def _grid_size(self, expert_input: StandardExpertInput, weights: ExpertWeights) -> int:
        """Programs of a launch: as many as are co-resident; asked once for a kind of launch."""
        rows = expert_input.hidden_states
        if rows.device.type != "cuda":
            return _INTERPRETED_PROGRAMS
        # What the compiler tells apart beside constants: so much may change the occupancy.
        kind = (
            rows.device,
            _height(len(rows)),
            expert_input.num_rows is None,
            *(
                tensor.data_ptr() % 16
                for tensor in (rows, expert_input.topk_ids, expert_input.topk_weights)
            ),
            *(stride % 16 for stride in rows.stride()),
        )
        if kind not in self._num_programs:
            output = torch.empty(rows.shape, dtype=self.shape.dtype, device=rows.device)
            arguments, constants = self._arguments(
                expert_input, weights, Workspace(rows.device), 1, output
            )
            compiled = _hybrid_experts_kernel.warmup(*arguments, grid=(1,), **constants)
            most = co_resident_programs(compiled, rows.device)
            properties = torch.cuda.get_device_properties(rows.device)
            wanted = self._tiles(len(rows)).programs_per_sm * properties.multi_processor_count
            self._num_programs[kind] = min(most, wanted, MAX_PROGRAMS)
        return self._num_programs[kind]

    def _arguments(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        workspace: Workspace,
        num_programs: int,
        output: Tensor,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the kernel is launched with: by position, and by name."""
        shape, rows = self.shape, expert_input.hidden_states
        num_rows, top_k = expert_input.topk_ids.shape
        tiles, scratch = self._tiles(num_rows), self._scratch(num_rows, num_programs)
        activated = workspace.take(scratch.activated, shape.dtype)
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
            workspace.take(scratch.integers, torch.int32),
            workspace.take(scratch.floats, torch.float32),
            activated,
            activated.stride(0),
            workspace.take(scratch.parts, torch.float32),
            output,
            self._state_of(workspace),
            self._record_on(rows.device),
            int(self.wait_limit_s * 1e9),
            num_programs,
            num_rows,
            weights.num_experts,
            nvfp4.w13.shape[0],
            nvfp4.w13.shape[1],
            shape.hidden_size,
            shape.intermediate_size,
            float(shape.activation.alpha),
            None if shape.activation.limit is None else float(shape.activation.limit),
        )
        constants = {
            "ACTIVATION": shape.activation.kind.value,
            "TOP_K": top_k,
            "BLOCK_SLOTS": triton.next_power_of_2(top_k),
            "BLOCK_LOCAL": triton.next_power_of_2(weights.num_experts),
            "BLOCK_T": _height(num_rows),
            "GATE_UP": tiles.gate_up,
            "DOWN": tiles.down,
            "MAX_PROGRAMS": MAX_PROGRAMS,
            "num_warps": tiles.num_warps,
            "launch_cooperative_grid": True,
        }
        return arguments, constants

    def _state_of(self, workspace: Workspace) -> Tensor:
        """The barrier's words for launches of one stream, which a workspace stands for.

        Words first asked for in a capture belong to its graph, which clears them in each replay.
        """
        state = self._states.get(workspace)
        if state is None:
            state = torch.zeros(STATE_WORDS, dtype=torch.int64, device=workspace.device)
            if workspace.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self._states[workspace] = state
        return state

    def _record_on(self, device: torch.device) -> Tensor:
        if self._record is None:
            self._record = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        return self._record


def _height(num_rows: int) -> int:
    """BLOCK_T of a launch of so many rows."""
    return max(_MIN_HEIGHT, block_rows(num_rows))


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
