"""A benchmark's record as JSON values, with the words behind each number; and as tables."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ep_runtime.all2all.base import BackendShape
from ep_runtime.launch.bench_config import LIST_KEYS, BenchConfig, Candidate, option_of
from ep_runtime.launch.bench_inputs import (
    NUM_INPUT_SETS,
    Case,
    Load,
    experts_bytes,
    link_bytes,
    shared_bytes,
)
from ep_runtime.launch.bench_link import LinkLimits
from ep_runtime.launch.bench_probe import CALLS_PER_GRAPH
from ep_runtime.launch.bench_statistics import Times
from ep_runtime.launch.environment import describe_devices, describe_versions
from ep_runtime.launch.report import Check

SCHEMA_VERSION = 1
_ROWS = (
    "(row, other rank) pairs through the link of the busiest rank in its busier direction, each "
    "pair once, mean over the input sets, * "
)
_SENT = f"{_ROWS}hidden_size * bytes of the dtype (rows in fp8: hidden_size + 4 for each 128 of it)"
_HOME = f"{_ROWS}hidden_size * bytes of the dtype"
# What is timed, and what its bytes are; GB/s are bytes / median / 1000 (bytes a microsecond).
TIMED = {
    "dispatch": "prepare, dispatch and its join",
    "combine": "combine and its join, with rows that were made before",
    "dispatch_combine": "prepare to the join of combine, with nothing between",
    "experts": "the experts kernel, on rows that were received before",
    "shared": "the shared expert alone, on the rank's own rows",
    "layer": "a whole layer call with given ids (with routing `model`: its router included)",
}
BYTES = {
    "dispatch": _SENT,
    "combine": f"as dispatch, the other way: {_HOME}",
    "dispatch_combine": f"both: {_SENT}, and {_HOME}",
    "experts": (
        "of the busiest rank: weights of the experts hit, and rows in and out, each once; local "
        "memory, so no fraction of a link"
    ),
    "shared": "its weights, and rows in and out, each once; local memory, so no fraction of a link",
    "layer": "none: a layer is not one transfer",
}
PART_TITLES = {"dispatch_combine": "dispatch + combine", "layer": "whole layer"}


def bytes_of(part: str, case: Case, loads: Sequence[Load], shape: BackendShape) -> int | None:
    """What BYTES says of a part; None where it says none."""
    sent = shape.sent_row_bytes
    home = case.moe.hidden_size * case.moe.torch_dtype.itemsize
    row_bytes = {"dispatch": sent, "combine": home, "dispatch_combine": sent + home}
    if part in row_bytes:
        return link_bytes(loads, row_bytes[part])
    if part == "experts":
        return experts_bytes(loads, case.moe, shape)
    return shared_bytes(case) if part == "shared" else None


def case_entry(
    case: Case,
    candidate: Candidate,
    part: str,
    *,
    times: Times | None = None,
    loads: Sequence[Load] = (),
    shape: BackendShape | None = None,
    link: LinkLimits | None = None,
    actual: dict[str, Any] | None = None,
    skip_reason: str | None = None,
) -> dict[str, Any]:
    """One measured part of one candidate; times_us is None where skip_reason says why."""
    num_bytes, gbps = None, None
    if times is not None and shape is not None:
        num_bytes = bytes_of(part, case, loads, shape)
        gbps = num_bytes / times.median / 1e3 if num_bytes else None
    is_link = part in ("dispatch", "combine", "dispatch_combine")
    return {
        "backend": candidate.backend,
        "dispatch_dtype": candidate.dispatch_dtype,
        "part": part,
        **case.sizes(),
        "actual": actual,
        "times_us": asdict(times) if times is not None else None,
        "bytes": num_bytes,
        "gbps": gbps,
        "formula": f"gbps = bytes / (1000 * times_us.median); bytes: {BYTES[part]}",
        "fraction_of_link": {
            "copy_engine": _fraction(gbps, link.copy_engine_gbps) if link and is_link else None,
            "triton_put": _fraction(gbps, link.triton_put_gbps) if link and is_link else None,
        },
        "skip_reason": skip_reason,
    }


def _fraction(gbps: float | None, limit: float | None) -> float | None:
    return gbps / limit if gbps is not None and limit is not None else None


def build_record(
    config: BenchConfig,
    device_names: Sequence[str],
    *,
    link: LinkLimits,
    entries: Sequence[dict[str, Any]],
    checks: Sequence[Check],
) -> dict[str, Any]:
    """The whole record. device_names: of each rank."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "bench",
        "command_line": command_line(config),
        "environment": describe_versions() | {"devices": describe_devices()},
        "rank_devices": list(device_names),
        "requested": config.model_dump(mode="json"),
        "method": {
            "order": "in each round each candidate once, in an order rotated by the round's number",
            "iteration": "the slowest rank's time; then median and 90th percentile over all rounds",
            "eager": "events (on a CPU: the host's clock) around one call",
            "graph": f"events around a replay of {CALLS_PER_GRAPH} calls, divided by them; "
            f"dispatch and combine alone between event nodes inside the graph",
            "input_sets": NUM_INPUT_SETS,
            "timed": TIMED,
        },
        "link": link.to_dict(),
        "cases": list(entries),
        "checks": [check.to_dict() for check in checks],
        "passed": all(check.passed for check in checks),
    }


