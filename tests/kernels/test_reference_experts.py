"""The oracle against the plainest loop in float64, and against transformers' experts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ep_runtime.kernels.base import (
    ActivationKind,
    BatchedExpertInput,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import (
    EXPERTS_CASES,
    ExpertsCase,
    large_raw_values,
    naive_expert,
    naive_experts,
)
from tests.tolerances import assert_close

CPU = torch.device("cpu")


def run(
    shape: ExpertsShape, expert_input: StandardExpertInput, weights: ExpertWeights
) -> torch.Tensor:
    workspace = Workspace(expert_input.hidden_states.device)
    return ReferenceExperts(shape).run(expert_input, weights, workspace)


@pytest.mark.parametrize("case", EXPERTS_CASES, ids=str)
def test_standard_input_equals_a_loop_over_slots(case: ExpertsCase, device: torch.device) -> None:
    expert_input, weights = case.expert_input(device), case.weights(device)
    output = run(case.shape, expert_input, weights)
    assert output.dtype is case.dtype
    expected = naive_experts(expert_input, weights, case.shape.activation)
    assert_close(output.cpu(), expected)


@pytest.mark.parametrize("case", [c for c in EXPERTS_CASES if c.num_rows < 50], ids=str)
def test_batched_input_gives_raw_rows(case: ExpertsCase, device: torch.device) -> None:
    weights = case.weights(device)
    rows = case.expert_input(device).hidden_states
    capacity = min(len(rows), 4)
    counts = [expert % (capacity + 1) for expert in range(case.num_experts)]
    batch = torch.full(
        (case.num_experts, capacity, case.hidden_size), torch.nan, dtype=case.dtype, device=device
    )
    for expert, count in enumerate(counts):
        batch[expert, :count] = rows[:count]
    expert_input = BatchedExpertInput(batch, torch.tensor(counts, dtype=torch.int32, device=device))
    output = ReferenceExperts(case.shape).run(expert_input, weights, Workspace(device)).cpu()
    assert output.dtype is case.dtype
    expected = torch.zeros(output.shape, dtype=torch.float64)
    for expert, count in enumerate(counts):
        for row in range(count):
            expected[expert, row] = naive_expert(
                rows[row].double().cpu(), weights, expert, case.shape.activation
            )
    assert_close(output, expected)


def test_qwen3_experts_agree_with_transformers() -> None:
    case = ExpertsCase("qwen3_moe", num_rows=30)
    weights = case.weights(CPU)
    config = Qwen3MoeConfig(
        hidden_size=case.hidden_size,
        moe_intermediate_size=case.intermediate_size,
        num_experts=case.num_experts,
    )
    config._experts_implementation = "eager"
    module: Any = Qwen3MoeExperts(config)
    module.gate_up_proj.data, module.down_proj.data = weights.w13, weights.w2
    expert_input = case.expert_input(CPU)
    ids = expert_input.topk_ids.clamp(min=0)
    expert_input = replace(expert_input, topk_ids=ids, topk_weights=torch.rand(ids.shape))
    with torch.no_grad():
        expected = module(
            expert_input.hidden_states, expert_input.topk_ids.long(), expert_input.topk_weights
        )
    assert_close(run(case.shape, expert_input, weights), expected)


def test_gpt_oss_experts_agree_with_transformers() -> None:
    case = ExpertsCase(
        "gpt_oss", num_rows=30, kind=ActivationKind.SWIGLUOAI, limit=0.7, has_bias=True
    )
    weights = case.weights(CPU)
    assert weights.w13_bias is not None
    config = GptOssConfig(
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_local_experts=case.num_experts,
        swiglu_limit=0.7,
    )
    config._experts_implementation = "eager"
    module: Any = GptOssExperts(config)
    # gpt-oss stores gate and up rows in turn, and every matrix transposed.
    in_turn = weights.w13.view(case.num_experts, 2, -1, case.hidden_size).transpose(1, 2)
    module.gate_up_proj.data = in_turn.flatten(1, 2).transpose(1, 2)
    module.gate_up_proj_bias.data = (
        weights.w13_bias.view(case.num_experts, 2, -1).transpose(1, 2).flatten(1)
    )
    module.down_proj.data = weights.w2.transpose(1, 2)
    module.down_proj_bias.data = weights.w2_bias
    expert_input = case.expert_input(CPU)
    ids = expert_input.topk_ids.clamp(min=0)
    expert_input = replace(expert_input, topk_ids=ids, topk_weights=torch.rand(ids.shape))
    with torch.no_grad():
        expected = module(
            expert_input.hidden_states, expert_input.topk_ids.long(), expert_input.topk_weights
        )
    assert_close(run(case.shape, expert_input, weights), expected)


def test_calls_share_no_state(device: torch.device) -> None:
    """One object, two layers' weights, calls in turn (on CUDA: on two streams): all bit-equal."""
    case = ExpertsCase("shared", num_rows=64, num_experts=4)
    expert_input = case.expert_input(device)
    layers = [case.weights(device), replace(case, seed=7).weights(device)]
    kernel, workspace = ReferenceExperts(case.shape), Workspace(device)
    alone = [kernel.run(expert_input, weights, workspace) for weights in layers]
    streams: list[Any] = [None, None]
    if device.type == "cuda":
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outputs = []
    for _ in range(10):
        for weights, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(kernel.run(expert_input, weights, workspace))
    if device.type == "cuda":
        torch.cuda.synchronize()
    for index, output in enumerate(outputs):
        assert torch.equal(output, alone[index % 2])
    assert not torch.equal(alone[0], alone[1])


