"""A dense gated MLP, act(x @ w13.T) @ w2.T, that every row passes: the shared expert's products.

Shapes: T rows, H hidden size, I width. Three ways, by rows and by how the weights are stored:
- few rows: the products of kernels/dense_gemm.py, K cut so that they fill the device. Three
  launches; four of e4m3 weights, whose rows are quantised first, by 1 x 128 groups as the experts'.
- many rows with e4m3 weights on Hopper: kernels/hopper_gemm.py, as one expert. Three launches.
- many rows with 16-bit weights: not here (`takes_rows`); the library's products are the fastest.
The activation is taken in float32, of sums that were not rounded, and rounded, or quantised, once.
Scratch comes from torch's allocator, for the current stream. Nothing is kept between calls but
tables that no kernel writes.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
from torch import Tensor

from ep_runtime.kernels.base import Activation
from ep_runtime.kernels.dense_gemm import DenseTiles, DenseWeight, activate_splits, multiply
from ep_runtime.kernels.devices import (
    H200_MULTIPROCESSORS,
    TMA_ALIGNMENT,
    is_hopper,
    num_multiprocessors,
    tma_reads,
)
from ep_runtime.kernels.grouped_gemm import GemmRows
from ep_runtime.kernels.hopper_gemm import (
    Fp8Scales,
    project_down_hopper,
    project_gate_up_hopper,
)
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.observed import handle_of, is_observed, owner_of
from ep_runtime.kernels.quant.fp8_rows import num_groups, quantize_rows
from ep_runtime.kernels.tile_checks import MAX_SHARED_BYTES
from ep_runtime.kernels.tiles import HOPPER_BLOCK_M

FP8 = torch.float8_e4m3fn
# Of 16-bit weights the last number of rows that is few; more go to the library: on an H200, of
# DeepSeek-V3's sizes, 26.3 us for 30.4 at 1 row, 27.7 for 31.0 at 32, 29.9 for 29.8 at 64.
FEW_ROWS_HALF = 32
# Of e4m3 weights the first number of rows that the Hopper GEMMs take: there, 61 us for 44 at 256,
# 91 for 91 at 1024, 309 for 356 at 4096.
HOPPER_MIN_ROWS_SHARED = 512
# Rows of one Hopper launch, which the tables are made for; more go in several.
MAX_TABLE_ROWS = 1 << 16
# As the experts' second projection of fp8 rows (kernels/tiles.py).
_DOWN_SCHEDULE = HopperSchedule(lead_blocks=0)
MAX_SPLIT_K = 8
MIN_SPLIT_STEPS = 4  # along K, of one split: fewer do not fill the ring of stages


@dataclass(frozen=True)
class SharedShape:
    """What the products are built for. width: I. is_fp8: w13 and w2 are e4m3, with scales."""

    hidden_size: int
    width: int
    activation: Activation
    dtype: torch.dtype
    is_fp8: bool = False

    @property
    def num_parts(self) -> int:
        """Of w13."""
        return 2 if self.activation.is_gated else 1


@dataclass(frozen=True)
class SharedTiles:
    """How a call of few rows is cut. down.split_k is 1, both block_m are equal."""

    gate_up: DenseTiles
    down: DenseTiles


def can_read(shape: SharedShape) -> bool:
    """Whether the kernels can read rows and weights of these sizes and this dtype."""
    itemsize = 1 if shape.is_fp8 else shape.dtype.itemsize
    is_readable = all(tma_reads(size, itemsize) for size in (shape.hidden_size, shape.width))
    return shape.dtype.itemsize == 2 and is_readable


class SharedProjections:
    """The products of one shared expert on one device. Raises ValueError for unreadable sizes."""

    def __init__(self, shape: SharedShape, device: torch.device) -> None:
        if not can_read(shape):
            raise ValueError(f"the kernels cannot read a shared expert of {shape}")
        self.shape = shape
        # Made now: a CUDA graph that made them would write them in each replay.
        self._tables = _tables(device) if shape.is_fp8 and is_hopper(device) else None

    def takes_rows(self, num_rows: int) -> bool:
        """Whether a call of so many rows is for `run`; always, of e4m3 weights."""
        return self.shape.is_fp8 or num_rows <= FEW_ROWS_HALF

    def run(self, rows: Tensor, w13: DenseWeight, w2: DenseWeight, *, out: Tensor) -> None:
        """Compute into `out` [T, H]; through a torch operator where somebody looks.

        rows: [T, H] of the shape's dtype. w13: [2I, H], gate first, then up ([I, H] where not
        gated); w2: [H, I]. Does not wait for the device.
        """
        if len(rows) == 0:
            return
        if is_observed(rows):
            torch.ops.ep_runtime.run_shared_projections(
                rows, w13.values, w13.scales, w2.values, w2.scales, out, handle_of(self)
            )
            return
        if not out.is_contiguous():
            dense = torch.empty_like(out, memory_format=torch.contiguous_format)
            self.run(rows, w13, w2, out=dense)
            out.copy_(dense)
            return
        if self._tables is not None and len(rows) >= HOPPER_MIN_ROWS_SHARED:
            self.run_on_hopper(rows, w13, w2, out=out)
        else:
            tiles = choose_shared_tiles(len(rows), self.shape, rows.device)
            self.run_few(rows, w13, w2, tiles=tiles, out=out)

    def run_few(
        self, rows: Tensor, w13: DenseWeight, w2: DenseWeight, *, tiles: SharedTiles, out: Tensor
    ) -> None:
        """`run` by the products of kernels/dense_gemm.py; right for any number of rows."""
        num_rows, width, num_parts = len(rows), self.shape.width, self.shape.num_parts
        given = self._quantised(rows, num_rows) if self.shape.is_fp8 else GemmRows(_for_tma(rows))
        split_k = tiles.gate_up.split_k
        splits = rows.new_empty((split_k, num_rows, num_parts * width), dtype=torch.float32)
        multiply(given, w13, tiles=tiles.gate_up, out=splits)
        if self.shape.is_fp8:
            activated = self._empty_fp8(rows.device, num_rows, width)
        else:
            activated = GemmRows(rows.new_empty((num_rows, width)))
        activate_splits(splits, self.shape.activation, out=activated)
        multiply(activated, w2, tiles=tiles.down, out=out.unsqueeze(0))

    def run_on_hopper(
        self, rows: Tensor, w13: DenseWeight, w2: DenseWeight, *, out: Tensor
    ) -> None:
        """`run` by the Hopper GEMMs, of e4m3 weights, for any number of rows."""
        if self._tables is None:
            raise ValueError("the Hopper GEMMs of a shared expert take e4m3 weights, on sm_90")
        for first in range(0, len(rows), MAX_TABLE_ROWS):
            part = slice(first, first + MAX_TABLE_ROWS)
            self._run_pass(rows[part], w13, w2, self._tables, out=out[part])

    def _run_pass(
        self,
        rows: Tensor,
        w13: DenseWeight,
        w2: DenseWeight,
        tables: "_Tables",
        *,
        out: Tensor,
    ) -> None:
        num_rows, num_tiles = len(rows), triton.cdiv(len(rows), HOPPER_BLOCK_M)
        num_positions = num_tiles * HOPPER_BLOCK_M
        # Rows past the last are whatever the memory holds, in tiles and positions that no slot has.
        given = self._empty_fp8(rows.device, num_positions, self.shape.hidden_size, by_row=True)
        activated = self._empty_fp8(rows.device, num_positions, self.shape.width, by_row=True)
        given_scales = _scales_of(given)
        quantize_rows(rows, out_values=given.values[:num_rows], out_scales=given_scales[:num_rows])
        aligned = tables.of_tiles(num_tiles)
        project_gate_up_hopper(
            given.values,
            w13.values.unsqueeze(0),
            aligned,
            activation=self.shape.activation,
            out=activated.values,
            scales=Fp8Scales(given_scales, _scales_of(w13).unsqueeze(0), activated.scales),
        )
        project_down_hopper(
            activated.values,
            w2.values.unsqueeze(0),
            aligned,
            out=out,
            scales=Fp8Scales(_scales_of(activated), _scales_of(w2).unsqueeze(0)),
            topk_weights=tables.ones[:num_rows],
            schedule=_DOWN_SCHEDULE,
        )

    def _quantised(self, rows: Tensor, num_rows: int) -> GemmRows:
        quantised = self._empty_fp8(rows.device, num_rows, self.shape.hidden_size)
        quantize_rows(rows, out_values=quantised.values, out_scales=_scales_of(quantised))
        return quantised

    @staticmethod
    def _empty_fp8(
        device: torch.device, num_rows: int, num_columns: int, *, by_row: bool = False
    ) -> GemmRows:
        """Memory for quantised rows; a group's scales side by side, or (by_row) a row's."""
        values = torch.empty((num_rows, num_columns), dtype=FP8, device=device)
        groups = num_groups(num_columns)
        sizes = (num_rows, groups) if by_row else (groups, num_rows)
        scales = torch.empty(sizes, dtype=torch.float32, device=device)
        return GemmRows(values, scales if by_row else scales.T)


def choose_shared_tiles(num_rows: int, shape: SharedShape, device: torch.device) -> SharedTiles:
    """Tiles for a call of few rows. K of the first product is split so that its items fill the
    multiprocessors; the second's columns do without, since a split would cost a launch there."""
    if is_interpreting():
        return _interpreted_tiles(num_rows, shape)
    heights = _FP8_TILES if shape.is_fp8 else _HALF_TILES
    height = next((height for height in heights if num_rows <= height), max(heights))
    tiles = heights[height]
    gate_up = tiles.gate_up
    blocks = shape.num_parts * triton.cdiv(shape.width, gate_up.block_n)
    num_items = triton.cdiv(num_rows, height) * blocks
    steps = triton.cdiv(shape.hidden_size, gate_up.block_k)
    on_device = num_multiprocessors(device, off_gpu=H200_MULTIPROCESSORS)
    num_places = _programs_per_sm(gate_up, shape) * on_device
    split_k = min(num_places // num_items, steps // MIN_SPLIT_STEPS, MAX_SPLIT_K)
    return replace(tiles, gate_up=replace(gate_up, split_k=max(1, split_k)))


def _programs_per_sm(tiles: DenseTiles, shape: SharedShape) -> int:
    """Two where a multiprocessor's shared memory has both programs' stages."""
    itemsize = 1 if shape.is_fp8 else shape.dtype.itemsize
    stage_bytes = (tiles.block_m + tiles.block_n) * tiles.block_k * itemsize
    return 2 if 2 * tiles.num_stages * stage_bytes <= MAX_SHARED_BYTES else 1


# The best of a few on an H200, at 7168 x 2048.
_HALF_TILES = {
    16: SharedTiles(
        gate_up=DenseTiles(16, 64, 128, num_warps=4, num_stages=9, swap_operands=True),
        down=DenseTiles(16, 64, 128, num_warps=4, num_stages=9, swap_operands=True),
    ),
    32: SharedTiles(
        gate_up=DenseTiles(32, 64, 128, num_warps=4, num_stages=8, swap_operands=True),
        down=DenseTiles(32, 64, 128, num_warps=4, num_stages=8, swap_operands=True),
    ),
}
_FP8_TILES = {
    16: SharedTiles(
        gate_up=DenseTiles(16, 128, 128, num_warps=4, num_stages=5, swap_operands=True),
        down=DenseTiles(16, 64, 128, num_warps=4, num_stages=12, swap_operands=True),
    ),
    32: SharedTiles(
        gate_up=DenseTiles(32, 128, 128, num_warps=4, num_stages=5, swap_operands=True),
        down=DenseTiles(32, 64, 128, num_warps=4, num_stages=8, swap_operands=True),
    ),
    64: SharedTiles(
        gate_up=DenseTiles(64, 64, 128, num_warps=4, num_stages=5),
        down=DenseTiles(64, 64, 128, num_warps=4, num_stages=5),
    ),
    128: SharedTiles(
        gate_up=DenseTiles(128, 128, 128, num_warps=8, num_stages=6),
        down=DenseTiles(128, 64, 128, num_warps=4, num_stages=6),
    ),
}


def _interpreted_tiles(num_rows: int, shape: SharedShape) -> SharedTiles:
    """Large ones, since an operation costs the same at any size, and K in two ranges."""
    block_m = next((height for height in (16, 32, 64) if num_rows <= height), 128)
    tiles = DenseTiles(block_m, 128, 128, 4, 1, swap_operands=block_m < 64)
    split_k = min(2, triton.cdiv(shape.hidden_size, 128))
    return SharedTiles(gate_up=replace(tiles, split_k=split_k), down=tiles)


@dataclass(frozen=True)
class _DenseTiles128:
    """Rows in order, all of one expert, as kernels/hopper_gemm.py takes aligned slots."""

    slots: Tensor
    tile_experts: Tensor
    num_tiles: Tensor
    block_m: int = HOPPER_BLOCK_M


@dataclass(frozen=True)
class _Tables:
    """What says so, for any number of rows up to MAX_TABLE_ROWS. Written once.

    slots: 0, 1, ...; of a call of T rows those from T on are past its slots, so padding.
    counts: [n, 4], row n is n: its first is 16-byte aligned. ones: weights of slots.
    """

    slots: Tensor
    tile_experts: Tensor
    counts: Tensor
    ones: Tensor

    def of_tiles(self, num_tiles: int) -> _DenseTiles128:
        return _DenseTiles128(self.slots, self.tile_experts, self.counts[num_tiles, :1])


@cache
def _tables(device: torch.device) -> _Tables:
    max_tiles = MAX_TABLE_ROWS // HOPPER_BLOCK_M
    slots = torch.arange(MAX_TABLE_ROWS, dtype=torch.int32, device=device)
    counts = torch.arange(max_tiles + 1, dtype=torch.int32, device=device)
    return _Tables(
        slots,
        torch.zeros(max_tiles, dtype=torch.int32, device=device),
        counts[:, None].repeat(1, 4),
        torch.ones(MAX_TABLE_ROWS, dtype=torch.float32, device=device),
    )


def _scales_of(operand: GemmRows | DenseWeight) -> Tensor:
    """Of e4m3 values, which have some."""
    if operand.scales is None:
        raise ValueError("e4m3 operands need scales")
    return operand.scales


def _for_tma(rows: Tensor) -> Tensor:
    """Rows that TMA can read; a copy where they are not so already."""
    step, size = rows.stride(0) * rows.element_size(), TMA_ALIGNMENT
    is_aligned = rows.stride(1) == 1 and step % size == 0 and rows.data_ptr() % size == 0
    return rows if is_aligned else rows.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("ep_runtime::run_shared_projections", mutates_args=("out",))
def _run_shared_projections(
    rows: Tensor,
    w13: Tensor,
    w13_scales: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor | None,
    out: Tensor,
    projections: int,
) -> None:
    owner: SharedProjections = owner_of(projections)
    owner.run(
        rows,
        DenseWeight(w13, w13_scales, owner.shape.num_parts),
        DenseWeight(w2, w2_scales),
        out=out,
    )


@_run_shared_projections.register_fake
def _(
    rows: Tensor,
    w13: Tensor,
    w13_scales: Tensor | None,
    w2: Tensor,
    w2_scales: Tensor | None,
    out: Tensor,
    projections: int,
) -> None:
    return None
