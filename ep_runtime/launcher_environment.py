"""Which rank this process is, read from what its launcher left in the environment.

The families, first match wins: torchrun's, Open MPI's, PMIx/PMI (MPICH, Intel MPI), SLURM's. Two
that contradict are an error. Two things look like a contradiction and are none:

- torchrun started by another launcher, one agent a node: the other launcher's variables describe
  the agents (GROUP_RANK of GROUP_WORLD_SIZE).
- mpirun or torchrun inside a SLURM job: SLURM's variables describe the batch step or the daemons.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ep_runtime.kernels.errors import ConfigError


@dataclass(frozen=True)
class LauncherEnvironment:
    """One process's place among the ranks.

    launcher: torchrun | open_mpi | pmi | slurm | none. world_size: None where only MPI itself
    knows it (PMIx). local_rank: None where the launcher does not say; then it follows from the
    ranks' host names. master_addr, master_port: where rank 0 (or the agent) hosts the store, both
    or neither. restart_count, agent_hosts_store: torchrun's.
    """

    launcher: str
    rank: int
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    master_addr: str | None = None
    master_port: int | None = None
    restart_count: int = 0
    agent_hosts_store: bool = False


@dataclass(frozen=True)
class _Family:
    launcher: str
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]


@dataclass(frozen=True)
class _Found:
    """A variable and its value."""

    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name} ({self.value})"


_TORCHRUN = _Family("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",))
_OPEN_MPI = _Family(
    "open_mpi",
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
_PMI = _Family(
    "pmi",
    ("PMIX_RANK", "PMI_RANK"),
    ("PMI_SIZE",),
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
_SLURM = _Family(
    "slurm",
    ("SLURM_PROCID",),
    ("SLURM_NTASKS", "SLURM_NPROCS"),
    ("SLURM_LOCALID",),
    (),
)
_FAMILIES = (_TORCHRUN, _OPEN_MPI, _PMI, _SLURM)


def read_launcher_environment(environ: Mapping[str, str]) -> LauncherEnvironment:
    """Find this process's rank in `environ`; with no launcher's variables, rank 0 of 1.

    Raises ConfigError naming the variables and their values when two contradict, one is not a
    number or out of range, or a rank comes without the world's size.
    """
    ranks = ((family, _first(environ, family.rank)) for family in _FAMILIES)
    present = [(family, rank) for family, rank in ranks if rank is not None]
    if not present:
        return LauncherEnvironment("none", 0, 1, 0, 1)
    chosen, rank = present[0]
    world_size = _first(environ, chosen.world_size)
    for other, other_rank in present[1:]:
        other_size = _first(environ, other.world_size)
        if _describes_daemons(environ, chosen, other, other_rank, other_size):
            continue
        _refuse_contradiction(rank, other_rank)
        _refuse_contradiction(world_size, other_size)
        world_size = world_size or other_size
    if world_size is None and "PMIX_RANK" not in environ:
        raise ConfigError(
            f"{rank} is set without the world's size; set {chosen.world_size[0]}, or start the "
            f"ranks with torchrun or mpirun"
        )
    local_rank = _first(environ, chosen.local_rank)
    local_world_size = _first(environ, chosen.local_world_size)
    _refuse_out_of_range(rank, world_size)
    _refuse_out_of_range(local_rank, local_world_size)
    is_torchrun = chosen is _TORCHRUN
    address, port = _master(environ, chosen, world_size)
    return LauncherEnvironment(
        launcher=chosen.launcher,
        rank=rank.value,
        world_size=None if world_size is None else world_size.value,
        local_rank=None if local_rank is None else local_rank.value,
        local_world_size=None if local_world_size is None else local_world_size.value,
        master_addr=address,
        master_port=port,
        restart_count=_integer(environ, "TORCHELASTIC_RESTART_COUNT") or 0 if is_torchrun else 0,
        agent_hosts_store=is_torchrun and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def first_host(node_list: str) -> str:
    """The first host of a SLURM node list. Example: "gpu[007-010,12],cpu1" gives "gpu007"."""
    head, bracket, rest = node_list.partition("[")
    if not bracket or "," in head:
        return head.split(",")[0]
    inside, _, tail = rest.partition("]")
    number = inside.replace("-", ",").split(",")[0]
    return head + number + tail.split(",")[0]


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} ({text!r}) must be a whole number") from None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> _Found | None:
    for name in names:
        value = _integer(environ, name)
        if value is not None:
            return _Found(name, value)
    return None


def _describes_daemons(
    environ: Mapping[str, str],
    chosen: _Family,
    other: _Family,
    rank: _Found,
    world_size: _Found | None,
) -> bool:
    """Whether `other`'s variables are those of the agents or daemons that started the ranks."""
    started_by_agent = chosen is _TORCHRUN and "TORCHELASTIC_RUN_ID" in environ
    if other is _SLURM:
        return started_by_agent or chosen in (_OPEN_MPI, _PMI)
    if not started_by_agent:
        return False
    agents = (_integer(environ, "GROUP_RANK"), _integer(environ, "GROUP_WORLD_SIZE"))
    return agents == (rank.value, world_size.value if world_size else agents[1])


def _refuse_contradiction(one: _Found | None, other: _Found | None) -> None:
    if one and other and one.value != other.value:
        raise ConfigError(
            f"{one} and {other} contradict each other; unset the variables of the launcher that "
            f"did not start this process"
        )


def _refuse_out_of_range(rank: _Found | None, size: _Found | None) -> None:
    if rank and rank.value < 0:
        raise ConfigError(f"{rank} must be 0 or more")
    if size and size.value < 1:
        raise ConfigError(f"{size} must be 1 or more")
    if rank and size and rank.value >= size.value:
        raise ConfigError(f"{rank} must be less than {size}")


def _master(
    environ: Mapping[str, str], family: _Family, world_size: _Found | None
) -> tuple[str | None, int | None]:
    """MASTER_ADDR and MASTER_PORT; under SLURM by default the first host and a port by job id."""
    address, port = environ.get("MASTER_ADDR") or None, _integer(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT ({port}) must be in [1, 65535]")
    if family is _SLURM:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
        nodes = nodes or environ.get("SLURM_NODELIST")
        job = _integer(environ, "SLURM_JOB_ID") or _integer(environ, "SLURM_JOBID")
        address = address or (first_host(nodes) if nodes else None)
        port = port or (20000 + job % 10000 if job is not None else None)
    alone = world_size is not None and world_size.value == 1
    needs_both = family in (_TORCHRUN, _SLURM) and not alone
    if needs_both and (address is None or port is None):
        raise ConfigError(
            f"MASTER_ADDR ({address}) and MASTER_PORT ({port}) must both be set for "
            f"{family.launcher}'s ranks to find each other"
        )
    return (address, port) if address and port else (None, None)
