"""A shared expert that a checkpoint stores in fp8 by blocks: kept so, on every rank, or not."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import CheckpointError, ConfigError, PlanError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.launch.layer_job import FP8_TOLERANCE
from ep_runtime.launch.model_job import FP8_LOGIT_LIMIT
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.layer import MoELayer
from ep_runtime.models import load_model
from ep_runtime.moe_from_hf import moe_config_from_hf
from ep_runtime.opened_checkpoint import OpenedCheckpoint
from ep_runtime.reference import reference_layer
from ep_runtime.tiny import tiny_config
from tests.ep_runtime import checkpoints
from tests.ep_runtime.checkpoints import copy_with_tensors, read_tensors
from tests.ep_runtime.quantized_checkpoints import (
    FP8_BLOCK_CONFIG,
    quantized_checkpoint,
    set_quantization,
)
from tests.harness import rank_outcomes, run_ranks
from tests.tolerances import relative_error

NAME = "deepseek_v3_fp8_shared"
PROMPTS = checkpoints.PROMPTS[:2]
BLOCK = "model.layers.1.mlp.shared_experts"
BACKENDS = {1: "auto", 2: "naive", 4: "all_to_all"}  # by number of ranks

needs_interpreter = pytest.mark.skipif(
    not is_interpreting(), reason="Triton compiles for CUDA in this process"
)


@dataclass(frozen=True)
class Loaded:
    """One rank's. shared, dtypes: of layer 1, by name of its parameters, the values in float32;
    computes: by MoE layer."""

    computes: list[str]
    schemes: list[str]
    shared: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    held_bytes: list[int]
    planned_bytes: list[int]
    logits: dict[int, Tensor]
    bytes_read: int


def load(ctx: EPContext, path: str, experts: str, dtype: str) -> Loaded:
    model = load_model(path, ctx, experts=experts, dtype=dtype, progress=False)
    logits = {}
    for number in range(ctx.rank, len(PROMPTS) + ctx.rank, ctx.world_size):
        has_prompt = number < len(PROMPTS)  # some ranks have none in the last round
        ids = torch.tensor([PROMPTS[number]]) if has_prompt else torch.zeros(0, 1).long()
        output = model(input_ids=ids).logits
        if has_prompt:
            logits[number] = output[0].float()
    layers = model.moe_layers
    experts_of = [layer.shared for layer in layers if layer.shared is not None]
    assert len(experts_of) == len(layers)
    return Loaded(
        computes=[str(layer.plan.shared_compute) for layer in layers],
        schemes=[str(layer.moe.shared_quantization.weight) for layer in layers],
        shared={name: tensor.float() for name, tensor in experts_of[0].state_dict().items()},
        dtypes={name: tensor.dtype for name, tensor in experts_of[0].state_dict().items()},
        held_bytes=[sum(p.nbytes for p in shared.parameters()) for shared in experts_of],
        planned_bytes=[layer.plan.bytes_per_rank[ctx.ep_rank].shared for layer in layers],
        logits=logits,
        bytes_read=model.load_report.bytes_read,
    )


def parallel(num_ranks: int, **changes: Any) -> ParallelConfig:
    values: dict[str, Any] = {
        "dp_size": num_ranks,
        "all2all_backend": BACKENDS[num_ranks],
        "device": "cpu",
        "max_tokens_per_rank": 16,
        "dispatch_dtype": "model",
    }
    return ParallelConfig(**(values | changes))


@cache
def results_on(num_ranks: int, experts: str = "triton", dtype: str = "bfloat16") -> list[Loaded]:
    path = str(quantized_checkpoint(NAME))
    return run_ranks(load, parallel(num_ranks), path, experts, dtype, timeout=120)


@needs_interpreter
@pytest.mark.parametrize("num_ranks", BACKENDS)
def test_every_rank_keeps_its_bits_and_scales_as_stored(num_ranks: int) -> None:
    tensors = read_tensors(quantized_checkpoint(NAME))
    for loaded in results_on(num_ranks):
        assert loaded.computes == ["fp8", "kernels"]
        assert loaded.schemes == ["fp8_block", "none"]
        assert loaded.held_bytes == loaded.planned_bytes
        for name, parts in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            for key, suffix in ((name, "weight"), (f"{name}_scales", "weight_scale_inv")):
                wanted = torch.cat([tensors[f"{BLOCK}.{part}.{suffix}"].float() for part in parts])
                assert torch.equal(loaded.shared[key], wanted), key
            assert loaded.dtypes[name] is torch.float8_e4m3fn


@needs_interpreter
@pytest.mark.parametrize("num_ranks", BACKENDS)
def test_logits_are_as_near_as_rows_in_fp8_allow(num_ranks: int) -> None:
    """To those of the dequantised model in bf16, whose rows are routed alike."""
    (dequantised,), seen = results_on(1, "reference"), set()
    expected = dequantised.logits
    for loaded in results_on(num_ranks):
        for prompt, logits in loaded.logits.items():
            assert relative_error(logits, expected[prompt]) <= FP8_LOGIT_LIMIT
            seen.add(prompt)
    assert seen == set(expected) == set(range(len(PROMPTS)))


@needs_interpreter
@pytest.mark.parametrize(("experts", "dtype"), [("reference", "bfloat16"), ("triton", "float32")])
def test_where_nothing_is_to_be_quantised_beside_it_is_dequantised(
    experts: str, dtype: str
) -> None:
    (loaded,) = results_on(1, experts, dtype)
    assert loaded.computes == ["library"] * 2
    assert loaded.schemes == ["fp8_block", "none"]
    assert loaded.held_bytes == loaded.planned_bytes
    assert set(loaded.dtypes.values()) == {getattr(torch, dtype)}
    assert loaded.bytes_read == results_on(1)[0].bytes_read


@needs_interpreter
def test_a_scale_of_nan_ends_all_ranks(tmp_path: Any) -> None:
    tensors = read_tensors(quantized_checkpoint(NAME))
    scales = tensors[f"{BLOCK}.up_proj.weight_scale_inv"].clone()
    scales[0, 0] = torch.nan
    changed = {**tensors, f"{BLOCK}.up_proj.weight_scale_inv": scales}
    path = copy_with_tensors(quantized_checkpoint(NAME), tmp_path / "changed", changed)
    outcomes = rank_outcomes(load, parallel(2), str(path), "triton", "bfloat16")
    assert all("up_proj.weight_scale_inv" in str(outcome.error) for outcome in outcomes)
    assert any(isinstance(outcome.error, CheckpointError) for outcome in outcomes)


def test_tensors_decide_where_the_lists_say_otherwise(tmp_path: Any) -> None:
    """A plain weight is one, whatever `quantization_config` says."""
    tensors = read_tensors(quantized_checkpoint(NAME))
    path = copy_with_tensors(quantized_checkpoint(NAME), tmp_path / "listed", tensors)
    set_quantization(path, {**FP8_BLOCK_CONFIG, "modules_to_not_convert": ["lm_head"]})
    opened = OpenedCheckpoint(path, None)
    schemes = {n: moe.shared_quantization.weight for n, moe in opened.moe_of_layer.items()}
    assert schemes == {1: "fp8_block", 2: "none"}
    assert opened.moe == opened.moe_of_layer[1]


@pytest.mark.parametrize(
    ("family", "quantization", "wanted"),
    [
        ("deepseek_v3", FP8_BLOCK_CONFIG, "fp8_block"),
        ("qwen2_moe", FP8_BLOCK_CONFIG, "fp8_block"),
        ("qwen3_moe", FP8_BLOCK_CONFIG, "none"),
        (
            "deepseek_v3",
            {**FP8_BLOCK_CONFIG, "modules_to_not_convert": ["lm_head", BLOCK]},
            "none",
        ),
        (
            "deepseek_v3",
            {**FP8_BLOCK_CONFIG, "modules_to_not_convert": ["shared_experts.up_proj"]},
            "none",
        ),
        ("deepseek_v3", {"quant_method": "fp8", "activation_scheme": "dynamic"}, "none"),
        (
            "deepseek_v3",
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {
                            "num_bits": 8,
                            "type": "float",
                            "symmetric": True,
                            "strategy": "block",
                            "block_structure": [128, 128],
                        },
                    }
                },
                "ignore": ["lm_head", r"re:.*mlp\.gate$"],
            },
            "fp8_block",
        ),
    ],
)
def test_the_key_of_a_hub_configuration_is_what_its_lists_say(
    family: str, quantization: dict[str, Any], wanted: str
) -> None:
    config = tiny_config(family).to_dict() | {"quantization_config": quantization}
    assert moe_config_from_hf(config).shared_quantization.weight == wanted


def layer_of(**changes: Any) -> MoEConfig:
    values: dict[str, Any] = {
        "hidden_size": 160,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "top_k": 2,
        "num_shared_experts": 3,
        "shared_expert_gate": True,
        "shared_quantization": "fp8_block",
    }
    return MoEConfig(**(values | changes))


@needs_interpreter
@pytest.mark.parametrize("quantization", ["none", "fp8_block"])
@pytest.mark.parametrize("experts", ["triton", "reference"])
def test_a_seeded_layer_is_the_reference_layer(quantization: str, experts: str) -> None:
    """Filled in place, and by `load_experts` with the same tensors: the same bits."""
    moe = layer_of(quantization=quantization)
    with init_distributed(parallel(1)) as ctx, torch.no_grad():
        layer = MoELayer(moe, ctx, experts=experts)
        seeded = SeededWeights(moe, seed=3, device=ctx.device)
        seeded.fill(layer)
        rows = torch.randn(9, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
        output = layer(rows)
        weights = seeded.for_reference()
        assert isinstance(weights["shared"]["w13"], QuantizedTensor)
        wanted = reference_layer(rows, moe, **weights)
        assert relative_error(output, wanted) <= FP8_TOLERANCE
        assert layer.shared is not None
        before = {name: tensor.clone() for name, tensor in layer.shared.state_dict().items()}
        for tensor in layer.shared.parameters():
            tensor.view(torch.uint8).fill_(0xFF)
        layer.shared.fill(weights["shared"])
        for name, tensor in layer.shared.state_dict().items():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


@needs_interpreter
def test_load_experts_takes_it_quantised_and_names_what_is_wrong() -> None:
    moe = layer_of()
    with init_distributed(parallel(1)) as ctx:
        layer = MoELayer(moe, ctx, experts="triton")
        weights = SeededWeights(moe, seed=0, device=ctx.device).for_reference()
        shared = weights["shared"]
        routed = {
            "w13": torch.stack([weights["w13"][e] for e in range(4)]),
            "w2": torch.stack([weights["w2"][e] for e in range(4)]),
            "router": weights["router"],
        }
        layer.load_experts(**routed, shared=shared)
        assert layer.shared is not None
        assert torch.equal(layer.shared.w13_scales, shared["w13"].parameters.scales[0])  # type: ignore[arg-type]
        plain = torch.zeros(288, 160)
        narrow = SeededWeights(
            layer_of(num_shared_experts=2), seed=0, device=ctx.device
        ).for_reference()["shared"]
        for changes, message in (
            ({"w13": plain}, r'shared\["w13"\] is Tensor; the layer\'s shared_quantization is fp8'),
            ({"w2": None}, r'shared\["w2"\] is missing; the layer\'s shared_quantization is fp8'),
            ({"w13": narrow["w13"]}, r'shared\["w13"\].values has shape \[1, 192, 160\]; wanted'),
            ({"gate": None}, r'shared\["gate"\] is missing'),
        ):
            with pytest.raises(ConfigError, match=message):
                layer.load_experts(**routed, shared={**shared, **changes})


def build(ctx: EPContext) -> None:
    stored = "fp8_block" if ctx.rank == 0 else "none"
    MoELayer(layer_of(shared_quantization=stored), ctx, experts="reference")


def test_ranks_that_disagree_about_the_key_are_told() -> None:
    for outcome in rank_outcomes(build, parallel(2)):
        assert isinstance(outcome.error, PlanError)
        assert "moe.shared_quantization: 'fp8_block' on ranks [0], 'none' on ranks [1]" in str(
            outcome.error
        )
