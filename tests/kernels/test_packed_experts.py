"""The triton experts on packed weights against the reference on the same stored tensors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels import packed_schedule
from ep_runtime.kernels.base import (
    ActivationKind,
    BatchedExpertInput,
    ExpertInput,
    ExpertsShape,
    ModularExperts,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.expert_projections import num_parts_of
from ep_runtime.kernels.hopper_packed_schedule import choose_tiles_of_packed
from ep_runtime.kernels.quant.fp8_rows import quantize_rows_reference
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.kernels.packed_cases import MXFP4, NVFP4, PackedCase, int4, int8
from tests.tolerances import assert_close

SMALL = ExpertsCase("small", 19, 3, 160, 72, 3, dtype=torch.bfloat16)
FLOAT32 = replace(SMALL, dtype=torch.float32)
BIASED = replace(SMALL, has_bias=True)
ZEROS = int4(64, has_zero_points=True)
CASES = [
    PackedCase("int4", SMALL, int4()),
    PackedCase("int4_zeros_float32", FLOAT32, ZEROS),
    PackedCase("int4_groups_of_32_bias", BIASED, int4(32)),
    PackedCase("int4_a_row_relu2", replace(BIASED, kind=ActivationKind.RELU2), int4(None)),
    PackedCase("int8_float16", replace(SMALL, dtype=torch.float16), int8(32)),
    PackedCase("int8_zeros_float32", FLOAT32, int8(has_zero_points=True)),
    PackedCase(
        "mxfp4_swigluoai",
        replace(BIASED, intermediate_size=96, kind=ActivationKind.SWIGLUOAI, limit=7.0),
        MXFP4,
    ),
    PackedCase("nvfp4_bias", replace(BIASED, intermediate_size=96), NVFP4),
]
ONE = CASES[0]


def batched_input(case: ExpertsCase, device: torch.device) -> BatchedExpertInput:
    """`case.num_rows` is the capacity; NaN past a count."""
    capacity, counts = case.num_rows, [case.num_rows, 0, 1]
    rows = case._random(3, capacity, case.hidden_size, salt=5).to(device, case.dtype)
    for expert, count in enumerate(counts):
        rows[expert, count:] = torch.nan
    return BatchedExpertInput(rows, torch.tensor(counts, dtype=torch.int32, device=device))


def run(kernel: ModularExperts, packed: PackedCase, expert_input: ExpertInput) -> Tensor:
    """In a workspace of exactly the promised size, all NaN, which must suffice.

    Torch's deterministic mode fills the output with NaN, so a row that was not computed shows.
    """
    rows = expert_input.hidden_states
    workspace = poisoned_workspace(rows.device, kernel.workspace_bytes(rows.shape[-2]))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        prepared = kernel.prepare_weights(packed.weights(rows.device))
        output = kernel.run(expert_input, prepared, workspace)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not workspace.overflowed
    return output


def reference(packed: PackedCase, expert_input: ExpertInput) -> Tensor:
    device = expert_input.hidden_states.device
    weights = packed.weights(device)
    return ReferenceExperts(packed.shape).run(expert_input, weights, Workspace(device))


@pytest.mark.parametrize("packed", CASES, ids=str)
def test_equals_the_reference(packed: PackedCase, device: torch.device) -> None:
    """Rows of every kind: with local slots, with some (-1 elsewhere), with none."""
    expert_input = packed.case.expert_input(device)
    expert_input.topk_ids[1] = -1
    expert_input.hidden_states[1] = torch.nan
    output = run(TritonExperts(packed.shape), packed, expert_input)
    assert output.dtype is packed.case.dtype
    assert (output[1] == 0).all()
    assert_close(output, reference(packed, expert_input))


@pytest.mark.parametrize("packed", CASES[1:4:2], ids=str)
def test_batched_rows_equal_the_reference(packed: PackedCase, device: torch.device) -> None:
    expert_input = batched_input(packed.case, device)
    output = run(TritonBatchedExperts(packed.shape), packed, expert_input)
    for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
        assert output[expert, count:].isnan().all(), "wrote past an expert's count"
        output[expert, count:] = 0
    assert_close(output, reference(packed, expert_input))


@pytest.mark.parametrize("height", packed_schedule.PACKED_HEIGHTS[1:])
def test_a_call_of_another_height_gives_the_same(height: int, device: torch.device) -> None:
    """On the same weights; rows that the host expects more of than there are."""
    expert_input = ONE.case.expert_input(device)
    kernel, num_rows = TritonExperts(ONE.shape), ONE.case.num_rows
    prepared = kernel.prepare_weights(ONE.weights(device))
    outputs = []
    for num_source_rows in (2, height - 14):
        told = replace(expert_input, num_source_rows=num_source_rows)
        workspace = poisoned_workspace(device, kernel.workspace_bytes(num_rows))
        outputs.append(kernel.run(told, prepared, workspace))
    tiles = packed_schedule.choose_packed_tiles(num_rows, height - 14, ONE.shape)
    assert tiles.block_m == height
    assert_close(outputs[0], outputs[1])


# Of its second projection 2 experts have a block of columns each, over 20 blocks of K in int8.
FEW_ITEMS = PackedCase(
    "few_items", ExpertsCase("few_items", 3, 2, 96, 2560, 2, dtype=torch.bfloat16), int8()
)


def test_the_second_projection_of_few_items_is_split(device: torch.device) -> None:
    expert_input = FEW_ITEMS.case.expert_input(device)
    assert num_parts_of(choose_tiles_of_packed(3, None, FEW_ITEMS.shape, device)) == 2
    output = run(TritonExperts(FEW_ITEMS.shape), FEW_ITEMS, expert_input)
    assert_close(output, reference(FEW_ITEMS, expert_input))


@pytest.mark.parametrize(
    ("sizes", "num_rows", "block_n", "parts"),
    [
        ((8, 4096, 14336, 2), 1, 128, 4),  # 2 experts x 32 blocks of columns, 112 of K
        ((8, 4096, 14336, 2), 1, 64, 4),
        ((8, 4096, 14336, 2), 2, 64, 2),
        ((8, 4096, 14336, 2), 4, 64, 1),
        ((8, 4096, 14336, 2), 0, 128, 1),
        ((8, 512, 2048, 2), 1, 128, 2),  # 16 blocks of K, 8 a part
        ((8, 512, 1920, 2), 1, 128, 1),
        ((1, 512, 14336, 1), 1 << 11, 128, 1),  # 129 tiles
        ((1, 128, 14336, 1), 1 << 10, 128, 4),
        ((1, 128, 14336, 1), 1 << 12, 128, 2),  # 4 MiB
    ],
)
def test_how_many_parts_there_are(
    sizes: tuple[int, int, int, int], num_rows: int, block_n: int, parts: int
) -> None:
    num_experts, hidden, inner, top_k = sizes
    case = ExpertsCase("", num_rows, num_experts, hidden, inner, top_k, dtype=torch.bfloat16)
    shape = PackedCase("", case, int8()).shape
    down = packed_schedule.PackedTiles(block_n, num_warps=4, num_stages=3)
    tiles = packed_schedule.PackedExpertsTiles(16, down, down)
    split = packed_schedule.split_down(tiles, shape, num_rows * top_k)
    assert split == replace(tiles, split_k=parts)
    num_bytes = num_rows * top_k * hidden * 4 * parts
    assert parts == 1 or num_bytes <= packed_schedule.split_bytes(num_rows * top_k, shape)


def test_batched_rows_are_never_split(device: torch.device) -> None:
    tiles = choose_tiles_of_packed(3, None, FEW_ITEMS.shape, device, is_batched=True)
    assert num_parts_of(tiles) == 1


def test_rows_from_num_rows_on_are_never_read(device: torch.device) -> None:
    expert_input = ONE.case.expert_input(device)
    expected = reference(ONE, expert_input)
    expert_input.hidden_states[5:] = torch.nan
    bound = torch.tensor([5], dtype=torch.int32, device=device)
    output = run(TritonExperts(ONE.shape), ONE, replace(expert_input, num_rows=bound))
    assert_close(output[:5], expected[:5])
    assert (output[5:] == 0).all()


def test_workspace_bytes_never_shrink_with_more_rows() -> None:
    for kernel in (TritonExperts(ONE.shape), TritonBatchedExperts(ONE.shape)):
        sizes = [kernel.workspace_bytes(rows) for rows in range(0, 300)]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize("kernel", [TritonExperts, TritonBatchedExperts])
def test_what_no_packed_layout_fits_is_refused_by_its_key(kernel: type[ModularExperts]) -> None:
    def fault(scheme: QuantScheme, shape: ExpertsShape = ONE.shape) -> str | None:
        return kernel.shape_fault(replace(shape, scheme=scheme))

    ordered = QuantScheme(WeightScheme.INT4, 128, has_input_order=True)
    assert "quantization.has_input_order is true (act-order)" in str(fault(ordered))
    assert "quantization.group_size (96) is not among" in str(fault(int8(96)))
    assert fault(MXFP4) is None
    assert fault(QuantScheme(WeightScheme.FP8_BLOCK)) is None


def test_fp8_rows_are_refused(device: torch.device) -> None:
    expert_input = ONE.case.expert_input(device)
    values, scales = quantize_rows_reference(expert_input.hidden_states)
    in_fp8 = StandardExpertInput(
        values, expert_input.topk_ids, expert_input.topk_weights, scales=scales
    )
    with pytest.raises(PlanError, match="int4_w4a16 they must be in the layer's dtype"):
        run(TritonExperts(ONE.shape), ONE, in_fp8)


# CUDA only: what the interpreter cannot show.

LARGE = ExpertsCase("large", 512, 16, 512, 384, 4, dtype=torch.bfloat16)
ON_CUDA = [PackedCase("int4", LARGE, int4()), PackedCase("mxfp4", LARGE, MXFP4)]


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [int4(), int8(32), MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("num_rows", [1, 64, 256, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_height_equals_the_reference(
    scheme: QuantScheme, num_rows: int, dtype: torch.dtype
) -> None:
    case = replace(LARGE, num_rows=num_rows, dtype=dtype)
    packed = PackedCase("cuda", case, scheme)
    expert_input = case.expert_input(torch.device("cuda"))
    output = run(TritonExperts(packed.shape), packed, expert_input)
    assert_close(output, reference(packed, expert_input))


@pytest.mark.gpu
@pytest.mark.parametrize("packed", ON_CUDA, ids=str)
def test_graph_replay_equals_an_eager_call(packed: PackedCase) -> None:
    device, case = torch.device("cuda"), packed.case
    kernel = TritonExperts(packed.shape)
    weights = kernel.prepare_weights(packed.weights(device))
    workspace = Workspace(device, kernel.workspace_bytes(case.num_rows))
    bound = torch.tensor([case.num_rows], dtype=torch.int32, device=device)
    static = replace(case.expert_input(device), num_rows=bound)
    kernel.run(static, weights, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.run(static, weights, workspace)
    for seed, num_rows in ((1, 512), (2, 77), (3, 0)):
        fresh = replace(case, seed=seed).expert_input(device)
        static.hidden_states.copy_(fresh.hidden_states)
        static.topk_ids.copy_(fresh.topk_ids)
        static.topk_weights.copy_(fresh.topk_weights)
        bound.fill_(num_rows)
        workspace._block.fill_(255)
        graph.replay()
        eager = kernel.run(replace(fresh, num_rows=bound), weights, Workspace(device))
        assert torch.equal(captured, eager)


@pytest.mark.gpu
def test_two_streams_do_not_disturb_each_other() -> None:
    """One object, a workspace for each stream, both poisoned: every result is bit-equal."""
    device, layers = torch.device("cuda"), []
    kernel = TritonExperts(ON_CUDA[0].shape)
    for seed in (1, 2):
        packed = replace(ON_CUDA[0], case=replace(LARGE, seed=seed))
        weights = kernel.prepare_weights(packed.weights(device))
        layers.append((packed.case.expert_input(device), weights))
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
