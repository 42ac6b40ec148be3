"""`ep-runtime run`: start the ranks, or be one."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ep_runtime.launch.json_file import prepare_json_file
from ep_runtime.launch.preflight import check_before_start, check_world_size
from ep_runtime.launch.rank_life import RankCommand, carry_out
from ep_runtime.launch.run_config import load_run_config
from ep_runtime.launch.run_job import REPORT_FILE, run_job
from ep_runtime.launcher_environment import read_launcher_environment


def run_command(name: str, overrides: Sequence[str], json_file: Path | None) -> int:
    """Run a configuration and return the exit status.

    Raises ConfigError, PlanError or CheckpointError before a rank starts, RankFailure after one
    has failed.
    """
    launcher = read_launcher_environment(os.environ)
    config = load_run_config(name, overrides)
    prepare_json_file(json_file, config.output_dir)

    def check() -> None:
        check_world_size(config.parallel, launcher)
        check_before_start(config)

    command = RankCommand(
        name="run",
        parallel=config.parallel,
        output_dir=config.output_dir,
        config_text=config.to_yaml(),
        result_file=REPORT_FILE,
        options={"--json": json_file},
        check=check,
        job=partial(run_job, config, json_file=json_file),
    )
    return carry_out(command, launcher)
