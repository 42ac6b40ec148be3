"""The tensors of a `QuantizedTensor`, whatever its scheme: shapes, bytes, memory, parts, experts.

E experts, N output rows, K input columns. w13 has two parts, gate and up, each of N / 2 rows, one
after the other along dimension 1 in every tensor; w2, and w13 without a gate, has one.
Of a hybrid each tensor is of the experts in one tier; `expert_of` finds an expert's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil, prod

import torch
from torch import Tensor

from ep_runtime.kernels.quant.scheme import (
    FIXED_GROUPS,
    FP8_GROUP,
    NF3_GROUP,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)

PARAMETER_NAMES = tuple(field.name for field in fields(QuantParameters))
# A hybrid's tensors of the experts in nf3: name -> what it is called of nf3 alone.
_NF3_NAMES = {"nf3_values": "values", "nf3_scales": "scales"}


@dataclass(frozen=True)
class StoredShape:
    """Shape, without the leading E, and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def stored_shapes(
    scheme: QuantScheme, rows: int, columns: int, *, num_parts: int, dtype: torch.dtype
) -> dict[str, StoredShape]:
    """Name (`values`, `scales`, ...) -> what one expert has under it, as `QuantParameters` says.

    rows: N, of all parts. dtype: the layer's.
    """
    weight = scheme.weight
    if weight is WeightScheme.FP8_BLOCK:
        blocks = num_parts * ceil(rows // num_parts / FP8_GROUP), ceil(columns / FP8_GROUP)
        return {
            "values": StoredShape((rows, columns), torch.float8_e4m3fn),
            "scales": StoredShape(blocks, torch.float32),
        }
    if weight is WeightScheme.FP8_CHANNEL:
        return {
            "values": StoredShape((rows, columns), torch.float8_e4m3fn),
            "scales": StoredShape((rows,), torch.float32),
        }
    if weight is WeightScheme.NF3:
        return {
            "values": StoredShape((rows, nf3_words(columns)), torch.int32),
            "scales": StoredShape((rows, ceil(columns / NF3_GROUP)), torch.bfloat16),
        }
    if weight is WeightScheme.HYBRID:
        nvfp4, nf3 = (
            stored_shapes(QuantScheme(tier), rows, columns, num_parts=num_parts, dtype=dtype)
            for tier in (WeightScheme.NVFP4, WeightScheme.NF3)
        )
        of_nf3 = {name: nf3[own] for name, own in _NF3_NAMES.items()}
        return {**nvfp4, **of_nf3, "tiers": StoredShape((), torch.int32)}
    if weight in (WeightScheme.MXFP4, WeightScheme.NVFP4):
        scale_dtype = torch.uint8 if weight is WeightScheme.MXFP4 else torch.float8_e4m3fn
        shapes = {
            "values": StoredShape((rows, ceil(columns / 2)), torch.uint8),
            "scales": StoredShape((rows, ceil(columns / FIXED_GROUPS[weight])), scale_dtype),
        }
        if weight is WeightScheme.NVFP4:
            shapes["global_scales"] = StoredShape((num_parts,), torch.float32)
        return shapes
    if weight in (WeightScheme.INT4, WeightScheme.INT8):
        groups = ceil(columns / (scheme.group_size or columns))
        packed = ceil(columns / 2) if weight is WeightScheme.INT4 else columns
        shapes = {
            "values": StoredShape((rows, packed), torch.uint8),
            "scales": StoredShape((rows, groups), dtype),
        }
        if scheme.has_zero_points:
            shapes["zero_points"] = StoredShape((rows, groups), torch.uint8)
        if scheme.has_input_order:
            shapes["input_order"] = StoredShape((columns,), torch.int32)
        return shapes
    raise ValueError(f"weights stored as {weight} have no quantised tensors")


def nf3_words(columns: int) -> int:
    """32-bit words of a row of nf3: three for every 32 columns."""
    return 3 * columns // 32


def num_stored(name: str, scheme: QuantScheme, experts: Sequence[int]) -> int:
    """The leading dimension of the tensor `name` of some experts, by global id: of a hybrid only
    those in its tier count."""
    if scheme.weight is not WeightScheme.HYBRID or name == "tiers":
        return len(experts)
    in_nvfp4 = sum(expert in scheme.nvfp4_experts for expert in experts)
    return len(experts) - in_nvfp4 if name in _NF3_NAMES else in_nvfp4


def tiers_of(in_nvfp4: Sequence[bool]) -> Tensor:
    """`QuantParameters.tiers` of experts that lie in each tier in the order they have here.

    Example: True, False, True gives 0, -1, 1.
    """
    places, counts = [], [0, 0]
    for is_first in in_nvfp4:
        place = counts[not is_first]
        places.append(place if is_first else ~place)
        counts[not is_first] += 1
    return torch.tensor(places, dtype=torch.int32)


def expert_of(weight: QuantizedTensor, expert: int) -> QuantizedTensor:
    """Views of one expert's tensors, E = 1, in its own scheme. Waits for the device of a hybrid."""
    tiers = weight.parameters.tiers
    if tiers is None:
        one = {name: tensor[expert : expert + 1] for name, tensor in tensors_of(weight).items()}
        return quantized_tensor(one, weight.scheme)
    place = int(tiers[expert])
    in_nvfp4, place = place >= 0, max(place, ~place)
    one = {
        _NF3_NAMES.get(name, name): tensor[place : place + 1]
        for name, tensor in tensors_of(weight).items()
        if name != "tiers" and (name in _NF3_NAMES) is not in_nvfp4
    }
    return quantized_tensor(one, QuantScheme(WeightScheme.NVFP4 if in_nvfp4 else WeightScheme.NF3))


def tensors_of(weight: QuantizedTensor) -> dict[str, Tensor]:
    """Name -> tensor, of those there are."""
    named = {"values": weight.values}
    for name in PARAMETER_NAMES:
        tensor = getattr(weight.parameters, name)
        if tensor is not None:
            named[name] = tensor
    return named


def quantized_tensor(tensors: Mapping[str, Tensor], scheme: QuantScheme) -> QuantizedTensor:
    """The inverse of `tensors_of`."""
    parameters = QuantParameters(**{n: tensors[n] for n in PARAMETER_NAMES if n in tensors})
    return QuantizedTensor(tensors["values"], parameters, scheme)


def take_experts(weight: QuantizedTensor, experts: list[int]) -> QuantizedTensor:
    """Copies of some experts, values and parameters together, in the order given; of a hybrid also
    in each tier."""
    tiers = weight.parameters.tiers
    if tiers is not None:
        places = tiers[experts].tolist()
        nvfp4, nf3 = [p for p in places if p >= 0], [~p for p in places if p < 0]
        taken = {
            name: _take(tensor, nf3 if name in _NF3_NAMES else nvfp4)
            for name, tensor in tensors_of(weight).items()
            if name != "tiers"
        }
        taken["tiers"] = tiers_of([place >= 0 for place in places]).to(tiers.device)
        return quantized_tensor(taken, weight.scheme)
    return quantized_tensor(
        {name: _take(tensor, experts) for name, tensor in tensors_of(weight).items()},
        weight.scheme,
    )


def _take(tensor: Tensor, experts: list[int]) -> Tensor:
    """`tensor[experts]`, also of float8, which torch does not index on every device."""
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8)[experts].view(tensor.dtype)
    return tensor[experts]


