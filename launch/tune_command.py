"""`ep-runtime tune`: measure the tiles of layers on this device and write them as a table."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.hopper_packed_schedule import takes_hopper_packed
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.tile_tables import TileTable, TunedLayer, TunedPoint
from ep_runtime.launch.tune_candidates import as_compiled, candidates_of
from ep_runtime.launch.tune_compile import Job, compile_candidates, small_shape
from ep_runtime.launch.tune_inputs import multiplies_fp8
from ep_runtime.launch.tune_layers import (
    TuneSizes,
    layers_to_tune,
    num_source_rows,
    parse_rows_per_expert,
)
from ep_runtime.launch.tune_problem import LayerWeights, TuneProblem
from ep_runtime.launch.tune_record import check_output, table_values, write_table
from ep_runtime.launch.tune_search import SearchNotes, search_point
from ep_runtime.launch.tune_timing import Ceilings, GraphTimer, Timer, measure_ceilings

MOST_PROCESSES = 16
Say = Callable[[str], None]
# By a layer's dtype, and whether its products are of e4m3.
CeilingsOf = Mapping[tuple[torch.dtype, bool], Ceilings]


@dataclass(frozen=True)
class TunePlan:
    """What is measured: for each layer, the rows on all ranks of each point, rising."""

    layers: tuple[tuple[ExpertsShape, tuple[int, ...]], ...]

    @property
    def num_points(self) -> int:
        return sum(len(rows) for _, rows in self.layers)


def plan_tuning(shapes: Iterable[ExpertsShape], rows_per_expert: Sequence[float]) -> TunePlan:
    """Numbers too small to be different in rows become one point."""
    return TunePlan(
        tuple(
            (shape, tuple(sorted({num_source_rows(rows, shape) for rows in rows_per_expert})))
            for shape in shapes
        )
    )


def tune_command(
    sources: Sequence[str],
    sizes: TuneSizes,
    *,
    local_experts: int | None,
    rows_per_expert: str,
    output: Path,
    processes: int | None,
    say: Say,
) -> None:
    """Measure, tell of each point by `say`, and write `output` after each layer.

    Raises ConfigError for what cannot be measured, before any time is spent. A run that fails
    leaves the layers measured before, or `output` as it was.
    """
    shapes = layers_to_tune(sources, sizes, local_experts)
    plan = plan_tuning(shapes, parse_rows_per_expert(rows_per_expert))
    if is_interpreting() or not torch.cuda.is_available():
        raise ConfigError(
            "tune measures on a CUDA device, and there is none here, or TRITON_INTERPRET is set"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    refuse_what_has_no_tiles(shapes, device, places=shapes)
    check_output(output)
    num_processes = processes or min(MOST_PROCESSES, os.cpu_count() or 1)
    started = time.perf_counter()
    jobs = compile_jobs(plan, device)
    say(f"{plan.num_points} points; {len(jobs)} compilations in {num_processes} processes")
    fault = compile_candidates(jobs, num_processes)
    say(fault or f"compiled after {time.perf_counter() - started:.0f} s")
    timer = GraphTimer()
    ceilings = measure_all_ceilings(shapes, timer, device)
    table = TileTable(
        name=output.name,
        device=torch.cuda.get_device_name(device),
        triton=triton.__version__,
        source=(
            f"ep-runtime tune, torch {torch.__version__}: projections by CUDA graph, random rows "
            f"and weights in turn, checked against float32; us of alignment and both projections; "
            f"roofline: {'; '.join(map(str, ceilings.values()))}"
        ),
        layers=(),
    )
    tune_layers(plan, table, device, timer, ceilings, output, say)


def refuse_what_has_no_tiles(
    shapes: Iterable[ExpertsShape],
    device: torch.device,
    *,
    places: Mapping[ExpertsShape, str] | None = None,
) -> None:
    """ConfigError for a layer that runs on a kernel whose schedules are a rule on this device.

    places: what it calls a layer; None, or without it: by its key in a table.
    """
    for shape in shapes:
        if takes_hopper_packed(shape, device):
            place = (places or {}).get(shape, str(TunedLayer.of(shape)))
            raise ConfigError(
                f"{place}: weights stored as {shape.scheme.weight} run on Hopper's packed GEMM "
                f"here, whose schedules follow a rule: there are no tiles to tune; leave the layer "
                f"out"
            )


def compile_jobs(plan: TunePlan, device: torch.device) -> list[Job]:
    """Each compilation once: it serves every number of rows, and every layer of its kind."""
    jobs: dict[Job, None] = {}
    for shape, numbers in plan.layers:
        for number in numbers:
            expected = number * shape.top_k / (shape.num_experts or shape.num_local_experts)
            for candidate in candidates_of(expected, shape, device):
                jobs[small_shape(shape), as_compiled(candidate)] = None
    return list(jobs)


def measure_all_ceilings(
    shapes: Iterable[ExpertsShape], timer: Timer, device: torch.device
) -> CeilingsOf:
    """Of each kind of products that the layers have."""
    kinds = dict.fromkeys((shape.dtype, multiplies_fp8(shape)) for shape in shapes)
    return {
        (dtype, is_fp8): measure_ceilings(timer, device, dtype, is_fp8=is_fp8)
        for dtype, is_fp8 in kinds
    }


def tune_layers(
    plan: TunePlan,
    table: TileTable,
    device: torch.device,
    timer: Timer,
    ceilings: CeilingsOf,
    output: Path,
    say: Say,
) -> TileTable:
    """`table` with the plan's layers, as it is written to `output` after each."""
    rejected: dict[TunedLayer, list[str]] = {}
    layers = list(table.layers)
    for shape, numbers in plan.layers:
        started = time.perf_counter()
        layer, notes = TunedLayer.of(shape), SearchNotes()
        of_layer = ceilings[shape.dtype, multiplies_fp8(shape)]
        say(f"{layer}: {of_layer}")
        weights = LayerWeights(shape, device)
        points: list[TunedPoint] = []
        for number in numbers:
            problem = TuneProblem(shape, number, device, weights=weights)
            candidates = candidates_of(problem.rows_per_expert, shape, device)
            points.append(search_point(problem, candidates, timer, of_layer, notes))
            say(_point_text(points[-1]))
            del problem
        del weights
        for reason, count in notes.failed.most_common():
            say(f"  {count} candidates did not run: {reason}")
        for line in notes.wrong:
            say(f"  left out, wrong: {line}")
        layers.append((layer, tuple(points)))
        rejected[layer] = notes.wrong
        table = TileTable(table.name, table.device, table.triton, table.source, tuple(layers))
        write_table(output, table_values(table, rejected))
        say(f"  written to {output} after {time.perf_counter() - started:.1f} s")
    return table


def _point_text(point: TunedPoint) -> str:
    rule = f"{point.rows_per_expert:g} rows an expert: {point.rule_us:.1f} us by the rule"
    if point.tiles is None:
        return f"  {rule}, {point.roofline_fraction:.2f} of the roofline; none is faster"
    return f"  {rule}, {point.us:.1f} us ({point.roofline_fraction:.2f}) by {point.tiles}"
