"""`ep-runtime tune` on packed weights: candidates, the search, the table, and who reads it."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from ep_runtime.kernels import tile_tables
from ep_runtime.kernels.base import Activation, ExpertsShape
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.packed_schedule import (
    PACKED_HEIGHTS,
    PackedExpertsTiles,
    PackedTiles,
    choose_packed_tiles,
    rule_packed_tiles,
)
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.tile_checks import check_packed_tiles
from ep_runtime.kernels.tile_tables import (
    TileTable,
    TunedLayer,
    TunedPoint,
    forget_tile_tables,
    read_tile_table,
    register_tile_table,
    tuned_packed_tiles,
    tuned_tiles,
)
from ep_runtime.kernels.tuning_text import describe_tuning
from ep_runtime.launch import tune_command
from ep_runtime.launch.tune_candidates import Candidate, candidates_of, heights_near
from ep_runtime.launch.tune_command import TunePlan, tune_layers
from ep_runtime.launch.tune_layers import TuneSizes, layers_to_tune
from ep_runtime.launch.tune_problem import TuneProblem
from ep_runtime.launch.tune_record import table_values
from ep_runtime.launch.tune_search import SearchNotes, search_point
from ep_runtime.launch.tune_timing import Call, Ceilings, NameT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
INT4 = QuantScheme(WeightScheme.INT4, 32, has_zero_points=True)
SHAPE = ExpertsShape(3, 128, 96, 2, Activation(), torch.bfloat16, scheme=INT4, num_experts=6)
LARGE = ExpertsShape(64, 4096, 1536, 8, Activation(), torch.bfloat16, scheme=INT4, num_experts=128)
CEILINGS = Ceilings(bytes_per_second=1e12, flops_per_second=1e15, products="bfloat16")
SLOW = PackedTiles(64, num_warps=4, num_stages=1)
FAST = PackedTiles(64, num_warps=4, num_stages=1, values_first=True, group_tiles=2)
NAME = "NVIDIA H200"


class TableTimer:
    """FAST is fast in a projection and in both; all else is slow. Runs no call."""

    def time(self, calls: Mapping[NameT, Sequence[Call]], *, num_rounds: int) -> dict[NameT, float]:
        return {name: self._us_of(name) for name in calls}

    def _us_of(self, name: Any) -> float:
        hows = [name.how] if isinstance(name, Candidate) else [name.gate_up, name.down]
        return sum(40.0 if how == FAST else 50.0 for how in hows)


def both(*hows: PackedTiles, block_m: int = 16) -> list[Candidate]:
    return [Candidate(p, block_m, how) for how in hows for p in ("gate_up", "down")]


@pytest.fixture(scope="module")
def problem() -> TuneProblem:
    return TuneProblem(SHAPE, 9, CPU)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables are looked up as on an H200, whatever this process runs on."""
    monkeypatch.setattr(tile_tables, "is_interpreting", lambda: False)
    monkeypatch.setattr(tile_tables, "_device_name", lambda device: NAME)
    monkeypatch.setattr("ep_runtime.kernels.packed_schedule.is_interpreting", lambda: False)
    yield
    forget_tile_tables()


def test_the_fastest_right_tiles_of_packed_weights_win(problem: TuneProblem) -> None:
    """Both are checked against float32, in the interpreter, at 16-bit products' limit."""
    assert problem.whole_limit == 1e-2
    notes = SearchNotes()
    point = search_point(problem, both(SLOW, FAST), TableTimer(), CEILINGS, notes)
    assert point.tiles == PackedExpertsTiles(16, FAST, FAST)
    assert (point.us, point.rule_us) == (80.0, 100.0)
    assert not notes.wrong
    assert not notes.failed


