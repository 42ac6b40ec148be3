"""The tile sizes of the grouped GEMMs: a table where one was measured, else a rule."""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.interpreter import is_interpreting

BLOCK_M_HEIGHTS = (16, 32, 64, 128)
# TMA reads rows whose starts are this many bytes apart, or a multiple of it.
TMA_ALIGNMENT = 16


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
    """How a call is cut: block_m positions a tile in both projections, and each one's tiles."""

    block_m: int
    gate_up: GemmTiles
    down: GemmTiles


def choose_tiles(num_rows: int, shape: ExpertsShape) -> ExpertsTiles:
    """Tiles for a call of `num_rows` received rows, of which the host knows no more.

    Experts are taken to have an even share of the rows' slots: `shape.num_experts` says how many
    experts share them, other ranks' included. Another routing makes tiles emptier or more
    numerous, never wrong.
    """
    num_experts = shape.num_experts or shape.num_local_experts
    rows_per_expert = num_rows * shape.top_k / max(num_experts, 1)
    # A quarter more, since half of the experts have more rows than the mean.
    wanted = 1.25 * rows_per_expert
    block_m = next((height for height in BLOCK_M_HEIGHTS if height >= wanted), BLOCK_M_HEIGHTS[-1])
    if is_interpreting():
        return _interpreted_tiles(block_m, shape)
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
        down=GemmTiles(128, 128, num_warps=8, num_stages=4, swap_operands=True),
    ),
    32: ExpertsTiles(
        32,
        gate_up=GemmTiles(128, 128, num_warps=4, num_stages=3, swap_operands=True),
        down=GemmTiles(128, 128, num_warps=4, num_stages=3, swap_operands=True),
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
    ),
}


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
    return max(1, min(num_items, tiles.programs_per_sm * _num_multiprocessors(device)))


@cache
def _num_multiprocessors(device: torch.device) -> int:
    """Of the device; a few where Triton interprets."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
