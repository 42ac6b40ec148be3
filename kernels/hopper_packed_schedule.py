"""When packed weights are for Hopper's packed GEMM, and how its calls are cut.

The one place that decides on a device: what `takes_hopper_packed` does not take stays with the
Triton kernels (kernels/packed_gemm.py), from the repacking at load on.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.hopper_packed_gemm import HEIGHTS, columns_of_part
from ep_runtime.kernels.hopper_packed_gemm import HopperPackedSchedule as Schedule
from ep_runtime.kernels.hopper_packed_layers import CAPABILITY, suits_hopper_packed
from ep_runtime.kernels.hopper_packed_layout import CHUNK_COLUMNS
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.packed_schedule import (
    PackedExpertsTiles,
    bytes_of_parts,
    choose_packed_tiles,
    split_bytes,
    split_down,
)
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.sum_slots import PARTS_DTYPE
from ep_runtime.kernels.tiles import rows_per_expert
from ep_runtime.kernels.workspace import aligned_bytes

# Rows an expert from which weights are unpacked once a call. On an H200, 8 experts of DeepSeek-V3
# and 4096 rows each: both projections 4.44 ms packed, 4.28 ms unpacked, which includes unpacking.
UNPACKED_FROM = 2000
# Of workspace: 0.44 GiB are the first projection of those.
MAX_UNPACKED_BYTES = 1 << 30
# Of workspace too: the rows of all parts. A call may have room for far more rows than it has.
MAX_PARTS_BYTES = 1 << 26


@dataclass(frozen=True)
class HopperPackedExpertsTiles:
    """How a call is cut: block_m positions a tile in both projections, and each one's schedule.

    unpacks: weights become 16-bit ones, once a call, and the projections run as
    kernels/hopper_gemm.py; the schedules have then no part.
    """

    block_m: int
    gate_up: Schedule
    down: Schedule
    unpacks: bool = False

    def __post_init__(self) -> None:
        if self.gate_up.split_k > 1 or (self.unpacks and self.down.split_k > 1):
            raise PlanError(
                f"split_k ({self.gate_up.split_k} and {self.down.split_k}) is for the second "
                f"projection of packed weights; unpacks is {self.unpacks}"
            )


def takes_hopper_packed(shape: ExpertsShape, device: torch.device) -> bool:
    """Whether such a layer's weights are packed for, and multiplied by, Hopper's packed GEMM: on
    sm_90, where `suits_hopper_packed`."""
    return suits_hopper_packed(shape) and _is_sm_90(device)


@cache
def _is_sm_90(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and not is_interpreting()
        and torch.cuda.get_device_capability(device) == CAPABILITY
    )


def choose_tiles_of_packed(
    num_rows: int,
    num_source_rows: int | None,
    shape: ExpertsShape,
    device: torch.device,
    *,
    is_batched: bool = False,
) -> PackedExpertsTiles | HopperPackedExpertsTiles:
    """Tiles for a call of `num_rows` received rows out of `num_source_rows`, packed weights.

    Batched rows are multiplied from packed weights always.
    """
    if not takes_hopper_packed(shape, device):
        by_triton = choose_packed_tiles(num_rows, num_source_rows, shape, device)
        return by_triton if is_batched else split_down(by_triton, shape, num_rows * shape.top_k)
    expected = rows_per_expert(num_rows, num_source_rows, shape)
    num_experts = shape.num_local_experts
    if not is_batched:
        num_experts = min(num_experts, num_rows * shape.top_k)
    tiles = hopper_packed_tiles(expected, shape, num_experts)
    if is_batched:
        return tiles
    parts = _num_parts(tiles, shape, num_experts, expected, num_rows * shape.top_k)
    unpacks = expected >= UNPACKED_FROM and unpacked_bytes(num_rows, shape) > 0
    return replace(tiles, down=replace(tiles.down, split_k=parts), unpacks=unpacks)


def unpacked_bytes(num_rows: int, shape: ExpertsShape) -> int:
    """The most that 16-bit weights of a call of `num_rows` take, one projection at a time; 0 where
    no device unpacks them, it has too few rows for them, or they are too large. Never less for
    more rows."""
    if not suits_hopper_packed(shape) or _has_short_groups(shape.scheme):
        return 0  # unpack_weight has one scale a chunk
    widest = (2 if shape.activation.is_gated else 1) * shape.intermediate_size
    elements = shape.num_local_experts * widest * shape.hidden_size
    num_bytes = aligned_bytes(elements * shape.dtype.itemsize)
    has_rows = num_rows * shape.top_k >= UNPACKED_FROM * shape.num_local_experts
    return num_bytes if has_rows and num_bytes <= MAX_UNPACKED_BYTES else 0


def parts_bytes(num_rows: int, shape: ExpertsShape) -> int:
    """The most that a call of `num_rows` or fewer takes for the rows of parts, where K is split, on
    any device. Never less for more rows."""
    num_slots = num_rows * shape.top_k
    most = split_bytes(num_slots, shape)
    if not suits_hopper_packed(shape):
        return most
    for num_experts in range(1, min(shape.num_local_experts, num_slots) + 1):
        # So few rows an expert that no row too many forbids it.
        tiles = hopper_packed_tiles(0.0, shape, num_experts)
        parts = _num_parts(tiles, shape, num_experts, 0.0, num_experts)
        if parts == 1:
            break
        # Fewer experts than are here are those of as few slots.
        all_here = num_experts == shape.num_local_experts
        most = max(most, bytes_of_parts(parts, num_slots if all_here else num_experts, shape))
    return min(most, MAX_PARTS_BYTES)


def _num_parts(
    tiles: HopperPackedExpertsTiles,
    shape: ExpertsShape,
    num_experts: int,
    expected: float,
    num_slots: int,
) -> int:
    """How many parts K of the second projection is split into, for `num_slots` slots of at most so
    many experts with rows.

    As many as leave each item a multiprocessor of its own; each fills its ring of stages at least
    once; and what is written and read of them is at most an eighth of the words that are read.
    """
    down, height = tiles.down, tiles.block_m
    if height not in _FEW_ITEMS or num_experts == 0:
        return 1
    block_rows = CHUNK_COLUMNS * down.num_consumers * down.num_slabs
    num_items = num_experts * -(-shape.hidden_size // block_rows)
    k_size = shape.intermediate_size
    for parts in range(min(_MOST_PARTS, _MULTIPROCESSORS // num_items), 1, -1):
        columns = columns_of_part(k_size, replace(down, split_k=parts), height)
        fills_ring = columns >= down.num_stages * CHUNK_COLUMNS * down.num_chunks
        # Of an expert's column: 4 bytes written and read for a row's part, K / 2 bytes of words.
        is_little = 8 * 2 * PARTS_DTYPE.itemsize * parts * expected <= k_size / 2
        if fills_ring and is_little and bytes_of_parts(parts, num_slots, shape) <= MAX_PARTS_BYTES:
            return parts
    return 1


def hopper_packed_tiles(
    expected: float, shape: ExpertsShape, num_experts: int
) -> HopperPackedExpertsTiles:
    """For `expected` rows an expert, of at most so many experts with rows: the first tiles whose
    reach they are within, of less of W each where the usual ones would leave processors idle."""
    tiles = next(tiles for reach, tiles in _TILES if expected <= reach)
    gated = 2 if shape.activation.is_gated else 1
    gate_up, down = (
        _for_items(one, tiles.block_m, num_experts * -(-num_columns * parts // _ITEM_ROWS))
        for one, num_columns, parts in (
            (tiles.gate_up, shape.intermediate_size, gated),
            (tiles.down, shape.hidden_size, 1),
        )
    )
    if _has_short_groups(shape.scheme):
        gate_up, down = (
            _for_short_groups(one, tiles.block_m, shape.scheme) for one in (gate_up, down)
        )
    return replace(tiles, gate_up=gate_up, down=down)


def _for_items(one: Schedule, height: int, num_items: int) -> Schedule:
    """The schedule for at most so many items of 256 rows of W, as one of two consumers has them."""
    if height not in _FEW_ITEMS or num_items > _MULTIPROCESSORS:
        return one
    all_busy, more_items = _FEW_ITEMS[height]
    return more_items if 2 * num_items <= _MULTIPROCESSORS else all_busy


def _has_short_groups(scheme: QuantScheme) -> bool:
    """Whether a chunk of columns has two groups or four, whose scales multiply weights always."""
    group_size = packed_layout(scheme).group_size
    return group_size is not None and group_size < CHUNK_COLUMNS


def _for_short_groups(one: Schedule, height: int, scheme: QuantScheme) -> Schedule:
    # With centres, or four groups, two programs' stages would be more than a multiprocessor has.
    has_four = scheme.weight is WeightScheme.NVFP4 and height == HEIGHTS[0]
    fewer = (scheme.has_zero_points or has_four) and one.programs_per_sm > 1
    return replace(one, scales_sums=False, num_stages=one.num_stages - fewer)


_ITEM_ROWS = 256
_MULTIPROCESSORS = 132  # of an H100 or H200
_MOST_PARTS = 4  # of which each is a row to sum, for each slot
# Where items are fewer than multiprocessors: four consumers to an item, a slab each; where there
# are fewer than half as many, items of half as many rows, with stages enough that no two programs
# share a multiprocessor.
_FEW_ITEMS = {
    16: (
        Schedule(4, 2, 8, 1, 1, True, num_slabs=1),
        Schedule(2, 2, 14, 1, 1, True, num_slabs=1),
    ),
    32: (Schedule(4, 2, 7, 1, num_slabs=1), Schedule(2, 2, 11, 1, num_slabs=1)),
}
# Tiles by the rows an expert up to which they are taken: half of the experts have more than the
# mean, and each further tile of an expert converts its weights anew. Tall tiles of which half is
# empty are cut (`cuts_tiles`). The schedules are those of the least regret on an H200, with even
# routing, over the shapes of benchmarks/experts_cells.py in int4 with groups of 128, swept when
# tall tiles were cut to three quarters too. Of low tiles scales multiply sums; of tall ones that
# would be more work than scaling weights.
_TILES = (
    (
        10,
        HopperPackedExpertsTiles(
            16, gate_up=Schedule(2, 2, 5, 1, 2, True), down=Schedule(2, 2, 5, 1, 2, True)
        ),
    ),
    (
        22,
        HopperPackedExpertsTiles(32, gate_up=Schedule(2, 2, 4, 1, 2), down=Schedule(2, 2, 4, 1, 2)),
    ),
    (
        44,
        HopperPackedExpertsTiles(
            64,
            gate_up=Schedule(2, 2, 6, 1, cuts_tiles=True, lead_blocks=2),
            down=Schedule(2, 2, 6, 1, cuts_tiles=True, lead_blocks=2),
        ),
    ),
    (
        math.inf,
        HopperPackedExpertsTiles(
            128,
            gate_up=Schedule(2, 2, 4, 8, cuts_tiles=True),
            down=Schedule(2, 2, 4, 8, cuts_tiles=True),
        ),
    ),
)
