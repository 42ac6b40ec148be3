"""The experts benchmark without a GPU: its cells, formulas, data, checks, turns and record."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import experts_contenders, experts_measure, experts_peers
from benchmarks.experts_cells import (
    SHAPES,
    TABLES,
    TOKENS_PER_RANK,
    Cell,
    LayerShape,
    cells_of,
    work_of,
)
from benchmarks.experts_contenders import (
    Contender,
    OwnExperts,
    PackedOwnExperts,
    Unavailable,
    contender_class,
    require,
)
from benchmarks.experts_data import (
    RoutedRows,
    dequantise,
    error_of,
    make_rows,
    make_weights,
    reference,
    worst,
)
from benchmarks.experts_measure import Effort, compile_cell, measure_cell
from benchmarks.experts_plot import lines_of, write_plot
from benchmarks.experts_ratios import geometric_mean
from benchmarks.experts_record import (
    add_ratios,
    build_record,
    print_record,
    summarise_cells,
)
from benchmarks.experts_timing import replays_per_turn, time_in_turns
from benchmarks.experts_warm import jobs_of
from ep_runtime.kernels.base import Activation, ExpertWeights, StandardExpertInput
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.reference_experts import ReferenceExperts, run_standard_reference

CPU = torch.device("cpu")
TINY = LayerShape("tiny", 8, 2, 32, 16, 3)
QWEN, V3_EP32 = SHAPES["qwen3_235b_ep2"], SHAPES["deepseek_v3_ep32"]


def test_every_table_has_its_cells() -> None:
    counts = {
        name: sum(len(cells_of([name], shape, TOKENS_PER_RANK)) for shape in SHAPES.values())
        for name in TABLES
    }
    # With one rank (Mixtral) no slot is empty, so it is not in that table.
    assert counts.pop("bf16_empty_slots") == 18
    assert set(counts.values()) == {24}


def test_an_expert_has_its_bytes_and_a_cell_its_roofline() -> None:
    assert QWEN.expert_bytes("bf16") == 3 * 4096 * 1536 * 2 == 37_748_736
    assert QWEN.expert_bytes("fp8_block") == 18_878_976
    memory = work_of(Cell(TABLES["bf16"], QWEN, 1), rows=1, pairs=8, active_experts=8)
    assert memory.bound == "memory"
    assert memory.roofline_us == pytest.approx(8 * 37.748736 / 4.27, rel=1e-6)
    compute = work_of(
        Cell(TABLES["fp8_block"], V3_EP32, 4096), rows=4096, pairs=32768, active_experts=8
    )
    assert compute.bound == "compute"
    assert compute.roofline_us == pytest.approx(32768 * 6 * 7168 * 2048 / 1590e6, rel=1e-6)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_rows_landed_with_their_own_slots_and_are_the_same_again(table: Any) -> None:
    cell = Cell(table, TINY, 8)
    rows, again, other = (make_rows(cell, index, CPU) for index in (0, 0, 1))
    assert torch.equal(rows.hidden_states, again.hidden_states)
    assert torch.equal(rows.global_ids, again.global_ids)
    assert not torch.equal(rows.topk_weights[:1], other.topk_weights[:1])
    is_local = rows.global_ids < TINY.num_local_experts
    assert torch.equal(rows.local_ids, torch.where(is_local, rows.global_ids, -1))
    assert bool(is_local.any(dim=-1).all())
    assert all(len(set(ids)) == TINY.top_k for ids in rows.global_ids.tolist())
    torch.testing.assert_close(rows.topk_weights.sum(-1), torch.ones(len(rows.topk_weights)))
    if table.routing == "local":
        assert rows.hidden_states.shape[0] == 8
        assert rows.num_pairs == 8 * TINY.top_k
    else:  # 16 tokens of both ranks; 8 experts of which 4 are here
        assert 8 < rows.hidden_states.shape[0] <= 16
        assert 0 < rows.num_pairs < rows.local_ids.numel()


def test_a_block_of_fp8_weights_has_one_scale_also_where_128_does_not_divide() -> None:
    values = torch.full((1, 260, 200), 2.0).to(torch.float8_e4m3fn)
    scales = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]]])
    weights = ExpertWeights(
        w13=values,  # gate and up of 130 rows
        w2=values[:, :130],
        w13_quant=QuantParameters(torch.cat([scales, 3 * scales], dim=1)),
        w2_quant=QuantParameters(scales),
    )
    w13, w2 = dequantise(weights, "fp8_block", 0)
    assert (w13.shape, w2.shape) == ((260, 200), (130, 200))
    corners = ((0, 0), (127, 127), (0, 128), (128, 127), (129, 199))
    expected = [2.0, 2.0, 20.0, 200.0, 2000.0]
    assert [float(w2[corner]) for corner in corners] == expected
    assert [float(w13[corner]) for corner in corners] == expected
    up = [float(w13[130 + row, column]) for row, column in corners]
    assert up == [3 * value for value in expected]
    made = make_weights(replace(TINY, intermediate_size=130), "fp8_block", seed=0, device=CPU)
    assert made.w13_quant is not None
    assert made.w13_quant.scales.shape == (TINY.num_local_experts, 4, 1)


def test_fp8_weights_keep_activations_near_one() -> None:
    shape = replace(TINY, hidden_size=256, intermediate_size=128)
    w13, w2 = dequantise(make_weights(shape, "fp8_block", seed=0, device=CPU), "fp8_block", 1)
    assert float(w13.std()) * 256**0.5 == pytest.approx(1, rel=0.2)
    assert float(w2.std()) * 128**0.5 == pytest.approx(1, rel=0.2)


def tiny_case(table: str = "bf16_empty_slots") -> tuple[Cell, list[ExpertWeights]]:
    weights = [make_weights(TINY, "bf16", seed=seed, device=CPU) for seed in range(2)]
    return Cell(TABLES[table], TINY, 8), weights


def test_the_reference_is_the_products_own_and_can_shift_up() -> None:
    cell, (weights, _) = tiny_case()
    rows = make_rows(cell, 0, CPU)
    expected = run_standard_reference(
        StandardExpertInput(rows.hidden_states, rows.local_ids, rows.topk_weights),
        weights,
        Activation(),
    )
    assert error_of(expected, reference(rows, weights, "bf16")).total < 4e-3
    # up + 1 adds silu(gate) @ w2: of one row with one expert, by hand.
    one = RoutedRows(
        hidden_states=rows.hidden_states[:1],
        global_ids=torch.tensor([[0, 5, 6]], dtype=torch.int32),
        local_ids=torch.tensor([[0, -1, -1]], dtype=torch.int32),
        topk_weights=torch.tensor([[0.5, 0.3, 0.2]]),
    )
    gate, up = (one.hidden_states.float() @ weights.w13[0].float().T).chunk(2, dim=-1)
    by_hand = 0.5 * (torch.nn.functional.silu(gate) * (up + 1)) @ weights.w2[0].float().T
    torch.testing.assert_close(reference(one, weights, "bf16", up_shift=1.0), by_hand)


def test_one_wrong_row_among_many_and_a_nan_are_no_right_results() -> None:
    expected = torch.randn(4000, 8)
    wrong = expected.clone()
    wrong[17] *= 1.5
    error = error_of(wrong, expected)
    assert error.total < 0.02 < error.worst_row
    assert not error.is_within("bf16")
    assert error_of(expected * 1.001, expected).is_within("bf16")
    wrong[17, 0] = float("nan")
    assert not error_of(wrong, expected).is_within("bf16")
    assert not worst([error_of(expected, expected), error_of(wrong, expected)]).is_within("bf16")


@pytest.fixture
def reference_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This project's `reference` where the benchmark takes `triton`."""
    monkeypatch.setattr(experts_contenders, "OWN_EXPERTS", "reference")


