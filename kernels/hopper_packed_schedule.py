"""When packed weights are for Hopper's packed GEMM, and how its calls are cut.

The one place that decides: what `takes_hopper_packed` does not take stays with the Triton kernels
(kernels/packed_gemm.py), from the repacking at load on.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.hopper_packed_gemm import HopperPackedSchedule as Schedule
from ep_runtime.kernels.hopper_packed_layout import MIN_GROUP
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles, choose_packed_tiles
from ep_runtime.kernels.quant.packed_weights import packed_fault
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.tiles import rows_per_expert
from ep_runtime.kernels.workspace import aligned_bytes

# Whether layers use it. Not yet: a first form of the kernel ran on an H200 (int4 in groups of 128:
# right in all 50 ways of cutting it, and faster than the Triton kernels in every cell; see
# docs/performance.md), but its loops and the order of its rows are others since, and what they are
# now has been compiled and not run. Its GPU tests set this; once they have passed, it goes.
IS_PROVEN = False
# TMA reads rows, and cp.async copies them, that start at multiples of 16 bytes.
_COLUMN_UNIT = 8
# Rows an expert from which weights are unpacked once a call. On an H200, 8 experts of DeepSeek-V3
# and 4096 rows each: 5.1 ms packed, 3.8 ms from 16-bit weights and about 0.3 ms to write those.
UNPACKED_FROM = 2000
# Of workspace: 0.44 GiB are the first projection of those.
MAX_UNPACKED_BYTES = 1 << 30


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


def takes_hopper_packed(shape: ExpertsShape, device: torch.device) -> bool:
    """Whether such a layer's weights are packed for, and multiplied by, Hopper's packed GEMM.

    On sm_90 alone: int4 in order, with or without zero points, in groups of 32 columns or more;
    mxfp4 of bfloat16 layers; 16-bit rows, sizes whose rows TMA can read.
    """
    scheme = shape.scheme
    is_mxfp4 = scheme.weight is WeightScheme.MXFP4 and shape.dtype is torch.bfloat16
    takes_scheme = (scheme.weight is WeightScheme.INT4 or is_mxfp4) and packed_fault(scheme) is None
    sizes = (shape.hidden_size, shape.intermediate_size)
    takes_rows = shape.dtype.itemsize == 2 and all(size % _COLUMN_UNIT == 0 for size in sizes)
    return IS_PROVEN and takes_scheme and takes_rows and _is_sm_90(device)


@cache
def _is_sm_90(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and not is_interpreting()
        and torch.cuda.get_device_capability(device) == (9, 0)
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
        return choose_packed_tiles(num_rows, num_source_rows, shape, device)
    expected = rows_per_expert(num_rows, num_source_rows, shape)
    tiles = hopper_packed_tiles(expected, shape.scheme)
    unpacks = not is_batched and expected >= UNPACKED_FROM and unpacked_bytes(num_rows, shape) > 0
    return replace(tiles, unpacks=unpacks)


def unpacked_bytes(num_rows: int, shape: ExpertsShape) -> int:
    """The most that 16-bit weights of a call of `num_rows` take, one projection at a time; 0 where
    it has too few rows for them, or they are too large. Never less for more rows."""
    widest = 2 * shape.intermediate_size
    elements = shape.num_local_experts * widest * shape.hidden_size
    num_bytes = aligned_bytes(elements * shape.dtype.itemsize)
    if not IS_PROVEN or _has_short_groups(shape.scheme):
        return 0  # unpack_weight has one scale a chunk
    has_rows = num_rows * shape.top_k >= UNPACKED_FROM * shape.num_local_experts
    return num_bytes if has_rows and num_bytes <= MAX_UNPACKED_BYTES else 0


def hopper_packed_tiles(expected: float, scheme: QuantScheme) -> HopperPackedExpertsTiles:
    """For `expected` rows an expert: the lowest height whose reach they are within."""
    height = next((height for height, reach in _REACHES.items() if expected <= reach), _TALLEST)
    tiles = _TILES[height]
    if not _has_short_groups(scheme):
        return tiles
    gate_up, down = (_for_short_groups(one, scheme) for one in (tiles.gate_up, tiles.down))
    return replace(tiles, gate_up=gate_up, down=down)


def _has_short_groups(scheme: QuantScheme) -> bool:
    """Whether a chunk of columns has two groups, whose scales then multiply weights always."""
    return scheme.weight is WeightScheme.MXFP4 or scheme.group_size == MIN_GROUP


def _for_short_groups(one: Schedule, scheme: QuantScheme) -> Schedule:
    # With centres two programs' stages would be more than a multiprocessor has.
    fewer = scheme.has_zero_points and one.programs_per_sm > 1
    return replace(one, scales_sums=False, num_stages=one.num_stages - fewer)


# Rows an expert up to which a height is taken: half of the experts have more than the mean, and
# each further tile of an expert converts its weights anew. Tall tiles that are not full are cut
# (`cuts_tiles`). The schedules are those of the least regret on an H200, even routing, over the
# shapes of benchmarks/experts_cells.py in int4 with groups of 128. Of low tiles scales multiply
# sums; of tall ones that would be more work than scaling weights.
_REACHES = {16: 10, 32: 22, 64: 44}
_TALLEST = 128
_TILES = {
    16: HopperPackedExpertsTiles(
        16, gate_up=Schedule(2, 2, 5, 1, 2, True), down=Schedule(2, 2, 5, 1, 2, True)
    ),
    32: HopperPackedExpertsTiles(32, gate_up=Schedule(2, 2, 4, 1, 2), down=Schedule(2, 2, 4, 1, 2)),
    64: HopperPackedExpertsTiles(
        64,
        gate_up=Schedule(2, 2, 6, 4, cuts_tiles=True),
        down=Schedule(2, 2, 6, 4, cuts_tiles=True),
    ),
    128: HopperPackedExpertsTiles(
        128,
        gate_up=Schedule(2, 2, 4, 8, cuts_tiles=True),
        down=Schedule(2, 2, 4, 8, cuts_tiles=True),
    ),
}
