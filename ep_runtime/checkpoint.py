"""Reads the tensors of a safetensors checkpoint, streamed into place.

Only safetensors files are read, and no code of a checkpoint is run.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ep_runtime.kernels.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MODELOPT_FILE = "hf_quant_config.json"
MAX_LISTED = 8  # names in one message
PICKLE_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
FLOAT_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# With those of which the tensors of quantised weights are.
STORED_DTYPES = {
    **FLOAT_DTYPES,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
# A tensor is copied in pieces, and a file is mapped anew after so many bytes: touched pages of a
# mapping count as this process's memory until it is unmapped.
PIECE_BYTES = 16 << 20
MAPPED_BYTES = 64 << 20


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the file's header declares it; dtype in safetensors' spelling (`BF16`)."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json as a dict, with modelopt's file beside it, where that is all that says how the
    checkpoint is quantised, as its `quantization_config`.

    CheckpointError where config.json is not there, or a file is not a JSON object.
    """
    path = Path(directory) / "config.json"
    if not Path(directory).is_dir():
        raise CheckpointError(
            f"checkpoint {str(directory)!r} is not a directory; give a local one that holds "
            f"config.json and {SINGLE_FILE}"
        )
    config = _read_object(path)
    modelopt = Path(directory) / MODELOPT_FILE
    if config.get("quantization_config") is None and modelopt.is_file():
        keys = _read_object(modelopt).get("quantization")
        if not isinstance(keys, dict):
            raise CheckpointError(f"{modelopt}: quantization must be a mapping; got {keys!r}")
        config["quantization_config"] = {"quant_method": "modelopt", **keys}
    return config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return values


class CheckpointReader:
    """The tensors of a checkpoint directory, read by name or by a leading index of one.

    One file is mapped at a time: reading in the order of files is cheapest.
    Raises CheckpointError: no safetensors files, an index that does not fit them, a damaged file.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.tensors: Mapping[str, TensorInfo] = _read_headers(self.directory)
        self.bytes_read = 0
        self._open_file: str | None = None
        self._handle: Any = None
        self._mapped_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the open file; a later read maps it again."""
        if self._handle is not None:
            self._handle.__exit__(None, None, None)
        self._handle, self._open_file, self._mapped_bytes = None, None, 0

    def digest(self) -> str:
        """A hash over every tensor's name, shape and dtype; 64 hexadecimal digits."""
        listing = sorted((name, info.shape, info.dtype) for name, info in self.tensors.items())
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()

    def num_bytes(self, name: str) -> int:
        """A tensor's bytes in its file."""
        info = self.tensors[name]
        return prod(info.shape) * STORED_DTYPES[info.dtype].itemsize

    def check(
        self,
        name: str,
        *shapes: tuple[int, ...],
        dtypes: Collection[torch.dtype] = tuple(FLOAT_DTYPES.values()),
    ) -> None:
        """CheckpointError where a tensor's shape or dtype is none of those that the model wants."""
        info = self.tensors[name]
        if info.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{name}: shape {list(info.shape)} in {info.file}, wanted {wanted}"
            )
        if STORED_DTYPES.get(info.dtype) not in dtypes:
            known = [spelt for spelt, dtype in STORED_DTYPES.items() if dtype in dtypes]
            raise CheckpointError(
                f"{name}: dtype {info.dtype} in {info.file}, wanted one of {', '.join(known)}"
            )

    def read_into(self, name: str, destination: Tensor, index: int | None = None) -> None:
        """Copy a tensor, or `tensor[index]`, into `destination`, piece by piece.

        destination: any device, dtype and strides; its elements in row-major order are the
        source's. Casts to its dtype.
        """
        info = self.tensors[name]
        shape = info.shape if index is None else info.shape[1:]
        item_bytes = STORED_DTYPES[info.dtype].itemsize
        row_bytes = item_bytes * destination[:1].numel() if destination.ndim else item_bytes
        can_cut = destination.ndim > 0 and destination.shape[0] == shape[0]
        rows = max(1, PIECE_BYTES // max(row_bytes, 1)) if can_cut else None
        try:
            if rows is None or rows >= shape[0]:
                self._copy(name, info, destination, () if index is None else (index,))
                return
            for start in range(0, shape[0], rows):
                piece = slice(start, min(start + rows, shape[0]))
                where = (piece,) if index is None else (index, piece)
                self._copy(name, info, destination[piece], where)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{info.file}: {name} cannot be read: {error}") from error

    def _copy(
        self, name: str, info: TensorInfo, destination: Tensor, where: tuple[int | slice, ...]
    ) -> None:
        num_bytes = destination.numel() * STORED_DTYPES[info.dtype].itemsize
        if self._open_file != info.file or self._mapped_bytes + num_bytes > MAPPED_BYTES:
            self.close()
            opened: Any = safe_open(self.directory / info.file, framework="pt")
            self._handle = opened.__enter__()
            self._open_file = info.file
        handle = self._handle
        tensor = handle.get_slice(name)[where] if where else handle.get_tensor(name)
        destination.copy_(tensor.reshape(destination.shape))
        self._mapped_bytes += num_bytes
        self.bytes_read += num_bytes


def _read_headers(directory: Path) -> dict[str, TensorInfo]:
    if (directory / INDEX_FILE).exists():
        return _read_indexed_headers(directory)
    if (directory / SINGLE_FILE).exists():
        return _read_header(directory, SINGLE_FILE)
    for name in PICKLE_FILES:
        if (directory / name).exists():
            raise CheckpointError(
                f"{directory}: holds only {name}, and pickle files are never read; save the model "
                "again with save_pretrained, which writes safetensors"
            )
    raise CheckpointError(f"{directory}: holds neither {INDEX_FILE} nor {SINGLE_FILE}")


def _read_indexed_headers(directory: Path) -> dict[str, TensorInfo]:
    path = directory / INDEX_FILE
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        entries = weight_map.items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}") from error
    for name, file in entries:
        if not isinstance(file, str) or not file:
            raise CheckpointError(
                f"{path}: weight_map gives {name} the value {file!r}; it must be a file's name"
            )
    files = sorted(set(weight_map.values()))
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise CheckpointError(
            f"{INDEX_FILE}: names a file outside the checkpoint: {first_names(outside)}"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= _read_header(directory, file)
    missing = sorted(n for n, f in weight_map.items() if n not in tensors or tensors[n].file != f)
    extra = sorted(n for n in tensors if n not in weight_map)
    if missing or extra:
        faults = [f"lists {first_names(missing)}, not in the file it names"] if missing else []
        faults += [f"does not list {first_names(extra)}"] if extra else []
        raise CheckpointError(f"{INDEX_FILE}: " + "; ".join(faults))
    return tensors


def _read_header(directory: Path, file: str) -> dict[str, TensorInfo]:
    try:
        with safe_open(directory / file, framework="pt") as handle:
            tensors = {}
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                view = handle.get_slice(name)
                tensors[name] = TensorInfo(file, tuple(view.get_shape()), view.get_dtype())
            return tensors
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{directory / file}: cannot be read: {error}") from error


def first_names(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
