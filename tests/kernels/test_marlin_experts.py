"""Experts over the fused Marlin GEMM: its stand-in on a CPU; on CUDA, the package."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels import row_passes
from ep_runtime.kernels.activate_slots import activate_slots, activate_slots_reference
from ep_runtime.kernels.base import (
    ActivationKind,
    BatchedExpertInput,
    ExpertInput,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.marlin_experts import HEIGHTS, MarlinExperts, choose_height
from ep_runtime.kernels.marlin_package import bind_marlin
from ep_runtime.kernels.quant.fp8_rows import quantize_rows_reference
from ep_runtime.kernels.quant.scheme import QuantScheme
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.workspace import Workspace
from tests import fake_marlin
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.kernels.marlin_cases import CASE, ONE, ORDERED, weights_of
from tests.kernels.packed_cases import MXFP4, PackedCase, int4, int8
from tests.tolerances import assert_close

CPU = torch.device("cpu")
BIASED = replace(CASE, has_bias=True)
CASES = [
    ONE,
    PackedCase(
        "int4_zeros_float16", replace(CASE, dtype=torch.float16), int4(32, has_zero_points=True)
    ),
    PackedCase("int4_a_row_bias", BIASED, int4(None)),
    PackedCase(
        "int4_zeros_a_row_gelu",
        replace(CASE, kind=ActivationKind.GELU),
        int4(None, has_zero_points=True),
    ),
    PackedCase("int4_act_order", CASE, ORDERED),
    PackedCase("int4_act_order_zeros", CASE, replace(ORDERED, has_zero_points=True)),
    PackedCase(
        "int8_relu2_bias",
        replace(BIASED, kind=ActivationKind.RELU2, intermediate_size=256),
        int8(64),
    ),
    PackedCase("int8_a_row", CASE, int8(None)),
    PackedCase("int8_act_order", CASE, replace(int8(64), has_input_order=True)),
    PackedCase(
        "mxfp4_swigluoai_bias", replace(BIASED, kind=ActivationKind.SWIGLUOAI, limit=7.0), MXFP4
    ),
    PackedCase("one_row", replace(CASE, num_rows=1), int4(64)),
    PackedCase("one_expert", replace(CASE, num_experts=1, top_k=1), int4(64)),
    PackedCase("more_experts_than_slots", replace(CASE, num_rows=2, num_experts=9), int4(64)),
    PackedCase(
        "many_rows", replace(CASE, num_rows=300, hidden_size=128, intermediate_size=64), int4(64)
    ),
]


@pytest.fixture(autouse=True)
def package(request: pytest.FixtureRequest) -> Iterator[None]:
    """The stand-in on a CPU, the real one on CUDA."""
    on_cuda = "gpu" in request.keywords or (
        "device" in request.fixturenames and request.getfixturevalue("device").type == "cuda"
    )
    if not on_cuda:
        with fake_marlin.registered():
            yield
        return
    try:
        bind_marlin("marlin", torch.device("cuda"))
    except PlanError as fault:
        pytest.skip(str(fault))
    yield


def run(
    packed: PackedCase, expert_input: ExpertInput, workspace: Workspace | None = None
) -> Tensor:
    """In a workspace of exactly the promised size, all NaN, which must suffice, or the one given.

    Torch's deterministic mode fills the output with NaN, so a row that was not computed shows.
    """
    kernel, rows = MarlinExperts(packed.shape), expert_input.hidden_states
    arena = workspace or poisoned_workspace(rows.device, kernel.workspace_bytes(rows.shape[-2]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        prepared = kernel.prepare_weights(weights_of(packed, rows.device))
        output = kernel.run(expert_input, prepared, arena)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not getattr(arena, "overflowed", False)
    assert not kernel._locks.any()
    assert (output.dtype, output.shape) == (packed.case.dtype, rows.shape)
    assert output.is_contiguous()
    return output


def reference(packed: PackedCase, expert_input: ExpertInput) -> Tensor:
    device = expert_input.hidden_states.device
    weights = weights_of(packed, device)
    return ReferenceExperts(packed.shape).run(expert_input, weights, Workspace(device))


@pytest.mark.parametrize("packed", CASES, ids=str)
def test_equals_the_reference(packed: PackedCase, device: torch.device) -> None:
    """Rows of every kind: with local slots, with some (-1 elsewhere), with none."""
    expert_input = packed.case.expert_input(device)
    if packed.case.num_rows > 1:
        expert_input.topk_ids[1] = -1
        expert_input.hidden_states[1] = torch.nan
    output = run(packed, expert_input)
    if packed.case.num_rows > 1:
        assert (output[1] == 0).all()
    assert_close(output, reference(packed, expert_input))


@pytest.mark.parametrize("num_rows", [0, 1, 7, 19])
def test_rows_from_num_rows_on_are_never_read(num_rows: int, device: torch.device) -> None:
    expert_input = CASE.expert_input(device)
    expected = reference(ONE, expert_input)[:num_rows]
    expert_input.hidden_states[num_rows:] = torch.nan
    bound = torch.tensor([num_rows], dtype=torch.int32, device=device)
    output = run(ONE, replace(expert_input, num_rows=bound))
    if num_rows:
        assert_close(output[:num_rows], expected)
    assert torch.equal(output[num_rows:], torch.zeros_like(output[num_rows:]))


@pytest.mark.parametrize("ids", [-1, 2, 3])
def test_all_slots_elsewhere_or_on_one_expert(ids: int, device: torch.device) -> None:
    """Id 3 of 3 experts is none of them. An expert whose weights are NaN has then no slot."""
    expert_input = CASE.expert_input(device)
    expert_input.topk_ids.fill_(ids)
    expert_input.topk_weights.fill_(0.25)
    kernel, weights = MarlinExperts(ONE.shape), ONE.weights(device)
    assert weights.w13_quant is not None
    weights.w13_quant.scales[:2] = torch.nan
    workspace = poisoned_workspace(device, kernel.workspace_bytes(CASE.num_rows))
    output = kernel.run(expert_input, kernel.prepare_weights(weights), workspace)
    if ids == 2:
        expected = ReferenceExperts(ONE.shape).run(expert_input, weights, Workspace(device))
        assert_close(output, expected)
    else:
        assert torch.equal(output, torch.zeros_like(output))


def test_a_nan_in_one_row_stays_in_that_row(device: torch.device) -> None:
    expert_input = CASE.expert_input(device)
    expert_input.topk_ids.fill_(1)
    expert_input.topk_weights.fill_(1.0)
    expected = reference(ONE, expert_input)
    expert_input.hidden_states[4] = torch.nan
    output = run(ONE, expert_input)
    assert output[4].isnan().all()
    assert_close(torch.cat([output[:4], output[5:]]), torch.cat([expected[:4], expected[5:]]))


def test_weights_of_a_slot_stay_in_float32(device: torch.device) -> None:
    """1 and 1 - 2^-9, which is 1 in bfloat16: a 512th of the expert's result is left."""
    case = replace(CASE, num_rows=1, top_k=2)
    packed = replace(ONE, case=case)
    expert_input = case.expert_input(device)
    expert_input.topk_ids.fill_(0)
    expert_input.topk_weights.copy_(torch.tensor([[1.0, 2.0**-9 - 1]]))
    output = run(packed, expert_input)
    expert_input.topk_weights.copy_(torch.tensor([[1.0, 0.0]]))
    assert torch.equal(output * 512, run(packed, expert_input))


