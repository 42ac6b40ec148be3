"""AWQ checkpoints of version `gemm`, as AutoAWQ and GPTQModel write them: 4 bits.

K input columns, N output rows, G groups of columns:

    qweight  int32 [K, N / 8]  the codes of 8 rows at one column
    qzeros   int32 [G, N / 8]  the zero points of 8 rows
    scales   float16 [G, N]

    weight[n, k] = (code[k, n] - zero[g, n]) * scale[g, n],  g = k // group_size

The fields of a word, lowest bits first, hold rows 0, 2, 4, 6, 1, 3, 5, 7 of its 8. Zero points are
stored as they are; a symmetric checkpoint stores 8 for each.

Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py (`from_linear`) and awq/utils/packing_utils.py
(`dequantize_gemm`); GPTQModel 7.7.0, gptqmodel/nn_modules/qlinear/gemm_awq.py (`pack`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.format import (
    Projection,
    StoredTensor,
    WeightFormat,
)
from ep_runtime.kernels.quant.int_weights import (
    SCALE_DTYPES,
    cast_scales,
    check_no_bias,
    dequantize_groups,
    groups_in_order,
    num_groups,
    num_words,
)
from ep_runtime.kernels.quant.packing import pack_pairs, unpack_words
from ep_runtime.kernels.quant.scheme import (
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.settings import QuantizationSettings

BITS = 4
ROW_OF_FIELD = (0, 2, 4, 6, 1, 3, 5, 7)
_INT32 = frozenset({torch.int32})


@dataclass(frozen=True)
class AwqFormat(WeightFormat):
    """group_size: None for a whole row."""

    group_size: int | None

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(WeightScheme.INT4, self.group_size, has_zero_points=True)

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        rows, columns = projection.rows, projection.columns
        groups, words = num_groups(columns, self.group_size), num_words(rows, BITS)
        return {
            "qweight": StoredTensor((".qweight",), ((columns, words),), _INT32),
            "qzeros": StoredTensor((".qzeros",), ((groups, words),), _INT32),
            "scales": StoredTensor((".scales",), ((groups, rows),), SCALE_DTYPES),
            "bias": StoredTensor((".bias",), ((rows,),), SCALE_DTYPES, is_required=False),
        }

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        check_no_bias(tensors)
        codes, zeros = self._codes_and_zeros(tensors, projection)
        parameters = QuantParameters(
            cast_scales(tensors["scales"].T, projection.dtype, "scales")[None],
            zeros.contiguous()[None],
        )
        return QuantizedTensor(pack_pairs(codes).contiguous()[None], parameters, self.scheme)

    def dequantize(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor:
        """The definition: one projection's weight [N, K] in float32."""
        codes, zeros = self._codes_and_zeros(tensors, projection)
        groups = groups_in_order(projection.columns, self.group_size)
        return dequantize_groups(codes, zeros, tensors["scales"].T, groups=groups, bits=BITS)

    def _codes_and_zeros(
        self, tensors: Mapping[str, Tensor], projection: Projection
    ) -> tuple[Tensor, Tensor]:
        """[N, K] and [N, G] uint8."""
        codes = unpack_rows(tensors["qweight"])[:, : projection.rows]
        return codes.T, unpack_rows(tensors["qzeros"])[:, : projection.rows].T


def unpack_rows(words: Tensor) -> Tensor:
    """What each word holds of its 8 rows, in their order: [..., N / 8] int32 as [..., N] uint8.

    Example: 0x75316420 is 0, 1, 2, 3, 4, 5, 6, 7.
    """
    fields = unpack_words(words, BITS)
    field_of_row = [ROW_OF_FIELD.index(row) for row in range(8)]
    return fields.reshape(*words.shape, 8)[..., field_of_row].flatten(-2)


def read_awq(values: Mapping[str, Any]) -> AwqFormat:
    """Of a quantization_config. ConfigError: other bits, or another version than gemm."""
    settings = QuantizationSettings(values)
    settings.choice("bits", (BITS,), cure="quantise again with 4 bits")
    key = next((key for key in ("version", "checkpoint_format", "format") if settings.get(key)), "")
    version = settings.get(key, "gemm")
    if str(version).lower() != "gemm":
        raise settings.error(key, f"({version!r}) must be 'gemm'; pack the checkpoint as gemm")
    # Otherwise it names the kernel that transformers is to run, not how the file is packed.
    if settings.get("backend") == "llm-awq":
        raise settings.error(
            "backend",
            "('llm-awq') packs in another order; pack the checkpoint with AutoAWQ or GPTQModel",
        )
    return AwqFormat(settings.group_size())
