"""One weight of the model, and the tensors of the checkpoint that make it up."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ep_runtime.checkpoint import CheckpointReader
from ep_runtime.kernels.quant.format import Projection, StoredTensor, WeightFormat

PLAIN = "weight"  # the one role of a weight that is not quantised


@dataclass(frozen=True)
class StoredWeight:
    """Where a weight is.

    tensors: role -> name in the checkpoint; of a plain weight the one role PLAIN.
    shape: of a plain weight, on disk. format, projection: of a quantised one. num_experts: of
    experts that are stored in one tensor, else None.
    """

    tensors: Mapping[str, str]
    shape: tuple[int, ...] = ()
    format: WeightFormat | None = None
    projection: Projection | None = None
    num_experts: int | None = None

    @property
    def name(self) -> str:
        """A name for messages; of a plain weight, its only one."""
        return next(iter(self.tensors.values()))

    def check(self, reader: CheckpointReader) -> None:
        """CheckpointError where a tensor's shape or dtype is not what the model wants."""
        if self.format is None:
            reader.check(self.tensors[PLAIN], self.shape)
            return
        for role, wanted in stored_tensors(self.format, self.projection, self.num_experts).items():
            if role in self.tensors:
                reader.check(self.tensors[role], *wanted.shapes, dtypes=wanted.dtypes)

    def num_bytes(self, reader: CheckpointReader) -> int:
        """Of all its tensors."""
        return sum(reader.num_bytes(name) for name in self.tensors.values())


@lru_cache(maxsize=256)  # a model has few shapes and many weights
def stored_tensors(
    form: WeightFormat, projection: Projection | None, num_experts: int | None
) -> Mapping[str, StoredTensor]:
    """Role -> tensor of a format; empty where it never stores all experts in one tensor."""
    if projection is None:
        raise RuntimeError("a quantised weight has a projection")
    if num_experts is None:
        return form.stored(projection)
    return form.stored_fused(num_experts, projection) or {}
