"""Our kernels as torch operators: what they declare, and that nobody pays who does not look."""

import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ep_runtime.all2all.base import BackendShape
from ep_runtime.all2all.symm_mem import SymmMemBackend
from ep_runtime.kernels.base import (
    Activation,
    BatchedExpertInput,
    ExpertsShape,
    ExpertWeights,
    MonolithicContext,
    RoutingSpec,
    StandardExpertInput,
)
from ep_runtime.kernels.experts_operators import (
    flatten_tensors,
    rebuild_tensors,
    run_experts,
    run_monolithic_experts,
)
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.observed import handle_of, is_observed, owner_of
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.placement import place_experts
from ep_runtime.stream_recorder import StreamRecorder
from tests.all2all.virtual_ranks import make_virtual_ranks, stress_tokens, to_device

E, K, H, WIDTH = 4, 2, 32, 16
needs_interpreter = pytest.mark.skipif(
    not is_interpreting(), reason="Triton compiles for CUDA in this process"
)


class Watcher(TorchDispatchMode):
    """Notes every operator, as the sanitizer does, with what its schema says is written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = {
            argument.name: value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.seen[func._schema.name] = written
        return func(*args, **(kwargs or {}))

    @property
    def ours(self) -> list[str]:
        return [name for name in self.seen if name.startswith("ep_runtime::")]


class LaunchWatcher(Watcher):
    sees_launches = True


def shape() -> ExpertsShape:
    return ExpertsShape(E, H, WIDTH, K, Activation(), torch.float32)


def weights(device: torch.device) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * WIDTH, H, generator=generator) / H**0.5
    w2 = torch.randn(E, H, WIDTH, generator=generator) / WIDTH**0.5
    return ExpertWeights(w13.to(device), w2.to(device))


def standard(device: torch.device, num_rows: int = 5) -> StandardExpertInput:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, H, generator=generator)
    ids = torch.randint(-1, E, (num_rows, K), generator=generator).int()
    return StandardExpertInput(
        rows.to(device), ids.to(device), torch.rand(num_rows, K, generator=generator).to(device)
    )


def batched(device: torch.device) -> BatchedExpertInput:
    rows = torch.randn(E, 3, H, generator=torch.Generator().manual_seed(1))
    counts = torch.tensor([3, 0, 1, 2], dtype=torch.int32)
    rows[torch.arange(3) >= counts[:, None]] = 0
    return BatchedExpertInput(rows.to(device), counts.to(device))


def arena(experts: Any, device: torch.device) -> Workspace:
    workspace = Workspace(device, experts.workspace_bytes(16))
    workspace._block.fill_(255)
    return workspace


# --- who looks ---


def test_a_call_is_observed_by_modes_fake_tensors_and_compilation_and_else_not() -> None:
    x = torch.zeros(2)
    assert not is_observed(x)
    assert not is_observed(torch.nn.Parameter(x))
    with Watcher():
        assert is_observed(x)
        with LaunchWatcher():
            assert is_observed(x)
    for mode_that_watches_launches in (LaunchWatcher(), StreamRecorder()):
        with mode_that_watches_launches:
            assert not is_observed(x)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert is_observed(x)
    assert is_observed(fake)
    seen: list[bool] = []

    def note(t: Tensor) -> Tensor:
        seen.append(is_observed(t))
        return t + 1

    torch.func.functionalize(note)(x)
    assert seen == [True]

    def ask(t: Tensor) -> Tensor:
        return t + (1 if is_observed(t) else 0)

    assert torch.compile(ask, backend="eager", fullgraph=True)(x).tolist() == [1, 1]


def test_a_handle_names_its_owner_as_long_as_that_lives() -> None:
    owner = TritonExperts(shape())
    handle = handle_of(owner)
    assert handle == handle_of(owner)
    assert owner_of(handle) is owner
    del owner
    with pytest.raises(LookupError, match="of a kernel that is gone"):
        owner_of(handle)


def test_asking_takes_less_than_two_microseconds() -> None:
    x = torch.zeros(2)
    seconds = min(timeit.repeat(lambda: is_observed(x), number=2000, repeat=5)) / 2000
    assert seconds < 2e-6


# --- experts ---


def test_weights_are_flattened_and_rebuilt() -> None:
    a, b, c = (torch.zeros(n) for n in (1, 2, 3))
    for given in (
        ExpertWeights(a, b),
        ExpertWeights(a, b, c, a),
        ExpertWeights(a, b, w13_quant=QuantParameters(c), w2_quant=QuantParameters(a, b, c, a)),
    ):
        flat = flatten_tensors(given)
        rebuilt = rebuild_tensors(given, [tensor + 1 for tensor in flat])
        pairs = zip(flat, flatten_tensors(rebuilt), strict=True)
        assert all(torch.equal(x + 1, y) for x, y in pairs)
        assert (rebuilt.w13_bias is None) == (given.w13_bias is None)
        assert type(rebuilt.w13_quant) is type(given.w13_quant)


@pytest.mark.parametrize("form", ["standard", "batched"])
def test_a_watcher_sees_one_operator_that_writes_the_workspace(
    form: str, device: torch.device
) -> None:
    cls = TritonExperts if form == "standard" else TritonBatchedExperts
    given = standard(device) if form == "standard" else batched(device)
    experts: Any = cls(shape())
    held = weights(device)
    wanted = experts.run(given, held, arena(experts, device))
    workspace = arena(experts, device)
    with Watcher() as watcher, workspace.frame():
        output = run_experts(experts, given, held, workspace)
    if form == "standard":
        assert torch.equal(output, wanted)
    else:
        counts = given.num_rows_per_expert  # type: ignore[union-attr]
        here = torch.arange(3, device=device) < counts[:, None]
        assert torch.equal(output[here], wanted[here])
    assert watcher.ours == ["ep_runtime::run_experts"]
    assert list(watcher.seen) == ["aten::slice", "ep_runtime::run_experts"]
    written = watcher.seen["ep_runtime::run_experts"]
    assert list(written) == ["workspace"]
    assert written["workspace"].data_ptr() == workspace.rest.data_ptr()
    assert bool((workspace.rest != 255).any()), "the scratch was taken from that workspace"


def test_torch_code_is_seen_as_it_is() -> None:
    device = torch.device("cpu")
    experts = ReferenceExperts(shape())
    with Watcher() as watcher:
        run_experts(experts, standard(device), weights(device), Workspace(device))
    assert watcher.ours == []
    assert len(watcher.seen) > 3


def test_nobody_looks_and_nothing_is_dispatched(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    experts = TritonExperts(shape())
    monkeypatch.setattr(experts, "run", lambda *arguments: arguments)
    given, held, workspace = standard(device), weights(device), Workspace(device)
    monkeypatch.setattr(torch.ops.ep_runtime, "run_experts", None)
    assert run_experts(experts, given, held, workspace) == (given, held, workspace)


def _operands(experts: Any, held: ExpertWeights, device: torch.device) -> tuple[Any, ...]:
    given = standard(device)
    return (
        given.hidden_states,
        None,
        [given.topk_ids, given.topk_weights, None],
        flatten_tensors(held),
        arena(experts, device).rest,
        None,
        handle_of(experts),
        handle_of(held),
    )


def test_torchs_own_check_of_the_operator(device: torch.device) -> None:
    """Schema, autograd registration, fake tensors, functionalisation, dynamic shapes."""
    experts = TritonExperts(shape())
    held = weights(device)
    operands = _operands(experts, held, device)
    torch.library.opcheck(torch.ops.ep_runtime.run_experts.default, operands)


def test_fake_tensors_have_the_shape_and_dtype_of_the_real_ones() -> None:
    experts = TritonExperts(shape())
    cpu = torch.device("cpu")
    given, held = standard(cpu), weights(cpu)
    with FakeTensorMode() as mode:
        fake = StandardExpertInput(
            mode.from_tensor(given.hidden_states),
            mode.from_tensor(given.topk_ids),
            mode.from_tensor(given.topk_weights),
        )
        w13, w2 = mode.from_tensor(held.w13), mode.from_tensor(held.w2)
        fake_weights = ExpertWeights(w13, w2)
        output = run_experts(experts, fake, fake_weights, Workspace(cpu, 1024))
    assert (output.shape, output.dtype, output.device) == ((5, H), torch.float32, cpu)


def test_a_compiled_function_around_a_kernel_is_one_graph(device: torch.device) -> None:
    experts = TritonExperts(shape())
    handle, block = handle_of(experts), arena(experts, device).rest
    held, given = weights(device), standard(device)
    flat, layout = flatten_tensors(held), handle_of(held)
    run = torch.ops.ep_runtime.run_experts

    def call(rows: Tensor, ids: Tensor, topk_weights: Tensor, block: Tensor) -> Tensor:
        routing = [ids, topk_weights, None]
        output: Tensor = run(rows, None, routing, flat, block, None, handle, layout)
        return 2 * output

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    operands = (given.hidden_states, given.topk_ids, given.topk_weights, block)
    assert torch.equal(compiled(*operands), call(*operands))


def test_a_monolithic_kernels_operator_hands_everything_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = torch.device("cpu")
    taken: dict[str, Any] = {}

    class Kernel:
        capabilities = TritonExperts.capabilities

        def run(self, rows: Tensor, logits: Tensor, *, context: Any, workspace: Workspace) -> Any:
            taken.update(context=context, block=workspace.rest)
            context.tokens_per_expert.add_(1)
            return rows + logits.sum()

    kernel: Any = Kernel()
    context = MonolithicContext(
        routing=RoutingSpec(E, K, "sigmoid", routed_scaling_factor=2.5),
        weights=weights(cpu),
        expert_map=torch.arange(E, dtype=torch.int32),
        tokens_per_expert=torch.zeros(E, dtype=torch.int64),
        correction_bias=None,
    )
    rows, logits, workspace = torch.ones(3, H), torch.ones(3, E), Workspace(cpu, 512)
    with Watcher() as watcher:
        output = run_monolithic_experts(kernel, rows, logits, context=context, workspace=workspace)
    assert torch.equal(output, rows + 3 * E)
    assert taken["context"].routing == context.routing
    assert taken["block"].data_ptr() == workspace.rest.data_ptr()
    assert context.tokens_per_expert.tolist() == [1] * E
    written = watcher.seen["ep_runtime::run_monolithic_experts"]
    assert list(written) == ["tokens_per_expert", "workspace"]


# --- symm_mem ---


@contextmanager
def one_rank(device: torch.device) -> Iterator[tuple[SymmMemBackend, Any]]:
    placement = place_experts("linear", E, 1)
    backend_shape = BackendShape(E, H, K, torch.float32, 8, placement)
    backend = make_virtual_ranks(backend_shape, device)[0]
    yield backend, to_device(stress_tokens(backend_shape, (5,), 0, 0), device)
    backend.close()


def call(backend: SymmMemBackend, tokens: Any, joins: bool) -> Tensor:
    received, handle = backend.dispatch(backend.prepare(tokens)).wait()
    combining = backend.combine(received.hidden_states.clone(), handle)
    if joins:
        combining.join()
    return combining.wait(tokens.hidden_states)


@pytest.mark.parametrize("joins", [False, True])
def test_a_watcher_sees_each_launch_of_symm_mem_and_what_it_writes(
    joins: bool, device: torch.device
) -> None:
    with one_rank(device) as (backend, tokens):
        wanted = call(backend, tokens, joins)
        with Watcher() as watcher:
            output = call(backend, tokens, joins)
        assert torch.equal(output, wanted)
        names = ["put_tokens", "wait_for_dispatch", "put_results", "sum_results"]
        # A CPU waits by itself, in slices.
        names[3:3] = ["wait_for_results"] if joins or device.type == "cpu" else []
        assert watcher.ours == [f"ep_runtime::symm_{name}" for name in names]
        slot = backend.channels[0]
        received = watcher.seen["ep_runtime::symm_put_tokens"]["received"]
        starts = [tensor.data_ptr() for tensor in received]
        regions = (slot.rows, slot.topk_ids, slot.topk_weights, slot.origins)
        assert starts == [region.data_ptr() for region in regions]


@needs_interpreter
def test_torchs_own_check_of_the_sum() -> None:
    cpu = torch.device("cpu")
    with one_rank(cpu) as (backend, tokens):
        call(backend, tokens, joins=False)
        slot = backend.channels[0]
        arrived = [slot.results.clone(), slot.combine_arrivals.clone()]
        operands = (tokens.hidden_states, tokens.topk_ids, None, arrived, 0, True, handle_of(slot))
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(
            torch.ops.ep_runtime.symm_sum_results.default, operands, test_utils=checks
        )
