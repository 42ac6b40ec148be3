"""What launches depend on of a device. Off a GPU it is not asked. Nothing here needs Triton."""

from functools import cache

import torch

# Counted on where there is no GPU: a few where Triton interprets, as many as an H200's where a
# launch is planned or compiled for a device that is not here.
FEW_MULTIPROCESSORS, H200_MULTIPROCESSORS = 3, 132
# TMA reads rows whose starts are this many bytes apart, or a multiple of it.
TMA_ALIGNMENT = 16


@cache
def num_multiprocessors(device: torch.device, *, off_gpu: int) -> int:
    """Of the device; off_gpu where it is none of CUDA's."""
    if device.type != "cuda":
        return off_gpu
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether it is a CUDA device of compute capability 9."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def tma_reads(num_columns: int, itemsize: int) -> bool:
    """Whether TMA can read rows of so many values, one after the other.

    Example: of 2 bytes rows of 2888 values, not of 2881.
    """
    return num_columns * itemsize % TMA_ALIGNMENT == 0
