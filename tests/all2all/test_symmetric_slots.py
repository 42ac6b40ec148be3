"""Backends of several shapes that take turns in one pair of slots."""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.all2all.base import BackendShape, RoutedTokens
from ep_runtime.all2all.symm_mem import SymmMemBackend, SymmMemLimits
from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.errors import RankFailure
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.symm_channel import ARRIVAL_SHARES
from ep_runtime.layer import MoELayer
from ep_runtime.placement import place_experts
from tests.all2all.virtual_ranks import (
    coded_output,
    expert_scale,
    make_virtual_ranks,
    random_counts,
    stress_tokens,
    to_device,
    virtual_groups,
    wanted_output,
)
from tests.ep_runtime.coded import coded_config, coded_routing, coded_rows, coded_weights
from tests.harness import run_ranks

CPU = torch.device("cpu")
DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


def make_shapes(num_ranks: int) -> tuple[BackendShape, ...]:
    """Three that differ in all that a layout is made of. The first receives most bytes, and the
    second returns most. With one group of columns fp8 loses nothing of `stress_tokens`."""

    def shape(num_experts: int, hidden_size: int, top_k: int, **rest: Any) -> BackendShape:
        placement = place_experts("linear", num_experts, num_ranks)
        values: dict[str, Any] = {"dtype": torch.float32, "max_tokens_per_rank": 6} | rest
        return BackendShape(num_experts, hidden_size, top_k, placement=placement, **values)

    return (
        shape(7, 100, 3),
        shape(5, 128, 2, rows=RowScheme.FP8_GROUP),
        shape(11, 27, 5, dtype=torch.bfloat16, max_tokens_per_rank=9),
    )


@pytest.fixture(autouse=True)
def _can_run(request: pytest.FixtureRequest) -> None:
    if "cuda" not in request.node.name and not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process; run `pytest -m gpu`")


@dataclass
class Call:
    """One call of every rank on its way; pending and outputs by rank."""

    shape: BackendShape
    backends: list[SymmMemBackend]
    tokens: list[RoutedTokens]
    pending: dict[int, Any]
    outputs: dict[int, Tensor]

    def dispatch(self, rank: int) -> None:
        backend = self.backends[rank]
        self.pending[rank] = backend.dispatch(backend.prepare(self.tokens[rank]))

    def combine(self, rank: int) -> None:
        received, handle = self.pending[rank].wait()
        scale = expert_scale(self.shape, rank, received.hidden_states.device)
        output = coded_output(received, scale, self.shape.dtype)
        self.pending[rank] = self.backends[rank].combine(output, handle)

    def finish(self, rank: int) -> None:
        self.outputs[rank] = self.pending[rank].wait()

    def run_alone(self) -> dict[int, Tensor]:
        """What the same call gives on backends that share nothing."""
        device = self.tokens[0].hidden_states.device
        alone = Call(self.shape, make_virtual_ranks(self.shape, device), self.tokens, {}, {})
        for step in (alone.dispatch, alone.combine, alone.finish):
            for rank in range(len(self.tokens)):
                step(rank)
        return alone.outputs


