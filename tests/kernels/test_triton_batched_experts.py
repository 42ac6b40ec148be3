"""The batched triton experts against the reference: interpreted on the CPU, CUDA with `-m gpu`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.align_batched import align_batched_rows_reference, max_batched_tiles
from ep_runtime.kernels.base import BatchedExpertInput, ExpertWeights
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.grouped_gemm import (
    GemmRows,
    project_down_reference,
    project_gate_up_reference,
)
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import EXPERTS_CASES, ExpertsCase, poisoned_workspace
from tests.tolerances import assert_close

SMALL = ExpertsCase("small", hidden_size=48, intermediate_size=32, top_k=3)
LARGE = ExpertsCase("large", 256, 16, 512, 384, 4, dtype=torch.bfloat16)


def batched_input(
    case: ExpertsCase, device: torch.device, counts: list[int] | None = None
) -> BatchedExpertInput:
    """`case.num_rows` is the capacity; counts are full, none, one and random. NaN past a count."""
    capacity, num_experts = case.num_rows, case.num_experts
    if counts is None:
        generator = torch.Generator().manual_seed(case.seed)
        random = torch.randint(0, capacity + 1, (num_experts,), generator=generator).tolist()
        counts = [*random, capacity, 0, min(1, capacity)][-num_experts:]
    rows = case._random(num_experts, capacity, case.hidden_size, salt=5).to(device, case.dtype)
    for expert, count in enumerate(counts):
        rows[expert, count:] = torch.nan
    return BatchedExpertInput(rows, torch.tensor(counts, dtype=torch.int32, device=device))


def run(
    case: ExpertsCase, expert_input: BatchedExpertInput, weights: ExpertWeights | None = None
) -> Tensor:
    """Run in a poisoned workspace of exactly the promised size; NaN past each count becomes 0.

    Torch's deterministic mode fills the output with NaN, so a row that was not computed shows.
    """
    kernel, device = TritonBatchedExperts(case.shape), expert_input.hidden_states.device
    num_bytes = kernel.workspace_bytes(expert_input.hidden_states.shape[1])
    workspace = poisoned_workspace(device, num_bytes)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        prepared = kernel.prepare_weights(weights or case.weights(device))
        output = kernel.run(expert_input, prepared, workspace)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not workspace.overflowed
    assert output.dtype is case.dtype
    assert output.is_contiguous()
    for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
        assert output[expert, count:].isnan().all(), "wrote past an expert's count"
        output[expert, count:] = 0
    return output


def reference(
    case: ExpertsCase, expert_input: BatchedExpertInput, weights: ExpertWeights | None = None
) -> Tensor:
    device = expert_input.hidden_states.device
    kernel = ReferenceExperts(case.shape)
    return kernel.run(expert_input, weights or case.weights(device), Workspace(device))


def test_the_reference_applies_each_expert_to_its_rows(device: torch.device) -> None:
    """The definitions of the three launches, put together, are the reference."""
    case = replace(SMALL, has_bias=True)
    expert_input, weights = batched_input(case, device), case.weights(device)
    rows = expert_input.hidden_states.flatten(0, 1)
    aligned = align_batched_rows_reference(expert_input, block_m=16)
    activated = rows.new_full((len(aligned.slots), case.intermediate_size), torch.nan)
    project_gate_up_reference(
        GemmRows(rows),
        weights,
        aligned,
        top_k=1,
        activation=case.shape.activation,
        out=activated,
    )
    output = torch.zeros_like(expert_input.hidden_states)
    project_down_reference(
        GemmRows(activated), weights, aligned, slot_weights=None, out=output.flatten(0, 1)
    )
    assert_close(output, reference(case, expert_input, weights))


@pytest.mark.parametrize("case", EXPERTS_CASES, ids=str)
def test_equals_the_reference(case: ExpertsCase, device: torch.device) -> None:
    case = replace(case, num_rows=min(case.num_rows, 40))
    expert_input = batched_input(case, device)
    assert_close(run(case, expert_input), reference(case, expert_input))


@pytest.mark.parametrize(
    "counts", [[0] * 5, [19] * 5, [0, 0, 0, 0, 7], [16, 17, 15, 1, 19]], ids=str
)
@pytest.mark.parametrize("left_over", [torch.nan, 1.0])
def test_any_counts(counts: list[int], left_over: float, device: torch.device) -> None:
    """Whatever stands in the rows past a count, `run` finds the output's unwritten there."""
    expert_input = batched_input(SMALL, device, counts)
    expert_input.hidden_states.nan_to_num_(nan=left_over)
    assert_close(run(SMALL, expert_input), reference(SMALL, expert_input))


