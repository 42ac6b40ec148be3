"""Launches that begin before the one in front of them has ended (programmatic dependent launch).

A kernel so launched is put on the multiprocessors as they become free, and waits there for the end
of its predecessor on the stream, instead of being launched after it: about 1.5 us less from kernel
to kernel (docs/performance.md). Each begins with `await_predecessor`, before it reads or writes any
global memory. It first lets its own successor come, then waits until the grid before it has ended
and its writes are visible; that grid waited the same way, so all earlier ones have ended too.
Successors come only when every program of the grid runs, so they take no place that it still needs.
A successor that is launched in the ordinary way waits as ever. A foreign kernel that is launched in
this way and does not wait would break that for all behind it: none may come into such a chain.

Only on sm_90 and later, where the hardware has it.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch whose kernel begins with `await_predecessor(IS_DEPENDENT)`."""
    if not _has_dependent_launch(device):
        return {"IS_DEPENDENT": False}
    return {"IS_DEPENDENT": True, "launch_pdl": True}


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def await_predecessor(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel come, then wait for the end of the one before."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
