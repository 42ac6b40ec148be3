"""The benchmark on one rank: build the backends, measure them in turn, gather, and report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from ep_runtime.all2all.base import ExpertPlacement, RoutedTokens
from ep_runtime.all2all.registry import backend_names
from ep_runtime.config import MoEConfig
from ep_runtime.distributed import EPContext
from ep_runtime.launch.bench_config import BenchConfig, Candidate
from ep_runtime.launch.bench_contender import Contender, Skipped, build_contender, candidates_of
from ep_runtime.launch.bench_gather import gather_values, start_together
from ep_runtime.launch.bench_inputs import Case, Load, cases_of, load_of, make_input_sets
from ep_runtime.launch.bench_link import LinkLimits, measure_link
from ep_runtime.launch.bench_plot import write_plot
from ep_runtime.launch.bench_probe import Probe
from ep_runtime.launch.bench_record import build_record, case_entry, print_record
from ep_runtime.launch.bench_statistics import max_over_ranks, rotated, summarise
from ep_runtime.launch.json_file import write_json
from ep_runtime.launch.layer_job import layer_tolerance
from ep_runtime.launch.report import Check, worst_of

RECORD_FILE = "bench.json"


@dataclass
class _Measurement:
    """What one candidate took in one case on this rank: part -> seconds of each iteration."""

    contender: Contender
    probes: Sequence[Probe]
    skipped: Mapping[str, Skipped]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, measured: Mapping[str, Sequence[float]]) -> None:
        for part, seconds in measured.items():
            self.seconds.setdefault(part, []).extend(seconds)


class BenchJob:
    """All cases of a configuration on this rank."""

    def __init__(self, config: BenchConfig, ctx: EPContext) -> None:
        self.config, self.ctx = config, ctx
        self.link: LinkLimits = measure_link(ctx.ep_group)
        self.entries: list[dict[str, Any]] = []
        self.checks: list[Check] = []

    def run(self) -> dict[str, Any]:
        """Measure everything; the record, equal on all ranks but for the environment."""
        layers = list(self.config.layers())
        is_shown = self.ctx.rank == 0
        console = Console(stderr=True)
        with Progress(
            console=console, transient=True, disable=not (is_shown and console.is_terminal)
        ) as progress:
            num_cases = sum(len(cases_of(self.config, moe)) for moe in layers)
            task = progress.add_task("cases", total=num_cases)
            for moe in layers:
                contenders, skipped = self._build(moe)
                for case in cases_of(self.config, moe):
                    self._measure(case, contenders, skipped)
                    progress.advance(task)
        names = gather_values(_device_name(self.ctx.device), self.ctx.ep_group)
        return build_record(
            self.config, names, link=self.link, entries=self.entries, checks=self.checks
        )

    def _build(self, moe: MoEConfig) -> tuple[list[Contender], dict[Candidate, Skipped]]:
        contenders: list[Contender] = []
        skipped: dict[Candidate, Skipped] = {}
        for candidate in candidates_of(self.config, backend_names()):
            weights_of = contenders[0] if contenders else None
            built = build_contender(candidate, moe, self.ctx, self.config, weights_of)
            if isinstance(built, Skipped):
                skipped[candidate] = built
            else:
                contenders.append(built)
        return contenders, skipped

    def _measure(
        self, case: Case, contenders: Sequence[Contender], skipped: dict[Candidate, Skipped]
    ) -> None:
        """One case: every candidate once a round, in an order that the round rotates."""
        config, group = self.config, self.ctx.ep_group
        sets = make_input_sets(
            case, ep_rank=group.rank, ep_size=group.size, seed=config.seed, device=group.device
        )
        self.checks += self._compare_outputs(case, contenders, sets)
        measurements = []
        for contender in contenders:
            start_together(group)
            measurements.append(_Measurement(contender, *contender.probes(case, sets)))
        for index in range(config.rounds):
            for measurement in rotated(measurements, index):
                for probe in measurement.probes:
                    start_together(group)
                    measurement.add(probe.run(config.iterations))
        seconds_of_rank = gather_values([m.seconds for m in measurements], group)
        for number, measurement in enumerate(measurements):
            self._add_entries(case, sets, measurement, [rank[number] for rank in seconds_of_rank])
        for candidate, skip in skipped.items():
            for part in config.parts:
                self.entries.append(case_entry(case, candidate, part, skip_reason=skip.reason))

    def _add_entries(
        self,
        case: Case,
        sets: Sequence[RoutedTokens],
        measurement: "_Measurement",
        seconds_of_rank: Sequence[dict[str, list[float]]],
    ) -> None:
        """One entry for each part. seconds_of_rank: `measurement.seconds` of every rank."""
        contender = measurement.contender
        loads = self._loads(sets, contender.plan.placement)
        actual = contender.actual() | {"shared_schedule": contender.schedule(case)}
        for part in self.config.parts:
            skip = measurement.skipped.get(part)
            times = None
            if skip is None:
                times = summarise(max_over_ranks([rank[part] for rank in seconds_of_rank]))
            self.entries.append(
                case_entry(
                    case,
                    contender.candidate,
                    part,
                    times=times,
                    loads=loads,
                    shape=contender.plan.backend_shape(),
                    link=self.link,
                    actual=actual,
                    skip_reason=skip.reason if skip else None,
                )
            )

    def _loads(self, sets: Sequence[RoutedTokens], placement: ExpertPlacement) -> list[Load]:
        own = load_of(sets, placement)
        return [Load(**values) for values in gather_values(asdict(own), self.ctx.ep_group)]

    def _compare_outputs(
        self, case: Case, contenders: Sequence[Contender], sets: Sequence[RoutedTokens]
    ) -> list[Check]:
        """That all candidates compute the same layer: each against the first, the worst rank."""
        checks: list[Check] = []
        first: tuple[Contender, torch.Tensor] | None = None
        for contender in contenders:
            output = contender.output(case, sets[0])
            if output is None:
                continue
            if first is None:
                first = contender, output.float()
                continue
            error = torch.linalg.norm(output.float() - first[1]) / torch.linalg.norm(first[1])
            errors = gather_values(float(error), self.ctx.ep_group)
            sizes = ", ".join(f"{key} {value}" for key, value in case.sizes().items())
            pair = f"{contender.candidate.label} against {first[0].candidate.label}"
            # Each may be off the exact result by its tolerance.
            limit = sum(layer_tolerance(c.plan) for c in (contender, first[0]))
            checks.append(Check(f"{pair}: relative error ({sizes})", worst_of(errors), limit))
        return checks


def run_job(
    config: BenchConfig, ctx: EPContext, *, json_file: Path | None, plot_file: Path | None
) -> bool:
    """Measure, and on rank 0 write and print what was measured; True where all checks passed."""
    record = BenchJob(config, ctx).run()
    if ctx.rank == 0:
        folder = Path(config.output_dir).expanduser()
        write_json(folder / RECORD_FILE, record, option="output_dir")
        write_json(json_file, record)
        if plot_file is not None:
            write_plot(record, plot_file)
        print_record(record, Console())
    return bool(record["passed"])


def read_record(path: Path) -> dict[str, Any]:
    """A record that `--json` or an output_dir holds."""
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
