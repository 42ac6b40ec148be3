"""int4 and int8 weights: what GPTQ, AWQ and compressed-tensors have in common.

    weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g],  g = k // group_size

with codes and zeros in [0, 2^bits), and zero = 2^(bits - 1) where there are no zero points. With an
input order, k counts stored columns, and stored column k is column input_order[k] of the weight.

Letters: N output rows, K input columns, G groups of columns, E experts.
"""

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor

from ep_runtime.kernels.quant.format import StoredTensorError, check_finite
from ep_runtime.kernels.quant.packing import pack_pairs, unpack_pairs
from ep_runtime.kernels.quant.scheme import QuantizedTensor, WeightScheme

INT_SCHEMES = {4: WeightScheme.INT4, 8: WeightScheme.INT8}
INT_BITS = {scheme: bits for bits, scheme in INT_SCHEMES.items()}
SCALE_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})
INDEX_DTYPES = frozenset({torch.int32, torch.int64})


def num_groups(num_columns: int, group_size: int | None) -> int:
    """Groups of a row, the last of which may be shorter: 416 columns in groups of 128 are 4."""
    return 1 if group_size is None else ceil(num_columns / group_size)


def num_words(num_fields: int, bits: int) -> int:
    """Words of 32 bits that hold so many fields."""
    return ceil(num_fields * bits / 32)


def num_bytes(num_fields: int, bits: int) -> int:
    """Bytes of them that are in use."""
    return ceil(num_fields * bits / 8)


def groups_in_order(num_columns: int, group_size: int | None) -> Tensor:
    """The group of each column where groups follow each other: [K] int64."""
    return torch.arange(num_columns) // (group_size or num_columns)


def cast_scales(scales: Tensor, dtype: torch.dtype, role: str) -> Tensor:
    """Scales in the layer's dtype; StoredTensorError where they are not finite in it."""
    scales = scales.to(dtype)
    check_finite(role, scales)
    return scales.contiguous()


def check_no_bias(tensors: Mapping[str, Tensor]) -> None:
    """StoredTensorError for a bias other than 0, which some writers give every linear layer."""
    if "bias" in tensors and bool(tensors["bias"].any()):
        raise StoredTensorError(
            "bias", "is not 0, and a bias stored beside quantised weights is not supported"
        )


def check_in_order(groups: Tensor, group_size: int | None, role: str) -> None:
    """StoredTensorError unless the columns' groups [K] follow each other."""
    wanted = groups_in_order(groups.numel(), group_size).to(groups.device)
    if not torch.equal(groups.long(), wanted):
        raise StoredTensorError(
            role,
            "its groups are not in order, which the quantization_config says nothing of; set "
            "desc_act: true there if that is how it was quantised",
        )


def order_of(groups: Tensor, group_size: int, role: str) -> Tensor:
    """The order of columns in which groups follow each other, as act-order needs: [K] int32.

    groups: [K] the group of each column (`g_idx`). Columns of a group keep their order.
    StoredTensorError where no order does it: every group must have group_size columns, the last
    one the rest.

    Example: groups 1, 0, 1, 0 in twos give the order 1, 3, 0, 2.
    """
    groups = groups.long()
    order = torch.argsort(groups, stable=True)
    wanted = groups_in_order(groups.numel(), group_size).to(groups.device)
    wrong = (groups[order] != wanted).nonzero()
    if wrong.numel():
        group = int(wanted[wrong[0]])
        raise StoredTensorError(
            role,
            f"group {group} has {int((groups == group).sum())} columns, must have "
            f"{int((wanted == group).sum())} (group_size is {group_size}, {groups.numel()} columns "
            f"from group 0 on); quantise again without act-order or with static groups",
        )
    return order.to(torch.int32)


def reorder_values(values: Tensor, order: Tensor, bits: int) -> Tensor:
    """`QuantizedTensor.values` of [..., K] with its columns in another order [K]."""
    if bits == 8:
        return values[..., order.long()]
    return pack_pairs(unpack_pairs(values)[..., order.long()])


def dequantize_groups(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, *, groups: Tensor, bits: int
) -> Tensor:
    """(code - zero) * scale in float32 [..., N, K], each with the zero and scale of its group.

    codes: [..., N, K] uint8. zeros: [..., N, G] uint8, None for 2^(bits - 1). scales: [..., N, G].
    groups: [K] integers.
    """
    groups = groups.to(codes.device, torch.int64)
    zero = 2 ** (bits - 1) if zeros is None else zeros.float()[..., groups]
    return (codes.float() - zero) * scales.float()[..., groups]


def dequantize_int(weight: QuantizedTensor, num_parts: int = 1) -> Tensor:
    """The weight [E, N, K] in float32, columns in the order of x. num_parts: of no effect here."""
    bits = INT_BITS[weight.scheme.weight]
    codes = weight.values if bits == 8 else unpack_pairs(weight.values)
    parameters = weight.parameters
    stored = dequantize_groups(
        codes,
        parameters.zero_points,
        parameters.scales,
        groups=groups_in_order(codes.shape[-1], weight.scheme.group_size),
        bits=bits,
    )
    if parameters.input_order is None:
        return stored
    columns = parameters.input_order.long()[:, None, :].expand_as(stored)
    return torch.empty_like(stored).scatter_(-1, columns, stored)