def test_parameters_that_ask_for_gradients_are_taken() -> None:
    case = ExpertsCase("parameters", has_bias=True)
    weights, expert_input = case.weights(CPU), case.expert_input(CPU)
    expected = run(case.shape, expert_input, weights)
    for tensor in (weights.w13, weights.w2, weights.w13_bias, expert_input.hidden_states):
        assert tensor is not None
        tensor.requires_grad_()
    assert torch.equal(run(case.shape, expert_input, weights), expected)


def test_rows_from_num_rows_on_are_never_read(device: torch.device) -> None:
    case = ExpertsCase("bounded")
    expert_input, weights = case.expert_input(device), case.weights(device)
    expected = run(case.shape, expert_input, weights)
    expert_input.hidden_states[11:] = torch.nan
    expert_input.topk_ids[11:] = 2**30
    bound = torch.tensor([11], dtype=torch.int32, device=device)
    output = run(case.shape, replace(expert_input, num_rows=bound), weights)
    assert_close(output[:11], expected[:11])
    assert (output[11:] == 0).all()
    expert_input.topk_ids[11:] = 1
    output = run(case.shape, replace(expert_input, num_rows=bound), weights)
    assert (output[11:] == 0).all()


@pytest.mark.parametrize("ids", [-1, 5, 2**31 - 1, -(2**31)])
def test_rows_without_a_local_expert_are_exactly_zero(ids: int, device: torch.device) -> None:
    case = ExpertsCase("unrouted")
    expert_input = case.expert_input(device)
    expert_input.topk_ids[::2] = ids
    expert_input.topk_weights[::2] = torch.nan
    expert_input.hidden_states[::2] = torch.nan
    output = run(case.shape, expert_input, case.weights(device))
    assert (output[::2] == 0).all()
    assert_close(
        output.cpu(), naive_experts(expert_input, case.weights(device), case.shape.activation)
    )


@pytest.mark.parametrize("num_experts", [0, 5])
def test_no_rows_and_no_experts(num_experts: int, device: torch.device) -> None:
    for num_rows in (0, 3):
        case = ExpertsCase("empty", num_rows, max(num_experts, 1), dtype=torch.bfloat16)
        expert_input, weights = case.expert_input(device), case.weights(device)
        weights = replace(weights, w13=weights.w13[:num_experts], w2=weights.w2[:num_experts])
        if num_experts == 0:
            expert_input.topk_ids.fill_(-1)
        output = run(case.shape, expert_input, weights)
        assert output.shape == (num_rows, case.hidden_size)
        assert output.dtype is torch.bfloat16
        assert num_experts or (output == 0).all()


def test_inputs_are_never_written(device: torch.device) -> None:
    case = ExpertsCase("kept", has_bias=True)
    expert_input, weights = case.expert_input(device), case.weights(device)
    tensors = [t for part in (expert_input, weights) for t in vars(part).values() if t is not None]
    before = [tensor.clone() for tensor in tensors]
    run(case.shape, expert_input, weights)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_large_raw_float16_values_are_weighted_before_they_must_fit(device: torch.device) -> None:
    expert_input, weights, shape = large_raw_values(device)
    output = run(shape, expert_input, weights)
    torch.testing.assert_close(output, torch.full_like(output, 1e4))
