"""Which layers `ep-runtime tune` measures, what it refuses, and how errors name them."""

import json
import re
from pathlib import Path

import pytest
import torch

from ep_runtime.kernels import tile_tables
from ep_runtime.kernels import tiles as kernel_tiles
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.kernels.tile_tables import SHIPPED_TABLES, TunedLayer, read_tile_table
from ep_runtime.launch import tune_command
from ep_runtime.launch.cli import app
from ep_runtime.launch.tune_command import plan_tuning, refuse_what_has_no_tiles
from ep_runtime.launch.tune_layers import (
    TuneSizes,
    layers_to_tune,
    parse_rows_per_expert,
)
from ep_runtime.launch.tune_list import LIST_FORM
from tests.launch.configs import LAYER, write_config

CUDA = torch.device("cuda", 0)


def test_layers_come_from_sizes_files_and_checkpoints(tmp_path: Path) -> None:
    sizes = TuneSizes(4096, 1536, 128, 8, scheme="fp8_block")
    (given,) = layers_to_tune([], sizes, 64)
    assert (given.num_local_experts, given.num_experts) == (64, 128)
    assert given.scheme.weight is WeightScheme.FP8_BLOCK
    assert given.dtype is torch.bfloat16
    file = str(write_config(tmp_path, LAYER))  # 5 experts on 2 ranks
    (of_file,) = layers_to_tune([file, file], TuneSizes(), None)
    assert (of_file.num_local_experts, of_file.num_experts) == (3, 5)
    assert (of_file.hidden_size, of_file.intermediate_size) == (32, 16)
    config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    config |= {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}  # type: ignore[dict-item]
    config |= {"num_experts_per_tok": 2, "torch_dtype": "bfloat16", "hidden_act": "silu"}  # type: ignore[dict-item]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (of_checkpoint,) = layers_to_tune([str(tmp_path)], TuneSizes(), None)
    assert (of_checkpoint.num_local_experts, of_checkpoint.intermediate_size) == (4, 96)


def write_list(folder: Path, *layers: str) -> str:
    path = folder / "list.yaml"
    path.write_text("layers:\n" + "".join(f"  - {{{layer}}}\n" for layer in layers))
    return str(path)


SMALL = "hidden_size: 64, moe_intermediate_size: 96, num_experts: 4, top_k: 2"


def test_a_file_may_list_layers(tmp_path: Path) -> None:
    path = write_list(tmp_path, SMALL, f"{SMALL}, local_experts: 2, quantization: fp8_block", SMALL)
    plain, fp8 = layers_to_tune([path], TuneSizes(), None)
    assert (plain.num_local_experts, plain.num_experts, plain.dtype) == (4, 4, torch.bfloat16)
    assert (fp8.num_local_experts, fp8.scheme.weight) == (2, WeightScheme.FP8_BLOCK)
    path = write_list(tmp_path, SMALL, f"{SMALL}, quantization: fp8_block")
    assert [s.num_local_experts for s in layers_to_tune([path], TuneSizes(), 1)] == [1, 1]


@pytest.mark.parametrize("path", sorted(SHIPPED_TABLES.glob("*.json")), ids=lambda p: p.name)
def test_every_layer_of_a_shipped_table_is_in_the_list_beside_it(path: Path) -> None:
    listed = layers_to_tune([str(path.with_suffix(".yaml"))], TuneSizes(), None)
    known = [TunedLayer.of(shape) for shape in listed]
    assert len(known) == len(set(known))
    assert {layer for layer, _ in read_tile_table(path).layers} <= set(known)


def refusal(source: str | Path, local_experts: int | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        layers_to_tune([str(source)], TuneSizes(), local_experts)
    return str(error.value)


SIZES = "hidden_size 64, moe_intermediate_size 96, num_experts 4, top_k 2"
ACT_ORDER = "quantization: {weight: int4_w4a16, group_size: 32, has_input_order: true}"


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (
            f"{SMALL}, local_expert: 2",
            f"layer 2 of 2 ({SIZES}, local_expert 2): local_expert: unknown key; did you mean "
            f"'local_experts'?",
        ),
        (
            f"{SMALL}, local_experts: 0",
            f"layer 2 of 2 ({SIZES}, local_experts 0): local_experts: Input should be greater",
        ),
        (
            f"{SMALL}, local_experts: 5",
            f"layer 2 of 2 ({SIZES}, local_experts 5): local experts (5) must be 1 to the layer's "
            f"4 experts",
        ),
        (
            f"{SMALL}, quantization: nf3",
            f"layer 2 of 2 ({SIZES}, quantization nf3): weights stored as nf3 have no tiles to",
        ),
        (
            f"{SMALL}, {ACT_ORDER}",
            f"layer 2 of 2 ({SIZES}, quantization {{'weight': 'int4_w4a16', 'group_size': 32, "
            f"'has_input_order': True}}): experts triton has no tiles to tune for the layer: it",
        ),
    ],
)
def test_a_wrong_layer_of_a_list_is_named_by_file_number_and_sizes(
    layer: str, said: str, tmp_path: Path
) -> None:
    path = write_list(tmp_path, SMALL, layer)
    assert refusal(path).startswith(f"{path}: {said}")


