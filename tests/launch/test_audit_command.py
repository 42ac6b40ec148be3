"""`ep-runtime audit streams`: exit status, report, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ep_runtime import audit_streams
from ep_runtime.audit_streams import audited_config
from ep_runtime.config import MoEConfig
from ep_runtime.launch.cli import app
from ep_runtime.streams import CudaStreams
from tests.launch.configs import LAYER, write_config

Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Audit:
    """Runs the command in an empty folder: its exit status, and what it wrote."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which it sets itself, and would leave set

    def run(*arguments: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            app(["audit", "streams", *arguments])
        written = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, written.out + written.err

    return run


SMALL = ("--backends", "local,all_to_all", "--experts", "reference,stand_in_monolithic_exclusive")


def test_a_clean_layer_ends_with_0_and_a_report(audit: Audit, tmp_path: Path) -> None:
    path = write_config(tmp_path, LAYER)
    status, said = audit(str(path), *SMALL, "--json", "audit.json")
    assert status == 0, said
    assert "everything is ordered" in said
    assert "not seen: kernels and streams inside DeepEP" in said
    record = json.loads((tmp_path / "audit.json").read_text())
    assert record["schema_version"] == 1
    assert record["passed"] is True
    assert len(record["cannot_see"]) == 3
    cases = {(c["backend"], c["experts"], c["overlap"]): c for c in record["cases"]}
    assert len(cases) == 6, "a monolithic kernel meets no backend but local on one rank"
    window = cases["all_to_all", "reference", "auto"]
    assert window["owner"] == "modular_kernel"
    assert window["schedules"] == ["combine_window", "combine_joined"]
    assert cases["local", "stand_in_monolithic_exclusive", "auto"]["schedules"] == [
        "aux_stream_before_experts",
        "serial",
    ]
    assert all(c["unordered"] == [] and c["num_operations"] > 0 for c in cases.values())


def test_an_unordered_pair_ends_with_1_and_names_both_operations(
    audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unjoined = type("Unjoined", (CudaStreams,), {"join": lambda self: None})
    monkeypatch.setattr(audit_streams, "CudaStreams", unjoined)
    path = write_config(tmp_path, LAYER)
    status, said = audit(str(path), *SMALL, "--json", "audit.json")
    assert status == 1
    assert "FAILED" in said
    record = json.loads((tmp_path / "audit.json").read_text())
    assert record["passed"] is False
    found = {
        (pair["first"]["stream"], pair["second"]["stream"], pair["second"]["name"])
        for case in record["cases"]
        for pair in case["unordered"]
    }
    assert ("aux", "main", "add_") in found
    assert not any(c["unordered"] for c in record["cases"] if c["backend"] == "all_to_all")


def test_what_cannot_run_is_listed_with_its_reason(audit: Audit, tmp_path: Path) -> None:
    path = write_config(tmp_path, LAYER)
    status, said = audit(
        str(path), "--backends", "local", "--experts", "reference,triton_batched,deep_gemm"
    )
    assert status == 0, said
    assert "backend local delivers standard rows" in said
    assert "deep_gemm" in said.partition("Not run")[2]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--seconds", "3"), "--seconds is for --device cuda alone"),
        (("--unjoined",), "--unjoined is for --device cuda alone"),
        (("--device", "tpu"), "--device tpu: is unknown"),
        (("--backends", "nccl"), "--backends nccl: is unknown; choose among: local"),
        (("--experts", "nope"), "--experts nope: is unknown; choose among: triton"),
        (("--experts", "deep_gemm", "--backends", "local"), "could be audited"),
        (
            ("--experts", "stand_in_monolithic_unsafe", "--backends", "naive"),
            "leave nothing to audit",
        ),
        (("--json", "no/folder.json"), "--json no/folder.json: cannot be written"),
    ],
)
def test_what_it_cannot_do_is_refused_with_2(
    audit: Audit, tmp_path: Path, arguments: tuple[str, ...], wanted: str
) -> None:
    status, said = audit(str(write_config(tmp_path, LAYER)), *arguments)
    assert status == 2, said
    assert wanted in said