def test_rows_in_several_passes_equal_one_pass(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of other heights sum in another order."""
    expert_input = CASE.expert_input(device)
    whole = run(ONE, expert_input)
    monkeypatch.setattr(row_passes, "MAX_SLOTS_PER_PASS", 8 * CASE.top_k)
    assert_close(run(ONE, expert_input), whole)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
        lambda x: torch.cat([x[0, :1], x.flatten()])[1:].view(x.shape),
    ],
    ids=["every_second_column", "transposed", "slice_of_a_wide_row", "two_bytes_off"],
)
def test_strided_rows(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    expert_input = CASE.expert_input(device)
    strided = replace(expert_input, hidden_states=view(expert_input.hidden_states))
    assert torch.equal(run(ONE, strided), run(ONE, expert_input))


def test_no_rows_and_no_local_experts(device: torch.device) -> None:
    none = replace(ONE, case=replace(CASE, num_rows=0))
    assert run(none, none.case.expert_input(device)).shape == (0, 256)
    expert_input = CASE.expert_input(device)
    expert_input.topk_ids.fill_(-1)
    kernel = MarlinExperts(replace(ONE.shape, num_local_experts=0))
    weights = kernel.prepare_weights(ONE.weights(device))
    weights = replace(weights, w13=weights.w13[:0], w2=weights.w2[:0])
    output = kernel.run(expert_input, weights, poisoned_workspace(device, 0))
    assert torch.equal(output, torch.zeros_like(output))


def test_inputs_and_stored_weights_are_never_written(device: torch.device) -> None:
    packed = CASES[5]
    expert_input, weights = packed.case.expert_input(device), weights_of(packed, device)
    assert weights.w2_quant is not None
    given = [expert_input.hidden_states, expert_input.topk_weights, weights.w13, weights.w2]
    given += list(weights.w2_quant.tensors())
    before = [tensor.clone() for tensor in given]
    kernel = MarlinExperts(packed.shape)
    kernel.run(expert_input, kernel.prepare_weights(weights), Workspace(device))
    for tensor, copy in zip(given, before, strict=True):
        assert torch.equal(tensor.nan_to_num(), copy.nan_to_num())


def test_workspace_bytes_never_shrink_with_more_rows() -> None:
    kernel = MarlinExperts(ONE.shape)
    sizes = [kernel.workspace_bytes(num_rows) for num_rows in range(0, 600, 7)]
    assert sizes[0] == 0
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    ("num_source_rows", "height"), [(None, 32), (1, 8), (7, 8), (8, 16), (40, 64), (900, 64)]
)
def test_the_height_goes_by_the_rows_that_an_expert_expects(
    num_source_rows: int | None, height: int, device: torch.device
) -> None:
    """Top 3 of 3 experts: as many slots an expert as there are rows."""
    assert choose_height(19, num_source_rows, ONE.shape) == height
    assert height in HEIGHTS
    expert_input = replace(CASE.expert_input(device), num_source_rows=num_source_rows)
    output = run(ONE, expert_input)
    if device.type == "cpu":  # the package does not tell what it was asked
        assert [call["moe_block_size"] for call in fake_marlin.calls] == [height] * 2
    assert_close(output, reference(ONE, expert_input))


@pytest.mark.parametrize("kind", list(ActivationKind))
@pytest.mark.parametrize("num_rows", [None, 5])
def test_the_activation_equals_its_definition(
    kind: ActivationKind, num_rows: int | None, device: torch.device
) -> None:
    """And writes the slots of this rank alone."""
    case = replace(CASE, kind=kind, limit=0.7, intermediate_size=300)
    expert_input = case.expert_input(device)
    if num_rows is not None:
        bound = torch.tensor([num_rows], dtype=torch.int32, device=device)
        expert_input = replace(expert_input, num_rows=bound)
    activation, num_slots = case.shape.activation, 19 * 3
    columns = 600 if activation.is_gated else 300
    gate_up = case._random(num_slots, columns, salt=8).to(device, torch.bfloat16)
    out = torch.full((num_slots, 300), torch.nan, dtype=torch.bfloat16, device=device)
    expected = out.clone()
    activate_slots(gate_up, expert_input, activation, num_local_experts=3, out=out)
    activate_slots_reference(gate_up, expert_input, activation, num_local_experts=3, out=expected)
    assert torch.equal(out.isnan(), expected.isnan())
    assert_close(out.nan_to_num(), expected.nan_to_num().float())


def test_another_format_and_fp8_rows_are_refused() -> None:
    rows = torch.zeros(3, 4, 256, dtype=torch.bfloat16)
    batched = BatchedExpertInput(rows, torch.ones(3, dtype=torch.int32))
    with pytest.raises(PlanError, match="takes the standard format"):
        run(ONE, batched)
    expert_input = CASE.expert_input(CPU)
    values, scales = quantize_rows_reference(expert_input.hidden_states)
    in_fp8 = StandardExpertInput(
        values, expert_input.topk_ids, expert_input.topk_weights, scales=scales
    )
    with pytest.raises(PlanError, match="set dispatch_dtype: model"):
        run(ONE, in_fp8)


def test_weights_that_were_not_prepared_are_refused() -> None:
    with pytest.raises(PlanError, match="marlin runs on weights that its prepare_weights"):
        MarlinExperts(ONE.shape).run(CASE.expert_input(CPU), ONE.weights(CPU), Workspace(CPU))


def test_each_object_has_locks_of_its_own() -> None:
    first, second = MarlinExperts(ONE.shape), MarlinExperts(ONE.shape)
    for kernel in (first, second):
        kernel.prepare_weights(ONE.weights(CPU))
    assert first._locks.numel() == 4 * 132
    assert first._locks.data_ptr() != second._locks.data_ptr()


# --- CUDA only ---

LARGE = ExpertsCase("large", 512, 16, 512, 384, 4, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme",
    [int4(), int4(has_zero_points=True), int8(), MXFP4, replace(int4(), has_input_order=True)],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [1, 64, 256, 4096])
def test_every_height_equals_the_reference(scheme: QuantScheme, num_rows: int) -> None:
    packed = PackedCase("cuda", replace(LARGE, num_rows=num_rows), scheme)
    expert_input = packed.case.expert_input(torch.device("cuda"))
    assert_close(run(packed, expert_input), reference(packed, expert_input))


@pytest.mark.gpu
def test_graph_replay_equals_an_eager_call() -> None:
    device, packed = torch.device("cuda"), PackedCase("int4", LARGE, int4())
    kernel = MarlinExperts(packed.shape)
    weights = kernel.prepare_weights(packed.weights(device))
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
