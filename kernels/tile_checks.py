"""A tile table's JSON values as dataclasses, and whether its tiles are possible."""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import torch

from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.kernels.tiles import BLOCK_M_HEIGHTS, HOPPER_BLOCK_M, ExpertsTiles, GemmTiles

# A program's shared memory on Hopper and Blackwell, the most that any device has.
MAX_SHARED_BYTES = 232_448
# Columns that share a scale in fp8: what a step along K, and a quantised block of columns, must be.
FP8_GROUP = 128
SIZES = (16, 32, 64, 128, 256)
WARPS = (4, 8)
MAX_STAGES = 12
MAX_BLOCK_K = 128  # of the first projection: e4m3 rows have one scale for so many columns
TUNED_SCHEMES = tuple(
    map(str, (WeightScheme.NONE, WeightScheme.FP8_BLOCK, WeightScheme.FP8_CHANNEL))
)
TUNED_DTYPES = ("float32", "bfloat16", "float16")

DataT = TypeVar("DataT")


def read_fields(
    cls: type[DataT], values: Any, place: str, given: Mapping[str, Any] | None = None
) -> DataT:
    """A dataclass from its fields by name; nested ones too. given: fields that are parsed already.

    Raises ValueError that names the place and the key: unknown, missing or of a wrong type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{place} must be a mapping; got {values!r}")
    known = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{place}.{unknown[0]} is an unknown key; known: {', '.join(known)}")
    missing = [name for name, field in known.items() if name not in values and _is_needed(field)]
    if missing:
        raise ValueError(f"{place} needs the key {missing[0]}")
    types = get_type_hints(cls)
    parsed = {name: _read(types[name], value, f"{place}.{name}") for name, value in values.items()}
    try:
        return cls(**{**parsed, **(given or {})})
    except PlanError as error:
        raise ValueError(f"{place}: {error}") from None


def _is_needed(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _read(kind: Any, value: Any, place: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        return read_fields(kind, value, place)
    if kind is float and type(value) is int:
        return float(value)
    if kind in (int, float, bool, str) and type(value) is not kind:
        raise ValueError(f"{place} ({value!r}) must be of type {kind.__name__}")
    return value


def check_tiles(
    tiles: ExpertsTiles, place: str, *, scheme: str, dtype: str, is_gated: bool
) -> None:
    """ValueError, naming the place, for tiles that no kernel of such a layer could run with."""
    _one_of(scheme, TUNED_SCHEMES, f"{place}: the layer's scheme")
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


def shared_bytes(gemm: GemmTiles, block_m: int, *, num_weights: int, itemsize: int) -> int:
    """Of the operands' stages: block_m rows and num_weights times block_n rows of weights."""
    rows = block_m + num_weights * gemm.block_n
    return gemm.num_stages * rows * gemm.block_k * itemsize


def _check_gemm(gemm: GemmTiles, place: str) -> None:
    _one_of(gemm.block_n, SIZES, f"{place}.block_n")
    _one_of(gemm.block_k, SIZES, f"{place}.block_k")
    _one_of(gemm.num_warps, WARPS, f"{place}.num_warps")
    for name, value, least, most in (
        ("num_stages", gemm.num_stages, 1, MAX_STAGES),
        ("group_tiles", gemm.group_tiles, 1, 1024),
        ("programs_per_sm", gemm.programs_per_sm, 0, 32),
    ):
        if not least <= value <= most:
            raise ValueError(f"{place}.{name} ({value}) must be {least} to {most}")


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


def _one_of(value: Any, allowed: tuple[Any, ...], place: str) -> None:
    if value not in allowed:
        raise ValueError(f"{place} ({value}) must be one of {', '.join(map(str, allowed))}")
