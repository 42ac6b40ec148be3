"""A whole layer over several GPUs' ranks, captured: replay on other rows and routing is eager."""

import importlib.util

import pytest
import torch

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext
from ep_runtime.layer import MoELayer
from tests.all2all.test_symm_mem import share_one_gpu
from tests.harness import require_gpus, run_ranks

MOE = MoEConfig(
    hidden_size=2048,
    moe_intermediate_size=512,
    num_experts=8,
    top_k=3,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    num_shared_experts=1,
    shared_expert_gate=True,
    dtype="bfloat16",
)
NUM_ROWS = 17


def _seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _layer(ctx: EPContext) -> MoELayer:
    layer = MoELayer(MOE, ctx)
    experts, hidden, width = MOE.num_experts, MOE.hidden_size, MOE.moe_intermediate_size
    layer.load_experts(
        w13=_seeded(1, experts, 2 * width, hidden) / hidden**0.5,
        w2=_seeded(2, experts, hidden, width) / width**0.5,
        router=_seeded(3, experts, hidden),
        shared={
            "w13": _seeded(4, 2 * width, hidden) / hidden**0.5,
            "w2": _seeded(5, hidden, width) / width**0.5,
            "gate": _seeded(6, 1, hidden) / hidden**0.5,
        },
    )
    return layer


def replay_layer(ctx: EPContext) -> str:
    """Capture once, replay on fresh rows between eager calls; returns the shared schedule."""
    if ctx.parallel.all2all_backend == "symm_mem":
        share_one_gpu()
    layer = _layer(ctx)

    def rows(seed: int) -> torch.Tensor:
        return _seeded(100 * seed + ctx.rank, NUM_ROWS, MOE.hidden_size).bfloat16().to(ctx.device)

    static = rows(0)
    with ctx.step(NUM_ROWS, counts=(NUM_ROWS,) * ctx.parallel.ep_size):
        side = torch.cuda.Stream(ctx.device)
        side.wait_stream(torch.cuda.current_stream(ctx.device))
        with torch.cuda.stream(side):
            layer(static)
        torch.cuda.current_stream(ctx.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = layer(static)
        for seed in range(1, 7):
            static.copy_(rows(seed))
            output.fill_(float("nan"))
            graph.replay()
            replayed = output.clone()
            assert torch.isfinite(replayed).all(), seed
            assert torch.equal(replayed, layer(static)), seed
    ctx.check()
    return layer.plan.regime(NUM_ROWS).schedule


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_captured_layer_on_symm_mem_replays_bit_equal_to_eager(num_ranks: int) -> None:
    if num_ranks > 4:  # so many do not share one
        require_gpus(num_ranks)
    parallel = ParallelConfig(dp_size=num_ranks, device="cuda", all2all_backend="symm_mem")
    assert run_ranks(replay_layer, parallel, timeout=120) == ["combine_window"] * num_ranks


@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_captured_layer_on_deepep_low_latency_replays_bit_equal_to_eager(num_ranks: int) -> None:
    if importlib.util.find_spec("deep_ep") is None:
        pytest.skip("deep_ep is not installed: pip install 'ep-runtime[deepep]'")
    require_gpus(num_ranks)
    parallel = ParallelConfig(
        dp_size=num_ranks, device="cuda", all2all_backend="deepep_low_latency"
    )
    assert run_ranks(replay_layer, parallel, timeout=120) == ["combine_joined"] * num_ranks