@pytest.mark.usefixtures("reference_experts")
@pytest.mark.parametrize("contender", [OwnExperts, PackedOwnExperts])
def test_own_experts_are_called_with_the_rows_and_the_weights_of_the_set(
    contender: type[Contender],
) -> None:
    cell, weights = tiny_case()
    rows = make_rows(cell, 0, CPU)
    built = contender(TINY, cell.table, weights)
    for index, of_set in enumerate(weights):
        output = built.landed_rows(built.bind(rows, index)(), rows)
        assert error_of(output, reference(rows, of_set, "bf16")).is_within("bf16")
        assert error_of(output, reference(rows, weights[1 - index], "bf16")).total > 0.5
    compile_cell(cell, built)


def test_a_scheme_that_the_kernel_does_not_declare_is_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnlyBf16(ReferenceExperts):
        capabilities = replace(ReferenceExperts.capabilities, schemes=frozenset())

    monkeypatch.setattr(experts_contenders, "experts_class", lambda name: OnlyBf16)
    with pytest.raises(Unavailable, match="experts triton takes no fp8_block weights"):
        OwnExperts(TINY, TABLES["fp8_block"], tiny_case()[1])


def test_a_package_that_is_not_installed_is_the_reason() -> None:
    with pytest.raises(Unavailable, match="some-package does not import: ModuleNotFoundError"):
        require("no_such_package.matmul", "some-package")
    for name in ("triton_kernels", "vllm_triton", "deep_gemm_host_counts"):
        assert contender_class(name).is_peer  # the class is there without its package