def command_line(config: BenchConfig) -> str:
    """The options that give this configuration again."""
    words = ["ep-runtime bench"]
    for key, field in BenchConfig.model_fields.items():
        value = getattr(config, key)
        if value == field.default and key != "ranks":
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words.append(f"{option_of(key)} {text}")
    return " ".join(words)


def varied_keys(record: dict[str, Any]) -> list[str]:
    """The keys besides tokens_per_rank in which a record's cases of one candidate differ; records
    had no quantization once."""
    of_candidates = ("backends", "dispatch_dtype", "parts", "tokens_per_rank")
    keys = [key for key in LIST_KEYS if key not in of_candidates]
    requested = {"quantization": (), **record["requested"]}
    return [key for key in keys if len(requested[key]) > 1]


def label_of(entry: dict[str, Any]) -> str:
    """What an entry is a measurement of; records had no dispatch_dtype once."""
    return Candidate(entry["backend"], entry.get("dispatch_dtype", "auto")).label


def hardware(record: dict[str, Any]) -> str:
    """Example: 2 x NVIDIA H200, torch 2.11.0+cu130."""
    names = record["rank_devices"]
    kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    return f"{', '.join(kinds)}, torch {record['environment']['torch']}"


def print_record(record: dict[str, Any], console: Console) -> None:
    """A table a part: microseconds of each candidate by case; then what was skipped, and why."""
    entries = record["cases"]
    labels = list(dict.fromkeys(map(label_of, entries)))
    varied = varied_keys(record)
    for part in record["requested"]["parts"]:
        of_part = [e for e in entries if e["part"] == part and e["times_us"] is not None]
        shown = [label for label in labels if any(label_of(e) == label for e in of_part)]
        if not shown:
            continue
        title = f"{PART_TITLES.get(part, part)}: microseconds, median (p90) [GB/s]"
        table = Table("tokens a rank", *varied, *shown, title=title)
        rows: dict[tuple[Any, ...], dict[str, str]] = {}
        for entry in of_part:
            row = (entry["tokens_per_rank"], *(entry[key] for key in varied))
            rows.setdefault(row, {})[label_of(entry)] = _cell(entry)
        for row, cells in rows.items():
            table.add_row(*map(str, row), *(cells.get(name, "-") for name in shown))
        console.print(table, markup=False)
    console.print(_link_line(record["link"]), highlight=False, markup=False, soft_wrap=True)
    for line in _notes(entries):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    failed = [check for check in record["checks"] if not check["passed"]]
    for check in failed:
        console.print(
            f"failed: {check['name']}: {check['value']:.3g}, limit {check['limit']:.3g}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    console.print(hardware(record), highlight=False, markup=False)


def _cell(entry: dict[str, Any]) -> str:
    times, gbps = entry["times_us"], entry["gbps"]
    rate = f" [{gbps:.3g}]" if gbps is not None else ""
    return f"{_microseconds(times['median'])} ({_microseconds(times['p90'])}){rate}"


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _link_line(link: dict[str, Any]) -> str:
    if link["reason"] is not None:
        return f"link limit: not measured: {link['reason']}"
    return (
        f"link limit, one direction: copy engine {link['copy_engine_gbps']:.0f} GB/s, Triton put "
        f"{link['triton_put_gbps']:.0f} GB/s"
    )


def _notes(entries: Sequence[dict[str, Any]]) -> list[str]:
    """One line per reason: skipped backends and parts, and modes that were not the one asked."""
    lines = []
    for entry in entries:
        reason, actual = entry["skip_reason"], entry["actual"]
        if reason is not None:
            what = label_of(entry) if actual is None else f"{label_of(entry)} {entry['part']}"
            lines.append(f"skipped: {what}: {reason}")
        elif actual["mode_reason"]:
            lines.append(f"{label_of(entry)} measured {actual['mode']}: {actual['mode_reason']}")
    return list(dict.fromkeys(lines))
