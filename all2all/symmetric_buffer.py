"""Memory of every rank of a group that every other rank can write to: one size, one layout.

Three forms of one value:

- CUDA between processes: torch's symmetric memory, peers mapped over NVLink (or the same device).
- Host memory between processes of one host: anonymous shared memory that the peers open through
  /proc while its owner still has it open. It has no name, so a killed rank leaves nothing behind.
- R virtual ranks in one process: plain tensors, for stress tests.

All are zeroed, and no rank returns before all ranks' memory is there.
"""

import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import gather_integers, gather_texts
from ep_runtime.kernels.errors import ConfigError, first_line

_ALIGNMENT = 256


@dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's memory, and where this process reaches every rank's.

    memory: [num_bytes] uint8, 256-byte aligned. addresses: of each rank's memory, in rank order,
    own included. mappings: what must live as long as the addresses are used.
    """

    memory: Tensor
    addresses: tuple[int, ...]
    mappings: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        # The kernels store 16 bytes at a time on the strength of this.
        misaligned = [rank for rank, a in enumerate(self.addresses) if a % _ALIGNMENT]
        if misaligned:
            raise RuntimeError(f"memory of EP ranks {misaligned} is not {_ALIGNMENT}-byte aligned")


def open_symmetric_buffer(group: EPGroup, num_bytes: int) -> SymmetricBuffer:
    """The form for the group's device; a collective of the group.

    Raises ConfigError on all ranks where one has no memory left or cannot reach another's.
    """
    if group.process_group is None:
        return virtual_buffers(1, num_bytes, group.device)[0]
    if group.device.type == "cuda":
        return _open_cuda_buffer(group, group.process_group, num_bytes)
    return _open_host_buffer(group, num_bytes)


def virtual_buffers(
    num_ranks: int, num_bytes: int, device: torch.device
) -> tuple[SymmetricBuffer, ...]:
    """The memory of `num_ranks` virtual ranks of this process, on one device."""
    memories: list[Tensor] = []
    for _ in range(num_ranks):
        whole = torch.zeros(num_bytes + _ALIGNMENT, dtype=torch.uint8, device=device)
        start = -whole.data_ptr() % _ALIGNMENT
        memories.append(whole[start : start + num_bytes])
    addresses = tuple(memory.data_ptr() for memory in memories)
    return tuple(SymmetricBuffer(memory, addresses, tuple(memories)) for memory in memories)


def _open_cuda_buffer(
    group: EPGroup, process_group: dist.ProcessGroup, num_bytes: int
) -> SymmetricBuffer:
    import torch.distributed._symmetric_memory as symmetric_memory

    # Before anybody waits for a rank that has no memory in torch's own rendezvous.
    fault = ""
    try:
        memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=group.device)
    except RuntimeError as error:
        fault = f"cannot allocate {num_bytes} bytes: {first_line(error)}"
    _refuse_faults(
        gather_texts(fault, group),
        "memory for its slots on every GPU",
        "lower parallel.max_tokens_per_rank or use all2all_backend: all_to_all",
    )
    try:
        handle = symmetric_memory.rendezvous(memory, process_group)
        bases = [int(base) for base in handle.buffer_ptrs]
        # The tensor may lie behind the start of its allocation, on every rank alike.
        offset = memory.data_ptr() - bases[group.rank]
        memory.zero_()
        torch.cuda.synchronize(group.device)
    except RuntimeError as error:
        fault = first_line(error)
    _refuse_faults(gather_texts(fault, group), "peer access between the GPUs of all ranks")
    addresses = tuple(base + offset for base in bases)
    return SymmetricBuffer(memory, addresses, (handle,))


def _open_host_buffer(group: EPGroup, num_bytes: int) -> SymmetricBuffer:
    # The token before the buffer proves that what a peer opened is this rank's memory.
    token = secrets.token_bytes(16)
    own_file = os.memfd_create("ep_runtime")
    files = [own_file]
    try:
        os.ftruncate(own_file, _ALIGNMENT + num_bytes)
        own = mmap.mmap(own_file, _ALIGNMENT + num_bytes)
        own[: len(token)] = token
        notes = gather_texts(f"{_host_id()} {os.getpid()} {own_file} {token.hex()}", group)
        mappings, fault = [], ""
        for rank, note in enumerate(notes):
            mapping = own if rank == group.rank else _map_peer(note, _ALIGNMENT + num_bytes, files)
            if mapping is None:
                fault = f"it cannot open the memory of EP rank {rank}"
                break
            mappings.append(mapping)
        # Every rank has opened every memory, or says so, before the files are closed.
        _refuse_faults(gather_texts(fault, group), "all ranks of an EP group on one host")
    finally:
        for file in files:
            os.close(file)
    whole = [torch.frombuffer(mapping, dtype=torch.uint8) for mapping in mappings]
    addresses = tuple(memory.data_ptr() + _ALIGNMENT for memory in whole)
    gather_integers(0, group)
    return SymmetricBuffer(whole[group.rank][_ALIGNMENT:], addresses, tuple(whole))


def _map_peer(note: str, num_bytes: int, files: list[int]) -> mmap.mmap | None:
    """A peer's memory from what it wrote about it; None where it cannot be reached."""
    host_id, process_id, file, token = note.split()
    if host_id != _host_id():
        return None
    try:
        files.append(os.open(f"/proc/{process_id}/fd/{file}", os.O_RDWR))
        mapping = mmap.mmap(files[-1], num_bytes)
    except (OSError, ValueError):
        return None
    return mapping if mapping[:16] == bytes.fromhex(token) else None


def _host_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _refuse_faults(
    faults: tuple[str, ...], required: str, cure: str = "use all2all_backend: all_to_all"
) -> None:
    for rank, fault in enumerate(faults):
        if fault:
            raise ConfigError(
                f"all2all_backend symm_mem needs {required}; EP rank {rank}: {fault}; {cure}"
            )
