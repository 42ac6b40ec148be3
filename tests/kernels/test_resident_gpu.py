"""The resident experts on a GPU: what the interpreter cannot show."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.base import RoutingSpec
from ep_runtime.kernels.errors import RankFailure
from ep_runtime.kernels.resident_experts import ResidentExperts, RoutingGrid
from ep_runtime.kernels.resident_launch import LaunchArguments
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.occupant import num_multiprocessors, occupy
from tests.kernels.resident_cases import ResidentCall, ResidentCase
from tests.tolerances import assert_close

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DEEPSEEK = RoutingSpec(256, 8, "sigmoid", 8, 4, "top2_sum", True, 2.5)
LARGE = ResidentCase(
    "large",
    DEEPSEEK,
    num_rows=8,
    num_local_experts=32,
    hidden_size=2048,
    intermediate_size=1536,
    dtype=torch.bfloat16,
    has_correction_bias=True,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 16, 17, 33, 64])
def test_every_height_and_dtype_against_float32(num_rows: int, dtype: torch.dtype) -> None:
    case = replace(LARGE, num_rows=num_rows, dtype=dtype)
    call = ResidentCall.random(case, DEVICE)
    assert_close(call.run(), call.expected())
    assert torch.equal(call.context.tokens_per_expert, call.expected_counts())


def test_each_number_of_local_experts_that_rows_meet() -> None:
    """From none to all of 8: sums are shared by many programs, by few, by none."""
    case = replace(LARGE, routing=RoutingSpec(64, 8), num_rows=3, num_local_experts=8)
    for num_met in range(9):
        call = ResidentCall.random(replace(case, has_correction_bias=False), DEVICE)
        local = (call.context.expert_map >= 0).nonzero().flatten()
        elsewhere = (call.context.expert_map < 0).nonzero().flatten()
        call.logits[:, local[num_met:]] = -9.0
        call.logits[:, local[:num_met]] += 9.0
        call.logits[:, elsewhere[: 8 - num_met]] += 7.0
        output = call.run()
        assert int((call.context.tokens_per_expert > 0).sum()) == num_met
        assert_close(output, call.expected())


def test_repeated_runs_are_bit_equal() -> None:
    call = ResidentCall.random(LARGE, DEVICE)
    kernel = ResidentExperts(LARGE.shape)
    workspace = Workspace(DEVICE, kernel.workspace_bytes(LARGE.num_rows))
    first = call.run(kernel, workspace)
    for _ in range(300):
        assert torch.equal(call.run(kernel, workspace), first)
    kernel.check()
    (state,) = kernel.grid._states.values()
    assert not state.any()


def test_launches_of_different_heights_take_turns_in_one_workspace() -> None:
    kernel = ResidentExperts(LARGE.shape)
    workspace = Workspace(DEVICE, kernel.workspace_bytes(64))
    calls = [ResidentCall.random(replace(LARGE, num_rows=n), DEVICE) for n in (1, 64, 17, 5)]
    alone = [call.run() for call in calls]
    for _ in range(25):
        outputs = [call.run(kernel, workspace) for call in calls]
        assert all(torch.equal(a, b) for a, b in zip(outputs, alone, strict=True))
    kernel.check()


@pytest.mark.parametrize("num_rows", [3, 40])
def test_graph_replay_with_other_routing_equals_an_eager_call(num_rows: int) -> None:
    case = replace(LARGE, num_rows=num_rows)
    static = ResidentCall.random(case, DEVICE)
    kernel = ResidentExperts(case.shape)
    workspace = Workspace(DEVICE, kernel.workspace_bytes(num_rows))
    static.run(kernel, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [static.run(kernel, workspace) for _ in range(3)]
    for _ in range(5):
        fresh = ResidentCall.random(case, DEVICE)
        static.hidden_states.copy_(fresh.hidden_states)
        static.logits.copy_(fresh.logits)
        workspace._block.fill_(255)
        graph.replay()
        eager = static.run(kernel, Workspace(DEVICE))
        assert_close(eager, static.expected())
        assert all(torch.equal(output, eager) for output in captured)
    kernel.check()


def test_a_capture_in_a_workspace_that_is_new_owns_its_barrier() -> None:
    call = ResidentCall.random(LARGE, DEVICE)
    kernel = ResidentExperts(LARGE.shape)
    expected = call.run(kernel, Workspace(DEVICE))
    torch.cuda.synchronize()
    graph, workspace = torch.cuda.CUDAGraph(), Workspace(DEVICE, kernel.workspace_bytes(8))
    with torch.cuda.graph(graph):
        captured = call.run(kernel, workspace)
    assert workspace not in kernel.grid._states
    for _ in range(3):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


def test_the_grid_is_what_the_driver_says_is_co_resident() -> None:
    call = ResidentCall.random(LARGE, DEVICE)
    kernel = ResidentExperts(LARGE.shape)
    call.run(kernel)
    assert list(kernel.grid._num_programs.values()) == [num_multiprocessors()]


def test_a_call_never_waits_for_the_device() -> None:
    call = ResidentCall.random(LARGE, DEVICE)
    kernel = ResidentExperts(LARGE.shape)
    workspace = Workspace(DEVICE, kernel.workspace_bytes(8))
    call.run(kernel, workspace)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run(kernel, workspace)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- beside an occupant ---

LIMIT_S, HOLD_S = 0.25, 1.5


class NotCooperative(RoutingGrid):
    """Its programs start as they find room, so that some wait for others that have not started."""

    def _arguments(self, *arguments: Any) -> LaunchArguments:
        positional, constants = super()._arguments(*arguments)
        return positional, constants | {"launch_cooperative_grid": False}


def _run_beside_an_occupant(
    kernel: ResidentExperts, call: ResidentCall, workspace: Workspace
) -> tuple[Tensor, float]:
    """The output, and the seconds until it was there; half of the multiprocessors are held."""
    call.run(kernel, workspace)
    occupy(1, 0.0)
    torch.cuda.synchronize()
    kernel.grid.wait_limit_s = LIMIT_S
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        occupy(num_multiprocessors() // 2, HOLD_S)
    time.sleep(0.05)
    start = time.monotonic()
    output = call.run(kernel, workspace)
    torch.cuda.synchronize()
    return output, time.monotonic() - start


def test_programs_without_a_multiprocessor_are_waited_for_so_long_and_named() -> None:
    call = ResidentCall.random(LARGE, DEVICE)
    kernel = ResidentExperts(LARGE.shape)
    kernel.grid = NotCooperative(LARGE.shape)
    workspace = Workspace(DEVICE, kernel.workspace_bytes(8))
    output, seconds = _run_beside_an_occupant(kernel, call, workspace)
    assert output.isnan().any()
    assert seconds < HOLD_S + 1, "the grid ends once the occupant has"
    total = num_multiprocessors()
    with pytest.raises(RankFailure, match=rf"resident: .* \(phase \d of 4\): \d+ of {total} "):
        kernel.check()
    state = kernel.grid._states[workspace]
    assert not state.any(), "the programs that came late have cleared the words"


def test_a_cooperative_launch_beside_an_occupant_is_right_or_an_error() -> None:
    """Which of the two is the driver's: it may hold back the whole grid."""
    call = ResidentCall.random(LARGE, DEVICE)
    kernel = ResidentExperts(LARGE.shape)
    workspace = Workspace(DEVICE, kernel.workspace_bytes(8))
    output, seconds = _run_beside_an_occupant(kernel, call, workspace)
    assert seconds < HOLD_S + 1
    if output.isnan().any():
        with pytest.raises(RankFailure, match=r"resident: .* programs"):
            kernel.check()
    else:
        kernel.check()
        assert_close(output, call.expected())