@pytest.mark.parametrize("num_source_rows", [0, 1, 2, 6, 19, 400])
def test_a_bound_on_the_rows_changes_the_grid_and_not_the_result(
    num_source_rows: int, device: torch.device
) -> None:
    """As many rows as the bound allows: top_k of each source row, all but one on one expert."""
    case = replace(SMALL, num_rows=64)
    num_slots = min(num_source_rows * case.top_k, 64)
    counts = [0, max(num_slots - 1, 0), 0, 0, min(num_slots, 1)]
    expert_input = batched_input(case, device, counts)
    bounded = replace(expert_input, num_source_rows=num_source_rows)
    assert_close(run_in_any_workspace(case, bounded), run(case, expert_input))
    bound = max_batched_tiles(5, 64, 16, num_source_rows * case.top_k)
    assert bound <= max_batched_tiles(5, 64, 16) == 20
    assert sum(-(-count // 16) for count in counts) <= bound


def run_in_any_workspace(case: ExpertsCase, expert_input: BatchedExpertInput) -> Tensor:
    """With 0 in the rows past each count."""
    device = expert_input.hidden_states.device
    kernel = TritonBatchedExperts(case.shape)
    output = kernel.run(expert_input, case.weights(device), Workspace(device))
    for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
        output[expert, count:] = 0
    return output


def test_no_rows_and_no_experts(device: torch.device) -> None:
    for case in (replace(SMALL, num_rows=0), replace(SMALL, num_experts=0)):
        expert_input = batched_input(case, device, [0] * case.num_experts)
        assert run(case, expert_input).shape == expert_input.hidden_states.shape


def columns_of_padded_rows(x: Tensor) -> Tensor:
    """What a backend delivers that pads the hidden size."""
    wide = x.new_full((*x.shape[:2], x.shape[2] + 16), torch.nan)
    wide[..., :-16] = x
    return wide[..., :-16]


def part_of_a_larger_capacity(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], x.shape[1] + 3, x.shape[2]), torch.nan)
    wide[:, :-3] = x
    return wide[:, :-3]