def test_an_entry_that_is_no_mapping_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text(f"layers: [{{{SMALL}}}, null]\n")
    said = refusal(tmp_path / "list.yaml")
    assert "list.yaml: layer 2 of 2: must be a layer's keys, got None; as layers: [{" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is blank; it must hold a run's sections or a list of layers"),
        (f"- {{{SMALL}}}\n", "holds [{'hidden_size': 64"),
        ("layers:\n", "layers: must be a list, got None"),
        (f"layers: {{{SMALL}}}\n", "layers: must be a list, got {'hidden_size': 64"),
        ("layers: []\n", "layers: is empty; list at least one"),
        (f"layer: [{{{SMALL}}}]\n", "has layer, neither a run's sections nor a list of layers"),
    ],
)
@pytest.mark.parametrize("name", ["list.yaml", "list.txt"])
def test_what_is_no_list_of_layers_is_told_what_one_looks_like(
    text: str, said: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    refused = refusal(tmp_path / name)
    assert refused.startswith(f"{tmp_path / name}: {said}")
    assert refused.endswith(f"as {LIST_FORM}")


def test_the_form_that_errors_show_is_a_list_that_is_read(tmp_path: Path) -> None:
    """Whatever the file is called."""
    (tmp_path / "list").write_text(LIST_FORM)
    (shape,) = layers_to_tune([str(tmp_path / "list")], TuneSizes(), None)
    assert (shape.num_local_experts, shape.num_experts, shape.top_k) == (64, 128, 8)


def test_keys_beside_layers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text(f"layers: [{{{SMALL}}}]\nparallel: {{dp_size: 2}}\n")
    assert "list.yaml: parallel: has no effect in a list of layers" in refusal(
        tmp_path / "list.yaml"
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".", "has no config.json, so it is no checkpoint folder"),
        ("config.json", "no such file"),
        ("list.json", "of JSON files only a checkpoint's config.json"),
        ("bytes.yaml", "cannot be read"),
        ("broken.yaml", "line 1: broken YAML"),
    ],
)
def test_a_source_that_is_none_is_one_clear_line(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("{}")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "broken.yaml").write_text("layers: [")
    refused = refusal(tmp_path / name)
    assert refused.startswith(f"{tmp_path / name}: {said}")
    assert "Errno" not in refused


def test_local_experts_are_refused_beside_a_list_that_gives_its_own(tmp_path: Path) -> None:
    path = write_list(tmp_path, SMALL, f"{SMALL}, local_experts: 2")
    assert refusal(path, 1) == (
        f"--local-experts (1) has no effect on {path}: layer 2 of 2 ({SIZES}, local_experts 2), "
        f"which gives local_experts; drop one of the two"
    )
    assert refusal(write_list(tmp_path, SMALL), 5).endswith(
        f"layer 1 of 1 ({SIZES}): --local-experts (5) must be 1 to the layer's 4 experts"
    )
    file = str(write_config(tmp_path, LAYER))
    assert [s.num_local_experts for s in layers_to_tune([file], TuneSizes(), 1)] == [1]


ONE_KEY = "hidden_size: 64, moe_intermediate_size: 96, local_experts: 2"


@pytest.mark.parametrize(
    ("one", "other", "differing"),
    [
        ("num_experts: 4, top_k: 2", "num_experts: 8, top_k: 2", "num_experts 4 and 8"),
        ("num_experts: 4, top_k: 2", "num_experts: 4, top_k: 1", "top_k 2 and 1"),
        (
            "num_experts: 4, top_k: 2",
            "num_experts: 4, top_k: 2, activation: gelu",
            "activation silu and gelu",
        ),
        (
            "num_experts: 4, top_k: 2",
            "num_experts: 8, top_k: 1, activation: gelu",
            "num_experts 4 and 8; top_k 2 and 1; activation silu and gelu",
        ),
    ],
)
def test_two_layers_that_a_table_cannot_tell_apart_are_refused_by_name(
    one: str, other: str, differing: str, tmp_path: Path
) -> None:
    path = write_list(tmp_path, f"{ONE_KEY}, {one}", SMALL, f"{ONE_KEY}, {other}")
    keys = "hidden_size 64, moe_intermediate_size 96, local_experts 2"
    assert refusal(path) == (
        f"{path}: layer 1 of 3 ({keys}, {one.replace(':', '')}) and "
        f"{path}: layer 3 of 3 ({keys}, {other.replace(':', '')}) are one layer in a table, which "
        f"does not have the {differing} in which they differ; leave one out, tiles of the other "
        f"serve both"
    )


