"""A bump arena that kernels take their scratch tensors from; one per stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 256


def aligned_bytes(num_bytes: int) -> int:
    """`num_bytes` rounded up to the arena's alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Workspace:
    """Scratch memory on one device, reused by every call on one stream.

    Tensors taken inside `frame()` are valid until the frame ends; their contents are whatever
    the memory held. `reserve` sizes the arena when layers are built; a take that does not fit
    allocates a block of its own, which lives as long as its tensor.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self.device = device
        self._block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._offset = 0

    @classmethod
    def over(cls, block: Tensor) -> "Workspace":
        """One whose arena is that memory: [num_bytes] uint8, 256-byte aligned."""
        workspace = cls(block.device)
        workspace._block = block
        return workspace

    @property
    def rest(self) -> Tensor:
        """What of the arena is not taken: [num_bytes] uint8."""
        return self._block[self._offset :]

    @property
    def num_bytes(self) -> int:
        """The arena's size."""
        return self._block.numel()

    def reserve(self, num_bytes: int) -> None:
        """Grow the arena to at least `num_bytes`; not inside a frame."""
        if self._offset:
            raise RuntimeError("a workspace cannot grow while a frame is open")
        if num_bytes > self.num_bytes:
            self._block = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    @contextmanager
    def frame(self) -> Iterator["Workspace"]:
        """Give back on exit what was taken inside."""
        start = self._offset
        try:
            yield self
        finally:
            self._offset = start

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor, 256-byte aligned."""
        num_bytes = prod(shape) * dtype.itemsize
        end = self._offset + aligned_bytes(num_bytes)
        if end > self.num_bytes:
            return torch.empty(shape, dtype=dtype, device=self.device)
        flat = self._block[self._offset : self._offset + num_bytes]
        self._offset = end
        return flat.view(dtype).view(shape)
