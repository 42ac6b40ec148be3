"""Which tensor of a checkpoint fills which place; every name is accounted for."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ep_runtime.checkpoint import MAX_LISTED
from ep_runtime.config import MoEConfig
from ep_runtime.families import EXPERT_PARTS, FUSED_PARTS, MOE_BLOCKS, Family
from ep_runtime.kernels.errors import CheckpointError

IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")  # a buffer that old releases stored
SHARED_PARTS = {"gate_proj": "shared_gate_proj", "up_proj": "shared_up", "down_proj": "shared_down"}


@dataclass(frozen=True)
class Slot:
    """One place of an MoE block that a tensor fills.

    part: gate | up | down of one expert; w13 | w2 | w13_bias | w2_bias of all experts at once;
    router | correction_bias | router_bias | shared_gate_proj | shared_up | shared_down |
    shared_gate. expert: the global id for the first three, else None.
    """

    layer: int
    part: str
    expert: int | None = None


@dataclass(frozen=True)
class NameMap:
    """Where everything is. slots: place -> name in the checkpoint. dense: names outside the blocks,
    the same in the model and on disk."""

    slots: Mapping[Slot, str]
    dense: frozenset[str]


@dataclass(frozen=True)
class MoELayout:
    """What a model's MoE layers need: the family, the layers that have a block, their shape.

    tied: for a dense name that may be absent, the name that then stands for it.
    """

    family: Family
    moe: MoEConfig
    layers: Sequence[int]
    num_hidden_layers: int
    tied: Mapping[str, str]


def slot_shapes(moe: MoEConfig, family: Family) -> dict[str, tuple[int, ...]]:
    """Part -> shape on disk."""
    e, h, i = moe.num_experts, moe.hidden_size, moe.moe_intermediate_size
    s, flip = moe.shared_intermediate_size, family.fused.transposed
    return {
        "gate": (i, h),
        "up": (i, h),
        "down": (h, i),
        "w13": (e, h, 2 * i) if flip else (e, 2 * i, h),
        "w2": (e, i, h) if flip else (e, h, i),
        "w13_bias": (e, 2 * i),
        "w2_bias": (e, h),
        "router": (e, h),
        "correction_bias": (e,),
        "router_bias": (e,),
        "shared_gate_proj": (s, h),
        "shared_up": (s, h),
        "shared_down": (h, s),
        "shared_gate": (1, h),
    }


class NameParser:
    """Reads a tensor's name into the slot it fills, for one family."""

    def __init__(self, family: Family) -> None:
        self._block = re.compile(
            rf"{re.escape(family.layers)}\.(\d+)\.({'|'.join(MOE_BLOCKS)})\.(.+)"
        )
        self._expert = re.compile(rf"experts\.(\d+)\.({'|'.join(EXPERT_PARTS)})\.weight")
        self._whole = {f"experts.{name}": part for name, part in FUSED_PARTS.items()}
        self._whole |= _block_names(family)

    def slot_of(self, name: str) -> Slot | None:
        """The slot of a name; None for a name outside the declared ones."""
        block = self._block.fullmatch(name)
        if block is None:
            return None
        layer, rest = int(block[1]), block[3]
        expert = self._expert.fullmatch(rest)
        if expert:
            return Slot(layer, EXPERT_PARTS[expert[2]], int(expert[1]))
        part = self._whole.get(rest)
        return Slot(layer, part) if part else None


def _block_names(family: Family) -> dict[str, str]:
    """Name under the block -> part, for what is not an expert's."""
    names = {family.router: "router"}
    if family.correction_bias:
        names[family.correction_bias] = "correction_bias"
    if family.router_bias:
        names[family.router_bias] = "router_bias"
    if family.shared:
        names |= {f"{family.shared}.{p}.weight": part for p, part in SHARED_PARTS.items()}
    if family.shared_gate:
        names[family.shared_gate] = "shared_gate"
    return names


