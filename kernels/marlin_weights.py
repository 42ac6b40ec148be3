"""A layer's quantised weights in the layout of the Marlin GEMM, repacked once; what it refuses.

E experts, N output rows, K input columns, G groups of columns, H hidden size, I intermediate size.
kernels/marlin_layout.py defines the layout of one expert's tensors.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.marlin_layout import (
    TILE_COLUMNS,
    e8m0_scales,
    row_scales,
    scales_of,
    words_of,
    zero_point_words,
)
from ep_runtime.kernels.quant.int_weights import INT_BITS
from ep_runtime.kernels.quant.scheme import QuantParameters, QuantScheme, WeightScheme

MARLIN_SCHEMES = frozenset({WeightScheme.INT4, WeightScheme.INT8, WeightScheme.MXFP4})
# Columns that may share a scale; a whole row may as well.
GROUP_SIZES = (32, 64, 128)
HIDDEN_MULTIPLE = 128  # rows of w2, and columns of w13
_GATED_MULTIPLE, _UNGATED_MULTIPLE = 64, 128  # of I: w13's rows are then multiples of 128


def weight_bits(scheme: QuantScheme) -> int:
    """Bits of a stored value."""
    return INT_BITS.get(scheme.weight, 4)


def weight_type_id(scheme: QuantScheme) -> int:
    """What the operator calls the stored values: uint4, uint4b8, uint8b128 or float4_e2m1f.

    Source: vLLM 0.26.0, csrc/core/scalar_type.hpp (`ScalarType::id`).
    """
    if scheme.weight is WeightScheme.MXFP4:
        return _type_id(exponent=2, mantissa=1, is_signed=True, is_finite=True, nan=0)
    bits = weight_bits(scheme)
    return _type_id(mantissa=bits, bias=0 if scheme.has_zero_points else 2 ** (bits - 1))


def _type_id(
    *,
    exponent: int = 0,
    mantissa: int,
    is_signed: bool = False,
    bias: int = 0,
    is_finite: bool = False,
    nan: int = 1,
) -> int:
    """Fields of 8, 8, 1, 32, 1 and 8 bits, lowest first. nan: 0 none, 1 as IEEE 754 has them."""
    number = exponent | mantissa << 8 | is_signed << 16
    return number | bias << 17 | is_finite << 49 | nan << 50


def marlin_fault(shape: ExpertsShape) -> str | None:
    """Why the GEMM has no kernel for a layer of this shape, naming the key; None where it has.

    It has one where N is a multiple of 128 and K of 64, and every group is whole.
    """
    scheme, hidden, width = shape.scheme, shape.hidden_size, shape.intermediate_size
    multiple = _GATED_MULTIPLE if shape.activation.is_gated else _UNGATED_MULTIPLE
    for key, size, unit in (
        ("hidden_size", hidden, HIDDEN_MULTIPLE),
        ("moe_intermediate_size", width, multiple),
    ):
        if size % unit:
            return f"{key} ({size}) is not a multiple of {unit}"
    if scheme.weight is WeightScheme.MXFP4:
        if shape.dtype is not torch.bfloat16:
            return (
                "it multiplies mxfp4 in bfloat16 alone, and dtype is float16; set dtype: bfloat16"
            )
        return None
    return _group_fault(scheme, hidden, width)


def _group_fault(scheme: QuantScheme, hidden: int, width: int) -> str | None:
    size = scheme.group_size
    if size is not None and size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        return f"quantization.group_size ({size}) is not among its {sizes}"
    if size is not None and width % size:
        return f"quantization.group_size ({size}) does not divide moe_intermediate_size ({width})"
    if scheme.weight is WeightScheme.INT8 and scheme.has_zero_points:
        return "it has no kernel for int8 with zero points (quantization.has_zero_points is true)"
    if scheme.has_input_order and (size is None or size in (hidden, width)):
        return (
            f"with an order of columns (quantization.has_input_order) it needs several groups in "
            f"a row, and quantization.group_size is {size}, of hidden_size {hidden} and "
            f"moe_intermediate_size {width}"
        )
    return None


def repack_for_marlin(weights: ExpertWeights, shape: ExpertsShape) -> ExpertWeights:
    """The weights in the GEMM's layout; those that were given are not written.

    w13, w2: [E, K / 16, N * bits / 2] int32. Of their parameters: scales [E, G, N] in the layer's
    dtype, or float8_e8m0fnu of mxfp4; zero_points [E, G, N / 8] int32; input_order [E, K] int32.
    Biases [E, N], their rows in the order of the sums. Beside what it returns it takes about
    4 * N * K bytes, of one expert. Raises PlanError where a projection is not quantised.
    """

    def projection(values: Tensor, quant: QuantParameters | None) -> tuple[Tensor, QuantParameters]:
        if quant is None:
            raise PlanError(
                "experts marlin multiplies quantised weights; set quantization: int4_w4a16, "
                "int8_w8a16 or mxfp4"
            )
        return _words(values, weight_bits(shape.scheme)), _parameters(quant, shape.scheme)

    def bias(given: Tensor | None) -> Tensor | None:
        return None if given is None else row_scales(given)

    w13, w13_quant = projection(weights.w13, weights.w13_quant)
    w2, w2_quant = projection(weights.w2, weights.w2_quant)
    return replace(
        weights,
        w13=w13,
        w2=w2,
        w13_quant=w13_quant,
        w2_quant=w2_quant,
        w13_bias=bias(weights.w13_bias),
        w2_bias=bias(weights.w2_bias),
    )


def _words(values: Tensor, bits: int) -> Tensor:
    """[E, N, K * bits / 8] uint8 as [E, K / 16, N * bits / 2] int32, expert by expert."""
    num_experts, num_rows, num_bytes = values.shape
    size = num_experts, num_bytes * 8 // bits // TILE_COLUMNS, num_rows * bits // 2
    words = torch.empty(size, dtype=torch.int32, device=values.device)
    for expert in range(num_experts):
        words[expert] = words_of(values[expert], bits)
    return words


def _parameters(quant: QuantParameters, scheme: QuantScheme) -> QuantParameters:
    is_mxfp4 = scheme.weight is WeightScheme.MXFP4
    zeros, order = quant.zero_points, quant.input_order
    return replace(
        quant,
        scales=e8m0_scales(quant.scales) if is_mxfp4 else scales_of(quant.scales),
        zero_points=None if zeros is None else zero_point_words(zeros),
        input_order=None if order is None else order.contiguous(),
    )
