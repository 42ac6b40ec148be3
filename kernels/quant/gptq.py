"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

K input columns, N output rows, G groups, P = 32 / bits fields in a word, lowest bits first:

    qweight  int32 [ceil(K / P), N]  field i of word [r, n]: the code of column P r + i
    qzeros   int32 [G, ceil(N / P)]  field i of word [g, c]: the zero point of row P c + i
    scales   float16 [G, N]
    g_idx    int32 [K]               the group of each column: k // group_size without act-order

    weight[n, k] = (code[n, k] - zero[g_idx[k], n]) * scale[g_idx[k], n]

Source: GPTQModel 7.7.0, gptqmodel/nn_modules/qlinear/__init__.py (`pack_original`,
`dequantize_weight`).

Zero points. `gptq_v2` stores them as they are, and so does `gptq_p`, whose words of 4 and 8 bits
are the same. `gptq` (v1, and where no format is named) stores them less 1, in one of two ways,
which differ where a zero point is 0:

- AutoGPTQ subtracts before it packs, and adds modulo 2^bits (auto_gptq/nn_modules/qlinear/
  qlinear_cuda_old.py): each field by itself, 15 stands for 0.
- GPTQModel subtracts from the packed word, 0x11111111 as one integer, so that a zero point of 0
  borrows from the next field (gptqmodel/utils/model.py, `convert_gptq_v2_to_v1_format_module`).

`meta.quantizer` of the quantization_config tells them apart: GPTQModel names itself there.

The zero points of a symmetric checkpoint are all 2^(bits - 1); what it stores for them is not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.format import (
    Projection,
    StoredTensor,
    WeightFormat,
)
from ep_runtime.kernels.quant.int_weights import (
    INDEX_DTYPES,
    INT_SCHEMES,
    SCALE_DTYPES,
    cast_scales,
    check_in_order,
    check_no_bias,
    dequantize_groups,
    groups_in_order,
    num_bytes,
    num_groups,
    num_words,
    order_of,
    reorder_values,
)
from ep_runtime.kernels.quant.packing import bytes_of, unpack_words
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantParameters, QuantScheme
from ep_runtime.kernels.quant.settings import QuantizationSettings

_INT32 = frozenset({torch.int32})


class ZeroStorage(StrEnum):
    """How the zero points of an asymmetric checkpoint are stored."""

    AS_IS = "as_is"  # gptq_v2
    LESS_1_IN_FIELD = "less_1_in_field"  # gptq, by AutoGPTQ
    LESS_1_IN_WORD = "less_1_in_word"  # gptq, by GPTQModel


