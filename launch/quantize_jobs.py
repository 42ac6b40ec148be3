"""What `ep-runtime quantize` does with each tensor of a checkpoint: quantise it, or copy it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor

from ep_runtime.checkpoint import FLOAT_DTYPES, CheckpointReader
from ep_runtime.families import Family
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.format import Projection, WeightFormat
from ep_runtime.kernels.quant.nf3 import quantize_nf3
from ep_runtime.kernels.quant.nvfp4 import quantize_nvfp4
from ep_runtime.kernels.quant.scheme import QuantizedTensor, WeightScheme
from ep_runtime.launch.quantize_writer import TensorSpec, check_can_write
from ep_runtime.opened_checkpoint import OpenedCheckpoint
from ep_runtime.tensor_names import WEIGHT, Slot, path_of

_QUANTIZERS = {WeightScheme.NVFP4: quantize_nvfp4, WeightScheme.NF3: quantize_nf3}


@dataclass
class TierErrors:
    """What a tier holds and how far it is off, over all its projections.

    num_bytes: of values and scales. source_bytes: of the same weights before.
    """

    num_experts: int = 0
    num_weights: int = 0
    num_bytes: int = 0
    source_bytes: int = 0
    squared_error: float = 0.0
    squared_norm: float = 0.0

    @property
    def relative_error(self) -> float:
        """|dequantised - weight| / |weight|, Frobenius norms; 0 of no weights."""
        return sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights if self.num_weights else 0.0


@dataclass(frozen=True)
class CopyJob:
    """A tensor that is written as it is."""

    spec: TensorSpec

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return (self.spec,)

    def tensors(self, reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
        tensor = torch.empty(self.spec.shape, dtype=self.spec.dtype)
        reader.read_into(self.spec.name, tensor)
        yield self.spec.name, tensor


@dataclass(frozen=True)
class QuantizeJob:
    """One expert's projection, gate, up or down, to its tier.

    name: its tensor in the source; place: its part of that, None where it has its own. path: of the
    linear layer it becomes. form: how it is stored.
    """

    name: str
    place: tuple[int, slice] | None
    path: str
    form: WeightFormat
    projection: Projection
    source_dtype: torch.dtype
    errors: TierErrors = field(repr=False)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(self.path + one.suffixes[0], one.shapes[0], next(iter(one.dtypes)))
            for one in self.form.stored(self.projection).values()
            if one.is_used
        )

    def tensors(self, reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
        weight = self._read(reader)
        try:
            stored = _QUANTIZERS[self.form.scheme.weight](weight)
        except ValueError as error:
            raise CheckpointError(f"{self.name}: {error}") from None
        self._note(weight, stored)
        yield from stored_tensors(self.path, self.form, self.projection, stored)

    def _read(self, reader: CheckpointReader) -> Tensor:
        rows, columns = self.projection.rows, self.projection.columns
        if self.place is None:
            weight = torch.empty((rows, columns), dtype=self.source_dtype)
            reader.read_into(self.name, weight)
            return weight
        expert, part = self.place
        whole = torch.empty(reader.tensors[self.name].shape[1:], dtype=self.source_dtype)
        reader.read_into(self.name, whole, expert)
        return whole[part]

    def _note(self, weight: Tensor, stored: QuantizedTensor) -> None:
        exact = weight.float()
        self.errors.num_weights += exact.numel()
        self.errors.source_bytes += weight.numel() * weight.element_size()
        self.errors.num_bytes += sum(spec.num_bytes for spec in self.specs)
        self.errors.squared_norm += float(exact.double().square().sum())
        difference = dequantize(stored)[0] - exact
        self.errors.squared_error += float(difference.double().square().sum())


Job = CopyJob | QuantizeJob


def stored_tensors(
    path: str, form: WeightFormat, projection: Projection, stored: QuantizedTensor
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one projection (E = 1) under their names in a checkpoint."""
    by_role = {"weight": stored.values[0], "scale": stored.parameters.scales[0]}
    if stored.parameters.global_scales is not None:
        by_role["global_scale"] = stored.parameters.global_scales[0, 0]
    for role, one in form.stored(projection).items():
        if one.is_used:
            yield path + one.suffixes[0], by_role[role]


def make_jobs(
    opened: OpenedCheckpoint,
    forms: Mapping[int, WeightFormat],
    tiers: Mapping[WeightScheme, TierErrors],
) -> list[Job]:
    """A job for every tensor of the checkpoint, in the order of its files.

    forms: MoE layer -> how its experts are to be stored. tiers: where each tier's errors add up.
    Raises CheckpointError for what cannot be written.
    """
    reader, family = opened.reader, opened.skeleton.family
    jobs: list[Job] = []
    of_experts: dict[str, list[Job]] = {}
    for slot, weight in opened.names.slots.items():
        if slot.is_expert_weight:
            of_experts[weight.name] = [
                _quantize_job(opened, family, slot, weight.name, place, forms[slot.layer], tiers)
                for place in _places(opened, slot)
            ]
    for name in sorted(reader.tensors, key=lambda name: (reader.tensors[name].file, name)):
        info = reader.tensors[name]
        if name in of_experts:
            jobs += of_experts[name]
        else:
            dtype = check_can_write(name, info.dtype)
            jobs.append(CopyJob(TensorSpec(name, info.shape, dtype)))
    for form in forms.values():
        for expert in range(opened.moe.num_experts):
            tiers[form.of_expert(expert).scheme.weight].num_experts += 1
    return jobs


def _places(opened: OpenedCheckpoint, slot: Slot) -> list[tuple[Slot, tuple[int, slice] | None]]:
    """The projections in a slot's tensor: itself, or those of all experts in one."""
    if slot.expert is not None:
        return [(slot, None)]
    width, hidden = opened.moe.moe_intermediate_size, opened.moe.hidden_size
    parts = {"gate": slice(0, width), "up": slice(width, 2 * width)}
    if slot.part == "w2":
        parts = {"down": slice(0, hidden)}
    return [
        (Slot(slot.layer, part, expert), (expert, rows))
        for expert in range(opened.moe.num_experts)
        for part, rows in parts.items()
    ]


def _quantize_job(
    opened: OpenedCheckpoint,
    family: Family,
    slot: Slot,
    name: str,
    place: tuple[Slot, tuple[int, slice] | None],
    form: WeightFormat,
    tiers: Mapping[WeightScheme, TierErrors],
) -> QuantizeJob:
    own, where = place
    if own.expert is None:
        raise RuntimeError(f"{name}: {own} is of no expert")
    hidden, width = opened.moe.hidden_size, opened.moe.moe_intermediate_size
    rows, columns = (hidden, width) if own.part == "down" else (width, hidden)
    own_form = form.of_expert(own.expert)
    return QuantizeJob(
        name=name,
        place=where,
        path=name.removesuffix(WEIGHT) if where is None else path_of(own, family)[0],
        form=own_form,
        projection=Projection(rows, columns, opened.moe.torch_dtype),
        source_dtype=FLOAT_DTYPES[opened.reader.tensors[name].dtype],
        errors=tiers[own_form.scheme.weight],
    )
