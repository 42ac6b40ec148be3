"""`ep-runtime bench`: start the ranks, or be one."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from ep_runtime.all2all.registry import backend_names
from ep_runtime.kernels.errors import ConfigError, EPRuntimeError, PlanError
from ep_runtime.kernels.registry import experts_class
from ep_runtime.launch.bench_config import BenchConfig, load_bench_config
from ep_runtime.launch.bench_contender import candidates_of, plan_contender, reason_of
from ep_runtime.launch.bench_job import RECORD_FILE, run_job
from ep_runtime.launch.bench_plot import prepare_plot_file
from ep_runtime.launch.json_file import prepare_json_file
from ep_runtime.launch.preflight import device_type_of, interpret_if_needed
from ep_runtime.launch.rank_life import RankCommand, carry_out
from ep_runtime.launcher_environment import LauncherEnvironment, read_launcher_environment
from ep_runtime.machine import Machine


def bench_command(
    name: str | None,
    options: Mapping[str, object],
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    """Measure what a file and the options say, and return the exit status.

    Raises ConfigError or PlanError before a rank starts, RankFailure after one has failed.
    """
    launcher = read_launcher_environment(os.environ)
    config = _with_ranks_of(launcher, load_bench_config(name, options))
    prepare_json_file(json_file, config.output_dir)
    prepare_plot_file(plot_file, config.output_dir)
    command = RankCommand(
        name="bench",
        parallel=config.parallel(),
        output_dir=config.output_dir,
        config_text=config.to_yaml(),
        result_file=RECORD_FILE,
        options={"--json": json_file, "--plot": plot_file},
        check=partial(check_before_start, config),
        job=partial(run_job, config, json_file=json_file, plot_file=plot_file),
    )
    return carry_out(command, launcher)


def _with_ranks_of(launcher: LauncherEnvironment, config: BenchConfig) -> BenchConfig:
    """A launcher's ranks are all measured; a number that was asked for must be theirs."""
    started = launcher.world_size
    if launcher.launcher == "none" or started is None or started == config.ranks:
        return config
    if "ranks" in config.model_fields_set:
        raise ConfigError(
            f"--ranks ({config.ranks}) must equal the {started} ranks that {launcher.launcher} "
            f"started; change either or leave --ranks out"
        )
    return config.model_copy(update={"ranks": started})


def check_before_start(config: BenchConfig) -> None:
    """Raise what would make every rank fail; PlanError where no backend can run."""
    device_type = device_type_of(config.device, key="device")
    if config.mode == "graph" and device_type == "cpu":
        raise ConfigError("mode (graph) needs CUDA, and the ranks run on a CPU; use mode: eager")
    interpret_if_needed(
        os.environ,
        device_type=device_type,
        experts=config.experts,
        backends=config.backends or (),
    )
    if config.experts != "auto":
        experts_class(config.experts)
    machine = Machine.detect(device_type)
    faults = []
    for candidate in candidates_of(config, backend_names()):
        for moe in config.layers():
            try:
                plan_contender(config, moe, candidate, machine)
            except (EPRuntimeError, ImportError) as error:
                faults.append(f"{candidate.label}: {reason_of(error, candidate.backend)}")
            else:
                return
    raise PlanError("no backend can run: " + "; ".join(dict.fromkeys(faults)))