def test_two_files_with_a_layer_that_a_table_cannot_tell_apart_are_both_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    first = write_list(tmp_path, SMALL)
    second = write_list(tmp_path / "other", SMALL.replace("top_k: 2", "top_k: 1"))
    with pytest.raises(ConfigError) as error:
        layers_to_tune([first, second], TuneSizes(), None)
    assert f"{first}: layer 1 of 1" in str(error.value)
    assert f"{second}: layer 1 of 1" in str(error.value)


def test_layers_whose_kernel_is_the_same_are_measured_once(tmp_path: Path) -> None:
    """Router, bias, and the numbers of an activation are no part of it."""
    oai = f"{SMALL}, activation: swigluoai"
    layers = [oai, f"{oai}, swiglu_limit: 7.0", f"{oai}, expert_bias: true, scoring: sigmoid"]
    ((shape, place),) = layers_to_tune([write_list(tmp_path, *layers)], TuneSizes(), None).items()
    assert shape.activation.limit is None
    assert "layer 1 of 3" in place


def test_a_layer_with_no_tiles_on_the_device_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_list(tmp_path, SMALL, f"{SMALL}, quantization: mxfp4")
    shapes = layers_to_tune([path], TuneSizes(), None)
    monkeypatch.setattr(
        tune_command, "takes_hopper_packed", lambda shape, device: shape.scheme.is_quantised
    )
    with pytest.raises(ConfigError) as error:
        refuse_what_has_no_tiles(shapes, CUDA, places=shapes)
    assert str(error.value).startswith(
        f"{path}: layer 2 of 2 ({SIZES}, quantization mxfp4): weights stored as mxfp4 run on "
        f"Hopper's packed GEMM here"
    )


@pytest.mark.parametrize("scheme", ["int4_w4a16", "int8_w8a16"])
def test_a_scheme_with_groups_is_no_option(scheme: str) -> None:
    with pytest.raises(ConfigError) as error:
        layers_to_tune([], TuneSizes(64, 64, 4, 2, scheme=scheme), None)
    assert str(error.value).startswith(f"--scheme {scheme} leaves open how many columns share")
    assert f"quantization: {{weight: {scheme}, group_size: 128}}" in str(error.value)


def test_what_is_refused_leaves_no_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.yaml").write_text("layers: []\n")
    with pytest.raises(SystemExit) as ended:
        app(["tune", str(tmp_path / "list.yaml"), "--output", str(tmp_path / "table.json")])
    assert ended.value.code == 2
    assert "list.yaml: layers: is empty" in capfd.readouterr().err
    assert not (tmp_path / "table.json").exists()


def test_the_command_of_the_h200s_list_has_a_point_in_each_regime_of_every_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel_tiles, "is_interpreting", lambda: False)
    monkeypatch.setattr(kernel_tiles, "is_hopper", lambda device: True)
    path = SHIPPED_TABLES / "NVIDIA_H200.yaml"
    (text,) = re.findall(r"--rows-per-expert (\S+)", path.read_text())
    plan = plan_tuning(layers_to_tune([str(path)], TuneSizes(), None), parse_rows_per_expert(text))
    for shape, numbers in plan.layers:
        points = {number * shape.top_k / (shape.num_experts or 1) for number in numbers}
        wanted = {tile_tables._regime(0.25 * rows, shape, CUDA) for rows in range(1, 4000)}
        assert {tile_tables._regime(rows, shape, CUDA) for rows in points} == wanted, shape


@pytest.mark.parametrize(
    ("sources", "sizes", "local_experts", "said"),
    [
        ([], TuneSizes(top_k=2), None, "missing: --hidden-size, --intermediate-size, --num-exp"),
        (["run.yaml"], TuneSizes(top_k=2), None, "--top-k has no effect beside run.yaml"),
        (
            [],
            TuneSizes(64, 64, 4, 2),
            5,
            "--hidden-size 64 --intermediate-size 64 --num-experts 4 --top-k 2: --local-experts "
            "(5) must be 1 to the layer's 4 experts",
        ),
        (
            [],
            TuneSizes(64, 64, 4, 2, scheme="nf3"),
            None,
            "--top-k 2 --scheme nf3: weights stored as nf3 have no tiles to tune",
        ),
        ([], TuneSizes(64, 64, 4, 8), None, "top_k (8) must be at most num_experts (4)"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    sources: list[str], sizes: TuneSizes, local_experts: int | None, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        layers_to_tune(sources, sizes, local_experts)
    assert said in str(error.value)


def test_rows_per_expert_are_numbers_above_0() -> None:
    assert parse_rows_per_expert("16,0.25,16") == (0.25, 16.0)
    for text in ("", "1,x", "0", "-1", "inf", "nan"):
        with pytest.raises(ConfigError, match="must be numbers above 0"):
            parse_rows_per_expert(text)
