"""`activate_rows` against its definition: interpreted on the CPU, CUDA with `-m gpu`."""

from typing import TypedDict

import pytest
import torch

from ep_runtime.kernels.activate_rows import activate_rows, activate_rows_reference
from ep_runtime.kernels.base import Activation, ActivationKind
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, num_groups

ACTIVATIONS = [None, *(Activation(kind) for kind in ActivationKind)]
ACTIVATIONS.append(Activation(ActivationKind.SWIGLUOAI, limit=0.7))


class Outputs(TypedDict):
    out_values: torch.Tensor
    out_scales: torch.Tensor


def poisoned_outputs(size: tuple[int, int, int], device: torch.device) -> Outputs:
    num_batches, num_rows, width = size
    values = torch.full(size, 0xFF, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.full((num_batches, num_groups(width), num_rows), torch.nan, device=device)
    return Outputs(out_values=values, out_scales=scales.mT)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(5, 128), (70, 300), (33, 1)])
def test_equals_the_definition_up_to_each_count(
    activation: Activation | None, num_rows: int, width: int, device: torch.device
) -> None:
    """Rows past a count are NaN, and their outputs stay as they were."""
    columns = 2 * width if activation is not None and activation.is_gated else width
    rows = torch.randn(3, num_rows, columns, generator=torch.Generator().manual_seed(0))
    rows[0, 2, :7] = 0
    rows = rows.to(device, torch.bfloat16)
    counts = torch.tensor([num_rows, 0, num_rows // 2], dtype=torch.int32, device=device)
    for batch, count in enumerate(counts.tolist()):
        rows[batch, count:] = torch.nan
    actual = poisoned_outputs((3, num_rows, width), device)
    expected = poisoned_outputs((3, num_rows, width), device)
    activate_rows(rows, activation, counts, **actual)
    activate_rows_reference(rows, activation, counts, **expected)
    for batch, count in enumerate(counts.tolist()):
        sides = [
            dequantize_rows(out["out_values"][batch], out["out_scales"][batch], torch.float32)
            for out in (actual, expected)
        ]
        # exp and erf may differ in their last bit, and a value then falls to the next code.
        torch.testing.assert_close(sides[0][:count], sides[1][:count], rtol=0.13, atol=1e-3)
        error = (sides[0][:count] - sides[1][:count]).norm()
        assert error <= 2e-3 * sides[1][:count].norm()
        assert actual["out_values"][batch, count:].view(torch.uint8).eq(0xFF).all()
        assert actual["out_scales"][batch, count:].isnan().all()


def test_without_an_activation_it_is_the_quantisation_bit_by_bit(device: torch.device) -> None:
    """In rows of any strides, with a count in blocks of rows and a larger output."""
    rows = torch.randn(1, 96, 512, device=device)[:, :, ::2]
    count = torch.tensor([2], dtype=torch.int32, device=device)
    actual, expected = (poisoned_outputs((1, 128, 256), device) for _ in range(2))
    activate_rows(rows, None, count, rows_per_count=16, **actual)
    activate_rows_reference(rows, None, count, rows_per_count=16, **expected)
    assert torch.equal(
        actual["out_values"].view(torch.uint8), expected["out_values"].view(torch.uint8)
    )
    assert torch.equal(actual["out_scales"].nan_to_num(-1), expected["out_scales"].nan_to_num(-1))
    assert actual["out_scales"][0, 32:].isnan().all()


def test_more_than_the_rows_counts_as_all_of_them(device: torch.device) -> None:
    rows = torch.randn(1, 20, 128, device=device)
    out = poisoned_outputs((1, 32, 128), device)
    activate_rows(rows, None, torch.tensor([99], dtype=torch.int32, device=device), **out)
    assert not out["out_scales"][0, :20].isnan().any()
    assert out["out_scales"][0, 20:].isnan().all()


@pytest.mark.parametrize("size", [(0, 4, 128), (2, 0, 128)])
def test_nothing_to_do(size: tuple[int, int, int], device: torch.device) -> None:
    counts = torch.zeros(size[0], dtype=torch.int32, device=device)
    activate_rows(torch.empty(size, device=device), None, counts, **poisoned_outputs(size, device))


@pytest.mark.parametrize("size", [(1, 3, 128), (1, 4, 256), (2, 4, 128)])
def test_outputs_that_do_not_fit_are_refused(size: tuple[int, int, int]) -> None:
    device = torch.device("cpu")
    rows, counts = torch.empty(1, 4, 128), torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"out_values is .* need torch.float8_e4m3fn"):
        activate_rows(rows, None, counts, **poisoned_outputs(size, device))