@dataclass(frozen=True)
class GptqFormat(WeightFormat):
    """bits: 4 or 8. group_size: None for a whole row.

    has_act_order: columns are in groups as g_idx says (desc_act without static groups); without,
    a g_idx that is there must be in order.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    zero_storage: ZeroStorage = ZeroStorage.LESS_1_IN_FIELD
    has_act_order: bool = False

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(
            INT_SCHEMES[self.bits],
            self.group_size,
            has_zero_points=not self.is_symmetric,
            has_input_order=self.has_act_order and self.group_size is not None,
        )

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        rows, columns, bits = projection.rows, projection.columns, self.bits
        groups = num_groups(columns, self.group_size)
        return {
            "qweight": StoredTensor((".qweight",), ((num_words(columns, bits), rows),), _INT32),
            "qzeros": StoredTensor(
                (".qzeros",),
                ((groups, num_words(rows, bits)),),
                _INT32,
                is_required=not self.is_symmetric,
                is_used=not self.is_symmetric,
            ),
            "scales": StoredTensor((".scales",), ((groups, rows),), SCALE_DTYPES),
            "g_idx": StoredTensor(
                (".g_idx",), ((columns,),), INDEX_DTYPES, is_required=self.scheme.has_input_order
            ),
            # AutoGPTQ stores zeros where the model has no bias.
            "bias": StoredTensor((".bias",), ((rows,),), SCALE_DTYPES, is_required=False),
        }

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        check_no_bias(tensors)
        # Transposed, a row's words follow each other, and their bytes are its codes in order.
        values = bytes_of(tensors["qweight"].T)[:, : num_bytes(projection.columns, self.bits)]
        zeros, order, groups = self._zeros(tensors, projection), None, tensors.get("g_idx")
        if self.scheme.has_input_order:
            assert self.group_size is not None
            order = order_of(tensors["g_idx"], self.group_size, "g_idx")
            values = reorder_values(values, order, self.bits)
        elif groups is not None:
            check_in_order(groups, self.group_size, "g_idx")
        parameters = QuantParameters(
            cast_scales(tensors["scales"].T, projection.dtype, "scales")[None],
            None if zeros is None else zeros.contiguous()[None],
            input_order=None if order is None else order[None],
        )
        return QuantizedTensor(values.contiguous()[None], parameters, self.scheme)

    def dequantize(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor:
        """The definition: one projection's weight [N, K] in float32."""
        columns = projection.columns
        return dequantize_groups(
            unpack_words(tensors["qweight"].T, self.bits)[:, :columns],
            self._zeros(tensors, projection),
            tensors["scales"].T,
            groups=tensors.get("g_idx", groups_in_order(columns, self.group_size)),
            bits=self.bits,
        )

    def _zeros(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor | None:
        """[N, G] uint8; None where symmetric."""
        if self.is_symmetric:
            return None
        return unpack_zeros(tensors["qzeros"], self.bits, self.zero_storage)[:, : projection.rows].T


def read_gptq(values: Mapping[str, Any]) -> GptqFormat:
    """Of a quantization_config, or of a module's own settings (`dynamic`) laid over it.

    ConfigError: other bits, a kernel's own layout (`marlin`, ...), words of other than 32 bits.
    """
    settings = QuantizationSettings(values)
    if settings.get("dynamic"):
        raise settings.error("dynamic", "(settings of single modules) must be laid over the others")
    layout = settings.choice(
        "format" if settings.get("checkpoint_format") is None else "checkpoint_format",
        ("gptq", "gptq_v2", "gptq_p"),
        default="gptq",
        cure="save the checkpoint as gptq_v2",
    )
    settings.choice(
        "is_marlin_format",
        (False,),
        default=False,
        cure="save the checkpoint as gptq_v2, not in the layout of one kernel",
    )
    settings.choice(
        "pack_dtype",
        ("int32", "torch.int32"),
        default="int32",
        cure="save the checkpoint with pack_dtype: int32",
    )
    meta = settings.section("meta")
    quantizers = meta.get("quantizer", ())
    if not isinstance(quantizers, str | list | tuple):
        raise meta.error("quantizer", f"({quantizers!r}) must be a name or a list of names")
    return GptqFormat(
        bits=settings.choice("bits", (4, 8), cure="quantise again with 4 or 8 bits"),
        group_size=settings.group_size(),
        is_symmetric=settings.flag("sym"),
        zero_storage=_zero_storage(layout, quantizers),
        has_act_order=settings.flag("desc_act", False)
        and not settings.flag("static_groups", False)
        and not meta.flag("static_groups", False),
    )


def unpack_zeros(qzeros: Tensor, bits: int, storage: ZeroStorage) -> Tensor:
    """Zero points [G, fields] uint8 of qzeros [G, words] int32.

    Example: 0x1111113F has the fields 15, 3, 1, ... of 4 bits, lowest first: 0, 4, 2, ... less 1 in
    each field, or 0, 5, 2, ... less 1 in the word, where the 0 borrowed from the 5.
    """
    if storage is ZeroStorage.LESS_1_IN_WORD:
        qzeros = qzeros + sum(1 << shift for shift in range(0, 32, bits))
    zeros = unpack_words(qzeros, bits)
    if storage is ZeroStorage.LESS_1_IN_FIELD:
        zeros = (zeros + 1) & (2**bits - 1)
    return zeros


def _zero_storage(layout: str, quantizers: str | list[str] | tuple[str, ...]) -> ZeroStorage:
    """Example: `gptq`, ["gptqmodel:7.7.0"] is LESS_1_IN_WORD."""
    if layout != "gptq":
        return ZeroStorage.AS_IS
    names = (quantizers,) if isinstance(quantizers, str) else quantizers
    if any(str(name).lower().startswith("gptqmodel") for name in names):
        return ZeroStorage.LESS_1_IN_WORD
    return ZeroStorage.LESS_1_IN_FIELD