def run_in_turn(num_ranks: int, device: torch.device, num_rounds: int, seed: int) -> list[Call]:
    """Rounds of one or two calls in flight, of any shape, ranks in an order of chance.

    A rank that has finished its calls dispatches the next round's at once, while others have yet
    to add up what they were sent.
    """
    chance, groups = random.Random(seed), virtual_groups(num_ranks, device)
    shapes = make_shapes(num_ranks)
    # Each twice: the first time slots are opened that are larger and larger.
    sharing = {s: make_virtual_ranks(s, device, groups=groups) for s in (*shapes, *shapes)}
    assert len({id(backends[0].slots) for backends in sharing.values()}) == 1
    done: list[Call] = []
    before: list[Call] = []
    for index in range(num_rounds + 1):
        calls = []
        num_calls = chance.choice((1, 1, 1, 2)) if index < num_rounds else 0
        for shape in chance.choices(shapes, k=num_calls):
            counts = random_counts(shape, chance)
            tokens = [stress_tokens(shape, counts, r, index) for r in range(num_ranks)]
            tokens = [to_device(own, device) for own in tokens]
            calls.append(Call(shape, sharing[shape], tokens, {}, {}))
        for rank in chance.sample(range(num_ranks), num_ranks):
            for call in chance.sample(before, len(before)):
                call.finish(rank)
            for call in calls:
                call.dispatch(rank)
        for rank in chance.sample(range(num_ranks), num_ranks):
            for call in chance.sample(calls, len(calls)):
                call.combine(rank)
        done += before
        before = calls
    for backends in sharing.values():
        for backend in backends:
            backend.check()
    return done


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(2, 50), (3, 8)])
@pytest.mark.parametrize("device", DEVICES)
def test_no_row_is_wrong_over_random_rounds_of_three_shapes_in_the_same_slots(
    device: str, num_ranks: int, num_rounds: int
) -> None:
    done = run_in_turn(num_ranks, torch.device(device), num_rounds, seed=4)
    assert len({call.shape for call in done}) == 3
    for number, call in enumerate(done):
        for rank, own in enumerate(call.tokens):
            if call.shape.dtype is torch.float32:
                wanted = wanted_output(to_device(own, CPU))
                assert torch.equal(call.outputs[rank].cpu(), wanted), (number, rank)


def test_results_are_those_of_backends_that_share_nothing_bit_for_bit() -> None:
    for call in run_in_turn(2, CPU, 8, seed=5):
        alone = call.run_alone()
        assert all(torch.equal(call.outputs[rank], alone[rank]) for rank in alone)


