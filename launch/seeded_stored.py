"""One expert's projection as a scheme stores it, from a generator: random codes, even scales."""

from math import floor, log2

import torch
from torch import Tensor

from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantScheme, WeightScheme
from ep_runtime.kernels.quant.storage import StoredShape, quantized_tensor, stored_shapes

# The standard deviation of what a random code stands for, before any scale.
_CODE_SIZE = {
    WeightScheme.FP8_BLOCK: 2.0,
    WeightScheme.FP8_CHANNEL: 2.0,
    WeightScheme.INT4: 4.6,
    WeightScheme.INT8: 74.0,
    WeightScheme.MXFP4: 2.9,
    WeightScheme.NVFP4: 2.9,
    WeightScheme.NF3: 0.6,
}
_BLOCK_SCALE = 16.0  # of nvfp4, in its middle


def draw_stored(
    scheme: QuantScheme,
    rows: int,
    columns: int,
    *,
    num_parts: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> QuantizedTensor:
    """A projection [rows, columns] of one expert (E = 1), its weights of about 1 / sqrt(columns).

    Scales differ by up to twice, so that one in another's place would show. num_parts: 2 of a gated
    w13. dtype: the layer's. On the generator's device.
    """
    shapes = stored_shapes(scheme, rows, columns, num_parts=num_parts, dtype=dtype)
    scale = columns**-0.5 / _CODE_SIZE[scheme.weight] / 1.5
    draw = _Draw(scheme, scale, generator)
    return quantized_tensor({name: draw(name, one) for name, one in shapes.items()}, scheme)


class _Draw:
    """Draws one stored tensor after another. scale: the smallest product of a code's scales."""

    def __init__(self, scheme: QuantScheme, scale: float, generator: torch.Generator) -> None:
        self._weight, self._scale, self._generator = scheme.weight, scale, generator

    def __call__(self, name: str, one: StoredShape) -> Tensor:
        shape, device = (1, *one.shape), self._generator.device
        if name == "input_order":
            order = torch.randperm(one.shape[0], generator=self._generator, device=device)
            return order[None].to(one.dtype)
        if name == "values" and one.dtype is torch.float8_e4m3fn:
            normal = torch.randn(shape, generator=self._generator, device=device)
            return (2 * normal).to(one.dtype)
        if one.dtype is torch.int32:  # nf3's words, by halves
            halves = self._integers(0, 1 << 16, (2, *shape))
            return ((halves[0] << 16) | halves[1]).to(torch.int32)
        if name in ("values", "zero_points"):
            is_nibble = name == "zero_points" and self._weight is WeightScheme.INT4
            middle = (6, 10) if is_nibble else (96, 160)
            low, high = middle if name == "zero_points" else (0, 256)
            return self._integers(low, high, shape).to(torch.uint8)
        if name == "scales" and one.dtype is torch.uint8:  # the power of 2 that is nearest below
            exponent = 127 + floor(log2(self._scale * 1.5))
            return self._integers(exponent, exponent + 2, shape).to(torch.uint8)
        spread = 1 + torch.rand(shape, generator=self._generator, device=device)
        if self._weight is WeightScheme.NVFP4:
            is_global = name == "global_scales"
            spread = spread * (self._scale / _BLOCK_SCALE / 1.5 if is_global else _BLOCK_SCALE)
            return spread.to(one.dtype)
        return (self._scale * spread).to(one.dtype)

    def _integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        device = self._generator.device
        return torch.randint(low, high, shape, generator=self._generator, device=device)
