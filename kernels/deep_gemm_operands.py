"""What both experts over deep_gemm have in common: sizes, weights, the package, fp8 scratch.

Shapes: B batches, M rows of each, W columns, G = W / 128 groups; H hidden size, I intermediate
size.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights, ModularExperts
from ep_runtime.kernels.deep_gemm_package import DeepGemm, bind_deep_gemm
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.quant.scheme import FP8_GROUP, QuantParameters
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

_FP8 = torch.float8_e4m3fn


class DeepGemmBase(ModularExperts):
    """An experts kernel whose projections are the package's; it is bound with the weights.

    Making one needs no package, since plans are made where none is.
    """

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)
        self._deep_gemm: DeepGemm | None = None

    @classmethod
    def shape_fault(cls, shape: ExpertsShape) -> str | None:
        """With whole blocks of 128, gate's and up's scales are, one after the other, those of one
        weight, as the GEMMs read them."""
        for key, size in (
            ("hidden_size", shape.hidden_size),
            ("moe_intermediate_size", shape.intermediate_size),
        ):
            if size % FP8_GROUP:
                return f"{key} ({size}) is not a multiple of {FP8_GROUP}"
        return None

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Values and scales contiguous, which is how the GEMMs read both; copies what is not.

        Raises PlanError where deep_gemm cannot be imported, or not used on this device.
        """
        self._deep_gemm = bind_deep_gemm(self.capabilities.name, weights.w13.device)

        def dense(quant: QuantParameters | None) -> QuantParameters | None:
            return None if quant is None else replace(quant, scales=quant.scales.contiguous())

        return replace(
            weights,
            w13=weights.w13.contiguous(),
            w2=weights.w2.contiguous(),
            w13_quant=dense(weights.w13_quant),
            w2_quant=dense(weights.w2_quant),
        )

    @property
    def deep_gemm(self) -> DeepGemm:
        """The package. Raises PlanError before `prepare_weights`."""
        if self._deep_gemm is None:
            raise PlanError(
                f"experts {self.capabilities.name} runs on weights that its prepare_weights "
                f"returned; call it first"
            )
        return self._deep_gemm


def weight_operand(values: Tensor, quant: QuantParameters | None) -> tuple[Tensor, Tensor]:
    """A projection's values and scales. Raises PlanError where it is not quantised."""
    if quant is None:
        raise PlanError("deep_gemm multiplies fp8 weights; set quantization: fp8_block")
    return values, quant.scales


@dataclass(frozen=True)
class Fp8Rows:
    """Rows as the GEMMs read them.

    values: [B, M, W] e4m3 contiguous. scales: [B, M, G] float32 with strides (G * M, 1, M): one
    group's scales of consecutive rows lie side by side; M is a multiple of 4.
    """

    values: Tensor
    scales: Tensor

    @property
    def only_batch(self) -> tuple[Tensor, Tensor]:
        """Values [M, W] and scales [M, G] of the first batch."""
        return self.values[0], self.scales[0]

    @property
    def batches(self) -> tuple[Tensor, Tensor]:
        return self.values, self.scales


def take_fp8_rows(
    num_batches: int, num_rows: int, num_columns: int, workspace: Workspace
) -> Fp8Rows:
    """Room for rows and their scales, in two tensors of the workspace."""
    values = workspace.take((num_batches, num_rows, num_columns), _FP8)
    scales = workspace.take((num_batches, num_columns // FP8_GROUP, num_rows), torch.float32)
    return Fp8Rows(values, scales.transpose(1, 2))


def fp8_rows_bytes(num_rows: int, num_columns: int) -> int:
    """What `take_fp8_rows` takes for so many rows in all batches."""
    scale_bytes = aligned_bytes(4 * num_rows * (num_columns // FP8_GROUP))
    return aligned_bytes(num_rows * num_columns) + scale_bytes


def bfloat16_bytes(num_rows: int, num_columns: int) -> int:
    """What a [num_rows, num_columns] bfloat16 tensor of the workspace takes."""
    return aligned_bytes(num_rows * num_columns * torch.bfloat16.itemsize)
