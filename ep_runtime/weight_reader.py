"""Reads weights of a checkpoint: plain ones straight into place, quantised ones as they are stored
or back in floating point."""

import torch
from torch import Tensor

from ep_runtime.checkpoint import STORED_DTYPES, CheckpointReader
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.quant.dequantize import dequantize_into
from ep_runtime.kernels.quant.format import StoredTensorError
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.stored_weight import PLAIN, StoredWeight


class WeightReader:
    """One checkpoint's weights. Beside the destination it takes the memory of one projection as
    it is stored, and of a piece of it in float32."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader

    def read_quantized(
        self, weight: StoredWeight, device: torch.device, expert: int | None = None
    ) -> QuantizedTensor:
        """All tensors of a quantised weight, of one expert (E = 1).

        expert: which, of experts that are stored in one tensor. Raises CheckpointError that names
        the tensor whose values cannot be right.
        """
        if weight.format is None or weight.projection is None:
            raise RuntimeError(f"{weight.name} is not quantised")
        tensors: dict[str, Tensor] = {}
        for role, name in weight.tensors.items():
            info = self.reader.tensors[name]
            shape = info.shape if expert is None else info.shape[1:]
            tensors[role] = torch.empty(shape, dtype=STORED_DTYPES[info.dtype], device=device)
            self.reader.read_into(name, tensors[role], expert)
        try:
            return weight.format.convert(tensors, weight.projection)
        except StoredTensorError as error:
            name = weight.tensors[error.role]
            of_expert = "" if expert is None else f" (expert {expert})"
            raise CheckpointError(f"{name}{of_expert}: {error.reason}") from None

    def read_into(self, weight: StoredWeight, destination: Tensor) -> None:
        """Copy a weight into `destination`, cast to its dtype; a quantised one is dequantised."""
        if weight.format is None:
            self.reader.read_into(weight.tensors[PLAIN], destination)
        else:
            dequantize_into(self.read_quantized(weight, destination.device), destination)
