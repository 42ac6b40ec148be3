"""The function between an expert's two projections, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ep_runtime.kernels.base import Activation, ActivationKind, ExpertsShape


def gate_up_columns(shape: ExpertsShape) -> int:
    """Columns of the first projection, which the function takes."""
    return shape.intermediate_size * (2 if shape.activation.is_gated else 1)


def apply_activation(x: Tensor, activation: Activation) -> Tensor:
    """Apply `activation` along the last axis, computing in float32.

    x: [..., 2I] gate half first, then up half; [..., I] where the kind is not gated.
    Returns [..., I] in x's dtype.

    silu:      silu(gate) * up
    gelu:      gelu(gate) * up, the exact (erf) form
    swigluoai: (up + 1) * gate * sigmoid(alpha * gate), with gate clamped above and up clamped on
               both sides at `limit` (gpt-oss); not clamped where it is None
    relu2:     relu(x) ** 2

    Example: swigluoai with limit 7 turns gate 10, up 3 into 4 * 7 * sigmoid(1.702 * 7).
    """
    values = x.float()
    if activation.kind is ActivationKind.RELU2:
        return F.relu(values).square().to(x.dtype)
    gate, up = values.chunk(2, dim=-1)
    if activation.kind is ActivationKind.SILU:
        result = F.silu(gate) * up
    elif activation.kind is ActivationKind.GELU:
        result = F.gelu(gate) * up
    else:
        if activation.limit is not None:
            gate = gate.clamp(max=activation.limit)
            up = up.clamp(min=-activation.limit, max=activation.limit)
        result = (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    return result.to(x.dtype)
