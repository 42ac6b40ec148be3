"""The verdict on a run's YAML file and on the command line's overrides."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.run_config import SHIPPED_CONFIGS, RunConfig, load_run_config
from tests.launch.configs import LAYER, TINY, write_config


def verdict(path: Path, overrides: list[str] | None = None) -> RunConfig | str:
    """The configuration, or the message that refuses it."""
    try:
        return load_run_config(path, overrides or [])
    except ConfigError as error:
        return str(error)


def refusal(folder: Path, text: str, overrides: list[str] | None = None) -> str:
    message = verdict(write_config(folder, text), overrides)
    assert isinstance(message, str), f"accepted: {message}"
    return message


@pytest.mark.parametrize("path", sorted(SHIPPED_CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_a_shipped_config_is_found_by_its_bare_name_and_valid(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_run_config(path.name)
    assert config.output_dir == f"runs/{path.stem}"
    assert f"dp{config.parallel.dp_size}" in path.stem or path.stem == "cpu_single"


def test_a_folder_is_not_taken_for_a_file_that_is_missing(tmp_path: Path) -> None:
    message = (
        f"{tmp_path} is a folder; give a YAML file, in which `model: {{checkpoint: {tmp_path}}}`"
    )
    assert str(verdict(tmp_path)).startswith(message)


def test_a_file_in_the_current_directory_hides_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu_single.yaml").write_text(LAYER)
    assert load_run_config("cpu_single.yaml").model.is_layer


def test_defaults_follow_the_kind_of_model(tmp_path: Path) -> None:
    layer = load_run_config(write_config(tmp_path, LAYER))
    assert (layer.check, layer.workload.seed, layer.parallel.ep_size) == ("layer", 0, 2)
    tiny = load_run_config(write_config(tmp_path, TINY))
    assert (tiny.check, tiny.workload.seed) == ("logits", None)
    # Logits are compared with a model whose rows are exact.
    assert (layer.parallel.dispatch_dtype, tiny.parallel.dispatch_dtype) == ("auto", "model")
    unchecked = load_run_config(write_config(tmp_path, TINY), ["check=off"])
    assert unchecked.parallel.dispatch_dtype == "auto"


def test_the_resolved_config_reads_back_as_itself(tmp_path: Path) -> None:
    for text in (LAYER, TINY):
        config = load_run_config(write_config(tmp_path, text))
        (tmp_path / "resolved.yaml").write_text(config.to_yaml())
        assert load_run_config(tmp_path / "resolved.yaml") == config


def test_set_wins_over_the_file_and_an_alternative_takes_the_place_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    path = write_config(tmp_path, TINY)
    overrides = ["parallel.data_parallel_size=4", "model.checkpoint=here", "check=off"]
    config = load_run_config(path, [*overrides, "workload.tokens_per_rank=[1, 2, 3, 0]"])
    assert config.parallel.dp_size == 4
    assert config.check == "off"
    assert config.model.tiny is None
    assert config.model.checkpoint == str(tmp_path.parent / "here")
    assert config.workload.tokens_per_rank == [1, 2, 3, 0]
    assert config.workload.prompts is None


def test_paths_of_the_file_are_relative_to_it(tmp_path: Path) -> None:
    config = load_run_config(write_config(tmp_path, TINY))
    assert config.workload.prompts == str(tmp_path / "prompts.txt")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dp_size: 2", "dp_siz: 2", "parallel.dp_siz: unknown key; did you mean 'dp_size'?"),
        ("parallel:", "paralel:", "paralel: unknown key; did you mean 'parallel'?"),
        ("top_k:", "topk:", "model.layer.topk: unknown key; did you mean 'top_k'?"),
        ("dp_size: 2", "dp_size: two", "parallel.dp_size: Input should be a valid integer"),
        ("dp_size: 2", "dp_size: '2'", "parallel.dp_size: Input should be a valid integer"),
        ("dp_size: 2", "dp_size: 0", "parallel.dp_size: Input should be greater than 0 (got 0)"),
        ("dp_size: 2", "dp_size: 2, dp_size: 2", "line 1: the key 'dp_size' is given twice"),
        ("dp_size: 2", "dp_size: 2, data_parallel_size: 2", "given twice, as dp_size too"),
        ("dp_size: 2", "dp_size: 3", "has 2 numbers; parallel.dp_size (3) needs one per DP rank"),
        ("dp_size: 2", "dp_size: 2, ep_size: 3", "parallel: ep_size (3) must divide"),
        ("[7, 0]", "[7, -1]", "workload: tokens_per_rank ([7, -1]) must be 0 or more each"),
        ("[7, 0]", "[7, x]", "workload.tokens_per_rank.1: Input should be a valid integer"),
        ("{tokens_per_rank: [7, 0]}", "{}", "workload: needs exactly one of prompts, tokens"),
        ("[7, 0]}", "[7, 0], routing: even}", "workload.routing: Input should be 'model'"),
        ("[7, 0]}", "[7, 0], max_new_tokens: 2}", "workload.max_new_tokens: (2) has no effect"),
        ("output_dir: out", "check: logits", "check: logits needs a checkpoint"),
        ("device: cpu", "timeout_s: .inf", "parallel.timeout_s: Input should be"),
        ("top_k: 2", "top_k: 2, expert_bias: yes", "model.layer.expert_bias: Input should be a v"),
        ("top_k: 2", "top_k: 2, routed_scaling_factor: .nan", "layer.routed_scaling_factor: Input"),
        ("top_k: 2", "top_k: 2, quantization: fp8", "model.layer.quantization: 'fp8' is no scheme"),
        ("{hidden", "[hidden", "broken YAML"),
        ("top_k: 2", "top_k: 9", "model.layer: top_k (9) must be at most num_experts (5)"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_the_key(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert old in LAYER
    message = refusal(tmp_path, LAYER.replace(old, new))
    assert message.startswith(f"{tmp_path / 'run.yaml'}: ")
    assert said in message


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("prompts.txt,", "prompts.txt, seed: 3,", "workload.seed: has no effect with"),
        ("prompts.txt,", "prompts.txt, routing: zipf,", "workload.routing: zipf has no effect"),
        ("output_dir: out", "check: layer", "check: layer needs model.layer"),
        (
            "device: cpu",
            "device: cpu, dispatch_dtype: fp8",
            "parallel.dispatch_dtype: (fp8) contradicts check: logits",
        ),
        ("{tiny:", "{checkpoint: x, tiny:", "model: needs exactly one of checkpoint, tiny, layer"),
    ],
)
def test_a_checkpoint_refuses_what_has_no_effect(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    assert said in refusal(tmp_path, TINY.replace(old, new))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("parallel.dp_siz=2", "parallel.dp_siz: unknown key; did you mean 'dp_size'?"),
        ("parallel", "--set 'parallel' must read key=value"),
        ("parallel..dp_size=2", "must read key=value"),
        ("parallel=2", "parallel: Input should be a valid dictionary"),
        ("workload.tokens_per_rank=[1", "broken YAML"),
    ],
)
def test_a_wrong_override_is_refused(override: str, said: str, tmp_path: Path) -> None:
    assert said in refusal(tmp_path, LAYER, [override])


def test_an_override_given_twice_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, LAYER, ["check=off", "check=layer"])
    assert "the key 'check' is given twice" in message


def test_a_missing_file_names_the_nearest_shipped_one(tmp_path: Path) -> None:
    message = verdict(Path("cpu_dp2_ep3.yaml"))
    assert message == (
        "cpu_dp2_ep3.yaml: no such file; did you mean the shipped 'cpu_dp2_ep2.yaml'?"
    )
    assert "shipped: cpu_" in str(verdict(tmp_path / "zzz"))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    assert "must hold sections" in refusal(tmp_path, "# nothing\n")


def test_off_is_a_word_and_not_false(tmp_path: Path) -> None:
    text = LAYER + "check: off\nshared_experts: {overlap: off}\n"
    config = load_run_config(write_config(tmp_path, text))
    assert (config.check, config.shared_experts.overlap) == ("off", "off")


KEYS = st.sampled_from(
    [
        "check",
        "chek",
        "output_dir",
        "parallel.dp_size",
        "parallel.data_parallel_size",
        "parallel.ep_size",
        "parallel.epsize",
        "parallel.device",
        "kernel.experts",
        "kernel.expert",
        "shared_experts.token_threshold",
        "shared_experts.overlap",
        "workload.routing",
        "workload.tokens_per_rank",
        "model.layer.top_k",
        "model.layer.topk",
        "workload",
    ]
)
VALUES = st.one_of(
    st.integers(-1, 9),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["auto", "off", "cpu", "zipf", "layer", "x", ""]),
    st.lists(st.integers(-1, 9), max_size=3),
)


@given(key=KEYS, value=VALUES)
@settings(max_examples=150, deadline=None)
def test_yaml_and_command_line_get_the_same_verdict(key: str, value: Any) -> None:
    base: dict[str, Any] = yaml.safe_load(LAYER)
    *sections, last = key.split(".")
    changed = json.loads(json.dumps(base))
    place = changed
    for section in sections:
        place = place.setdefault(section, {})
    if last == "data_parallel_size":
        place.pop("dp_size")
    place[last] = value
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "run.yaml")
        path.write_text(json.dumps(base))
        override = f"{key}={json.dumps(value)}"
        from_command_line = verdict(path, [override])
        if isinstance(from_command_line, str):  # which also says where the key was given
            assert from_command_line.startswith(f"{path} --set {override}: ")
            from_command_line = from_command_line.replace(f" --set {override}", "", 1)
        path.write_text(json.dumps(changed))
        assert verdict(path) == from_command_line
