"""How a launch of the resident experts is cut."""

from dataclasses import dataclass

import torch
import triton

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.interpreter import is_interpreting

# Rows of a launch at most: more want tiles of their own, which kernels/triton_experts.py has.
MAX_ROWS = 64
# The matrix unit takes 16 rows as it takes 8; Triton uses its large form from 16 on.
_HEIGHTS = (16, 32, 64)


@dataclass(frozen=True)
class ResidentTiles:
    """One program's tiles.

    gate_up, down: (block_n, block_k, stages) of the two projections: output columns (of gate and of
    up each in the first), columns of the sum taken at once, steps that are loaded ahead.
    programs_per_sm: at most; fewer where the driver says so.
    """

    gate_up: tuple[int, int, int]
    down: tuple[int, int, int]
    num_warps: int
    programs_per_sm: int


# By rows of a launch: as many stages as the shared memory of sm_90 holds. The lowest was the
# fastest of six that were measured (docs/performance.md, `resident`); of the higher ones the shared
# memory holds two stages of 256 columns in the first projection, not three.
_SIXTEEN_BIT_TILES = {
    16: ResidentTiles((64, 256, 3), (64, 256, 5), 4, 1),
    32: ResidentTiles((64, 128, 5), (64, 128, 8), 4, 1),
    64: ResidentTiles((64, 128, 4), (64, 128, 6), 8, 1),
}
# IEEE products run on the scalar units: small tiles, so that they stay in registers.
_FLOAT32_TILES = ResidentTiles((32, 16, 3), (32, 16, 3), 8, 1)


def resident_tiles(num_rows: int, shape: ExpertsShape) -> ResidentTiles:
    """The tiles of a launch of so many rows."""
    if is_interpreting():
        # An operation costs the same at any size.
        width = triton.next_power_of_2(max(shape.hidden_size, shape.intermediate_size))
        side = max(16, min(width, 256))
        return ResidentTiles((side, side, 1), (side, side, 1), 4, 1)
    if shape.dtype is torch.float32:
        return _FLOAT32_TILES
    return _SIXTEEN_BIT_TILES[block_rows(num_rows)]


def block_rows(num_rows: int) -> int:
    """The height that a launch of so many rows has."""
    return next(height for height in _HEIGHTS if height >= num_rows)


def routed_at_once(num_experts: int, block_t: int) -> int:
    """Rows that a program routes at once: a power of two, so few that their scores stay in
    registers."""
    if is_interpreting():
        return block_t
    block_experts: int = triton.next_power_of_2(num_experts)
    return max(1, min(block_t, 2048 // block_experts))
