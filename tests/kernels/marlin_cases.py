"""Layers of quantised experts for the marlin kernel's tests."""

from dataclasses import replace

import torch

from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.scheme import QuantParameters
from tests.kernels.cases import ExpertsCase
from tests.kernels.packed_cases import PackedCase, int4

CASE = ExpertsCase("case", 19, 3, 256, 192, 3, dtype=torch.bfloat16)
ORDERED = replace(int4(64), has_input_order=True)
ONE = PackedCase("int4", CASE, int4(64))


def weights_of(packed: PackedCase, device: torch.device) -> ExpertWeights:
    """As a layer stores them, with an order of columns that is a permutation where it has one."""
    weights = packed.weights(device)
    if not packed.scheme.has_input_order:
        return weights
    generator = torch.Generator().manual_seed(packed.case.seed)

    def shuffled(quant: QuantParameters | None) -> QuantParameters:
        assert quant is not None
        assert quant.input_order is not None
        num_experts, num_columns = quant.input_order.shape
        orders = [torch.randperm(num_columns, generator=generator) for _ in range(num_experts)]
        return replace(quant, input_order=torch.stack(orders).to(device, torch.int32))

    return replace(
        weights, w13_quant=shuffled(weights.w13_quant), w2_quant=shuffled(weights.w2_quant)
    )
