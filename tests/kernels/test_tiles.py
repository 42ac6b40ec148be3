"""Which tiles a call gets: a table's where one was measured near by, else the rule's."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from ep_runtime.kernels import tile_tables, tiles, triton_experts
from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.packed_schedule import choose_packed_tiles, rule_packed_tiles
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.tile_checks import check_tiles
from ep_runtime.kernels.tile_tables import (
    SHIPPED_TABLES,
    TileTable,
    TunedLayer,
    TunedPoint,
    forget_tile_tables,
    nearest_point,
    read_tile_table,
    register_tile_table,
)
from ep_runtime.kernels.tiles import (
    BLOCK_M_HEIGHTS,
    ExpertsTiles,
    GemmTiles,
    choose_tiles,
    rule_tiles,
)
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.tuning_text import describe_tuning
from ep_runtime.kernels.workspace import Workspace

CUDA = torch.device("cuda", 0)
SHAPE = ExpertsShape(8, 4096, 1024, 8, Activation(), torch.bfloat16, num_experts=256)
FP8_SHAPE = replace(SHAPE, scheme=QuantScheme(WeightScheme.FP8_BLOCK))
# 16 rows an expert; not what the rule has anywhere.
TUNED = ExpertsTiles(
    32,
    gate_up=GemmTiles(64, 128, num_warps=4, num_stages=4, swap_operands=True),
    down=GemmTiles(128, 64, num_warps=4, num_stages=5, swap_operands=True, programs_per_sm=2),
)
HOPPER = ExpertsTiles(
    128, TUNED.down, TUNED.down, is_hopper=True, down_schedule=HopperSchedule(group_tiles=8)
)


def point(rows: float, found: ExpertsTiles | None = None) -> TunedPoint:
    return TunedPoint(rows, found, us=90.0, rule_us=100.0, roofline_fraction=0.9)


def table(*points: TunedPoint, **more: str) -> TileTable:
    named = {"device": "NVIDIA H200", "triton": triton.__version__} | more
    layers = ((TunedLayer.of(SHAPE), points),)
    return TileTable("mine.json", source="a test", layers=layers, **named)


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton compiles, and the device is an H200: nothing here asks it anything else."""
    forget_tile_tables()
    monkeypatch.setattr(tiles, "is_interpreting", lambda: False)
    monkeypatch.setattr(tile_tables, "is_interpreting", lambda: False)
    monkeypatch.setattr(tiles, "is_hopper", lambda device: True)
    monkeypatch.setattr(tiles, "num_multiprocessors", lambda device, off_gpu: 132)
    monkeypatch.setattr(tile_tables, "_device_name", lambda device: "NVIDIA H200")
    yield
    forget_tile_tables()


def choose(rows_per_expert: float, shape: ExpertsShape = SHAPE) -> ExpertsTiles:
    """The tiles for so many rows an expert: with top-8 of 256, 32 times as many source rows."""
    source_rows = round(32 * rows_per_expert)
    assert source_rows == 32 * rows_per_expert
    return choose_tiles(source_rows, source_rows, shape, CUDA)


@pytest.mark.parametrize(
    ("rows", "block_m", "is_hopper"),
    [
        *[(1, 16, False), (12, 16, False), (13, 32, False), (32, 64, False), (64, 128, False)],
        *[(99, 128, False), (100, 128, True), (4096, 128, True)],
    ],
)
def test_the_rule_leaves_a_quarter_of_room(rows: int, block_m: int, is_hopper: bool) -> None:
    chosen = choose(rows)
    assert (chosen.block_m, chosen.is_hopper) == (block_m, is_hopper)
    assert chosen == rule_tiles(rows, SHAPE, CUDA)


