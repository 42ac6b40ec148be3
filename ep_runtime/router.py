"""The router: logits in float32, then ids and weights."""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import Routing
from ep_runtime.small_passes import make_route


class Router(nn.Module):
    """Chooses each row's experts; on every rank.

    weight: [E, H], bias: [E] or None, correction_bias: [E] or None, all float32 whatever the
    layer's dtype, so that close scores are not rounded into ties. The correction bias selects
    and never weights. Only the router normalises and scales weights.
    """

    def __init__(self, moe: MoEConfig, device: torch.device) -> None:
        super().__init__()
        self.spec = moe.routing_spec()
        self._route = make_route(self.spec, device)

        def weight(*shape: int) -> nn.Parameter:
            empty = torch.empty(shape, dtype=torch.float32, device=device)
            return nn.Parameter(empty, requires_grad=False)

        self.weight = weight(moe.num_experts, moe.hidden_size)
        self.bias = weight(moe.num_experts) if moe.router_bias else None
        self.correction_bias = weight(moe.num_experts) if moe.has_correction_bias else None

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] to [T, E] float32, the bias included."""
        return linear(hidden_states.float(), self.weight, self.bias)

    def forward(self, hidden_states: Tensor) -> Routing:
        """[T, H] to each row's K experts; T may be 0."""
        return self._route(self.logits(hidden_states), self.correction_bias)
