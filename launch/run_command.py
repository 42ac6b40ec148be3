"""`ep-runtime run`: start the ranks, or be one."""

import os
from collections.abc import Sequence
from pathlib import Path

import typer

from ep_runtime.kernels.errors import RankFailure
from ep_runtime.launch.json_file import prepare_json_file
from ep_runtime.launch.preflight import check_before_start, prepare_output_dir
from ep_runtime.launch.run_config import RunConfig, load_run_config
from ep_runtime.launch.run_job import REPORT_FILE, read_report, run_rank
from ep_runtime.launch.starter import Interrupted, start_ranks
from ep_runtime.launcher_environment import read_launcher_environment


def run_command(name: str, overrides: Sequence[str], json_file: Path | None) -> int:
    """Run a configuration and return the exit status.

    Raises ConfigError, PlanError or CheckpointError before a rank starts, RankFailure after one
    has failed.
    """
    launcher = read_launcher_environment(os.environ)
    config = load_run_config(name, overrides)
    prepare_json_file(json_file, config.output_dir)
    if launcher.launcher != "none" or config.parallel.world_size == 1:
        return run_rank(config, launcher, json_file)
    check_before_start(config)
    folder = prepare_output_dir(config, write_config=True)
    return _start(config, folder, json_file)


def _start(config: RunConfig, folder: Path, json_file: Path | None) -> int:
    (folder / REPORT_FILE).unlink(missing_ok=True)
    arguments = ["run", str(folder / "config.yaml")]
    if json_file is not None:
        arguments += ["--json", str(json_file)]
    try:
        start_ranks(arguments, world_size=config.parallel.world_size)
    except RankFailure as error:
        raise RankFailure(f"{error}; logs of the ranks: {folder}") from None
    except Interrupted as interrupted:
        typer.echo(f"ep-runtime: {interrupted}", err=True)
        return interrupted.exit_status
    return 0 if read_report(folder)["passed"] else 1
