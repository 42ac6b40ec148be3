"""The tile sizes of the grouped GEMMs: a table where one was measured, else a rule."""

from dataclasses import dataclass, replace
from math import expm1

import torch
import triton

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.devices import (
    FEW_MULTIPROCESSORS,
    is_hopper,
    num_multiprocessors,
    tma_reads,
)
from ep_runtime.kernels.hopper_tiles import DEFAULT_SCHEDULE, HopperSchedule
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.scheme import WeightScheme

BLOCK_M_HEIGHTS = (16, 32, 64, 128)
HOPPER_BLOCK_M = 128
# Rows an expert from which the Hopper GEMMs win on an H200, the permuting pass counted.
HOPPER_MIN_ROWS, HOPPER_MIN_ROWS_FP8 = 100, 51


@dataclass(frozen=True)
class GemmTiles:
    """One item's share of a grouped GEMM, and the launch options that go with it.

    block_n: output columns (of gate and of up each in the first projection). block_k: columns of
    the sum taken at once. swap_operands: the weights are the matrix unit's left operand.
    group_tiles: tiles that go through all blocks of columns together. programs_per_sm: of the
    grid, 0 for one program an item. flatten: the loops over items and over columns as one, so that
    the next item's loads start before this one's stores.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swap_operands: bool = False
    group_tiles: int = 1
    programs_per_sm: int = 0
    flatten: bool = False


@dataclass(frozen=True)
class ExpertsTiles:
    """How a call is cut: block_m positions a tile in both projections, and each one's tiles.

    is_hopper: the projections run as kernels/hopper_gemm.py, which has tiles of its own and is laid
    out by the two schedules; gate_up and down are then for batched rows, which it cannot read.
    """

    block_m: int
    gate_up: GemmTiles
    down: GemmTiles
    is_hopper: bool = False
    gate_up_schedule: HopperSchedule = DEFAULT_SCHEDULE
    down_schedule: HopperSchedule = DEFAULT_SCHEDULE


def choose_tiles(
    num_rows: int, num_source_rows: int | None, shape: ExpertsShape, device: torch.device
) -> ExpertsTiles:
    """Tiles for a call of `num_rows` received rows out of `num_source_rows`.

    The host knows no more of the routing, so experts are taken to have an even share of the slots:
    `rows_per_expert`. Another routing makes tiles emptier or more numerous, never wrong. A table's
    tiles where one was measured near by for such a layer on this device with this Triton
    (kernels/tile_tables.py), else `rule_tiles`.
    """
    # Late: tables are read into the classes above.
    from ep_runtime.kernels.tile_tables import tuned_tiles

    expected = rows_per_expert(num_rows, num_source_rows, shape)
    return tuned_tiles(expected, shape, device) or rule_tiles(expected, shape, device)


def rule_tiles(expected: float, shape: ExpertsShape, device: torch.device) -> ExpertsTiles:
    """The default for `expected` rows an expert."""
    block_m, on_hopper = rule_regime(expected, shape, device)
    if is_interpreting():
        return _interpreted_tiles(block_m, shape)
    tiles = replace(_tiles_of_height(block_m, shape), is_hopper=on_hopper)
    if tiles == _FP8_TILES[16] and _fills_few(tiles.down, expected, shape, device):
        return replace(tiles, down=_FP8_DOWN_OF_FEW_EXPERTS)
    return tiles


def rule_regime(expected: float, shape: ExpertsShape, device: torch.device) -> tuple[int, bool]:
    """The rule's height of tiles, and whether it takes the Hopper GEMMs.

    A quarter more rows than expected fill one tile, up to the highest, since half of the experts
    have more than the mean. Example: 8 rows: 16; 32: 64.
    """
    if not is_interpreting() and prefers_hopper(expected, shape, device):
        return HOPPER_BLOCK_M, True
    wanted = 1.25 * expected
    heights = (height for height in BLOCK_M_HEIGHTS if height >= wanted)
    return next(heights, BLOCK_M_HEIGHTS[-1]), False


def rows_per_expert(num_rows: int, num_source_rows: int | None, shape: ExpertsShape) -> float:
    """Rows of an expert under even routing.

    num_source_rows None: each of the rows has landed for at least one of the local experts, which
    of the K slots are then local binomially.
    Example: 229 rows, K 8, 8 local experts of 256: 31.9; out of 1024 source rows: 32.
    """
    num_experts = shape.num_experts or shape.num_local_experts
    if num_experts == 0:
        return 0.0
    if num_source_rows is not None:
        return num_source_rows * shape.top_k / num_experts
    share = shape.num_local_experts / num_experts
    has_landed = 1.0 - (1.0 - share) ** shape.top_k
    return num_rows * shape.top_k / num_experts / has_landed


def _tiles_of_height(block_m: int, shape: ExpertsShape) -> ExpertsTiles:
    if shape.scheme.is_quantised:
        return _FP8_TILES[block_m]
    if shape.dtype is torch.float32:
        # IEEE products run on the scalar units: small tiles, so that they stay in registers.
        tiles = GemmTiles(block_n=64, block_k=32, num_warps=4, num_stages=3)
        return ExpertsTiles(min(block_m, 64), tiles, tiles)
    return _SIXTEEN_BIT_TILES[block_m]


# The best on an H200 over the shapes of benchmarks/experts_cells.py, each within a few percent of
# the best of its own cell.
_SIXTEEN_BIT_TILES = {
    16: ExpertsTiles(
        16,
        gate_up=GemmTiles(64, 128, num_warps=4, num_stages=3, swap_operands=True),
        down=GemmTiles(64, 128, num_warps=4, num_stages=5, swap_operands=True),
    ),
    32: ExpertsTiles(
        32,
        gate_up=GemmTiles(64, 64, num_warps=4, num_stages=3, swap_operands=True),
        down=GemmTiles(128, 64, num_warps=4, num_stages=4, swap_operands=True),
    ),
    64: ExpertsTiles(
        64,
        gate_up=GemmTiles(128, 64, num_warps=4, num_stages=5),
        down=GemmTiles(128, 64, num_warps=4, num_stages=4, swap_operands=True),
    ),
    128: ExpertsTiles(
        128,
        gate_up=GemmTiles(128, 64, 8, num_stages=4, group_tiles=8, programs_per_sm=1),
        down=GemmTiles(256, 64, 8, num_stages=3, group_tiles=8, programs_per_sm=1, flatten=True),
    ),
}
_FP8_TILES = {
    16: ExpertsTiles(
        16,
        gate_up=GemmTiles(128, 128, num_warps=4, num_stages=5, swap_operands=True),
        down=GemmTiles(128, 128, num_warps=4, num_stages=3, swap_operands=True),
    ),
    32: ExpertsTiles(
        32,
        gate_up=GemmTiles(128, 128, num_warps=4, num_stages=3, swap_operands=True),
        down=GemmTiles(
            128,
            128,
            num_warps=4,
            num_stages=3,
            swap_operands=True,
            programs_per_sm=3,
            flatten=True,
        ),
    ),
    64: ExpertsTiles(
        64,
        gate_up=GemmTiles(128, 128, num_warps=8, num_stages=4),
        down=GemmTiles(128, 128, num_warps=4, num_stages=4),
    ),
    128: ExpertsTiles(
        128,
        gate_up=GemmTiles(128, 128, 8, num_stages=3, group_tiles=8, programs_per_sm=1),
        down=GemmTiles(128, 128, 8, num_stages=4, group_tiles=8, programs_per_sm=1, flatten=True),
        # 4 to 9 % less at 4096 tokens of four shapes; the first projection takes 3 to 12 % more so.
        down_schedule=HopperSchedule(lead_blocks=0),
    ),
}


# Where blocks of 128 columns are fewer than the multiprocessors: with them, one token of Mixtral's
# read its second projection at 1.9 TB/s.
_FP8_DOWN_OF_FEW_EXPERTS = GemmTiles(64, 128, num_warps=4, num_stages=6, swap_operands=True)


def _fills_few(
    tiles: GemmTiles, expected: float, shape: ExpertsShape, device: torch.device
) -> bool:
    """Whether the second projection's items, under even routing, leave multiprocessors idle."""
    active_experts = shape.num_local_experts * -expm1(-expected)
    items = active_experts * triton.cdiv(shape.hidden_size, tiles.block_n)
    return bool(items < num_multiprocessors(device, off_gpu=FEW_MULTIPROCESSORS))


