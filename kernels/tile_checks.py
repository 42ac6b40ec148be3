"""Whether the tiles of a table are possible."""

from typing import Any

import torch

from ep_runtime.kernels.devices import TMA_ALIGNMENT, tma_reads
from ep_runtime.kernels.packed_schedule import PACKED_HEIGHTS, PackedExpertsTiles, PackedTiles
from ep_runtime.kernels.quant.scheme import FP8_GROUP, WeightScheme
from ep_runtime.kernels.tiles import BLOCK_M_HEIGHTS, HOPPER_BLOCK_M, ExpertsTiles, GemmTiles

# A program's shared memory on Hopper and Blackwell, the most that any device has.
MAX_SHARED_BYTES = 232_448
SIZES = (16, 32, 64, 128, 256)
PACKED_WIDTHS = (32, 64, 128, 256)
MAX_WORD_BYTES = 128  # of a block's row; see kernels/quant/packed_weights.py
WARPS = (4, 8)
MAX_STAGES = 12
MAX_BLOCK_K = FP8_GROUP  # of the first projection: e4m3 rows have one scale for so many columns
_UNPACKED_SCHEMES = tuple(
    map(str, (WeightScheme.NONE, WeightScheme.FP8_BLOCK, WeightScheme.FP8_CHANNEL))
)
TUNED_PACKED_SCHEMES = tuple(
    map(str, (WeightScheme.INT4, WeightScheme.INT8, WeightScheme.MXFP4, WeightScheme.NVFP4))
)
TUNED_SCHEMES = _UNPACKED_SCHEMES + TUNED_PACKED_SCHEMES
TUNED_DTYPES = ("float32", "bfloat16", "float16")


def check_tiles(
    tiles: ExpertsTiles,
    place: str,
    *,
    scheme: str,
    dtype: str,
    is_gated: bool,
    hidden_size: int,
    intermediate_size: int,
) -> None:
    """ValueError, naming the place, for tiles that no kernel of such a layer could run with."""
    _one_of(scheme, _UNPACKED_SCHEMES, f"{place}: the layer's scheme")
    _one_of(dtype, TUNED_DTYPES, f"{place}: the layer's dtype")
    _one_of(tiles.block_m, BLOCK_M_HEIGHTS, f"{place}.block_m")
    itemsize = 1 if scheme != WeightScheme.NONE else getattr(torch, dtype).itemsize
    if tiles.is_hopper:
        if tiles.block_m != HOPPER_BLOCK_M:
            raise ValueError(
                f"{place}.block_m ({tiles.block_m}) must be {HOPPER_BLOCK_M} of Hopper"
            )
        if dtype == "float32" or scheme == WeightScheme.FP8_CHANNEL:
            raise ValueError(f"{place}.is_hopper: the Hopper GEMMs take no {dtype} {scheme} layer")
        for key, size in (("hidden_size", hidden_size), ("intermediate_size", intermediate_size)):
            if not tma_reads(size, itemsize):
                raise ValueError(
                    f"{place}.is_hopper: TMA, which the Hopper GEMMs read with, takes rows of a "
                    f"multiple of {TMA_ALIGNMENT} bytes, and rows of the layer's {key} ({size}) "
                    f"have {size * itemsize}"
                )
    for name, gemm, num_weights in (
        ("gate_up", tiles.gate_up, 2 if is_gated else 1),
        ("down", tiles.down, 1),
    ):
        _check_gemm(gemm, f"{place}.{name}")
        if scheme != WeightScheme.NONE:
            _check_fp8(gemm, scheme, f"{place}.{name}", quantises=name == "gate_up")
        elif name == "gate_up" and gemm.block_k > MAX_BLOCK_K:
            raise ValueError(
                f"{place}.gate_up.block_k ({gemm.block_k}) must be at most {MAX_BLOCK_K}"
            )
        needed = shared_bytes(gemm, tiles.block_m, num_weights=num_weights, itemsize=itemsize)
        if needed > MAX_SHARED_BYTES:
            raise ValueError(
                f"{place}.{name} needs {needed} bytes of shared memory, and a program has at most "
                f"{MAX_SHARED_BYTES}: lower num_stages ({gemm.num_stages})"
            )


