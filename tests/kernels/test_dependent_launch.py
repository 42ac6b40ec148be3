"""Which launches are dependent: those of any call, but of one on the packed Hopper GEMM none."""

from typing import Any

import pytest
import torch

from ep_runtime.kernels import dependent_launch, triton_batched_experts, triton_experts
from ep_runtime.kernels.base import BatchedExpertInput, ExpertWeights, StandardExpertInput
from ep_runtime.kernels.dependent_launch import launch_options, ordinary_launches
from ep_runtime.kernels.hopper_packed_gemm import HopperPackedSchedule
from ep_runtime.kernels.hopper_packed_schedule import HopperPackedExpertsTiles
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles, choose_packed_tiles
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase
from tests.kernels.packed_cases import PackedCase, int4

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LAYER = ExpertsCase("layer", 4, 3, 128, 64, 2, dtype=torch.bfloat16)
SHAPE = PackedCase("int4", LAYER, int4(64)).shape
DEPENDENT = {"IS_DEPENDENT": True, "launch_pdl": True}
ORDINARY = {"IS_DEPENDENT": False}
ON_HOPPER = HopperPackedExpertsTiles(16, HopperPackedSchedule(), HopperPackedSchedule())
BY_TRITON = choose_packed_tiles(4, 4, SHAPE, CPU)
Tiles = HopperPackedExpertsTiles | PackedExpertsTiles


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "_has_dependent_launch", lambda device: True)


def test_within_ordinary_launches_none_is_dependent_and_behind_it_they_are_again() -> None:
    def fail() -> None:
        with ordinary_launches():
            with ordinary_launches():
                assert launch_options(CUDA) == ORDINARY
            assert launch_options(CUDA) == ORDINARY
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert launch_options(CUDA) == DEPENDENT


@pytest.mark.parametrize(
    ("tiles", "expected"), [(ON_HOPPER, ORDINARY), (BY_TRITON, DEPENDENT)], ids=["hopper", "triton"]
)
@pytest.mark.parametrize("is_batched", [False, True])
def test_all_launches_of_a_call_on_the_packed_hopper_gemm_are_ordinary(
    is_batched: bool,
    tiles: Tiles,
    expected: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = triton_batched_experts if is_batched else triton_experts
    seen = {}

    def stand_in(name: str) -> Any:
        def launch(*args: object, **kwargs: object) -> None:
            seen[name] = launch_options(CUDA)

        return launch

    monkeypatch.setattr(module, "choose_tiles_of_packed", lambda *args, **kwargs: tiles)
    launching: tuple[str, ...] = ("align_batched_rows", "project_packed")
    if not is_batched:
        launching = ("align_slots", "project_slots", "sum_slots")
    for name in launching:
        monkeypatch.setattr(module, name, stand_in(name))
    rows = torch.zeros(4, 128, dtype=torch.bfloat16)
    weights = ExpertWeights(torch.zeros(3, 1), torch.zeros(3, 1))
    if is_batched:
        counts = torch.ones(3, dtype=torch.int32)
        batched = BatchedExpertInput(rows.expand(3, 4, 128), counts)
        TritonBatchedExperts(SHAPE).run(batched, weights, Workspace(CPU))
    else:
        ids, topk_weights = torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
        standard = StandardExpertInput(rows, ids, topk_weights)
        TritonExperts(SHAPE).run(standard, weights, Workspace(CPU))
    assert seen == dict.fromkeys(launching, expected)
    assert launch_options(CUDA) == DEPENDENT
