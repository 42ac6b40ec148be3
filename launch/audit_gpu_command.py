"""`ep-runtime audit streams --device cuda`: sanitizer, allocator stress and co-run stress."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ep_runtime.audit_gpu import Gpu, GpuResult, GpuSite, gpu_config, gpu_machine
from ep_runtime.audit_gpu_checks import (
    GPU_CANNOT_SEE,
    GpuAuditOptions,
    planned_checks,
    run_checks,
)
from ep_runtime.audit_streams import all_cases
from ep_runtime.audit_watchdog import Watchdog
from ep_runtime.config import MoEConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.audit_command import chosen_cases, read_audited_layer
from ep_runtime.launch.environment import describe_versions
from ep_runtime.launch.json_file import prepare_json_file, write_json
from ep_runtime.launch.seeded_layer import SeededWeights

SCHEMA_VERSION = 1


def audit_gpu_command(
    source: str,
    overrides: Sequence[str],
    *,
    backends: str | None,
    experts: str | None,
    options: Mapping[str, Any],
    json_file: Path | None,
    console: Console,
) -> int:
    """Audit the layer of a run's configuration on the current GPU; 0 where nothing was found.

    backends, experts: names with commas, None: all. options: of `GpuAuditOptions`, checks as text
    with commas. Raises ConfigError without a GPU, for an unknown name, an override of what is not
    audited, or where nothing could be planned. A hang is written to the report, and ends the
    process with 1.
    """
    chosen = _options(options)
    cases = chosen_cases(all_cases(with_triton=True), backends, experts)
    gpu = this_gpu()
    prepare_json_file(json_file)
    moe = gpu_config(read_audited_layer(source, overrides))
    report = GpuReport(moe, chosen, console, json_file, gpu.name)
    weights = SeededWeights(moe, seed=0, device=gpu.device)
    with Watchdog(chosen.hang_s, report.hang) as watchdog:
        for result in run_checks(
            moe,
            weights.fill,
            planned_checks(cases, chosen.checks),
            chosen,
            site=GpuSite(gpu),
            machine=gpu_machine(),
            step=watchdog.step,
        ):
            report.add(result)
    return report.finish()


def this_gpu() -> Gpu:
    """The current device; without one a ConfigError."""
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; leave --device out")
    return Gpu(torch.device("cuda", torch.cuda.current_device()))


def _options(given: Mapping[str, Any]) -> GpuAuditOptions:
    values = dict(given)
    if "checks" in values:
        values["checks"] = tuple(name.strip() for name in values["checks"].split(","))
    return GpuAuditOptions(**values)


class GpuReport:
    """Results as they come: JSON after each, a table in the end or when something hangs.

    A run that is ended from outside so leaves what it had, which has not passed.
    """

    def __init__(
        self,
        moe: MoEConfig,
        options: GpuAuditOptions,
        console: Console,
        json_file: Path | None,
        gpu_name: str,
    ) -> None:
        self.results: list[GpuResult] = []
        self._moe, self._options, self._gpu_name = moe, options, gpu_name
        self._console, self._json_file = console, json_file

    def add(self, result: GpuResult) -> None:
        self.results.append(result)
        self._write_json(None, is_complete=False)

    def hang(self, step: str, limit_s: float) -> None:
        """A step has not ended: write what there is."""
        self._write_json({"step": step, "limit_s": limit_s}, is_complete=False)
        self._print()
        self._console.print(
            f"FAILED: it hangs: {step} has not ended after {limit_s:g} s", markup=False
        )
        sys.stdout.flush()

    def finish(self) -> int:
        """Print and write the report; the exit status."""
        if all(result.skip_reason for result in self.results):
            reasons = "; ".join(sorted({str(result.skip_reason) for result in self.results}))
            raise ConfigError(f"no backend and experts kernel could be audited: {reasons}")
        self._write_json(None, is_complete=True)
        self._print()
        passed = self.passed
        self._console.print("nothing was found" if passed else "FAILED: see above")
        return 0 if passed else 1

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)

    def _print(self) -> None:
        print_gpu_results(self._gpu_name, self._moe, self.results, self._console)

    def _write_json(self, hang: dict[str, Any] | None, *, is_complete: bool) -> None:
        write_json(
            self._json_file,
            {
                "schema_version": SCHEMA_VERSION,
                "command": "audit streams",
                "command_line": shlex.join(["ep-runtime", *sys.argv[1:]]),
                "device": "cuda",
                "gpu": self._gpu_name,
                "environment": describe_versions(),
                "layer": self._moe.model_dump(mode="json"),
                "options": asdict(self._options),
                "checks": [_as_json(result) for result in self.results],
                "hang": hang,
                "cannot_see": list(GPU_CANNOT_SEE),
                "is_complete": is_complete,
                "passed": is_complete and self.passed,
            },
        )


def _as_json(result: GpuResult) -> dict[str, Any]:
    values = asdict(result)
    return {"check": values.pop("check"), **values.pop("case"), **values}


def print_gpu_results(
    gpu_name: str, moe: MoEConfig, results: Sequence[GpuResult], console: Console
) -> None:
    """Tables of what was run and what was not, then every fault in full."""
    columns = (
        *("check", "backend", "experts", "class", "overlap", "schedules"),
        *("iterations", "wrong", "faults", "s"),
    )
    title = f"Streams on {gpu_name}: {moe.num_experts} experts, hidden {moe.hidden_size}"
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for result in results:
        if result.skip_reason is not None:
            continue
        case = result.case
        schedules = "joined" if result.joined else ", ".join(result.schedules)
        table.add_row(
            result.check,
            case.backend,
            case.experts,
            result.concurrency,
            case.overlap,
            schedules,
            str(result.num_iterations),
            str(result.num_wrong),
            str(len(result.faults)),
            f"{result.seconds:.1f}",
        )
    console.print(table)
    skipped = {
        (r.case.backend, r.case.experts, r.skip_reason)
        for r in results
        if r.skip_reason is not None
    }
    if skipped:
        table = Table("backend", "experts", "why not run", title="Not run")
        for row in sorted(skipped):
            table.add_row(*map(escape, row))
        console.print(table)
    for result in results:
        for fault in result.faults:
            case = result.case
            console.print(
                f"{result.check}: {case.backend}, {case.experts}, overlap {case.overlap}: {fault}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    for line in GPU_CANNOT_SEE:
        console.print(f"not seen: {line}", markup=False, highlight=False)
