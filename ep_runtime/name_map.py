"""Gives every name of a checkpoint its place; what is missing, twice or left over is an error."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from ep_runtime.checkpoint import FLOAT_DTYPES, MAX_LISTED, TensorInfo
from ep_runtime.config import MoEConfig
from ep_runtime.families import Family
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.quant.format import Projection, WeightFormat
from ep_runtime.quantization import CheckpointQuantization
from ep_runtime.stored_weight import PLAIN, StoredWeight, stored_tensors
from ep_runtime.tensor_names import WEIGHT, NameParser, Slot, block_names, path_of, slot_shapes

IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that old releases stored
Place = Slot | str  # a place in an MoE block, or a dense tensor's name


@dataclass(frozen=True)
class NameMap:
    """Where everything is. slots: places in the MoE blocks. dense: the model's names outside them.
    unused: names that are known and that nothing reads."""

    slots: Mapping[Slot, StoredWeight]
    dense: Mapping[str, StoredWeight]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class MoELayout:
    """What a model's MoE layers need: the family, the layers that have a block, their shape.

    tied: for a dense name that may be absent, the name that then stands for it.
    quantization: the checkpoint's; None: nothing is quantised. expert_formats: MoE layer -> how its
    routed experts are stored; None, or not there: plain.
    """

    family: Family
    moe: MoEConfig
    layers: Sequence[int]
    num_hidden_layers: int
    tied: Mapping[str, str]
    quantization: CheckpointQuantization | None = None
    expert_formats: Mapping[int, WeightFormat | None] = field(default_factory=dict)


def map_names(
    tensors: Mapping[str, TensorInfo], layout: MoELayout, dense: Mapping[str, tuple[int, ...]]
) -> NameMap:
    """Give every name of a checkpoint its place.

    dense: the model's tensors outside its MoE blocks, and their shapes. How routed experts are
    stored is what `quantization_config` says; any other linear layer is quantised where the
    checkpoint has more of it than a plain weight, in the format that `quantization_config` says.
    Raises CheckpointError that lists what is missing (with the nearest left-over name), what is
    there twice and what is left over.
    """
    return _NameMapper(tensors, layout, dense).map()


class _NameMapper:
    """The work of `map_names`: sorts the names by place, then takes what each place wants."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        layout: MoELayout,
        dense: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._tensors, self._layout, self._dense = tensors, layout, dense
        # Place -> what follows its path -> name; what is taken leaves it.
        self._found: dict[Place, dict[str, str]] = {}
        self._missing: list[str] = []
        self._twice: list[str] = []
        self._left_over: list[str] = []
        self._unused: list[str] = []
        self._spelt: dict[str, tuple[Slot, str]] = {}  # part -> an expert's slot and path

    def map(self) -> NameMap:
        self._sort_names()
        shapes = slot_shapes(self._layout.moe, self._layout.family)
        slots = {slot: self._take(slot, shapes[slot.part]) for slot in [*self._wanted_slots()]}
        dense = {name: self._take(name, shape) for name, shape in self._dense.items()}
        for parts in self._found.values():
            self._left_over += parts.values()
        _raise_if_any(sorted(self._missing), self._twice, sorted(self._left_over))
        return NameMap(
            {slot: weight for slot, weight in slots.items() if weight is not None},
            {name: weight for name, weight in dense.items() if weight is not None},
            tuple(sorted(self._unused)),
        )

    def _sort_names(self) -> None:
        family, quantization = self._layout.family, self._layout.quantization
        parser, moe_layers = NameParser(family), frozenset(self._layout.layers)
        in_mtp_layer = _mtp_expression(self._tensors, self._layout)
        for name in sorted(self._tensors):
            is_ignored = IGNORED.search(name) or in_mtp_layer.match(name)
            if is_ignored or (quantization is not None and quantization.is_unused(name)):
                self._unused.append(name)
                continue
            place, suffix = self._place_of(name, parser)
            if isinstance(place, Slot) and place.layer not in moe_layers:
                place = None
            if place is None:
                self._left_over.append(name)
                continue
            if isinstance(place, Slot) and place.expert is not None:
                self._spelt.setdefault(place.part, (place, name.removesuffix(suffix)))
            parts = self._found.setdefault(place, {})
            if suffix in parts:
                self._twice.append(f"{name} and {parts[suffix]}")
            parts.setdefault(suffix, name)

    def _place_of(self, name: str, parser: NameParser) -> tuple[Place | None, str]:
        if name in self._dense:
            return name, WEIGHT if name.endswith(WEIGHT) else ""
        slot = parser.slot_of(name)
        if slot is not None:
            return slot
        path, _, last = name.rpartition(".")
        weight = f"{path}{WEIGHT}"
        return (weight, f".{last}") if weight in self._dense else (None, "")

    def _wanted_slots(self) -> Iterator[Slot]:
        """Every slot of the model; a layer is wanted fused where the checkpoint has it fused."""
        family, moe = self._layout.family, self._layout.moe
        fused = ["w13", "w2"] + (["w13_bias", "w2_bias"] if family.fused.has_bias else [])
        for layer in self._layout.layers:
            for part in block_names(family).values():
                if not part.startswith("shared") or moe.has_shared_expert:
                    yield Slot(layer, part)
            if family.disk_experts is None or any(Slot(layer, p) in self._found for p in fused):
                yield from (Slot(layer, part) for part in fused)
            else:
                for expert in range(moe.num_experts):
                    yield from (Slot(layer, part, expert) for part in ("gate", "up", "down"))

    def _take(self, place: Place, shape: tuple[int, ...]) -> StoredWeight | None:
        """What a place wants of what is found there; notes what is missing."""
        parts = self._found.get(place, {})
        path, plain = self._path_of(place, parts)
        form = self._format_of(place, path, parts, plain)
        if form is None:
            name = parts.pop(plain, None)
            if name is not None:
                return StoredWeight({PLAIN: name}, shape)
            if not isinstance(place, str) or self._layout.tied.get(place) not in self._tensors:
                self._missing.append(f"{path}{plain}")
            return None
        projection, num_experts = self._projection_of(place, shape)
        wanted = stored_tensors(form, projection, num_experts)
        if not wanted:
            raise CheckpointError(
                f"{path}: {form.scheme.weight} weights of all experts in one tensor are not "
                f"supported; give a checkpoint that has each expert's own"
            )
        tensors: dict[str, str] = {}
        for role, tensor in wanted.items():
            present = [parts.pop(suffix) for suffix in tensor.suffixes if suffix in parts]
            if len(present) > 1:
                self._twice.append(" and ".join(present))
            elif present and tensor.is_used:
                tensors[role] = present[0]
            elif tensor.is_required and not present:
                self._missing.append(f"{path}{tensor.suffixes[0]}")
            else:
                self._unused += present
        return StoredWeight(tensors, shape, form, projection, num_experts)

    def _format_of(
        self, place: Place, path: str, parts: Mapping[str, str], plain: str
    ) -> WeightFormat | None:
        """How the weight at a place is stored; None: as a plain tensor."""
        layout = self._layout
        if isinstance(place, Slot) and place.is_expert_weight:
            form = layout.expert_formats.get(place.layer)
            return form if form is None or place.expert is None else form.of_expert(place.expert)
        if layout.quantization is None or plain != WEIGHT or not parts:
            return None
        if set(parts) == {plain} and self._tensors[parts[plain]].dtype in FLOAT_DTYPES:
            return None
        return layout.quantization.format_of(path)

    def _projection_of(self, place: Place, shape: tuple[int, ...]) -> tuple[Projection, int | None]:
        """A quantised weight's rows and columns, and of all experts in one tensor their number."""
        moe = self._layout.moe
        if isinstance(place, Slot) and place.expert is None and place.is_expert_weight:
            hidden, width = moe.hidden_size, moe.moe_intermediate_size
            rows, columns = (2 * width, hidden) if place.part == "w13" else (hidden, width)
            return Projection(rows, columns, moe.torch_dtype), moe.num_experts
        rows, columns = shape
        return Projection(rows, columns, moe.torch_dtype), None

    def _path_of(self, place: Place, parts: Mapping[str, str]) -> tuple[str, str]:
        """A place's path, as spelt by what is found there, else by other experts; and what follows
        it in the name of a plain tensor."""
        if isinstance(place, str):
            plain = WEIGHT if place.endswith(WEIGHT) else ""
            return place.removesuffix(plain), plain
        path, plain = path_of(place, self._layout.family)
        for suffix, name in parts.items():
            return name.removesuffix(suffix), plain
        if place.part in self._spelt:
            other, spelt = self._spelt[place.part]
            layers = f"{self._layout.family.layers}."
            _, _, rest = spelt.removeprefix(layers).partition(".")
            rest = rest.replace(f".experts.{other.expert}.", f".experts.{place.expert}.")
            return f"{layers}{place.layer}.{rest}", plain
        return path, plain


