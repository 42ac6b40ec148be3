"""Whole quantised checkpoints on 1, 2 and 4 ranks against a float32 model of the same weights."""

from functools import cache

import pytest
import torch

from ep_runtime.config import ParallelConfig
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.reference_model import load_reference_model
from tests.ep_runtime.checkpoints import read_tensors
from tests.ep_runtime.quantized_checkpoints import (
    FROM_OTHERS,
    WRITTEN,
    expected_logits,
    prompts_of,
    quantized_checkpoint,
)
from tests.ep_runtime.quantized_ranks import (
    Loaded,
    load_and_compute,
    load_and_find_slots,
    load_with_a_gap,
)
from tests.harness import rank_outcomes, run_ranks
from tests.tolerances import relative_error

MAX_ERROR = 1e-5
BACKENDS = {1: "auto", 2: "naive", 4: "all_to_all"}  # by number of ranks
# By layer, the routed experts' scheme.
SCHEMES = {
    "deepseek_v3_fp8_block": ["fp8_block"],
    "deepseek_v3_fp8_shared": ["fp8_block"] * 2,
    "qwen3_moe_fp8_block_but_a_layer": ["fp8_block", "none"],
    "qwen2_moe_fp8_tensor_static": ["fp8_channel"] * 2,
    "qwen2_moe_gptq_act_order": ["int4_w4a16"] * 2,
    "deepseek_v3_nvfp4": ["nvfp4"],
    "gpt_oss_mxfp4": ["mxfp4"] * 2,
    "qwen3_moe_fp8_block": ["fp8_block"],
    "mixtral_fp8_dynamic": ["fp8_channel"] * 2,
}


@cache
def results_on(num_ranks: int) -> list[dict[str, Loaded]]:
    parallel = ParallelConfig(
        dp_size=num_ranks,
        all2all_backend=BACKENDS[num_ranks],
        device="cpu",
        max_tokens_per_rank=16,
        dispatch_dtype="model",
    )
    paths = {name: str(quantized_checkpoint(name)) for name in SCHEMES}
    prompts = {name: prompts_of(name) for name in SCHEMES}
    return run_ranks(load_and_compute, parallel, paths, prompts, timeout=120)


def test_every_checkpoint_has_a_scheme() -> None:
    assert set(SCHEMES) == {*WRITTEN, *FROM_OTHERS}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("num_ranks", BACKENDS)
def test_logits_are_those_of_the_dequantised_model(num_ranks: int, name: str) -> None:
    expected, seen = expected_logits(name), set()
    for rank, by_name in enumerate(results_on(num_ranks)):
        for prompt, logits in by_name[name].logits.items():
            error = relative_error(logits, expected[prompt])
            assert error <= MAX_ERROR, f"rank {rank} prompt {prompt}: {error:.1e}"
            seen.add(prompt)
    assert seen == set(range(len(expected)))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("num_ranks", BACKENDS)
def test_a_rank_keeps_and_reads_its_own_values_and_scales(num_ranks: int, name: str) -> None:
    loaded = [by_name[name] for by_name in results_on(num_ranks)]
    tensors = read_tensors(quantized_checkpoint(name))
    stored = sum(
        tensor.nbytes
        for key, tensor in tensors.items()
        if ".experts." in key and not key.endswith("input_scale")
    )
    assert sum(one.expert_bytes_read for one in loaded) == stored
    for one in loaded:
        assert one.schemes == SCHEMES[name]
        assert one.expert_bytes_in_checkpoint == stored
        assert one.held_bytes == one.planned_bytes
        assert one.expert_bytes_read < stored or num_ranks == 1
        assert one.dense_dtypes == {torch.float32}


def test_static_activation_scales_are_named_as_unused() -> None:
    (by_name,) = results_on(1)
    for name, one in by_name.items():
        tensors = read_tensors(quantized_checkpoint(name))
        assert set(one.unused) == {key for key in tensors if key.endswith("input_scale")}
    assert by_name["qwen2_moe_fp8_tensor_static"].unused


@pytest.mark.parametrize("name", ["deepseek_v3_fp8_block", "mixtral_fp8_dynamic", "gpt_oss_mxfp4"])
@torch.no_grad()
def test_the_reference_model_has_the_dequantised_weights(name: str) -> None:
    model = load_reference_model(quantized_checkpoint(name))
    for prompt, expected in zip(prompts_of(name), expected_logits(name), strict=True):
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
        assert relative_error(logits, expected) <= MAX_ERROR


def test_a_scale_that_no_rank_reads_ends_all_ranks() -> None:
    path = str(quantized_checkpoint("deepseek_v3_fp8_block"))
    parallel = ParallelConfig(dp_size=2, device="cpu")
    for outcome in rank_outcomes(load_with_a_gap, parallel, path, 1, (1, "up.scale", 6)):
        assert isinstance(outcome.error, CheckpointError)
        assert "layer 1 expert 6 up.scale: 0 times" in str(outcome.error)


def test_layers_whose_rows_travel_differently_share_one_pair_of_slots() -> None:
    """Whichever of them comes first in the checkpoint."""
    if not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    path = str(quantized_checkpoint("qwen3_moe_fp8_block_but_a_layer"))
    parallel = ParallelConfig(dp_size=2, device="cpu", all2all_backend="symm_mem")
    for rows, num_pairs in run_ranks(load_and_find_slots, parallel, path, timeout=120):
        assert rows == [str(RowScheme.FP8_GROUP), str(RowScheme.MODEL)]
        assert num_pairs == 1
