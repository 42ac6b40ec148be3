"""`ep-runtime bench`: its options, its arithmetic, its record; and two ranks end to end."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime.all2all.base import BackendShape
from ep_runtime.config import MoEConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.launch.bench_config import BenchConfig, Candidate, load_bench_config
from ep_runtime.launch.bench_inputs import (
    NUM_INPUT_SETS,
    Case,
    Load,
    experts_bytes,
    link_bytes,
    load_of,
    make_input_sets,
)
from ep_runtime.launch.bench_job import BenchJob
from ep_runtime.launch.bench_link import LinkLimits
from ep_runtime.launch.bench_plot import lines_of
from ep_runtime.launch.bench_probe import (
    Call,
    CpuClock,
    CudaClock,
    EagerProbe,
    GraphProbe,
    MarkedGraphProbe,
    Probe,
)
from ep_runtime.launch.bench_record import BYTES, bytes_of, case_entry, command_line
from ep_runtime.launch.bench_statistics import Times, max_over_ranks, rotated, summarise
from ep_runtime.launch.cli import app
from ep_runtime.placement import place_experts
from tests.harness import run_ranks
from tests.launch.processes import ROOT, run_to_end

Command = Callable[..., tuple[int, str]]
BENCHMARKS = ROOT / "benchmarks"
SMALL = (
    *("--hidden-size", "32", "--moe-intermediate-size", "16", "--num-experts", "6"),
    *("--top-k", "2", "--dtype", "float32", "--rounds", "2", "--iterations", "2"),
)
MOE = MoEConfig(
    hidden_size=16, moe_intermediate_size=8, num_experts=4, top_k=2, num_shared_experts=1
)


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Runs the command line in an empty folder: its exit status, and what it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            app(list(arguments))
        said = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, said.out + said.err

    return run


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a rank is started or joins."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ep_runtime.launch.rank_life.start_ranks", refuse)
    monkeypatch.setattr("ep_runtime.launch.rank_life.init_distributed", refuse)


def test_options_win_over_the_file_and_lists_have_commas(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    path.write_text("ranks: 4\ntop_k: 2\nrouting: [zipf]\nbackends: naive\ndispatch_dtype: fp8\n")
    options = {"tokens_per_rank": "1, 8", "top_k": "2,3", "routing": None, "rounds": 7}
    config = load_bench_config(str(path), options)
    assert (config.ranks, config.rounds, config.backends) == (4, 7, ("naive",))
    assert config.dispatch_dtype == ("fp8",)
    assert (config.tokens_per_rank, config.top_k, config.routing) == ((1, 8), (2, 3), ("zipf",))
    assert [moe.top_k for moe in config.layers()] == [2, 3]
    assert config.parallel().max_tokens_per_rank == 8
    path.write_text(config.to_yaml())
    assert load_bench_config(str(path), {}) == config


def test_the_command_line_of_a_record_gives_its_configuration_again() -> None:
    config = BenchConfig(
        ranks=3, top_k=(2, 3), backends=("naive", "all_to_all"), dispatch_dtype=("fp8",), seed=5
    )
    words = command_line(config).split()
    assert words[:2] == ["ep-runtime", "bench"]
    options = {
        key.removeprefix("--").replace("-", "_"): value
        for key, value in zip(words[2::2], words[3::2], strict=True)
    }
    assert load_bench_config(None, options) == config


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--top-k", "17"], "top_k (17) must be at most num_experts (16)"),
        (["--top-k", "2,x"], "--top-k: Input should be a valid integer"),
        (["--tokens-per-rank", "0"], "--tokens-per-rank: Input should be greater than 0 (got '0')"),
        (["--tokens-per-rank", "8,8"], "--tokens-per-rank: has 8 twice; drop one"),
        (["--routing", "zipff"], "--routing: Input should be 'balanced', 'random', 'zipf'"),
        (["--parts", "layer,expert"], "--parts: Input should be 'dispatch'"),
        (["--backends", "naive,nave"], "all2all_backend 'nave' is unknown; choose one of"),
        (["--experts", "tritn"], "experts 'tritn' is unknown; choose one of"),
        (["--backends", "local"], "no backend can run: local: it serves ep_size up to 1"),
        (["--dispatch-dtype", "fp8", "--backends", "naive"], "naive fp8: it sends rows as model"),
        (["--dispatch-dtype", "fp4"], "--dispatch-dtype: Input should be 'auto', 'model' or 'fp8'"),
        (["--mode", "graph"], "mode (graph) needs CUDA"),
        (["--max-tokens-per-rank", "4"], "max_tokens_per_rank (4) must be at least the largest"),
        (["--parts", "shared", "--num-shared-experts", "0"], "num_shared_experts is 0"),
        (["--plot", "x.pdf"], "--plot x.pdf: is written as PNG"),
        (["--json", "bench.yaml/x"], "--json bench.yaml/x: cannot be written"),
        (["bench.yaml"], "bench.yaml: iteration: unknown key; did you mean 'iterations'?"),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_what_is_wrong_is_found_before_any_rank_starts(
    arguments: list[str], said: str, command: Command, tmp_path: Path, no_ranks: None
) -> None:
    (tmp_path / "bench.yaml").write_text("iteration: 3\n")
    status, text = command("bench", "--device", "cpu", *arguments)
    assert status == 2, text
    assert said in text


def test_a_launchers_ranks_must_be_those_asked_for(
    command: Command, monkeypatch: pytest.MonkeyPatch, no_ranks: None
) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29998"}.items():
        monkeypatch.setenv(name, value)
    status, said = command("bench", "--ranks", "2")
    assert status == 2
    assert "--ranks (2) must equal the 4 ranks that torchrun started" in said


def test_a_plot_without_matplotlib_names_the_extra(
    command: Command, monkeypatch: pytest.MonkeyPatch, no_ranks: None
) -> None:
    monkeypatch.setattr("ep_runtime.launch.bench_plot.importlib.util.find_spec", lambda _: None)
    status, said = command("bench", "--plot", "x.png")
    assert status == 2
    assert "pip install 'ep-runtime[bench]'" in said


def test_each_round_begins_with_the_next_backend() -> None:
    assert [rotated("abc", r) for r in range(4)] == [[*"abc"], [*"bca"], [*"cab"], [*"abc"]]
    assert rotated([], 3) == []


def test_the_slowest_rank_counts_in_each_iteration() -> None:
    assert max_over_ranks([[1, 5, 2], [3, 2, 2]]) == [3, 5, 2]
    with pytest.raises(ValueError, match="shorter"):
        max_over_ranks([[1.0, 2.0], [1.0]])


def test_median_and_p90_are_in_microseconds() -> None:
    times = summarise([float(second) for second in range(10, 0, -1)])
    assert (times.median, times.n) == (5.5e6, 10)
    assert times.p90 == pytest.approx(9.1e6)
    assert summarise([2e-6]) == Times(2.0, 2.0, 1)


def test_an_eager_probe_times_each_part_between_its_marks_and_leaves_out_the_first_call() -> None:
    moments = iter(range(100))

    class Counter(CpuClock):
        def mark(self, *, in_graph: bool = False) -> float:
            return float(next(moments) ** 2)

    seen: list[int] = []

    def call(index: int, mark: Any) -> None:
        seen.append(index)
        mark()
        mark()
        mark()

    probe = EagerProbe(call, {"first": (0, 1), "both": (0, 2)}, Counter())
    # Marks of the timed calls are at 9, 16, 25 and at 36, 49, 64.
    assert probe.run(2) == {"first": [7.0, 13.0], "both": [16.0, 28.0]}
    assert seen == [-1, 0, 1]


def test_link_bytes_count_a_row_once_for_each_other_rank() -> None:
    placement = place_experts("linear", 4, 2)
    case = Case(MOE, "hotspot", 3)  # every row to experts 0 and 1, which rank 0 has
    loads = [
        load_of(
            make_input_sets(case, ep_rank=r, ep_size=2, seed=0, device=torch.device("cpu")),
            placement,
        )
        for r in range(2)
    ]
    assert [load.rows_to for load in loads] == [[3 * NUM_INPUT_SETS, 0]] * 2
    # Rank 1 sends its three rows of 16 bfloat16 values; nothing goes the other way.
    assert link_bytes(loads, 32) == 3 * 16 * 2
    # Rank 0: two experts of 3 * 16 * 8 weights; six rows in and out.
    assert experts_bytes(loads, MOE, _shape()) == (2 * 3 * 16 * 8 + 6 * 2 * 16) * 2
    # In fp8 a row of 16 comes with one scale, and leaves as before.
    in_fp8 = _shape(RowScheme.FP8_GROUP)
    assert experts_bytes(loads, MOE, in_fp8) == 2 * 3 * 16 * 8 * 2 + 6 * (16 + 4 + 32)


def test_link_bytes_are_those_of_the_busiest_rank_in_its_busier_direction() -> None:
    # Rank 2 receives 5 + 4, more than any rank sends.
    counts = [[1, 2, 5], [0, 3, 4], [1, 1, 0]]
    loads = [Load([n * NUM_INPUT_SETS for n in row], []) for row in counts]
    assert link_bytes(loads, 32) == 9 * 16 * 2


def test_input_sets_differ_and_their_routing_is_what_was_asked_for() -> None:
    case = Case(MOE, "random", 6)
    sets = make_input_sets(case, ep_rank=1, ep_size=2, seed=3, device=torch.device("cpu"))
    assert len(sets) == NUM_INPUT_SETS
    assert not torch.equal(sets[0].hidden_states, sets[1].hidden_states)
    assert not torch.equal(sets[0].topk_ids, sets[1].topk_ids)
    assert all(len(set(row.tolist())) == 2 for tokens in sets for row in tokens.topk_ids)
    assert {int(expert) for tokens in sets for expert in tokens.topk_ids.unique()} == {0, 1, 2, 3}
    assert sets[0].rows_per_rank == (6, 6)


def _shape(rows: RowScheme = RowScheme.MODEL) -> BackendShape:
    return BackendShape(4, 16, 2, torch.bfloat16, 40, place_experts("linear", 4, 2), rows)


@pytest.mark.parametrize(
    ("part", "as_model", "in_fp8"),
    [
        ("dispatch", 40 * 32, 40 * (16 + 4)),
        ("combine", 40 * 32, 40 * 32),
        ("dispatch_combine", 2 * 40 * 32, 40 * (16 + 4 + 32)),
    ],
)
def test_bytes_of_an_exchange_are_those_of_the_rows_as_they_travel(
    part: str, as_model: int, in_fp8: int
) -> None:
    loads = [Load([0, 40 * NUM_INPUT_SETS], []), Load([40 * NUM_INPUT_SETS, 0], [])]
    case = Case(MOE, "random", 40)
    assert bytes_of(part, case, loads, _shape()) == as_model
    assert bytes_of(part, case, loads, _shape(RowScheme.FP8_GROUP)) == in_fp8
    assert "hidden_size" in BYTES[part]


def test_an_entry_has_its_rate_its_fraction_of_the_link_and_the_words_for_both() -> None:
    loads = [Load([0, 40 * NUM_INPUT_SETS], []), Load([40 * NUM_INPUT_SETS, 0], [])]
    entry = case_entry(
        Case(MOE, "random", 40),
        Candidate("naive"),
        "dispatch_combine",
        times=Times(median=2.0, p90=3.0, n=10),
        loads=loads,
        shape=_shape(),
        link=LinkLimits(copy_engine_gbps=4.0, triton_put_gbps=2.0, reason=None),
    )
    assert entry["bytes"] == 2 * 40 * 16 * 2
    assert entry["gbps"] == pytest.approx(1.28)
    assert entry["fraction_of_link"] == pytest.approx({"copy_engine": 0.32, "triton_put": 0.64})
    assert entry["times_us"] == {"median": 2.0, "p90": 3.0, "n": 10}
    assert "bytes / (1000 * times_us.median)" in entry["formula"]


@dataclass(frozen=True)
class CallOrder:
    """Which backends were measured, one after another."""

    names: tuple[str, ...]
    entries: tuple[dict[str, Any], ...]


def measure_and_record_the_order(ctx: EPContext, config: BenchConfig) -> CallOrder:
    names: list[str] = []
    released = EagerProbe.run

    def run(probe: EagerProbe, iterations: int) -> dict[str, list[float]]:
        if iterations == config.iterations:  # not the warm-up
            names.append(backend_in(probe.call))
        return released(probe, iterations)

    EagerProbe.run = run  # type: ignore[method-assign, assignment]
    record = BenchJob(config, ctx).run()
    return CallOrder(tuple(names), tuple(record["cases"]))


def backend_in(call: Call) -> str:
    """The name of the backend that an exchange's closure holds."""
    cells = getattr(call, "__closure__", None) or ()
    held = [cell.cell_contents for cell in cells if hasattr(cell.cell_contents, "capabilities")]
    return str(held[0].capabilities.name)


