"""The triton experts against the reference: interpreted on the CPU, on CUDA with `-m gpu`."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.base import (
    BatchedExpertInput,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import (
    EXPERTS_CASES,
    ExpertsCase,
    RecordingWorkspace,
    large_raw_values,
    poisoned_workspace,
)
from tests.tolerances import assert_close

SMALL = ExpertsCase("small", hidden_size=48, intermediate_size=32, top_k=3)


def run(
    case: ExpertsCase, expert_input: StandardExpertInput, weights: ExpertWeights | None = None
) -> Tensor:
    """Run in a poisoned workspace of exactly the promised size, which must suffice."""
    kernel, device = TritonExperts(case.shape), expert_input.hidden_states.device
    num_bytes = kernel.workspace_bytes(len(expert_input.hidden_states))
    workspace = poisoned_workspace(device, num_bytes)
    prepared = kernel.prepare_weights(weights or case.weights(device))
    output = kernel.run(expert_input, prepared, workspace)
    assert not workspace.overflowed
    return output


def reference(
    case: ExpertsCase, expert_input: StandardExpertInput, weights: ExpertWeights | None = None
) -> Tensor:
    device = expert_input.hidden_states.device
    kernel = ReferenceExperts(case.shape)
    return kernel.run(expert_input, weights or case.weights(device), Workspace(device))


@pytest.mark.parametrize("case", EXPERTS_CASES, ids=str)
def test_equals_the_reference(case: ExpertsCase, device: torch.device) -> None:
    expert_input = case.expert_input(device)
    output = run(case, expert_input)
    assert output.dtype is case.dtype
    assert output.is_contiguous()
    assert_close(output, reference(case, expert_input))


@pytest.mark.parametrize("ids", [-1, 5, 2**31 - 1, -(2**31)])
def test_rows_without_a_local_expert_are_exactly_zero(ids: int, device: torch.device) -> None:
    expert_input = SMALL.expert_input(device)
    expert_input.topk_ids[::2] = ids
    expert_input.topk_weights[::2] = torch.nan
    expert_input.hidden_states[::2] = torch.nan
    output = run(SMALL, expert_input)
    assert (output[::2] == 0).all()
    assert_close(output, reference(SMALL, expert_input))


def test_equal_ids_in_a_row_each_count(device: torch.device) -> None:
    expert_input = SMALL.expert_input(device)
    expert_input.topk_ids.fill_(2)
    expert_input.topk_weights.fill_(1.0)
    single = replace(expert_input, topk_ids=expert_input.topk_ids.clone())
    single.topk_ids[:, 1:] = -1
    assert_close(run(SMALL, expert_input), 3 * run(SMALL, single))


@pytest.mark.parametrize("num_rows", [0, 1, 11])
def test_rows_from_num_rows_on_are_never_read(num_rows: int, device: torch.device) -> None:
    expert_input = SMALL.expert_input(device)
    expected = reference(SMALL, expert_input)
    expert_input.hidden_states[num_rows:] = torch.nan
    expert_input.topk_weights[num_rows:] = torch.nan
    expert_input.topk_ids[num_rows:] = 1
    bound = torch.tensor([num_rows], dtype=torch.int32, device=device)
    expert_input = replace(expert_input, num_rows=bound)
    output = run(SMALL, expert_input)
    assert_close(output[:num_rows], expected[:num_rows])
    assert (output[num_rows:] == 0).all()


@pytest.mark.parametrize("num_rows", [None, 0, 5, 7, 18])
def test_rows_in_several_passes_equal_one_pass(
    num_rows: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ExpertsCase("passes", num_rows=19)
    expert_input, weights = case.expert_input(device), case.weights(device)
    if num_rows is not None:
        bound = torch.tensor([num_rows], dtype=torch.int32, device=device)
        expert_input = replace(expert_input, num_rows=bound)
    expected = run(case, expert_input, weights)
    rows_per_pass = 7
    monkeypatch.setattr(
        "ep_runtime.kernels.row_passes.MAX_SLOTS_PER_PASS", rows_per_pass * case.shape.top_k
    )
    assert TritonExperts(case.shape).workspace_bytes(19) == TritonExperts(
        case.shape
    ).workspace_bytes(rows_per_pass)
    output = run(case, expert_input, weights)
    valid = slice(num_rows)
    assert_close(output[valid], expected[valid])
    assert num_rows is None or (output[num_rows:] == 0).all()


def test_no_rows(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = replace(SMALL, num_rows=0, dtype=dtype)
        output = run(case, case.expert_input(device))
        assert output.shape == (0, SMALL.hidden_size)
        assert output.dtype is dtype


def test_no_local_experts(device: torch.device) -> None:
    case = replace(SMALL, num_experts=0)
    rows = torch.full((7, case.hidden_size), torch.nan, device=device)
    ids = torch.full((7, case.top_k), -1, dtype=torch.int32, device=device)
    output = run(case, StandardExpertInput(rows, ids, torch.rand(7, case.top_k, device=device)))
    assert torch.equal(output, torch.zeros(7, case.hidden_size, device=device))


def every_second_column(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], 2 * x.shape[1]), torch.nan)
    wide[:, ::2] = x
    return wide[:, ::2]


def slice_of_a_wide_row(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], x.shape[1] + 7), torch.nan)
    wide[:, 3:-4] = x
    return wide[:, 3:-4]


def transposed_view(x: Tensor) -> Tensor:
    return x.T.contiguous().T


@pytest.mark.parametrize("view", [every_second_column, slice_of_a_wide_row, transposed_view])
def test_strided_inputs(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    expert_input = SMALL.expert_input(device)
    expected = run(SMALL, expert_input)
    rows = view(expert_input.hidden_states)
    assert not rows.is_contiguous()
    strided = replace(
        expert_input,
        hidden_states=rows,
        topk_ids=transposed_view(expert_input.topk_ids),
        topk_weights=every_second_column(expert_input.topk_weights),
    )
    assert torch.equal(run(SMALL, strided), expected)


def test_an_expanded_row(device: torch.device) -> None:
    expert_input = SMALL.expert_input(device)
    row = expert_input.hidden_states[:1].expand(SMALL.num_rows, -1)
    expanded = replace(expert_input, hidden_states=row)
    copied = replace(expert_input, hidden_states=row.contiguous())
    assert torch.equal(run(SMALL, expanded), run(SMALL, copied))


def test_transposed_weights(device: torch.device) -> None:
    case = replace(SMALL, has_bias=True)
    expert_input, weights = case.expert_input(device), case.weights(device)
    strided = replace(
        weights,
        w13=weights.w13.transpose(1, 2).contiguous().transpose(1, 2),
        w2=weights.w2.transpose(0, 2).contiguous().transpose(0, 2),
    )
    assert_close(run(case, expert_input, strided), run(case, expert_input, weights))


def test_inputs_are_never_written(device: torch.device) -> None:
    case = replace(SMALL, has_bias=True)
    expert_input, weights = case.expert_input(device), case.weights(device)
    tensors = [value for part in (expert_input, weights) for value in vars(part).values()]
    before = [None if tensor is None else tensor.clone() for tensor in tensors]
    run(case, expert_input, weights)
    for tensor, copy in zip(tensors, before, strict=True):
        if copy is not None:
            torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_an_output_outlives_a_larger_call(device: torch.device) -> None:
    kernel = TritonExperts(SMALL.shape)
    small = replace(SMALL, num_rows=64)
    large = replace(SMALL, num_rows=8000 if device.type == "cuda" else 500, seed=1)
    workspace = Workspace(device, kernel.workspace_bytes(large.num_rows))
    weights = SMALL.weights(device)
    first = kernel.run(small.expert_input(device), weights, workspace)
    kept = first.clone()
    second_input = large.expert_input(device)
    second = kernel.run(second_input, weights, workspace)
    assert torch.equal(first, kept)
    assert_close(second, reference(large, second_input, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clean_or_poisoned_workspace_is_bit_equal(dtype: torch.dtype, device: torch.device) -> None:
    case = replace(SMALL, num_rows=70, dtype=dtype)
    expert_input, kernel = case.expert_input(device), TritonExperts(case.shape)
    outputs = []
    for fill in (0, 255, 127):
        workspace = Workspace(device, kernel.workspace_bytes(case.num_rows))
        workspace._block.fill_(fill)
        outputs.append(kernel.run(expert_input, case.weights(device), workspace))
    # Without a reserved arena every take is a block of its own.
    outputs.append(kernel.run(expert_input, case.weights(device), Workspace(device)))
    assert not outputs[0].isnan().any()
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


def test_large_raw_float16_values_are_weighted_before_they_must_fit(device: torch.device) -> None:
    expert_input, weights, shape = large_raw_values(device)
    output = TritonExperts(shape).run(expert_input, weights, Workspace(device))
    torch.testing.assert_close(output, torch.full_like(output, 1e4))


def test_workspace_bytes_never_shrink_with_more_rows() -> None:
    kernel = TritonExperts(replace(SMALL, num_experts=40).shape)
    sizes = [kernel.workspace_bytes(rows) for rows in range(0, 700)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0


def test_a_call_of_fewer_rows_fits_the_reserved_arena(device: torch.device) -> None:
    case = replace(SMALL, num_experts=40)
    kernel = TritonExperts(case.shape)
    workspace = RecordingWorkspace(device, kernel.workspace_bytes(130))
    for num_rows in (1, 2, 27, 54, 108, 130):
        fewer = replace(case, num_rows=num_rows)
        kernel.run(fewer.expert_input(device), case.weights(device), workspace)
    assert not workspace.overflowed


def test_the_batched_format_is_refused(device: torch.device) -> None:
    batch = BatchedExpertInput(
        torch.zeros(5, 2, 48, device=device), torch.zeros(5, dtype=torch.int32, device=device)
    )
    with pytest.raises(PlanError, match="standard format"):
        TritonExperts(SMALL.shape).run(batch, SMALL.weights(device), Workspace(device))


# CUDA only: what the interpreter cannot show.

LARGE = ExpertsCase("large", 512, 16, 512, 384, 4, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256, 1024, 4096])
def test_every_tile_choice_equals_the_reference(num_rows: int, dtype: torch.dtype) -> None:
    case = replace(LARGE, num_rows=num_rows, dtype=dtype)
    expert_input = case.expert_input(torch.device("cuda"))
    assert_close(run(case, expert_input), reference(case, expert_input))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [65_535, 65_536, 200_001])
def test_more_rows_than_a_grid_axis_has_blocks(num_rows: int) -> None:
    case = replace(SMALL, num_rows=num_rows, top_k=1, dtype=torch.bfloat16)
    expert_input = case.expert_input(torch.device("cuda"))
    assert_close(run(case, expert_input), reference(case, expert_input))


@pytest.mark.gpu
def test_rows_beyond_2_to_31_elements() -> None:
    num_rows, hidden_size = 300_100, 7168
    assert num_rows * hidden_size > 2**31
    case = ExpertsCase("rows", 8, 2, hidden_size, 64, 1, dtype=torch.bfloat16)
    device = torch.device("cuda")
    rows = torch.randn(num_rows, hidden_size, dtype=torch.bfloat16, device=device)
    ids = (torch.arange(num_rows, device=device)[:, None] % 2).to(torch.int32)
    expert_input = StandardExpertInput(rows, ids, torch.rand(num_rows, 1, device=device))
    output = TritonExperts(case.shape).run(expert_input, case.weights(device), Workspace(device))
    for part in (slice(0, 500), slice(num_rows - 700, num_rows)):
        piece = StandardExpertInput(rows[part], ids[part], expert_input.topk_weights[part])
        assert_close(output[part], reference(case, piece))


@pytest.mark.gpu
def test_weights_beyond_2_to_31_elements() -> None:
    num_experts, hidden_size, intermediate_size = 66, 7168, 2368
    assert (num_experts - 1) * 2 * intermediate_size * hidden_size > 2**31
    case = ExpertsCase(
        "weights", 16, num_experts, hidden_size, intermediate_size, 2, dtype=torch.bfloat16
    )
    device = torch.device("cuda")
    size = (num_experts, 2 * intermediate_size, hidden_size)
    w13 = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=hidden_size**-0.5)
    w2 = torch.empty(
        num_experts, hidden_size, intermediate_size, dtype=torch.bfloat16, device=device
    ).normal_(std=intermediate_size**-0.5)
    expert_input = case.expert_input(device)
    expert_input.topk_ids[:, 0] = num_experts - 1
    expert_input.topk_weights[:, 0] = 0.5
    weights = ExpertWeights(w13, w2)
    assert_close(run(case, expert_input, weights), reference(case, expert_input, weights))


@pytest.mark.gpu
def test_graph_replay_equals_an_eager_call() -> None:
    device = torch.device("cuda")
    kernel, weights = TritonExperts(LARGE.shape), LARGE.weights(device)
    workspace = Workspace(device, kernel.workspace_bytes(LARGE.num_rows))
    bound = torch.tensor([LARGE.num_rows], dtype=torch.int32, device=device)
    static = replace(LARGE.expert_input(device), num_rows=bound)
    kernel.run(static, weights, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.run(static, weights, workspace)
    for seed, num_rows in ((1, 512), (2, 77), (3, 0)):
        fresh = replace(LARGE, seed=seed).expert_input(device)
        static.hidden_states.copy_(fresh.hidden_states)
        static.topk_ids.copy_(fresh.topk_ids)
        static.topk_weights.copy_(fresh.topk_weights)
        bound.fill_(num_rows)
        workspace._block.fill_(255)
        graph.replay()
        eager = kernel.run(replace(fresh, num_rows=bound), weights, Workspace(device))
        assert torch.equal(captured, eager)


@pytest.mark.gpu
def test_a_call_never_waits_for_the_device() -> None:
    device = torch.device("cuda")
    kernel, weights = TritonExperts(LARGE.shape), LARGE.weights(device)
    workspace = Workspace(device, kernel.workspace_bytes(LARGE.num_rows))
    expert_input = LARGE.expert_input(device)
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
    kernel = TritonExperts(LARGE.shape)
    layers = [
        (replace(LARGE, seed=s).expert_input(device), replace(LARGE, seed=s).weights(device))
        for s in (1, 2)
    ]
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
    for expected, results in zip(alone, outputs, strict=True):
        assert all(torch.equal(result, expected) for result in results)
