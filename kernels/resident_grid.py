"""How many programs of a compiled kernel are on a GPU at once, asked of its driver."""

import ctypes
from functools import cache
from typing import Any

import torch

from ep_runtime.kernels.errors import PlanError


def co_resident_programs(compiled: Any, device: torch.device) -> int:
    """Most programs that run at once on an empty device.

    compiled: what `JITFunction.warmup` returns. Raises PlanError where the driver does not answer,
    and where the kernel has no room on a multiprocessor.
    """
    # Loads it on the current device, and finds its address there.
    compiled._init_handles()
    per_multiprocessor = _programs_per_multiprocessor(
        compiled.function, 32 * compiled.metadata.num_warps, compiled.metadata.shared
    )
    if per_multiprocessor == 0:
        raise PlanError(
            f"{compiled.metadata.name} takes {compiled.metadata.shared} bytes of shared memory a "
            f"program, which no multiprocessor of {torch.cuda.get_device_name(device)} has free; "
            f"choose experts: triton"
        )
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


def _programs_per_multiprocessor(function: int, num_threads: int, shared_bytes: int) -> int:
    answer = ctypes.c_int()
    status = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(
        ctypes.byref(answer),
        ctypes.c_void_p(function),
        ctypes.c_int(num_threads),
        ctypes.c_size_t(shared_bytes),
    )
    if status != 0:
        raise PlanError(
            f"the CUDA driver could not say how many programs of a resident grid fit a "
            f"multiprocessor (CUresult {status}); choose experts: triton"
        )
    return answer.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
