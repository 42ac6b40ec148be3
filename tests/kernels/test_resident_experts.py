"""The resident experts against the definitions: interpreted on the CPU, on CUDA with `-m gpu`."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.base import Activation, ExpertWeights, RoutingSpec
from ep_runtime.kernels.errors import CapacityError, RankFailure
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.resident_barrier import ACTIVATED, FailedBarrier
from ep_runtime.kernels.resident_experts import ResidentExperts
from ep_runtime.kernels.resident_tiles import MAX_ROWS, ResidentTiles
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import large_raw_values
from tests.kernels.resident_cases import CASES, ResidentCall, ResidentCase
from tests.kernels.resident_programs import run_several_programs
from tests.tolerances import assert_close, relative_error

SMALL = replace(CASES[0], hidden_size=48, intermediate_size=32)
CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(
    not is_interpreting(), reason="Triton compiles for CUDA in this process"
)


def hold_to_float32(call: ResidentCall, output: Tensor) -> None:
    assert output.dtype is call.case.dtype
    assert_close(output, call.expected())
    assert torch.equal(call.context.tokens_per_expert, call.expected_counts())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_routing_and_experts_by_their_definitions(
    case: ResidentCase, device: torch.device
) -> None:
    call = ResidentCall.random(case, device)
    hold_to_float32(call, call.run())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[6]], ids=str)
def test_of_equal_scores_the_lower_id_is_chosen(
    case: ResidentCase, bias: bool, device: torch.device
) -> None:
    """Each row has three different logits, so that most of what is compared is equal."""
    case = replace(case, num_rows=16, hidden_size=16, intermediate_size=16)
    call = ResidentCall.random(replace(case, has_correction_bias=bias), device)
    call.logits = torch.randint(3, call.logits.shape, device=device).float()
    if call.context.correction_bias is not None:
        call.context.correction_bias.copy_(call.context.correction_bias.round())
    hold_to_float32(call, call.run())


# --- several programs ---


def _small_tiles(num_rows: int, shape: object) -> ResidentTiles:
    """So that every item has several steps, and sums are shared."""
    return ResidentTiles((32, 32, 1), (32, 16, 1), 4, 1)


def _cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ep_runtime.kernels.resident_experts.resident_tiles", _small_tiles)
    monkeypatch.setattr("ep_runtime.kernels.resident_experts.routed_at_once", lambda e, t: t // 8)


def _all_of(case: ResidentCase, num_experts: int, **sizes: Any) -> ResidentCase:
    """Every row meets every expert, so that shares are the same whatever the logits are."""
    routing = replace(case.routing, num_experts=num_experts, top_k=num_experts)
    return replace(case, routing=routing, num_local_experts=num_experts, **sizes)


@needs_interpreter
@pytest.mark.parametrize(
    ("case", "num_programs"),
    [
        (_all_of(CASES[1], 3, num_rows=5, hidden_size=80, intermediate_size=48), 4),
        (replace(CASES[6], hidden_size=80, intermediate_size=48), 3),
        (_all_of(CASES[13], 2, num_rows=3, hidden_size=150, intermediate_size=37), 7),
        (_all_of(CASES[16], 1, num_rows=1, hidden_size=80, intermediate_size=48), 7),
    ],
    ids=str,
)
def test_programs_that_share_sums_and_wait_for_each_other_give_the_same(
    case: ResidentCase, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ResidentCall.random(case, CPU)
    alone = call.run()
    _cut_small(monkeypatch)
    kernel, workspace, outputs = ResidentExperts(case.shape), Workspace(CPU), []
    for seed in (1, 2):
        run_several_programs(monkeypatch, num_programs, seed=seed)
        call.context.tokens_per_expert.zero_()
        outputs.append(call.run(kernel, workspace))
        hold_to_float32(call, outputs[-1])
    assert torch.equal(outputs[0], outputs[1]), "the order of programs shows in the result"
    assert relative_error(outputs[0], alone) < 1e-2
    (state,) = kernel.grid._states.values()
    assert not state.any(), "the last program clears the barrier's words"


@needs_interpreter
def test_more_programs_than_there_is_work_for(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SMALL, num_rows=1, hidden_size=16, intermediate_size=16)
    call = ResidentCall.random(replace(case, routing=RoutingSpec(12, 1)), CPU)
    _cut_small(monkeypatch)
    run_several_programs(monkeypatch, 6)
    hold_to_float32(call, call.run(workspace=Workspace(CPU)))


@needs_interpreter
def test_a_barrier_that_is_waited_for_in_vain_ends_in_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of three programs gets no multiprocessor until long after the others gave up."""
    _cut_small(monkeypatch)
    run_several_programs(monkeypatch, 3, is_held=lambda program, reads: program == 0 and reads < 99)
    call, workspace = ResidentCall.random(replace(SMALL, num_rows=5), CPU), Workspace(CPU)
    kernel = ResidentExperts(call.case.shape)
    kernel.grid.wait_limit_s = 0.02
    output = call.run(kernel, workspace)
    assert output.isnan().all()
    named = re.escape("grid barrier behind the routing (phase 1 of 4): 2 of 3 programs")
    with pytest.raises(RankFailure, match=named + r" had arrived after 0.02 s"):
        kernel.check()
    with pytest.raises(RankFailure, match=named):
        call.run(kernel, workspace)
    (state,) = kernel.grid._states.values()
    assert not state.any(), "also then the next launch finds the words as it needs them"


