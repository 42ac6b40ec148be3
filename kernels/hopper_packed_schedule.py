"""When packed weights are for Hopper's packed GEMM, and how its calls are cut.

The one place that decides on a device: what `takes_hopper_packed` does not take stays with the
Triton kernels (kernels/packed_gemm.py), from the repacking at load on.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.hopper_packed_gemm import HopperPackedSchedule as Schedule
from ep_runtime.kernels.hopper_packed_layers import CAPABILITY, suits_hopper_packed
from ep_runtime.kernels.hopper_packed_layout import MIN_GROUP
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles, choose_packed_tiles
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.tiles import rows_per_expert
from ep_runtime.kernels.workspace import aligned_bytes

# Rows an expert from which weights are unpacked once a call. On an H200, 8 experts of DeepSeek-V3
# and 4096 rows each: both projections 4.44 ms packed, 4.28 ms unpacked, which includes unpacking.
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
    """Whether such a layer's weights are packed for, and multiplied by, Hopper's packed GEMM: on
    sm_90, where `suits_hopper_packed`."""
    return suits_hopper_packed(shape) and _is_sm_90(device)


@cache
def _is_sm_90(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and not is_interpreting()
        and torch.cuda.get_device_capability(device) == CAPABILITY
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
    num_experts = shape.num_local_experts
    if not is_batched:
        num_experts = min(num_experts, num_rows * shape.top_k)
    tiles = hopper_packed_tiles(expected, shape, num_experts)
    unpacks = not is_batched and expected >= UNPACKED_FROM and unpacked_bytes(num_rows, shape) > 0
    return replace(tiles, unpacks=unpacks)


def unpacked_bytes(num_rows: int, shape: ExpertsShape) -> int:
    """The most that 16-bit weights of a call of `num_rows` take, one projection at a time; 0 where
    it has too few rows for them, or they are too large. Never less for more rows."""
    widest = 2 * shape.intermediate_size
    elements = shape.num_local_experts * widest * shape.hidden_size
    num_bytes = aligned_bytes(elements * shape.dtype.itemsize)
    if _has_short_groups(shape.scheme):
        return 0  # unpack_weight has one scale a chunk
    has_rows = num_rows * shape.top_k >= UNPACKED_FROM * shape.num_local_experts
    return num_bytes if has_rows and num_bytes <= MAX_UNPACKED_BYTES else 0


def hopper_packed_tiles(
    expected: float, shape: ExpertsShape, num_experts: int
) -> HopperPackedExpertsTiles:
    """For `expected` rows an expert, of at most so many experts with rows: the first tiles whose
    reach they are within, of less of W each where the usual ones would leave processors idle."""
    tiles = next(tiles for reach, tiles in _TILES if expected <= reach)
    gated = 2 if shape.activation.is_gated else 1
    gate_up, down = (
        _for_items(one, tiles.block_m, num_experts * -(-num_columns * parts // _ITEM_ROWS))
        for one, num_columns, parts in (
            (tiles.gate_up, shape.intermediate_size, gated),
            (tiles.down, shape.hidden_size, 1),
        )
    )
    if _has_short_groups(shape.scheme):
        gate_up, down = (_for_short_groups(one, shape.scheme) for one in (gate_up, down))
    return replace(tiles, gate_up=gate_up, down=down)


def _for_items(one: Schedule, height: int, num_items: int) -> Schedule:
    """The schedule for at most so many items of 256 rows of W, as one of two consumers has them."""
    if height not in _FEW_ITEMS or num_items > _MULTIPROCESSORS:
        return one
    all_busy, more_items = _FEW_ITEMS[height]
    return more_items if 2 * num_items <= _MULTIPROCESSORS else all_busy


def _has_short_groups(scheme: QuantScheme) -> bool:
    """Whether a chunk of columns has two groups, whose scales then multiply weights always."""
    return scheme.weight is WeightScheme.MXFP4 or scheme.group_size == MIN_GROUP


def _for_short_groups(one: Schedule, scheme: QuantScheme) -> Schedule:
    # With centres two programs' stages would be more than a multiprocessor has.
    fewer = scheme.has_zero_points and one.programs_per_sm > 1
    return replace(one, scales_sums=False, num_stages=one.num_stages - fewer)


_ITEM_ROWS = 256
_MULTIPROCESSORS = 132  # of an H100 or H200
# Where items are fewer than multiprocessors: four consumers to an item, a slab each; where there
# are fewer than half as many, items of half as many rows, with stages enough that no two programs
# share a multiprocessor.
_FEW_ITEMS = {
    16: (
        Schedule(4, 2, 8, 1, 1, True, num_slabs=1),
        Schedule(2, 2, 14, 1, 1, True, num_slabs=1),
    ),
    32: (Schedule(4, 2, 7, 1, num_slabs=1), Schedule(2, 2, 11, 1, num_slabs=1)),
}
# Tiles by the rows an expert up to which they are taken: half of the experts have more than the
# mean, and each further tile of an expert converts its weights anew. Tall tiles of which half is
# empty are cut (`cuts_tiles`). The schedules are those of the least regret on an H200, with even
# routing, over the shapes of benchmarks/experts_cells.py in int4 with groups of 128, swept when
# tall tiles were cut to three quarters too. Of low tiles scales multiply sums; of tall ones that
# would be more work than scaling weights.
_TILES = (
    (
        10,
        HopperPackedExpertsTiles(
            16, gate_up=Schedule(2, 2, 5, 1, 2, True), down=Schedule(2, 2, 5, 1, 2, True)
        ),
    ),
    (
        22,
        HopperPackedExpertsTiles(32, gate_up=Schedule(2, 2, 4, 1, 2), down=Schedule(2, 2, 4, 1, 2)),
    ),
    (
        44,
        HopperPackedExpertsTiles(
            64,
            gate_up=Schedule(2, 2, 6, 1, cuts_tiles=True, lead_blocks=2),
            down=Schedule(2, 2, 6, 1, cuts_tiles=True, lead_blocks=2),
        ),
    ),
    (
        math.inf,
        HopperPackedExpertsTiles(
            128,
            gate_up=Schedule(2, 2, 4, 8, cuts_tiles=True),
            down=Schedule(2, 2, 4, 8, cuts_tiles=True),
        ),
    ),
)