class FakeReplay:
    """Calls timed by a clock that only they move."""

    def __init__(self, name: str, log: list[tuple[str, int]], seconds: float) -> None:
        self.name, self.log, self.seconds = name, log, seconds

    def run(self, num_replays: int) -> list[float]:
        self.log.append((self.name, num_replays))
        return [self.seconds] * num_replays


def test_implementations_take_turns_and_slow_ones_fewer_replays() -> None:
    log: list[tuple[str, int]] = []
    replays = {"fast": FakeReplay("fast", log, 1e-4), "slow": FakeReplay("slow", log, 9e-3)}
    times = time_in_turns(replays, calls=2, num_rounds=3, turn_seconds=0.002)
    turns = log[4:]
    assert turns == [
        *[("fast", 10), ("slow", 1)],
        *[("slow", 1), ("fast", 10)],
        *[("fast", 10), ("slow", 1)],
    ]
    assert {name: len(of_one) for name, of_one in times.items()} == {"fast": 30, "slow": 3}
    assert [replays_per_turn(s, 0.004) for s in (0.0007, 0.009, 0.0)] == [5, 1, 20]


class HostReplay:
    """As a GraphReplay, on the host."""

    def __init__(self, calls: Sequence[Callable[[], Tensor]]) -> None:
        self.outputs = [call() for call in calls]

    def run(self, num_replays: int) -> list[float]:
        return [1e-5] * num_replays


class Zeros(Contender):
    """A peer whose result is wrong, and which is the fastest."""

    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        return lambda: torch.zeros_like(rows.hidden_states)


class Raises(Zeros):
    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        raise ValueError("no kernel\nfor this shape")


@pytest.fixture
def tiny_entry(monkeypatch: pytest.MonkeyPatch, reference_experts: None) -> dict[str, Any]:
    """A cell of the tiny shape with a right, a wrong, a failing and an absent implementation."""
    monkeypatch.setattr(experts_measure, "GraphReplay", HostReplay)
    cell, weights = tiny_case()
    contenders: dict[str, Contender | str] = {
        "ep_runtime": OwnExperts(TINY, cell.table, weights),
        "ep_runtime_packed": PackedOwnExperts(TINY, cell.table, weights),
        "vllm_triton": Zeros(TINY, cell.table, weights),
        "triton_kernels": Raises(TINY, cell.table, weights),
        "deep_gemm": "not installed",
    }
    return add_ratios(measure_cell(cell, contenders, weights, Effort(num_rounds=2)))


