"""docs/performance.md against the records: every number of its tables, as far as it is shown."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SHAPES = ("qwen3_235b_ep2", "deepseek_v3_ep32", "deepseek_v3_ep2", "mixtral_8x7b")
NUM_TOKENS = (1, 8, 32, 128, 512, 4096)
Row = list[list[float]]


@cache
def record(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return values


def table(section: str, number: int = 0) -> list[list[str]]:
    """The cells of a section's table, without its header and without the first column."""
    text = (ROOT / "docs/performance.md").read_text()
    parts = re.split(r"^## ", text, flags=re.MULTILINE)
    (body,) = (part for part in parts if part.startswith(section))
    tables = re.findall(r"(?:^\|.*\n)+", body, flags=re.MULTILINE)
    lines = tables[number].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]


def shown_numbers(cell: str) -> list[tuple[float, float]]:
    """Each number of a cell, and half a unit of its last digit."""
    found = re.findall(r"\d*\.\d+|\d+", cell)
    return [(float(text), 0.5 * 10.0 ** -len(text.partition(".")[2])) for text in found]


def compare(cells: list[list[str]], expected: Iterable[Row]) -> None:
    rows = list(expected)
    assert len(cells) == len(rows)
    for shown, wanted in zip(cells, rows, strict=True):
        assert len(shown) == len(wanted), (shown, wanted)
        for cell, values in zip(shown, wanted, strict=True):
            numbers = shown_numbers(cell)
            assert len(numbers) == len(values), (cell, values)
            for (number, half), value in zip(numbers, values, strict=True):
                assert abs(number - value) <= half * 1.0001, (cell, values)


# --- experts ---


def cells_of(*records: str) -> dict[tuple[str, str, int], dict[str, Any]]:
    return {
        (cell["table"], cell["shape"], cell["tokens_per_rank"]): cell
        for name in records
        for cell in record(name)["cells"]
    }


def median(cell: dict[str, Any], implementation: str) -> float:
    return float(cell["implementations"][implementation]["times_us"]["median"])


def own(cell: dict[str, Any]) -> list[float]:
    fraction = cell["implementations"]["ep_runtime"]["fraction_of_roofline"]
    return [median(cell, "ep_runtime"), float(fraction)]


def over_fastest(cell: dict[str, Any]) -> list[float]:
    return [*own(cell), cell["ratio_to_fastest_peer"]]


def over_each(cell: dict[str, Any]) -> list[float]:
    peers = ("vllm_triton", "deep_gemm_host_counts")
    return [*own(cell), *(median(cell, "ep_runtime") / median(cell, peer) for peer in peers)]


def beside_int4(cell: dict[str, Any]) -> list[float]:
    return [*own(cell), median(cell, "humming"), median(cell, "marlin")]


def beside_triton_kernels(cell: dict[str, Any]) -> list[float]:
    return [*own(cell), median(cell, "triton_kernels")]


@pytest.mark.parametrize(
    ("section", "number", "name", "records", "numbers"),
    [
        (
            "Experts, one GPU",
            0,
            "bf16",
            ("experts_bf16", "experts_bf16_4096_triton_kernels"),
            over_fastest,
        ),
        ("fp8 experts", 0, "fp8_block", ("experts_fp8_block",), over_each),
        ("Packed weights", 0, "int4_g128", ("experts_int4_g128",), beside_int4),
        ("Packed weights", 1, "mxfp4", ("experts_mxfp4",), beside_triton_kernels),
    ],
)
def test_a_table_of_experts_is_its_record(
    section: str,
    number: int,
    name: str,
    records: tuple[str, ...],
    numbers: Callable[[dict[str, Any]], list[float]],
) -> None:
    cells = cells_of(*records)
    rows = [[numbers(cells[name, shape, t]) for t in NUM_TOKENS] for shape in SHAPES]
    compare(table(section, number), rows)


def test_the_table_of_int8_and_nvfp4_is_its_record() -> None:
    cells = cells_of("experts_packed")
    shown = [row[1:] for row in table("Packed weights", 2)]
    rows = [
        [own(cells[name, shape, t]) for t in NUM_TOKENS]
        for shape in SHAPES
        for name in ("int8_g128", "nvfp4")
    ]
    compare(shown, rows)


# --- the exchange and whole layers ---


