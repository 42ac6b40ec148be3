"""What every launch of a resident grid takes, and what a layer keeps between two of them.

The host asks the driver once for a kind of launch how many programs are co-resident, takes scratch
from the workspace, and launches. Nothing waits for the device, so a call can be captured; the first
one of a kind compiles and must not be.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
from torch import Tensor

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.devices import TMA_ALIGNMENT
from ep_runtime.kernels.errors import RankFailure
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.resident_barrier import MAX_PROGRAMS, STATE_WORDS, FailedBarrier
from ep_runtime.kernels.resident_grid import co_resident_programs
from ep_runtime.kernels.resident_tiles import MAX_ROWS, ResidentTiles, block_rows
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

WAIT_LIMIT_S = 100.0
# The interpreter runs programs one after another: a second one would be waited for in vain.
_INTERPRETED_PROGRAMS = 1
# Of any device at most.
_MAX_MULTIPROCESSORS = 160

# What a kernel is launched with: by position, and by name.
LaunchArguments = tuple[tuple[Any, ...], dict[str, Any]]


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


class ResidentGrid(ABC):
    """The resident launches of one layer.

    wait_limit_s: of each wait inside a launch; one that lasts longer ends the launch with NaN, and
    the next call with RankFailure. experts, instead: names of the kernel, and of one to choose in
    its place.
    """

    experts: ClassVar[str]
    instead: ClassVar[str]

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape = shape
        self.wait_limit_s = WAIT_LIMIT_S
        self._states: WeakKeyDictionary[Workspace, Tensor] = WeakKeyDictionary()
        self._num_programs: dict[tuple[object, ...], int] = {}
        self._record: Tensor | None = None

    @abstractmethod
    def tiles(self, num_rows: int) -> ResidentTiles:
        """Of a launch of so many rows."""

    def check(self) -> None:
        """Raise RankFailure once a wait inside a launch of this layer has run out."""
        if self._record is None:
            return
        words: np.ndarray[Any, Any] = self._record.numpy()
        failed = FailedBarrier.from_record(int(words[0]))
        if failed is not None:
            raise RankFailure(
                f"experts {self.experts}: {failed} after {self.wait_limit_s:g} s; other work held "
                f"multiprocessors of the device beside its launch. Outputs since then are NaN. "
                f"Join all streams before the launch, or choose experts: {self.instead}"
            )

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a launch of 1 to `max_rows` rows, or of MAX_ROWS if that is less, on any
        device."""
        most = min(max_rows, MAX_ROWS)

        def bytes_of(height: int) -> int:
            programs = _INTERPRETED_PROGRAMS
            if not is_interpreting():
                wanted = self.tiles(height).programs_per_sm * _MAX_MULTIPROCESSORS
                programs = min(wanted, MAX_PROGRAMS)
            return self._scratch(min(height, most), programs).num_bytes(self.shape.dtype)

        return max(map(bytes_of, {block_rows(rows) for rows in range(1, most + 1)}))

    def launch(
        self,
        kernel: Any,
        arguments_of: Callable[[Workspace, int], LaunchArguments],
        *,
        output: Tensor,
        kind: tuple[object, ...],
        workspace: Workspace,
    ) -> None:
        """One launch of as many programs as are co-resident, for the rows of `output` [R, H].

        arguments_of: of a workspace and a number of programs, what `kernel` is launched with. kind:
        what the compiler tells apart beside the height: so much may change the occupancy.
        """
        prepare_launch(output.device)
        num_programs = self._grid_size(kernel, arguments_of, output, kind)
        with workspace.frame():
            arguments, constants = arguments_of(workspace, num_programs)
            kernel[(num_programs,)](*arguments, **constants)

    def _grid_size(
        self,
        kernel: Any,
        arguments_of: Callable[[Workspace, int], LaunchArguments],
        output: Tensor,
        kind: tuple[object, ...],
    ) -> int:
        """Programs of a launch: as many as are co-resident; asked once for a kind of launch."""
        num_rows, device = len(output), output.device
        if is_interpreting() or device.type != "cuda":
            return _INTERPRETED_PROGRAMS
        kind = (device, block_rows(num_rows), *kind)
        if kind not in self._num_programs:
            arguments, constants = arguments_of(Workspace(device), 1)
            compiled = kernel.warmup(*arguments, grid=(1,), **constants)
            most = co_resident_programs(compiled, device)
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            wanted = self.tiles(num_rows).programs_per_sm * multiprocessors
            self._num_programs[kind] = min(most, wanted, MAX_PROGRAMS)
        return self._num_programs[kind]

    def _scratch(self, num_rows: int, num_programs: int) -> _Scratch:
        """Of a launch of so many rows and programs."""
        shape, tiles, block_t = self.shape, self.tiles(num_rows), block_rows(num_rows)
        slots = block_t * triton.next_power_of_2(shape.top_k)
        most_active = min(shape.num_local_experts, num_rows * shape.top_k)
        per_unit = TMA_ALIGNMENT // shape.dtype.itemsize
        return _Scratch(
            integers=(num_programs, slots + 2 * triton.next_power_of_2(shape.num_local_experts)),
            floats=(num_programs, slots + 2 * block_t),
            activated=(most_active * block_t, -(-shape.intermediate_size // per_unit) * per_unit),
            parts=(num_programs, max(2 * tiles.gate_up[0], tiles.down[0]) * block_t),
        )

    def shared_arguments(
        self, workspace: Workspace, num_programs: int, output: Tensor
    ) -> tuple[Any, ...]:
        """The kernel's arguments from integers_ptr to num_rows; output: [T, H], contiguous."""
        scratch = self._scratch(len(output), num_programs)
        activated = workspace.take(scratch.activated, self.shape.dtype)
        return (
            workspace.take(scratch.integers, torch.int32),
            workspace.take(scratch.floats, torch.float32),
            activated,
            activated.stride(0),
            workspace.take(scratch.parts, torch.float32),
            output,
            self._state_of(workspace),
            self._record_on(output.device),
            int(self.wait_limit_s * 1e9),
            num_programs,
            len(output),
        )

    def activation_arguments(self) -> tuple[float, float | None]:
        """The kernel's arguments alpha and limit."""
        activation = self.shape.activation
        limit = None if activation.limit is None else float(activation.limit)
        return float(activation.alpha), limit

    def shared_constants(self, num_rows: int, top_k: int) -> dict[str, Any]:
        """The kernel's constants beside those of its own tiles and routing."""
        shape = self.shape
        return {
            "ACTIVATION": shape.activation.kind.value,
            "TOP_K": top_k,
            "BLOCK_SLOTS": triton.next_power_of_2(top_k),
            "BLOCK_LOCAL": triton.next_power_of_2(shape.num_local_experts),
            "BLOCK_T": block_rows(num_rows),
            "MAX_PROGRAMS": MAX_PROGRAMS,
            "num_warps": self.tiles(num_rows).num_warps,
            "launch_cooperative_grid": True,
        }

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
