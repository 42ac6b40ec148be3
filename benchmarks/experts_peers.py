"""This project's experts kernel beside the fused MoE kernels that users can install, on one GPU.

    python -m benchmarks.experts_peers warm                       # compile in parallel, no timing
    python -m benchmarks.experts_peers measure --json R.json --plot R.png
    python -m benchmarks.experts_peers plot R.json R.png          # a picture of an older record
    python -m benchmarks.experts_peers kernel-times R.json --output T.json    # what `auto` goes by

Run from the repository's root. A peer that is not installed is left out, with the reason in the
record. Tables, shapes and implementations are in `experts_cells.py`.
"""

import argparse
import gc
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.arguments import (
    names_of,
    positive_number,
    status_of,
    token_counts,
    whole_number,
)
from benchmarks.experts_cells import SHAPES, TABLES, TOKENS_PER_RANK, Cell, cells_of
from benchmarks.experts_contenders import one_line
from benchmarks.experts_kernel_times import times_table
from benchmarks.experts_measure import (
    DeviceLost,
    Effort,
    build_contenders,
    compile_cell,
    make_weight_sets,
    measure_cell,
)
from benchmarks.experts_plot import write_plot
from benchmarks.experts_ratios import OWN
from benchmarks.experts_record import add_ratios, build_record, print_record, summarise_cells
from benchmarks.experts_timing import measure_ceilings
from benchmarks.experts_warm import jobs_of, run_jobs
from benchmarks.record_file import (
    EXPERTS,
    draw_record,
    naming_records,
    read_record,
    whole_file,
)
from ep_runtime.kernel_times import read_kernel_times, times_values
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.bench_plot import prepare_plot_file
from ep_runtime.launch.json_file import prepare_json_file, write_json


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.experts_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    every = dict.fromkeys(name for table in TABLES.values() for name in table.implementations)
    for name in ("measure", "warm", "compile"):
        command = commands.add_parser(name)
        command.add_argument("--tables", type=names_of(list(TABLES)), default=list(TABLES))
        command.add_argument("--shapes", type=names_of(list(SHAPES)), default=list(SHAPES))
        command.add_argument("--implementations", type=names_of(list(every)))
        command.add_argument("--tokens-per-rank", type=token_counts, default=list(TOKENS_PER_RANK))
        if name == "warm":
            command.add_argument("--processes", type=whole_number, default=14)
        if name == "measure":
            command.add_argument("--rounds", type=whole_number, default=Effort.num_rounds)
            turn_ms = Effort.turn_seconds * 1e3
            command.add_argument("--turn-ms", type=positive_number, default=turn_ms)
            command.add_argument(
                "--seconds", type=positive_number, help="begin no cell after so many"
            )
            command.add_argument("--json", type=Path)
            command.add_argument("--plot", type=Path)
    plot = commands.add_parser("plot")
    plot.add_argument("record", type=Path)
    plot.add_argument("picture", type=Path)
    times = commands.add_parser("kernel-times")
    times.add_argument("records", type=Path, nargs="+")
    times.add_argument("--output", type=Path, required=True)
    return parser.parse_args(arguments)


def device_of_this_machine() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError("the experts benchmark measures on a CUDA device, and there is none")
    return torch.device("cuda", torch.cuda.current_device())


def check_selection(options: argparse.Namespace) -> None:
    """Raise ConfigError for options that select no cell, or an implementation of none."""
    tables = [
        TABLES[name]
        for name in options.tables
        if any(TABLES[name].has(SHAPES[shape]) for shape in options.shapes)
    ]
    selected = f"--tables {','.join(options.tables)} --shapes {','.join(options.shapes)}"
    if not tables:
        raise ConfigError(f"{selected} have no cell: with one rank no slot is empty")
    known = list(dict.fromkeys(name for table in tables for name in table.implementations))
    absent = [name for name in options.implementations or () if name not in known]
    if absent:
        raise ConfigError(
            f"--implementations {','.join(absent)}: no cell of {selected} has it; choose from "
            f"{', '.join(known)}"
        )


def asked(options: argparse.Namespace, table: str) -> list[str]:
    """The table's implementations that were asked for."""
    names = TABLES[table].implementations
    return [
        name for name in names if options.implementations is None or name in options.implementations
    ]


def groups_of(options: argparse.Namespace) -> list[list[Cell]]:
    """Cells that share weights: of one shape and scheme, table by table. Of tables that have none
    of the implementations that were asked for there are no cells."""
    tables = [table for table in options.tables if asked(options, table)]
    schemes = list(dict.fromkeys(TABLES[table].scheme for table in tables))
    groups = [
        [
            cell
            for cell in cells_of(tables, SHAPES[shape], options.tokens_per_rank)
            if cell.table.scheme == scheme
        ]
        for scheme in schemes
        for shape in options.shapes
    ]
    return [group for group in groups if group]


def warm(options: argparse.Namespace) -> int:
    """Compile everything that `measure` with the same options launches."""
    jobs = jobs_of(options.tables, options.shapes, options.implementations, options.tokens_per_rank)
    statuses = []
    for job, status, seconds in run_jobs(jobs, options.processes):
        print(f"{seconds:6.1f} s  {'ok' if status == 0 else f'status {status}'}  {job}", flush=True)
        statuses.append(status)
    return int(any(statuses))


