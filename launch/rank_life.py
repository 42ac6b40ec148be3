"""How a command that ranks carry out is run: by starting them, or as one of them."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import CheckpointError, ConfigError, PlanError, RankFailure
from ep_runtime.launch.rank_terminal import Terminal, keep_traceback, tell
from ep_runtime.launch.starter import STARTED_VARIABLE, Interrupted, record_failure, start_ranks
from ep_runtime.launcher_environment import LauncherEnvironment


@dataclass(frozen=True)
class RankCommand:
    """`ep-runtime NAME` as the processes of its ranks see it.

    output_dir: has config_text as config.yaml, a log for each rank, and result_file, a JSON object
    with `passed` that the job leaves on rank 0. options: of the command line, passed on to ranks
    that are started. check: raises what would make every rank fail. job: all that a rank does once
    the ranks have met; whether every check passed.
    """

    name: str
    parallel: ParallelConfig
    output_dir: str
    config_text: str
    result_file: str
    options: Mapping[str, Path | None]
    check: Callable[[], None]
    job: Callable[[EPContext], bool]

    @property
    def folder(self) -> Path:
        return Path(self.output_dir).expanduser()


def carry_out(command: RankCommand, launcher: LauncherEnvironment) -> int:
    """Be a launcher's rank or the only one, else start all; the exit status.

    Raises ConfigError, PlanError or CheckpointError before a rank starts, RankFailure after one
    that was started has failed.
    """
    if launcher.launcher != "none" or command.parallel.world_size == 1:
        return _be_a_rank(command, launcher)
    command.check()
    _prepare_folder(command, is_writer=True)
    return _start(command)


def _prepare_folder(command: RankCommand, *, is_writer: bool) -> None:
    """Make output_dir; one process also writes the configuration, and drops an earlier result."""
    folder = command.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if is_writer:
            (folder / "config.yaml").write_text(command.config_text)
            (folder / command.result_file).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"output_dir {folder}: cannot be written: {error}") from None


def _start(command: RankCommand) -> int:
    arguments = [command.name, str(command.folder / "config.yaml")]
    for option, path in command.options.items():
        if path is not None:
            arguments += [option, str(path)]
    try:
        start_ranks(arguments, world_size=command.parallel.world_size)
    except RankFailure as error:
        raise RankFailure(f"{error}; logs of the ranks: {command.folder}") from None
    except Interrupted as interrupted:
        typer.echo(f"ep-runtime: {interrupted}", err=True)
        return interrupted.exit_status
    result = json.loads((command.folder / command.result_file).read_text())
    return 0 if result["passed"] else 1


def _be_a_rank(command: RankCommand, launcher: LauncherEnvironment) -> int:
    """Run this rank to its end and return its exit status.

    Rank 0 writes to the terminal, the others to output_dir/rank{r}.log. Of an error that one
    rank raises, that rank tells the terminal, unless `carry_out` started it, which then does.
    """
    is_started = STARTED_VARIABLE in os.environ
    terminal = Terminal()
    ctx: EPContext | None = None
    try:
        if not is_started:
            command.check()
        # Ranks that `carry_out` started are reading the file that it wrote.
        _prepare_folder(command, is_writer=launcher.rank == 0 and not is_started)
        if launcher.rank == 0:
            (command.folder / "rank0.log").unlink(missing_ok=True)
        else:
            terminal.redirect_to(command.folder / f"rank{launcher.rank}.log")
        with init_distributed(command.parallel) as ctx:
            passed = command.job(ctx)
    except Exception as error:
        record_failure(error)
        keep_traceback(command.output_dir, launcher.rank)
        if not is_started:
            tell(terminal, error, launcher.rank, ctx)
        found_early = ctx is None and isinstance(error, ConfigError | PlanError | CheckpointError)
        return 2 if found_early else 1
    # A failed check is told by the result; to a launcher, a rank that ends with 1 has crashed.
    return 0 if passed or is_started else 1
