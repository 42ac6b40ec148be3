"""What is counted on where there is no GPU, and which rows TMA reads."""

import pytest
import torch

from ep_runtime.kernels import marlin_experts
from ep_runtime.kernels.devices import (
    FEW_MULTIPROCESSORS,
    H200_MULTIPROCESSORS,
    TMA_ALIGNMENT,
    is_hopper,
    num_multiprocessors,
    tma_reads,
)
from ep_runtime.kernels.tiles import GemmTiles, num_programs

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", [CPU, torch.device("meta")], ids=str)
def test_off_a_gpu_the_callers_number_is_the_answer(device: torch.device) -> None:
    assert num_multiprocessors(device, off_gpu=FEW_MULTIPROCESSORS) == 3
    assert num_multiprocessors(device, off_gpu=H200_MULTIPROCESSORS) == 132
    assert not is_hopper(device)


def test_launches_off_a_gpu_have_as_many_programs_as_ever() -> None:
    persistent = GemmTiles(128, 64, num_warps=4, num_stages=3, programs_per_sm=2)
    assert num_programs(1000, persistent, CPU) == 6
    assert marlin_experts._num_locks(CPU) == 528


@pytest.mark.gpu
def test_a_gpu_is_asked() -> None:
    device = torch.device("cuda", 0)
    properties = torch.cuda.get_device_properties(device)
    for off_gpu in (FEW_MULTIPROCESSORS, H200_MULTIPROCESSORS):
        assert num_multiprocessors(device, off_gpu=off_gpu) == properties.multi_processor_count
    assert is_hopper(device) == (properties.major == 9)


@pytest.mark.parametrize("itemsize", [1, 2, 4])
def test_tma_reads_rows_of_whole_units(itemsize: int) -> None:
    per_unit = TMA_ALIGNMENT // itemsize
    assert [n for n in range(1, 3 * per_unit) if tma_reads(n, itemsize)] == [
        per_unit,
        2 * per_unit,
    ]
