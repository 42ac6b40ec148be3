"""The tiles that `ep-runtime tune` tries, for each projection and height of tiles.

Of unpacked weights that is what a sweep on an H200 had within 0.5 % of the best, and what is like
it: 18 to 164 candidates for a number of rows an expert, the most where the Triton GEMMs and those
for Hopper could both be ahead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.packed_schedule import (
    PACKED_HEIGHTS,
    PackedExpertsTiles,
    PackedTiles,
    rule_packed_tiles,
)
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.kernels.quant.scheme import FP8_GROUP, WeightScheme
from ep_runtime.kernels.tile_checks import (
    MAX_BLOCK_K,
    MAX_SHARED_BYTES,
    packed_shared_bytes,
    shared_bytes,
)
from ep_runtime.kernels.tiles import (
    BLOCK_M_HEIGHTS,
    HOPPER_BLOCK_M,
    ExpertsTiles,
    GemmTiles,
    rule_tiles,
    takes_hopper,
)

Projection = Literal["gate_up", "down"]
PROJECTIONS: tuple[Projection, ...] = ("gate_up", "down")
# Stages of all programs of a multiprocessor: fewer loads in flight do not cover memory's latency.
MIN_IN_FLIGHT = 110 * 1024
# Rows an expert from which the Hopper GEMMs are tried, and from which they alone are where they can
# run; the rule takes them from 51 or 100 on.
HOPPER_TRIED_FROM, HOPPER_ALONE_FROM = 48, 200
# A height is tried if it is within this factor of the one that an expert's rows ask for.
HEIGHT_REACH = 2.0
# Tiles in a group, programs a multiprocessor, and whether their loops are one (`GemmTiles`).
_LAYOUTS_OF_FEW_ROWS = ((1, 0, False), (1, 2, True), (1, 3, True))
_LAYOUTS_OF_MANY_ROWS = ((8, 0, False), (8, 1, False), (8, 1, True), (16, 1, True))

Tiles = ExpertsTiles | PackedExpertsTiles


@dataclass(frozen=True)
class Candidate:
    """One way to run one projection: block_m positions a tile, and Triton's tiles, those of packed
    weights, or Hopper's."""

    projection: Projection
    block_m: int
    how: GemmTiles | PackedTiles | HopperSchedule

    @property
    def is_hopper(self) -> bool:
        return isinstance(self.how, HopperSchedule)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} {value}" for name, value in vars(self.how).items())
        kind = "Hopper, " if self.is_hopper else ""
        return f"{self.projection}: {kind}block_m {self.block_m}, {numbers}"


def rule_of(expected: float, shape: ExpertsShape, device: torch.device) -> Tiles:
    """What a call takes where no table has tiles for it."""
    if is_packed(shape.scheme):
        return rule_packed_tiles(expected, shape)
    return rule_tiles(expected, shape, device)


def heights_near(expected: float, shape: ExpertsShape, device: torch.device) -> tuple[int, ...]:
    """The rule's height for so many rows an expert, and those near what it has in mind.

    Example: 8 rows: 16, since the rule has 10 in mind; 32 rows, 40 in mind: 32, 64.
    """
    heights = PACKED_HEIGHTS if is_packed(shape.scheme) else BLOCK_M_HEIGHTS
    rule, wanted = rule_of(expected, shape, device).block_m, 1.25 * expected
    return tuple(
        height
        for height in heights
        if height == rule or wanted / HEIGHT_REACH <= height <= wanted * HEIGHT_REACH
    )


def candidates_of(
    expected: float, shape: ExpertsShape, device: torch.device
) -> tuple[Candidate, ...]:
    """Everything that is tried for `expected` rows an expert; the rule's own tiles among them."""
    found: dict[Candidate, None] = {}
    rule = rule_of(expected, shape, device)
    tries_hopper = expected >= HOPPER_TRIED_FROM and takes_hopper(shape, device)
    for projection in PROJECTIONS:
        if tries_hopper:
            for schedule in _schedules():
                found[Candidate(projection, HOPPER_BLOCK_M, schedule)] = None
        if tries_hopper and expected >= HOPPER_ALONE_FROM:
            continue
        found[Candidate(projection, rule.block_m, gemm_of(rule, projection))] = None
        for block_m in heights_near(expected, shape, device):
            for tiles in _tiles_of(projection, block_m, shape):
                found[Candidate(projection, block_m, tiles)] = None
    return tuple(found)


def as_compiled(candidate: Candidate) -> Candidate:
    """The same for all candidates that one compilation serves: the grid's size is no part of it."""
    how = candidate.how
    if not isinstance(how, GemmTiles):
        return candidate
    return replace(candidate, how=replace(how, programs_per_sm=min(how.programs_per_sm, 1)))


