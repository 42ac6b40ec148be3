"""Reading checkpoints: names, layouts, coverage, bytes, memory, and everything that is refused."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ep_runtime.checkpoint import CheckpointReader
from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.expert_loading import ExpertBuffers, ExpertLoader, prove_coverage
from ep_runtime.families import FAMILIES
from ep_runtime.kernels.errors import CheckpointError, ConfigError
from ep_runtime.models import load_model
from ep_runtime.stored_weight import PLAIN, StoredWeight
from ep_runtime.tensor_names import Slot
from ep_runtime.tiny import write_tiny_checkpoint
from tests.ep_runtime.checkpoints import (
    PROMPTS,
    copy_with_tensors,
    expected_logits,
    read_tensors,
    tiny_checkpoint,
)
from tests.harness import run_ranks

Tensors = dict[str, Tensor]
Reads = dict[tuple[int, str], tuple[int, ...]]


@pytest.fixture(scope="module")
def ctx() -> Iterator[EPContext]:
    with init_distributed(ParallelConfig(device="cpu")) as context:
        yield context


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors, block: str, gate: str, up: str, down: str) -> Tensors:
    """The names that transformers 5 has in memory, from the classic ones."""
    result = {name: t for name, t in tensors.items() if ".experts." not in name}
    for prefix in sorted({n.split(f".{block}.experts.")[0] for n in tensors if ".experts." in n}):
        experts = f"{prefix}.{block}.experts"
        count = len([n for n in tensors if n.startswith(experts) and n.endswith(f"{down}.weight")])

        def part(expert: int, name: str, experts: str = experts) -> Tensor:
            return tensors[f"{experts}.{expert}.{name}.weight"]

        halves = [torch.cat([part(e, gate), part(e, up)]) for e in range(count)]
        result[f"{prefix}.mlp.experts.gate_up_proj"] = torch.stack(halves)
        downs = [part(e, down) for e in range(count)]
        result[f"{prefix}.mlp.experts.down_proj"] = torch.stack(downs)
    return renamed(result, f".{block}.", ".mlp.")


def mixtral_in_qwen_names(tensors: Tensors) -> Tensors:
    for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
        tensors = renamed(tensors, f".{old}.weight", f".{new}.weight")
    return renamed(tensors, ".block_sparse_moe.", ".mlp.")


def with_hub_leftovers(tensors: Tensors) -> Tensors:
    """A multi-token-prediction layer after the last one, and a buffer of old releases."""
    extra = {
        name.replace("model.layers.1.", "model.layers.2."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    extra["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128)
    extra["model.layers.2.shared_head.head.weight"] = torch.zeros(320, 64)
    extra["model.layers.2.embed_tokens.weight"] = torch.zeros(320, 64)
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    return {**tensors, **extra}


@pytest.mark.parametrize(
    ("family", "change"),
    [
        pytest.param("mixtral", mixtral_in_qwen_names, id="mixtral_in_mlp_gate_proj_names"),
        pytest.param(
            "mixtral", lambda t: fused(t, "block_sparse_moe", "w1", "w3", "w2"), id="mixtral_fused"
        ),
        pytest.param(
            "qwen2_moe",
            lambda t: fused(t, "mlp", "gate_proj", "up_proj", "down_proj"),
            id="qwen2_moe_fused",
        ),
        pytest.param(
            "deepseek_v3",
            lambda t: fused(t, "mlp", "gate_proj", "up_proj", "down_proj"),
            id="deepseek_v3_fused",
        ),
        pytest.param("deepseek_v3", with_hub_leftovers, id="deepseek_v3_hub_with_mtp"),
        pytest.param("glm4_moe", with_hub_leftovers, id="glm4_moe_hub_with_mtp"),
    ],
)
def test_other_layouts_of_the_same_weights_give_the_same_logits(
    family: str, change: Callable[[Tensors], Tensors], ctx: EPContext, tmp_path: Path
) -> None:
    source = tiny_checkpoint(family)
    tensors = change(read_tensors(source))
    assert set(tensors) != set(read_tensors(source))
    model = load_model(copy_with_tensors(source, tmp_path, tensors), ctx, progress=False)
    logits = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0]
    expected = expected_logits(family)[1]
    assert float((logits - expected).abs().max()) <= 2e-4 * float(expected.abs().max())


def test_a_sharded_checkpoint_is_read_through_its_index(ctx: EPContext, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_checkpoint("qwen3_moe")
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = load_model(tmp_path, ctx, progress=False)
    logits = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0]
    torch.testing.assert_close(logits, expected_logits("qwen3_moe")[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("keep_head", [False, True])
def test_tied_embeddings_are_one_tensor_unless_both_are_stored(
    keep_head: bool, ctx: EPContext, tmp_path: Path
) -> None:
    source = write_tiny_checkpoint("olmoe", tmp_path / "tied", tie_word_embeddings=True)
    tensors = read_tensors(source)
    assert "lm_head.weight" not in tensors
    if keep_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    path = copy_with_tensors(source, tmp_path / "copy", tensors)
    model = load_model(path, ctx, progress=False).transformers_model
    head, embeddings = model.lm_head.weight, model.model.embed_tokens.weight
    assert (head is embeddings) is not keep_head
    assert torch.equal(head, embeddings * (2 if keep_head else 1))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def moved(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {(new if n == old else n): t for n, t in tensors.items()}


def added(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


EXPERT = "model.layers.1.block_sparse_moe.experts.5.w3.weight"


@pytest.mark.parametrize(
    ("family", "change", "messages"),
    [
        pytest.param("mixtral", without(EXPERT), [f"1 missing: {EXPERT}"], id="missing_expert"),
        pytest.param(
            "mixtral",
            moved(EXPERT, EXPERT.replace("w3", "w33")),
            [f"1 missing: {EXPERT} (is it {EXPERT.replace('w3', 'w33')}?)", "1 left over"],
            id="misspelt_expert",
        ),
        pytest.param(
            "mixtral",
            added(EXPERT.replace(".5.", ".8."), torch.zeros(96, 64)),
            ["1 left over: " + EXPERT.replace(".5.", ".8.")],
            id="extra_expert",
        ),
        pytest.param(
            "mixtral",
            added(EXPERT.replace("block_sparse_moe", "mlp"), torch.zeros(96, 64)),
            ["1 there under two names", EXPERT],
            id="expert_under_two_names",
        ),
        pytest.param(
            "mixtral",
            added("model.layers.2.mlp.gate.weight", torch.zeros(8, 64)),
            ["1 left over: model.layers.2.mlp.gate.weight"],
            id="layer_past_the_last",
        ),
        pytest.param(
            "mixtral",
            added("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(8, 192, 64)),
            ["1 missing: model.layers.0.block_sparse_moe.experts.down_proj", "24 left over"],
            id="fused_beside_per_expert",
        ),
        pytest.param(
            "deepseek_v3",
            without("model.layers.1.mlp.gate.e_score_correction_bias"),
            ["1 missing: model.layers.1.mlp.gate.e_score_correction_bias"],
            id="missing_correction_bias",
        ),
        pytest.param(
            "deepseek_v3",
            added("model.layers.2.mlp.gate.weight", torch.zeros(8, 64)),
            ["1 left over: model.layers.2.mlp.gate.weight"],
            id="layer_past_the_last_without_mtp_marker",
        ),
        pytest.param(
            "qwen2_moe",
            without("model.layers.0.mlp.shared_expert_gate.weight"),
            ["1 missing: model.layers.0.mlp.shared_expert_gate.weight"],
            id="missing_shared_gate",
        ),
        pytest.param(
            "olmoe",
            moved("model.norm.weight", "model.norms.weight"),
            ["missing: model.norm.weight (is it model.norms.weight?)"],
            id="misspelt_dense_tensor",
        ),
        pytest.param("olmoe", without("lm_head.weight"), ["missing: lm_head"], id="missing_head"),
        pytest.param(
            "mixtral",
            lambda t: {**t, EXPERT: t[EXPERT].T},
            [EXPERT, "shape [64, 96]", "wanted [96, 64]"],
            id="transposed_expert",
        ),
        pytest.param(
            "mixtral",
            lambda t: {**t, EXPERT: t[EXPERT].to(torch.float8_e4m3fn)},
            [EXPERT, "F8_E4M3", "BF16"],
            id="expert_in_float8",
        ),
        pytest.param(
            "olmoe",
            lambda t: {**t, "model.norm.weight": torch.zeros(65)},
            ["model.norm.weight: shape [65]", "wanted [64]"],
            id="misshapen_dense_tensor",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_listed(
    family: str,
    change: Callable[[Tensors], Tensors],
    messages: list[str],
    ctx: EPContext,
    tmp_path: Path,
) -> None:
    source = tiny_checkpoint(family)
    path = copy_with_tensors(source, tmp_path, change(read_tensors(source)))
    with pytest.raises(CheckpointError) as caught:
        load_model(path, ctx, progress=False)
    for message in messages:
        assert message in str(caught.value)


def test_a_long_list_is_cut_and_counted(ctx: EPContext, tmp_path: Path) -> None:
    source = tiny_checkpoint("mixtral")
    tensors = {n: t for n, t in read_tensors(source).items() if ".w2." not in n}
    with pytest.raises(CheckpointError, match=r"16 missing: .* and 8 more") as caught:
        load_model(copy_with_tensors(source, tmp_path, tensors), ctx, progress=False)
    assert len(str(caught.value)) < 1000


def test_only_safetensors_are_read(ctx: EPContext, tmp_path: Path) -> None:
    shutil.copy(tiny_checkpoint("mixtral") / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.index.json nor"):
        load_model(tmp_path, ctx, progress=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not to be unpickled")
    with pytest.raises(CheckpointError, match="pickle files are never read"):
        load_model(tmp_path, ctx, progress=False)


def test_a_path_that_is_no_directory_is_refused(ctx: EPContext, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'org/model' is not a directory"):
        load_model("org/model", ctx, progress=False)
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        load_model(tmp_path, ctx, progress=False)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "hqq"}, r"quant_method \('hqq'\) is not supported; .* fp8, gptq, awq"),
        ({}, r"quant_method \(None\) is not supported"),
        (["fp8"], r"quantization_config must be a mapping .* got \['fp8'\]"),
    ],
    ids=["unknown_method", "no_method", "no_mapping"],
)
def test_an_unknown_quantisation_is_refused(
    quantization: object, message: str, ctx: EPContext, tmp_path: Path
) -> None:
    source = tiny_checkpoint("deepseek_v3")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    with pytest.raises(ConfigError, match=message):
        load_model(path, ctx, progress=False)


def test_a_model_that_transformers_cannot_build_is_refused(ctx: EPContext, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3_moe")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"decoder_sparse_step": 0}))
    with pytest.raises(ConfigError, match=r"cannot build config\.json's model: ZeroDiv"):
        load_model(path, ctx, progress=False)


def test_code_named_in_config_json_is_not_run(ctx: EPContext, tmp_path: Path) -> None:
    source = tiny_checkpoint("mixtral")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "evil.py").write_text("raise SystemExit('checkpoint code was run')\n")
    load_model(path, ctx, progress=False)


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint("mixtral")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    names = dict.fromkeys(read_tensors(source), "model.safetensors")
    write_index(path, {**names, "ghost.weight": "model.safetensors"})
    with pytest.raises(CheckpointError, match=r"lists ghost.weight, not in the file it names"):
        CheckpointReader(path)
    write_index(path, {n: f for n, f in names.items() if n != "lm_head.weight"})
    with pytest.raises(CheckpointError, match=r"does not list lm_head.weight"):
        CheckpointReader(path)
    write_index(path, {**names, "lm_head.weight": "../model.safetensors"})
    with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
        CheckpointReader(path)
    write_index(path, {**names, "lm_head.weight": "model-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"model-2.safetensors: cannot be read"):
        CheckpointReader(path)
    for value in (1, None, ["model.safetensors"], ""):
        write_index(path, {**names, "lm_head.weight": value})
        with pytest.raises(CheckpointError) as caught:
            CheckpointReader(path)
        assert f"index.json: weight_map gives lm_head.weight the value {value!r}" in str(
            caught.value
        )
    write_index(path, ["lm_head.weight"])
    with pytest.raises(CheckpointError, match=r"index.json: cannot be read"):
        CheckpointReader(path)


def test_a_damaged_header_is_refused(tmp_path: Path) -> None:
    source = tiny_checkpoint("mixtral")
    path = copy_with_tensors(source, tmp_path, read_tensors(source))
    file = path / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read"):
        CheckpointReader(path)


def test_gpt_oss_tensors_are_taken_transposed_and_interleaved(tmp_path: Path) -> None:
    """hidden = 2 * intermediate, so that both orientations have the same shape."""
    num_experts, hidden, width = 3, 8, 4
    gate_up = torch.arange(num_experts * hidden * 2 * width).float().view(num_experts, hidden, -1)
    down = torch.arange(num_experts * width * hidden).float().view(num_experts, width, hidden)
    bias = torch.arange(num_experts * 2 * width).float().view(num_experts, -1)
    names = {"w13": gate_up, "w2": down, "w13_bias": bias}
    path = copy_with_tensors(tiny_checkpoint("gpt_oss"), tmp_path, names)
    nan = float("nan")
    buffers = ExpertBuffers(
        local_expert_ids=(2, 0),
        w13=torch.full((2, 2 * width, hidden), nan),
        w2=torch.full((2, hidden, width), nan),
        w13_bias=torch.full((2, 2 * width), nan),
    )
    loader = ExpertLoader(CheckpointReader(path), FAMILIES["gpt_oss"])
    for part in names:
        loader.read(Slot(0, part), StoredWeight({PLAIN: part}), buffers)
    for local_id, expert in enumerate(buffers.local_expert_ids):
        assert torch.equal(buffers.w13[local_id, :width], gate_up[expert, :, 0::2].T)
        assert torch.equal(buffers.w13[local_id, width:], gate_up[expert, :, 1::2].T)
        assert torch.equal(buffers.w2[local_id], down[expert].T)
        assert buffers.w13_bias is not None
        assert torch.equal(buffers.w13_bias[local_id, :width], bias[expert, 0::2])
        assert torch.equal(buffers.w13_bias[local_id, width:], bias[expert, 1::2])
    assert loader.bytes_read == 2 * 4 * (hidden * 2 * width + width * hidden + 2 * width)


@pytest.mark.parametrize("index", [None, 1])
def test_a_tensor_larger_than_a_piece_is_read_whole(
    index: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ep_runtime.checkpoint.PIECE_BYTES", 100)
    monkeypatch.setattr("ep_runtime.checkpoint.MAPPED_BYTES", 250)
    tensor = torch.randn(2, 13, 7)
    path = copy_with_tensors(tiny_checkpoint("mixtral"), tmp_path, {"x": tensor})
    wanted = tensor if index is None else tensor[index]
    destination = torch.full((7, 13), float("nan")).T if index else torch.full_like(tensor, 9.0)
    with CheckpointReader(path) as reader:
        reader.read_into("x", destination, index)
        assert torch.equal(destination, wanted)
        assert reader.bytes_read == wanted.nbytes


def test_coverage_is_proved_over_the_ranks() -> None:
    wanted = {(1, "gate"): range(3), (1, "up"): range(3)}
    first: Reads = {(1, "gate"): (0, 1), (1, "up"): (0, 1)}
    second: Reads = {(1, "gate"): (2,), (1, "up"): (2,)}
    prove_coverage(wanted, [first, second])
    changed: Reads
    for changed, message in (
        ({(1, "gate"): (), (1, "up"): (2,)}, "layer 1 expert 2 gate: 0 times"),
        ({(1, "gate"): (2, 2), (1, "up"): (2,)}, "layer 1 expert 2 gate: 2 times"),
        ({(1, "gate"): (2, 1), (1, "up"): (2,)}, "layer 1 expert 1 gate: 2 times"),
        ({(1, "gate"): (2, 3), (1, "up"): (2,)}, "layer 1 expert 3 gate: 1 times"),
        ({**second, (7, "up"): (2,)}, "layer 7 up: not wanted"),
    ):
        with pytest.raises(CheckpointError, match=message):
            prove_coverage(wanted, [first, changed])


def memory_of(kind: str) -> int:
    """A line of /proc/self/status, in bytes: VmHWM is the peak, mapped file pages included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{kind}:"))
    return int(line.split()[1]) * 1024


