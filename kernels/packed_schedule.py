"""The tile sizes of the packed GEMMs, by the height of a tile.

Of few rows an expert the GEMMs wait for weights, of many for the conversion of words to values,
which every tile of rows pays again.
"""

from dataclasses import dataclass, replace

import torch

from ep_runtime.kernels.align_blocks import max_tiles
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.kernels.sum_slots import PARTS_DTYPE
from ep_runtime.kernels.tiles import BLOCK_M_HEIGHTS, rows_per_expert
from ep_runtime.kernels.workspace import aligned_bytes

# Where items are fewer, K of the second projection is cut into parts: four programs for each
# multiprocessor of an H100 or H200. Each part has blocks enough to fill a program's stages.
FULL_PROGRAMS = 528
MOST_PARTS, MIN_PART_BLOCKS = 4, 8
# Of workspace: the rows of all parts.
MAX_SPLIT_BYTES = 1 << 22
# Taller tiles are two accumulators of more registers than a program's threads have to spare.
PACKED_HEIGHTS = tuple(height for height in BLOCK_M_HEIGHTS if height <= 64)


@dataclass(frozen=True)
class PackedTiles:
    """One item's share of a packed GEMM, and the launch options that go with it.

    block_n: output columns (of gate and of up each in the first projection). values_first: all
    words of a block become values before its first product, instead of each field before its own:
    more registers, and conversions that wait for no product. group_tiles: tiles that go through
    all blocks of columns together.
    """

    block_n: int
    num_warps: int
    num_stages: int
    values_first: bool = False
    group_tiles: int = 1


@dataclass(frozen=True)
class PackedExpertsTiles:
    """How a call is cut: block_m positions a tile in both projections, and each one's tiles.

    split_k: parts of K that the second projection's products are cut into, each a row of the result
    (`project_down_packed`). `split_down` sets it; no table does.
    """

    block_m: int
    gate_up: PackedTiles
    down: PackedTiles
    split_k: int = 1


def choose_packed_tiles(
    num_rows: int,
    num_source_rows: int | None,
    shape: ExpertsShape,
    device: torch.device | None = None,
) -> PackedExpertsTiles:
    """Tiles for a call of `num_rows` received rows out of `num_source_rows`.

    A table's where one was measured near by for such a layer on the device with this Triton
    (kernels/tile_tables.py), else `rule_packed_tiles`. device: None: no table is looked up.
    """
    # Late: tables are read into the classes above.
    from ep_runtime.kernels.tile_tables import tuned_packed_tiles

    expected = rows_per_expert(num_rows, num_source_rows, shape)
    tuned = None if device is None else tuned_packed_tiles(expected, shape, device)
    return tuned or rule_packed_tiles(expected, shape)


def split_down(
    tiles: PackedExpertsTiles, shape: ExpertsShape, num_slots: int
) -> PackedExpertsTiles:
    """The tiles of a call of so many slots, in as many parts as FULL_PROGRAMS are enough for."""
    num_items = max_tiles(num_slots, shape.num_local_experts, tiles.block_m) * -(
        -shape.hidden_size // tiles.down.block_n
    )
    num_blocks = packed_layout(shape.scheme).num_blocks(shape.intermediate_size)
    if num_items == 0:
        return tiles
    for parts in range(min(MOST_PARTS, FULL_PROGRAMS // num_items), 1, -1):
        fits = bytes_of_parts(parts, num_slots, shape) <= MAX_SPLIT_BYTES
        if fits and num_blocks >= parts * MIN_PART_BLOCKS:
            return replace(tiles, split_k=parts)
    return tiles


def split_bytes(num_slots: int, shape: ExpertsShape) -> int:
    """The most that a call of so many slots or fewer takes for the rows of parts."""
    return min(bytes_of_parts(MOST_PARTS, num_slots, shape), MAX_SPLIT_BYTES)


def bytes_of_parts(parts: int, num_slots: int, shape: ExpertsShape) -> int:
    """What the second projection's rows take, `parts` of each slot."""
    return aligned_bytes(num_slots * parts * shape.hidden_size * PARTS_DTYPE.itemsize)


def rule_packed_tiles(expected: float, shape: ExpertsShape) -> PackedExpertsTiles:
    """The default for `expected` rows an expert.

    The lowest tile that holds an even share of the slots and a quarter more, as `choose_tiles`.
    """
    tiles = _tiles_of_any(expected, shape)
    if shape.scheme.weight is not WeightScheme.NF3:
        return tiles
    # Of sixteen fields all values at once are more registers than a program has.
    gate_up, down = (replace(one, values_first=False) for one in (tiles.gate_up, tiles.down))
    return replace(tiles, gate_up=gate_up, down=down)


def _tiles_of_any(expected: float, shape: ExpertsShape) -> PackedExpertsTiles:
    wanted = 1.25 * expected
    block_m = next((height for height in PACKED_HEIGHTS if height >= wanted), PACKED_HEIGHTS[-1])
    if is_interpreting():
        tiles = PackedTiles(256, 4, 1, values_first=block_m < 64, group_tiles=2)
        return PackedExpertsTiles(block_m, tiles, tiles)
    if shape.dtype is torch.float32:
        # IEEE products run on the scalar units: small tiles, so that they stay in registers.
        tiles = PackedTiles(64, num_warps=4, num_stages=2)
        return PackedExpertsTiles(min(block_m, 32), tiles, tiles)
    return _SIXTEEN_BIT_TILES[block_m]


# Heights 16 and 64: the best on an H200 for 64 experts of hidden 4096 and intermediate 1536 in int4
# with groups of 128, each within 2 % of the best of its own number of rows. Height 32: as 16.
_SIXTEEN_BIT_TILES = {
    16: PackedExpertsTiles(
        16,
        gate_up=PackedTiles(64, num_warps=4, num_stages=3, values_first=True),
        down=PackedTiles(128, num_warps=4, num_stages=3, values_first=True),
    ),
    32: PackedExpertsTiles(
        32,
        gate_up=PackedTiles(64, num_warps=4, num_stages=3, values_first=True),
        down=PackedTiles(128, num_warps=4, num_stages=3, values_first=True),
    ),
    64: PackedExpertsTiles(
        64,
        gate_up=PackedTiles(64, num_warps=4, num_stages=2, group_tiles=4),
        down=PackedTiles(64, num_warps=4, num_stages=2, group_tiles=4),
    ),
}
