"""`ep-runtime bench`: start the ranks, or be one."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import typer

from ep_runtime.all2all.registry import backend_names
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import (
    CheckpointError,
    ConfigError,
    EPRuntimeError,
    PlanError,
    RankFailure,
)
from ep_runtime.kernels.registry import experts_class
from ep_runtime.launch.bench_config import BenchConfig, load_bench_config
from ep_runtime.launch.bench_contender import candidates_of, plan_contender, reason_of
from ep_runtime.launch.bench_job import RECORD_FILE, read_record, run_job
from ep_runtime.launch.bench_plot import prepare_plot_file
from ep_runtime.launch.json_file import prepare_json_file
from ep_runtime.launch.preflight import interpret_if_needed
from ep_runtime.launch.rank_terminal import Terminal, keep_traceback, tell
from ep_runtime.launch.starter import STARTED_VARIABLE, Interrupted, record_failure, start_ranks
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
    if launcher.launcher != "none" or config.ranks == 1:
        return _be_a_rank(config, launcher, json_file, plot_file)
    check_before_start(config)
    folder = _prepare_output_dir(config, write_config=True)
    return _start(config, folder, json_file, plot_file)


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
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device (cuda): torch sees no CUDA device here; use cpu or auto")
    device_type = "cuda" if has_cuda and config.device != "cpu" else "cpu"
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


def _prepare_output_dir(config: BenchConfig, *, write_config: bool) -> Path:
    """Make the folder; one process also writes the resolved configuration into it."""
    folder = Path(config.output_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if write_config:
            (folder / "config.yaml").write_text(config.to_yaml())
    except OSError as error:
        raise ConfigError(f"output_dir {folder}: cannot be written: {error}") from None
    return folder


def _start(
    config: BenchConfig, folder: Path, json_file: Path | None, plot_file: Path | None
) -> int:
    (folder / RECORD_FILE).unlink(missing_ok=True)
    arguments = ["bench", str(folder / "config.yaml")]
    for option, path in (("--json", json_file), ("--plot", plot_file)):
        if path is not None:
            arguments += [option, str(path)]
    try:
        start_ranks(arguments, world_size=config.ranks)
    except RankFailure as error:
        raise RankFailure(f"{error}; logs of the ranks: {folder}") from None
    except Interrupted as interrupted:
        typer.echo(f"ep-runtime: {interrupted}", err=True)
        return interrupted.exit_status
    return 0 if read_record(folder / RECORD_FILE)["passed"] else 1


def _be_a_rank(
    config: BenchConfig,
    launcher: LauncherEnvironment,
    json_file: Path | None,
    plot_file: Path | None,
) -> int:
    """Measure as this rank to its end and return its exit status; errors as in `run`."""
    is_started = STARTED_VARIABLE in os.environ
    terminal = Terminal()
    ctx: EPContext | None = None
    try:
        if not is_started:
            check_before_start(config)
        folder = _prepare_output_dir(config, write_config=launcher.rank == 0 and not is_started)
        if launcher.rank == 0:
            (folder / "rank0.log").unlink(missing_ok=True)
        else:
            terminal.redirect_to(folder / f"rank{launcher.rank}.log")
        with init_distributed(config.parallel()) as ctx:
            passed = run_job(config, ctx, json_file=json_file, plot_file=plot_file)
    except Exception as error:
        record_failure(error)
        keep_traceback(config.output_dir, launcher.rank)
        if not is_started:
            tell(terminal, error, launcher.rank, ctx)
        found_early = ctx is None and isinstance(error, ConfigError | PlanError | CheckpointError)
        return 2 if found_early else 1
    return 0 if passed or is_started else 1