def compile_group(options: argparse.Namespace) -> int:
    """One job of `warm`, in its own process. What is not installed is no failure."""
    device, status = device_of_this_machine(), 0
    for cells in groups_of(options):
        shape = cells[0].shape
        weights = make_weight_sets(shape, cells[0].table.scheme, device, is_filled=False)
        for cell in cells:
            built = build_contenders(shape, cell.table, weights, asked(options, cell.table.name))
            for name, contender in built.items():
                what = f"{name}, {cell.table.name}, {shape.name}, {cell.tokens_per_rank} tokens"
                if isinstance(contender, str):
                    print(f"not compiled: {what}: {contender}", flush=True)
                    continue
                try:
                    compile_cell(cell, contender)
                except Exception as error:  # a peer may raise anything; the others go on
                    print(f"failed: {what}: {one_line(error)}", flush=True)
                    status = 1
    return status


def measure(options: argparse.Namespace) -> int:
    """Write the record after every group of cells, so that a run that is cut off leaves one."""
    start, device = time.perf_counter(), device_of_this_machine()
    prepare_json_file(options.json)
    prepare_plot_file(options.plot)
    effort = Effort(options.rounds, options.turn_ms / 1e3)
    left_out = ("json", "plot", "arguments")
    record = build_record(
        f"python -m benchmarks.experts_peers {shlex.join(options.arguments)}",
        {key: value for key, value in vars(options).items() if key not in left_out},
        ceilings=measure_ceilings(device),
        l2_bytes=torch.cuda.get_device_properties(device).L2_cache_size,
    )
    lost = False
    for cells in groups_of(options):
        try:
            if not lost:
                measure_group(cells, options, record, effort, deadline=_deadline(options, start))
            else:
                _leave_out(record, cells, "the device was lost before")
        except DeviceLost as error:
            lost = True
            _leave_out(record, cells, str(error))
        record["seconds"] = time.perf_counter() - start
        record["summary"] = summarise_cells(record["cells"])
        write_json(options.json, record)
    print_record(record, Console(width=160))
    if options.plot is not None:
        write_plot(record, options.plot)
    own = [cell["implementations"].get(OWN, {}) for cell in record["cells"]]
    return int(lost or any(one.get("is_right") is False for one in own))


def _deadline(options: argparse.Namespace, start: float) -> float:
    return float("inf") if options.seconds is None else start + float(options.seconds)


def measure_group(
    cells: Sequence[Cell],
    options: argparse.Namespace,
    record: dict[str, Any],
    effort: Effort,
    *,
    deadline: float,
) -> None:
    """Append the cells of one shape and scheme to the record."""
    if time.perf_counter() > deadline:
        _leave_out(record, cells, "no time was left (--seconds)")
        return
    shape, scheme = cells[0].shape, cells[0].table.scheme
    weights = make_weight_sets(
        shape,
        scheme,
        device_of_this_machine(),
        num_layouts=max(len(cell.table.implementations) for cell in cells),
    )
    for table in dict.fromkeys(cell.table for cell in cells):
        contenders = build_contenders(shape, table, weights, asked(options, table.name))
        gc.freeze()  # a capture begins with a collection: 0.5 s over all that the peers import
        for cell in (cell for cell in cells if cell.table == table):
            if time.perf_counter() > deadline:
                _leave_out(record, [cell], "no time was left (--seconds)")
                continue
            entry = add_ratios(measure_cell(cell, contenders, weights, effort))
            record["cells"].append(entry)
            times = {
                name: round(one["times_us"]["median"], 1) if one["times_us"] else "-"
                for name, one in entry["implementations"].items()
            }
            print(f"{table.name}, {shape.name}, {cell.tokens_per_rank} tokens: {times}", flush=True)
        del contenders
        torch.cuda.empty_cache()


def _leave_out(record: dict[str, Any], cells: Sequence[Cell], reason: str) -> None:
    """Note the cells of these that have no entry."""
    measured = {
        _place(one["table"], one["shape"], one["tokens_per_rank"]) for one in record["cells"]
    }
    for cell in cells:
        place = _place(cell.table.name, cell.shape.name, cell.tokens_per_rank)
        if place not in measured:
            record["not_measured"].append({"cell": place, "reason": reason})


def _place(table: str, shape: str, tokens_per_rank: int) -> str:
    return f"{table}, {shape}, {tokens_per_rank} tokens"


def write_kernel_times(records: Sequence[Path], output: Path) -> int:
    """The records' times of this project's kernels as a table of ep_runtime/kernel_times.py."""
    if output.suffix != ".json":
        raise ConfigError(f"--output {output}: tables are looked up as *.json; end its name so")
    values = [read_record(path, EXPERTS) for path in records]
    with naming_records(records, EXPERTS):
        table = times_table(values, output.name)
    with whole_file(output, makes_folders=True) as part:
        part.write_text(json.dumps(times_values(table), indent=2) + "\n", encoding="utf-8")
        read_kernel_times(part)
    for layer, points in table.layers:
        print(f"{layer}: {', '.join(str(point.tokens_per_rank) for point in points)} tokens")
    return 0


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    options.arguments = list(arguments)
    return status_of(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    if options.command == "plot":
        draw_record(options.record, options.picture, EXPERTS, write_plot)
        return 0
    if options.command == "kernel-times":
        return write_kernel_times(options.records, options.output)
    check_selection(options)
    commands = {"measure": measure, "warm": warm, "compile": compile_group}
    return commands[options.command](options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
