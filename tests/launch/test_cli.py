"""Exit statuses and messages of the command line, without starting a process."""

import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ep_runtime.kernels.registry import experts_names
from ep_runtime.launch import layer_job
from ep_runtime.launch.cli import app
from ep_runtime.launch.doctor import experts_fault
from ep_runtime.machine import OPTIONAL_PACKAGES, Machine
from ep_runtime.reference import reference_layer
from tests.ep_runtime.checkpoints import (
    FAMILY_NAMES,
    copy_with_tensors,
    read_tensors,
    tiny_checkpoint,
)
from tests.launch.configs import LAYER, ONE_RANK, TINY, write_config

Command = Callable[..., tuple[int, str]]
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """Runs the command line in an empty folder: its exit status, and what it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, **environment: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                app(list(arguments))
        said = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, said.out + said.err

    return run


def test_one_rank_runs_in_this_process_and_passes(command: Command, tmp_path: Path) -> None:
    status, said = command("run", str(write_config(tmp_path, ONE_RANK)), "--json", "out.json")
    assert status == 0, said
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"]
    assert report["ranks"][0]["num_tokens"] == 7
    assert report["plan"]["backend"] == "local"
    assert report["environment"]["torch"] == torch.__version__
    assert "passed" in said


def test_a_failed_check_is_status_1_and_says_by_how_much(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doubled(*tensors: Any, **more: Any) -> torch.Tensor:
        return reference_layer(*tensors, **more) * 2

    monkeypatch.setattr(layer_job, "reference_layer", doubled)
    status, said = command("run", str(write_config(tmp_path, ONE_RANK)))
    assert status == 1
    assert re.search(r"layer: relative error\W+0\.5\W+1e-05\W+no", said), said
    assert said.rstrip().endswith("failed")
    assert not json.loads((tmp_path / "out" / "report.json").read_text())["passed"]


def test_a_raising_single_rank_is_status_1_with_one_message(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a tensor of the wrong kind")

    monkeypatch.setattr(layer_job, "make_rows", fail)
    status, said = command("run", str(write_config(tmp_path, ONE_RANK)))
    assert status == 1
    assert said == "ep-runtime: rank 0 failed: ValueError: a tensor of the wrong kind\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "parallel.dp_siz=1"], "parallel.dp_siz: unknown key; did you mean 'dp_size'?"),
        (["--set", "kernel.experts=tritn"], "experts 'tritn' is unknown; choose one of: auto,"),
        (["--set", "parallel.all2all_backend=nave"], "all2all_backend 'nave' is unknown"),
        (["--set", "parallel.all2all_backend=local"], "all2all_backend local cannot be used"),
        (["--set", "output_dir=run.yaml"], "output_dir run.yaml: cannot be written"),
        (["--set", "parallel.timeout_s=.inf"], "parallel.timeout_s: Input should be"),
        (["--json", "run.yaml/x"], "--json run.yaml/x: cannot be written"),
        (["--json", "mistyped/x"], "mistyped is not a folder that exists; make it first"),
        (["--st", "x=1"], "No such option"),
        (["--set", "workload.seed=4294967296"], "workload.seed: Input should be less than"),
        (
            ["--set", "kernel.experts=resident", "--set", "workload.routing=zipf"],
            "workload.routing (zipf) has no effect with experts resident, which is monolithic",
        ),
    ],
)
def test_what_is_wrong_is_found_before_any_rank_starts(
    arguments: list[str], said: str, command: Command, tmp_path: Path, no_ranks: None
) -> None:
    status, text = command("run", str(write_config(tmp_path, LAYER)), *arguments)
    assert status == 2
    assert said in text
    assert not (tmp_path / "mistyped").exists()


@pytest.mark.parametrize("held", [None, "what it held"])
def test_a_refused_command_leaves_the_json_file_as_it_was(
    held: str | None, command: Command, tmp_path: Path
) -> None:
    path, target = write_config(tmp_path, ONE_RANK), tmp_path / "out.json"
    if held is not None:
        target.write_text(held)
    status, _ = command("explain", str(path), "--json", str(target), "--machine", "nosuch")
    assert status == 2
    assert (target.read_text() if target.exists() else None) == held


def test_the_json_file_may_be_in_an_output_dir_that_is_not_there_yet(
    command: Command, tmp_path: Path
) -> None:
    path = write_config(tmp_path, ONE_RANK)
    status, said = command("run", str(path), "--json", str(tmp_path / "out" / "x.json"))
    assert status == 0, said
    assert json.loads((tmp_path / "out" / "x.json").read_text())["passed"]


def test_explain_and_doctor_make_no_folder_for_the_json_file(
    command: Command, tmp_path: Path
) -> None:
    for arguments in (["explain", "cpu_single.yaml"], ["doctor"]):
        status, said = command(*arguments, "--json", "mistyped/x")
        assert status == 2
        assert said.count("\n") == 1
        assert "mistyped is not a folder that exists" in said


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.checkpoint=nowhere", "nowhere"),
        ("model.tiny.family=mixtrall", "family 'mixtrall' is not supported; choose one of"),
        ("workload.prompts=nowhere.txt", "nowhere.txt: cannot be read"),
        ("workload.prompts=empty.txt", "empty.txt: holds no prompt"),
        ("model.tiny.seed=4294967296", "model.tiny.seed: Input should be less than"),
    ],
)
def test_a_wrong_model_or_prompt_is_found_before_any_rank_starts(
    override: str, said: str, command: Command, tmp_path: Path, no_ranks: None
) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    status, text = command("run", str(write_config(tmp_path, TINY)), "--set", override)
    assert status == 2
    assert said in text
    assert text.count("\n") == 1


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
MISSPELT = EXPERT.replace("up_proj", "upp_proj")
GATE = "model.layers.0.mlp.gate.weight"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("change", "keys", "said"),
    [
        pytest.param(
            lambda t: {(MISSPELT if n == EXPERT else n): v for n, v in t.items()},
            {},
            f"1 missing: {EXPERT} (is it {MISSPELT}?)",
            id="misspelt",
        ),
        pytest.param(
            lambda t: {n: v for n, v in t.items() if n != EXPERT},
            {},
            f"1 missing: {EXPERT}",
            id="missing",
        ),
        pytest.param(
            lambda t: {**t, EXPERT.replace(".2.", ".99."): t[EXPERT].clone()},
            {},
            f"1 left over: {EXPERT.replace('.2.', '.99.')}",
            id="extra",
        ),
        pytest.param(
            lambda t: {**t, EXPERT: t[EXPERT].to(torch.int8)},
            {},
            f"{EXPERT}: dtype I8 in model.safetensors",
            id="dtype",
        ),
        pytest.param(
            lambda t: {**t, GATE: t[GATE].T},
            {},
            f"{GATE}: shape [64, 6] in model.safetensors, wanted [6, 64]",
            id="shape",
        ),
        pytest.param(
            lambda t: t,
            {"quantization_config": {"quant_method": "fp8"}},
            "missing: model.layers.0.mlp.experts.0.down_proj.weight_scale_inv",
            id="quantised_without_scales",
        ),
        pytest.param(
            lambda t: t,
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config.quant_method ('hqq') is not supported",
            id="unknown_quantisation",
        ),
        pytest.param(
            lambda t: t,
            {"num_attention_heads": 0},
            "transformers cannot build config.json's model",
            id="model_that_cannot_be_built",
        ),
    ],
)
def test_a_checkpoint_that_its_headers_show_to_be_wrong_is_found_before_any_rank_starts(
    change: Callable[[Tensors], Tensors],
    keys: dict[str, Any],
    said: str,
    command: Command,
    tmp_path: Path,
    no_ranks: None,
) -> None:
    source = tiny_checkpoint("qwen2_moe")
    folder = copy_with_tensors(source, tmp_path / "model", change(read_tensors(source)))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | keys))
    path = write_config(tmp_path, TINY)
    status, text = command("run", str(path), "--set", "model.checkpoint=model")
    assert status == 2, text
    assert said in text
    assert text.count("\n") == 1


def test_a_prompt_outside_the_vocabulary_is_found_before_any_rank_starts(
    command: Command, tmp_path: Path, no_ranks: None
) -> None:
    source = tiny_checkpoint("qwen2_moe")
    folder = copy_with_tensors(source, tmp_path / "model", read_tensors(source))
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    path = write_config(tmp_path, TINY, prompts="abc\n")
    fine = command("explain", str(path), "--set", "model.checkpoint=model")
    assert fine[0] == 0, fine
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace(f'"vocab_size": {size}', '"vocab_size": 99')
    )
    tensors = read_tensors(source)
    cut = {n: t[:99] if t.shape[:1] == (size,) else t for n, t in tensors.items()}
    save_file(cut, folder / "model.safetensors")
    status, said = command("run", str(path), "--set", "model.checkpoint=model")
    assert status == 2, said
    assert "'abc' has the token id 99, and the model's vocab_size is 99" in said


def test_a_failed_run_leaves_no_report_of_an_earlier_one(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_config(tmp_path, ONE_RANK))
    assert command("run", path)[0] == 0
    assert (tmp_path / "out" / "report.json").exists()

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a tensor of the wrong kind")

    monkeypatch.setattr(layer_job, "make_rows", fail)
    assert command("run", path)[0] == 1
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_check_that_is_not_a_number_is_null_in_the_report(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*tensors: Any, **more: Any) -> torch.Tensor:
        return reference_layer(*tensors, **more) * float("nan")

    monkeypatch.setattr(layer_job, "reference_layer", lost)
    status, said = command("run", str(write_config(tmp_path, ONE_RANK)), "--json", "out.json")
    assert status == 1, said
    text = (tmp_path / "out.json").read_text()
    report = json.loads(text, parse_constant=pytest.fail)
    assert report["checks"][0] == {
        "name": "layer: relative error",
        "value": None,
        "limit": 1e-5,
        "passed": False,
    }


def test_a_full_disk_is_told_with_the_file_and_the_key_that_asked_for_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_config(tmp_path, ONE_RANK))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.json").symlink_to("/dev/full")
    real = Path.unlink
    monkeypatch.setattr(
        Path, "unlink", lambda p, **k: None if p.name == "report.json" else real(p, **k)
    )
    status, said = command("run", path)
    assert status == 1
    assert "output_dir out/report.json: cannot be written: " in said


def test_a_whole_checkpoint_passes_the_look_before_the_start(tmp_path: Path) -> None:
    from ep_runtime.launch.preflight import check_before_start
    from ep_runtime.launch.run_config import load_run_config

    for family in FAMILY_NAMES:
        override = f"model.checkpoint={tiny_checkpoint(family)}"
        check_before_start(load_run_config(write_config(tmp_path, TINY), [override]))


def test_a_checkpoint_of_an_unknown_family_lists_the_known_ones(
    command: Command, tmp_path: Path, no_ranks: None
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    path = write_config(tmp_path, TINY)
    status, said = command("run", str(path), "--set", "model.checkpoint=model")
    assert status == 2
    assert "model_type 'bert' is not supported" in said
    assert "mixtral" in said


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a rank is started or joins."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("ep_runtime.launch.rank_life.start_ranks", refuse)
    monkeypatch.setattr("ep_runtime.launch.rank_life.init_distributed", refuse)


def test_a_world_of_another_size_is_refused(
    command: Command, tmp_path: Path, no_ranks: None
) -> None:
    path = write_config(tmp_path, LAYER)
    status, said = command("run", str(path), **{**TORCHRUN, "WORLD_SIZE": "4"}, **MASTER)
    assert status == 2
    assert said == (
        "ep-runtime: parallel.dp_size * parallel.tp_size (2 * 1 = 2) must equal the 4 ranks that "
        "torchrun started; change either\n"
    )


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}


def test_contradicting_launcher_variables_are_both_named(
    command: Command, tmp_path: Path, no_ranks: None
) -> None:
    path = write_config(tmp_path, LAYER)
    status, said = command("run", str(path), PMI_RANK="1", PMI_SIZE="2", **TORCHRUN, **MASTER)
    assert status == 2
    assert "RANK (0) and PMI_RANK (1) contradict each other" in said


def test_a_busy_port_is_named(command: Command, tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        path = write_config(tmp_path, LAYER)
        environment = {**TORCHRUN, **MASTER, "MASTER_PORT": port}
        status, said = command("run", str(path), **environment)
    assert status == 2
    assert f"MASTER_PORT ({port}) is busy" in said
    assert "choose another MASTER_PORT" in said


def test_the_interpreter_is_asked_for_only_where_triton_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ep_runtime.launch.preflight import set_interpreter_variable
    from ep_runtime.launch.run_config import load_run_config

    path = write_config(tmp_path, LAYER)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for experts, wanted in (("auto", None), ("reference", None), ("triton", "1")):
        parallel = load_run_config(path).parallel
        set_interpreter_variable(parallel, experts, os.environ)
        assert os.environ.pop("TRITON_INTERPRET", None) == wanted, experts


def test_explain_and_run_agree_on_the_device(command: Command, tmp_path: Path) -> None:
    path = str(write_config(tmp_path, LAYER))
    gpu = str(tmp_path / "gpu.yaml")
    Path(gpu).write_text(LAYER.replace("device: cpu", "device: cuda"))
    status, said = command("explain", path, "--set", "kernel.experts=triton")
    assert status == 0, said
    if not torch.cuda.is_available():
        for verb in ("explain", "run"):
            status, said = command(verb, gpu)
            assert status == 2
            assert "parallel.device is cuda, and torch sees no CUDA device here" in said
    for file, machine, kind in ((gpu, "cpu", "cpu"), (path, "h200x8", "cuda")):
        status, said = command("explain", file, "--machine", machine)
        assert status == 2
        assert f"--machine {machine} is a {kind} machine, and parallel.device is" in said


def test_a_missing_json_file_is_no_checkpoint_to_explain(command: Command) -> None:
    status, said = command("explain", "nope.json")
    assert status == 2
    assert "nope.json: no such file" in said


def test_explain_plans_a_deepseek_v3_layer_for_machines_that_are_not_here(
    command: Command, tmp_path: Path, no_ranks: None
) -> None:
    for world_size, per_rank in ((8, 32), (64, 4)):
        status, said = command(
            *("explain", "gpu_dp8_ep8.yaml", "--machine", "h200x8"),
            *("--world-size", str(world_size), "--json", "plan.json"),
        )
        assert status == 0, said
        plan = json.loads((tmp_path / "plan.json").read_text())
        assert plan["parallel"]["ep_size"] == world_size
        assert {len(e) for e in plan["placement"]["experts_of_rank"]} == {per_rank}
        # 3 projections of 7168 x 2048 in bfloat16, an expert.
        assert plan["bytes_per_rank"][0]["experts"] == per_rank * 3 * 7168 * 2048 * 2
        assert plan["machine"]["name"] == "NVIDIA H200"
        assert "256 experts, top-8" in said
        assert "owner, every rank" in said


def test_explain_keeps_what_set_names_beside_the_world_size(
    command: Command, tmp_path: Path
) -> None:
    sets = ("--set", "parallel.expert_parallel_size=4", "--set", "parallel.tp_size=2")
    status, said = command(
        "explain", "gpu_dp8_ep8.yaml", "--machine", "h200x8", "--world-size", "16", *sets
    )
    assert status == 0
    assert "16 ranks (dp 8 x tp 2), 4 EP groups of 4" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", "7", "--set", "parallel.tp_size=2"], "--world-size (7) must be a"),
        (["--world-size", "4", "--set", "parallel.dp_size=8"], "contradicts"),
        (["--machine", "tpu"], "machine 'tpu' is unknown"),
        (["--machine", "broken.json"], "--machine broken.json: is not a doctor's JSON"),
    ],
)
def test_explain_refuses_what_cannot_be(
    arguments: list[str], said: str, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "broken.json").write_text("{}")
    status, text = command("explain", "gpu_dp8_ep8.yaml", *arguments)
    assert status == 2
    assert said in text


def test_explain_reads_a_checkpoint_and_a_doctors_machine(command: Command, tmp_path: Path) -> None:
    from ep_runtime.tiny import tiny_config

    (tmp_path / "model").mkdir()
    config = tiny_config("mixtral").to_dict() | {"dtype": "bfloat16"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    status, said = command("doctor", "--json", "doctor.json")
    assert status == 0, said
    for source in ("model", "model/config.json"):
        status, said = command(
            *("explain", source, "--machine", "doctor.json", "--world-size", "3"),
            *("--set", "parallel.all2all_backend=naive"),
        )
        assert status == 0, said
        assert "3 ranks" in said
        assert "backend    naive" in said


def test_doctor_has_nothing_against_any_kernel_where_every_package_is() -> None:
    machine = replace(Machine.preset("h200x8"), packages=OPTIONAL_PACKAGES)
    assert {name: experts_fault(name, machine) for name in experts_names()} == dict.fromkeys(
        experts_names()
    )


def test_doctor_says_why_a_kernel_is_not_usable(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ep_runtime.machine import TritonMode

    monkeypatch.setattr("ep_runtime.machine._triton_mode", lambda **_: TritonMode.UNUSABLE)
    status, said = command("doctor", "--json", "doctor.json")
    assert status == 0
    found = json.loads((tmp_path / "doctor.json").read_text())
    usable = {verdict["name"]: verdict["usable"] for verdict in found["backends"]}
    assert [usable[name] for name in ("local", "naive", "all_to_all")] == [True, True, True]
    kernels = {verdict["name"]: verdict for verdict in found["experts"]}
    assert kernels["reference"] == {"name": "reference", "usable": True, "reason": None}
    assert not kernels["triton"]["usable"]
    assert "TRITON_INTERPRET=1" in kernels["triton"]["reason"]
    assert found["devices"][0]["cores"] == os.cpu_count()
    assert found["mpi"]["mpi4py"]
    assert "TRITON_INTERPRET=1" in said