def times(name: str, part: str, **keys: Any) -> dict[tuple[Any, ...], float]:
    """(backend, dispatch_dtype, tokens a rank) -> median of a part."""
    return {
        (case["backend"], case.get("dispatch_dtype"), case["tokens_per_rank"]): float(
            case["times_us"]["median"]
        )
        for case in record(name)["cases"]
        if case["part"] == part
        and case["times_us"] is not None
        and all(case[key] == value for key, value in keys.items())
    }


def test_the_table_of_decode_is_its_record() -> None:
    found = {(b, t): us for (b, _, t), us in times("ep2_decode", "dispatch_combine").items()}
    rows: list[Row] = []
    for t in (1, 8, 32, 64, 128):
        us = [found[b, t] for b in ("symm_mem", "deepep_low_latency", "naive")]
        rows.append([*([one] for one in us), [us[0] / us[1]]])
    compare(table("Exchange, two GPUs", 0), rows)


def test_the_table_of_rows_in_fp8_is_its_record() -> None:
    whole = times("ep2_fp8_dispatch", "dispatch_combine")
    sent = times("ep2_fp8_dispatch", "dispatch")
    columns = [(b, d) for b in ("symm_mem", "deepep_low_latency") for d in ("model", "fp8")]
    rows = [[[whole[*c, t], sent[*c, t]] for c in columns] for t in (1, 8, 32, 128)]
    compare(table("Exchange, two GPUs", 1), rows)


def test_the_table_of_few_tokens_in_prefill_is_its_record() -> None:
    found = {(b, t): us for (b, _, t), us in times("ep2_prefill", "dispatch_combine").items()}
    backends = ("symm_mem", "deepep_high_throughput", "all_to_all", "naive")
    rows: list[Row] = []
    for t in (128, 1024):
        us = [found[b, t] for b in backends]
        rows.append([*([one] for one in us), [us[0] / us[1]]])
    compare(table("Exchange, two GPUs", 3), rows)


def test_the_table_of_prefill_is_its_record() -> None:
    name, columns = "ep2_fp8_dispatch_prefill", [("symm_mem", "model"), ("symm_mem", "fp8")]
    columns.append(("deepep_high_throughput", "model"))
    parts = {p: times(name, p) for p in ("dispatch_combine", "dispatch", "combine")}
    rows: list[Row] = []
    for t in (4096, 8192):
        for shown in (("dispatch_combine",), ("dispatch", "combine")):
            us = [[parts[p][*c, t] for p in shown] for c in columns]
            rows.append([*us, [a / b for a, b in zip(us[0], us[2], strict=True)]])
    compare(table("Exchange, two GPUs", 2), rows)


def fastest_peer(num_experts: int, scheme: str, t: int) -> float:
    lines = (ROOT / "benchmarks/results/ep2_peer_layers.jsonl").read_text().splitlines()
    found = [
        one[key]
        for one in map(json.loads, lines)
        for key in ("plain_us", "overlap_us", "overlap_comb_us")
        if (one["num_experts"], one["scheme"], one["T"]) == (num_experts, scheme, t)
        and one.get(key) is not None
    ]
    return float(min(found))


def test_the_table_of_whole_layers_is_its_records() -> None:
    rows: list[Row] = []
    for phase, deepep, counts in (
        ("decode", "deepep_low_latency", (1, 8, 32, 128)),
        ("prefill", "deepep_high_throughput", (1024, 4096)),
    ):
        for num_experts in (16, 256):
            for t in counts:
                row: Row = []
                for scheme, quantization in (("bf16", "none"), ("fp8", "fp8_block")):
                    keys = {"num_experts": num_experts, "quantization": quantization}
                    both = times(f"ep2_layer_{phase}", "layer", **keys)
                    last = times(f"ep2_layer_{phase}_symm_mem", "layer", **keys)
                    (now,) = (us for (b, _, n), us in last.items() if (b, n) == ("symm_mem", t))
                    before, peers = (
                        next(us for (b, _, n), us in both.items() if (b, n) == (name, t))
                        for name in ("symm_mem", deepep)
                    )
                    peer = fastest_peer(num_experts, scheme, t)
                    row += [[now, before], [peers], [peer], [now / peer]]
                rows.append(row)
    compare(table("Whole layer, two GPUs"), rows)


def test_the_table_of_launches_is_its_record() -> None:
    rows: list[Row] = []
    for case in record("symm_mem_launches")["cases"]:
        us = {launch["name"]: launch["us"] for launch in case["launches"]}
        named = ("put_tokens", "wait_for_dispatch", "put_results", "sum_results")
        rows.append([*([us[name]] for name in named)])
    shown = [row[:4] for row in table("Launches of `symm_mem`")]
    compare(shown, rows)