# What `run` and `explain` read, and an audit does not; each with what is said instead.
NO_EFFECT = [
    ("parallel.all2all_backend=nonsense", "name what is audited with --backends"),
    ("parallel.all2all_backend=naive", "name what is audited with --backends"),
    ("kernel.experts=nonsense", "name what is audited with --experts"),
    ("kernel.tile_table=tiles.json", "leave it out"),
    ("kernel={experts: triton}", "leave it out"),
    ("parallel.dp_size=4", "leave it out"),
    ("parallel.data_parallel_size=4", "leave it out"),
    ("shared_experts.overlap=off", "leave it out"),
    ("workload.tokens_per_rank=[3]", "leave it out"),
    ("check=off", "leave it out"),
    ("output_dir=elsewhere", "leave it out"),
]


@pytest.mark.parametrize(("override", "cure"), NO_EFFECT)
@pytest.mark.parametrize("source", ["run.yaml", "checkpoint/config.json"])
def test_an_override_of_what_is_not_audited_is_refused(
    audit: Audit, tmp_path: Path, override: str, cure: str, source: str
) -> None:
    write_config(tmp_path, LAYER)
    status, said = audit(source, *SMALL, "--set", "model.layer.top_k=1", "--set", override)
    assert status == 2, said
    assert f"--set {override!r}: has no effect on an audit, which reads model.* alone" in said
    assert cure in said


def test_an_override_of_the_layer_is_audited(audit: Audit, tmp_path: Path) -> None:
    path = write_config(tmp_path, LAYER)
    one = ("--backends", "local", "--experts", "reference", "--json", "audit.json")
    status, said = audit(str(path), *one, "--set", "model.layer.top_k=1")
    assert status == 0, said
    assert json.loads((tmp_path / "audit.json").read_text())["layer"]["top_k"] == 1


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("modle.layer.top_k=1", "modle: unknown key; did you mean 'model'?"),
        ("model.layer.topk=1", "model.layer.topk: unknown key; did you mean 'top_k'?"),
        ("kernel.experts", "must read key=value"),
    ],
)
def test_a_wrong_override_is_told_of_as_of_any_command(
    audit: Audit, tmp_path: Path, override: str, wanted: str
) -> None:
    status, said = audit(str(write_config(tmp_path, LAYER)), *SMALL, "--set", override)
    assert status == 2, said
    assert wanted in said


def test_the_sections_of_a_file_that_is_written_for_run_do_no_harm(
    audit: Audit, tmp_path: Path
) -> None:
    sections = "kernel: {experts: triton_batched}\nshared_experts: {overlap: off}\ncheck: layer\n"
    given = LAYER.replace("device: cpu", "device: cuda, all2all_backend: deepep_low_latency")
    path = write_config(tmp_path, given + sections)
    status, said = audit(str(path), *SMALL, "--json", "audit.json")
    assert status == 0, said
    record = json.loads((tmp_path / "audit.json").read_text())
    assert {case["overlap"] for case in record["cases"]} == {"auto", "off"}


def test_the_audited_layer_keeps_its_structure_at_a_small_size() -> None:
    deepseek = MoEConfig(
        hidden_size=7168,
        moe_intermediate_size=2048,
        num_experts=256,
        top_k=8,
        scoring="sigmoid",
        n_group=8,
        topk_group=4,
        group_score="top2_sum",
        has_correction_bias=True,
        num_shared_experts=1,
    )
    small = audited_config(deepseek)
    assert (small.hidden_size, small.moe_intermediate_size, small.num_experts) == (64, 64, 32)
    assert small.shared_intermediate_size == 64
    kept = ("top_k", "n_group", "topk_group", "group_score", "has_correction_bias", "scoring")
    assert all(getattr(small, key) == getattr(deepseek, key) for key in kept)
    scheme = {"weight": "fp8_block"}
    fp8 = audited_config(MoEConfig.model_validate(deepseek.model_dump() | {"quantization": scheme}))
    assert (fp8.hidden_size, fp8.quantization.weight) == (256, "fp8_block")