@pytest.mark.parametrize(
    ("rows", "num_local", "hidden_size", "block_n"),
    [(0.25, 8, 4096, 64), (4, 8, 4096, 128), (0.25, 8, 18432, 128), (0.25, 64, 4096, 128)],
)
def test_few_experts_second_projection_in_fp8_is_cut_finer(
    rows: float, num_local: int, hidden_size: int, block_n: int
) -> None:
    shape = replace(FP8_SHAPE, num_local_experts=num_local, hidden_size=hidden_size)
    assert rule_tiles(rows, shape, CUDA).down.block_n == block_n
    assert rule_tiles(rows, shape, CUDA).gate_up == rule_tiles(8, shape, CUDA).gate_up


def test_a_table_is_looked_up_before_the_rule() -> None:
    register_tile_table(table(point(16, TUNED)))
    assert choose(16) == TUNED
    assert choose(16, replace(SHAPE, num_local_experts=4)).block_m == 32
    assert choose(16, replace(SHAPE, num_local_experts=4)) != TUNED
    assert choose(16, FP8_SHAPE) != TUNED
    assert choose(16, replace(SHAPE, dtype=torch.float16)) != TUNED
    relu2 = Activation(ActivationKind.RELU2)
    assert choose(16, replace(SHAPE, activation=relu2)) != TUNED


@pytest.mark.parametrize("other", [{"device": "NVIDIA H100"}, {"triton": "3.5.0"}], ids=str)
def test_a_table_of_another_device_or_triton_is_not_used(other: dict[str, str]) -> None:
    register_tile_table(table(point(16, TUNED), **other))
    assert choose(16) == rule_tiles(16, SHAPE, CUDA)
    assert describe_tuning(SHAPE, "NVIDIA H200").startswith("the rule: no table of NVIDIA H200")


def test_schemes_without_tables_are_said_to_have_none() -> None:
    shape = replace(SHAPE, scheme=QuantScheme(WeightScheme.NF3))
    said = describe_tuning(shape, "NVIDIA H200")
    assert said == "the rule: weights stored as nf3 have no tables"


def test_no_table_is_used_on_a_cpu_or_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    register_tile_table(table(point(16, TUNED)))
    assert choose_tiles(512, 512, SHAPE, torch.device("cpu")) != TUNED
    monkeypatch.setattr(tile_tables, "is_interpreting", lambda: True)
    assert choose(16) != TUNED


def test_the_last_registered_table_comes_first() -> None:
    other = replace(TUNED, block_m=16)
    first = table(point(16, TUNED))
    register_tile_table(first)
    register_tile_table(replace(table(point(16, other)), name="other.json"))
    assert choose(16) == other
    register_tile_table(first)
    assert choose(16) == TUNED
    assert describe_tuning(SHAPE, "NVIDIA H200") == (
        "table mine.json, near 16 rows an expert; else the rule"
    )


@pytest.mark.parametrize(
    ("expected", "rows"),
    [(3.9, 1), (4, 1), (4.1, 16), (63, 16), (65, None), (0.25, 1), (0.24, None)],
)
def test_the_nearest_point_is_that_of_the_docstring(expected: float, rows: float | None) -> None:
    found = nearest_point([point(1), point(16)], expected)
    assert (None if found is None else found.rows_per_expert) == rows


def test_points_of_another_height_or_of_the_other_gemms_do_not_count() -> None:
    """32 rows and 60 are near, but the rule has 64 and 128 positions a tile for them."""
    register_tile_table(table(point(32, TUNED)))
    assert choose(26) == choose(51) == TUNED
    for rows in (16, 52, 99, 100):
        assert choose(rows) == rule_tiles(rows, SHAPE, CUDA)
    register_tile_table(table(point(64, TUNED)))
    assert choose(99) == TUNED
    assert choose(100) == rule_tiles(100, SHAPE, CUDA)
    assert choose(100).is_hopper
    register_tile_table(table(point(64, TUNED), point(128, HOPPER)))
    assert (choose(99), choose(100)) == (TUNED, HOPPER)


