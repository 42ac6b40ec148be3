"""Reads a rank's own routed experts into its buffers, and proves that nothing is missed.

A record of every read is kept; over the ranks of an EP group each expert tensor must be in it
exactly once.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ep_runtime.checkpoint import CheckpointReader, first_names
from ep_runtime.families import Family
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.quant.scheme import (
    UNQUANTISED,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.storage import expert_of, part_of, quantized_tensor, tensors_of
from ep_runtime.stored_weight import StoredWeight
from ep_runtime.tensor_names import Slot
from ep_runtime.weight_reader import WeightReader


@dataclass(frozen=True)
class LoadReport:
    """What one rank read.

    bytes_read: all tensor bytes; expert_bytes_read: those of routed experts.
    expert_bytes_in_checkpoint: of all routed experts, over all ranks of an EP group.
    experts_read: (layer, part) -> global expert ids, one entry for each time it was read; of a
    quantised expert each of its tensors is a part (`up.scale`).
    unused: the checkpoint's tensors that are known and that no rank reads.
    """

    bytes_read: int
    expert_bytes_read: int
    expert_bytes_in_checkpoint: int
    num_tensors_read: int
    experts_read: Mapping[tuple[int, str], tuple[int, ...]] = field(repr=False)
    unused: tuple[str, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class ExpertBuffers:
    """Where one layer's routed experts go on this rank.

    local_expert_ids: global ids in the order of dimension 0. w13: [E_local, 2I, H] gate rows
    first; w2: [E_local, H, I]; w13_bias: [E_local, 2I] and w2_bias: [E_local, H], or None.
    scheme, w13_quant, w2_quant: of quantised experts; w13 and w2 are then as the scheme stores
    values, and an input order is -1 until it is read.
    """

    local_expert_ids: tuple[int, ...]
    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_quant: QuantParameters | None = None
    w2_quant: QuantParameters | None = None
    scheme: QuantScheme = UNQUANTISED

    def quantized(self, part: str) -> QuantizedTensor:
        """All stored tensors of w13 (gate, up, w13) or of w2 (down, w2)."""
        values, parameters = (
            (self.w2, self.w2_quant) if part in ("down", "w2") else (self.w13, self.w13_quant)
        )
        if parameters is None:
            raise RuntimeError("the layer has no place for quantised experts")
        return QuantizedTensor(values, parameters, self.scheme)


class ExpertLoader:
    """Reads this rank's experts and keeps the record that proves coverage."""

    def __init__(self, reader: CheckpointReader, family: Family) -> None:
        self._reader, self._weights = reader, WeightReader(reader)
        self._layout = family.fused
        self.bytes_read = 0
        self.num_tensors_read = 0
        self.record: Counter[tuple[int, str, int]] = Counter()

    def read(self, slot: Slot, weight: StoredWeight, buffers: ExpertBuffers) -> None:
        """Fill what this rank holds of one slot; nothing is read where it holds nothing."""
        before = self._reader.bytes_read
        for local_id, expert in enumerate(buffers.local_expert_ids):
            if slot.expert not in (None, expert):
                continue
            index = expert if slot.expert is None else None
            if weight.format is not None:
                stored = self._weights.read_quantized(weight, buffers.w13.device, index)
                self._place(stored, slot, weight, buffers, local_id)
            elif index is None:
                self._reader.read_into(weight.name, _part_of(buffers, slot.part, local_id))
            else:
                view = self._fused_part(buffers, slot.part, local_id)
                self._reader.read_into(weight.name, view, index)
            for part in parts_read(slot, weight):
                self.record[slot.layer, part, expert] += 1
            self.num_tensors_read += len(weight.tensors)
        self.bytes_read += self._reader.bytes_read - before

    def _place(
        self,
        stored: QuantizedTensor,
        slot: Slot,
        weight: StoredWeight,
        buffers: ExpertBuffers,
        local_id: int,
    ) -> None:
        """Copy one expert's tensors (E = 1), values and parameters together, to their places."""
        if slot.part == "w13" and self._layout.interleaved:
            stored = _gate_rows_first(stored)
        places = tensors_of(expert_of(buffers.quantized(slot.part), local_id))
        tensors = tensors_of(stored)
        if set(places) != set(tensors):
            raise RuntimeError(f"{weight.name}: is stored as {set(tensors)}, not {set(places)}")
        for name, tensor in tensors.items():
            place = places[name]
            if slot.part in ("gate", "up"):
                place = part_of(name, place, ("gate", "up").index(slot.part), 2)
            if name == "input_order" and int(place[0, 0]) >= 0 and not torch.equal(place, tensor):
                raise CheckpointError(
                    f"{weight.name}: the gate's and the up projection's columns are stored in "
                    f"different orders; one order for both is supported"
                )
            place.copy_(tensor)

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


def _gate_rows_first(stored: QuantizedTensor) -> QuantizedTensor:
    """Of rows that alternate between gate and up, all of gate's, then all of up's."""
    if stored.scheme.weight is WeightScheme.FP8_BLOCK:
        raise RuntimeError("a block's scale belongs to gate and up where their rows alternate")
    ordered = {}
    for name, tensor in tensors_of(stored).items():
        by_row = name not in ("input_order", "global_scales")
        ordered[name] = torch.cat([tensor[:, 0::2], tensor[:, 1::2]], 1) if by_row else tensor
    return quantized_tensor(ordered, stored.scheme)


def parts_read(slot: Slot, weight: StoredWeight) -> tuple[str, ...]:
    """What the record has of a slot: its part, or each tensor of a quantised one's."""
    if weight.format is None:
        return (slot.part,)
    return tuple(f"{slot.part}.{role}" for role in weight.tensors)


def wanted_parts(
    weights: Mapping[Slot, StoredWeight], num_experts: int
) -> dict[tuple[int, str], set[int]]:
    """(layer, part) of the routed slots -> the experts that have it, as the record names parts."""
    wanted: dict[tuple[int, str], set[int]] = {}
    for slot, weight in weights.items():
        experts = range(num_experts) if slot.expert is None else (slot.expert,)
        for part in parts_read(slot, weight) if slot.is_routed else ():
            wanted.setdefault((slot.layer, part), set()).update(experts)
    return wanted


def prove_coverage(
    wanted: Mapping[tuple[int, str], Collection[int]],
    read_by_rank: Sequence[Mapping[tuple[int, str], tuple[int, ...]]],
) -> None:
    """CheckpointError unless the ranks of an EP group read every expert tensor exactly once.

    wanted: (layer, part) -> the experts that have it. read_by_rank: LoadReport.experts_read of each
    rank.
    """
    faults = []
    for (layer, part), experts in sorted(wanted.items()):
        times = Counter(e for read in read_by_rank for e in read.get((layer, part), ()))
        for expert in sorted({*experts, *times}):
            if times[expert] != (expert in experts):
                faults.append(f"layer {layer} expert {expert} {part}: {times[expert]} times")
    known = set(wanted)
    faults += [
        f"layer {layer} {part}: not wanted"
        for layer, part in sorted({key for read in read_by_rank for key in read} - known)
    ]
    if faults:
        raise CheckpointError(f"expert tensors not read exactly once: {first_names(faults)}")
