"""A kernel that holds multiprocessors for a while, so that a resident grid finds no room there."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

from ep_runtime.kernels.device_clock import read_clock

_SIZE = 128


@triton.jit(do_not_specialize=["hold_ns"])
def _occupy_kernel(x_ptr, out_ptr, hold_ns: tl.int64, SIZE: tl.constexpr):
    """The product's operands take shared memory that a resident program needs, to the very end."""
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + offsets)
    product = tl.dot(x, x)
    start = read_clock()
    now = start
    while now - start < hold_ns:
        now = read_clock()
    tl.store(out_ptr + offsets, product)


def occupy(num_multiprocessors: int, seconds: float) -> None:
    """On the current stream, one program on each; the multiprocessors must be free."""
    x = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(_SIZE, _SIZE, dtype=torch.float32, device="cuda")
    _occupy_kernel[(num_multiprocessors,)](x, out, int(seconds * 1e9), SIZE=_SIZE, num_warps=4)


def num_multiprocessors() -> int:
    """Of the current device."""
    return int(torch.cuda.get_device_properties("cuda").multi_processor_count)