def test_a_cell_marks_what_is_wrong_and_says_what_failed(tiny_entry: dict[str, Any]) -> None:
    implementations = tiny_entry["implementations"]
    assert implementations["ep_runtime"]["is_right"]
    assert implementations["ep_runtime_packed"]["is_right"]
    assert not implementations["vllm_triton"]["is_right"]
    assert implementations["vllm_triton"]["total"] == 1.0
    failure = implementations["triton_kernels"]["skip_reason"]
    assert failure == "failed: ValueError: no kernel for this shape"
    assert implementations["deep_gemm"] == {"times_us": None, "skip_reason": "not installed"}
    times = implementations["ep_runtime"]["times_us"]
    assert times["p10"] == times["median"] == times["p90"] == pytest.approx(10)
    assert implementations["ep_runtime"]["fraction_of_roofline"] == pytest.approx(
        tiny_entry["roofline_us"] / 10
    )
    # A wrong result is no peer: only the packed form of this project's own is compared with.
    assert tiny_entry["fastest_peer"] is None
    assert tiny_entry["ratio_to_fastest_peer"] is None
    assert set(tiny_entry["ratio_to"]) == {"ep_runtime_packed"}
    sets = [make_rows(tiny_case()[0], index, CPU) for index in range(4)]
    assert tiny_entry["pairs"] == sum(rows.num_pairs for rows in sets) / 4
    assert tiny_entry["rotated_weight_bytes"] == 2 * tiny_entry["weight_bytes"]


def entry_of(shape: str, num_tokens: int, **medians: float) -> dict[str, Any]:
    """A cell of the table bf16 with these medians, all right, and a roofline of 50 us."""
    implementations = {
        name: {
            "times_us": {"median": us, "p10": us, "p90": us, "n": 1},
            "is_right": True,
            "fraction_of_roofline": 50 / us,
            "skip_reason": None,
        }
        for name, us in medians.items()
    }
    return add_ratios(
        {
            "table": "bf16",
            "shape": shape,
            "tokens_per_rank": num_tokens,
            "roofline_us": 50.0,
            "bound": "memory",
            "weight_bytes": 1000,
            "rotated_weight_bytes": 10,
            "implementations": implementations,
        }
    )


def test_ratios_are_to_the_fastest_peer_and_to_each_other() -> None:
    cells = [
        entry_of("a", 1, ep_runtime=100, triton_kernels=400, vllm_triton=200),
        entry_of("a", 8, ep_runtime=100, triton_kernels=50, vllm_triton=100),
        entry_of("b", 1, ep_runtime=100),
        entry_of("b", 8, vllm_triton=100),
    ]
    ratios = [cell["ratio_to_fastest_peer"] for cell in cells]
    assert ratios == [0.5, 2.0, None, None]
    summary = summarise_cells(cells)["bf16"]
    fastest = summary["fastest_peer"]
    assert fastest["geometric_mean"] == pytest.approx(1.0)
    assert (fastest["cells"], fastest["largest"]) == (2, 2.0)
    assert fastest["worst_cell"] == "a, 8 tokens"
    assert summary["other"]["vllm_triton"]["geometric_mean"] == pytest.approx(0.5**0.5)
    assert summary["fraction_of_roofline"]["vllm_triton"] == pytest.approx(
        (0.25 * 0.5 * 0.5) ** (1 / 3)
    )
    assert geometric_mean([]) is None


