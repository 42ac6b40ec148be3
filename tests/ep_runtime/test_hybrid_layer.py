"""Layers with hybrid experts: configuration, plan, streams, memory, and what they compute."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from ep_runtime.audit_streams import all_cases, audit_layer, audited_config
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.base import ExpertWeights, StandardExpertInput
from ep_runtime.kernels.errors import ConfigError, PlanError
from ep_runtime.kernels.hybrid_experts import HybridExperts
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.scheme import QuantScheme, RowScheme, WeightScheme
from ep_runtime.kernels.quant.storage import (
    empty_hybrid,
    expert_of,
    quantized_tensor,
    stored_shapes,
    tensors_of,
)
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.ownership import Owner, Schedule
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.reference import reference_layer
from ep_runtime.selection import experts_shape
from tests.tolerances import relative_error

H200 = Machine.preset("h200x8")
NAME = "nvfp4_nf3_hybrid"
HYBRID = {"weight": NAME, "nvfp4_experts": [0, 3]}
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 96,
    "num_experts": 5,
    "top_k": 2,
    "dtype": "float32",
    "quantization": HYBRID,
}


def plan(backend: str, **changes: Any) -> Plan:
    """Of eight ranks, with a shared expert and overlap asked for up to any number of rows."""
    moe = MoEConfig(
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_experts=128,
        top_k=8,
        num_shared_experts=1,
        quantization=QuantScheme(WeightScheme.HYBRID, nvfp4_experts=tuple(range(0, 128, 4))),
    )
    values: dict[str, Any] = {"dp_size": 8, "all2all_backend": backend} | changes
    return resolve_plan(
        moe,
        ParallelConfig(**values),
        H200,
        shared_experts=SharedExpertsConfig(overlap="auto", token_threshold=100_000),
    )


def test_auto_takes_the_hybrid_kernel_with_rows_in_the_layers_dtype() -> None:
    chosen = plan("symm_mem")
    assert chosen.experts == NAME
    assert chosen.rows is RowScheme.MODEL
    assert "experts nvfp4_nf3_hybrid (32 in nvfp4, 96 in nf3)" in chosen.explain()
    with pytest.raises(PlanError, match="takes rows as model, and dispatch_dtype is fp8"):
        resolve_plan(
            chosen.moe,
            ParallelConfig(dp_size=8, all2all_backend="symm_mem", dispatch_dtype="fp8"),
            H200,
            experts=NAME,
        )


@pytest.mark.parametrize("num_tokens", [1, 8, 256, 3072])
@pytest.mark.parametrize(
    ("backend", "ranks"), [("naive", 8), ("all_to_all", 8), ("symm_mem", 8), ("local", 1)]
)
def test_nothing_runs_beside_its_launches_in_decode_and_prefill(
    backend: str, ranks: int, num_tokens: int
) -> None:
    """The runner's aux stream is joined before the launch, and a backend's window opens only once
    it has been issued; whatever the kernel `triton`, which takes both tiers alone, is certified
    for."""
    chosen = plan(backend, dp_size=ranks, max_tokens_per_rank=4096)
    assert chosen.experts == NAME
    regime = chosen.regime(num_tokens)
    if chosen.ownership.owner is Owner.RUNNER:
        assert regime.schedule is Schedule.AUX_STREAM_BEFORE_EXPERTS
    else:
        assert regime.schedule in (Schedule.COMBINE_WINDOW, Schedule.DISPATCH_WINDOW)
    assert f"experts {NAME} is exclusive" in regime.reason
    plain = MoEConfig(**{**chosen.moe.model_dump(), "quantization": "nvfp4"})
    generic = resolve_plan(
        plain, chosen.parallel, H200, experts="triton", shared_experts=chosen.shared_experts
    )
    assert "exclusive" not in generic.regime(num_tokens).reason


def test_bytes_count_each_rank_s_own_tiers() -> None:
    """Rank 0 has experts 0 and 1, one in each tier; rank 1 experts 2 and 3; rank 2 expert 4."""
    moe = MoEConfig(**SMALL)
    chosen = resolve_plan(
        moe, ParallelConfig(dp_size=3, all2all_backend="naive"), Machine.preset("cpu")
    )
    weights = 3 * 64 * 96
    nvfp4 = weights // 2 + weights // 16 + 3 * 4
    nf3 = weights * 3 // 8 + 2 * (192 * 1 + 64 * 2)  # 64 columns are a group, 96 are two
    found = [rank.experts for rank in chosen.bytes_per_rank]
    assert found == [nvfp4 + nf3 + 2 * 8, nf3 + nvfp4 + 2 * 8, nf3 + 2 * 4]


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (NAME, "nvfp4_experts is required with nvfp4_nf3_hybrid"),
        ({"weight": NAME, "nvfp4_experts": [0, 0]}, "names an expert twice"),
        ({"weight": NAME, "nvfp4_experts": "0"}, "must be a list of experts' numbers"),
        ({"weight": NAME, "nvfp4_experts": [5]}, "names expert 5, and num_experts is 5"),
        ({"weight": NAME, "nvfp4_experts": [], "group_size": 64}, "group_size .64. has no effect"),
        ({"weight": "nvfp4", "nvfp4_experts": [1]}, r"nvfp4_experts \(\(1,\)\) has no effect"),
    ],
)
def test_a_layers_keys_that_cannot_be_are_refused(quantization: Any, message: str) -> None:
    with pytest.raises((ConfigError, ValidationError), match=message):
        MoEConfig(**{**SMALL, "quantization": quantization})


def test_sizes_that_32_does_not_divide_are_refused() -> None:
    with pytest.raises((ConfigError, ValidationError), match="moe_intermediate_size that 32 div"):
        MoEConfig(**{**SMALL, "moe_intermediate_size": 48})


def test_a_configuration_is_written_as_it_is_read() -> None:
    moe = MoEConfig(**{**SMALL, "quantization": {"weight": NAME, "nvfp4_experts": [3, 0]}})
    assert moe.model_dump()["quantization"] == HYBRID
    assert MoEConfig(**moe.model_dump()) == moe


@pytest.fixture(scope="module")
def ctx() -> Iterator[EPContext]:
    with init_distributed(ParallelConfig(device="cpu")) as context:
        yield context


def all_experts(seeded: SeededWeights, ctx: EPContext) -> dict[str, Any]:
    """What `load_experts` takes: the tensors of a layer of one rank that was filled in place."""
    layer = MoELayer(seeded.moe, ctx, experts="reference")
    with torch.no_grad():
        seeded.fill(layer)
    scheme = seeded.moe.quantization
    stacked = {name: quantized_tensor(layer.expert_tensors(name), scheme) for name in ("w13", "w2")}
    return {**stacked, "router": layer.router.weight}


@pytest.mark.parametrize("experts", ["reference", NAME])
def test_a_layer_computes_the_dequantised_experts_and_holds_them_once(
    experts: str, ctx: EPContext
) -> None:
    if experts == NAME and not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    moe = MoEConfig(**SMALL)
    weights = all_experts(SeededWeights(moe, seed=3, device=ctx.device), ctx)
    layer = MoELayer(moe, ctx, experts=experts)
    layer.load_experts(**weights)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(9))
    assert relative_error(layer(rows), reference_layer(rows, moe, **weights)) <= 1e-5
    is_kept = experts == "reference"
    assert layer.w13.is_meta is not is_kept
    if not is_kept:
        assert layer.expert_weights.w13.dtype is torch.int16
        layer.load_experts(**weights)  # takes new memory


def test_nf3_alone_is_a_scheme_that_the_triton_kernel_takes(ctx: EPContext) -> None:
    """All its experts in one tier, as a layer's configuration may ask."""
    if not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    moe = MoEConfig(**{**SMALL, "quantization": "nf3"})
    weights = all_experts(SeededWeights(moe, seed=3, device=ctx.device), ctx)
    layer = MoELayer(moe, ctx, experts="triton")
    layer.load_experts(**weights)
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(9))
    assert relative_error(layer(rows), reference_layer(rows, moe, **weights)) <= 1e-5