def check_packed_tiles(
    tiles: PackedExpertsTiles, place: str, *, scheme: str, dtype: str, is_gated: bool
) -> None:
    """As `check_tiles`, of packed weights, whose kernels take any sizes."""
    _one_of(scheme, TUNED_PACKED_SCHEMES, f"{place}: the layer's scheme")
    _one_of(dtype, TUNED_DTYPES, f"{place}: the layer's dtype")
    _one_of(tiles.block_m, PACKED_HEIGHTS, f"{place}.block_m")
    if tiles.split_k != 1:
        raise ValueError(
            f"{place}.split_k ({tiles.split_k}) is no table's to set: each call sets it by its "
            f"number of slots; leave it out"
        )
    for name, one, num_weights in (
        ("gate_up", tiles.gate_up, 2 if is_gated else 1),
        ("down", tiles.down, 1),
    ):
        _one_of(one.block_n, PACKED_WIDTHS, f"{place}.{name}.block_n")
        _one_of(one.num_warps, WARPS, f"{place}.{name}.num_warps")
        _check_range(one.num_stages, 1, MAX_STAGES, f"{place}.{name}.num_stages")
        _check_range(one.group_tiles, 1, 1024, f"{place}.{name}.group_tiles")
        needed = packed_shared_bytes(one, num_weights=num_weights)
        if needed > MAX_SHARED_BYTES:
            raise ValueError(
                f"{place}.{name} needs {needed} bytes of shared memory for words alone, and a "
                f"program has at most {MAX_SHARED_BYTES}: lower num_stages ({one.num_stages})"
            )


def packed_shared_bytes(tiles: PackedTiles, *, num_weights: int) -> int:
    """Of the words' stages: num_weights times block_n rows of the widest block."""
    return tiles.num_stages * num_weights * tiles.block_n * MAX_WORD_BYTES


def shared_bytes(gemm: GemmTiles, block_m: int, *, num_weights: int, itemsize: int) -> int:
    """Of the operands' stages: block_m rows and num_weights times block_n rows of weights."""
    rows = block_m + num_weights * gemm.block_n
    return gemm.num_stages * rows * gemm.block_k * itemsize


def _check_gemm(gemm: GemmTiles, place: str) -> None:
    _one_of(gemm.block_n, SIZES, f"{place}.block_n")
    _one_of(gemm.block_k, SIZES, f"{place}.block_k")
    _one_of(gemm.num_warps, WARPS, f"{place}.num_warps")
    _check_range(gemm.num_stages, 1, MAX_STAGES, f"{place}.num_stages")
    _check_range(gemm.group_tiles, 1, 1024, f"{place}.group_tiles")
    _check_range(gemm.programs_per_sm, 0, 32, f"{place}.programs_per_sm")


def _check_fp8(gemm: GemmTiles, scheme: str, place: str, *, quantises: bool) -> None:
    if gemm.block_k != FP8_GROUP:
        raise ValueError(f"{place}.block_k ({gemm.block_k}) must be {FP8_GROUP} of {scheme}")
    if quantises and gemm.block_n != FP8_GROUP:
        raise ValueError(
            f"{place}.block_n ({gemm.block_n}) must be {FP8_GROUP} of {scheme}: its result is "
            f"quantised"
        )
    if scheme == WeightScheme.FP8_BLOCK and gemm.block_n > FP8_GROUP:
        raise ValueError(
            f"{place}.block_n ({gemm.block_n}) must be at most {FP8_GROUP} of {scheme}"
        )


def _check_range(value: int, least: int, most: int, place: str) -> None:
    if not least <= value <= most:
        raise ValueError(f"{place} ({value}) must be {least} to {most}")


def _one_of(value: Any, allowed: tuple[Any, ...], place: str) -> None:
    if value not in allowed:
        raise ValueError(f"{place} ({value}) must be one of {', '.join(map(str, allowed))}")
