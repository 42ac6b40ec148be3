"""Which rank a process is, from what launchers leave in the environment."""

import pytest

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launcher_environment import (
    LauncherEnvironment,
    first_host,
    read_launcher_environment,
)

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = MASTER | {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[007-008]",
}
AGENT = {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("launcher", "environ", "address"),
    [
        pytest.param("torchrun", TORCHRUN, ("10.0.0.1", 29500), id="torchrun"),
        pytest.param("open_mpi", OPEN_MPI, (None, None), id="Open MPI"),
        pytest.param("pmi", PMI, (None, None), id="PMI"),
        pytest.param("slurm", SLURM, ("gpu007", 23456), id="SLURM derives an address"),
        pytest.param("slurm", SLURM | MASTER, ("10.0.0.1", 29500), id="SLURM with an address"),
        pytest.param("open_mpi", OPEN_MPI | MASTER, ("10.0.0.1", 29500), id="MPI with an address"),
        pytest.param("torchrun", TORCHRUN | OPEN_MPI, ("10.0.0.1", 29500), id="two that agree"),
    ],
)
def test_a_launcher_gives_rank_and_local_rank(
    launcher: str, environ: dict[str, str], address: tuple[str | None, int | None]
) -> None:
    found = read_launcher_environment(environ)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == (launcher, 5, 8, 1)
    assert (found.master_addr, found.master_port) == address
    assert found.local_world_size == (None if launcher == "slurm" else 4)


def test_without_a_launcher_there_is_one_rank() -> None:
    alone = LauncherEnvironment("none", 0, 1, 0, 1)
    assert read_launcher_environment({}) == alone
    assert read_launcher_environment({"PMI_SIZE": "4", "WORLD_SIZE": "4"} | MASTER) == alone


def test_an_allocation_without_srun_is_not_a_rank() -> None:
    allocation = without(SLURM, "SLURM_PROCID", "SLURM_LOCALID")
    assert read_launcher_environment(allocation).launcher == "none"


def test_pmi_alone_leaves_the_local_rank_to_the_host_names() -> None:
    found = read_launcher_environment({"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert (found.rank, found.world_size, found.local_rank) == (1, 2, None)


def test_pmix_leaves_the_world_size_to_mpi_or_slurm() -> None:
    assert read_launcher_environment({"PMIX_RANK": "5"}).world_size is None
    assert read_launcher_environment(OPEN_MPI | {"PMIX_RANK": "5"}).world_size == 8


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        pytest.param(
            TORCHRUN | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"},
            ["RANK (5)", "OMPI_COMM_WORLD_RANK (2)"],
            id="ranks of torchrun and Open MPI",
        ),
        pytest.param(
            TORCHRUN | PMI | {"PMI_SIZE": "6"},
            ["WORLD_SIZE (8)", "PMI_SIZE (6)"],
            id="sizes of torchrun and PMI",
        ),
        pytest.param(
            OPEN_MPI | {"PMI_RANK": "0", "PMI_SIZE": "8"},
            ["OMPI_COMM_WORLD_RANK (5)", "PMI_RANK (0)"],
            id="ranks of Open MPI and PMI",
        ),
        pytest.param(
            TORCHRUN | SLURM | {"SLURM_PROCID": "1"},
            ["RANK (5)", "SLURM_PROCID (1)"],
            id="ranks of torchrun's variables and SLURM",
        ),
        pytest.param(
            TORCHRUN | AGENT | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3"},
            ["RANK (5)", "OMPI_COMM_WORLD_RANK (3)"],
            id="an MPI rank that is no agent's",
        ),
        pytest.param(without(TORCHRUN, "WORLD_SIZE"), ["RANK (5)", "WORLD_SIZE"], id="no size"),
        pytest.param(
            without(TORCHRUN, "MASTER_PORT"),
            ["MASTER_ADDR (10.0.0.1)", "MASTER_PORT"],
            id="no port",
        ),
        pytest.param(TORCHRUN | {"RANK": "8"}, ["RANK (8)", "WORLD_SIZE (8)"], id="rank too big"),
        pytest.param(TORCHRUN | {"RANK": "-1"}, ["RANK (-1)"], id="rank below 0"),
        pytest.param(TORCHRUN | {"RANK": "one"}, ["RANK ('one')"], id="rank is no number"),
        pytest.param(
            TORCHRUN | {"LOCAL_RANK": "4"}, ["LOCAL_RANK (4)", "LOCAL_WORLD_SIZE (4)"], id="local"
        ),
        pytest.param(TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT (70000)"], id="port"),
    ],
)
def test_what_contradicts_is_an_error_naming_both(
    environ: dict[str, str], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_launcher_environment(environ)
    assert all(text in str(caught.value) for text in named), caught.value


@pytest.mark.parametrize(
    "outer",
    [
        pytest.param({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, id="srun torchrun"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, id="torchrun in a batch script"),
        pytest.param(
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, id="mpirun torchrun"
        ),
    ],
)
def test_what_started_torchrun_agents_does_not_contradict_their_ranks(
    outer: dict[str, str],
) -> None:
    found = read_launcher_environment(TORCHRUN | AGENT | outer)
    assert (found.launcher, found.rank, found.local_rank) == ("torchrun", 5, 1)


def test_slurm_variables_around_mpirun_describe_its_daemons() -> None:
    found = read_launcher_environment(PMI | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    assert (found.launcher, found.rank, found.world_size) == ("pmi", 5, 8)


def test_torchrun_restarts_and_agent_store_are_read() -> None:
    agent = {"TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = read_launcher_environment(TORCHRUN | agent)
    assert (found.restart_count, found.agent_hosts_store) == (3, True)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("gpu[007-010,12],cpu1", "gpu007"),
        ("gpu[3,7]", "gpu3"),
        ("login1,gpu[1-2]", "login1"),
        ("node-a", "node-a"),
        ("rack[1-2]-x,rack9", "rack1-x"),
    ],
)
def test_first_host_expands_a_slurm_node_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host