def test_a_rank_without_experts_returns_zeros() -> None:
    shape = experts_shape(MoEConfig(**SMALL), 0)
    shapes13 = stored_shapes(shape.scheme, 192, 64, num_parts=2, dtype=shape.dtype)
    shapes2 = stored_shapes(shape.scheme, 64, 96, num_parts=1, dtype=shape.dtype)
    device = torch.device("cpu")
    w13, w2 = (
        quantized_tensor(empty_hybrid(shapes, shape.scheme, (), device), shape.scheme)
        for shapes in (shapes13, shapes2)
    )
    kernel = HybridExperts(shape)
    stored = ExpertWeights(w13.values, w2.values, None, None, w13.parameters, w2.parameters)
    rows = StandardExpertInput(
        torch.full((3, 64), torch.nan), torch.full((3, 2), -1).int(), torch.ones(3, 2)
    )
    assert kernel.workspace_bytes(3) == 0
    output = kernel.run(rows, kernel.prepare_weights(stored), Workspace(device))
    assert (output == 0).all()


def test_the_recorded_streams_of_a_layer_are_ordered() -> None:
    """Overlap on and off, the shared expert the runner's and the modular kernel's."""
    if not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    moe = audited_config(MoEConfig(**{**SMALL, "num_experts": 32, "num_shared_experts": 1}))
    assert moe.quantization.nvfp4_experts == (0, 2)
    seeded = SeededWeights(moe, seed=0, device=torch.device("cpu"))
    cases = [
        case
        for case in all_cases()
        if case.experts == NAME and case.backend in ("naive", "all_to_all")
    ]
    assert len(cases) == 4
    for result in audit_layer(moe, seeded.fill, cases):
        assert result.skip_reason is None
        assert result.faults == []
        assert result.num_operations > 100


