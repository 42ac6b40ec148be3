"""`ep-runtime quantize`: from a run's report to a checkpoint, and what is refused."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from ep_runtime.checkpoint import INDEX_FILE, CheckpointReader
from ep_runtime.kernels.errors import CheckpointError, ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.nf3 import quantize_nf3
from ep_runtime.kernels.quant.nvfp4 import quantize_nvfp4
from ep_runtime.launch.cli import app
from ep_runtime.launch.quantize_command import HotExperts, parse_size, quantize_command
from ep_runtime.launch.quantize_statistics import most_used, read_loads
from ep_runtime.launch.quantize_writer import (
    ShardWriter,
    TensorSpec,
    cut_into_shards,
    shard_names,
)
from tests.ep_runtime.checkpoints import copy_with_tensors, read_tensors, tiny_checkpoint
from tests.ep_runtime.quantized_checkpoints import quantized_checkpoint
from tests.launch.configs import write_config

Command = Callable[..., tuple[int, str]]
RUN = """\
parallel: {{dp_size: 1, device: cpu}}
model: {{checkpoint: {path}}}
workload: {{tokens_per_rank: [12], seed: 1}}
check: {check}
output_dir: {out}
"""
NUM_EXPERTS = 8


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
        code = ended.value.code
        assert isinstance(code, int)
        return code, said.out + said.err

    return run


def statistics(folder: Path, loads: dict[str, Any] | None = None) -> Path:
    """A report of one rank; by default mixtral's two layers, the later experts the more used."""
    path = folder / "statistics.json"
    rising = {"0": list(range(NUM_EXPERTS)), "1": list(range(NUM_EXPERTS, 0, -1))}
    ranks = [{"tokens_per_expert_of_layer": rising if loads is None else loads}]
    path.write_text(json.dumps({"ranks": ranks}))
    return path


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def quantize(source: Path, output: Path, path: Path, **changes: Any) -> None:
    values = {"hot": HotExperts(number=2), "shard_size": "1GB", "json_file": None, **changes}
    quantize_command(source, output, statistics=path, console=Console(quiet=True), **values)


def test_a_run_tells_what_quantize_needs_and_what_it_makes_passes_a_run(
    command: Command, tmp_path: Path
) -> None:
    source = tiny_checkpoint("deepseek_v3")
    (tmp_path / "first").mkdir()
    text = RUN.format(path=source, check="off", out="counted")
    status, said = command("run", str(write_config(tmp_path / "first", text)))
    assert status == 0, said
    report = json.loads((tmp_path / "counted" / "report.json").read_text())
    (counts,) = report["ranks"][0]["tokens_per_expert_of_layer"].values()
    assert counts == report["ranks"][0]["tokens_per_expert"]
    assert sum(counts) == 12 * 3

    status, said = command(
        "quantize",
        str(source),
        "made",
        *("--statistics", "counted/report.json", "--hot-share", "0.25", "--json", "made.json"),
    )
    assert status == 0, said
    made = json.loads((tmp_path / "made.json").read_text())
    hot = made["layers"]["1"]["nvfp4_experts"]
    assert hot == list(most_used(counts, 2))
    share = sum(counts[e] for e in hot) / sum(counts)
    assert made["layers"]["1"]["slots_in_nvfp4"] == pytest.approx(share)
    assert [made["tiers"][tier]["num_experts"] for tier in ("nvfp4", "nf3")] == [2, 6]
    assert "relative error" in said
    assert "nf3" in said

    status, said = command("explain", "made")
    assert status == 0, said
    assert "experts nvfp4_nf3_hybrid (2 in nvfp4, 6 in nf3)" in said
    text = RUN.format(path=tmp_path / "made", check="logits", out="checked")
    status, said = command("run", str(write_config(tmp_path / "first", text)))
    assert status == 0, said


