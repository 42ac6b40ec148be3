"""Layers whose experts are in two tiers, for the hybrid kernels' tests."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights
from ep_runtime.kernels.quant.hybrid import join_tiers
from ep_runtime.kernels.quant.nf3 import quantize_nf3
from ep_runtime.kernels.quant.nvfp4 import quantize_nvfp4
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantScheme, WeightScheme
from ep_runtime.kernels.quant.storage import (
    empty_stored,
    quantized_tensor,
    stored_shapes,
    tensors_of,
)
from tests.kernels.cases import ExpertsCase


@dataclass(frozen=True)
class HybridCase:
    """A layer, and its experts in NVFP4; the others are in NF3."""

    name: str
    case: ExpertsCase
    nvfp4_experts: tuple[int, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(WeightScheme.HYBRID, nvfp4_experts=self.nvfp4_experts)

    @property
    def shape(self) -> ExpertsShape:
        return replace(self.case.shape, scheme=self.scheme)

    def weights(self, device: torch.device) -> ExpertWeights:
        """As a layer stores them. Gate and up differ 8 times in size, so that one's global scale in
        the other's place would show."""
        plain = self.case.weights(torch.device("cpu"))
        parts = 2 if self.case.shape.activation.is_gated else 1
        w13 = plain.w13.float().unflatten(1, (parts, -1))
        w13[:, 1:] *= 8
        stored = self._quantized(w13.flatten(1, 2), parts), self._quantized(plain.w2, 1)
        moved = [
            quantized_tensor({n: t.to(device) for n, t in tensors_of(one).items()}, self.scheme)
            for one in stored
        ]
        return ExpertWeights(
            w13=moved[0].values,
            w2=moved[1].values,
            w13_quant=moved[0].parameters,
            w2_quant=moved[1].parameters,
        )

    def _quantized(self, weight: Tensor, num_parts: int) -> QuantizedTensor:
        """[E, N, K] in two tiers."""
        in_nvfp4 = [expert in self.nvfp4_experts for expert in range(len(weight))]

        def tier(
            quantize: Callable[[Tensor], QuantizedTensor], scheme: WeightScheme, is_nvfp4: bool
        ) -> QuantizedTensor:
            own = weight[[here is is_nvfp4 for here in in_nvfp4]]
            if len(own) == 0:
                shapes = stored_shapes(
                    QuantScheme(scheme), *weight.shape[1:], num_parts=num_parts, dtype=weight.dtype
                )
                empty = empty_stored(shapes, 0, weight.device)
                return quantized_tensor(empty, QuantScheme(scheme))
            parts = [quantize(part) for one in own for part in one.chunk(num_parts)]
            named = [tensors_of(part) for part in parts]
            joined = {
                name: torch.cat(
                    [
                        torch.cat([tensors[name] for tensors in named[at : at + num_parts]], 1)
                        for at in range(0, len(named), num_parts)
                    ]
                )
                for name in named[0]
            }
            return quantized_tensor(joined, QuantScheme(scheme))

        nvfp4 = tier(quantize_nvfp4, WeightScheme.NVFP4, True)
        nf3 = tier(quantize_nf3, WeightScheme.NF3, False)
        return join_tiers(nvfp4, nf3, self.nvfp4_experts)
