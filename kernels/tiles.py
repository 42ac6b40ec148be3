"""The tile sizes of the grouped GEMMs."""

from dataclasses import dataclass

import torch
import triton

from ep_runtime.kernels.align import MIN_BLOCK_M
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.interpreter import is_interpreting


@dataclass(frozen=True)
class GemmTiles:
    """One program's share of a grouped GEMM, and the launch options that go with it."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_tiles(num_rows: int, shape: ExpertsShape) -> GemmTiles:
    """Tiles about as tall as an expert has rows, if the `num_rows` rows spread evenly.

    num_rows bounds the rows that landed; where only some of their slots are local, experts have
    fewer rows and tiles are partly empty, never wrong. In the interpreter a program costs 65 us
    whatever its size, so tiles are as large as the problem, up to 512 on a side.
    """
    rows_per_expert = num_rows * shape.top_k // max(shape.num_local_experts, 1)
    block_m = min(max(triton.next_power_of_2(rows_per_expert), MIN_BLOCK_M), 128)
    if is_interpreting():
        widest = max(shape.hidden_size, shape.intermediate_size)
        side = min(triton.next_power_of_2(widest), 512)
        return GemmTiles(block_m, block_n=side, block_k=side, num_warps=4, num_stages=1)
    if shape.dtype is torch.float32:
        # IEEE products run on the scalar units: small tiles, so that they stay in registers.
        return GemmTiles(min(block_m, 64), block_n=64, block_k=32, num_warps=4, num_stages=3)
    if block_m <= 32:
        return GemmTiles(block_m, block_n=64, block_k=128, num_warps=4, num_stages=3)
    return GemmTiles(block_m, block_n=128, block_k=64, num_warps=8, num_stages=3)
