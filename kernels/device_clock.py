"""The clock that bounded waits inside kernels look at."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ep_runtime.kernels.interpreter import is_interpreting

if is_interpreting():

    def read_clock() -> int:
        """Nanoseconds. Reading it leaves the core to the processes that are waited for."""
        time.sleep(2e-4)
        return time.monotonic_ns()

else:

    @triton.jit
    def read_clock():
        """Nanoseconds, of the device's global timer."""
        return globaltimer().to(tl.int64)