def test_a_tensor_that_does_not_fit_is_refused_by_name(ctx: EPContext) -> None:
    moe = MoEConfig(**SMALL)
    weights = all_experts(SeededWeights(moe, seed=3, device=ctx.device), ctx)
    layer, w13 = MoELayer(moe, ctx, experts="reference"), weights["w13"]

    def changed(**tensors: torch.Tensor) -> Any:
        return replace(w13, parameters=replace(w13.parameters, **tensors))

    wrong = w13.parameters.nf3_scales.clone()
    wrong[1, 0, 0] = torch.nan
    for given, message in (
        (changed(tiers=w13.parameters.tiers.flip(0)), r"tiers are not those of .*use join_tiers"),
        (changed(nf3_values=w13.parameters.nf3_values[:2]), r"nf3_values has shape \[2, 192, 6\]"),
        (changed(nf3_scales=wrong), r"nf3_scales of expert 2 has a scale that is NaN"),
    ):
        with pytest.raises(ConfigError, match=message):
            layer.load_experts(**{**weights, "w13": given})


def test_seeded_weights_are_the_same_by_expert_and_in_a_layer(ctx: EPContext) -> None:
    moe = MoEConfig(**SMALL)
    seeded = SeededWeights(moe, seed=3, device=ctx.device)
    w13 = all_experts(seeded, ctx)["w13"]
    for expert in range(moe.num_experts):
        drawn, placed = seeded.stored("w13", expert), expert_of(w13, expert)
        assert drawn.scheme == placed.scheme == moe.quantization.of_expert(expert)
        for name, tensor in tensors_of(drawn).items():
            assert torch.equal(tensor.view(torch.uint8), tensors_of(placed)[name].view(torch.uint8))
