"""`ep-runtime tune` without a GPU: kernels in the interpreter, times given by the test."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from ep_runtime.kernels import tiles as kernel_tiles
from ep_runtime.kernels.align_blocks import AlignedSlots, align_slots_reference
from ep_runtime.kernels.base import Activation, ActivationKind, ExpertsShape, StandardExpertInput
from ep_runtime.kernels.errors import EPRuntimeError
from ep_runtime.kernels.grouped_gemm import (
    GemmRows,
    project_down_reference,
    project_gate_up_reference,
)
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.row_passes import MAX_SLOTS_PER_PASS
from ep_runtime.kernels.tile_checks import check_tiles
from ep_runtime.kernels.tile_tables import (
    TileTable,
    TunedLayer,
    TunedPoint,
    forget_tile_tables,
    read_tile_table,
)
from ep_runtime.kernels.tiles import ExpertsTiles, GemmTiles, rule_tiles
from ep_runtime.kernels.tuning_text import describe_tuning
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launch import tune_command, tune_problem, tune_timing
from ep_runtime.launch.cli import app
from ep_runtime.launch.explain import explain_plan
from ep_runtime.launch.tune_candidates import (
    Candidate,
    as_compiled,
    candidates_of,
    heights_near,
)
from ep_runtime.launch.tune_command import (
    TunePlan,
    compile_jobs,
    measure_all_ceilings,
    plan_tuning,
    tune_layers,
)
from ep_runtime.launch.tune_compile import small_shape
from ep_runtime.launch.tune_layers import (
    num_source_rows,
)
from ep_runtime.launch.tune_problem import LayerWeights, TuneProblem
from ep_runtime.launch.tune_record import table_values
from ep_runtime.launch.tune_search import SearchNotes, search_point
from ep_runtime.launch.tune_timing import Call, Ceilings, NameT, measure_ceilings
from tests.launch.configs import LAYER, write_config

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
SHAPE = ExpertsShape(3, 128, 96, 2, Activation(), torch.float32, num_experts=6)
FP8 = replace(SHAPE, dtype=torch.bfloat16, scheme=QuantScheme(WeightScheme.FP8_BLOCK))
SHAPES = {
    "float32": SHAPE,
    "bfloat16_relu2": replace(
        SHAPE, dtype=torch.bfloat16, activation=Activation(ActivationKind.RELU2)
    ),
    "fp8_block": FP8,
    "fp8_channel": replace(FP8, scheme=QuantScheme(WeightScheme.FP8_CHANNEL)),
}
LARGE = ExpertsShape(8, 7168, 2048, 8, Activation(), torch.bfloat16, num_experts=256)
CEILINGS = Ceilings(bytes_per_second=1e12, flops_per_second=1e15, products="float32")
ALL_CEILINGS = {(dtype, False): CEILINGS for dtype in (torch.float32, torch.float16)}
PLAIN = GemmTiles(128, 128, num_warps=4, num_stages=1)
SLOW, FAST = replace(PLAIN, group_tiles=1), replace(PLAIN, group_tiles=2, programs_per_sm=1)


class TableTimer:
    """Times by name, from a function; runs no call."""

    def __init__(self, us_of: Callable[[Any], float]) -> None:
        self.us_of, self.timed = us_of, list[tuple[Any, int]]()

    def time(self, calls: Mapping[NameT, Sequence[Call]], *, num_rounds: int) -> dict[NameT, float]:
        self.timed += [(name, num_rounds) for name in calls]
        for some in calls.values():
            assert len(some) == 2, "inputs must rotate"
        return {name: self.us_of(name) for name in calls}


def us_of(name: Any) -> float:
    """FAST is fast in a projection and in both; all else is slow."""
    hows = [name.how] if isinstance(name, Candidate) else [name.gate_up, name.down]
    return sum(40.0 if how == FAST else 50.0 for how in hows)


def both(*hows: GemmTiles | HopperSchedule, block_m: int = 16) -> list[Candidate]:
    return [Candidate(p, block_m, how) for how in hows for p in ("gate_up", "down")]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def problem(request: pytest.FixtureRequest) -> TuneProblem:
    return TuneProblem(SHAPES[request.param], 9, CPU)


def search(
    problem: TuneProblem, candidates: Sequence[Candidate], timer: TableTimer
) -> tuple[Any, SearchNotes]:
    notes = SearchNotes()
    return search_point(problem, candidates, timer, CEILINGS, notes), notes


def test_inputs_are_random_rotate_and_spread_over_all_experts(problem: TuneProblem) -> None:
    first, second = (rows.expert_input for rows in problem.sets)
    assert not torch.equal(first.topk_ids, second.topk_ids)
    assert problem.sets[0].weights is not problem.sets[1].weights
    for given in (first, second):
        assert given.num_source_rows == 9
        assert {-1, 0, 1} <= set(given.topk_ids.unique().tolist()) <= {-1, 0, 1, 2}
        assert (given.topk_ids >= 0).any(dim=1).all()
        assert given.hidden_states.float().std() > 0.5
    assert problem.rows_per_expert == pytest.approx(9 * 2 / 6)


def test_what_is_expected_is_what_the_reference_experts_compute(problem: TuneProblem) -> None:
    """The oracle of every other test; of fp8 weights its rows are not quantised."""
    rows, shape = problem.sets[0], problem.shape
    output = ReferenceExperts(shape).run(rows.expert_input, rows.weights, Workspace(CPU))
    summed = problem.expected.whole.view(-1, shape.top_k, shape.hidden_size).sum(1)
    error = float((output.float() - summed).norm() / summed.norm())
    assert error < (0.05 if shape.scheme.is_quantised else 0.01)


def test_a_right_candidate_is_within_the_limit_in_either_projection(problem: TuneProblem) -> None:
    for candidate in both(PLAIN, replace(PLAIN, swap_operands=True), block_m=32):
        assert problem.error_of(candidate) <= problem.limit_of(candidate)
    tiles = ExpertsTiles(32, PLAIN, PLAIN)
    assert problem.whole_error(tiles) <= problem.whole_limit


def test_the_fastest_tiles_win_and_their_gain_is_recorded(problem: TuneProblem) -> None:
    point, notes = search(problem, both(SLOW, FAST), TableTimer(us_of))
    assert point.tiles == ExpertsTiles(16, FAST, FAST)
    assert (point.us, point.rule_us) == (80.0, 100.0)
    least = CEILINGS.least_us(problem.expected_bytes, problem.expected_flops)
    assert point.roofline_fraction == pytest.approx(least / 80)
    assert (notes.wrong, notes.failed) == ([], {})


def plain_gate_up(*given: Any, tiles: GemmTiles, out: GemmRows, **named: Any) -> None:
    project_gate_up_reference(*given, out=out.values, **named)


def plain_down(*given: Any, tiles: GemmTiles, **named: Any) -> None:
    project_down_reference(*given, **named)


def plain_slots(
    expert_input: StandardExpertInput,
    weights: Any,
    aligned: AlignedSlots,
    *,
    shape: ExpertsShape,
    tiles: ExpertsTiles,
    workspace: Workspace,
) -> Tensor:
    num_positions = len(aligned.slots)
    activated = torch.full((num_positions, shape.intermediate_size), torch.nan, dtype=shape.dtype)
    out = torch.full((aligned.num_slots, shape.hidden_size), torch.nan, dtype=shape.dtype)
    project_gate_up_reference(
        GemmRows(expert_input.hidden_states),
        weights,
        aligned,
        top_k=shape.top_k,
        activation=shape.activation,
        out=activated,
    )
    project_down_reference(
        GemmRows(activated),
        weights,
        aligned,
        slot_weights=expert_input.topk_weights.flatten(),
        out=out,
    )
    return out


@pytest.fixture
def definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' definitions in their place: right, and quick on a CPU."""
    monkeypatch.setattr(tune_problem, "project_gate_up", plain_gate_up)
    monkeypatch.setattr(tune_problem, "project_down", plain_down)
    monkeypatch.setattr(tune_problem, "project_slots", plain_slots)
    monkeypatch.setattr(
        tune_problem,
        "align_slots",
        lambda *given, workspace, **named: align_slots_reference(*given, **named),
    )


