"""Writes safetensors shards one tensor at a time: names, shapes and dtypes first, then each one's
bytes at its place.

Format: https://github.com/huggingface/safetensors, "Format": the header's length as eight bytes,
little-endian; the header, JSON; the tensors' bytes without gaps.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypeVar

import torch
from torch import Tensor

from ep_runtime.checkpoint import INDEX_FILE, SINGLE_FILE, STORED_DTYPES
from ep_runtime.kernels.errors import CheckpointError

_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_ALIGNMENT = 8
T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class ShardWriter:
    """One file; every tensor that was announced is written once, in any order."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        self.path = path
        self._open = {spec.name: spec for spec in specs}
        # The widest first, so that each begins at a multiple of its element's size.
        in_order = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        self._offsets: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for spec in in_order:
            self._offsets[spec.name] = end
            header[spec.name] = {
                "dtype": _NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [end, end + spec.num_bytes],
            }
            end += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._file: BinaryIO = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._start = 8 + len(text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor. ValueError where it is not as announced, or was written already."""
        spec = self._open.pop(name, None)
        if spec is None or (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"{name}: {list(tensor.shape)} {tensor.dtype}, announced as {spec}")
        self._file.seek(self._start + self._offsets[name])
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        flat.numpy().tofile(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is None and self._open:
            raise ValueError(f"{self.path}: {sorted(self._open)[:8]} were not written")


def cut_into_shards(items: Sequence[tuple[T, int]], max_bytes: int) -> Iterator[list[T]]:
    """Items with their bytes, in order, in as few runs as hold at most max_bytes each; a larger
    item is a run of its own.

    Example: sizes 3, 3, 9, 1 and max_bytes 7 give 3+3, 9, 1.
    """
    run: list[T] = []
    total = 0
    for item, num_bytes in items:
        if run and total + num_bytes > max_bytes:
            yield run
            run, total = [], 0
        run.append(item)
        total += num_bytes
    if run:
        yield run


def shard_names(num_shards: int) -> list[str]:
    """As transformers spells them."""
    if num_shards == 1:
        return [SINGLE_FILE]
    return [f"model-{n:05d}-of-{num_shards:05d}.safetensors" for n in range(1, num_shards + 1)]


def write_index(folder: Path, files: dict[str, list[TensorSpec]]) -> None:
    """The index of a checkpoint of several files; nothing for one."""
    if len(files) < 2:
        return
    total = sum(spec.num_bytes for specs in files.values() for spec in specs)
    weight_map = {spec.name: file for file, specs in files.items() for spec in specs}
    values = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(values, indent=2) + "\n")


def check_can_write(name: str, dtype: str) -> torch.dtype:
    """The dtype of a source tensor; CheckpointError for one that is not copied."""
    if dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{name}: dtype {dtype} is not copied; it must be one of {', '.join(STORED_DTYPES)}"
        )
    return STORED_DTYPES[dtype]