@needs_interpreter
def test_a_shared_sum_that_is_waited_for_in_vain_ends_in_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No barrier stands before the first projection where every program routes all rows."""
    _cut_small(monkeypatch)
    monkeypatch.setattr("ep_runtime.kernels.resident_experts.routed_at_once", lambda e, t: t)
    run_several_programs(monkeypatch, 2, is_held=lambda program, reads: program == 0 and reads < 99)
    case = replace(SMALL, routing=RoutingSpec(1, 1), num_local_experts=1, intermediate_size=16)
    call = ResidentCall.random(replace(case, hidden_size=128), CPU)
    kernel = ResidentExperts(call.case.shape)
    kernel.grid.wait_limit_s = 0.02
    assert call.run(kernel, Workspace(CPU)).isnan().all()
    with pytest.raises(RankFailure, match=r"shared sum of the first projection .*: 1 of 2 "):
        kernel.check()


def test_a_record_tells_of_a_failed_barrier() -> None:
    """264 programs of which 263 came to the barrier between the projections."""
    record = ACTIVATED << 48 | 263 << 24 | 264
    assert FailedBarrier.from_record(record) == FailedBarrier(ACTIVATED, 263, 264)
    assert FailedBarrier.from_record(0) is None


# --- rows ---


def test_a_row_that_is_not_routed_is_exactly_zero_and_disturbs_no_other(
    device: torch.device,
) -> None:
    """A NaN logit, an infinite one under softmax, or only experts of other ranks."""
    call = ResidentCall.random(SMALL, device)
    expected = call.expected()
    elsewhere = call.context.expert_map < 0
    call.logits[0, 3] = torch.nan
    call.logits[1, 0] = torch.inf
    call.logits[2, elsewhere] = 9.0
    call.hidden_states[:3] = torch.nan
    output = call.run()
    assert (output[:3] == 0).all()
    assert_close(output[3:], expected[3:])


def test_no_rows_and_no_local_experts(device: torch.device) -> None:
    call = ResidentCall.random(replace(SMALL, num_rows=0), device)
    assert call.run().shape == (0, SMALL.hidden_size)
    call = ResidentCall.random(replace(SMALL, num_local_experts=0), device)
    assert torch.equal(call.run(), torch.zeros_like(call.hidden_states))


def test_a_call_in_which_no_expert_has_rows(device: torch.device) -> None:
    call = ResidentCall.random(SMALL, device)
    call.context.expert_map.fill_(-1)
    assert (call.run() == 0).all()
    assert not call.context.tokens_per_expert.any()


def test_more_rows_than_it_takes_are_refused(device: torch.device) -> None:
    call = ResidentCall.random(replace(SMALL, num_rows=MAX_ROWS + 1), device)
    with pytest.raises(CapacityError, match=r"at most 64 rows at once, not 65.*max_tokens"):
        call.run()


def test_counts_are_added_to_what_is_there(device: torch.device) -> None:
    call = ResidentCall.random(SMALL, device)
    call.run()
    call.run()
    assert torch.equal(call.context.tokens_per_expert, 2 * call.expected_counts())


def _every_second_column(x: Tensor) -> Tensor:
    wide = x.new_full((x.shape[0], 2 * x.shape[1]), torch.nan)
    wide[:, ::2] = x
    return wide[:, ::2]


def _transposed_view(x: Tensor) -> Tensor:
    return x.T.contiguous().T


@pytest.mark.parametrize("view", [_every_second_column, _transposed_view])
def test_strided_inputs(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    call = ResidentCall.random(SMALL, device)
    expected = call.run()
    call.hidden_states, call.logits = view(call.hidden_states), view(call.logits)
    assert torch.equal(call.run(), expected)


def test_large_raw_float16_values_are_weighted_before_they_must_fit(device: torch.device) -> None:
    """One raw result is 1e5, its weight .1."""
    given, weights, shape = large_raw_values(device)
    call = _one_expert(given.hidden_states, weights, 0.1, device)
    call.case = replace(call.case, activation=shape.activation)
    output = call.run()
    torch.testing.assert_close(output, torch.full_like(output, 1e4), rtol=2e-3, atol=0)


def test_small_weights_cost_no_precision_in_float16(device: torch.device) -> None:
    """A weight of 1e-7 times a factor of 1e7: the product with it is below float16's range."""
    x = torch.randn(3, 64, device=device).half()
    weights = ExpertWeights(
        (torch.randn(1, 2 * 64, 64, device=device) / 8).half(),
        (torch.randn(1, 64, 64, device=device) / 8).half(),
    )
    call = _one_expert(x, weights, 1e-7, device)
    small = replace(call.case.routing, routed_scaling_factor=1e7)
    call.case = replace(call.case, routing=small)
    call.context = replace(call.context, routing=small)
    assert_close(call.run(), call.expected())


