"""`ep-runtime audit streams` on a CPU: happens-before on every buffer, for every combination."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.environment import describe_versions
from ep_runtime.launch.explain import read_source
from ep_runtime.launch.json_file import prepare_json_file, write_json
from ep_runtime.launch.preflight import INTERPRET_VARIABLE
from ep_runtime.launch.run_config import RunConfig, parse_overrides

if TYPE_CHECKING:
    from ep_runtime.audit_streams import AuditCase, AuditResult
    from ep_runtime.config import MoEConfig

SCHEMA_VERSION = 1
# What an audit is told in options of its own; it goes through both settings of overlap.
_OPTION_OF = {"parallel.all2all_backend": "--backends", "kernel.experts": "--experts"}


def audit_streams_command(
    source: str,
    overrides: Sequence[str],
    *,
    device: str,
    backends: str | None,
    experts: str | None,
    json_file: Path | None,
    console: Console,
) -> int:
    """Audit the layer of a run's configuration on recorded streams; 0 where everything is ordered,
    else 1. On a GPU: launch/audit_gpu_command.py.

    backends, experts: names with commas, None: all. Raises ConfigError for a device other than
    cpu, an unknown name, an override of what is not audited, or where no combination could be
    planned.
    """
    if device != "cpu":
        raise ConfigError(f"--device {device}: is unknown; choose cpu or cuda")
    prepare_json_file(json_file)
    # Read as Triton is imported, which the modules below do.
    os.environ.setdefault(INTERPRET_VARIABLE, "1")
    from ep_runtime.audit_streams import CANNOT_SEE, all_cases, audit_layer, audited_config
    from ep_runtime.launch.seeded_layer import SeededWeights

    moe = audited_config(read_audited_layer(source, overrides))
    cases = chosen_cases(all_cases(), backends, experts)
    weights = SeededWeights(moe, seed=0, device=torch.device("cpu"))
    results = list(audit_layer(moe, weights.fill, cases))
    if all(result.skip_reason for result in results):
        reasons = "; ".join(sorted({str(result.skip_reason) for result in results}))
        raise ConfigError(f"no backend and experts kernel could be audited: {reasons}")
    passed = not any(result.faults for result in results)
    print_audit(moe, results, console)
    for line in CANNOT_SEE:
        console.print(f"not seen: {line}", markup=False, highlight=False)
    console.print("everything is ordered" if passed else "FAILED: not everything is ordered")
    write_json(
        json_file,
        {
            "schema_version": SCHEMA_VERSION,
            "command": "audit streams",
            "device": device,
            "environment": describe_versions(),
            "layer": moe.model_dump(mode="json"),
            "cases": [_as_json(result) for result in results],
            "cannot_see": list(CANNOT_SEE),
            "passed": passed,
        },
    )
    return 0 if passed else 1


def read_audited_layer(source: str, overrides: Sequence[str]) -> "MoEConfig":
    """The layer of a run's configuration, whose other sections a file may have for `run`.

    Raises ConfigError for an override of one of those, which would change nothing.
    """
    parse_overrides(overrides)  # what is no override at all is told of first
    for override in overrides:
        key = override.partition("=")[0]
        section = key.partition(".")[0]
        if section in RunConfig.model_fields and section != "model":
            option = _OPTION_OF.get(key)
            cure = f"name what is audited with {option}" if option else "leave it out"
            raise ConfigError(
                f"--set {override!r}: has no effect on an audit, which reads model.* alone; {cure}"
            )
    return read_source(source, overrides)[0]


def chosen_cases(
    cases: "Sequence[AuditCase]", backends: str | None, experts: str | None
) -> "list[AuditCase]":
    """The cases of the names given (with commas); an unknown name lists the known ones."""
    chosen = list(cases)
    for option, text in (("backends", backends), ("experts", experts)):
        if text is None:
            continue
        names = [name.strip() for name in text.split(",")]
        key = option.removesuffix("s") if option == "backends" else option
        known = dict.fromkeys(getattr(case, key) for case in cases)
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"--{option} {name}: is unknown; choose among: {', '.join(known)}"
                )
        chosen = [case for case in chosen if getattr(case, key) in names]
    if not chosen:
        raise ConfigError(
            f"--backends {backends} and --experts {experts} leave nothing to audit: on one rank a "
            f"monolithic kernel runs with backend local alone"
        )
    return chosen


def _as_json(result: "AuditResult") -> dict[str, Any]:
    return {
        **asdict(result.case),
        "owner": result.owner or None,
        "schedules": list(result.schedules),
        "num_operations": result.num_operations,
        "unordered": [asdict(found) for found in result.unordered],
        "misplaced": list(result.misplaced),
        "skip_reason": result.skip_reason,
    }


def print_audit(moe: "MoEConfig", results: "Sequence[AuditResult]", console: Console) -> None:
    """Tables of what was run and what was not, then every fault in full."""
    ran = [result for result in results if result.skip_reason is None]
    title = f"Streams of one rank: {moe.num_experts} experts, hidden {moe.hidden_size}"
    columns = ("backend", "experts", "overlap", "owner", "schedules", "operations", "unordered")
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for result in ran:
        case = result.case
        table.add_row(
            case.backend,
            case.experts,
            case.overlap,
            result.owner,
            ", ".join(result.schedules),
            str(result.num_operations),
            str(len(result.faults)) if result.faults else "none",
        )
    console.print(table)
    skipped = list(_skipped(results))
    if skipped:
        table = Table("backend", "experts", "why not run", title="Not run")
        for row in skipped:
            table.add_row(*map(escape, row))
        console.print(table)
    for result in ran:
        case = result.case
        for fault in result.faults:
            console.print(
                f"{case.backend}, {case.experts}, overlap {case.overlap}: {fault}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _skipped(results: "Sequence[AuditResult]") -> Iterator[tuple[str, str, str]]:
    """Each pair once: overlap changes nothing about whether it can be planned."""
    seen: set[tuple[str, str]] = set()
    for result in results:
        pair = (result.case.backend, result.case.experts)
        if result.skip_reason is not None and pair not in seen:
            seen.add(pair)
            yield (*pair, result.skip_reason)
