"""Measured times of kernels: how `auto` goes by them, what it says, and what is no table."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ep_runtime import kernel_times
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernel_times import (
    TimedLayer,
    TimedPoint,
    TimesTable,
    find_times,
    forget_kernel_times,
    pick_kernel,
    read_kernel_times,
    register_kernel_times,
    times_values,
)
from ep_runtime.kernels.base import Activation, ExpertsShape
from ep_runtime.kernels.errors import ConfigError, PlanError
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan, resolve_plan

DEVICE = "A device"
LAYER = TimedLayer("int4_w4a16", 128, "bfloat16", 64, 4096, 1536, 8)
# Marlin wins in decode, triton in prefill.
POINTS = (
    TimedPoint(1, (("triton", 60.0), ("marlin", 40.0))),
    TimedPoint(32, (("triton", 300.0), ("marlin", 200.0))),
    TimedPoint(4096, (("triton", 1000.0), ("marlin", 4000.0))),
)
TABLE = TimesTable("mine.json", DEVICE, ("a command",), ((LAYER, POINTS),))


@pytest.fixture(autouse=True)
def no_tables_stay() -> Iterator[None]:
    yield
    forget_kernel_times()


def shape(**changes: Any) -> ExpertsShape:
    import torch

    one = ExpertsShape(
        num_local_experts=64,
        hidden_size=4096,
        intermediate_size=1536,
        top_k=8,
        activation=Activation(),
        dtype=torch.bfloat16,
        scheme=QuantScheme(WeightScheme.INT4, group_size=128),
    )
    return replace(one, **changes)


def pick(max_tokens: int, *names: str, **changes: Any) -> tuple[str, dict[str, str]]:
    return pick_kernel(names, shape(**changes), DEVICE, max_tokens)


def test_the_fastest_over_the_points_up_to_the_bound_is_taken() -> None:
    register_kernel_times(TABLE)
    names = ("triton", "marlin", "reference")
    assert pick(1, *names)[0] == "marlin"
    assert pick(64, *names)[0] == "marlin"
    # (2/3 * 2/3 * 4) ** (1/3) = 1.21: triton, which is 4 times as fast where there is most to do.
    assert pick(4096, *names)[0] == "triton"
    _, reasons = pick(64, *names)
    assert reasons["triton"] == (
        "usable, but it takes 1.50 times as long as marlin: mine.json (int4_w4a16 group 128, 64 "
        "experts, hidden 4096, intermediate 1536, top-8) has triton 60, 300 and marlin 40, 200 us "
        "at 1, 32 tokens a rank"
    )
    assert reasons["reference"] == (
        "usable, but marlin is faster than triton, and mine.json has no times of both"
    )


def test_a_gain_too_small_does_not_change_autos_order() -> None:
    points = (TimedPoint(8, (("triton", 100.0), ("marlin", 96.0))),)
    register_kernel_times(replace(TABLE, layers=((LAYER, points),)))
    chosen, reasons = pick(8, "triton", "marlin")
    assert chosen == "triton"
    assert "triton comes first in auto's order, and 4% is too little" in reasons["marlin"]
    points = (TimedPoint(8, (("triton", 100.0), ("marlin", 94.0))),)
    register_kernel_times(replace(TABLE, layers=((LAYER, points),)))
    assert pick(8, "triton", "marlin")[0] == "marlin"


def test_without_times_autos_order_stands_and_says_so() -> None:
    chosen, reasons = pick(8, "triton", "marlin")
    assert (chosen, reasons["marlin"]) == (
        "triton",
        "usable, but triton comes first in auto's order",
    )
    register_kernel_times(TABLE)
    chosen, reasons = pick(8, "triton", "reference")
    assert chosen == "triton"
    assert reasons["reference"].endswith("auto's order, and mine.json has no times of both")
    # A kernel that the table has times of, but that is not among those that fit, is not taken.
    assert pick(8, "reference")[0] == "reference"


def test_a_layer_takes_the_nearest_measured_one_stored_alike() -> None:
    other = replace(LAYER, num_local_experts=128)
    slow = (TimedPoint(1, (("triton", 1.0), ("marlin", 2.0))),)
    register_kernel_times(replace(TABLE, layers=((LAYER, POINTS), (other, slow))))
    found = find_times(shape(num_local_experts=80), DEVICE, 8)
    assert found is not None
    assert found.layer == LAYER
    found = find_times(shape(num_local_experts=100, hidden_size=7168), DEVICE, 8)
    assert found is not None
    assert found.layer == other
    assert find_times(shape(num_local_experts=8), DEVICE, 8) is None
    assert find_times(shape(top_k=2), DEVICE, 8) is None
    int8 = QuantScheme(WeightScheme.INT8, group_size=128)
    assert find_times(shape(scheme=int8), DEVICE, 8) is None
    group_32 = QuantScheme(WeightScheme.INT4, group_size=32)
    assert find_times(shape(scheme=group_32), DEVICE, 8) is None
    assert find_times(shape(num_local_experts=0), DEVICE, 8) is None
    assert find_times(shape(), "Another device", 8) is None


def test_points_above_the_bound_count_only_where_none_is_below() -> None:
    register_kernel_times(replace(TABLE, layers=((LAYER, POINTS[1:]),)))
    found = find_times(shape(), DEVICE, 8)
    assert found is not None
    assert [point.tokens_per_rank for point in found.points] == [32]


def test_a_table_registered_later_comes_first() -> None:
    register_kernel_times(TABLE)
    reverse = (TimedPoint(1, (("triton", 40.0), ("marlin", 60.0))),)
    register_kernel_times(replace(TABLE, name="later.json", layers=((LAYER, reverse),)))
    assert pick(1, "triton", "marlin")[0] == "triton"
    register_kernel_times(TABLE)
    assert pick(1, "triton", "marlin")[0] == "marlin"


def machine(*packages: str) -> Machine:
    return replace(Machine.preset("h200x8"), name=DEVICE, packages=packages)


def plan(max_tokens: int, experts: str = "auto", *, installed: tuple[str, ...] = ("vllm",)) -> Plan:
    moe = MoEConfig(
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_experts=128,
        top_k=8,
        quantization=QuantScheme(WeightScheme.INT4, group_size=128),
    )
    parallel = ParallelConfig(dp_size=2, all2all_backend="symm_mem", max_tokens_per_rank=max_tokens)
    return resolve_plan(moe, parallel, machine(*installed), experts=experts)


def test_a_plan_takes_the_measured_kernel_and_explains_it() -> None:
    register_kernel_times(TABLE)
    decode, prefill = plan(128), plan(4096)
    assert (decode.experts, prefill.experts) == ("marlin", "triton")
    text = decode.explain()
    assert "experts    marlin: modular" in text
    assert "not triton: usable, but it takes 1.50 times as long as marlin: mine.json" in text
    assert "not marlin: usable, but it takes 1.21 times as long as triton" in prefill.explain()
    assert decode.digest() != prefill.digest()
    # What is not installed is not taken, whatever its times.
    without = plan(128, installed=())
    assert without.experts == "triton"
    assert "not marlin: it needs the package vllm" in without.explain()


def test_a_named_kernel_is_taken_whatever_the_times_or_is_an_error() -> None:
    register_kernel_times(TABLE)
    assert plan(128, "triton").experts == "triton"
    assert plan(4096, "marlin").experts == "marlin"
    with pytest.raises(PlanError, match="experts marlin cannot be used: it needs the package"):
        plan(4096, "marlin", installed=())
    with pytest.raises(ConfigError, match="experts 'marlyn' is unknown; choose one of: auto"):
        plan(4096, "marlyn")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(times_values(TABLE)))
    assert read_kernel_times(path) == TABLE


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("schema_version",), 2, r"schema_version \(2\) must be 1"),
        (("device",), "", "device"),
        (("sources",), [], "sources must be a list of at least one"),
        (("layers", 0, "top_k"), 0, r"layers\[0\].top_k \(0\) must be above 0"),
        (("layers", 0, "dtypes"), "x", r"layers\[0\].dtypes is an unknown key"),
        (
            ("layers", 0, "scheme"),
            "int4",
            r"layers\[0\].scheme \(int4\) must be one of .*int4_w4a16",
        ),
        (("layers", 0, "dtype"), "bf16", r"layers\[0\].dtype \(bf16\) must be one of .*bfloat16"),
        (
            ("layers", 0, "group_size"),
            "128",
            r"layers\[0\].group_size \('128'\) must be of type int",
        ),
        (("layers", 0, "group_size"), 0, r"layers\[0\].group_size \(0\) must be a number"),
        (("layers", 0, "points"), [], r"layers\[0\].points: tokens_per_rank \(\[\]\) must rise"),
        (("layers", 0, "points", 1, "tokens_per_rank"), 1, "must rise"),
        (("layers", 0, "points", 1, "tokens_per_rank"), 8.5, "must be a whole number"),
        (("layers", 0, "points", 0, "us", "marlin"), -1, r"us.marlin \(-1\) must be above 0"),
        (("layers", 0, "points", 0, "us"), {}, "must be kernels' times by name"),
        (("layers", 0, "points", 0, "more"), 1, "needs the keys tokens_per_rank and us"),
    ],
)
def test_what_is_no_table_is_refused_by_its_place(
    place: tuple[Any, ...], value: Any, message: str, tmp_path: Path
) -> None:
    values = times_values(TABLE)
    at: Any = values
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as caught:
        register_kernel_times(path)
    assert str(path) in str(caught.value)
    assert "kernel-times" in str(caught.value)


def test_a_layer_twice_and_a_file_that_is_not_there_are_refused(tmp_path: Path) -> None:
    values = times_values(replace(TABLE, layers=TABLE.layers * 2))
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="twice; drop one"):
        read_kernel_times(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_kernel_times(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "the file is empty"),
        (b"\n", "the file is empty"),
        (b'{"layers": [', "Expecting value: line 1"),
        (b"\x89PNG\r\n", "codec can't decode"),
    ],
)
def test_a_broken_file_among_the_shipped_ones_is_named_and_to_be_deleted(
    content: bytes, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "X.json").write_bytes(content)
    monkeypatch.setattr(kernel_times, "SHIPPED_TIMES", tmp_path)
    kernel_times._shipped_tables.cache_clear()
    try:
        with pytest.raises(ConfigError, match=fault) as caught:
            plan(128)
        (tmp_path / "X.json").unlink()
        assert plan(128).experts == "triton"
    finally:
        kernel_times._shipped_tables.cache_clear()
    line = str(caught.value)
    assert line.startswith(f"table of kernels' times {tmp_path / 'X.json'}: ")
    assert line.endswith(
        "; delete it, or write it anew with `python -m benchmarks.experts_peers kernel-times`"
    )
    assert "\n" not in line