def prefers_hopper(expected: float, shape: ExpertsShape, device: torch.device) -> bool:
    """Whether the rule takes the Hopper GEMMs: they can, and so many rows an expert are enough."""
    is_fp8 = shape.scheme.weight is WeightScheme.FP8_BLOCK
    wanted = HOPPER_MIN_ROWS_FP8 if is_fp8 else HOPPER_MIN_ROWS
    return expected >= wanted and takes_hopper(shape, device)


def takes_hopper(shape: ExpertsShape, device: torch.device) -> bool:
    """Whether the Hopper GEMMs can compute such a layer on the device."""
    is_fp8 = shape.scheme.weight is WeightScheme.FP8_BLOCK
    takes_it = shape.dtype.itemsize == 2 and (is_fp8 or not shape.scheme.is_quantised)
    itemsize = 1 if is_fp8 else shape.dtype.itemsize
    sizes = (shape.hidden_size, shape.intermediate_size)
    is_readable = all(tma_reads(size, itemsize) for size in sizes)
    return takes_it and is_readable and is_hopper(device)


def _interpreted_tiles(block_m: int, shape: ExpertsShape) -> ExpertsTiles:
    """As large as the problem, up to 512 on a side: an operation costs the same at any size."""
    widest = max(shape.hidden_size, shape.intermediate_size)
    side = 128 if shape.scheme.is_quantised else min(triton.next_power_of_2(widest), 512)
    tiles = GemmTiles(
        side, min(side, 128), 4, 1, swap_operands=block_m < 64, group_tiles=2, programs_per_sm=1
    )
    return ExpertsTiles(block_m, tiles, tiles)


def num_programs(num_items: int, tiles: GemmTiles, device: torch.device) -> int:
    """Programs of a launch of at most `num_items` items."""
    if tiles.programs_per_sm == 0:
        return max(1, num_items)
    on_device = num_multiprocessors(device, off_gpu=FEW_MULTIPROCESSORS)
    return max(1, min(num_items, tiles.programs_per_sm * on_device))