def test_the_report_has_each_tiers_error_and_bytes(tmp_path: Path) -> None:
    source = tiny_checkpoint("mixtral")
    quantize(source, tmp_path / "made", statistics(tmp_path), json_file=tmp_path / "made.json")
    report = json.loads((tmp_path / "made.json").read_text())
    tensors = read_tensors(source)
    hot = {0: (6, 7), 1: (0, 1)}
    sums = {"nvfp4": [0.0, 0.0], "nf3": [0.0, 0.0]}
    for name, weight in tensors.items():
        if ".experts." not in name:
            continue
        layer, expert = int(name.split(".")[2]), int(name.split(".experts.")[1].split(".")[0])
        tier = "nvfp4" if expert in hot[layer] else "nf3"
        stored = (quantize_nvfp4 if tier == "nvfp4" else quantize_nf3)(weight)
        sums[tier][0] += float((dequantize(stored)[0] - weight).double().square().sum())
        sums[tier][1] += float(weight.double().square().sum())
    made = load_file(tmp_path / "made" / "model.safetensors")
    for tier, (error, norm) in sums.items():
        found = report["tiers"][tier]
        assert found["relative_error"] == pytest.approx((error / norm) ** 0.5, rel=1e-9)
    stored_bytes = sum(tensor.nbytes for name, tensor in made.items() if ".experts." in name)
    assert sum(tier["bytes"] for tier in report["tiers"].values()) == stored_bytes
    weights = 3 * 64 * 96
    assert report["tiers"]["nf3"]["num_weights"] == 12 * weights
    assert report["tiers"]["nvfp4"]["num_weights"] == 4 * weights
    # w1 and w3 have 64 columns, one group; w2 has 96, two groups.
    nf3_bits = 3 + 16 * (2 * 96 + 64 * 2) / weights
    assert report["tiers"]["nf3"]["bits_per_weight"] == pytest.approx(nf3_bits)
    assert report["bytes"]["output"] == sum(tensor.nbytes for tensor in made.values())
    assert report["bytes"]["source"] == sum(tensor.nbytes for tensor in tensors.values())


def test_everything_else_is_copied_and_shards_are_indexed(tmp_path: Path) -> None:
    source = copy_with_tensors(
        tiny_checkpoint("mixtral"), tmp_path / "source", read_tensors(tiny_checkpoint("mixtral"))
    )
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    quantize(source, tmp_path / "made", statistics(tmp_path), shard_size="90KB")
    made = tmp_path / "made"
    assert (made / "tokenizer.json").read_text() == "{}"
    assert not (made / "pytorch_model.bin").exists()
    index = json.loads((made / INDEX_FILE).read_text())
    files = sorted(path.name for path in made.glob("*.safetensors"))
    assert files == shard_names(len(files))
    assert len(files) > 2
    tensors: dict[str, Tensor] = {}
    for file in files:
        own = load_file(made / file)
        assert sum(tensor.nbytes for tensor in own.values()) <= 90_000 or len(own) == 1
        assert all(index["weight_map"][name] == file for name in own)
        tensors |= own
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    plain = read_tensors(source)
    copied = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in copied.items())
    experts = {name for name in tensors if ".experts." in name}
    assert set(tensors) == experts | set(copied)
    path = "model.layers.0.block_sparse_moe.experts."
    assert {
        name.removeprefix(path + "7.w1.")
        for name in experts
        if "0.block" in name and ".7.w1" in name
    } == {
        "weight",
        "weight_scale",
        "weight_scale_2",
    }
    assert f"{path}0.w1.weight_nf3" in experts


def test_experts_in_one_tensor_become_experts_of_their_own(tmp_path: Path) -> None:
    """As transformers has them in memory, under its names."""
    tensors = read_tensors(tiny_checkpoint("qwen3_moe"))
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    path = "model.layers.1.mlp.experts"

    def stacked(part: str) -> Tensor:
        return torch.stack([tensors[f"{path}.{e}.{part}.weight"] for e in range(7)])

    fused[f"{path}.gate_up_proj"] = torch.cat([stacked("gate_proj"), stacked("up_proj")], 1)
    fused[f"{path}.down_proj"] = stacked("down_proj")
    source = copy_with_tensors(tiny_checkpoint("qwen3_moe"), tmp_path / "fused", fused)
    counts = statistics(tmp_path, {"1": [3, 0, 0, 9, 0, 0, 0]})
    made = []
    for name, folder in (("a", source), ("b", tiny_checkpoint("qwen3_moe"))):
        quantize(folder, tmp_path / name, counts)
        made.append(load_file(tmp_path / name / "model.safetensors"))
    assert set(made[0]) == set(made[1])
    for name, tensor in made[0].items():
        assert bytes_of(tensor) == bytes_of(made[1][name])


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[weakref.ref[Tensor]] = []
    write = ShardWriter.write

    def watched(self: ShardWriter, name: str, tensor: Tensor) -> None:
        alive = [one for one in written if one() is not None]
        assert len(alive) <= 3, "the tensors of one projection at most"
        write(self, name, tensor)
        written.append(weakref.ref(tensor))

    monkeypatch.setattr(ShardWriter, "write", watched)
    quantize(tiny_checkpoint("mixtral"), tmp_path / "made", statistics(tmp_path))
    assert len(written) > 100