def test_backends_take_turns_on_two_ranks() -> None:
    config = BenchConfig(
        backends=("all_to_all", "naive"),
        parts=("dispatch", "combine"),
        tokens_per_rank=(3,),
        hidden_size=(16,),
        num_experts=(4,),
        top_k=(2,),
        dtype=("float32",),
        rounds=3,
        iterations=2,
        warmup=1,
    )
    orders = run_ranks(measure_and_record_the_order, config.parallel(), config)
    wanted = ("all_to_all", "naive", "naive", "all_to_all", "all_to_all", "naive")
    assert [order.names for order in orders] == [wanted, wanted]
    assert orders[0].entries == orders[1].entries
    assert [(e["backend"], e["part"]) for e in orders[0].entries] == [
        *(("all_to_all", "dispatch"), ("all_to_all", "combine")),
        *(("naive", "dispatch"), ("naive", "combine")),
    ]
    assert all(entry["times_us"]["n"] == 3 * 2 for entry in orders[0].entries)


def measure(ctx: EPContext, config: BenchConfig) -> dict[str, Any]:
    return BenchJob(config, ctx).run()


@pytest.mark.skipif(not is_interpreting(), reason="symm_mem on a CPU needs the interpreter")
def test_one_backend_is_measured_with_each_dispatch_dtype_side_by_side() -> None:
    config = BenchConfig(
        device="cpu",
        backends=("symm_mem", "naive"),
        dispatch_dtype=("model", "fp8"),
        experts="reference",
        parts=("dispatch", "layer"),
        tokens_per_rank=(3,),
        hidden_size=(256,),
        num_experts=(4,),
        top_k=(2,),
        rounds=1,
        iterations=1,
        warmup=1,
    )
    record = run_ranks(measure, config.parallel(), config, timeout=120)[0]
    labels = ["symm_mem model", "symm_mem fp8", "naive model"]
    assert list(lines_of(record, "dispatch")) == list(lines_of(record, "layer")) == labels
    entries = {(e["backend"], e["dispatch_dtype"], e["part"]): e for e in record["cases"]}
    as_is, in_fp8 = (entries["symm_mem", rows, "dispatch"] for rows in ("model", "fp8"))
    assert (as_is["actual"]["rows"], in_fp8["actual"]["rows"]) == ("model", "fp8")
    assert as_is["bytes"] * (256 + 8) == in_fp8["bytes"] * 512
    assert "sends rows as model" in entries["naive", "fp8", "dispatch"]["skip_reason"]
    against_first = {check["name"].split(":")[0]: check for check in record["checks"]}
    fp8 = against_first["symm_mem fp8 against symm_mem model"]
    assert fp8["limit"] == pytest.approx(6e-2 + 1e-2)
    assert 1e-3 < fp8["value"] < 6e-2
    assert record["passed"]


