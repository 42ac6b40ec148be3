"""Starting the command line as its users do: alone, under torchrun, under mpirun."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PROGRAM = ("-m", "ep_runtime.launch")
FAULTY_PROGRAM = (str(Path(__file__).with_name("faulty_run.py")),)
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PMI", "OMPI_", "SLURM_")


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without any launcher's variables and without Triton's interpreter."""
    env = {k: v for k, v in os.environ.items() if not k.startswith((*_LAUNCHERS, "TRITON_"))}
    path = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return {**env, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **extra}


def launcher_command(launcher: str, num_ranks: int, program: Sequence[str]) -> list[str]:
    """The command line before `run`: launcher is none, torchrun or mpirun."""
    if launcher == "none":
        return [sys.executable, *program]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        return [
            *torchrun,
            str(num_ranks),
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            *program,
        ]
    return [str(BIN / "mpirun"), "-n", str(num_ranks), sys.executable, *program]


def run_to_end(
    arguments: Sequence[str],
    cwd: Path,
    *,
    launcher: str = "none",
    num_ranks: int = 1,
    program: Sequence[str] = PROGRAM,
    **extra_environment: str,
) -> subprocess.CompletedProcess[str]:
    """The finished process, its output captured; kills it and fails after 200 s."""
    return subprocess.run(
        [*launcher_command(launcher, num_ranks, program), *arguments],
        cwd=cwd,
        env=clean_environment(**extra_environment),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
