"""Reads a rank's own routed experts into its buffers, and proves that nothing is missed.

A record of every read is kept; over the ranks of an EP group each expert tensor must be in it
exactly once.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ep_runtime.checkpoint import CheckpointReader, first_names
from ep_runtime.families import Family
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.tensor_names import Slot


@dataclass(frozen=True)
class LoadReport:
    """What one rank read.

    bytes_read: all tensor bytes; expert_bytes_read: those of routed experts.
    expert_bytes_in_checkpoint: of all routed experts, over all ranks of an EP group.
    experts_read: (layer, part) -> global expert ids, one entry for each time it was read.
    """

    bytes_read: int
    expert_bytes_read: int
    expert_bytes_in_checkpoint: int
    num_tensors_read: int
    experts_read: Mapping[tuple[int, str], tuple[int, ...]] = field(repr=False)


@dataclass(frozen=True)
class ExpertBuffers:
    """Where one layer's routed experts go on this rank.

    local_expert_ids: global ids in the order of dimension 0. w13: [E_local, 2I, H] gate rows
    first; w2: [E_local, H, I]; w13_bias: [E_local, 2I] and w2_bias: [E_local, H], or None.
    """

    local_expert_ids: tuple[int, ...]
    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None


class ExpertLoader:
    """Reads this rank's experts and keeps the record that proves coverage."""

    def __init__(self, reader: CheckpointReader, family: Family) -> None:
        self._reader = reader
        self._layout = family.fused
        self.bytes_read = 0
        self.num_tensors_read = 0
        self.record: Counter[tuple[int, str, int]] = Counter()

    def read(self, slot: Slot, name: str, buffers: ExpertBuffers) -> None:
        """Fill what this rank holds of one slot; nothing is read where it holds nothing."""
        if slot.expert is not None:
            if slot.expert in buffers.local_expert_ids:
                local_id = buffers.local_expert_ids.index(slot.expert)
                self._read(slot, name, slot.expert, _part_of(buffers, slot.part, local_id), None)
            return
        for local_id, expert in enumerate(buffers.local_expert_ids):
            self._read(slot, name, expert, self._fused_part(buffers, slot.part, local_id), expert)

    def _read(
        self, slot: Slot, name: str, expert: int, destination: Tensor, index: int | None
    ) -> None:
        before = self._reader.bytes_read
        self._reader.read_into(name, destination, index)
        self.bytes_read += self._reader.bytes_read - before
        self.num_tensors_read += 1
        self.record[slot.layer, slot.part, expert] += 1

    def _fused_part(self, buffers: ExpertBuffers, part: str, local_id: int) -> Tensor:
        """A view of the buffer whose row-major order is that of the fused tensor's entry.

        Example: interleaved and transposed, w13 [2I, H] is seen as [H, I, 2].
        """
        buffer = getattr(buffers, part)
        view: Tensor = buffer[local_id]
        if self._layout.interleaved and part in ("w13", "w13_bias"):
            view = view.view(2, -1, *view.shape[1:]).transpose(0, 1)  # [I, 2, H] or [I, 2]
            if part == "w13" and self._layout.transposed:
                view = view.permute(2, 0, 1)
        elif self._layout.transposed and view.ndim == 2:
            view = view.T
        return view

    def experts_read(self) -> dict[tuple[int, str], tuple[int, ...]]:
        """(layer, part) -> expert ids, one entry for each time it was read."""
        read: dict[tuple[int, str], list[int]] = {}
        for (layer, part, expert), count in self.record.items():
            read.setdefault((layer, part), []).extend([expert] * count)
        return {key: tuple(experts) for key, experts in read.items()}


def _part_of(buffers: ExpertBuffers, part: str, local_id: int) -> Tensor:
    if part == "down":
        return buffers.w2[local_id]
    gate, up = buffers.w13[local_id].chunk(2)
    return gate if part == "gate" else up


def prove_coverage(
    wanted: Iterable[tuple[int, str]],
    num_experts: int,
    read_by_rank: Sequence[Mapping[tuple[int, str], tuple[int, ...]]],
) -> None:
    """CheckpointError unless the ranks of an EP group read every expert tensor exactly once.

    wanted: each (layer, part). read_by_rank: LoadReport.experts_read of each rank.
    """
    wanted = list(wanted)
    faults = []
    for layer, part in wanted:
        times = Counter(e for read in read_by_rank for e in read.get((layer, part), ()))
        for expert in sorted({*range(num_experts), *times}):
            if times[expert] != 1 or not 0 <= expert < num_experts:
                faults.append(f"layer {layer} expert {expert} {part}: {times[expert]} times")
    known = set(wanted)
    faults += [
        f"layer {layer} {part}: not wanted"
        for layer, part in sorted({key for read in read_by_rank for key in read} - known)
    ]
    if faults:
        raise CheckpointError(f"expert tensors not read exactly once: {first_names(faults)}")