def name_of(slot: Slot, family: Family) -> str:
    """The name that save_pretrained gives a slot's tensor."""
    prefix = f"{family.layers}.{slot.layer}.{family.disk_block}"
    if slot.expert is not None:
        gate, up, down = family.disk_experts or ("gate_proj", "up_proj", "down_proj")
        part = {"gate": gate, "up": up, "down": down}[slot.part]
        return f"{prefix}.experts.{slot.expert}.{part}.weight"
    fused = {part: name for name, part in FUSED_PARTS.items()}
    if slot.part in fused:
        return f"{prefix}.experts.{fused[slot.part]}"
    return f"{prefix}.{ {part: name for name, part in _block_names(family).items()}[slot.part] }"


def map_names(names: Iterable[str], layout: MoELayout, dense: Iterable[str]) -> NameMap:
    """Give every name of a checkpoint its place.

    names: all tensors of the checkpoint. dense: the model's tensors outside its MoE blocks.
    Raises CheckpointError that lists what is missing (with the nearest left-over name), what is
    there twice and what is left over.
    """
    names, dense = list(names), frozenset(dense)
    parser, moe_layers = NameParser(layout.family), frozenset(layout.layers)
    mtp = frozenset(_mtp_layers(names, layout))
    found: dict[Slot, str] = {}
    twice: list[str] = []
    left_over: list[str] = []
    found_dense: set[str] = set()
    for name in sorted(names):
        slot = parser.slot_of(name)
        if name in dense:
            found_dense.add(name)
        elif slot is not None and slot.layer in moe_layers:
            if slot in found:
                twice.append(f"{name} and {found[slot]}")
            found.setdefault(slot, name)
        elif not IGNORED.search(name) and _layer_number(name, layout.family) not in mtp:
            left_over.append(name)
    wanted = set(_wanted_slots(layout, found))
    left_over += [name for slot, name in found.items() if slot not in wanted]
    missing = [_name_in_use(slot, found, layout.family) for slot in wanted if slot not in found]
    missing += [
        name
        for name in dense
        if name not in found_dense and layout.tied.get(name) not in found_dense
    ]
    _raise_if_any(sorted(missing), twice, sorted(left_over))
    return NameMap({slot: found[slot] for slot in wanted}, frozenset(found_dense))


def _wanted_slots(layout: MoELayout, found: Mapping[Slot, str]) -> Iterator[Slot]:
    """Every slot of the model; a layer is wanted fused where the checkpoint has it fused."""
    family, moe = layout.family, layout.moe
    fused = ["w13", "w2"] + (["w13_bias", "w2_bias"] if family.fused.has_bias else [])
    for layer in layout.layers:
        for part in _block_names(family).values():
            if not part.startswith("shared") or moe.has_shared_expert:
                yield Slot(layer, part)
        if family.disk_experts is None or any(Slot(layer, part) in found for part in fused):
            yield from (Slot(layer, part) for part in fused)
        else:
            for expert in range(moe.num_experts):
                yield from (Slot(layer, part, expert) for part in ("gate", "up", "down"))


def _layer_number(name: str, family: Family) -> int | None:
    match = re.match(rf"{re.escape(family.layers)}\.(\d+)\.", name)
    return int(match[1]) if match else None


def _mtp_layers(names: Sequence[str], layout: MoELayout) -> Iterator[int]:
    """Layers past the last one that carry the family's multi-token-prediction marker."""
    family = layout.family
    for name in names:
        number = _layer_number(name, family)
        if number is None or number < layout.num_hidden_layers:
            continue
        if name == f"{family.layers}.{number}.{family.mtp_marker}":
            yield number


def _name_in_use(slot: Slot, found: Mapping[Slot, str], family: Family) -> str:
    """A missing slot's name, spelt as this checkpoint spells the same part elsewhere."""
    if slot.expert is not None:
        for other, name in found.items():
            if other.part == slot.part and other.expert is not None:
                _, _, rest = name.removeprefix(f"{family.layers}.").partition(".")
                renamed = rest.replace(f".experts.{other.expert}.", f".experts.{slot.expert}.")
                return f"{family.layers}.{slot.layer}.{renamed}"
    return name_of(slot, family)


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
