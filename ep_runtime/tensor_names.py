"""The places of an MoE block, how big each is, and which tensor's name means which."""

import re
from dataclasses import dataclass

from ep_runtime.config import MoEConfig
from ep_runtime.families import EXPERT_PARTS, FUSED_PARTS, MOE_BLOCKS, Family

SHARED_PARTS = {"gate_proj": "shared_gate_proj", "up_proj": "shared_up", "down_proj": "shared_down"}
WEIGHT = ".weight"  # what follows a linear layer's path in the name of its plain weight


@dataclass(frozen=True)
class Slot:
    """One place of an MoE block that a weight fills.

    part: gate | up | down of one expert; w13 | w2 | w13_bias | w2_bias of all experts at once;
    router | correction_bias | router_bias | shared_gate_proj | shared_up | shared_down |
    shared_gate. expert: the global id for the first three, else None.
    """

    layer: int
    part: str
    expert: int | None = None

    @property
    def is_routed(self) -> bool:
        """Whether it is of the routed experts, of which a rank holds its own alone."""
        return self.expert is not None or self.part in FUSED_PARTS.values()

    @property
    def is_expert_weight(self) -> bool:
        """Whether it is what a scheme stores: a routed expert's weight, not its bias."""
        return self.expert is not None or self.part in ("w13", "w2")


def slot_shapes(moe: MoEConfig, family: Family) -> dict[str, tuple[int, ...]]:
    """Part -> shape on disk of a plain tensor."""
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
    """Reads a tensor's name into the slot it belongs to, for one family."""

    def __init__(self, family: Family) -> None:
        self._block = re.compile(
            rf"{re.escape(family.layers)}\.(\d+)\.({'|'.join(MOE_BLOCKS)})\.(.+)"
        )
        self._expert = re.compile(rf"experts\.(\d+)\.({'|'.join(EXPERT_PARTS)})(\.[^.]+)")
        self._fused = re.compile(rf"(experts\.(?:{'|'.join(FUSED_PARTS)}))(_[^.]+)")
        self._whole = {f"experts.{name}": part for name, part in FUSED_PARTS.items()}
        self._whole |= block_names(family)
        self._layers = {
            name.removesuffix(WEIGHT): part
            for name, part in self._whole.items()
            if name.endswith(WEIGHT)
        }

    def slot_of(self, name: str) -> tuple[Slot, str] | None:
        """The slot of a name, and what follows the slot's path in it; None: no declared name.

        Example: `...mlp.experts.5.up_proj.weight_scale_inv` is (Slot(layer, "up", 5),
        ".weight_scale_inv"), `...mlp.experts.down_proj_blocks` (Slot(layer, "w2"), "_blocks"),
        `...mlp.gate.e_score_correction_bias` (Slot(layer, "correction_bias"), "").
        """
        block = self._block.fullmatch(name)
        if block is None:
            return None
        layer, rest = int(block[1]), block[3]
        expert = self._expert.fullmatch(rest)
        if expert:
            return Slot(layer, EXPERT_PARTS[expert[2]], int(expert[1])), expert[3]
        path, dot, last = rest.rpartition(".")
        if rest in self._whole:
            part = self._whole[rest]
            return Slot(layer, part), WEIGHT if path in self._layers and last == "weight" else ""
        if path in self._layers:
            return Slot(layer, self._layers[path]), dot + last
        fused = self._fused.fullmatch(rest)
        return (Slot(layer, self._whole[fused[1]]), fused[2]) if fused else None


def block_names(family: Family) -> dict[str, str]:
    """Name under the block -> part, for what is not an expert's."""
    names = {family.router: "router"}
    if family.correction_bias:
        names[family.correction_bias] = "correction_bias"
    if family.router_bias:
        names[family.router_bias] = "router_bias"
    if family.shared:
        names |= {f"{family.shared}.{p}{WEIGHT}": part for p, part in SHARED_PARTS.items()}
    if family.shared_gate:
        names[family.shared_gate] = "shared_gate"
    return names


def path_of(slot: Slot, family: Family) -> tuple[str, str]:
    """The path that save_pretrained gives a slot, and what follows it in a plain tensor's name."""
    prefix = f"{family.layers}.{slot.layer}.{family.disk_block}"
    if slot.expert is not None:
        gate, up, down = family.disk_experts or ("gate_proj", "up_proj", "down_proj")
        part = {"gate": gate, "up": up, "down": down}[slot.part]
        return f"{prefix}.experts.{slot.expert}.{part}", WEIGHT
    fused = {part: name for name, part in FUSED_PARTS.items()}
    if slot.part in fused:
        return f"{prefix}.experts.{fused[slot.part]}", ""
    name = {part: name for name, part in block_names(family).items()}[slot.part]
    is_layer = name.endswith(WEIGHT)
    return f"{prefix}.{name.removesuffix(WEIGHT)}", WEIGHT if is_layer else ""