@pytest.mark.parametrize(("number", "share", "count"), [(0, None, 0), (8, None, 8), (None, 1, 8)])
def test_all_or_none_may_be_hot(
    number: int | None, share: float | None, count: int, tmp_path: Path
) -> None:
    hot = HotExperts(number, share)
    quantize(tiny_checkpoint("mixtral"), tmp_path / "made", statistics(tmp_path), hot=hot)
    values = json.loads((tmp_path / "made" / "config.json").read_text())
    assert {len(ids) for ids in values["quantization_config"]["nvfp4_experts"].values()} == {count}


def test_a_share_is_rounded_up_to_whole_experts() -> None:
    assert HotExperts(share=0.3).count(8) == 3
    assert HotExperts(share=0.25).count(8) == 2
    assert HotExperts(share=0.1).count(10) == 1


@pytest.mark.parametrize(
    ("hot", "message"),
    [
        (HotExperts(), "give one of --hot"),
        (HotExperts(2, 0.5), "give one of --hot"),
        (HotExperts(number=9), r"--hot \(9\) must be from 0 to the 8 experts"),
        (HotExperts(number=-1), r"--hot \(-1\) must be"),
        (HotExperts(share=1.5), r"--hot-share \(1.5\) must be from 0 to 1"),
    ],
)
def test_a_number_of_hot_experts_that_cannot_be_is_refused(hot: HotExperts, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hot.count(8)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("800B", 800), ("90kb", 90_000)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["5", "GB", "-1GB", "0B", "5 parsecs"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--shard-size .* must be a size, as 5GB"):
        parse_size(text)


def test_the_most_used_experts_come_first_and_of_equal_ones_the_lower() -> None:
    assert most_used([3, 9, 3, 0], 2) == (0, 1)
    assert most_used([0, 0, 5], 0) == ()


def test_the_counts_of_all_ranks_are_added(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ranks = [{"tokens_per_expert_of_layer": {"1": [1, 0, 2]}} for _ in range(3)]
    path.write_text(json.dumps({"ranks": ranks}))
    assert read_loads(path, (1,), 3) == {1: [3, 0, 6]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "has no `ranks`; give the report"),
        ('{"ranks": [{}]}', "its ranks have no `tokens_per_expert_of_layer`"),
        (
            '{"ranks": [{"tokens_per_expert_of_layer": {"1": [1, 2]}}]}',
            "layer 1 has counts of 2 experts, and the checkpoint has 3",
        ),
        (
            '{"ranks": [{"tokens_per_expert_of_layer": {"2": [1, 2, 3]}}]}',
            r"has counts of the layers \[2\], and the checkpoint's MoE layers are \[1\]",
        ),
        (
            '{"ranks": [{"tokens_per_expert_of_layer": {"1": [0, 0, 0]}}]}',
            "layer 1 has no slot on any expert",
        ),
        (
            '{"ranks": [{"tokens_per_expert_of_layer": {"1": [0, -1, 0]}}]}',
            r"tokens_per_expert_of_layer.1 must be the number of slots .* \[0, -1, 0\]",
        ),
    ],
)
def test_statistics_that_are_not_of_a_run_of_the_model_are_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_loads(path, (1,), 3)


def test_what_cannot_be_made_is_status_2_and_writes_nothing(
    command: Command, tmp_path: Path
) -> None:
    counts = statistics(tmp_path)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("")
    mixtral, gpt_oss = str(tiny_checkpoint("mixtral")), str(tiny_checkpoint("gpt_oss"))
    quantised = str(quantized_checkpoint("deepseek_v3_nvfp4"))
    odd = str(tiny_checkpoint("qwen2_moe"))
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "model.safetensors").write_text("")
    (full / "config.json").write_text("{}")
    broken = str(copy_with_tensors(tiny_checkpoint("mixtral"), tmp_path / "broken", {}))
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "broken" / "config.json").write_text(json.dumps(config))
    (tmp_path / "odd.json").write_text(
        json.dumps({"ranks": [{"tokens_per_expert_of_layer": {"0": [1] * 6, "1": [1] * 6}}]})
    )
    for source, output, path, more, message in (
        (mixtral, "full", counts, ["--hot", "2"], "is there already; give a folder that is new"),
        (mixtral, "part", counts, ["--hot", "2"], "part: is there already, without a config.json"),
        (broken, "made", counts, ["--hot", "2"], "broken: is quantised already, give the"),
        (mixtral, "made", "none.json", ["--hot", "2"], "none.json: cannot be read as JSON"),
        (mixtral, "made", counts, [], "give one of --hot"),
        (mixtral, "made", counts, ["--hot", "9"], "--hot (9) must be from 0 to the 8 experts"),
        (quantised, "made", counts, ["--hot", "2"], "is quantised already (modelopt)"),
        (gpt_oss, "made", counts, ["--hot", "2"], "gpt_oss has experts with biases"),
        (odd, "made", "odd.json", ["--hot", "2"], "moe_intermediate_size that 32 divides"),
        ("nowhere", "made", counts, ["--hot", "2"], "'nowhere' is not a directory"),
    ):
        status, said = command("quantize", source, output, "--statistics", str(path), *more)
        assert status == 2, said
        assert message in said
        assert not (tmp_path / "made").exists()


