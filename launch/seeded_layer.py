"""A layer's weights from a seed, one expert at a time, so that any rank can make any expert."""

from collections.abc import Callable
from math import sqrt
from typing import Any, cast

import torch
from torch import Tensor

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.kernels.quant.storage import expert_of, quantized_tensor, tensors_of
from ep_runtime.launch.seeded_stored import draw_stored
from ep_runtime.layer import MoELayer

_PARTS = ("w13", "w2", "w13_bias", "w2_bias")


class SeededWeights:
    """The global weights of one layer; equal on every rank with devices of one kind.

    Of a quantised layer, or shared expert, w13 and w2 are drawn as they are stored.
    Nothing is kept: each access draws again, so the whole layer never has to fit in memory.
    """

    def __init__(self, moe: MoEConfig, *, seed: int, device: torch.device) -> None:
        self.moe, self.seed, self.device = moe, seed, device
        self._num_parts = 2 if moe.experts_activation().is_gated else 1
        self._rows13 = moe.moe_intermediate_size * self._num_parts

    def expert(self, part: str, expert: int) -> Tensor:
        """One expert's w13 [2I, H], w2 [H, I], w13_bias [2I] or w2_bias [H]; a quantised weight
        dequantised, in float32."""
        if self.moe.quantization.is_quantised and part in ("w13", "w2"):
            return dequantize(self.stored(part, expert), self._parts_of(part))[0]
        hidden, width = self.moe.hidden_size, self.moe.moe_intermediate_size
        shapes = {
            "w13": (self._rows13, hidden),
            "w2": (hidden, width),
            "w13_bias": (self._rows13,),
            "w2_bias": (hidden,),
        }
        return self._draw(_number(part, expert), shapes[part])

    def stored(self, part: str, expert: int) -> QuantizedTensor:
        """One expert's w13 or w2 (E = 1) as the layer's scheme stores it."""
        hidden, width = self.moe.hidden_size, self.moe.moe_intermediate_size
        rows, columns = (self._rows13, hidden) if part == "w13" else (hidden, width)
        return draw_stored(
            self.moe.quantization.of_expert(expert),
            rows,
            columns,
            num_parts=self._parts_of(part),
            dtype=self.moe.torch_dtype,
            generator=self._generator(_number(part, expert)),
        )

    def _parts_of(self, part: str) -> int:
        return self._num_parts if part == "w13" else 1

    def whole(self) -> dict[str, Any]:
        """The parts every rank has: router, its biases, the shared expert."""
        moe = self.moe
        hidden, width = moe.hidden_size, moe.shared_intermediate_size
        shared13 = width * self._num_parts
        parts: dict[str, Any] = {"router": self._draw(-1, (moe.num_experts, hidden))}
        if moe.router_bias:
            parts["router_bias"] = self._draw(-2, (moe.num_experts,))
        if moe.has_correction_bias:
            parts["correction_bias"] = self._draw(-3, (moe.num_experts,)).float()
        if moe.has_shared_expert:
            parts["shared"] = {
                "w13": self._draw_shared(-4, (shared13, hidden), self._num_parts),
                "w2": self._draw_shared(-5, (hidden, width), 1),
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
                if self.moe.quantization.is_quantised and part in ("w13", "w2"):
                    stacked = quantized_tensor(layer.expert_tensors(part), self.moe.quantization)
                    places = tensors_of(expert_of(stacked, local_id))
                    for name, tensor in tensors_of(self.stored(part, expert)).items():
                        places[name].copy_(tensor)
                else:
                    cast(Tensor, getattr(layer, part))[local_id].copy_(self.expert(part, expert))
        whole = self.whole()
        layer.router.weight.copy_(whole["router"])
        if layer.router.bias is not None:
            layer.router.bias.copy_(whole["router_bias"])
        if layer.router.correction_bias is not None:
            layer.router.correction_bias.copy_(whole["correction_bias"])
        if layer.shared is not None:
            layer.shared.fill(whole["shared"])
        layer.finish_loading()

    def _drawing(self, part: str) -> Callable[[int], Tensor]:
        return lambda expert: self.expert(part, expert)

    def _draw_shared(
        self, number: int, shape: tuple[int, int], num_parts: int
    ) -> Tensor | QuantizedTensor:
        """A weight of the shared expert, as `shared_quantization` stores it."""
        scheme = self.moe.shared_quantization
        if not scheme.is_quantised:
            return self._draw(number, shape)
        return draw_stored(
            scheme,
            *shape,
            num_parts=num_parts,
            dtype=self.moe.torch_dtype,
            generator=self._generator(number),
        )

    def _draw(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Normal values, of a size that keeps rows about as large through each projection."""
        values = torch.randn(shape, generator=self._generator(number), device=self.device)
        return (values / sqrt(shape[-1])).to(self.moe.torch_dtype)

    def _generator(self, number: int) -> torch.Generator:
        generator = torch.Generator(self.device)
        generator.manual_seed((self.seed * 1_000_003 + number) % 2**63)
        return generator


def _number(part: str, expert: int) -> int:
    return 1 + expert * len(_PARTS) + _PARTS.index(part)


class _ByExpert:
    """Stands in for a stacked tensor where only `stack[expert]` is asked."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self._draw = draw

    def __getitem__(self, expert: int) -> Tensor:
        return self._draw(expert)
