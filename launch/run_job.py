"""What each rank of a run does, and the report."""

import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.distributed import EPContext
from ep_runtime.launch.json_file import write_json
from ep_runtime.launch.layer_job import LayerJob, layer_checks
from ep_runtime.launch.preflight import use_tile_table
from ep_runtime.launch.print_report import print_report
from ep_runtime.launch.report import Check, RankResult, build_report
from ep_runtime.launch.run_config import RunConfig
from ep_runtime.plan import Plan

REPORT_FILE = "report.json"


def run_job(config: RunConfig, ctx: EPContext, *, json_file: Path | None = None) -> bool:
    """All that a rank does; on rank 0 also checks and report. True where all checks passed."""
    started = time.perf_counter()
    use_tile_table(config.kernel.tile_table)
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
    return _finish(config, plan, ranks, checks, timings, json_file)


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
    json_file: Path | None,
) -> bool:
    report = build_report(config, plan, ranks, checks, timings)
    write_json(Path(config.output_dir).expanduser() / REPORT_FILE, report, option="output_dir")
    write_json(json_file, report)
    print_report(report, plan, Console())
    return bool(report["passed"])
