"""What both experts over the Triton kernels have in common: which layers, weights, and tiles."""

from ep_runtime.kernels.base import ExpertsShape, ExpertWeights, ModularExperts
from ep_runtime.kernels.packed_projections import prepare_packed_weights
from ep_runtime.kernels.quant.packed_weights import is_packed, packed_fault
from ep_runtime.kernels.triton_operands import prepare_triton_weights
from ep_runtime.kernels.tuning_text import describe_tuning


class TritonBase(ModularExperts):
    """An experts kernel whose projections are kernels/grouped_gemm.py's, or of packed weights
    kernels/packed_projections.py's."""

    @classmethod
    def shape_fault(cls, shape: ExpertsShape) -> str | None:
        """Packed weights keep the order of the rows' columns, and have groups that fit a block."""
        return packed_fault(shape.scheme) if is_packed(shape.scheme) else None

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Rows that TMA can read; copies only what is not so already. Packed weights repacked."""
        if is_packed(self.shape.scheme):
            return prepare_packed_weights(weights, self.shape)
        return prepare_triton_weights(weights)

    def tuning_text(
        self, device_name: str, compute_capability: tuple[int, int] | None = None
    ) -> str | None:
        """Which table of tiles is used, and which GEMM; see kernels/tuning_text.py."""
        return describe_tuning(self.shape, device_name, compute_capability)
