"""One cell of the experts benchmark: every implementation on the same rows, in turns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.experts_cells import Cell, LayerShape, Table, Work, work_of
from benchmarks.experts_contenders import Contender, Unavailable, contender_class, one_line
from benchmarks.experts_data import (
    Error,
    RoutedRows,
    error_of,
    make_rows,
    make_weights,
    reference,
    worst,
)
from benchmarks.experts_timing import GraphReplay, Replay, time_in_turns
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.launch.bench_statistics import summarise

MOST_WEIGHT_SETS = 2


class DeviceLost(RuntimeError):
    """The device does not answer after a call: nothing more can be measured in this process."""


@dataclass(frozen=True)
class Effort:
    """num_rounds of turns, each of about turn_seconds for an implementation."""

    num_rounds: int = 12
    turn_seconds: float = 0.004


def make_weight_sets(
    shape: LayerShape,
    scheme: str,
    device: torch.device,
    *,
    is_filled: bool = True,
    num_layouts: int = 2,
) -> list[ExpertWeights]:
    """Two sets where they and num_layouts others of each, the implementations', fit the memory."""
    num_sets = 1
    if is_filled and device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, _ = torch.cuda.mem_get_info(device)
        set_bytes = shape.num_local_experts * shape.expert_bytes(scheme)
        num_sets = max(1, min(MOST_WEIGHT_SETS, free_bytes // ((1 + num_layouts) * set_bytes)))
    return [
        make_weights(shape, scheme, seed=7 + index, device=device, is_filled=is_filled)
        for index in range(num_sets)
    ]


def build_contenders(
    shape: LayerShape, table: Table, weights: Sequence[ExpertWeights], names: Sequence[str]
) -> dict[str, Contender | str]:
    """Each implementation by name, or why there is none."""
    built: dict[str, Contender | str] = {}
    for name in names:
        try:
            built[name] = contender_class(name)(shape, table, weights)
        except Unavailable as error:
            built[name] = str(error)
        except Exception as error:  # a peer may raise anything
            built[name] = f"failed to build: {one_line(error)}"
            check_device(weights[0].w13.device, name)
    return built


def check_device(device: torch.device, name: str) -> None:
    """Raise DeviceLost where an error has left the device unusable."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(
                f"{name} left the device unusable ({one_line(error)}); leave it out with "
                f"--implementations and run again"
            ) from error
        torch.cuda.empty_cache()


def bind_calls(contender: Contender, sets: Sequence[RoutedRows]) -> list[Callable[[], Tensor]]:
    """A call for each input set; neighbours use different weights where there are several sets."""
    return [
        contender.bind(rows, index % contender.num_weight_sets) for index, rows in enumerate(sets)
    ]


def compile_cell(cell: Cell, contender: Contender) -> None:
    """Call once with every input set, so that what the cell compiles is in the caches."""
    sets = [make_rows(cell, i, contender.device) for i in range(cell.num_input_sets)]
    for call in bind_calls(contender, sets):
        call()
    if contender.device.type == "cuda":
        torch.cuda.synchronize(contender.device)


def work_of_sets(cell: Cell, sets: Sequence[RoutedRows]) -> Work:
    """The mean over the input sets."""
    return work_of(
        cell,
        rows=sum(rows.hidden_states.shape[0] for rows in sets) / len(sets),
        pairs=sum(rows.num_pairs for rows in sets) / len(sets),
        active_experts=sum(rows.num_active_experts for rows in sets) / len(sets),
    )


class References:
    """The float32 results of a cell's input sets, each computed once for an activation."""

    def __init__(
        self, sets: Sequence[RoutedRows], weights: Sequence[ExpertWeights], scheme: str
    ) -> None:
        self._sets, self._weights, self._scheme = sets, weights, scheme
        self._known: dict[tuple[int, float], Tensor] = {}

    def error(self, contender: Contender, outputs: Sequence[Tensor]) -> Error:
        """The worst over the input sets; outputs: one for each set, as it came."""
        errors = []
        for index, rows in enumerate(self._sets):
            key = index, contender.up_shift
            if key not in self._known:
                weights = self._weights[index % len(self._weights)]
                self._known[key] = reference(
                    rows, weights, self._scheme, up_shift=contender.up_shift
                )
            actual = contender.landed_rows(outputs[index], rows)
            errors.append(error_of(actual, self._known[key]))
        return worst(errors)


def measure_cell(
    cell: Cell,
    contenders: Mapping[str, Contender | str],
    weights: Sequence[ExpertWeights],
    effort: Effort,
) -> dict[str, Any]:
    """The cell's entry in the record; an implementation that fails has a skip_reason in it.

    Outputs are checked as a graph's replay left them. Raises DeviceLost.
    """
    device = weights[0].w13.device
    sets = [make_rows(cell, index, device) for index in range(cell.num_input_sets)]
    references = References(sets, weights, cell.table.scheme)
    replays: dict[str, Replay] = {}
    entries: dict[str, dict[str, Any]] = {}
    for name, contender in contenders.items():
        if isinstance(contender, str):
            entries[name] = skipped(contender)
            continue
        try:
            calls = bind_calls(contender, sets)
            replay = GraphReplay([calls[i % len(sets)] for i in range(cell.calls_per_graph)])
            replay.run(1)
            error = references.error(contender, replay.outputs)
        except Exception as failure:  # a peer may raise anything
            entries[name] = skipped(f"failed: {one_line(failure)}")
            check_device(device, name)
        else:
            entries[name] = asdict(error) | {
                "is_right": error.is_within(cell.table.scheme),
                "facts": contender.facts(),
                "skip_reason": None,
            }
            replays[name] = replay
    times = time_in_turns(
        replays,
        calls=cell.calls_per_graph,
        num_rounds=effort.num_rounds,
        turn_seconds=effort.turn_seconds,
    )
    work = work_of_sets(cell, sets)
    for name, seconds in times.items():
        entries[name] |= timed(seconds, work)
    replays.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return cell_entry(cell, work, {name: entries[name] for name in contenders}, len(weights))


def cell_entry(
    cell: Cell, work: Work, implementations: dict[str, dict[str, Any]], num_weight_sets: int
) -> dict[str, Any]:
    """A cell of the record. implementations: by name, in the order of the columns."""
    return {
        "table": cell.table.name,
        "shape": cell.shape.name,
        "tokens_per_rank": cell.tokens_per_rank,
        **asdict(work),
        "num_weight_sets": num_weight_sets,
        "num_input_sets": cell.num_input_sets,
        "rotated_weight_bytes": work.weight_bytes * num_weight_sets,
        "implementations": implementations,
    }


def skipped(reason: str) -> dict[str, Any]:
    """The entry of an implementation that was not measured."""
    return {"times_us": None, "skip_reason": reason}


def timed(seconds: Sequence[float], work: Work) -> dict[str, Any]:
    """Times of one call over all replays, and the roofline's part of the median."""
    times = asdict(summarise(seconds))
    times["p10"] = float(np.percentile(seconds, 10)) * 1e6
    median = times["median"]
    return {
        "times_us": times,
        "fraction_of_roofline": work.roofline_us / median,
        "gbps": work.weight_bytes / median / 1e3,
        "tflops": work.flops / median / 1e6,
    }