def test_a_record_is_printed_and_drawn(tmp_path: Path) -> None:
    record = build_record("the command", {}, ceilings={"copy_bytes_per_second": 4e12}, l2_bytes=6)
    wrong = entry_of("a", 8, ep_runtime=100, vllm_triton=20)
    wrong["implementations"]["vllm_triton"]["is_right"] = False
    record["cells"] = [
        entry_of("a", 1, ep_runtime=100, triton_kernels=400, vllm_triton=200),
        add_ratios(wrong),
    ]
    record["not_measured"] = [{"cell": "bf16, b, 1 tokens", "reason": "no time was left"}]
    record["summary"] = summarise_cells(record["cells"])
    assert json.loads(json.dumps(record))["cells"][0]["fastest_peer"] == "vllm_triton"
    assert lines_of(record, "bf16", "a")["vllm_triton"] == [(1, 0.25)]
    stream = io.StringIO()
    print_record(record, Console(file=stream, width=160))
    text = stream.getvalue()
    assert "100.0 (0.50)" in text
    assert "20.0 (2.50) WRONG" in text
    assert "over the fastest peer: geometric mean 0.500, largest 0.500 (a, 1 tokens)" in text
    assert "not measured: bf16, b, 1 tokens: no time was left" in text
    assert "may stay in the cache: bf16: a, 1 tokens" in text
    pytest.importorskip("matplotlib")
    write_plot(record, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_jobs_compile_every_cell_once() -> None:
    jobs = jobs_of(list(TABLES), list(SHAPES), None, TOKENS_PER_RANK)
    compiled = [
        (job.table, job.shape, job.implementation, tokens)
        for job in jobs
        for tokens in job.tokens_per_rank
    ]
    cells = [
        cell for shape in SHAPES.values() for cell in cells_of(list(TABLES), shape, TOKENS_PER_RANK)
    ]
    expected = [
        (cell.table.name, cell.shape.name, name, cell.tokens_per_rank)
        for cell in cells
        for name in cell.table.implementations
    ]
    assert sorted(compiled) == sorted(expected)
    assert jobs[0].tokens_per_rank == (128, 512, 4096)
    arguments = jobs[0].command()[jobs[0].command().index("compile") :]
    options = experts_peers.parse_arguments(arguments)
    (group,) = experts_peers.groups_of(options)
    assert [cell.tokens_per_rank for cell in group] == [128, 512, 4096]
    assert experts_peers.asked(options, "bf16") == ["ep_runtime"]


def test_cells_that_share_weights_are_measured_together() -> None:
    options = experts_peers.parse_arguments(["measure", "--shapes", "qwen3_235b_ep2,mixtral_8x7b"])
    groups = experts_peers.groups_of(options)
    keys = [{(cell.shape.name, cell.table.scheme) for cell in group} for group in groups]
    assert all(len(key) == 1 for key in keys)
    assert [len(group) for group in groups] == [12, 6, 6, 6] + [6] * 8


def test_an_unknown_name_lists_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        experts_peers.main(["measure", "--tables", "bf16,int3"])
    assert (
        "int3: choose from bf16, bf16_empty_slots, fp8_block, int4_g128, mxfp4, nvfp4, int8_g128"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        experts_peers.main(["measure", "--tokens-per-rank", "1,0"])
    assert "positive numbers with commas" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["measure", "warm", "compile"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--tables", "bf16", "--implementations", "humming"],
            "--implementations humming: no cell of --tables bf16 --shapes qwen3_235b_ep2 has it; "
            "choose from ep_runtime, triton_kernels, vllm_triton",
        ),
        (
            ["--tables", "bf16,mxfp4", "--implementations", "ep_runtime,deep_gemm,moe_wna16"],
            "--implementations deep_gemm,moe_wna16: no cell of --tables bf16,mxfp4",
        ),
        (
            ["--tables", "bf16_empty_slots", "--shapes", "mixtral_8x7b"],
            "--tables bf16_empty_slots --shapes mixtral_8x7b have no cell: with one rank no slot",
        ),
        (
            [
                *("--tables", "bf16,bf16_empty_slots", "--shapes", "mixtral_8x7b"),
                *("--implementations", "ep_runtime_packed"),
            ],
            "--implementations ep_runtime_packed: no cell of --tables bf16,bf16_empty_slots",
        ),
    ],
    ids=["one of no table", "two of no table", "no cell", "its table has no cell"],
)
def test_what_is_selected_of_nothing_is_refused(
    command: str,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    started: list[object] = []

    def start(*given: object) -> list[object]:
        started.append(given)
        return []

    monkeypatch.setattr(experts_peers, "run_jobs", start)
    monkeypatch.setattr(experts_peers, "device_of_this_machine", start)
    shapes = [] if "--shapes" in arguments else ["--shapes", "qwen3_235b_ep2"]
    assert experts_peers.main([command, *arguments, *shapes]) == 2
    assert said in capsys.readouterr().err
    assert not started


def test_tables_without_what_was_asked_for_have_no_cells() -> None:
    options = experts_peers.parse_arguments(["measure", "--implementations", "humming"])
    experts_peers.check_selection(options)
    found = {cell.table.name for group in experts_peers.groups_of(options) for cell in group}
    assert found == {"int4_g128", "mxfp4", "nvfp4", "int8_g128"}
    jobs = jobs_of(options.tables, options.shapes, options.implementations, options.tokens_per_rank)
    assert {job.table for job in jobs} == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert experts_peers.main(["measure", "--json", str(tmp_path / "r.json")]) == 2
    assert not list(tmp_path.iterdir())
    assert "measures on a CUDA device, and there is none" in capsys.readouterr().err
