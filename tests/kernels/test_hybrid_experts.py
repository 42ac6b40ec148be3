"""The hybrid experts against the reference on the same stored tensors, both ways of computing."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels import hybrid_tiers
from ep_runtime.kernels.base import ActivationKind, Concurrency, StandardExpertInput
from ep_runtime.kernels.errors import PlanError, RankFailure
from ep_runtime.kernels.hybrid_experts import HybridExperts
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.fp8_rows import quantize_rows_reference
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.resident_barrier import ACTIVATED
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.kernels.hybrid_cases import HybridCase
from tests.tolerances import assert_close

# Sizes that no block divides; experts of both tiers, not in order.
SMALL = ExpertsCase("small", 7, 3, 288, 96, 2, dtype=torch.bfloat16)
MIXED = (0, 2)
CASES = [
    HybridCase("bfloat16", SMALL, MIXED),
    HybridCase(
        "float16_relu2",
        replace(SMALL, hidden_size=96, dtype=torch.float16, kind=ActivationKind.RELU2),
        (0,),
    ),
    HybridCase(
        "float32_all_nf3",
        replace(SMALL, num_experts=2, hidden_size=96, dtype=torch.float32),
        (),
    ),
    HybridCase("float32_all_nvfp4", replace(SMALL, hidden_size=96, dtype=torch.float32), (0, 1, 2)),
    HybridCase(
        "float32_swigluoai_one_row",
        replace(
            SMALL,
            num_rows=1,
            hidden_size=96,
            dtype=torch.float32,
            kind=ActivationKind.SWIGLUOAI,
            limit=7.0,
        ),
        MIXED,
    ),
]
ONE = CASES[0]
TINY = HybridCase("tiny", ExpertsCase("tiny", 6, 2, 64, 32, 2, dtype=torch.float32), (1,))
WAYS = ("grid", "tiers")


def kernel_of(hybrid: HybridCase, way: str) -> HybridExperts:
    """One whose calls all go one way."""
    kernel = HybridExperts(hybrid.shape)
    if way == "tiers":
        setattr(kernel.grid, "takes", lambda num_rows, device: False)  # noqa: B010
    return kernel


def run(kernel: HybridExperts, hybrid: HybridCase, expert_input: StandardExpertInput) -> Tensor:
    """In a workspace of exactly the promised size, all NaN, which must suffice.

    Torch's deterministic mode fills the output with NaN, so a row that was not computed shows.
    """
    rows = expert_input.hidden_states
    workspace = poisoned_workspace(rows.device, kernel.workspace_bytes(len(rows)))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        prepared = kernel.prepare_weights(hybrid.weights(rows.device))
        output = kernel.run(expert_input, prepared, workspace)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not workspace.overflowed
    return output


def reference(hybrid: HybridCase, expert_input: StandardExpertInput) -> Tensor:
    device = expert_input.hidden_states.device
    weights = hybrid.weights(device)
    return ReferenceExperts(hybrid.shape).run(expert_input, weights, Workspace(device))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("hybrid", CASES, ids=str)
def test_equals_the_reference(hybrid: HybridCase, way: str, device: torch.device) -> None:
    """Rows of every kind: with local slots, with some (-1 elsewhere), with none."""
    expert_input = hybrid.case.expert_input(device)
    if len(expert_input.topk_ids) > 1:
        expert_input.topk_ids[1] = -1
        expert_input.hidden_states[1] = torch.nan
    output = run(kernel_of(hybrid, way), hybrid, expert_input)
    assert output.dtype is hybrid.case.dtype
    assert (output[1:2] == 0).all()
    assert_close(output, reference(hybrid, expert_input))


@pytest.mark.parametrize("way", WAYS)
def test_rows_from_num_rows_on_are_never_read_and_come_out_as_0(
    way: str, device: torch.device
) -> None:
    expert_input = TINY.case.expert_input(device)
    expected = reference(TINY, expert_input)
    expert_input.hidden_states[3:] = torch.nan
    bound = torch.tensor([3], dtype=torch.int32, device=device)
    output = run(kernel_of(TINY, way), TINY, replace(expert_input, num_rows=bound))
    assert_close(output[:3], expected[:3])
    assert (output[3:] == 0).all()


def test_negative_router_weights_and_ids_outside_count_as_they_are(device: torch.device) -> None:
    expert_input = TINY.case.expert_input(device)
    expert_input.topk_weights.nan_to_num_(0.0).neg_()
    expert_input.topk_ids[0] = torch.tensor([2, 1 << 30], dtype=torch.int32)
    output = run(kernel_of(TINY, "grid"), TINY, expert_input)
    assert_close(output, reference(TINY, expert_input))


@pytest.mark.parametrize("way", WAYS)
def test_router_weights_that_are_not_numbers_make_their_rows_so(
    way: str, device: torch.device
) -> None:
    """Some of a row's, or all of them; other rows keep their numbers."""
    expert_input = TINY.case.expert_input(device)
    expert_input.topk_ids[:2] = torch.arange(expert_input.topk_ids.shape[1], dtype=torch.int32)
    expert_input.topk_weights[:2] = torch.nan
    expert_input.topk_weights[1, 0] = 0.5
    output = run(kernel_of(TINY, way), TINY, expert_input)
    expected = reference(TINY, expert_input)
    assert expected[:2].isnan().all()
    assert output[:2].isnan().all()
    assert_close(output[2:], expected[2:])


