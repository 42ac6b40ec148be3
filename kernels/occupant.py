"""A kernel that does nothing but hold multiprocessors for a while, for stress beside others.

A program takes nearly all shared memory of its multiprocessor and half of its threads, so that no
other program that needs more than a few KB comes onto it.
"""

# Gluon kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Of the 227 KiB that one program may have on sm_90; powers of two, in words of 4 bytes.
SHARED_WORDS = (32768, 16384, 8192)
_NUM_WARPS = 32


def occupy(device: torch.device, *, num_multiprocessors: int, duration_us: int) -> torch.Tensor:
    """Hold so many multiprocessors of an idle device for so long, each by one program.

    On the current stream; does not wait. Returns [num_multiprocessors] int32, each 1 once its
    program has ended. Needs sm_90, or a device with as much shared memory a program.
    """
    done = torch.empty(num_multiprocessors, dtype=torch.int32, device=device)
    _occupy_kernel[(num_multiprocessors,)](
        done,
        duration_us * 1000,
        FIRST=SHARED_WORDS[0],
        SECOND=SHARED_WORDS[1],
        THIRD=SHARED_WORDS[2],
        NUM_WARPS=_NUM_WARPS,
        num_warps=_NUM_WARPS,
    )
    return done


@gluon.jit
def _take_words(NUM_WORDS: gl.constexpr, NUM_WARPS: gl.constexpr):
    """Shared memory that is written, so that it is not left out."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    words = gl.allocate_shared_memory(gl.int32, [NUM_WORDS], SHARED)
    words.store(gl.full([NUM_WORDS], 1, gl.int32, LAYOUT))
    return words


@gluon.jit
def _read_clock():
    """Nanoseconds, of the device's global timer."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["duration_ns"])
def _occupy_kernel(
    done_ptr,  # [programs]
    duration_ns,
    FIRST: gl.constexpr,
    SECOND: gl.constexpr,
    THIRD: gl.constexpr,
    NUM_WARPS: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    start = _read_clock()
    first = _take_words(FIRST, NUM_WARPS)
    second = _take_words(SECOND, NUM_WARPS)
    third = _take_words(THIRD, NUM_WARPS)
    while _read_clock() - start < duration_ns:
        pass
    gl.thread_barrier()
    # All three are read after the wait, so that none ends before it.
    value = gl.max(first.load(LAYOUT), axis=0)
    value = gl.minimum(value, gl.max(second.load(LAYOUT), axis=0))
    value = gl.minimum(value, gl.max(third.load(LAYOUT), axis=0))
    gl.store(done_ptr + gl.program_id(0), value)