def test_a_wrong_candidate_cannot_win(
    problem: TuneProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    right: Callable[..., float] = TuneProblem.error_of
    monkeypatch.setattr(
        TuneProblem,
        "error_of",
        lambda self, candidate: 1.0 if candidate.how == FAST else right(self, candidate),
    )
    notes = SearchNotes()
    point = search_point(problem, both(SLOW, FAST), TableTimer(), CEILINGS, notes)
    assert point.tiles is None
    assert len(notes.wrong) == 2


@pytest.mark.parametrize("expected", [0.5, 20.0, 60.0, 500.0])
@pytest.mark.usefixtures("compiled")
def test_candidates_could_stand_in_a_table_and_the_rule_is_among_them(expected: float) -> None:
    found = candidates_of(expected, LARGE, CUDA)
    rule = rule_packed_tiles(expected, LARGE)
    assert Candidate("gate_up", rule.block_m, rule.gate_up) in found
    assert Candidate("down", rule.block_m, rule.down) in found
    assert {c.block_m for c in found} == set(heights_near(expected, LARGE, CUDA))
    assert {c.block_m for c in found} <= set(PACKED_HEIGHTS)
    for candidate in found:
        assert isinstance(candidate.how, PackedTiles)
        tiles = PackedExpertsTiles(candidate.block_m, rule.gate_up, rule.down)
        changed: dict[str, Any] = {candidate.projection: candidate.how}
        tiles = replace(tiles, **changed)
        check_packed_tiles(tiles, "x", scheme="int4_w4a16", dtype="bfloat16", is_gated=True)


def table_of(*points: TunedPoint, shape: ExpertsShape = LARGE) -> TileTable:
    return TileTable(
        "mine.json", NAME, triton.__version__, "a test", ((TunedLayer.of(shape), points),)
    )


@pytest.mark.usefixtures("compiled")
def test_a_call_takes_the_tables_tiles_for_its_own_layer_and_regime() -> None:
    tiles = PackedExpertsTiles(32, FAST, SLOW)
    register_tile_table(table_of(TunedPoint(8.0, tiles, 80.0, 100.0, 0.5)))
    # 16 rows of 8 slots on 64 experts at 128: 8 rows an expert have height 16 by the rule.
    found = choose_packed_tiles(128, 128, LARGE, CUDA)
    assert found == tiles
    assert tuned_packed_tiles(10.0, LARGE, CUDA) == tiles
    assert tuned_tiles(10.0, LARGE, CUDA) is None
    # Another regime, group size, zero points, device, or no device: the rule.
    rule = rule_packed_tiles(8.0, LARGE)
    assert tuned_packed_tiles(30.0, LARGE, CUDA) is None
    for other in (
        QuantScheme(WeightScheme.INT4, 128, has_zero_points=True),
        QuantScheme(WeightScheme.INT4, 32),
        QuantScheme(WeightScheme.MXFP4),
    ):
        assert choose_packed_tiles(128, 128, replace(LARGE, scheme=other), CUDA) == rule
    assert choose_packed_tiles(128, 128, LARGE, CPU) == rule
    assert choose_packed_tiles(128, 128, LARGE) == rule
    assert describe_tuning(LARGE, NAME, (8, 0)) == (
        "the packed Triton GEMM, table mine.json, near 8 rows an expert; else the rule"
    )
    assert describe_tuning(LARGE, NAME, (9, 0)) == (
        "the packed Hopper GEMM, by its own rule; tile tables have no effect"
    )


def test_the_table_that_is_written_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    monkeypatch.setattr(tune_command, "candidates_of", lambda *given: both(SLOW, FAST))
    empty = TileTable("table.json", NAME, "3.6.0", "a test", ())
    plan, ceilings = TunePlan(((SHAPE, (9,)),)), {(torch.bfloat16, False): CEILINGS}
    written = tune_layers(plan, empty, CPU, TableTimer(), ceilings, path, lambda text: None)
    ((layer, (point,)),) = read_tile_table(path).layers
    assert layer == TunedLayer.of(SHAPE)
    assert (layer.scheme, layer.group_size, layer.has_zero_points) == ("int4_w4a16", 32, True)
    assert point.tiles == written.layers[0][1][0].tiles == PackedExpertsTiles(16, FAST, FAST)


@pytest.mark.parametrize(
    ("projection", "key", "value", "message"),
    [
        ("gate_up", "block_n", 96, r"tiles.gate_up.block_n \(96\) must be one of 32, 64"),
        ("down", "num_warps", 3, r"tiles.down.num_warps \(3\) must be one of 4, 8"),
        ("down", "num_stages", 0, r"tiles.down.num_stages \(0\) must be 1 to 12"),
        ("gate_up", "num_stages", 12, "of shared memory for words alone"),
        ("gate_up", "block_k", 64, "tiles.gate_up.block_k is an unknown key"),
        ("gate_up", "block_m", 64, "tiles.gate_up.block_m is an unknown key"),
    ],
)
def test_tiles_of_packed_weights_that_cannot_be_are_refused(
    projection: str, key: str, value: int, message: str, tmp_path: Path
) -> None:
    wide = replace(SLOW, block_n=256)
    tiles = PackedExpertsTiles(64, wide, wide)
    values = table_values(table_of(TunedPoint(8.0, tiles, 80.0, 100.0, 0.5)))
    values["layers"][0]["points"][0]["tiles"][projection][key] = value
    path = tmp_path / "table.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message):
        read_tile_table(path)


def test_a_height_that_packed_tiles_do_not_have_is_refused(tmp_path: Path) -> None:
    tiles = PackedExpertsTiles(128, SLOW, SLOW)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table_values(table_of(TunedPoint(8.0, tiles, 80.0, 100.0, 0.5)))))
    with pytest.raises(ConfigError, match=r"tiles.block_m \(128\) must be one of 16, 32, 64"):
        read_tile_table(path)


@pytest.mark.parametrize("split_k", [-1, 0, 4])
def test_parts_of_k_are_no_tables_to_set(split_k: int, tmp_path: Path) -> None:
    tiles = PackedExpertsTiles(16, SLOW, SLOW, split_k)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table_values(table_of(TunedPoint(8.0, tiles, 80.0, 100.0, 0.5)))))
    with pytest.raises(ConfigError, match=rf"tiles.split_k \({split_k}\) is no table's to set"):
        read_tile_table(path)


def test_layers_of_packed_weights_are_tuned_and_those_without_a_layout_refused(
    tmp_path: Path,
) -> None:
    (shape,) = layers_to_tune([], TuneSizes(4096, 1536, 128, 8, scheme="mxfp4"), 64)
    assert shape.scheme.weight is WeightScheme.MXFP4
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "desc_act": False,
        },
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    (of_checkpoint,) = layers_to_tune([str(tmp_path)], TuneSizes(), None)
    assert of_checkpoint.scheme == INT4
    config["quantization_config"]["desc_act"] = True  # type: ignore[index]
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"no tiles to tune for the layer: .*has_input_order"):
        layers_to_tune([str(tmp_path)], TuneSizes(), None)
