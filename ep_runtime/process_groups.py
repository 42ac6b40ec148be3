"""Which device a rank has, and the process groups of the EP, TP and DP layout."""

import ctypes
import json
import socket
from dataclasses import dataclass
from datetime import timedelta
from math import lcm
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ep_runtime.config import ParallelConfig
from ep_runtime.disagreement import disagreement
from ep_runtime.failure import FailureWatch
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.rendezvous import Rendezvous, exchange


@dataclass(frozen=True)
class ProcessPlace:
    """Where this process runs.

    group_backend: of the process groups: "cpu:gloo,cuda:nccl", or "gloo" on a CPU and where ranks
    share a GPU, which NCCL refuses.
    """

    device: torch.device
    group_backend: str


def place_process(
    parallel: ParallelConfig, rendezvous: Rendezvous, watch: FailureWatch, timeout_s: float
) -> ProcessPlace:
    """Choose the device by the local rank; a collective of the world that needs no group.

    Raises ConfigError on every rank where ranks disagree about the configuration or the kind of
    device, and where `device: cuda` finds none.
    """
    rank, world_size = rendezvous.rank, rendezvous.world_size

    def gather(name: str, text: str) -> list[str]:
        return exchange(
            PrefixStore(name, rendezvous.store),
            text,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            check=watch.check,
        )

    config = parallel.model_dump() | {"device": _device_type(parallel.device)}
    _refuse_disagreement(gather("parallel", json.dumps(config)))
    hosts = gather("host", _host_identity())
    if config["device"] == "cpu":
        return ProcessPlace(torch.device("cpu"), "gloo")
    local_rank = rendezvous.local_rank
    if local_rank is None:
        local_rank = hosts[:rank].count(hosts[rank])
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    in_use = gather("device", f"{hosts[rank]} {uuid}")
    can_use_nccl = len(set(in_use)) == world_size and dist.is_nccl_available()
    return ProcessPlace(device, "cpu:gloo,cuda:nccl" if can_use_nccl else "gloo")


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups; None where a group has one rank.

    step: the smallest that holds whole EP groups and whole TP groups; it agrees on row counts.
    world: of all ranks.
    """

    ep: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    step: dist.ProcessGroup | None
    step_size: int
    world: dist.ProcessGroup | None

    def distinct(self) -> list[dist.ProcessGroup]:
        """Each group once."""
        groups = [self.ep, self.tp, self.step, self.world]
        return list({id(group): group for group in groups if group is not None}.values())


def make_process_groups(parallel: ParallelConfig, rank: int, backend: str) -> ProcessGroups:
    """Make the groups of all blocks of the world, each rank keeping its own; a collective."""
    timeout = timedelta(seconds=parallel.timeout_s)
    own_by_size: dict[int, dist.ProcessGroup | None] = {1: None}

    def block(size: int) -> dist.ProcessGroup | None:
        if size not in own_by_size:
            for start in range(0, parallel.world_size, size):
                members = list(range(start, start + size))
                group = dist.new_group(members, timeout=timeout, backend=backend)
                if rank in members:
                    own_by_size[size] = group
        return own_by_size[size]

    step_size = lcm(parallel.ep_size, parallel.tp_size)
    return ProcessGroups(
        block(parallel.ep_size),
        block(parallel.tp_size),
        block(step_size),
        step_size,
        block(parallel.world_size),
    )


def abort_communicators(groups: ProcessGroups) -> None:
    """Wake whoever is blocked in an NCCL collective of these groups; gloo has nothing to abort."""
    for group in groups.distinct():
        if "nccl" in dist.get_backend_config(group):
            group._get_backend(torch.device("cuda")).abort()


def never_destroy(groups: ProcessGroups) -> None:
    """After a failure: keep these and the default group, also past the interpreter's end.

    A gloo group waits in its destructor for collectives that may never complete; without this the
    process would not end, or not with its own exit status.
    """
    default = [dist.group.WORLD] if dist.is_initialized() else []
    for group in [*groups.distinct(), *default]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _device_type(device: str) -> str:
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError("device: cuda was asked for and torch finds no CUDA device")
    if device == "auto":
        return "cuda" if has_cuda else "cpu"
    return device


def _host_identity() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot_id.read_text().strip() if boot_id.exists() else "")


def _refuse_disagreement(configs: list[str]) -> None:
    parsed = [json.loads(text) for text in configs]
    for key in parsed[0]:
        shown = disagreement([str(config[key]) for config in parsed], range(len(parsed)))
        if shown is not None:
            raise ConfigError(f"ranks disagree about parallel.{key}: {shown}")
