"""compressed-tensors' `pack-quantized`: integers of 4 and 8 bits with 16-bit activations (WNA16).

K input columns, N output rows, G groups of columns, P = 32 / bits fields in a word, lowest bits
first:

    weight_packed      int32 [N, ceil(K / P)]  field i of word [n, c]: column P c + i
    weight_scale       [N, G]                  G = 1 of strategy channel
    weight_zero_point  int32 [ceil(N / P), G]  field i of word [r, g]: row P r + i; asymmetric only
    weight_shape       int64 [2]               N, K
    weight_g_idx       int32 [K]               the group of each column; actorder group only

    weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g],  g = k // group_size or weight_g_idx[k]

Codes and zero points are signed there, and stored plus 2^(bits - 1): unsigned, with a symmetric
zero of 2^(bits - 1). `actorder` static (weight) quantised the columns in another order and stores
nothing of it. A weight_g_idx that was never set is -1 and means groups in order.

Source: compressed-tensors 0.18.0, compressors/pack_quantized (`pack_to_int32`, `compress`) and
quantization/lifecycle (`dequantize`); 0.19 and later no longer know actorder group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.format import (
    Projection,
    StoredTensor,
    StoredTensorError,
    WeightFormat,
)
from ep_runtime.kernels.quant.int_weights import (
    INDEX_DTYPES,
    INT_SCHEMES,
    SCALE_DTYPES,
    cast_scales,
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


@dataclass(frozen=True)
class PackQuantizedFormat(WeightFormat):
    """bits: 4 or 8. group_size: None for strategy channel. has_group_order: actorder group."""

    bits: int
    group_size: int | None
    is_symmetric: bool
    has_group_order: bool = False

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(
            INT_SCHEMES[self.bits],
            self.group_size,
            has_zero_points=not self.is_symmetric,
            has_input_order=self.has_group_order,
        )

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        rows, columns, bits = projection.rows, projection.columns, self.bits
        groups = num_groups(columns, self.group_size)
        stored = {
            "weight_packed": StoredTensor(
                (".weight_packed",), ((rows, num_words(columns, bits)),), _INT32
            ),
            "weight_scale": StoredTensor((".weight_scale",), ((rows, groups),), SCALE_DTYPES),
            "weight_shape": StoredTensor((".weight_shape",), ((2,),), INDEX_DTYPES),
        }
        if not self.is_symmetric:
            stored["weight_zero_point"] = StoredTensor(
                (".weight_zero_point",), ((num_words(rows, bits), groups),), _INT32
            )
        if self.has_group_order:
            stored["weight_g_idx"] = StoredTensor((".weight_g_idx",), ((columns,),), INDEX_DTYPES)
        return stored

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        shape = tensors["weight_shape"].tolist()
        if shape != [projection.rows, projection.columns]:
            raise StoredTensorError(
                "weight_shape", f"is {shape}, must be {[projection.rows, projection.columns]}"
            )
        values = bytes_of(tensors["weight_packed"])[:, : num_bytes(projection.columns, self.bits)]
        order = None
        if self.has_group_order:
            assert self.group_size is not None
            order = order_of(self._groups(tensors, projection), self.group_size, "weight_g_idx")
            values = reorder_values(values, order, self.bits)
        zeros = self._zeros(tensors, projection)
        parameters = QuantParameters(
            cast_scales(tensors["weight_scale"], projection.dtype, "weight_scale")[None],
            None if zeros is None else zeros.contiguous()[None],
            input_order=None if order is None else order[None],
        )
        return QuantizedTensor(values.contiguous()[None], parameters, self.scheme)

    def dequantize(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor:
        """The definition: one projection's weight [N, K] in float32."""
        return dequantize_groups(
            unpack_words(tensors["weight_packed"], self.bits)[:, : projection.columns],
            self._zeros(tensors, projection),
            tensors["weight_scale"],
            groups=self._groups(tensors, projection),
            bits=self.bits,
        )

    def _zeros(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor | None:
        """[N, G] uint8; None where symmetric."""
        if self.is_symmetric:
            return None
        zeros = unpack_words(tensors["weight_zero_point"].T, self.bits)
        return zeros[:, : projection.rows].T

    def _groups(self, tensors: Mapping[str, Tensor], projection: Projection) -> Tensor:
        """The group of each column, [K]."""
        if self.has_group_order and not bool((tensors["weight_g_idx"] == -1).any()):
            return tensors["weight_g_idx"]
        return groups_in_order(projection.columns, self.group_size)


def read_pack_quantized(group: Mapping[str, Any]) -> PackQuantizedFormat:
    """Of one of `config_groups`, whose path a ConfigError's key is under.

    ConfigError: other bits, one scale for a whole tensor, quantised activations.
    """
    settings = QuantizationSettings(group, path="")
    if settings.get("input_activations") is not None:
        raise settings.error(
            "input_activations",
            "(quantised activations) must be absent with integer weights; quantise again as WNA16",
        )
    weights = settings.section("weights")
    weights.choice("type", ("int",), default="int", cure="quantise again with integers")
    weights.choice("dynamic", (False,), default=False, cure="quantise again with static scales")
    bits = weights.choice("num_bits", (4, 8), cure="quantise again with 4 or 8 bits")
    strategy = weights.choice(
        "strategy", ("group", "channel"), cure="quantise again with one of them"
    )
    order = weights.choice(
        "actorder",
        (None, False, "static", "weight", "group", "dynamic", True),
        cure="quantise again with actorder: static",
    )
    group_size = weights.group_size() if strategy == "group" else None
    return PackQuantizedFormat(
        bits=bits,
        group_size=group_size,
        is_symmetric=weights.flag("symmetric", True),
        has_group_order=order in ("group", "dynamic", True) and group_size is not None,
    )
