"""One alignment serves both projections: no tiles can give them heights of their own.

A kernel that takes tiles for each projection, and aligns slots once for the first one's height,
reads other experts' rows in the second where the heights differ.
"""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import align_slots
from ep_runtime.kernels.expert_projections import num_parts_of, project_slots, projections_bytes
from ep_runtime.kernels.hopper_packed_gemm import HopperPackedSchedule
from ep_runtime.kernels.hopper_packed_schedule import (
    HopperPackedExpertsTiles,
    choose_tiles_of_packed,
)
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.packed_schedule import PACKED_HEIGHTS, PackedExpertsTiles, PackedTiles
from ep_runtime.kernels.read_fields import read_fields
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.sum_slots import sum_slots
from ep_runtime.kernels.tiles import BLOCK_M_HEIGHTS, ExpertsTiles, GemmTiles, choose_tiles
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.kernels.packed_cases import MXFP4, NVFP4, PackedCase, int4
from tests.tolerances import assert_close

AnyTiles = ExpertsTiles | PackedExpertsTiles | HopperPackedExpertsTiles
LAYER = ExpertsCase("layer", 24, 3, 128, 64, 2, dtype=torch.bfloat16)
INT4, IN_MXFP4 = PackedCase("int4", LAYER, int4(64)), PackedCase("mxfp4", LAYER, MXFP4)
IN_NVFP4 = PackedCase("nvfp4", LAYER, NVFP4)


def tiles_of(packed: PackedCase | None, height: int, device: torch.device) -> AnyTiles:
    """What a call gets whose experts expect so many rows."""
    if packed is not None:
        return choose_tiles_of_packed(24, height, packed.shape, device)
    return choose_tiles(24, height, LAYER.shape, torch.device("cpu"))


def run(
    packed: PackedCase | None,
    tiles: AnyTiles,
    height: int,
    device: torch.device,
) -> Tensor:
    """A whole call with these tiles over slots aligned to `height`."""
    layer = LAYER if packed is None else packed
    shape, expert_input = layer.shape, LAYER.expert_input(device)
    kernel = TritonExperts(shape)
    prepared = kernel.prepare_weights(layer.weights(device))
    positions = 24 * 2 + 3 * 128
    size = kernel.workspace_bytes(24) + projections_bytes(24, shape, positions, 128)
    workspace = poisoned_workspace(device, size)
    aligned = align_slots(expert_input, num_local_experts=3, block_m=height, workspace=workspace)
    slots = project_slots(
        expert_input, prepared, aligned, shape=shape, tiles=tiles, workspace=workspace
    )
    output = torch.empty_like(expert_input.hidden_states)
    parts = num_parts_of(tiles)
    sum_slots(slots, expert_input, num_local_experts=3, out=output, num_parts=parts)
    return output


def of_any_height(one: Any) -> Any:
    """A projection's tiles without what only some heights have code or memory for."""
    if not isinstance(one, HopperPackedSchedule):
        return replace(one, num_stages=2)
    return replace(
        one, num_stages=2, programs_per_sm=1, lead_blocks=0, cuts_tiles=False, scales_sums=False
    )


@pytest.mark.parametrize("packed", [INT4, IN_MXFP4, IN_NVFP4, None], ids=str)
def test_tiles_of_two_heights_over_one_alignment_are_right(
    packed: PackedCase | None, device: torch.device
) -> None:
    """The second projection's tiles from where a table has another height than the first's."""
    layer = LAYER if packed is None else packed
    expert_input = LAYER.expert_input(device)
    expected = ReferenceExperts(layer.shape).run(
        expert_input, layer.weights(device), Workspace(device)
    )
    few, many = tiles_of(packed, 8, device), tiles_of(packed, 90, device)
    assert few.block_m < many.block_m
    for first, second, height in ((few, many, few.block_m), (many, few, many.block_m)):
        # Nor does the height that tiles were chosen for take the place of the alignment's.
        mixed = replace(first, down=of_any_height(second.down), block_m=second.block_m)
        assert_close(run(packed, mixed, height, device), expected)


def test_no_tiles_of_a_projection_have_a_height() -> None:
    for kind in (GemmTiles, PackedTiles, HopperSchedule, HopperPackedSchedule):
        assert not {"block_m", "height"} & {field.name for field in fields(kind)}
    for of_a_call in (ExpertsTiles, PackedExpertsTiles, HopperPackedExpertsTiles):
        assert [field.name for field in fields(of_a_call)][:3] == ["block_m", "gate_up", "down"]
    assert set(PACKED_HEIGHTS) <= set(BLOCK_M_HEIGHTS)


def test_a_table_that_gives_a_projection_its_height_is_refused() -> None:
    one = GemmTiles(128, 64, num_warps=4, num_stages=3)
    values = asdict(ExpertsTiles(64, one, one))
    assert read_fields(ExpertsTiles, values, "tiles") == ExpertsTiles(64, one, one)
    values["down"]["block_m"] = 128
    with pytest.raises(ValueError, match=r"tiles\.down\.block_m is an unknown key"):
        read_fields(ExpertsTiles, values, "tiles")
