"""Packed weights whose result is known by hand, through the whole triton experts kernel.

One expert of hidden size H whose second projection is the identity, so that the output shows the
first one's: gate rows of relu2 (max(x, 0) squared), one row of ones as input.
"""

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.quant.scheme import QuantParameters, QuantScheme, WeightScheme
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace

WIDTH = 32  # of the intermediate activations


def int4(
    codes: Tensor, scales: Tensor, zeros: Tensor | None = None
) -> tuple[Tensor, QuantParameters]:
    """codes: [N, K], scales and zeros: [N, G]; of one expert."""
    pairs = (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    stored = None if zeros is None else zeros.to(torch.uint8)[None]
    return pairs[None], QuantParameters(scales.float()[None], stored)


def first_projection(
    codes: Tensor,
    scales: Tensor,
    group_size: int | None,
    device: torch.device,
    *,
    zeros: Tensor | None = None,
) -> Tensor:
    """What WIDTH equal rows of the first projection give for a row of ones: [WIDTH], each > 0."""
    num_columns = codes.shape[1]
    scheme = QuantScheme(WeightScheme.INT4, group_size, has_zero_points=zeros is not None)
    w13, w13_quant = int4(
        codes.expand(WIDTH, -1),
        scales.expand(WIDTH, -1),
        None if zeros is None else zeros.expand(WIDTH, -1),
    )
    # Row i of w2 has 1 in column i % WIDTH.
    identity = torch.full((num_columns, WIDTH), 8)
    identity[torch.arange(num_columns), torch.arange(num_columns) % WIDTH] = 9
    groups = 1 if group_size is None else -(-WIDTH // group_size)
    w2, w2_quant = int4(
        identity,
        torch.ones(num_columns, groups),
        None if zeros is None else torch.full((num_columns, groups), 8),
    )
    weights = ExpertWeights(w13, w2, w13_quant=w13_quant, w2_quant=w2_quant)
    shape = ExpertsShape(
        num_local_experts=1,
        hidden_size=num_columns,
        intermediate_size=WIDTH,
        top_k=1,
        activation=Activation(ActivationKind.RELU2),
        dtype=torch.float32,
        scheme=scheme,
    )
    kernel = TritonExperts(shape)
    rows = StandardExpertInput(
        torch.ones(1, num_columns, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.ones(1, 1, device=device),
    )
    on_device = ExpertWeights(
        *(weights.w13.to(device), weights.w2.to(device)),
        w13_quant=_to(w13_quant, device),
        w2_quant=_to(w2_quant, device),
    )
    workspace = Workspace(device)
    workspace.reserve(kernel.workspace_bytes(1))
    output = kernel.run(rows, kernel.prepare_weights(on_device), workspace)
    return output[0, :WIDTH].sqrt().cpu()


def _to(quant: QuantParameters, device: torch.device) -> QuantParameters:
    zeros = quant.zero_points
    return QuantParameters(quant.scales.to(device), None if zeros is None else zeros.to(device))


def test_a_tile_over_two_groups_takes_the_scales_of_both(device: torch.device) -> None:
    """64 columns in groups of 32 with scales 1 and 4, all ones: 32 + 128."""
    found = first_projection(torch.full((1, 64), 9), torch.tensor([[1.0, 4.0]]), 32, device)
    assert found.tolist() == [160.0] * WIDTH


def test_a_partial_last_group_has_its_scale(device: torch.device) -> None:
    """416 columns in groups of 128: the fourth group has 32, of which each counts 8."""
    found = first_projection(
        torch.full((1, 416), 9), torch.tensor([[1.0, 2.0, 4.0, 8.0]]), 128, device
    )
    assert found.tolist() == pytest.approx([128.0 * 7 + 32 * 8] * WIDTH)


def test_a_group_of_a_whole_row_has_one_scale(device: torch.device) -> None:
    found = first_projection(torch.full((1, 96), 10), torch.tensor([[0.5]]), None, device)
    assert found.tolist() == [96.0] * WIDTH


def test_each_group_takes_its_own_zero_point(device: torch.device) -> None:
    """Code 9, zero points 9, 8, 0 and 15: 0, 1, 9 and -6 a column; 32 of each are 128."""
    found = first_projection(
        torch.full((1, 128), 9),
        torch.ones(1, 4),
        32,
        device,
        zeros=torch.tensor([[9, 8, 0, 15]]),
    )
    assert found.tolist() == [128.0] * WIDTH