def test_experts_are_measured_as_each_scheme_stores_them() -> None:
    config = BenchConfig(
        ranks=2,
        device="cpu",
        backends=("naive", "all_to_all"),
        experts="reference",
        parts=("experts", "shared", "layer"),
        tokens_per_rank=(3,),
        hidden_size=(256,),
        num_experts=(4,),
        top_k=(4,),
        moe_intermediate_size=(128,),
        quantization=("none", "fp8_block", "int4_w4a16"),
        group_size=64,
        rounds=1,
        iterations=1,
        warmup=1,
    )
    record = run_ranks(measure, config.parallel(), config, timeout=120)[0]
    assert record["passed"]
    of_naive = [e for e in record["cases"] if (e["backend"], e["part"]) == ("naive", "experts")]
    assert [e["quantization"] for e in of_naive] == ["none", "fp8_block", "int4_w4a16"]
    # Two experts a rank, each hit: three matrices of 256 x 128, and 6 rows in and out in bfloat16.
    rows = 6 * 2 * 256 * 2
    elements = 3 * 256 * 128
    in_fp8 = elements + 4 * (3 * 2)
    in_int4 = elements // 2 + 2 * elements // 64
    expected = [2 * each + rows for each in (2 * elements, in_fp8, in_int4)]
    assert [e["bytes"] for e in of_naive] == expected
    # The shared expert is stored as the routed ones in fp8_block alone; 3 rows in and out.
    of_shared = [e for e in record["cases"] if (e["backend"], e["part"]) == ("naive", "shared")]
    rows = 3 * 2 * 256 * 2
    assert [e["bytes"] for e in of_shared] == [
        2 * elements + rows,
        in_fp8 + rows,
        2 * elements + rows,
    ]