@pytest.fixture
def small(definitions: None) -> TuneProblem:
    return TuneProblem(SHAPE, 9, CPU)


def test_a_gain_of_two_percent_or_less_leaves_the_rule(small: TuneProblem) -> None:
    rule = rule_tiles(small.rows_per_expert, SHAPE, CPU)

    def timed(gain: float) -> TableTimer:
        return TableTimer(lambda name: 100.0 if name == rule else 100.0 * (1 - gain))

    point, _ = search(small, both(FAST), timed(0.02))
    assert (point.tiles, point.us, point.rule_us) == (None, 100.0, 100.0)
    assert search(small, both(FAST), timed(0.021))[0].tiles == ExpertsTiles(16, FAST, FAST)


def test_a_wrong_candidate_is_noted_and_cannot_win(
    small: TuneProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong_down(*given: Any, tiles: GemmTiles, out: Tensor, **named: Any) -> None:
        plain_down(*given, tiles=tiles, out=out, **named)
        if tiles == FAST:
            out[:, 7] *= 1.5

    monkeypatch.setattr(tune_problem, "project_down", wrong_down)
    point, notes = search(small, both(SLOW, FAST), TableTimer(us_of))
    assert point.tiles == ExpertsTiles(16, FAST, SLOW)
    (line,) = notes.wrong
    assert "down: block_m 16, block_n 128" in line
    assert "is above 1e-04" in line


def test_a_candidate_that_leaves_a_slot_unwritten_is_wrong(
    small: TuneProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is poisoned, so that what an earlier candidate left there does not count."""

    def other_gate_up(*given: Any, tiles: GemmTiles, **named: Any) -> None:
        if tiles != FAST:
            plain_gate_up(*given, tiles=tiles, **named)

    monkeypatch.setattr(tune_problem, "project_gate_up", other_gate_up)
    point, notes = search(small, both(SLOW, FAST), TableTimer(us_of))
    assert point.tiles == ExpertsTiles(16, SLOW, FAST)
    assert "gate_up" in notes.wrong[0]
    assert "nan" in notes.wrong[0]


def test_a_way_that_is_wrong_as_a_whole_is_left_out(
    small: TuneProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_slots(*given: Any, tiles: ExpertsTiles, **named: Any) -> Tensor:
        return plain_slots(*given, tiles=tiles, **named) * (2 if tiles.gate_up == FAST else 1)

    monkeypatch.setattr(tune_problem, "project_slots", other_slots)
    point, notes = search(small, both(FAST), TableTimer(us_of))
    assert point.tiles is None
    assert "ExpertsTiles(block_m=16" in notes.wrong[0]


def test_a_wrong_rule_ends_the_search_with_its_error(
    small: TuneProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_problem, "project_slots", lambda *a, **k: 2 * plain_slots(*a, **k))
    with pytest.raises(EPRuntimeError, match=r"the default tiles give a wrong result at 3 rows"):
        search(small, both(SLOW), TableTimer(us_of))


def test_candidates_that_do_not_run_are_counted_by_reason(
    small: TuneProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_gate_up(*given: Any, tiles: GemmTiles, **named: Any) -> None:
        if tiles == FAST:
            raise RuntimeError("out of resource: shared memory\nand more")
        plain_gate_up(*given, tiles=tiles, **named)

    monkeypatch.setattr(tune_problem, "project_gate_up", other_gate_up)
    point, notes = search(small, both(SLOW, FAST), TableTimer(us_of))
    assert point.tiles == ExpertsTiles(16, SLOW, FAST)
    assert notes.failed == {"RuntimeError: out of resource: shared memory": 1}


def test_only_the_fastest_few_are_checked_and_timed_again(small: TuneProblem) -> None:
    hows: list[Any] = [replace(PLAIN, group_tiles=number) for number in range(1, 7)]
    timer = TableTimer(
        lambda name: float(hows.index(name.how)) if isinstance(name, Candidate) else 100.0
    )
    search(small, [Candidate("down", 16, how) for how in hows], timer)
    again = [name.how for name, rounds in timer.timed if rounds > 1 and isinstance(name, Candidate)]
    assert again == hows[:4]


def test_one_height_serves_both_projections(small: TuneProblem) -> None:
    """The best of each height are compared as whole calls: 16 and 32 here, and the rule's."""
    timer = TableTimer(lambda name: 10.0 if name.block_m == 32 else 20.0)
    candidates = [*both(SLOW, block_m=16), *both(FAST, block_m=32)]
    point, _ = search(small, [*candidates, Candidate("down", 64, FAST)], timer)
    assert point.tiles == ExpertsTiles(32, FAST, FAST)
    whole = [name for name, _ in timer.timed if isinstance(name, ExpertsTiles)]
    assert [tiles.block_m for tiles in whole] == [16, 16, 32]


def test_the_schedules_of_hopper_compete_as_one_way_more(
    definitions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their launches are stood in for: this is which of them are put together."""
    problem = TuneProblem(replace(SHAPE, dtype=torch.bfloat16), 9, CPU)
    launched: list[tuple[bool, HopperSchedule]] = []

    def launch(rows: Any, at: Any, is_gate_up: bool, schedule: HopperSchedule) -> None:
        launched.append((is_gate_up, schedule))
        other = Candidate("gate_up" if is_gate_up else "down", 128, PLAIN)
        tune_problem._launch(rows, other)

    monkeypatch.setattr(tune_problem, "_launch_hopper", launch)

    def other_slots(*given: Any, tiles: ExpertsTiles, **named: Any) -> Tensor:
        return plain_slots(*given, tiles=replace(tiles, is_hopper=False), **named)

    monkeypatch.setattr(tune_problem, "project_slots", other_slots)
    few, many = HopperSchedule(group_tiles=4), HopperSchedule(group_tiles=8)

    def timed(name: Any) -> float:
        if isinstance(name, ExpertsTiles):
            return 10.0 if name.is_hopper else 20.0
        return 1.0 if name.how == (few if name.projection == "gate_up" else many) else 2.0

    point, _ = search(problem, both(few, many, block_m=128), TableTimer(timed))
    assert point.tiles is not None
    assert point.tiles.is_hopper
    assert (point.tiles.gate_up_schedule, point.tiles.down_schedule) == (few, many)
    assert {(True, few), (True, many), (False, few), (False, many)} == set(launched)


def test_rows_of_the_hopper_gemm_lie_in_expert_order_where_they_are_fp8() -> None:
    at = TuneProblem(FP8, 9, CPU).sets[0].of_height(128)
    source = at._rows.rows
    assert source.scales is not None
    ordered = at.hopper_rows
    assert ordered.scales is not None
    rows = at.slots // FP8.top_k
    assert torch.equal(ordered.values.float()[at.positions], source.values.float()[rows])
    assert torch.equal(ordered.scales[at.positions], source.scales[rows])
    padding = torch.ones(len(ordered.values), dtype=torch.bool)
    padding[at.positions] = False
    assert not ordered.values.float()[padding].any()
    plain = TuneProblem(SHAPE, 9, CPU).sets[0]
    assert plain.of_height(128).hopper_rows is plain.rows


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [0.25, 8, 32, 64, 512])
def test_candidates_could_stand_in_a_table(
    name: str, rows: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_tiles, "is_interpreting", lambda: False)
    monkeypatch.setattr(kernel_tiles, "is_hopper", lambda device: True)
    monkeypatch.setattr(kernel_tiles, "num_multiprocessors", lambda device, off_gpu: 132)
    shape = replace(SHAPES[name], hidden_size=4096, intermediate_size=1024)
    found, layer = candidates_of(rows, shape, CUDA), TunedLayer.of(shape)
    rule = rule_tiles(rows, shape, CUDA)
    assert len(found) == len(set(found))
    on_hopper = name not in ("float32", "fp8_channel")
    for projection, gemm in (("gate_up", rule.gate_up), ("down", rule.down)):
        is_tried = Candidate(projection, rule.block_m, gemm) in found  # type: ignore[arg-type]
        assert is_tried == (rows < 200 or not on_hopper)
    assert any(candidate.is_hopper for candidate in found) == (rows >= 64 and on_hopper)
    for candidate in found:
        if isinstance(candidate.how, GemmTiles):
            shallow = replace(rule.gate_up, num_stages=1), replace(rule.down, num_stages=1)
            whole = ExpertsTiles(candidate.block_m, *shallow)
            if candidate.projection == "gate_up":
                whole = replace(whole, gate_up=candidate.how)
            else:
                whole = replace(whole, down=candidate.how)
            check_tiles(
                whole,
                str(candidate),
                scheme=layer.scheme,
                dtype=layer.dtype,
                is_gated=layer.is_gated,
                hidden_size=layer.hidden_size,
                intermediate_size=layer.intermediate_size,
            )


def test_each_candidate_is_compiled_once_for_all_numbers_of_rows_and_like_layers() -> None:
    more = replace(SHAPE, hidden_size=1152, num_local_experts=6)
    jobs = compile_jobs(TunePlan(((SHAPE, (3, 6)), (more, (3,)), (FP8, (3,)))), CPU)
    assert len(jobs) == len(set(jobs))
    small = small_shape(SHAPE)
    assert {shape for shape, _ in jobs} == {small, small_shape(more), small_shape(FP8)}
    wanted = {as_compiled(c) for rows in (1, 2) for c in candidates_of(rows, SHAPE, CPU)}
    assert {candidate for shape, candidate in jobs if shape == small} == wanted
    several = ((LARGE, (3,)), (replace(LARGE, hidden_size=4096, num_local_experts=64), (3,)))
    assert len({shape for shape, _ in compile_jobs(TunePlan(several), CPU)}) == 1


def test_candidates_that_differ_in_the_grid_alone_are_one_compilation() -> None:
    few, more = (replace(PLAIN, programs_per_sm=n, flatten=True) for n in (2, 3))
    assert len({as_compiled(c) for c in both(few, more)}) == 2
    others = (replace(few, num_stages=2), replace(few, flatten=False), HopperSchedule())
    assert len({as_compiled(c) for c in both(few, *others)}) == 8


def test_heights_are_those_of_the_docstring() -> None:
    assert heights_near(1, SHAPE, CPU) == heights_near(8, SHAPE, CPU) == (16,)
    assert heights_near(16, SHAPE, CPU) == (16, 32)
    assert heights_near(32, SHAPE, CPU) == (32, 64)
    assert heights_near(500, SHAPE, CPU) == (128,)


def test_source_rows_are_those_of_the_docstring_and_at_most_a_pass() -> None:
    assert num_source_rows(4, LARGE) == 128
    assert num_source_rows(0.001, LARGE) == 1
    everywhere = replace(LARGE, num_local_experts=256)
    assert num_source_rows(4096, everywhere) == MAX_SLOTS_PER_PASS // 8
    # Of 8 in 256 experts, top-8, one row in 4.5 lands.
    assert num_source_rows(8192, LARGE) == pytest.approx(MAX_SLOTS_PER_PASS / 8 * 4.5, rel=0.02)
    assert plan_tuning([everywhere], [4096, 8192, 1]).num_points == 2


def test_what_is_compiled_is_as_small_as_the_docstring_says() -> None:
    few = replace(LARGE, num_local_experts=2, num_experts=2, top_k=2)
    assert small_shape(LARGE) == replace(few, hidden_size=256, intermediate_size=256)
    assert small_shape(SHAPE) == replace(SHAPE, num_local_experts=2, num_experts=2)


def test_a_small_layers_launches_are_compiled_as_those_of_the_layer() -> None:
    """Of each layer in the list for an H200, by the arguments as Triton looks at them."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.launch.small_layers_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert len(report) == 2 * 15 + 2  # the latter packed
    for entry in report:
        assert len(entry["of_layer"]) == 2, entry["layer"]
        assert entry["of_small"] == entry["of_layer"], (entry["tiles"], entry["layer"])


def test_ceilings_are_of_a_kernel_that_only_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_timing, "_READ_BYTES", 1000)
    monkeypatch.setattr(tune_timing, "_PRODUCT_SIZE", 10)
    timer = TableTimer(lambda name: {"read": 2.0, "product": 4.0}[name])
    plain = measure_ceilings(timer, CPU, torch.float32, is_fp8=False)
    assert plain == Ceilings(5e8, 5e8, "float32")
    fp8 = measure_ceilings(timer, CPU, torch.bfloat16, is_fp8=True)
    assert fp8.flops_per_second == 1e9
    assert "e4m3, twice those of bfloat16" in str(fp8)
    assert Ceilings(4e12, 1e15, "").least_us(4e9, 0) == pytest.approx(1000)
    both_kinds = measure_all_ceilings([SHAPE, SHAPE, FP8], timer, CPU)
    assert list(both_kinds) == [(torch.float32, False), (torch.bfloat16, True)]


def test_weights_are_drawn_once_for_every_number_of_rows() -> None:
    weights = LayerWeights(SHAPE, CPU)
    few, many = (TuneProblem(SHAPE, rows, CPU, weights=weights) for rows in (3, 9))
    assert few.sets[1].weights is many.sets[1].weights is weights.prepared[1]


def test_the_table_that_is_written_is_read_back(
    tmp_path: Path, definitions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "table.json", list[str]()
    monkeypatch.setattr(tune_command, "candidates_of", lambda *given: both(SLOW, FAST))
    half = replace(SHAPE, dtype=torch.float16)
    plan = TunePlan(((SHAPE, (3, 9)), (half, (6,))))
    empty = TileTable("table.json", "NVIDIA H200", "3.6.0", "a test", ())
    written = tune_layers(plan, empty, CPU, TableTimer(us_of), ALL_CEILINGS, path, said.append)
    read = read_tile_table(path)
    assert [layer for layer, _ in read.layers] == [TunedLayer.of(SHAPE), TunedLayer.of(half)]
    assert [len(points) for _, points in read.layers] == [2, 1]
    for (_, some), (_, others) in zip(read.layers, written.layers, strict=True):
        for one, other in zip(some, others, strict=True):
            assert one.tiles == other.tiles == ExpertsTiles(16, FAST, FAST)
            assert one.rows_per_expert == pytest.approx(other.rows_per_expert, abs=1e-6)
    assert any("100.0 us by the rule, 80.0 us" in line for line in said)


def test_wrong_candidates_stand_in_the_table(
    tmp_path: Path, definitions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    monkeypatch.setattr(tune_command, "candidates_of", lambda *given: both(FAST))
    monkeypatch.setattr(TuneProblem, "error_of", lambda self, candidate: 1.0)
    empty = TileTable("table.json", "NVIDIA H200", "3.6.0", "a test", ())
    said: list[str] = []
    plan = TunePlan(((SHAPE, (9,)),))
    tune_layers(plan, empty, CPU, TableTimer(us_of), ALL_CEILINGS, path, said.append)
    rejected = json.loads(path.read_text())["layers"][0]["rejected"]
    assert len(rejected) == 2
    assert rejected[0].startswith("3 rows an expert, gate_up: block_m 16")
    assert read_tile_table(path).layers[0][1][0].tiles is None


def test_tune_needs_a_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(write_config(tmp_path, LAYER))
    with pytest.raises(SystemExit) as ended:
        app(["tune", file, "--output", str(tmp_path / "table.json")])
    assert ended.value.code == 2
    assert "tune measures on a CUDA device" in capfd.readouterr().err
    assert not (tmp_path / "table.json").exists()


@pytest.fixture
def no_tables() -> Any:
    forget_tile_tables()
    yield
    forget_tile_tables()


def test_a_runs_table_is_used_and_explained(tmp_path: Path, no_tables: None) -> None:
    """The path is relative to the file that names it."""
    text = LAYER.replace("dtype: float32", "dtype: bfloat16") + "kernel: {tile_table: mine.json}\n"
    file = write_config(tmp_path, text)
    shape = ExpertsShape(3, 32, 16, 2, Activation(), torch.bfloat16, num_experts=5)
    points = (TunedPoint(1.0, ExpertsTiles(16, PLAIN, PLAIN), 9.0, 10.0, 0.5),)
    mine = TileTable(
        "mine.json", "NVIDIA H200", triton.__version__, "a test", ((TunedLayer.of(shape), points),)
    )
    (tmp_path / "mine.json").write_text(json.dumps(table_values(mine)))
    overrides = ["parallel.device=auto", "kernel.experts=triton", "parallel.all2all_backend=naive"]
    lines = explain_plan(str(file), overrides, machine="h200x8").explain().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("experts    triton"))
    assert lines[at + 1] == (
        "  tiles, rank 0: table mine.json, near 1 rows an expert; else the rule"
    )
    assert lines[at + 2].startswith("  tiles, rank 1: the rule: no table of NVIDIA H200 with")
    assert describe_tuning(shape, "NVIDIA H200").startswith("table mine.json")


def test_a_shipped_table_is_explained(
    tmp_path: Path, no_tables: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-235B at EP2, which the H200's table has; on another Triton there is none."""
    sizes = "hidden_size: 4096, moe_intermediate_size: 1536, num_experts: 128, top_k: 8"
    text = f"parallel: {{dp_size: 2}}\nmodel: {{layer: {{{sizes}}}}}\n"
    file = str(write_config(tmp_path, f"{text}workload: {{tokens_per_rank: [1, 1]}}\n"))

    def explained(version: str) -> str:
        monkeypatch.setattr(triton, "__version__", version)
        forget_tile_tables()
        overrides = ["kernel.experts=triton", "parallel.all2all_backend=naive"]
        return explain_plan(file, overrides, machine="h200x8").explain()

    assert "  tiles: table NVIDIA_H200.json, near " in explained("3.6.0")
    assert "  tiles: the rule: no table of NVIDIA H200 with Triton 9.0.0" in explained("9.0.0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kernel: {tile_table: missing.json}\n", "kernel.tile_table: tile table"),
        ("kernel: {tile_table: run.yaml}\n", "cannot be read"),
        ("kernel: {tile_table: t.json, experts: reference}\n", "tile_table has no effect with"),
    ],
)
def test_a_wrong_table_is_found_before_any_rank_starts(
    text: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_config(tmp_path, LAYER + text)
    with pytest.raises(SystemExit) as ended:
        app(["run", str(file), "--set", f"output_dir={tmp_path}/out"])
    assert ended.value.code == 2
    assert said in capfd.readouterr().err


def test_landed_rows_are_never_none() -> None:
    """One row of 256 experts hardly ever goes to the 8 local ones; one slot is put there."""
    given: StandardExpertInput = (
        TuneProblem(replace(LARGE, hidden_size=32, intermediate_size=16), 1, CPU, num_sets=1)
        .sets[0]
        .expert_input
    )
    assert (given.topk_ids >= 0).sum() >= 1
