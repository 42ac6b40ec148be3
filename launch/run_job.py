"""What each rank of a run does, from joining the others to the report and its exit status."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import CheckpointError, ConfigError, PlanError
from ep_runtime.launch.json_file import write_json
from ep_runtime.launch.layer_job import LayerJob, layer_checks
from ep_runtime.launch.preflight import (
    check_before_start,
    check_world_size,
    prepare_output_dir,
    use_tile_table,
)
from ep_runtime.launch.print_report import print_report
from ep_runtime.launch.rank_terminal import Terminal, keep_traceback, tell
from ep_runtime.launch.report import Check, RankResult, build_report
from ep_runtime.launch.run_config import RunConfig
from ep_runtime.launch.starter import STARTED_VARIABLE, record_failure
from ep_runtime.launcher_environment import LauncherEnvironment
from ep_runtime.plan import Plan

REPORT_FILE = "report.json"


def run_rank(
    config: RunConfig, launcher: LauncherEnvironment, json_file: Path | None = None
) -> int:
    """Run this rank to its end and return its exit status.

    Rank 0 writes to the terminal, the others to output_dir/rank{r}.log. Of an error that one
    rank raises, that rank tells the terminal, unless `run` started it, which then does.
    """
    is_started = STARTED_VARIABLE in os.environ
    terminal = Terminal()
    ctx: EPContext | None = None
    try:
        check_world_size(config.parallel, launcher)
        if not is_started:
            check_before_start(config)
        use_tile_table(config.kernel.tile_table)
        # Ranks that `run` started are reading the file that it wrote.
        writes_config = launcher.rank == 0 and not is_started
        folder = prepare_output_dir(config, write_config=writes_config)
        if launcher.rank == 0:
            (folder / "rank0.log").unlink(missing_ok=True)
        else:
            terminal.redirect_to(folder / f"rank{launcher.rank}.log")
        with init_distributed(config.parallel) as ctx:
            passed = _run(config, ctx, folder, json_file)
    except Exception as error:
        record_failure(error)
        keep_traceback(config.output_dir, launcher.rank)
        if not is_started:
            tell(terminal, error, launcher.rank, ctx)
        found_early = ctx is None and isinstance(error, ConfigError | PlanError | CheckpointError)
        return 2 if found_early else 1
    # A failed check is told by the report; to a launcher, a rank that ends with 1 has crashed.
    return 0 if passed or is_started else 1


def _run(config: RunConfig, ctx: EPContext, folder: Path, json_file: Path | None) -> bool:
    """The job on this rank; on rank 0 also checks and report. True where all checks passed."""
    started = time.perf_counter()
    plan: Plan
    if config.model.layer is not None:
        plan, result = LayerJob(config, config.model.layer, ctx).run()
        ranks = _gather(result, ctx.world_group)
        ran = time.perf_counter()
        checks = layer_checks(config, plan, ranks)
    else:
        from ep_runtime.launch.model_job import model_checks, run_model

        model, result, outcome = run_model(config, ctx, ctx.world_group)
        plan = model.plan
        ranks = _gather(result, ctx.world_group)
        ran = time.perf_counter()
        checks = []
        if ctx.rank == 0:
            checks = model_checks(
                config,
                outcome,
                ranks,
                has_shared=plan.moe.has_shared_expert,
                in_fp8=any(layer.plan.multiplies_fp8_rows for layer in model.moe_layers),
            )
    if ctx.rank != 0:
        return True
    timings = {"run": ran - started, "check": time.perf_counter() - ran}
    return _finish(config, plan, ranks, checks, timings, folder, json_file)


def _gather(result: RankResult, world: EPGroup) -> list[RankResult]:
    """Every rank's result on every rank; a collective of all ranks."""
    texts = gather_texts(json.dumps(asdict(result)), world)
    return [RankResult(**json.loads(text)) for text in texts]


def _finish(
    config: RunConfig,
    plan: Plan,
    ranks: list[RankResult],
    checks: list[Check],
    timings: dict[str, float],
    folder: Path,
    json_file: Path | None,
) -> bool:
    report = build_report(config, plan, ranks, checks, timings)
    for path in (folder / REPORT_FILE, json_file):
        write_json(path, report)
    print_report(report, plan, Console())
    return bool(report["passed"])


def read_report(folder: Path) -> dict[str, Any]:
    """The report that rank 0 left."""
    report: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text())
    return report
