"""What a checkpoint format tells the loader: which tensors make up a weight, and what they become.

A *projection* is the weight of one linear layer, N output rows by K input columns. Its tensors are
named after the layer's path: `model.layers.3.mlp.experts.5.up_proj` + `.weight_scale_inv`. Each
format is one file here and one line in `ep_runtime/quantization.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantScheme


@dataclass(frozen=True)
class Projection:
    """The weight [rows, columns] of a linear layer; dtype: the model's, and its scales'."""

    rows: int
    columns: int
    dtype: torch.dtype


@dataclass(frozen=True)
class StoredTensor:
    """One of a projection's tensors in the checkpoint.

    suffixes: what follows the layer's path in its name, in every spelling, the usual one first.
    shapes: those it may have. dtypes: likewise.
    is_required: False where it may be absent.
    is_used: False where it is known and never read (its shape and dtype are not looked at).
    """

    suffixes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: frozenset[torch.dtype] = frozenset()
    is_required: bool = True
    is_used: bool = True


class StoredTensorError(ValueError):
    """A stored tensor's values cannot be right. role: its key in `WeightFormat.stored`."""

    def __init__(self, role: str, reason: str) -> None:
        super().__init__(f"{role}: {reason}")
        self.role, self.reason = role, reason


class WeightFormat(ABC):
    """A format with its parameters; implementations are frozen dataclasses.

    scheme: what its tensors become.
    """

    @property
    @abstractmethod
    def scheme(self) -> QuantScheme: ...

    def of_expert(self, expert: int) -> "WeightFormat":
        """How one expert, by global id, is stored; this format but of a hybrid."""
        return self

    @abstractmethod
    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        """Role -> tensor, for one linear layer."""

    def stored_fused(
        self, num_experts: int, projection: Projection
    ) -> Mapping[str, StoredTensor] | None:
        """Role -> tensor, for one projection of all experts at once; None: never stored so.

        The shapes' first dimension is E; `convert` gets one expert's slices. Suffixes follow
        `<block>.experts.gate_up_proj` and `<block>.experts.down_proj`. Output rows come first,
        whatever the family does with plain tensors, and alternate between gate and up where the
        family's do.
        """
        return None

    @abstractmethod
    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        """One projection's tensors, by role, as a `QuantizedTensor` of one expert (E = 1).

        tensors: those that are used, on one device, of a shape and dtype that `stored` names; may
        be kept. Raises StoredTensorError where values cannot be right (a scale of NaN).
        """


def check_finite(role: str, scales: Tensor) -> None:
    """StoredTensorError where a scale is NaN or infinite; waits for the device."""
    count = int((~torch.isfinite(scales.float())).sum())
    if count:
        raise StoredTensorError(role, f"{count} of {scales.numel()} scales are NaN or infinite")