def part_of(name: str, tensor: Tensor, part: int, num_parts: int) -> Tensor:
    """The view of `tensor` [E, ...] that holds one part; the input order belongs to all parts."""
    if name == "input_order" or num_parts == 1:
        return tensor
    size = tensor.shape[1] // num_parts
    return tensor[:, part * size : (part + 1) * size]


def take_rows(weight: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Views of some output rows of a weight of one part; start is a multiple of 128."""
    taken = {}
    for name, tensor in tensors_of(weight).items():
        if name in ("input_order", "global_scales"):
            taken[name] = tensor
        elif name == "scales" and weight.scheme.weight is WeightScheme.FP8_BLOCK:
            taken[name] = tensor[:, start // FP8_GROUP : ceil(stop / FP8_GROUP)]
        else:
            taken[name] = tensor[:, start:stop]
    return quantized_tensor(taken, weight.scheme)


def empty_hybrid(
    shapes: Mapping[str, StoredShape],
    scheme: QuantScheme,
    experts: Sequence[int],
    device: torch.device,
) -> dict[str, Tensor]:
    """Unwritten memory for some experts, by global id, of a hybrid; tiers alone are written."""
    tensors = {
        name: torch.empty(
            (num_stored(name, scheme, experts), *one.shape), dtype=one.dtype, device=device
        )
        for name, one in shapes.items()
    }
    in_nvfp4 = [expert in scheme.nvfp4_experts for expert in experts]
    tensors["tiers"] = tiers_of(in_nvfp4).to(device)
    return tensors


def empty_stored(
    shapes: Mapping[str, StoredShape], num_experts: int, device: torch.device
) -> dict[str, Tensor]:
    """Unwritten memory for E experts, by name; an input order is -1. Not of a hybrid."""
    return {
        name: torch.full((num_experts, *one.shape), -1, dtype=one.dtype, device=device)
        if name == "input_order"
        else torch.empty((num_experts, *one.shape), dtype=one.dtype, device=device)
        for name, one in shapes.items()
    }