def peak_of_loading(ctx: EPContext, path: str, warm_up_path: str) -> tuple[int, int]:
    """Bytes above the baseline at the peak, and the weights that this rank then holds."""
    # Everything is imported and warm before the baseline is taken.
    load_model(warm_up_path, ctx, experts="reference", progress=False)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    baseline = memory_of("VmRSS")
    model = load_model(path, ctx, experts="reference", progress=False)
    peak = memory_of("VmHWM") - baseline
    return peak, sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("layout", ["per_expert", "fused", "fp8_block"])
def test_loading_a_gigabyte_takes_less_than_twice_a_ranks_weights(
    layout: str, tmp_path: Path
) -> None:
    path = write_large_checkpoint(tmp_path, layout)
    file = path / "model.safetensors"
    try:
        assert file.stat().st_size > 1e9
        results = run_ranks(
            peak_of_loading,
            ParallelConfig(dp_size=2, device="cpu"),
            str(path),
            str(tiny_checkpoint("olmoe")),
            timeout=200,
        )
    finally:
        file.unlink()
    for rank, (peak, held) in enumerate(results):
        assert 0.5e9 < held < 0.6e9
        assert held <= peak < 1.5 * held, f"rank {rank}: {peak / held:.2f} times its weights"


def write_large_checkpoint(directory: Path, layout: str) -> Path:
    """A one-layer OLMoE of 1 GB in bfloat16 or fp8, as a sparse file: a header and zeros."""
    hidden, width, num_experts = 2048, 2560, 64 if layout == "fp8_block" else 32
    from ep_runtime.tiny import tiny_config

    config = tiny_config(
        "olmoe",
        layers=1,
        hidden_size=hidden,
        intermediate_size=width,
        num_experts=num_experts,
        dtype="bfloat16",
    )
    config.architectures = ["OlmoeForCausalLM"]
    if layout == "fp8_block":
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(directory)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (320, hidden),
        "lm_head.weight": (320, hidden),
        "model.norm.weight": (hidden,),
        "model.layers.0.input_layernorm.weight": (hidden,),
        "model.layers.0.post_attention_layernorm.weight": (hidden,),
        "model.layers.0.self_attn.q_proj.weight": (hidden, hidden),
        "model.layers.0.self_attn.k_proj.weight": (hidden // 2, hidden),
        "model.layers.0.self_attn.v_proj.weight": (hidden // 2, hidden),
        "model.layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "model.layers.0.self_attn.q_norm.weight": (hidden,),
        "model.layers.0.self_attn.k_norm.weight": (hidden // 2,),
        "model.layers.0.mlp.gate.weight": (num_experts, hidden),
    }
    experts = "model.layers.0.mlp.experts"
    if layout == "fused":
        shapes[f"{experts}.gate_up_proj"] = (num_experts, 2 * width, hidden)
        shapes[f"{experts}.down_proj"] = (num_experts, hidden, width)
    else:
        for e in range(num_experts):
            shapes[f"{experts}.{e}.gate_proj.weight"] = (width, hidden)
            shapes[f"{experts}.{e}.up_proj.weight"] = (width, hidden)
            shapes[f"{experts}.{e}.down_proj.weight"] = (hidden, width)
        if layout == "fp8_block":
            of_experts = [name for name in shapes if ".experts." in name]
            shapes |= {
                f"{name}_scale_inv": tuple(size // 128 for size in shapes[name])
                for name in of_experts
            }
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        dtype, num_bytes = "BF16", 2
        if name.endswith("_scale_inv"):
            dtype, num_bytes = "F32", 4
        elif layout == "fp8_block" and ".experts." in name:
            dtype, num_bytes = "F8_E4M3", 1
        start, end = end, end + num_bytes * int(torch.Size(shape).numel())
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory
