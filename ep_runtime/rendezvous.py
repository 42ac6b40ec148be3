"""How ranks find each other: the store that a launcher's ranks share, before any group is made."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from ep_runtime.kernels.errors import ConfigError, first_line
from ep_runtime.launcher_environment import LauncherEnvironment


@dataclass(frozen=True)
class Rendezvous:
    """A store that all ranks share, and this process's place among them.

    store_host: who hosts it, in words. local_rank: None: from the ranks' host names.
    """

    store: Store
    rank: int
    world_size: int
    local_rank: int | None = None
    store_host: str = "the store's host"

    @property
    def hosts_store(self) -> bool:
        """Whether this rank must stay until the others have ended."""
        return self.rank == 0

    def private_store(self, name: str) -> Store:
        """A key space of its own on a connection of its own: a thread may use it while another
        is blocked on `store`."""
        own: Any = PrefixStore(name, self.store)
        clone: Store = own.clone()
        return clone


def rendezvous_from(environment: LauncherEnvironment, timeout_s: float) -> Rendezvous:
    """Connect to the store that the launcher's variables point at; rank 0 hosts it if need be.

    Raises ConfigError where the address is busy or cannot be reached.
    """
    timeout = timedelta(seconds=timeout_s)
    rank, world_size = environment.rank, environment.world_size
    address, port = environment.master_addr, environment.master_port
    if world_size == 1:
        store: Store = HashStore()
    elif address is not None and port is not None:
        is_host = rank == 0 and not environment.agent_hosts_store
        store = _connect(address, port, is_host=is_host, timeout=timeout)
    else:
        store, rank, world_size = _connect_through_mpi(environment, timeout)
    if world_size is None:
        raise ConfigError(
            "PMIX_RANK is set without the world's size; unset MASTER_ADDR and MASTER_PORT, so that "
            "MPI is asked, or start the ranks with torchrun"
        )
    host = "the launcher's store" if environment.agent_hosts_store else "rank 0 (the store's host)"
    return Rendezvous(
        PrefixStore(f"attempt{environment.restart_count}", store),
        rank,
        world_size,
        environment.local_rank,
        host,
    )


def rendezvous_of_default_group() -> Rendezvous:
    """The store of a default group that the caller made, in a key space new to each context."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore("ep_runtime", _store_of_default_group())
    context = store.add(f"contexts_of_rank_{rank}", 1)
    return Rendezvous(
        PrefixStore(f"context{context}", store),
        rank,
        world_size,
        store_host="the store of torch's default group",
    )


def _store_of_default_group() -> Store:
    store: Store | None = dist.distributed_c10d._get_default_store()
    if store is not None:
        return store
    # Made without one (MPI): rank 0 hosts one and tells the others where.
    address = [("", 0)]
    if dist.get_rank() == 0:
        store = TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
        address = [(socket.gethostname(), store.port)]
    dist.broadcast_object_list(address, src=0)
    return store or TCPStore(*address[0], is_master=False, wait_for_workers=False)


def _connect(address: str, port: int, *, is_host: bool, timeout: timedelta) -> Store:
    try:
        return TCPStore(address, port, is_master=is_host, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        problem = "is busy or not an address of this machine" if is_host else "cannot be reached"
        reason = first_line(error)
        raise ConfigError(
            f"MASTER_ADDR ({address}), MASTER_PORT ({port}) {problem}: {reason}; choose another "
            f"MASTER_PORT"
        ) from error


def _connect_through_mpi(
    environment: LauncherEnvironment, timeout: timedelta
) -> tuple[Store, int, int]:
    """Rank 0 hosts the store on a free port and broadcasts where, once, with MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"ranks started by {environment.launcher} find each other through mpi4py, which is "
            f"not usable ({error}); pip install 'ep-runtime[mpi]', or set MASTER_ADDR and "
            f"MASTER_PORT"
        ) from error
    world: Any = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    if rank != environment.rank or environment.world_size not in (None, world_size):
        raise ConfigError(
            f"mpi4py says rank {rank} of {world_size}, the launcher's variables say rank "
            f"{environment.rank} of {environment.world_size}; mpi4py was built for another MPI "
            f"than the one that started this process"
        )
    on_one_host = environment.local_world_size == world_size
    host = "127.0.0.1" if on_one_host else socket.gethostname()
    store: Store | None = None
    port = 0
    if rank == 0:
        hosted = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        store, port = hosted, hosted.port
    host, port = world.bcast((host, port), root=0)
    return store or _connect(host, port, is_host=False, timeout=timeout), rank, world_size


def exchange(
    store: Store,
    text: str,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    check: Callable[[], None],
) -> list[str]:
    """Every rank's text, in rank order; a collective of the world that needs no group.

    Raises what `check` raises while it waits, ConfigError naming the ranks that never came.
    """
    store.set(f"text/{rank}", text)
    keys = [f"text/{r}" for r in range(world_size)]
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        check()
        if time.monotonic() > deadline:
            missing = [r for r in range(world_size) if not store.check([keys[r]])]
            raise ConfigError(
                f"ranks {missing} of {world_size} did not start within {timeout_s:g} s"
            )
        time.sleep(0.01)
    return [store.get(key).decode() for key in keys]