def alternate_between_shapes(ctx: EPContext) -> int:
    """Calls of two shapes in turn; the number of pairs of slots that they use."""
    shapes = make_shapes(ctx.world_size)[:2]
    group = replace(ctx.ep_group, shared={})
    backends: list[Any] = [ctx.backend("symm_mem", shape) for shape in shapes]
    # The second has the larger results: it opened larger slots, and the first shape anew has room.
    backends.append(SymmMemBackend(ctx.ep_group, shapes[0]))
    for index in range(8):
        backend = backends[1 + index % 2]
        shape = backend.shape
        counts = ((3, 5), (0, 6), (4, 0), (0, 0))[index // 2]
        tokens = stress_tokens(shape, counts, ctx.rank, index)
        outputs = []
        for one in (backend, SymmMemBackend(group, shape) if index < 2 else backend):
            received, handle = one.dispatch(one.prepare(tokens)).wait()
            output = coded_output(received, expert_scale(shape, ctx.rank, CPU), shape.dtype)
            outputs.append(one.combine(output, handle).wait())
        assert torch.equal(outputs[0], outputs[1]), index
        assert torch.equal(outputs[0], wanted_output(tokens)), index
    return len({id(backend.slots) for backend in backends})


def test_backends_of_two_shapes_alternate_between_processes() -> None:
    parallel = ParallelConfig(dp_size=2, device="cpu", all2all_backend="symm_mem", timeout_s=60)
    assert run_ranks(alternate_between_shapes, parallel, timeout=120) == [2, 2]


def alternate_between_layers(ctx: EPContext) -> None:
    """Routed 10x and shared 1x are 11x, whichever layer was called before."""
    layers = []
    for num_experts, top_k in ((5, 2), (7, 3)):
        moe = coded_config(num_experts, top_k)
        layer = MoELayer(moe, ctx, experts="reference")
        layer.load_experts(**coded_weights(moe, [10.0] * num_experts, 1.0))
        layers.append(layer)
    for index in range(6):
        layer, num_rows = layers[index % 2], ((3, 5), (0, 4), (0, 0))[index // 2][ctx.rank]
        rows = coded_rows(num_rows, ctx.rank + index)
        ids, weights = coded_routing(num_rows, layer.plan.moe, index, 1 / layer.plan.moe.top_k)
        output = layer(rows, topk_ids=ids, topk_weights=weights)
        torch.testing.assert_close(output, 11 * rows, rtol=1e-6, atol=0)


def test_layers_of_two_shapes_alternate_in_a_context() -> None:
    parallel = ParallelConfig(dp_size=2, device="cpu", all2all_backend="symm_mem", timeout_s=60)
    run_ranks(alternate_between_layers, parallel, timeout=120)


def test_a_backend_that_fits_shares_the_slots_and_a_larger_one_opens_larger_ones() -> None:
    wide, tall, small = make_shapes(1)
    (group,) = virtual_groups(1, CPU)
    first, second, third, fourth = (
        make_virtual_ranks(shape, CPU, groups=[group])[0] for shape in (small, wide, tall, wide)
    )
    assert len({id(backend.slots) for backend in (first, second, third)}) == 3
    assert fourth.slots is third.slots
    assert third.slots.space.holds(second.slots.space)
    fifth = make_virtual_ranks(small, CPU, groups=[group])[0]
    assert fifth.slots is third.slots
    assert fifth.channels[1].memory.data_ptr() == third.channels[1].memory.data_ptr()
    assert fifth.channels[1].results.data_ptr() == third.channels[1].results.data_ptr()


def test_calls_of_all_shapes_count_in_the_same_counters() -> None:
    wide, tall, small = make_shapes(1)
    (group,) = virtual_groups(1, CPU)
    make_virtual_ranks(wide, CPU, groups=[group])
    backends = [make_virtual_ranks(shape, CPU, groups=[group])[0] for shape in (tall, wide, small)]
    for number, backend in enumerate(backends, start=1):
        tokens = stress_tokens(backend.shape, (3,), 0, 0)
        _, handle = backend.dispatch(backend.prepare(tokens)).wait()
        backend.combine(
            torch.zeros(3, backend.shape.hidden_size).to(backend.shape.dtype), handle
        ).wait()
        for one in backends:
            assert int(one.channels[0].epoch) == number
            assert int(one.channels[0].dispatch_arrivals) == number * ARRIVAL_SHARES
            assert int(one.channels[0].combine_arrivals) == number * ARRIVAL_SHARES


def test_slots_are_released_by_the_last_backend_that_leaves_them() -> None:
    shape = make_shapes(1)[0]
    (group,) = virtual_groups(1, CPU)
    first, second = (make_virtual_ranks(shape, CPU, groups=[group])[0] for _ in range(2))
    needs = first.slots.space
    first.close()
    first.close()
    assert second.slots.can_hold(needs)
    second.close()
    assert not second.slots.can_hold(needs)
    assert make_virtual_ranks(shape, CPU, groups=[group])[0].slots is not second.slots


def test_calls_in_flight_are_counted_over_all_shapes() -> None:
    shapes = make_shapes(1)
    (group,) = virtual_groups(1, CPU)
    tall, wide, small = (make_virtual_ranks(shapes[i], CPU, groups=[group])[0] for i in (1, 0, 2))
    small_too = make_virtual_ranks(shapes[2], CPU, groups=[group])[0]
    assert wide.slots is small.slots is not tall.slots

    def dispatch(backend: SymmMemBackend) -> Any:
        tokens = stress_tokens(backend.shape, (3,), 0, 0)
        return backend.dispatch(backend.prepare(tokens))

    dispatch(wide)
    dispatch(small)
    with pytest.raises(RuntimeError, match="2 calls in flight, which is its limit for all layers"):
        dispatch(small_too)
    dispatch(tall)


def test_a_wait_that_runs_out_in_one_backend_fails_the_others_in_its_slots() -> None:
    shapes = make_shapes(2)
    groups = virtual_groups(2, CPU)
    limits = SymmMemLimits(wait_limit_s=0.3)
    other = make_virtual_ranks(shapes[0], CPU, limits, groups)[0]
    waiting = make_virtual_ranks(shapes[2], CPU, limits, groups)[0]
    assert waiting.slots is other.slots
    tokens = stress_tokens(shapes[2], (3, 2), 0, 0)
    waiting.dispatch(waiting.prepare(tokens)).wait()
    with pytest.raises(RankFailure, match="EP rank 1 in dispatch of call 1"):
        other.dispatch(other.prepare(stress_tokens(shapes[0], (3, 2), 0, 0)))
