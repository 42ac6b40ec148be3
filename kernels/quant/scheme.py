"""How a checkpoint stores weights in fewer bits, as data: scheme, parameters, tensor.

Every format under `kernels/quant/` fills these; kernels declare the schemes they take by name.
"""

from dataclasses import dataclass
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


class RowScheme(StrEnum):
    """How rows are stored where they enter an experts kernel."""

    MODEL = "model"  # in the layer's dtype
    FP8_GROUP = "fp8"  # e4m3, a float32 scale for every 128 columns of a row


@dataclass(frozen=True)
class QuantScheme:
    """The storage of one layer's expert weights, the same for all its experts.

    group_size: elements along K that share a scale; None where the scheme fixes it (128 of
    fp8_block, 32 of mxfp4, 16 of nvfp4) or a whole row shares one.
    has_zero_points: int4 and int8 only; without them the codes are symmetric around 2^(bits-1).
    has_input_order: int4 and int8 only; columns are stored in another order than x has them.
    """

    weight: WeightScheme = WeightScheme.NONE
    group_size: int | None = None
    has_zero_points: bool = False
    has_input_order: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.weight is not WeightScheme.NONE


UNQUANTISED = QuantScheme()


@dataclass(frozen=True)
class QuantParameters:
    """What turns stored values back into weights. N output rows, K input columns, E experts.

    scales: [E, ...] by scheme: fp8_block [E, ceil(N / 128), ceil(K / 128)] float32 (of w13: the
    gate's blocks, then the up's, each ceil(I / 128)); fp8_channel [E, N] float32; int4 and int8
    [E, N, ceil(K / group)] in the layer's dtype; mxfp4 [E, N, K / 32] uint8 (ue8m0); nvfp4
    [E, N, K / 16] e4m3.
    zero_points: int4 and int8, [E, N, ceil(K / group)] uint8 codes; None: symmetric.
    global_scales: nvfp4, [E, 2] of w13 (gate, up) and [E, 1] of w2, float32 multipliers.
    input_order: [E, K] int32, the column of x that stored column k multiplies (act-order);
    None: in order.
    """

    scales: Tensor
    zero_points: Tensor | None = None
    global_scales: Tensor | None = None
    input_order: Tensor | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        """Those there are."""
        all_of_them = (self.scales, self.zero_points, self.global_scales, self.input_order)
        return tuple(tensor for tensor in all_of_them if tensor is not None)


@dataclass(frozen=True)
class QuantizedTensor:
    """One projection of some experts as stored.

    values: [E, N, K] e4m3; int8: [E, N, K] uint8; 4 bits: [E, N, K / 2] uint8, the even column in
    the low nibble.
    """

    values: Tensor
    parameters: QuantParameters
    scheme: QuantScheme

    @property
    def device(self) -> torch.device:
        return self.values.device
