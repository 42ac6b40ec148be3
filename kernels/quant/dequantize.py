"""Stored weights back to float32: the definition that kernels and whole models are held against."""

from collections.abc import Callable
from functools import cache
from importlib import import_module

from torch import Tensor

from ep_runtime.kernels.quant.scheme import (
    FP8_GROUP,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.storage import expert_of, take_rows

# fn(weight, num_parts) -> float32 [E, N, K], columns in x's order.
_FUNCTIONS = {
    WeightScheme.FP8_BLOCK: "ep_runtime.kernels.quant.fp8_weights:dequantize_fp8",
    WeightScheme.FP8_CHANNEL: "ep_runtime.kernels.quant.fp8_weights:dequantize_fp8",
    WeightScheme.INT4: "ep_runtime.kernels.quant.int_weights:dequantize_int",
    WeightScheme.INT8: "ep_runtime.kernels.quant.int_weights:dequantize_int",
    WeightScheme.MXFP4: "ep_runtime.kernels.quant.mxfp4:dequantize_mxfp4",
    WeightScheme.NVFP4: "ep_runtime.kernels.quant.nvfp4:dequantize_nvfp4",
    WeightScheme.NF3: "ep_runtime.kernels.quant.nf3:dequantize_nf3",
    WeightScheme.HYBRID: "ep_runtime.kernels.quant.hybrid:dequantize_hybrid",
}
PIECE_BYTES = 64 << 20  # of float32 at a time, where a whole weight is not needed at once
DEQUANTIZED_SCHEMES = frozenset(_FUNCTIONS)


def dequantize(weight: QuantizedTensor, num_parts: int = 1) -> Tensor:
    """The weights that a `QuantizedTensor` stands for: float32 [E, N, K].

    num_parts: 2 for a gated w13 (gate rows, then up rows), else 1.
    """
    return _function(weight.scheme.weight)(weight, num_parts)


def dequantize_into(weight: QuantizedTensor, out: Tensor) -> None:
    """One weight of one part (E = 1) into `out` [N, K], cast to its dtype, in pieces of rows."""
    columns = out.shape[1]
    rows = max(1, PIECE_BYTES // (4 * columns * FP8_GROUP)) * FP8_GROUP
    for start in range(0, out.shape[0], rows):
        piece = take_rows(weight, start, min(start + rows, out.shape[0]))
        out[start : start + rows].copy_(dequantize(piece)[0])


def dequantize_expert(
    values: Tensor,
    parameters: QuantParameters | None,
    scheme: QuantScheme,
    *,
    expert: int,
    num_parts: int,
) -> Tensor:
    """One expert's [N, K] float32 of the tensors in `ExpertWeights`; plain ones are cast."""
    if parameters is None:
        return values[expert].float()
    return dequantize(expert_of(QuantizedTensor(values, parameters, scheme), expert), num_parts)[0]


@cache
def _function(scheme: WeightScheme) -> Callable[[QuantizedTensor, int], Tensor]:
    module, name = _FUNCTIONS[scheme].split(":")
    function: Callable[[QuantizedTensor, int], Tensor] = getattr(import_module(module), name)
    return function
