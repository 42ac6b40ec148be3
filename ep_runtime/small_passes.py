"""A layer's small passes, around the experts: one launch each on a GPU, plain torch elsewhere.

Each `make_...` returns what a layer calls. On CUDA with Triton that is a kernel, but plain torch,
its definition, while torch's operators are being looked at (`is_observed`). On another device it is
plain torch always.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation, Routing, RoutingSpec
from ep_runtime.kernels.observed import is_observed
from ep_runtime.kernels.routing import count_slots, keep_known_ids, route_tokens


def make_route(spec: RoutingSpec, device: torch.device) -> Callable[..., Routing]:
    """`route(logits, correction_bias)`, as `route_tokens` of that spec."""

    def define(logits: Tensor, correction_bias: Tensor | None) -> Routing:
        return route_tokens(logits, spec, correction_bias)

    if not _launches_kernels(device):
        return define
    from ep_runtime.kernels.fused_routing import FusedRouting

    fused = FusedRouting(spec, device)

    def route(logits: Tensor, correction_bias: Tensor | None) -> Routing:
        chosen = define if is_observed(logits) else fused
        return chosen(logits, correction_bias)

    return route


def make_keep_known_ids(num_experts: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """`keep_known(topk_ids)`, as `keep_known_ids` of so many experts."""

    def define(topk_ids: Tensor) -> Tensor:
        return keep_known_ids(topk_ids, num_experts)

    if not _launches_kernels(device):
        return define
    from ep_runtime.kernels.fused_routing import KnownIds

    fused = KnownIds(num_experts, device)
    return lambda topk_ids: define(topk_ids) if is_observed(topk_ids) else fused(topk_ids)


def make_count_slots(counts: Tensor) -> Callable[[Tensor, Tensor | None], None]:
    """`count(topk_ids, num_rows)`, as `count_slots` into `counts`, which is kept."""

    def define(topk_ids: Tensor, num_rows: Tensor | None) -> None:
        count_slots(counts, topk_ids, num_rows)

    if not _launches_kernels(counts.device):
        return define
    from ep_runtime.kernels.fused_routing import SlotCounter

    fused = SlotCounter(counts)

    def count(topk_ids: Tensor, num_rows: Tensor | None) -> None:
        chosen = define if is_observed(topk_ids) else fused
        chosen(topk_ids, num_rows)

    return count


def make_activate(
    activation: Activation, width: int, device: torch.device
) -> Callable[[Tensor], Tensor]:
    """`activate(gate_up)`, as `apply_activation` of rows of so many columns."""

    def define(gate_up: Tensor) -> Tensor:
        return apply_activation(gate_up, activation)

    if not _launches_kernels(device):
        return define
    from ep_runtime.kernels.activate_slots import RowActivation

    fused = RowActivation(activation, width, device)
    return lambda gate_up: define(gate_up) if is_observed(gate_up) else fused(gate_up)


def _launches_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None
