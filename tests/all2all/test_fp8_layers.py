"""Whole layers whose rows travel in fp8, against the definition, quantising alike and not."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.base import Routing
from ep_runtime.kernels.quant.fp8_rows import dequantize_rows, quantize_rows_reference
from ep_runtime.kernels.quant.scheme import QuantScheme, RowScheme, WeightScheme
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.plan import resolve_plan
from ep_runtime.reference import reference_layer, reference_shared_expert
from tests.all2all.contract import FP8_TOLERANCE, Device
from tests.all2all.test_deepep import with_fake
from tests.all2all.test_symm_mem import DEVICES, share_one_gpu, skip_without_interpreter
from tests.harness import run_ranks
from tests.kernels.fp8_cases import quantize_fp8

TOKENS = (5, 0)
ALIKE_TOLERANCE = 1e-2


def relative_error(output: Tensor, wanted: Tensor) -> float:
    return float((output.float() - wanted).norm() / wanted.norm())


def check_layer(ctx: EPContext, experts: str, hidden_size: int) -> None:
    """One rank has no rows, and the other's come in two rounds."""
    share_one_gpu()
    moe = MoEConfig(
        hidden_size=hidden_size,
        moe_intermediate_size=48,
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        shared_expert_gate=True,
    )
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        scaled: Tensor = torch.randn(*size, generator=generator) / size[-1] ** 0.5
        return scaled

    weights: dict[str, Any] = {
        "w13": random(4, 96, hidden_size),
        "w2": random(4, hidden_size, 48),
        "router": random(4, hidden_size),
        "shared": {
            "w13": random(96, hidden_size),
            "w2": random(hidden_size, 48),
            "gate": random(1, hidden_size),
        },
    }
    shared = {name: tensor.bfloat16() for name, tensor in weights["shared"].items()}
    weights |= {"w13": weights["w13"].bfloat16(), "w2": weights["w2"].bfloat16(), "shared": shared}
    layer = MoELayer(moe, ctx, experts=experts)
    assert layer.plan.rows is RowScheme.FP8_GROUP
    layer.load_experts(**weights)
    rows = random(5, hidden_size).bfloat16()[: TOKENS[ctx.rank]] * 8
    ids = torch.tensor([[0, 3], [1, 2], [3, -1], [2, 0], [1, 3]])[: len(rows)]
    routing = Routing(ids.to(torch.int32), torch.rand(ids.shape, generator=generator))
    output = layer(
        rows.to(ctx.device),
        topk_ids=routing.topk_ids.to(ctx.device),
        topk_weights=routing.topk_weights.to(ctx.device),
    ).cpu()
    assert layer.stats.shared_expert_calls == 1
    assert output.dtype is torch.bfloat16
    assert output.shape == rows.shape
    if len(rows) == 0:
        return
    routed = {name: tensor for name, tensor in weights.items() if name != "shared"}
    seen = dequantize_rows(*quantize_rows_reference(rows), torch.float32)
    alike = reference_layer(seen, moe, **routed, routing=routing)
    alike += reference_shared_expert(rows, shared, moe.experts_activation())
    exact = reference_layer(rows, moe, **weights, routing=routing)
    assert relative_error(alike, exact) > ALIKE_TOLERANCE, "the two tolerances tell nothing apart"
    assert relative_error(output, alike) <= ALIKE_TOLERANCE
    assert relative_error(output, exact) <= FP8_TOLERANCE


def parallel(backend: str, device: Device = "cpu") -> ParallelConfig:
    return ParallelConfig(
        dp_size=2,
        device=device,
        all2all_backend=backend,
        dispatch_dtype="fp8",
        max_tokens_per_rank=4,
        timeout_s=60,
    )


@pytest.mark.parametrize(
    ("experts", "hidden_size"), [("reference", 256), ("reference", 300), ("triton", 256)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_on_symm_mem_is_the_reference_that_quantises_alike(
    experts: str, hidden_size: int, device: Device
) -> None:
    skip_without_interpreter(device)
    run_ranks(check_layer, parallel("symm_mem", device), experts, hidden_size, timeout=120)


@pytest.mark.parametrize(
    ("experts", "hidden_size"), [("reference", 256), ("reference", 300), ("triton_batched", 256)]
)
def test_a_layer_on_deepep_is_the_reference_that_quantises_alike(
    experts: str, hidden_size: int
) -> None:
    skip_without_interpreter("cpu")
    run_ranks(with_fake, parallel("cpu_low_latency"), check_layer, experts, hidden_size)


def check_equal_either_way(ctx: EPContext) -> None:
    """Weights that compute on fp8 rows: quantised on the way, or by the kernel, all is the same."""
    share_one_gpu()
    scheme = QuantScheme(WeightScheme.FP8_BLOCK)
    moe = MoEConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=4, top_k=2, quantization=scheme
    )
    generator = torch.Generator().manual_seed(ctx.rank)
    rows = torch.randn(TOKENS[ctx.rank], 256, generator=generator).bfloat16().to(ctx.device)
    machine = Machine.detect(ctx.device.type)
    same = torch.Generator().manual_seed(0)
    w13, w2, router = (
        torch.randn(*size, generator=same) for size in ((4, 256, 256), (4, 256, 128), (4, 256))
    )
    outputs = []
    for dispatch_dtype, wanted in (("auto", RowScheme.FP8_GROUP), ("model", RowScheme.MODEL)):
        config = ctx.parallel.model_copy(update={"dispatch_dtype": dispatch_dtype})
        plan = resolve_plan(moe, config, machine, experts="triton")
        assert plan.rows is wanted
        layer = MoELayer(moe, ctx, plan=plan)
        layer.load_experts(
            w13=quantize_fp8(w13, scheme, 2), w2=quantize_fp8(w2, scheme, 1), router=router
        )
        outputs.append(layer(rows))
    assert torch.equal(*outputs)
    assert outputs[0].abs().sum() > 0 or len(rows) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_weights_give_the_same_bits_whoever_quantises_the_rows(device: Device) -> None:
    skip_without_interpreter(device)
    run_ranks(check_equal_either_way, parallel("symm_mem", device), timeout=120)