def _one_expert(
    x: Tensor, weights: ExpertWeights, weight: float, device: torch.device
) -> ResidentCall:
    """One sigmoid expert whose weight is `weight` in every row."""
    size = x.shape[1]
    routing = RoutingSpec(1, 1, "sigmoid", norm_topk_prob=False)
    case = ResidentCase("one", routing, len(x), 1, size, size, torch.float16, Activation())
    call = ResidentCall.random(case, device)
    call.hidden_states = x
    call.context = replace(call.context, weights=weights)
    call.logits.fill_(float(torch.tensor(weight, dtype=torch.float64).logit()))
    return call


# --- memory ---


def test_clean_or_poisoned_workspace_is_bit_equal(device: torch.device) -> None:
    call = ResidentCall.random(CASES[1], device)
    kernel = ResidentExperts(call.case.shape)
    outputs = []
    for fill in (0, 255, 127):
        workspace = Workspace(device, kernel.workspace_bytes(call.case.num_rows))
        workspace._block.fill_(fill)
        outputs.append(call.run(kernel, workspace))
    outputs.append(call.run(kernel, Workspace(device)))
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])


def test_inputs_are_never_written_and_outputs_outlive_later_calls(device: torch.device) -> None:
    call = ResidentCall.random(replace(SMALL, has_bias=True, has_correction_bias=True), device)
    context = call.context
    given = (call.hidden_states, call.logits, context.expert_map, context.correction_bias)
    tensors = [t for t in (*given, *vars(context.weights).values()) if t is not None]
    before = [tensor.clone() for tensor in tensors]
    kernel = ResidentExperts(call.case.shape)
    workspace = Workspace(device, kernel.workspace_bytes(MAX_ROWS))
    first = call.run(kernel, workspace)
    kept = first.clone()
    ResidentCall.random(replace(call.case, num_rows=MAX_ROWS), device).run(kernel, workspace)
    assert torch.equal(first, kept)
    for tensor, copy in zip(tensors, before, strict=True):
        assert torch.equal(tensor, copy)


def test_workspace_bytes_never_shrink_with_more_rows() -> None:
    kernel = ResidentExperts(replace(SMALL, num_local_experts=40).shape)
    sizes = [kernel.workspace_bytes(rows) for rows in range(0, 300)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 0
