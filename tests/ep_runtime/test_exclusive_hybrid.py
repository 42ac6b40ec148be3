"""The hybrid experts' grid beside an occupant: joined it is right, unjoined a bounded error."""

import re
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from triton.runtime.jit import JITFunction

from ep_runtime.audit_streams import AuditCase, audit_case, audited_config
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.errors import RankFailure
from ep_runtime.kernels.hybrid_experts import HybridExperts
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.occupant import occupy
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.layer import MoELayer
from ep_runtime.modular_kernel import CallSchedule
from ep_runtime.reference import reference_layer
from ep_runtime.rendezvous import Rendezvous
from ep_runtime.runner import MoERunner
from ep_runtime.shared_expert import SharedExpert
from tests.tolerances import assert_close

NAME = "nvfp4_nf3_hybrid"
MOE = MoEConfig(
    hidden_size=2048,
    moe_intermediate_size=512,
    num_experts=8,
    top_k=4,
    num_shared_experts=1,
    dtype="bfloat16",
    quantization=QuantScheme(WeightScheme.HYBRID, nvfp4_experts=(0, 3, 5)),
)
SMALL = MoEConfig(
    hidden_size=32,
    moe_intermediate_size=32,
    num_experts=2,
    top_k=1,
    num_shared_experts=1,
    quantization=QuantScheme(WeightScheme.HYBRID, nvfp4_experts=(0,)),
)
LIMIT_S, HOLD_S = 0.25, 1.5
needs_interpreter = pytest.mark.skipif(
    not is_interpreting(), reason="Triton compiles for CUDA in this process"
)


def _without_early_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner launches the experts while the shared expert may still run."""
    call_schedule = MoERunner._call_schedule

    def unjoined(self: Any, *arguments: Any) -> CallSchedule:
        call = call_schedule(self, *arguments)
        return CallSchedule(call.schedule, call.run_shared, before_experts=lambda: None)

    monkeypatch.setattr(MoERunner, "_call_schedule", unjoined)


@needs_interpreter
def test_the_audit_finds_a_launch_beside_the_shared_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the join is, `test_hybrid_layer.py` shows that nothing is found."""
    _without_early_join(monkeypatch)
    moe = audited_config(SMALL)
    fill = SeededWeights(moe, seed=0, device=torch.device("cpu")).fill
    found = audit_case(moe, fill, AuditCase("local", NAME, "auto")).faults
    pattern = r"beside by shared: \w+ on aux; alone by experts: launch on main"
    assert any(re.search(pattern, fault) for fault in found)


# --- on a GPU ---


def _start_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver may hold back a cooperative grid as a whole, so launch another."""
    run = JITFunction.run

    def not_cooperative(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("launch_cooperative_grid"):
            keywords["launch_cooperative_grid"] = False
        return run(self, *arguments, **keywords)

    monkeypatch.setattr(JITFunction, "run", not_cooperative)


def _one_gpu() -> EPContext:
    parallel = ParallelConfig(device="cuda", max_tokens_per_rank=64)
    return init_distributed(parallel, rendezvous=Rendezvous(HashStore(), 0, 1))


def _occupied_layer(
    ctx: EPContext, rows: Tensor, monkeypatch: pytest.MonkeyPatch
) -> tuple[MoELayer, Tensor, dict[str, Any]]:
    """A layer whose shared expert holds half of the multiprocessors for long before it computes,
    its output without that, and its weights for the reference."""
    _start_where_there_is_room(monkeypatch)
    seeded = SeededWeights(MOE, seed=0, device=ctx.device)
    layer = MoELayer(MOE, ctx, experts=NAME)
    seeded.fill(layer)
    expected = layer(rows)
    occupy(ctx.device, num_multiprocessors=1, duration_us=1)
    torch.cuda.synchronize()
    half = torch.cuda.get_device_properties(ctx.device).multi_processor_count // 2
    run_shared = SharedExpert.run

    def occupied(self: SharedExpert, *arguments: Any, **keywords: Any) -> Tensor:
        occupy(ctx.device, num_multiprocessors=half, duration_us=int(HOLD_S * 1e6))
        return run_shared(self, *arguments, **keywords)

    monkeypatch.setattr(SharedExpert, "run", occupied)
    experts = layer.experts
    assert isinstance(experts, HybridExperts)
    experts.grid.wait_limit_s = LIMIT_S
    assert layer.plan.regime(len(rows)).schedule == "aux_stream_before_experts"
    return layer, expected, seeded.for_reference()


def _rows(ctx: EPContext) -> Tensor:
    """So few that they go through the grid."""
    rows = torch.randn(8, MOE.hidden_size, generator=torch.Generator().manual_seed(5))
    return rows.to(ctx.device, MOE.torch_dtype)


@pytest.mark.gpu
def test_joined_before_the_launch_an_occupant_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with _one_gpu() as ctx, torch.no_grad():
        rows = _rows(ctx)
        layer, expected, weights = _occupied_layer(ctx, rows, monkeypatch)
        for _ in range(3):
            assert torch.equal(layer(rows), expected)
        assert_close(expected, reference_layer(rows, MOE, **weights))
        ctx.check()


@pytest.mark.gpu
def test_without_the_join_the_launch_ends_in_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ctx = _one_gpu()
    with torch.no_grad():
        rows = _rows(ctx)
        layer, _, _ = _occupied_layer(ctx, rows, monkeypatch)
        _without_early_join(monkeypatch)
        start = time.monotonic()
        output = layer(rows)
        torch.cuda.synchronize()
        assert time.monotonic() - start < HOLD_S + 1
        assert output.isnan().any()
        with pytest.raises(RankFailure, match=rf"experts {NAME}: .* of \d+ programs had arrived"):
            layer(rows)
    with suppress(RankFailure):
        ctx.close()
