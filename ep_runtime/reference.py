"""What a layer computes, in float32 on one process: the oracle of `check: layer` and of the tests.

Shapes: T rows, K slots, E experts, H hidden size, I intermediate size, S shared width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import linear

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation, Routing
from ep_runtime.kernels.quant.dequantize import dequantize, dequantize_expert
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.kernels.routing import route_tokens


@torch.no_grad()
def reference_layer(
    hidden_states: Tensor,
    moe: MoEConfig,
    *,
    w13: Tensor | QuantizedTensor,
    w2: Tensor | QuantizedTensor,
    router: Tensor,
    correction_bias: Tensor | None = None,
    router_bias: Tensor | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    shared: Mapping[str, Tensor | QuantizedTensor | None] | None = None,
    routing: Routing | None = None,
) -> Tensor:
    """The whole layer, [T, H] to float32 [T, H].

    Takes what `MoELayer.load_experts` takes, full (global) tensors of any float dtype or quantised,
    so that one dict serves both; quantised ones are dequantised, activations are not quantised.
    routing: the ids and final weights to use; without it the router decides.
    An id outside [0, E) contributes 0.
    """
    rows = hidden_states.float()
    if routing is None:
        bias = None if router_bias is None else router_bias.float()
        logits = linear(rows, router.float(), bias)
        routing = route_tokens(logits, moe.routing_spec(), correction_bias)
    activation = moe.experts_activation()
    output = torch.zeros_like(rows)
    for expert in range(moe.num_experts):
        row, slot = torch.where(routing.topk_ids == expert)
        if len(row) == 0:
            continue
        weights = routing.topk_weights[row, slot, None].float()
        inner = rows[row] * weights if moe.apply_router_weight_on_input else rows[row]
        num_parts = 2 if activation.is_gated else 1
        inner = linear(inner, _weight(w13, expert, num_parts), _row(w13_bias, expert))
        outer = linear(
            apply_activation(inner, activation), _weight(w2, expert, 1), _row(w2_bias, expert)
        )
        output.index_add_(0, row, outer if moe.apply_router_weight_on_input else outer * weights)
    if shared is not None:
        output += reference_shared_expert(rows, shared, activation)
    return output


def reference_shared_expert(
    hidden_states: Tensor,
    shared: Mapping[str, Tensor | QuantizedTensor | None],
    activation: Activation,
) -> Tensor:
    """The shared expert, [T, H] to float32 [T, H]; never scaled by routed_scaling_factor.

    shared: {"w13": [2S, H], "w2": [H, S], "gate": [1, H] or None}; the output is multiplied by
    sigmoid(gate . row). A QuantizedTensor (E = 1) is dequantised.
    """
    rows, w13, w2, gate = hidden_states.float(), shared["w13"], shared["w2"], shared.get("gate")
    if w13 is None or w2 is None:
        raise ValueError('shared needs both "w13" and "w2"')
    num_parts = 2 if activation.is_gated else 1
    inner = apply_activation(linear(rows, _whole(w13, num_parts)), activation)
    output = linear(inner, _whole(w2, 1))
    if gate is not None:
        output *= torch.sigmoid(linear(rows, _whole(gate, 1)))
    return output


def _whole(weight: Tensor | QuantizedTensor, num_parts: int) -> Tensor:
    """A shared expert's [N, K] float32."""
    if isinstance(weight, QuantizedTensor):
        return dequantize(weight, num_parts)[0]
    return weight.float()


def _weight(weights: Tensor | QuantizedTensor, expert: int, num_parts: int) -> Tensor:
    """One expert's [N, K] float32."""
    if isinstance(weights, QuantizedTensor):
        return dequantize_expert(
            weights.values,
            weights.parameters,
            weights.scheme,
            expert=expert,
            num_parts=num_parts,
        )
    return weights[expert].float()


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert].float()