def test_weights_that_are_not_finite_are_refused_by_name_and_leave_no_checkpoint(
    tmp_path: Path,
) -> None:
    tensors = read_tensors(tiny_checkpoint("mixtral"))
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors[name][0, 0] = torch.nan
    source = copy_with_tensors(tiny_checkpoint("mixtral"), tmp_path / "source", tensors)
    with pytest.raises(CheckpointError, match=f"{name}: weights that are NaN"):
        quantize(source, tmp_path / "made", statistics(tmp_path))
    assert not (tmp_path / "made" / "config.json").exists()


def test_a_file_that_cannot_be_copied_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    source = copy_with_tensors(
        tiny_checkpoint("mixtral"), tmp_path / "source", read_tensors(tiny_checkpoint("mixtral"))
    )
    (source / "tokenizer.json").write_text("{}")
    output = tmp_path / "made"

    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(target))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ep_runtime.launch.quantize_command.shutil.copyfile", refuse)
        with pytest.raises(CheckpointError, match=r"made: cannot be written: .*No space left"):
            quantize(source, output, statistics(tmp_path))
    assert not (output / "config.json").exists()


def test_items_are_cut_as_the_docstring_says() -> None:
    sized = [("a", 3), ("b", 3), ("c", 9), ("d", 1)]
    assert list(cut_into_shards(sized, 7)) == [["a", "b"], ["c"], ["d"]]
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2)[1] == "model-00002-of-00002.safetensors"


def test_a_shard_is_what_safetensors_writes(tmp_path: Path) -> None:
    """Tensors of every width, none and no dimensions, written in any order."""
    tensors = {
        "bytes": torch.arange(4, dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(5, 3).bfloat16(),
        "none": torch.zeros(0, 4),
        "words": torch.arange(6, dtype=torch.int32).view(2, 3),
        "scale": torch.ones(7).to(torch.float8_e4m3fn),
        "columns": torch.randn(4, 6).T,
    }
    specs = [TensorSpec(n, tuple(t.shape), t.dtype) for n, t in tensors.items()]
    with ShardWriter(tmp_path / "model.safetensors", specs) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "other.safetensors")
    ours, theirs = (load_file(tmp_path / f"{n}.safetensors") for n in ("model", "other"))
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype is theirs[name].dtype
        assert tensor.shape == theirs[name].shape
        assert bytes_of(tensor) == bytes_of(theirs[name])
    content = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0
    with CheckpointReader(tmp_path) as reader:
        read = torch.empty(5, 3, dtype=torch.bfloat16)
        reader.read_into("half", read)
    assert torch.equal(read, tensors["half"])


def test_a_tensor_that_was_not_announced_or_not_written_is_an_error(tmp_path: Path) -> None:
    spec = TensorSpec("x", (2,), torch.float32)
    with (
        pytest.raises(ValueError, match="announced as None"),
        ShardWriter(tmp_path / "a.safetensors", [spec]) as writer,
    ):
        writer.write("y", torch.zeros(2))
    with (
        pytest.raises(ValueError, match=r"\['x'\] were not written"),
        ShardWriter(tmp_path / "b.safetensors", [spec]),
    ):
        pass
