"""What a layer keeps of its experts' stored weights once the kernel has its own of them.

A kernel that returns other tensors than it was given would otherwise leave both alive.
"""

import torch
from torch import Tensor, nn

from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.quant.storage import PARAMETER_NAMES

# Integers of as many bytes, to compare NaN too.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def named_tensors(weights: ExpertWeights) -> dict[str, Tensor]:
    """The tensors there are, by the names that a layer's parameters have (`w13_scales`)."""

    def of_projection(
        name: str, values: Tensor, bias: Tensor | None, quant: QuantParameters | None
    ) -> dict[str, Tensor | None]:
        parameters = {f"{name}_{key}": getattr(quant, key, None) for key in PARAMETER_NAMES}
        return {name: values, f"{name}_bias": bias, **parameters}

    named = of_projection("w13", weights.w13, weights.w13_bias, weights.w13_quant)
    named |= of_projection("w2", weights.w2, weights.w2_bias, weights.w2_quant)
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def without_stored(stored: ExpertWeights, prepared: ExpertWeights) -> dict[str, nn.Parameter]:
    """What takes the place of each stored tensor whose memory the prepared ones do not have.

    Of the same values in other strides, the prepared tensor; else one without memory (on meta),
    which has its shape and dtype. Compares one expert at a time. Waits for the device only where
    a tensor was copied.
    """
    ours = named_tensors(prepared)
    replaced: dict[str, nn.Parameter] = {}
    for name, tensor in named_tensors(stored).items():
        kept = ours.get(name)
        if kept is not None and _is_same_memory(tensor, kept):
            continue
        if kept is None or not _is_same_weight(tensor, kept):
            kept = torch.empty_like(tensor, device="meta")
        replaced[name] = nn.Parameter(kept.detach(), requires_grad=False)
    return replaced


def _is_same_memory(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (
        b.data_ptr(),
        b.shape,
        b.stride(),
        b.dtype,
    )


def _is_same_weight(a: Tensor, b: Tensor) -> bool:
    """Whether two [E, ...] tensors hold the same bits in the same places."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    bits = _BITS[a.dtype.itemsize]
    return all(torch.equal(x, y) for x, y in zip(a.view(bits), b.view(bits), strict=True))
