"""How a checkpoint stores weights in fewer bits, as data: scheme, parameters, tensor.

Every format under `kernels/quant/` fills these; kernels declare the schemes they take by name.
"""

from dataclasses import dataclass, fields
from enum import StrEnum

import torch
from torch import Tensor


class WeightScheme(StrEnum):
    """What the stored values are; `kernels/quant/` has a file with the definition of each."""

    NONE = "none"  # in the layer's dtype
    FP8_BLOCK = "fp8_block"  # e4m3, a float32 scale for every 128 x 128 block
    FP8_CHANNEL = "fp8_channel"  # e4m3, a float32 scale for every output row
    INT4 = "int4_w4a16"
    INT8 = "int8_w8a16"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    NF3 = "nf3"
    HYBRID = "nvfp4_nf3_hybrid"  # some experts of a layer in nvfp4, the others in nf3


# Columns of a row, rows and columns of a block of a weight, that share a scale in fp8.
FP8_GROUP = 128
# Columns that share a scale where the scheme fixes it.
MXFP4_GROUP, NVFP4_GROUP, NF3_GROUP = 32, 16, 64
FIXED_GROUPS = {
    WeightScheme.MXFP4: MXFP4_GROUP,
    WeightScheme.NVFP4: NVFP4_GROUP,
    WeightScheme.NF3: NF3_GROUP,
}
MAX_E4M3 = 448.0  # the largest number that e4m3 has


class RowScheme(StrEnum):
    """How rows are stored where they enter an experts kernel."""

    MODEL = "model"  # in the layer's dtype
    FP8_GROUP = "fp8"  # e4m3, a float32 scale for every 128 columns of a row


@dataclass(frozen=True)
class QuantScheme:
    """The storage of one layer's expert weights, the same for all its experts but of a hybrid.

    group_size: elements along K that share a scale; None where the scheme fixes it (128 of
    fp8_block, 32 of mxfp4, 16 of nvfp4, 64 of nf3) or a whole row shares one.
    has_zero_points: int4 and int8 only; without them the codes are symmetric around 2^(bits-1).
    has_input_order: int4 and int8 only; columns are stored in another order than x has them.
    nvfp4_experts: nvfp4_nf3_hybrid only; the layer's experts, by global id and rising, that are
    stored in nvfp4; the others are in nf3.
    """

    weight: WeightScheme = WeightScheme.NONE
    group_size: int | None = None
    has_zero_points: bool = False
    has_input_order: bool = False
    nvfp4_experts: tuple[int, ...] = ()

    @property
    def is_quantised(self) -> bool:
        return self.weight is not WeightScheme.NONE

    def of_expert(self, expert: int) -> "QuantScheme":
        """The storage of one expert, by global id."""
        if self.weight is not WeightScheme.HYBRID:
            return self
        in_nvfp4 = expert in self.nvfp4_experts
        return QuantScheme(WeightScheme.NVFP4 if in_nvfp4 else WeightScheme.NF3)


UNQUANTISED = QuantScheme()


@dataclass(frozen=True)
class QuantParameters:
    """What turns stored values back into weights. N output rows, K input columns, E experts.

    scales: [E, ...] by scheme: fp8_block [E, ceil(N / 128), ceil(K / 128)] float32 (of w13: the
    gate's blocks, then the up's, each ceil(I / 128)); fp8_channel [E, N] float32; int4 and int8
    [E, N, ceil(K / group)] in the layer's dtype; mxfp4 [E, N, K / 32] uint8 (ue8m0); nvfp4
    [E, N, K / 16] e4m3; nf3 [E, N, ceil(K / 64)] bfloat16.
    zero_points: int4 and int8, [E, N, ceil(K / group)] uint8 codes; None: symmetric.
    global_scales: nvfp4, [E, 2] of w13 (gate, up) and [E, 1] of w2, float32 multipliers.
    input_order: [E, K] int32, the column of x that stored column k multiplies (act-order);
    None: in order.
    Of a hybrid, values, scales and global_scales are those of the E4 experts in nvfp4, [E4, ...],
    nf3_values and nf3_scales the values and scales of the E3 in nf3, [E3, ...], and tiers, [E]
    int32, says where expert e is: p >= 0 for place p of the first, ~p (-1 - p) of the second.
    """

    scales: Tensor
    zero_points: Tensor | None = None
    global_scales: Tensor | None = None
    input_order: Tensor | None = None
    nf3_values: Tensor | None = None
    nf3_scales: Tensor | None = None
    tiers: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Those there are."""
        return tuple(
            tensor for field in fields(self) if (tensor := getattr(self, field.name)) is not None
        )


@dataclass(frozen=True)
class QuantizedTensor:
    """One projection of some experts as stored.

    values: [E, N, K] e4m3; int8: [E, N, K] uint8; 4 bits: [E, N, K / 2] uint8, the even column in
    the low nibble; nf3: [E, N, 3 * K / 32] int32 (kernels/quant/nf3.py).
    """

    values: Tensor
    parameters: QuantParameters
    scheme: QuantScheme

    @property
    def device(self) -> torch.device:
        return self.values.device