@pytest.mark.parametrize("way", WAYS)
def test_equal_calls_give_bit_equal_results(way: str, device: torch.device) -> None:
    expert_input = TINY.case.expert_input(device)
    kernel = kernel_of(TINY, way)
    weights = kernel.prepare_weights(TINY.weights(device))
    workspace = poisoned_workspace(device, kernel.workspace_bytes(TINY.case.num_rows))
    first, second = (kernel.run(expert_input, weights, workspace) for _ in range(2))
    assert torch.equal(first, second)


def test_few_rows_take_the_grid_and_more_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    if not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    kernel = HybridExperts(ONE.shape)
    taken = [rows for rows in (1, 8, 64, 65, 256, 3072) if kernel.grid.takes(rows, device)]
    assert taken == [1, 8, 64]


def test_ids_are_split_as_the_docstring_says(device: torch.device) -> None:
    tiers = torch.tensor([0, -1, 1], dtype=torch.int32, device=device)
    ids = torch.tensor([[2, 1, -1], [3, 0, 1 << 30]], dtype=torch.int32, device=device)
    found = []
    for split in (hybrid_tiers.split_ids, hybrid_tiers.split_ids_reference):
        nvfp4, nf3 = torch.full_like(ids, 77), torch.full_like(ids, 77)
        split(ids, tiers, nvfp4_ids=nvfp4, nf3_ids=nf3)
        found.append((nvfp4.tolist(), nf3.tolist()))
    assert found[0] == found[1]
    assert found[0] == ([[1, -1, -1], [-1, 0, -1]], [[-1, 0, -1], [-1, -1, -1]])


def test_packed_words_are_filled_up_to_whole_blocks_and_no_further() -> None:
    """288 columns are two blocks of 256 in NF3 and five of 64 in NVFP4; 96 one and two."""
    stored = ONE.weights(torch.device("cpu"))
    packed = HybridExperts(ONE.shape).prepare_weights(stored)
    assert packed.w13.shape == (2, 192, 5 * 16)
    assert packed.w2.shape == (2, 288, 2 * 16)
    assert packed.w13_quant is not None
    assert packed.w2_quant is not None
    assert packed.w13_quant.nf3_values is not None
    assert packed.w2_quant.nf3_values is not None
    assert packed.w13_quant.nf3_values.shape == (1, 192, 2 * 48)
    assert packed.w2_quant.nf3_values.shape == (1, 288, 48)


def test_workspace_bytes_never_shrink_with_more_rows() -> None:
    kernel = HybridExperts(ONE.shape)
    sizes = [kernel.workspace_bytes(rows) for rows in range(0, 300)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)


def test_fp8_rows_are_refused(device: torch.device) -> None:
    expert_input = ONE.case.expert_input(device)
    values, scales = quantize_rows_reference(expert_input.hidden_states)
    in_fp8 = StandardExpertInput(
        values, expert_input.topk_ids, expert_input.topk_weights, scales=scales
    )
    with pytest.raises(PlanError, match="nvfp4_nf3_hybrid they must be in the layer's dtype"):
        run(kernel_of(ONE, "grid"), ONE, in_fp8)