@pytest.mark.parametrize("view", [columns_of_padded_rows, part_of_a_larger_capacity])
def test_strided_rows(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    expert_input = batched_input(SMALL, device)
    rows = view(expert_input.hidden_states)
    assert not rows.is_contiguous()
    counts = torch.stack([expert_input.num_rows_per_expert] * 2, dim=1)[:, 0]
    strided = BatchedExpertInput(rows, counts)
    assert torch.equal(run(SMALL, strided), run(SMALL, expert_input))


def test_inputs_are_never_written(device: torch.device) -> None:
    case = replace(SMALL, has_bias=True)
    expert_input, weights = batched_input(case, device), case.weights(device)
    tensors = [
        value
        for part in (expert_input, weights)
        for value in vars(part).values()
        if isinstance(value, Tensor)
    ]
    before = [tensor.clone() for tensor in tensors]
    run(case, expert_input, weights)
    for tensor, copy in zip(tensors, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_standard_input_is_refused_by_name(device: torch.device) -> None:
    kernel = TritonBatchedExperts(SMALL.shape)
    with pytest.raises(PlanError, match="triton_batched takes the batched format"):
        kernel.run(SMALL.expert_input(device), SMALL.weights(device), Workspace(device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("capacity", [1, 16, 64, 256, 1024])
def test_every_tile_choice_equals_the_reference(capacity: int, dtype: torch.dtype) -> None:
    case = replace(LARGE, num_rows=capacity, dtype=dtype)
    expert_input = batched_input(case, torch.device("cuda"))
    assert_close(run(case, expert_input), reference(case, expert_input))


@pytest.mark.gpu
def test_rows_beyond_2_to_31_elements() -> None:
    capacity, hidden_size = 100_100, 7168
    device = torch.device("cuda")
    assert 2 * capacity * hidden_size < 2**31 < 4 * capacity * hidden_size
    case = ExpertsCase("rows", capacity, 4, hidden_size, 64, 1, dtype=torch.bfloat16)
    counts = torch.tensor([5, 0, 700, 300], dtype=torch.int32, device=device)
    rows = torch.randn(4, capacity, hidden_size, dtype=torch.bfloat16, device=device)
    weights = case.weights(device)
    kernel, workspace = TritonBatchedExperts(case.shape), Workspace(device)
    output = kernel.run(BatchedExpertInput(rows, counts), weights, workspace)
    few = BatchedExpertInput(rows[:, :700].contiguous(), counts)
    expected = reference(case, few, weights)
    for expert, count in enumerate(counts.tolist()):
        assert_close(output[expert, :count], expected[expert, :count])


@pytest.mark.gpu
def test_graph_replay_equals_an_eager_call() -> None:
    device = torch.device("cuda")
    kernel, weights = TritonBatchedExperts(LARGE.shape), LARGE.weights(device)
    workspace = Workspace(device, kernel.workspace_bytes(LARGE.num_rows))
    static = batched_input(LARGE, device)
    kernel.run(static, weights, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.run(static, weights, workspace)
    for seed in (1, 2, 3):
        case = replace(LARGE, seed=seed)
        fresh = batched_input(case, device, [0] * 16 if seed == 3 else None)
        static.hidden_states.copy_(fresh.hidden_states)
        static.num_rows_per_expert.copy_(fresh.num_rows_per_expert)
        workspace._block.fill_(255)
        captured.fill_(torch.nan)
        graph.replay()
        eager = kernel.run(fresh, weights, Workspace(device))
        for expert, count in enumerate(fresh.num_rows_per_expert.tolist()):
            assert torch.equal(captured[expert, :count], eager[expert, :count])
            assert captured[expert, count:].isnan().all()


@pytest.mark.gpu
def test_a_call_never_waits_for_the_device() -> None:
    device = torch.device("cuda")
    kernel, weights = TritonBatchedExperts(LARGE.shape), LARGE.weights(device)
    workspace = Workspace(device, kernel.workspace_bytes(LARGE.num_rows))
    expert_input = batched_input(LARGE, device)
    kernel.run(expert_input, weights, workspace)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.run(expert_input, weights, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_two_streams_do_not_disturb_each_other() -> None:
    """One object, a workspace for each stream, both poisoned: every result is bit-equal."""
    device = torch.device("cuda")
    kernel = TritonBatchedExperts(LARGE.shape)
    layers = []
    for seed in (1, 2):
        case = replace(LARGE, seed=seed)
        layers.append((batched_input(case, device), case.weights(device)))
    num_bytes = kernel.workspace_bytes(LARGE.num_rows)
    alone = [kernel.run(*layer, poisoned_workspace(device, num_bytes)) for layer in layers]
    workspaces = [poisoned_workspace(device, num_bytes) for _ in layers]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    outputs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outputs[index].append(kernel.run(*layers[index], workspaces[index]))
    torch.cuda.synchronize()
    for (expert_input, _), expected, results in zip(layers, alone, outputs, strict=True):
        for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
            rows = expected[expert, :count]
            assert all(torch.equal(result[expert, :count], rows) for result in results)
