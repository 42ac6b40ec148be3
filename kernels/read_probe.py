"""How fast a kernel can read: the limit of any call whose time goes into reading weights."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch

_PROGRAMS_PER_MULTIPROCESSOR = 4
_NUM_WARPS = 8
_BLOCK = 8192


def read_output(device: torch.device) -> Tensor:
    """Room for what `read_words` leaves on the device: a block of int16 for each program."""
    num_programs = 2
    if device.type == "cuda" and not is_interpreting():
        properties = torch.cuda.get_device_properties(device)
        num_programs = _PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count
    return torch.empty(num_programs * _BLOCK, dtype=torch.int16, device=device)


def read_words(words: Tensor, *, out: Tensor) -> None:
    """Read every word, and write so little that it does not count. One launch.

    words: int16, contiguous, fewer than 2^31. out: of `read_output`; gets the exclusive or of the
    words by their place in a program's block, so that the reading is not left out. Reads 2 bytes a
    word. Does not wait for the device.
    """
    prepare_launch(out.device)
    grid = (len(out) // _BLOCK,)
    _read_kernel[grid](words, words.numel(), out, BLOCK=_BLOCK, num_warps=_NUM_WARPS)


@triton.jit
def _read_kernel(
    words_ptr,  # [N] int16
    num_words,
    out_ptr,  # [programs * BLOCK] int16
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int16)
    for first in tl.range(program * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        total ^= tl.load(words_ptr + offsets, mask=offsets < num_words, other=0)
    tl.store(out_ptr + program * BLOCK + tl.arange(0, BLOCK), total)
