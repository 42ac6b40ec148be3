"""The device that a kernel test runs on: the same body on the CPU and on CUDA."""

import pytest
import torch

from ep_runtime.kernels.interpreter import is_interpreting


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """cpu (Triton interpreted) by default; cuda with `-m gpu`."""
    if request.param == "cpu" and not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process; run `pytest -m gpu`")
    return torch.device(request.param)