def _mtp_expression(names: Iterable[str], layout: MoELayout) -> re.Pattern[str]:
    """Matches what is in layers past the last one that carry the family's multi-token-prediction
    marker."""
    layers, marker = re.escape(layout.family.layers), layout.family.mtp_marker
    if marker is None:
        return re.compile(r"(?!)")  # matches nothing
    marked = re.compile(rf"{layers}\.(\d+)\.{re.escape(marker)}\.[^.]+")
    numbers = {int(found[1]) for name in names if (found := marked.fullmatch(name))}
    past = sorted(number for number in numbers if number >= layout.num_hidden_layers)
    return re.compile(rf"{layers}\.({'|'.join(map(str, past))})\." if past else r"(?!)")


def _raise_if_any(missing: list[str], twice: list[str], left_over: list[str]) -> None:
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing: " + _listed(missing, left_over))
    if twice:
        faults.append(f"{len(twice)} there under two names: " + _listed(twice, []))
    if left_over:
        faults.append(f"{len(left_over)} left over: " + _listed(left_over, []))
    if faults:
        raise CheckpointError("the checkpoint's tensors do not fit the model; " + "; ".join(faults))


def _listed(names: list[str], candidates: list[str]) -> str:
    shown = []
    for name in names[:MAX_LISTED]:
        near = get_close_matches(name, candidates[:1000], n=1, cutoff=0.85)
        shown.append(f"{name} (is it {near[0]}?)" if near else name)
    if len(names) > MAX_LISTED:
        shown.append(f"and {len(names) - MAX_LISTED} more")
    return ", ".join(shown)
