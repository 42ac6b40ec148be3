"""Experts in one launch of a resident grid: routing, both projections, the sum; for decode.

What it does, phase by phase: kernels/resident_kernel.py. The host asks the driver once how many
programs are co-resident, takes scratch from the workspace, and launches. Nothing waits for the
device, so a call can be captured; the first one of a kind compiles and must not be.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.base import (
    ActivationKind,
    Concurrency,
    ConcurrencyRule,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertsShape,
    ExpertWeights,
    InputFormat,
    MonolithicContext,
    MonolithicExperts,
    RoutingSpec,
)
from ep_runtime.kernels.errors import CapacityError, RankFailure
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.resident_barrier import MAX_PROGRAMS, STATE_WORDS, FailedBarrier
from ep_runtime.kernels.resident_grid import co_resident_programs
from ep_runtime.kernels.resident_kernel import _resident_experts_kernel
from ep_runtime.kernels.resident_tiles import (
    MAX_ROWS,
    ResidentTiles,
    block_rows,
    resident_tiles,
    routed_at_once,
)
from ep_runtime.kernels.routing import NORM_EPSILON
from ep_runtime.kernels.tiles import TMA_ALIGNMENT
from ep_runtime.kernels.triton_operands import prepare_triton_weights
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

WAIT_LIMIT_S = 100.0
# The interpreter runs programs one after another: a second one would be waited for in vain.
_INTERPRETED_PROGRAMS = 1
# Of any sm_90 device at most.
_MAX_MULTIPROCESSORS = 144


@dataclass(frozen=True)
class _Scratch:
    """Shapes of what a launch takes from the workspace."""

    integers: tuple[int, int]
    floats: tuple[int, int]
    activated: tuple[int, int]
    parts: tuple[int, int]

    def num_bytes(self, dtype: torch.dtype) -> int:
        sizes = ((self.integers, 4), (self.floats, 4), (self.parts, 4))
        total = sum(aligned_bytes(a * b * itemsize) for (a, b), itemsize in sizes)
        return total + aligned_bytes(self.activated[0] * self.activated[1] * dtype.itemsize)


class ResidentExperts(MonolithicExperts):
    """One launch a call; equal inputs give bit-equal results on one device.

    A slot's result is not rounded before it is summed. Of the experts that any row of a call is
    routed to, weights must be finite: they are multiplied with the other rows too, by 0.

    On a CPU it runs in Triton's interpreter, for tests.
    """

    capabilities = ExpertsCapabilities(
        name="resident",
        kind=ExpertsKind.MONOLITHIC,
        formats=frozenset({InputFormat.STANDARD}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        device_types=frozenset({"cpu", "cuda"}),
        activations=frozenset(ActivationKind),
        supports_bias=True,
        needs_triton=True,
        compute_capabilities=frozenset({(9, 0)}),
        concurrency=(
            ConcurrencyRule(
                MAX_ROWS,
                Concurrency.EXCLUSIVE,
                "its grid waits for its own programs, which all must be on the device at once",
                owns="frames of the workspace it is given; barrier words for each workspace, 0 "
                "between launches; one word of pinned memory for a failure",
            ),
        ),
    )

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)
        self.wait_limit_s = WAIT_LIMIT_S
        self._states: WeakKeyDictionary[Workspace, Tensor] = WeakKeyDictionary()
        self._num_programs: dict[tuple[object, ...], int] = {}
        self._record: Tensor | None = None

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Rows that TMA can read; copies only what is not so already."""
        return prepare_triton_weights(weights)

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call of up to `max_rows` rows, which is at most MAX_ROWS, on any device."""
        if max_rows == 0 or self.shape.num_local_experts == 0:
            return 0
        most = min(max_rows, MAX_ROWS)
        heights = {block_rows(rows) for rows in range(1, most + 1)}
        return max(self._scratch(min(h, most), self._most_programs(h))[0] for h in heights)

    def _most_programs(self, num_rows: int) -> int:
        """Of a launch of so many rows, on any device."""
        if is_interpreting():
            return _INTERPRETED_PROGRAMS
        tiles = resident_tiles(num_rows, self.shape)
        return min(tiles.programs_per_sm * _MAX_MULTIPROCESSORS, MAX_PROGRAMS)

    def _scratch(self, num_rows: int, num_programs: int) -> tuple[int, _Scratch]:
        """Bytes and shapes for a launch of so many rows and programs."""
        shape, tiles = self.shape, resident_tiles(num_rows, self.shape)
        block_t = block_rows(num_rows)
        slots = block_t * triton.next_power_of_2(shape.top_k)
        block_local = triton.next_power_of_2(shape.num_local_experts)
        most_active = min(shape.num_local_experts, num_rows * shape.top_k)
        per_unit = TMA_ALIGNMENT // shape.dtype.itemsize
        part = max(2 * tiles.gate_up[0], tiles.down[0]) * block_t
        scratch = _Scratch(
            integers=(num_programs, slots + 2 * block_local),
            floats=(num_programs, slots + 2 * block_t),
            activated=(most_active * block_t, -(-shape.intermediate_size // per_unit) * per_unit),
            parts=(num_programs, part),
        )
        return scratch.num_bytes(shape.dtype), scratch

    def check(self) -> None:
        """Raise RankFailure once a wait inside a launch of this layer has run out."""
        if self._record is None:
            return
        words: np.ndarray[Any, Any] = self._record.numpy()
        failed = FailedBarrier.from_record(int(words[0]))
        if failed is not None:
            raise RankFailure(
                f"experts resident: {failed} after {self.wait_limit_s:g} s; other work held "
                f"multiprocessors of the device beside its launch. Outputs since then are NaN. "
                f"Join all streams before the launch, or choose experts: triton"
            )

    def run(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        context: MonolithicContext,
        workspace: Workspace,
    ) -> Tensor:
        """See `MonolithicExperts.run`. Raises RankFailure once a wait of an earlier call has run
        out, CapacityError for more than MAX_ROWS rows."""
        self.check()
        num_rows, device = len(hidden_states), hidden_states.device
        if num_rows > MAX_ROWS:
            raise CapacityError(
                f"experts resident takes at most {MAX_ROWS} rows at once, not {num_rows}; lower "
                f"max_tokens_per_rank, or choose experts: triton"
            )
        output = torch.empty(hidden_states.shape, dtype=self.shape.dtype, device=device)
        if num_rows == 0 or context.weights.w13.shape[0] == 0:
            return output.zero_()
        prepare_launch(device)
        tiles = resident_tiles(num_rows, self.shape)
        num_programs = self._grid_size(hidden_states, router_logits, context, tiles)
        with workspace.frame():
            arguments, constants = self._arguments(
                hidden_states, router_logits, context, workspace, num_programs, output
            )
            _resident_experts_kernel[(num_programs,)](*arguments, **constants)
        return output

    def _grid_size(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        context: MonolithicContext,
        tiles: ResidentTiles,
    ) -> int:
        """Programs of a launch: as many as are co-resident; asked once for a kind of launch."""
        device, num_rows = hidden_states.device, len(hidden_states)
        if is_interpreting():
            return _INTERPRETED_PROGRAMS
        if device.type != "cuda":
            return 1
        # What the compiler tells apart beside constants: so much may change the occupancy.
        kind = (
            device,
            num_rows <= routed_at_once(router_logits.shape[1], block_rows(num_rows)),
            block_rows(num_rows),
            context.routing,
            context.correction_bias is None,
            *(tensor.data_ptr() % 16 == 0 for tensor in (hidden_states, router_logits)),
            *(stride % 16 for stride in (*hidden_states.stride(), *router_logits.stride())),
        )
        if kind not in self._num_programs:
            output = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
            arguments, constants = self._arguments(
                hidden_states, router_logits, context, Workspace(device), 1, output
            )
            compiled = _resident_experts_kernel.warmup(*arguments, grid=(1,), **constants)
            most = co_resident_programs(compiled, device)
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            wanted = tiles.programs_per_sm * multiprocessors
            self._num_programs[kind] = min(most, wanted, MAX_PROGRAMS)
        return self._num_programs[kind]

    def _arguments(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        context: MonolithicContext,
        workspace: Workspace,
        num_programs: int,
        output: Tensor,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the kernel is launched with: by position, and by name."""
        shape, weights, routing = self.shape, context.weights, context.routing
        num_rows, num_experts = router_logits.shape
        tiles, block_t = resident_tiles(num_rows, shape), block_rows(num_rows)
        at_once = routed_at_once(num_experts, block_t)
        _, scratch = self._scratch(num_rows, num_programs)
        activated = workspace.take(scratch.activated, shape.dtype)
        logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
        hidden_size, intermediate_size = shape.hidden_size, shape.intermediate_size
        arguments = (
            hidden_states,
            *hidden_states.stride(),
            logits,
            logits.stride(0),
            _dense(context.correction_bias),
            context.expert_map.contiguous(),
            context.tokens_per_expert,
            _descriptor(weights.w13, tiles.gate_up),
            weights.w13_bias,
            _descriptor(weights.w2, tiles.down),
            weights.w2_bias,
            workspace.take(scratch.integers, torch.int32),
            workspace.take(scratch.floats, torch.float32),
            activated,
            activated.stride(0),
            workspace.take(scratch.parts, torch.float32),
            output,
            self._state_of(workspace),
            self._record_on(hidden_states.device),
            int(self.wait_limit_s * 1e9),
            num_programs,
            num_rows,
            num_experts,
            weights.w13.shape[1],
            hidden_size,
            intermediate_size,
            float(routing.routed_scaling_factor),
            float(shape.activation.alpha),
            None if shape.activation.limit is None else float(shape.activation.limit),
        )
        constants = {
            "ACTIVATION": shape.activation.kind.value,
            "ROUTING": _routing_constants(routing),
            "TOP_K": routing.top_k,
            "BLOCK_SLOTS": triton.next_power_of_2(routing.top_k),
            "BLOCK_ROWS": at_once,
            "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
            "BLOCK_LOCAL": triton.next_power_of_2(shape.num_local_experts),
            "ROUTES_ALL": num_rows <= at_once,
            "BLOCK_T": block_t,
            "GATE_UP": (*tiles.gate_up, hidden_size % tiles.gate_up[1] == 0),
            "DOWN": (*tiles.down, intermediate_size % tiles.down[1] == 0),
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
            is_pinned = device.type == "cuda"
            self._record = torch.zeros(1, dtype=torch.int64, pin_memory=is_pinned)
        return self._record


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _descriptor(values: Tensor, tile: tuple[int, int, int]) -> TensorDescriptor:
    """[E, rows, columns] as [E * rows, columns], read in blocks of tile[0] rows."""
    num_experts, num_rows, num_columns = values.shape
    return TensorDescriptor(
        values,
        [num_experts * num_rows, num_columns],
        [values.stride(1), 1],
        [tile[0], tile[1]],
    )


def _routing_constants(spec: RoutingSpec) -> tuple[object, ...]:
    """What `route_rows` takes from SCORING to GROUP_SCORE."""
    return (
        spec.scoring,
        spec.norm_topk_prob,
        NORM_EPSILON,
        spec.n_group,
        triton.next_power_of_2(spec.n_group),
        spec.topk_group,
        spec.group_score,
    )
