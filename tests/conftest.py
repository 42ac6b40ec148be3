"""Where the tests run: on a GPU where there is one, else with Triton's interpreter on the CPU."""

import os
from pathlib import Path


def has_cuda_device() -> bool:
    """Looked up without touching CUDA, so that tests may still start processes by fork.

    EP_RUNTIME_TEST_DEVICE=cpu or =cuda decides instead where it is set.
    """
    chosen = os.environ.get("EP_RUNTIME_TEST_DEVICE")
    return Path("/dev/nvidia0").exists() if chosen is None else chosen == "cuda"


# Triton reads the variable as it is imported, so it must be there before any test module is.
if not has_cuda_device():
    os.environ.setdefault("TRITON_INTERPRET", "1")
