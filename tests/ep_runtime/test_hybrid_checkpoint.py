"""Checkpoints that `ep-runtime quantize` makes, on 1 and 2 ranks, against a float32 model of the
same weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.e2m1 import E2M1_VALUES
from ep_runtime.kernels.quant.nf3 import NF3_VALUES
from ep_runtime.launch.quantize_command import HotExperts, quantize_command
from ep_runtime.reference_model import load_reference_model
from ep_runtime.tiny import write_tiny_checkpoint
from tests.ep_runtime.checkpoints import (
    PROMPTS,
    copy_with_tensors,
    read_tensors,
    scratch_directory,
)
from tests.ep_runtime.hybrid_ranks import HybridRank, load_hybrid
from tests.ep_runtime.quantized_ranks import load_with_a_gap
from tests.harness import rank_outcomes, run_ranks
from tests.tolerances import relative_error

MAX_ERROR = 1e-5
# Layer 0 is dense; the two others have other experts in NVFP4. 2 ranks hold 4 and 3 experts.
LOADS = {1: [0, 9, 2, 9, 1, 0, 8], 2: [7, 0, 0, 1, 2, 9, 3]}
HOT = {1: (1, 3, 6), 2: (0, 5, 6)}


def write_statistics(path: Path, loads: dict[int, list[int]]) -> Path:
    """As a run of two ranks reports them, each its own experts."""
    ranks: list[dict[str, Any]] = []
    for own in (slice(0, 4), slice(4, None)):
        of_layers = {}
        for layer, counts in loads.items():
            of_layers[str(layer)] = [0] * len(counts)
            of_layers[str(layer)][own] = counts[own]
        ranks.append({"tokens_per_expert_of_layer": of_layers})
    path.write_text(json.dumps({"ranks": ranks}))
    return path


@cache
def hybrid_checkpoint() -> tuple[Path, Path]:
    """The bfloat16 checkpoint and the one made of it."""
    folder = scratch_directory() / "hybrid"
    source = write_tiny_checkpoint("qwen3_moe", folder / "source", dtype="bfloat16", layers=3)
    quantize_command(
        source,
        folder / "quantized",
        statistics=write_statistics(folder / "statistics.json", LOADS),
        hot=HotExperts(number=3),
        shard_size="1GB",
        json_file=None,
        console=Console(quiet=True),
    )
    return source, folder / "quantized"


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight in float32, written out bit by bit: nothing of the product but two tables."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, suffix = name.rpartition(".")
        if suffix == "weight_nf3":
            bits = torch.stack([(tensor >> bit) & 1 for bit in range(32)], dim=-1)
            planes = bits.unflatten(1, (-1, 3))  # [N, K / 32, 3, 32]
            codes = (planes * torch.tensor([1, 2, 4])[:, None]).sum(2).flatten(1)
            scales = tensors[f"{path}.weight_scale"].float().repeat_interleave(64, dim=1)
            values = torch.tensor(NF3_VALUES)[codes]
            plain[f"{path}.weight"] = values * scales[:, : values.shape[1]]
        elif suffix == "weight" and tensor.dtype is torch.uint8:
            codes = torch.stack([tensor & 15, tensor >> 4], dim=-1).flatten(1).int()
            scales = tensors[f"{path}.weight_scale"].float().repeat_interleave(16, dim=1)
            whole = tensors[f"{path}.weight_scale_2"]
            plain[name] = torch.tensor(E2M1_VALUES)[codes] * scales * whole
        elif suffix not in ("weight_scale", "weight_scale_2"):
            plain[name] = tensor.float()
    return plain


@cache
@torch.no_grad()
def expected_logits() -> tuple[Tensor, ...]:
    from transformers import AutoModelForCausalLM

    source, quantized = hybrid_checkpoint()
    tensors = dequantised(read_tensors(quantized))
    path = copy_with_tensors(source, scratch_directory() / "hybrid" / "plain", tensors)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return tuple(model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS)


@cache
def ranks_of(num_ranks: int, experts: str) -> list[HybridRank]:
    parallel = ParallelConfig(
        dp_size=num_ranks,
        all2all_backend="naive" if num_ranks > 1 else "local",
        device="cpu",
        max_tokens_per_rank=16,
    )
    return run_ranks(
        load_hybrid, parallel, str(hybrid_checkpoint()[1]), PROMPTS, experts, timeout=200
    )


@pytest.mark.parametrize("experts", ["reference", "nvfp4_nf3_hybrid"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_logits_are_those_of_the_dequantised_model(num_ranks: int, experts: str) -> None:
    if experts != "reference" and not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    expected, seen = expected_logits(), set()
    for rank, found in enumerate(ranks_of(num_ranks, experts)):
        for prompt, logits in found.logits.items():
            error = relative_error(logits, expected[prompt])
            assert error <= MAX_ERROR, f"rank {rank} prompt {prompt}: {error:.1e}"
            seen.add(prompt)
    assert seen == set(range(len(expected)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_keeps_and_reads_its_own_experts_of_both_tiers(num_ranks: int) -> None:
    ranks = ranks_of(num_ranks, "reference")
    tensors = read_tensors(hybrid_checkpoint()[1])
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if ".experts." in name)
    assert sum(one.expert_bytes_read for one in ranks) == stored
    for one in ranks:
        assert one.nvfp4_experts == [HOT[1], HOT[2]]
        assert one.expert_bytes_in_checkpoint == stored
        assert one.held_bytes == one.planned_bytes
        assert one.expert_bytes_read < stored or num_ranks == 1


@torch.no_grad()
def test_the_reference_model_has_the_dequantised_weights() -> None:
    model = load_reference_model(hybrid_checkpoint()[1])
    for prompt, expected in zip(PROMPTS, expected_logits(), strict=True):
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
        assert relative_error(logits, expected) <= MAX_ERROR


def test_the_configuration_of_the_layer_names_the_experts() -> None:
    values = json.loads((hybrid_checkpoint()[1] / "config.json").read_text())
    assert values["quantization_config"]["nvfp4_experts"] == {"1": [1, 3, 6], "2": [0, 5, 6]}
    moe = MoEConfig.from_hf(values)
    assert moe.quantization.nvfp4_experts == HOT[1]


@pytest.mark.parametrize("gap", [(2, "up.scale", 6), (1, "down.weight", 0), (1, "gate.scale", 1)])
def test_a_tensor_of_either_tier_that_no_rank_reads_ends_all_ranks(
    gap: tuple[int, str, int],
) -> None:
    path, rank = str(hybrid_checkpoint()[1]), int(gap[2] >= 4)
    parallel = ParallelConfig(dp_size=2, device="cpu")
    layer, part, expert = gap
    for outcome in rank_outcomes(load_with_a_gap, parallel, path, rank, gap):
        assert isinstance(outcome.error, CheckpointError)
        assert f"layer {layer} expert {expert} {part}: 0 times" in str(outcome.error)


NVFP4_PATH = "model.layers.1.mlp.experts.1.up_proj"
NF3_PATH = "model.layers.1.mlp.experts.0.up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{NF3_PATH}.weight_scale": None}, f"1 missing: {NF3_PATH}.weight_scale"),
        ({f"{NVFP4_PATH}.weight_scale_2": None}, f"1 missing: {NVFP4_PATH}.weight_scale_2"),
        (
            {f"{NF3_PATH}.weight_scale_2": torch.ones(())},
            f"1 left over: {NF3_PATH}.weight_scale_2",
        ),
        (
            {f"{NF3_PATH}.weight_nf3": torch.zeros(32, 9, dtype=torch.int32)},
            rf"{NF3_PATH}.weight_nf3: shape \[32, 9\] in .*, wanted \[32, 6\]",
        ),
        (
            {f"{NF3_PATH}.weight_scale": torch.full((32, 1), torch.nan, dtype=torch.bfloat16)},
            f"{NF3_PATH}.weight_scale: 32 of 32 scales are NaN",
        ),
    ],
    ids=["no_nf3_scale", "no_global_scale", "global_scale_of_nf3", "shape", "nan"],
)
def test_tensors_that_do_not_fit_the_tiers_are_refused_by_name(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    _, quantized = hybrid_checkpoint()
    tensors: dict[str, Tensor | None] = {**read_tensors(quantized), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path = str(copy_with_tensors(quantized, tmp_path / "changed", kept))
    parallel = ParallelConfig(dp_size=1, device="cpu")
    (outcome,) = rank_outcomes(load_hybrid, parallel, path, PROMPTS, "reference")
    assert isinstance(outcome.error, CheckpointError)
    with pytest.raises(CheckpointError, match=message):
        raise outcome.error


def test_an_expert_that_the_configuration_puts_in_the_other_tier_is_refused(
    tmp_path: Path,
) -> None:
    _, quantized = hybrid_checkpoint()
    path = copy_with_tensors(quantized, tmp_path / "changed", read_tensors(quantized))
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"]["nvfp4_experts"]["1"] = [0, 1, 3, 6]
    (path / "config.json").write_text(json.dumps(values))
    (outcome,) = rank_outcomes(
        load_hybrid, ParallelConfig(dp_size=1, device="cpu"), str(path), PROMPTS, "reference"
    )
    assert isinstance(outcome.error, CheckpointError)
    assert "experts.0.down_proj.weight (is it" in str(outcome.error)
    assert "experts.0.down_proj.weight_nf3" in str(outcome.error)
