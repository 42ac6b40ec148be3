"""Whole checkpoints of GPTQ, AWQ and compressed-tensors, on 1, 2 and 4 ranks, against float32."""

from functools import cache

import pytest
import torch

from ep_runtime.config import ParallelConfig
from tests.ep_runtime.checkpoints import read_tensors
from tests.ep_runtime.quantized_checkpoints import (
    INTEGERS,
    INTEGERS_FROM_OTHERS,
    expected_logits,
    prompts_of,
    quantized_checkpoint,
)
from tests.ep_runtime.quantized_ranks import Loaded, load_and_compute
from tests.harness import run_ranks
from tests.tolerances import relative_error

MAX_ERROR = 1e-5
BACKENDS = {1: "auto", 2: "naive", 4: "all_to_all"}  # by number of ranks
# By MoE layer, the routed experts' scheme.
SCHEMES = {
    "qwen2_moe_gptq_shared_too": ["int4_w4a16"] * 2,
    "mixtral_gptq_8_bits": ["int8_w8a16"] * 2,
    "mixtral_awq": ["int4_w4a16"] * 2,
    "qwen3_moe_int4_group_order": ["int4_w4a16"],
    "olmoe_int8_static_order": ["int8_w8a16"] * 2,
    "qwen3_moe_compressed_nvfp4": ["nvfp4"],
    "mixtral_w4a16_asym": ["int4_w4a16"] * 2,
    "qwen3_moe_w8a16": ["int8_w8a16"],
    "qwen3_moe_nvfp4a16": ["nvfp4"],
    "mixtral_gptq_sym": ["int4_w4a16"] * 2,
    "qwen3_moe_gptq_asym_desc_act": ["int4_w4a16"] * 2,
    "qwen2_moe_gptq_8_bits": ["int8_w8a16"] * 2,
    "mixtral_awq_by_gptqmodel": ["int4_w4a16"] * 2,
}


def test_every_checkpoint_has_a_scheme() -> None:
    assert set(SCHEMES) == {*INTEGERS, *INTEGERS_FROM_OTHERS}


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


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("num_ranks", BACKENDS)
def test_logits_are_those_of_the_dequantised_model(num_ranks: int, name: str) -> None:
    expected, seen = expected_logits(name), set()
    for rank, by_name in enumerate(results_on(num_ranks)):
        one = by_name[name]
        assert one.schemes == SCHEMES[name]
        assert one.dense_dtypes == {torch.float32}
        assert one.held_bytes == one.planned_bytes
        for prompt, logits in one.logits.items():
            error = relative_error(logits, expected[prompt])
            assert error <= MAX_ERROR, f"rank {rank} prompt {prompt}: {error:.1e}"
            seen.add(prompt)
    assert seen == set(range(len(expected)))


def test_the_shared_expert_and_its_gate_are_stored_as_the_names_say() -> None:
    """Of Qwen2-MoE in GPTQ one has a plain shared expert; the gates are plain in all."""
    shared = {
        "qwen2_moe_gptq_8_bits": True,
        "qwen2_moe_gptq_shared_too": True,
        "qwen2_moe_gptq_act_order": False,
    }
    for name, is_quantised in shared.items():
        tensors = read_tensors(quantized_checkpoint(name))
        path = "model.layers.1.mlp.shared_expert"
        assert (f"{path}.up_proj.qweight" in tensors) is is_quantised
        assert (f"{path}.up_proj.weight" in tensors) is not is_quantised
        assert tensors[f"{path}_gate.weight"].is_floating_point()
        assert "model.layers.1.mlp.experts.3.up_proj.qweight" in tensors