def test_a_wait_that_ran_out_is_told_by_the_next_call_and_by_check(device: torch.device) -> None:
    kernel = kernel_of(TINY, "grid")
    expert_input = TINY.case.expert_input(device)
    run(kernel, TINY, expert_input)
    assert kernel.grid._record is not None
    kernel.grid._record[0] = ACTIVATED << 48 | 3 << 24 | 8
    told = r"experts nvfp4_nf3_hybrid: .* 3 of 8 programs had arrived.*choose experts: reference"
    with pytest.raises(RankFailure, match=told):
        run(kernel, TINY, expert_input)
    with pytest.raises(RankFailure, match=told):
        kernel.check()


@pytest.mark.parametrize("num_tokens", [1, 8, 256, 3072])
def test_both_ways_are_exclusive(num_tokens: int) -> None:
    assert HybridExperts.concurrency(num_tokens) is Concurrency.EXCLUSIVE


# CUDA only: what the interpreter cannot show.

LARGE = ExpertsCase("large", 64, 16, 1024, 512, 4, dtype=torch.bfloat16)
HOT = (0, 3, 7, 8, 15)


@pytest.fixture
def cuda() -> Iterator[torch.device]:
    yield torch.device("cuda")
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_rows", [1, 8, 17, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_height_equals_the_reference_on_cuda(
    dtype: torch.dtype, num_rows: int, way: str, cuda: torch.device
) -> None:
    hybrid = HybridCase("cuda", replace(LARGE, num_rows=num_rows, dtype=dtype), HOT)
    expert_input = hybrid.case.expert_input(cuda)
    assert_close(run(kernel_of(hybrid, way), hybrid, expert_input), reference(hybrid, expert_input))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [256, 4096])
@pytest.mark.parametrize("hot", [HOT, (), tuple(range(16))])
def test_many_rows_equal_the_reference_on_cuda(
    hot: tuple[int, ...], num_rows: int, cuda: torch.device
) -> None:
    hybrid = HybridCase("cuda", replace(LARGE, num_rows=num_rows), hot)
    expert_input = hybrid.case.expert_input(cuda)
    kernel = HybridExperts(hybrid.shape)
    assert_close(run(kernel, hybrid, expert_input), reference(hybrid, expert_input))


@pytest.mark.gpu
@pytest.mark.parametrize("hot", [(), tuple(range(16))])
def test_a_grid_over_one_tier_equals_the_reference_on_cuda(
    hot: tuple[int, ...], cuda: torch.device
) -> None:
    hybrid = HybridCase("cuda", replace(LARGE, num_rows=5), hot)
    expert_input = hybrid.case.expert_input(cuda)
    assert_close(
        run(kernel_of(hybrid, "grid"), hybrid, expert_input), reference(hybrid, expert_input)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [8, 256])
def test_graph_replay_equals_an_eager_call(num_rows: int, cuda: torch.device) -> None:
    case = replace(LARGE, num_rows=num_rows)
    hybrid = HybridCase("cuda", case, HOT)
    kernel = HybridExperts(hybrid.shape)
    weights = kernel.prepare_weights(hybrid.weights(cuda))
    workspace = Workspace(cuda, kernel.workspace_bytes(num_rows))
    bound = torch.tensor([num_rows], dtype=torch.int32, device=cuda)
    static = replace(case.expert_input(cuda), num_rows=bound)
    kernel.run(static, weights, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.run(static, weights, workspace)
    for seed, rows in ((1, num_rows), (2, num_rows // 2), (3, 0)):
        fresh = replace(case, seed=seed).expert_input(cuda)
        static.hidden_states.copy_(fresh.hidden_states)
        static.topk_ids.copy_(fresh.topk_ids)
        static.topk_weights.copy_(fresh.topk_weights)
        bound.fill_(rows)
        workspace._block.fill_(255)
        graph.replay()
        eager = kernel.run(replace(fresh, num_rows=bound), weights, Workspace(cuda))
        assert torch.equal(captured, eager)


@pytest.mark.gpu
def test_a_thousand_calls_of_the_grid_are_bit_equal(cuda: torch.device) -> None:
    hybrid = HybridCase("cuda", replace(LARGE, num_rows=8), HOT)
    kernel = HybridExperts(hybrid.shape)
    weights = kernel.prepare_weights(hybrid.weights(cuda))
    workspace = poisoned_workspace(cuda, kernel.workspace_bytes(8))
    expert_input = hybrid.case.expert_input(cuda)
    expected = kernel.run(expert_input, weights, workspace)
    for _ in range(1000):
        assert torch.equal(kernel.run(expert_input, weights, workspace), expected)
    kernel.check()