def gemm_of(tiles: Tiles, projection: Projection) -> GemmTiles | PackedTiles:
    """Triton's tiles of one projection."""
    return tiles.gate_up if projection == "gate_up" else tiles.down


def _tiles_of(
    projection: Projection, block_m: int, shape: ExpertsShape
) -> Iterator[GemmTiles | PackedTiles]:
    if is_packed(shape.scheme):
        yield from _packed_tiles(projection, block_m, shape)
    else:
        yield from _gemm_tiles(projection, block_m, shape)


def _packed_tiles(
    projection: Projection, block_m: int, shape: ExpertsShape
) -> Iterator[PackedTiles]:
    num_weights = 2 if projection == "gate_up" and shape.activation.is_gated else 1
    groups = (1, 4, 8) if block_m == PACKED_HEIGHTS[-1] else (1, 2)
    for block_n, num_warps, num_stages, values_first, group_tiles in product(
        (32, 64, 128, 256), (4, 8), (2, 3, 4, 5, 6), (True, False), groups
    ):
        tiles = PackedTiles(block_n, num_warps, num_stages, values_first, group_tiles)
        # As in `_gemm_tiles`; values of a whole block at once are as many registers again.
        registers = block_m * block_n * num_weights * (2 if values_first else 1)
        fits = packed_shared_bytes(tiles, num_weights=num_weights) <= MAX_SHARED_BYTES
        if fits and registers <= 192 * 32 * num_warps:
            yield tiles


def _schedules() -> Iterator[HopperSchedule]:
    for group_tiles, lead_blocks in product((4, 8, 16, 32), (0, 1)):
        yield HopperSchedule(group_tiles=group_tiles, lead_blocks=lead_blocks)
    yield HopperSchedule(num_stages=3)


def _gemm_tiles(projection: Projection, block_m: int, shape: ExpertsShape) -> Iterator[GemmTiles]:
    is_quantised = shape.scheme.is_quantised
    itemsize = 1 if is_quantised else shape.dtype.itemsize
    is_gated = projection == "gate_up" and shape.activation.is_gated
    for tiles in _all_tiles(block_m):
        if is_quantised and not _suits_fp8(tiles, projection, shape.scheme.weight):
            continue
        if projection == "gate_up" and tiles.block_k > MAX_BLOCK_K:
            continue
        num_bytes = shared_bytes(
            tiles, block_m, num_weights=2 if is_gated else 1, itemsize=itemsize
        )
        accumulators = block_m * tiles.block_n * (2 if is_gated else 1)
        # Registers: a thread has 255, of which an accumulator can have about 128.
        in_registers = accumulators <= 128 * 32 * tiles.num_warps
        programs = max(1, tiles.programs_per_sm)
        in_flight = num_bytes * (
            programs if tiles.programs_per_sm else MAX_SHARED_BYTES // max(num_bytes, 1)
        )
        if in_registers and num_bytes * programs <= MAX_SHARED_BYTES and in_flight >= MIN_IN_FLIGHT:
            yield tiles


def _suits_fp8(tiles: GemmTiles, projection: Projection, weight: WeightScheme) -> bool:
    most = FP8_GROUP if weight is WeightScheme.FP8_BLOCK else 256
    is_group = tiles.block_n == FP8_GROUP or (projection == "down" and tiles.block_n <= most)
    return tiles.block_k == FP8_GROUP and is_group


def _all_tiles(block_m: int) -> Iterator[GemmTiles]:
    """Of few rows: swapped, one program an item, or few resident ones; of many: in groups."""
    swaps = (True,) if block_m < 64 else (True, False) if block_m == 64 else (False,)
    widths = (64, 128) if block_m < 64 else (64, 128, 256) if block_m == 64 else (128, 256)
    layouts = _LAYOUTS_OF_FEW_ROWS if block_m < 128 else _LAYOUTS_OF_MANY_ROWS
    for swap, block_n, block_k, num_warps, num_stages in product(
        swaps, widths, (64, 128, 256), (4, 8), (3, 4, 5, 6)
    ):
        # Eight warps are for wide blocks; four cannot hold the widest one's sums.
        if (block_n == 64 and num_warps == 8) or (block_n == 256 and num_warps == 4):
            continue
        # Long steps are for the fewest rows, of which a step brings few bytes.
        if block_k == 256 and (block_m, block_n) != (16, 64):
            continue
        for group_tiles, programs_per_sm, flatten in layouts:
            # Resident programs were ahead with few warps alone.
            if block_m < 128 and programs_per_sm and num_warps == 8:
                continue
            yield GemmTiles(
                block_n=block_n,
                block_k=block_k,
                num_warps=num_warps,
                num_stages=num_stages,
                swap_operands=swap,
                group_tiles=group_tiles,
                programs_per_sm=programs_per_sm,
                flatten=flatten,
            )
