"""How fast a kernel can store into another rank's memory: the limit of any put.

Nothing but the stores of `symm_put`'s kernels: no routing, no arrival.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch

_BLOCK = 4096  # int32 elements: 16 KiB a program and turn


def put_words(source: Tensor, destination: int, *, num_programs: int) -> None:
    """Copy `source` to an address that this process can write to.

    source: [n] int32 contiguous. destination: 16-byte aligned address of n * 4 bytes. One launch
    of num_programs programs; does not wait for the device. Moves n * 4 bytes in and out.
    """
    prepare_launch(source.device)
    block = _BLOCK if not is_interpreting() else 1 << 16
    _put_words_kernel[(num_programs,)](
        source, destination, source.numel(), BLOCK=block, num_warps=8
    )


@triton.jit
def _put_words_kernel(source_ptr, destination, num_words, BLOCK: tl.constexpr):
    # Without the hint Triton stores 4 bytes at a time.
    landed_ptr = tl.multiple_of(destination.to(tl.pointer_type(tl.int32)), 16)
    for block in range(tl.program_id(0), tl.cdiv(num_words, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < num_words
        words = tl.load(source_ptr + offsets, mask=mask)
        tl.store(landed_ptr + offsets, words, mask=mask)
