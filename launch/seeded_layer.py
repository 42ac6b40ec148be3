"""A layer's weights from a seed, one expert at a time, so that any rank can make any expert."""

from collections.abc import Callable
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor

from ep_runtime.config import MoEConfig
from ep_runtime.layer import MoELayer

_PARTS = ("w13", "w2", "w13_bias", "w2_bias")


class SeededWeights:
    """The global weights of one layer; equal on every rank with devices of one kind.

    Nothing is kept: each access draws again, so the whole layer never has to fit in memory.
    """

    def __init__(self, moe: MoEConfig, *, seed: int, device: torch.device) -> None:
        self.moe, self.seed, self.device = moe, seed, device
        self._rows13 = moe.moe_intermediate_size * (2 if moe.experts_activation().is_gated else 1)

    def expert(self, part: str, expert: int) -> Tensor:
        """One expert's w13 [2I, H], w2 [H, I], w13_bias [2I] or w2_bias [H]."""
        hidden, width = self.moe.hidden_size, self.moe.moe_intermediate_size
        shapes = {
            "w13": (self._rows13, hidden),
            "w2": (hidden, width),
            "w13_bias": (self._rows13,),
            "w2_bias": (hidden,),
        }
        return self._draw(1 + expert * len(_PARTS) + _PARTS.index(part), shapes[part])

    def whole(self) -> dict[str, Any]:
        """The parts every rank has: router, its biases, the shared expert."""
        moe = self.moe
        hidden, width = moe.hidden_size, moe.shared_intermediate_size
        shared13 = width * (2 if moe.experts_activation().is_gated else 1)
        parts: dict[str, Any] = {"router": self._draw(-1, (moe.num_experts, hidden))}
        if moe.router_bias:
            parts["router_bias"] = self._draw(-2, (moe.num_experts,))
        if moe.has_correction_bias:
            parts["correction_bias"] = self._draw(-3, (moe.num_experts,)).float()
        if moe.has_shared_expert:
            parts["shared"] = {
                "w13": self._draw(-4, (shared13, hidden)),
                "w2": self._draw(-5, (hidden, width)),
                "gate": self._draw(-6, (1, hidden)) if moe.shared_expert_gate else None,
            }
        return parts

    def for_reference(self) -> dict[str, Any]:
        """Keyword arguments of `reference_layer`, the experts drawn as it reaches them."""
        names = _PARTS if self.moe.expert_bias else _PARTS[:2]
        experts: dict[str, Any] = {name: _ByExpert(self._drawing(name)) for name in names}
        return {**experts, **self.whole()}

    def fill(self, layer: MoELayer) -> None:
        """Fill the layer's own experts and its whole parts in place."""
        for local_id, expert in enumerate(layer.local_expert_ids):
            for part in _PARTS if self.moe.expert_bias else _PARTS[:2]:
                cast(Tensor, getattr(layer, part))[local_id].copy_(self.expert(part, expert))
        whole = self.whole()
        layer.router.weight.copy_(whole["router"])
        if layer.router.bias is not None:
            layer.router.bias.copy_(whole["router_bias"])
        if layer.router.correction_bias is not None:
            layer.router.correction_bias.copy_(whole["correction_bias"])
        if layer.shared is not None:
            for name, value in whole["shared"].items():
                if value is not None:
                    getattr(layer.shared, name).copy_(value)
        layer.finish_loading()

    def _drawing(self, part: str) -> Callable[[int], Tensor]:
        return lambda expert: self.expert(part, expert)

    def _draw(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Normal values, of a size that keeps rows about as large through each projection."""
        generator = torch.Generator(self.device)
        generator.manual_seed((self.seed * 1_000_003 + number) % 2**63)
        values = torch.randn(shape, generator=generator, device=self.device)
        return (values / sqrt(shape[-1])).to(self.moe.torch_dtype)


class _ByExpert:
    """Stands in for a stacked tensor where only `stack[expert]` is asked."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self._draw = draw

    def __getitem__(self, expert: int) -> Tensor:
        return self._draw(expert)