def test_a_point_where_the_rule_was_the_fastest_keeps_its_neighbour_away() -> None:
    register_tile_table(table(point(1, TUNED), point(8)))
    assert choose(2) == TUNED
    assert choose(4) == rule_tiles(4, SHAPE, CUDA)


def test_a_call_without_rows_has_tiles_too() -> None:
    register_tile_table(table(point(1, TUNED)))
    assert choose(0) == rule_tiles(0, SHAPE, CUDA)


def test_a_lookup_is_remembered_until_a_table_is_registered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    original = TileTable.points_of

    def points_of(self: TileTable, layer: TunedLayer) -> tuple[TunedPoint, ...]:
        looked.append(self.name)
        return original(self, layer)

    monkeypatch.setattr(TileTable, "points_of", points_of)
    register_tile_table(table(point(16, TUNED)))
    choose(16), choose(17)
    assert looked == ["mine.json"]


def test_the_rules_own_tiles_pass_the_checks_of_a_table() -> None:
    for shape in (SHAPE, FP8_SHAPE, replace(SHAPE, dtype=torch.float32)):
        for block_m in BLOCK_M_HEIGHTS:
            found = rule_tiles(block_m / 1.25, shape, CUDA)
            layer = TunedLayer.of(shape)
            check_tiles(
                found,
                "tiles",
                scheme=layer.scheme,
                dtype=layer.dtype,
                is_gated=True,
                hidden_size=layer.hidden_size,
                intermediate_size=layer.intermediate_size,
            )


@pytest.mark.parametrize("path", sorted(SHIPPED_TABLES.glob("*.json")), ids=lambda p: p.name)
def test_a_shipped_table_is_valid_and_gains_what_it_says(path: Path) -> None:
    shipped = read_tile_table(path)
    assert shipped.device.replace(" ", "_") == path.stem
    for _, points in shipped.layers:
        for one in points:
            gains = one.us < 0.98 * one.rule_us * (1 + 1e-3)
            assert gains if one.tiles is not None else one.us == one.rule_us
            # Of a kernel that only reads, or of products as large: no call passes it by much.
            assert one.roofline_fraction < 1.25


@pytest.mark.parametrize("path", sorted(SHIPPED_TABLES.glob("*.json")), ids=lambda p: p.name)
def test_a_shipped_table_is_what_a_call_of_its_layers_takes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = read_tile_table(path)
    monkeypatch.setattr(triton, "__version__", shipped.triton)
    monkeypatch.setattr(tile_tables, "_device_name", lambda device: shipped.device)
    forget_tile_tables()
    for layer, points in shipped.layers:
        shape = shape_of(layer)
        for one in points:
            rows = max(1, round(one.rows_per_expert * layer.num_local_experts))
            expected = rows / layer.num_local_experts
            if is_packed(shape.scheme):
                packed = one.tiles or rule_packed_tiles(expected, shape)
                assert choose_packed_tiles(rows, rows, shape, CUDA) == packed
            else:
                wanted = one.tiles or rule_tiles(expected, shape, CUDA)
                assert choose_tiles(rows, rows, shape, CUDA) == wanted


def shape_of(layer: TunedLayer) -> ExpertsShape:
    """A layer whose rows each go to one expert, all of them local."""
    return ExpertsShape(
        layer.num_local_experts,
        layer.hidden_size,
        layer.intermediate_size,
        1,
        Activation() if layer.is_gated else Activation(ActivationKind.RELU2),
        getattr(torch, layer.dtype),
        scheme=QuantScheme(WeightScheme(layer.scheme), layer.group_size, layer.has_zero_points),
        num_experts=layer.num_local_experts,
    )


