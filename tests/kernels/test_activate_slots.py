"""The activation of all rows in one launch, against its definition in plain torch."""

import pytest
import torch

from ep_runtime.kernels.activate_slots import RowActivation
from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation, ActivationKind
from tests.tolerances import assert_close

ACTIVATIONS = {
    "silu": Activation(),
    "gelu": Activation(ActivationKind.GELU),
    "swigluoai": Activation(ActivationKind.SWIGLUOAI, limit=0.5),
    "swigluoai, not clamped": Activation(ActivationKind.SWIGLUOAI),
    "relu2": Activation(ActivationKind.RELU2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize(("num_rows", "width"), [(0, 64), (1, 100), (131, 700)])
def test_rows_are_activated_as_the_definition_does(
    num_rows: int, width: int, activation: Activation, dtype: torch.dtype, device: torch.device
) -> None:
    columns = width * (2 if activation.is_gated else 1)
    drawn = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(width))
    gate_up = drawn.to(device, dtype)
    actual = RowActivation(activation, width, device)(gate_up)
    assert actual.dtype is dtype
    assert_close(actual, apply_activation(gate_up.float(), activation))