def test_a_group_size_without_a_scheme_that_has_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"group_size \(64\) is of int4_w4a16 and int8_w8a16"):
        load_bench_config(None, {"quantization": "fp8_block,mxfp4", "group_size": 64})


ENTRY_KEYS = {
    *("backend", "dispatch_dtype", "part", "tokens_per_rank", "hidden_size", "num_experts"),
    *("top_k", "moe_intermediate_size", "dtype", "quantization", "routing", "actual", "times_us"),
    *("bytes", "gbps", "formula", "fraction_of_link", "skip_reason"),
}


def test_two_ranks_are_started_measured_recorded_and_drawn(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    backends = ("--backends", "naive,all_to_all,local,deepep_low_latency")
    finished = run_to_end(
        [
            *("bench", *SMALL, *backends, "--tokens-per-rank", "1,6", "--device", "cpu"),
            *("--json", "here/bench.json", "--plot", "here/bench.png"),
        ],
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads((tmp_path / "here" / "bench.json").read_text())
    assert set(record) == {
        *("schema_version", "command", "command_line", "environment", "rank_devices", "requested"),
        *("method", "link", "cases", "checks", "passed"),
    }
    assert (record["schema_version"], record["command"], record["passed"]) == (1, "bench", True)
    assert record["environment"]["torch"] == torch.__version__
    assert record["link"]["copy_engine_gbps"] is None
    assert record["link"]["reason"] == "the ranks are on a CPU"
    assert len(record["cases"]) == 4 * 2 * 6, "backends, tokens, parts"
    for entry in record["cases"]:
        assert set(entry) == ENTRY_KEYS
        assert (entry["times_us"] is None) == (entry["skip_reason"] is not None)
        if entry["times_us"] is not None:
            assert entry["times_us"]["n"] == 2 * 2
            assert 0 < entry["times_us"]["median"] <= entry["times_us"]["p90"]
            assert (entry["gbps"] is None) == (entry["part"] == "layer")
    reasons = {entry["backend"]: entry["skip_reason"] for entry in record["cases"]}
    assert reasons["naive"] is reasons["all_to_all"] is None
    assert "ep_size up to 1" in reasons["local"]
    assert reasons["deepep_low_latency"] == "it runs on cuda, and the device is cpu"
    # all_to_all against naive, for each number of tokens.
    assert [check["value"] < 1e-5 for check in record["checks"]] == [True, True]
    actual = {e["backend"]: e["actual"] for e in record["cases"] if e["actual"] is not None}
    assert actual["naive"]["shared_owner"] == "runner"
    assert actual["all_to_all"]["shared_owner"] == "modular_kernel"
    assert "skipped: local: it serves ep_size up to 1, and ep_size is 2" in finished.stdout
    assert finished.stdout.count("whole layer: microseconds") == 1, "only rank 0 talks"
    assert (tmp_path / "here" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "runs" / "bench" / "config.yaml").exists()


def test_torchruns_ranks_are_joined_and_a_wrong_layer_fails_the_run(tmp_path: Path) -> None:
    program = tmp_path / "wrong_backend.py"
    program.write_text(
        "from ep_runtime.all2all.naive import NaiveBackend\n"
        "from ep_runtime.launch.cli import main\n"
        "released = NaiveBackend._sum_scatter\n"
        "NaiveBackend._sum_scatter = lambda self, rows: 2 * released(self, rows)\n"
        "main()\n"
    )
    finished = run_to_end(
        [
            *("bench", *SMALL, "--tokens-per-rank", "3", "--backends", "all_to_all,naive"),
            *("--parts", "layer", "--num-shared-experts", "0", "--json", "bench.json"),
        ],
        tmp_path,
        launcher="torchrun",
        num_ranks=2,
        program=(str(program),),
    )
    assert finished.returncode == 1, finished.stdout + finished.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    assert not record["passed"]
    assert record["checks"][0]["value"] == pytest.approx(1.0, abs=1e-3)
    assert "failed: naive against all_to_all: relative error" in finished.stdout


def test_one_rank_is_measured_in_this_process(command: Command, tmp_path: Path) -> None:
    parts = ("--parts", "experts,shared,layer", "--num-shared-experts", "0")
    status, said = command(
        *("bench", "--ranks", "1", "--device", "cpu", *SMALL, "--backends", "local"),
        *(*parts, "--tokens-per-rank", "2", "--routing", "model", "--json", "bench.json"),
    )
    assert status == 0, said
    record = json.loads((tmp_path / "bench.json").read_text())
    measured = {entry["part"]: entry["times_us"] is not None for entry in record["cases"]}
    assert measured == {"experts": True, "shared": False, "layer": True}
    assert "skipped: local shared: num_shared_experts is 0" in said
    assert record["link"]["reason"] == "one rank: nothing is sent"


def test_triton_is_not_imported_before_it_is_known_whether_it_interprets(tmp_path: Path) -> None:
    finished = run_to_end(
        [
            *("bench", "--ranks", "1", "--device", "cpu", "--backends", "symm_mem", *SMALL),
            *("--tokens-per-rank", "2", "--parts", "dispatch_combine", "--json", "b.json"),
        ],
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads((tmp_path / "b.json").read_text())
    assert record["cases"][0]["skip_reason"] is None


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_benchmarks_configurations_are_valid(path: Path) -> None:
    assert load_bench_config(str(path), {}).ranks == 2


def test_a_record_has_the_schema_that_is_written_now() -> None:
    records = [json.loads(p.read_text()) for p in (BENCHMARKS / "results").glob("*.json")]
    assert records
    assert {record["schema_version"] for record in records} == {1}


def run_symm_mem_launches(tmp_path: Path, *options: str, **environment: Any) -> dict[str, Any]:
    finished = run_to_end(
        ["--json", "launches.json", "--plot", "launches.png", *options],
        tmp_path,
        program=("-m", "benchmarks.symm_mem_launches"),
        PYTHONPATH=str(ROOT),
        **environment,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert (tmp_path / "launches.png").read_bytes().startswith(b"\x89PNG")
    record: dict[str, Any] = json.loads((tmp_path / "launches.json").read_text())
    return record


def test_the_launches_of_symm_mem_are_timed_against_their_bytes(tmp_path: Path) -> None:
    sizes = ("--tokens-per-rank", "3", "--hidden-size", "16", "--num-experts", "2", "--top-k", "2")
    record = run_symm_mem_launches(tmp_path, *sizes, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    launches = {launch["name"]: launch for launch in record["cases"][0]["launches"]}
    row = 16 * 2
    # Two experts on two ranks and top-2: every row goes to both ranks, three foreign rows come.
    assert {name: launch["bytes"] for name, launch in launches.items()} == {
        "put_tokens": (3 + 6) * row + 3 * 2 * (8 * 2 + 4),
        "wait_for_dispatch": None,
        "put_results": 2 * 3 * row + 3 * (4 * 2 + 4),
        "sum_results": (6 + 3) * row,
    }
    assert all(launch["us"] > 0 for launch in launches.values())
    assert record["cases"][0]["host_us"]["call"] > 0


@pytest.mark.gpu
def test_graph_probes_agree_with_each_other_and_with_eager_calls() -> None:
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")

    def call(index: int, mark: Any) -> None:
        mark()
        matrix @ matrix
        mark()
        matrix @ matrix
        matrix @ matrix
        mark()

    clock = CudaClock()
    parts = {"one": (0, 1), "two": (1, 2)}
    for index in range(3):
        call(index, lambda: None)
    probes: dict[str, Probe] = {
        "eager": EagerProbe(call, parts, clock),
        "marked": MarkedGraphProbe(call, parts, clock),
        "whole": GraphProbe(call, "all", clock),
    }
    medians = {
        (name, part): summarise(times).median
        for name, probe in probes.items()
        for part, times in probe.run(20).items()
    }
    one, two = medians["marked", "one"], medians["marked", "two"]
    assert two == pytest.approx(2 * one, rel=0.15)
    assert medians["whole", "all"] == pytest.approx(one + two, rel=0.15)
    assert medians["eager", "two"] == pytest.approx(two, rel=0.3)


@pytest.mark.gpu
def test_one_gpu_is_measured_in_graphs(tmp_path: Path) -> None:
    finished = run_to_end(
        [
            *(
                "bench",
                "--ranks",
                "1",
                "--device",
                "cuda",
                "--mode",
                "graph",
                "--hidden-size",
                "512",
            ),
            *(
                "--backends",
                "local,all_to_all",
                "--tokens-per-rank",
                "1,64",
                "--json",
                "bench.json",
            ),
        ],
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    modes = {entry["backend"]: entry["actual"]["mode"] for entry in record["cases"]}
    assert modes == {"local": "graph", "all_to_all": "eager"}
    assert all(entry["times_us"]["median"] > 0 for entry in record["cases"])


@pytest.mark.gpu
def test_two_ranks_that_share_a_gpu_have_no_link(tmp_path: Path) -> None:
    finished = run_to_end(
        [
            *("bench", "--device", "cuda", "--backends", "symm_mem", "--tokens-per-rank", "4"),
            *("--hidden-size", "512", "--rounds", "1", "--iterations", "2", "--warmup", "1"),
            *("--parts", "dispatch_combine,layer", "--json", "bench.json"),
        ],
        tmp_path,
        CUDA_VISIBLE_DEVICES="0",
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["link"]["reason"] == "2 ranks share 1 device(s)"
    assert all(entry["times_us"]["n"] == 2 for entry in record["cases"])


@pytest.mark.multigpu
def test_two_gpus_have_a_link_and_fractions_of_it(tmp_path: Path) -> None:
    finished = run_to_end(
        [
            *("bench", "--device", "cuda", "--backends", "symm_mem,naive", "--mode", "graph"),
            *("--tokens-per-rank", "64", "--hidden-size", "2048", "--json", "bench.json"),
        ],
        tmp_path,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["link"]["copy_engine_gbps"] > 0
    assert record["link"]["triton_put_gbps"] > 0
    exchanges = [e for e in record["cases"] if e["part"] == "dispatch_combine"]
    assert all(0 < e["fraction_of_link"]["copy_engine"] < 1 for e in exchanges)


@pytest.mark.gpu
def test_the_launches_of_symm_mem_are_timed_on_a_gpu(tmp_path: Path) -> None:
    record = run_symm_mem_launches(tmp_path, "--tokens-per-rank", "8,2048")
    for case in record["cases"]:
        assert case["launches_per_call"] is None or case["launches_per_call"] >= 4
        assert case["call_us"] > 0
        for launch in case["launches"]:
            assert launch["floor_us"] is None or launch["us"] > 0.5 * launch["floor_us"]