def test_a_layer_runs_on_the_tiles_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts are asked on a CPU; what they take is what an H200 would get."""
    taken: list[tuple[int, ExpertsTiles]] = []

    def choose_on_h200(
        num_rows: int, num_source_rows: int | None, shape: ExpertsShape, device: torch.device
    ) -> ExpertsTiles:
        return choose_tiles(num_rows, num_source_rows, shape, CUDA)

    def align(*given: Any, block_m: int, **named: Any) -> int:
        return block_m

    def project(*given: Any, tiles: ExpertsTiles, **named: Any) -> None:
        taken.append((given[2], tiles))

    monkeypatch.setattr(triton_experts, "choose_tiles", choose_on_h200)
    monkeypatch.setattr(triton_experts, "align_slots", align)
    monkeypatch.setattr(triton_experts, "project_slots", project)
    monkeypatch.setattr(triton_experts, "sum_slots", lambda *given, **named: None)
    layer = replace(SHAPE, hidden_size=32, intermediate_size=16)
    register_tile_table(
        replace(table(), layers=((TunedLayer.of(layer), (point(16, TUNED),)),)),
    )
    rows = StandardExpertInput(
        torch.zeros(512, 32, dtype=torch.bfloat16),
        torch.zeros(512, 8, dtype=torch.int32),
        torch.zeros(512, 8),
        num_source_rows=512,
    )
    weights = ExpertWeights(torch.zeros(8, 32, 32), torch.zeros(8, 32, 16))
    TritonExperts(layer).run(rows, weights, Workspace(torch.device("cpu")))
    assert taken == [(TUNED.block_m, TUNED)]


def plain_values() -> dict[str, Any]:
    """A table as JSON has it."""
    gemm = {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 4}
    found = {"block_m": 32, "gate_up": dict(gemm), "down": dict(gemm)}
    one = {"rows_per_expert": 16, "tiles": found, "us": 9, "rule_us": 10, "roofline_fraction": 0.5}
    layer = {"num_local_experts": 8, "hidden_size": 4096, "intermediate_size": 1024}
    layer |= {"is_gated": True, "scheme": "none", "dtype": "bfloat16", "points": [one]}  # type: ignore[dict-item]
    named = {"schema_version": 1, "device": "NVIDIA H200", "triton": "3.6.0", "source": "a test"}
    return {**named, "layers": [layer]}


def gate_up(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tiles_of(values)["gate_up"]
    return found


def tiles_of(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = values["layers"][0]["points"][0]["tiles"]
    return found


def as_fp8(values: dict[str, Any], **more: Any) -> None:
    values["layers"][0]["scheme"] = "fp8_block"
    gate_up(values).update(more)


def as_hopper(values: dict[str, Any], **layer: Any) -> None:
    values["layers"][0].update(layer)
    tiles_of(values).update(block_m=128, is_hopper=True)
    gemm = {"block_n": 128, "block_k": 128, "num_warps": 4, "num_stages": 2}
    tiles_of(values).update(gate_up=gemm, down=gemm)


FAULTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda v: v.pop("device"), "has the keys"),
    (lambda v: v.update(extra=1), "has the keys"),
    (lambda v: v.update(schema_version=2), "schema_version (2) must be 1"),
    (lambda v: v.update(layers={}), "layers must be a list"),
    (lambda v: v["layers"].append(v["layers"][0]), "twice; drop one"),
    (lambda v: v["layers"][0].update(points=[]), "layers[0].points must be a list"),
    (lambda v: v["layers"][0].update(experts=3), "layers[0].experts is an unknown key"),
    (lambda v: v["layers"][0].pop("dtype"), "layers[0] needs the key dtype"),
    (lambda v: v["layers"][0].update(scheme="nf3"), "scheme (nf3) must be one of"),
    (
        lambda v: v["layers"][0].update(num_local_experts=0),
        "layers[0].num_local_experts (0) must be above 0",
    ),
    (lambda v: v["layers"][0].update(group_size=-1), "layers[0].group_size (-1) must be above 0"),
    (
        lambda v: v["layers"][0].update(group_size="128"),
        "layers[0].group_size ('128') must be of type int, or null",
    ),
    (lambda v: v["layers"][0]["points"].append(v["layers"][0]["points"][0]), "must rise"),
    (lambda v: v["layers"][0]["points"][0].update(us=0), "points[0].us (0.0) must be above 0"),
    (lambda v: v["layers"][0]["points"][0].pop("tiles"), "needs the key tiles"),
    (lambda v: tiles_of(v).update(block_m=256), "tiles.block_m (256) must be one of 16, 32"),
    (lambda v: tiles_of(v).update(is_hopper=True), "block_m (32) must be 128 of Hopper"),
    (
        lambda v: tiles_of(v).update(down_schedule={"num_stages": 9}),
        "down_schedule: num_stages (9) must be 2 to 4",
    ),
    (lambda v: gate_up(v).update(block_n=96), "gate_up.block_n (96) must be one of 16, 32"),
    (lambda v: gate_up(v).update(block_k=256), "gate_up.block_k (256) must be at most 128"),
    (lambda v: gate_up(v).update(num_warps=3), "gate_up.num_warps (3) must be one of 4, 8"),
    (lambda v: gate_up(v).update(num_stages=True), "num_stages (True) must be of type int"),
    (lambda v: gate_up(v).update(num_stage=3), "gate_up.num_stage is an unknown key"),
    (
        lambda v: gate_up(v).update(num_stages=8),
        "gate_up needs 327680 bytes of shared memory, and a program has at most 232448: lower",
    ),
    (
        lambda v: as_hopper(v, hidden_size=2881),
        "tiles.is_hopper: TMA, which the Hopper GEMMs read with, takes rows of a multiple of 16 "
        "bytes, and rows of the layer's hidden_size (2881) have 5762",
    ),
    (
        lambda v: as_hopper(v, intermediate_size=1028),
        "the layer's intermediate_size (1028) have 2056",
    ),
    (
        lambda v: as_hopper(v, scheme="fp8_block", hidden_size=2888),
        "the layer's hidden_size (2888) have 2888",
    ),
    (lambda v: as_fp8(v), "gate_up.block_n (64) must be 128 of fp8_block: its result is quantised"),
    (lambda v: as_fp8(v, block_k=64), "gate_up.block_k (64) must be 128 of fp8_block"),
]


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(plain_values()))
    read = read_tile_table(path)
    (layer, (one,)) = read.layers[0]
    assert layer == TunedLayer.of(SHAPE)
    assert one.tiles == ExpertsTiles(32, GemmTiles(64, 128, 4, 4), GemmTiles(64, 128, 4, 4))
    assert (one.rows_per_expert, one.us, one.rule_us) == (16.0, 9.0, 10.0)


@pytest.mark.parametrize(
    "layer",
    [{"hidden_size": 2888}, {"scheme": "fp8_block", "hidden_size": 2896}],
    ids=["bfloat16", "fp8_block"],
)
def test_rows_of_whole_units_of_tma_may_have_hopper_tiles(
    layer: dict[str, Any], tmp_path: Path
) -> None:
    values = plain_values()
    as_hopper(values, **layer)
    (tmp_path / "table.json").write_text(json.dumps(values))
    ((_, (one,)),) = read_tile_table(tmp_path / "table.json").layers
    assert isinstance(one.tiles, ExpertsTiles)
    assert one.tiles.is_hopper


@pytest.mark.parametrize(("spoil", "said"), FAULTS, ids=[said for _, said in FAULTS])
def test_a_bad_table_is_one_clear_error(
    spoil: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    values = plain_values()
    spoil(values)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as error:
        read_tile_table(path)
    assert said in str(error.value)
    assert str(error.value).startswith(f"tile table {path}: ")


def test_a_file_that_is_no_table_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        register_tile_table(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConfigError, match="has the keys list; it needs schema_version"):
        register_tile_table(tmp_path / "list.json")
