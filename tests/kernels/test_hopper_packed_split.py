"""Split K of Hopper's packed second projection: rule, memory, sums, and who takes which part.

The kernel is CUDA only; here its producer and its epilogue run as plain Python, on stand-ins for
what they take from Gluon. tests/kernels/test_hopper_packed_gemm.py has its results.
"""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels import (
    expert_projections,
    hopper_packed_epilogue,
    hopper_packed_gemm,
    hopper_packed_kernel,
    hopper_packed_schedule,
    triton_experts,
)
from ep_runtime.kernels.align_blocks import align_slots_reference
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.expert_projections import projections_bytes
from ep_runtime.kernels.grouped_gemm import GemmRows, project_down_reference
from ep_runtime.kernels.hopper_packed_gemm import (
    HopperPackedSchedule,
    columns_of_part,
    project_down_hopper_packed,
)
from ep_runtime.kernels.hopper_packed_layout import hopper_words, pack_hopper_weights
from ep_runtime.kernels.hopper_packed_products import AT_SPLIT
from ep_runtime.kernels.hopper_packed_schedule import (
    MAX_PARTS_BYTES,
    HopperPackedExpertsTiles,
    choose_tiles_of_packed,
    parts_bytes,
)
from ep_runtime.kernels.packed_projections import project_packed
from ep_runtime.kernels.quant.scheme import QuantScheme
from ep_runtime.kernels.sum_slots import PARTS_DTYPE, sum_slots, sum_slots_reference
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.triton_operands import activated_bytes
from ep_runtime.kernels.workspace import Workspace, aligned_bytes
from tests.kernels import hopper_packed_gate
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.kernels.packed_cases import MXFP4, NVFP4, PackedCase, int4, int8
from tests.kernels.packed_parts import expected_parts
from tests.tolerances import assert_close, relative_error

MIXTRAL = ExpertsCase("mixtral", 1, 8, 4096, 14336, 2, dtype=torch.bfloat16)
DEEPSEEK = ExpertsCase("deepseek", 1, 8, 7168, 2048, 8, dtype=torch.bfloat16)
QWEN = ExpertsCase("qwen3", 1, 64, 4096, 1536, 8, dtype=torch.bfloat16)
CUDA = torch.device("cuda")
NARROW = HopperPackedSchedule(2, 2, 14, 1, 1, True, num_slabs=1)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_packed_schedule, "_is_sm_90", lambda device: device.type == "cuda")


def tiles_of(
    case: ExpertsCase,
    num_rows: int,
    scheme: QuantScheme | None = None,
    num_source_rows: int | None = None,
    **named: Any,
) -> HopperPackedExpertsTiles:
    shape = PackedCase("any", case, scheme or int4()).shape
    tiles = choose_tiles_of_packed(num_rows, num_source_rows, shape, CUDA, **named)
    assert isinstance(tiles, HopperPackedExpertsTiles)
    return tiles


@pytest.mark.parametrize("scheme", [int4(), MXFP4, NVFP4], ids=str)
def test_k_is_split_where_items_are_few_and_k_is_long(scheme: QuantScheme, on_hopper: None) -> None:
    """Items of 128 rows of W: Mixtral has 32 of an expert, DeepSeek-V3 56."""

    def parts(case: ExpertsCase, num_rows: int, **named: Any) -> int:
        tiles = tiles_of(case, num_rows, scheme, **named)
        assert tiles.gate_up.split_k == 1
        return tiles.down.split_k

    assert parts(MIXTRAL, 1) == 2  # 64 items
    assert parts(MIXTRAL, 2) == 1  # 128
    alone = replace(MIXTRAL, num_experts=1, top_k=1)
    assert parts(alone, 1) == 4  # 32
    assert parts(alone, 1, is_batched=True) == 1
    assert parts(replace(alone, hidden_size=1024), 1) == 4  # 8: no more than were timed
    assert parts(replace(MIXTRAL, num_experts=3, top_k=3), 1) == 1  # 96
    assert parts(DEEPSEEK, 1) == 1  # 224 of 256 rows
    one = replace(DEEPSEEK, num_experts=1, top_k=1)
    assert parts(one, 1) == 1  # 56, but the ring has as many stages as half of K
    assert parts(replace(one, intermediate_size=3584), 1) == 2
    assert parts(replace(one, intermediate_size=3072), 1) == 1
    assert parts(replace(QWEN, num_experts=1, top_k=1), 1) == 1


def test_k_is_not_split_where_parts_are_much_to_read_or_to_hold(on_hopper: None) -> None:
    two = replace(MIXTRAL, num_experts=2)
    assert tiles_of(two, 20).down.split_k == 2
    assert tiles_of(two, 40).block_m == 64
    assert tiles_of(two, 40).down.split_k == 1
    short = replace(two, num_experts=1, top_k=1, intermediate_size=3584)
    assert tiles_of(short, 10).down.split_k == 2
    assert tiles_of(short, 20).down.split_k == 1
    # Room for many rows of which few are expected.
    room = MAX_PARTS_BYTES // (2 * 2 * 4096 * 4)
    assert tiles_of(two, room, num_source_rows=8).down.split_k == 2
    assert tiles_of(two, room + 1, num_source_rows=8).down.split_k == 1


@pytest.mark.parametrize(
    "shape",
    [
        PackedCase("any", case, scheme).shape
        for scheme in (int4(), NVFP4)
        for case in (
            MIXTRAL,
            replace(MIXTRAL, num_experts=2),
            replace(MIXTRAL, num_experts=1, top_k=1),
            replace(MIXTRAL, num_experts=64, hidden_size=512, top_k=1),
            replace(MIXTRAL, num_experts=0),
            DEEPSEEK,
        )
    ],
    ids=str,
)
def test_the_promise_holds_the_parts_of_every_call_and_never_shrinks(
    shape: ExpertsShape, on_hopper: None
) -> None:
    kernel = TritonExperts(shape)
    counts = (*range(40), 63, 64, 65, 500, 2000, 5000)
    promises = [parts_bytes(num_rows, shape) for num_rows in counts]
    assert promises == sorted(promises)
    totals = [kernel.workspace_bytes(num_rows) for num_rows in counts]
    assert totals == sorted(totals)
    for num_rows, promise in zip(counts, promises, strict=True):
        for num_source_rows in (None, 1, num_rows, 4 * num_rows):
            tiles = choose_tiles_of_packed(num_rows, num_source_rows, shape, CUDA)
            assert isinstance(tiles, HopperPackedExpertsTiles)
            if (parts := tiles.down.split_k) > 1:
                num_bytes = num_rows * shape.top_k * parts * shape.hidden_size * 4
                assert promise >= aligned_bytes(num_bytes), (num_rows, num_source_rows)
                held = projections_bytes(num_rows, shape, 16, 16) - activated_bytes(16, shape)
                assert held >= promise
    assert promises[-1] <= MAX_PARTS_BYTES


def test_parts_take_what_the_kernels_of_any_device_would_take() -> None:
    """The Triton kernels at most four rows a slot, within their own limit."""
    for packed in (PackedCase("int8", MIXTRAL, int8()), PackedCase("int4", MIXTRAL, int4())):
        assert parts_bytes(1, packed.shape) == 2 * 4 * 4096 * 4
    assert parts_bytes(1 << 20, PackedCase("int8", MIXTRAL, int8()).shape) == 1 << 22


def test_parts_are_whole_stages_and_cover_k() -> None:
    assert columns_of_part(1000, HopperPackedSchedule(scales_sums=True, split_k=3), 16) == 384
    # Four steps run without a break, of a full tile of 128 rows eight.
    assert columns_of_part(1000, HopperPackedSchedule(num_slabs=1, split_k=3), 16) == 512
    assert columns_of_part(1000, HopperPackedSchedule(split_k=3), 16) == 384
    assert columns_of_part(1000, HopperPackedSchedule(split_k=3), 128) == 512


@pytest.mark.parametrize("unpacks", [False, True])
def test_tiles_that_would_split_what_cannot_be_are_refused(unpacks: bool) -> None:
    split = replace(NARROW, split_k=2)
    first, second = (NARROW, split) if unpacks else (split, NARROW)
    with pytest.raises(PlanError, match=r"split_k \((2 and 1|1 and 2)\) is for the second"):
        HopperPackedExpertsTiles(16, first, second, unpacks)


@pytest.mark.parametrize(
    ("dtype", "num_rows"), [(torch.bfloat16, 80), (torch.float32, 81)], ids=str
)
def test_an_output_that_holds_no_parts_is_refused(dtype: torch.dtype, num_rows: int) -> None:
    case = ExpertsCase("refused", 20, 5, 256, 256, 2, dtype=torch.bfloat16)
    packed = PackedCase("refused", case, int4())
    weights = pack_hopper_weights(packed.weights(torch.device("cpu")), packed.shape)
    aligned = align_slots_reference(
        case.expert_input(torch.device("cpu")), num_local_experts=5, block_m=16
    )
    with pytest.raises(PlanError, match=r"of split_k \(2\) parts must be torch.float32"):
        project_down_hopper_packed(
            torch.zeros(len(aligned.slots), 256, dtype=case.dtype),
            hopper_words(weights, packed.shape)[1],
            aligned,
            out=torch.zeros(num_rows, 256, dtype=dtype),
            topk_weights=None,
            schedule=replace(NARROW, split_k=2),
        )


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("by_position", [False, True])
def test_sums_of_parts_equal_their_definition(
    num_parts: int, by_position: bool, device: torch.device
) -> None:
    """Of rows that no slot here has, poison; each part is read once, in order."""
    case = ExpertsCase("sum", hidden_size=300, top_k=3)
    expert_input = case.expert_input(device)
    num_slots = 19 * 3
    generator = torch.Generator().manual_seed(9)
    positions = torch.randperm(num_slots, generator=generator).to(device, torch.int32)
    valid = (expert_input.topk_ids >= 0).flatten()
    rows = torch.randn(num_slots, num_parts, 300, generator=generator).to(device)
    is_read = torch.zeros_like(valid)
    is_read[positions.long() if by_position else slice(None)] = valid
    rows[~is_read] = torch.nan
    arguments: dict[str, Any] = {"num_local_experts": case.num_experts}
    arguments["slot_positions"] = positions if by_position else None
    out, expected, whole = (torch.full((19, 300), torch.nan, device=device) for _ in range(3))
    flat = rows.flatten(0, 1)
    sum_slots(flat, expert_input, out=out, num_parts=num_parts, **arguments)
    sum_slots_reference(flat, expert_input, out=expected, num_parts=num_parts, **arguments)
    sum_slots_reference(rows.sum(1), expert_input, out=whole, **arguments)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(expected, whole, rtol=1e-5, atol=1e-5)
    assert not out.isnan().any()


def test_parts_by_their_definition_add_up_and_float32_ones_lose_nothing() -> None:
    """K of 200 in 3: a tail and nothing. In bfloat16 parts that cancel would lose what is left."""
    case = ExpertsCase("parts", 12, 3, 96, 200, 2, dtype=torch.bfloat16, has_bias=True)
    expert_input = case.expert_input(torch.device("cpu"))
    aligned = align_slots_reference(expert_input, num_local_experts=3, block_m=16)
    activated = torch.randn(
        len(aligned.slots), 200, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    plain, weights = case.weights(torch.device("cpu")), expert_input.topk_weights.flatten()
    columns = columns_of_part(activated.shape[1], replace(NARROW, split_k=3), aligned.block_m)
    parts = expected_parts(plain, activated, aligned, weights, columns, 3)
    whole = torch.full((aligned.num_slots, 96), torch.nan)
    project_down_reference(GemmRows(activated), plain, aligned, slot_weights=weights, out=whole)
    by_slot = parts.view(aligned.num_slots, 3, 96)
    assert torch.equal(by_slot.sum(1).isnan(), whole.isnan())
    assert relative_error(by_slot.sum(1).nan_to_num(), whole.nan_to_num()) < 1e-5
    assert (by_slot[:, 2].nan_to_num() == 0).all()
    assert (by_slot[:, 1].nan_to_num() != 0).any()


class Plain(Tensor):
    """A tensor with the attributes that Gluon code reads of its own."""

    type = SimpleNamespace(layout=None)  # type: ignore[assignment]


def plain(values: Any) -> Any:
    return torch.as_tensor(values).as_subclass(Plain)


class Pointer:
    """Into a flat tensor; what is out of bounds may be masked, not read."""

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def load(self, mask: Any = None, other: Any = None) -> Any:
        at = torch.as_tensor(self.offset)
        if mask is None:
            return plain(self.memory[at])
        return plain(torch.where(mask, self.memory[torch.where(mask, at, 0)], other))


class Box:
    """Stages in shared memory, or one of them."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def index(self, at: int) -> "Box":
        return self

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> "Box":
        return Box(*shape)


def gluon_on_cpu(monkeypatch: pytest.MonkeyPatch, program: int, num_programs: int) -> Any:
    """Stand-ins in the kernel's module; returns the list of TMA's (source, place)."""
    copies: list[tuple[Any, list[int]]] = []
    gl = SimpleNamespace(
        constexpr=object,
        int64=torch.int64,
        float32=torch.float32,
        BlockedLayout=lambda *given: None,
        SliceLayout=lambda *given: None,
        to_tensor=int,
        program_id=lambda axis: program,
        num_programs=lambda axis: num_programs,
        arange=lambda start, end, layout: plain(torch.arange(start, end)),
        load=lambda pointer, **named: pointer.load(**named),
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        static_range=range,
    )
    nothing = lambda *given, **named: None  # noqa: E731

    def locate_pair(index: int, num_tiles: int, num_blocks: int, group: int) -> tuple[int, int]:
        assert group == 1
        return index // num_blocks, index % num_blocks

    for name, stand_in in (
        ("gl", gl),
        ("mbarrier", SimpleNamespace(wait=nothing, expect=nothing)),
        (
            "tma",
            SimpleNamespace(
                async_copy_global_to_shared=lambda x, at, bar, box: copies.append((x, at))
            ),
        ),
        ("_item_at", lambda index, order, *sizes: locate_pair(index, *sizes)),
        ("next_stage", lambda stage, phase, stages: (stage, phase)),
    ):
        monkeypatch.setattr(hopper_packed_kernel, name, stand_in)
    return copies


@pytest.mark.parametrize("schedule", [NARROW, HopperPackedSchedule(2, 2, 11, 1, num_slabs=1)])
@pytest.mark.parametrize("split", [1, 3])
def test_a_launch_has_items_for_all_parts(
    split: int, schedule: HopperPackedSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the host's arguments to what the partitions get; K 1000 of 16 experts' 3 column blocks,
    each 128 rows of W."""
    schedule = replace(schedule, split_k=split)
    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **named: launched.append((grid, given, named))

    monkeypatch.setattr(hopper_packed_gemm, "project_packed_kernel", Kernel())
    case = hopper_packed_gate.PackedGateCase("parts", 4, 1000, 380, num_experts=1)
    monkeypatch.setattr(hopper_packed_gate.PackedGateCase, "schedule", schedule)
    hopper_packed_gate.launch(replace(case, split_k=split))
    ((grid, given, named),) = launched
    assert grid == (min(132, 16 * 3 * split),)
    names = hopper_packed_kernel.project_packed_kernel.arg_names
    values = dict(zip(names, given, strict=False)) | named
    assert values["num_slots"] == 8 * hopper_packed_gate.NUM_ROWS

    gluon_on_cpu(monkeypatch, 0, 1)
    gl: Any = vars(hopper_packed_kernel)["gl"]
    partitions: list[Any] = []
    gl.int16, gl.int32, gl.cdiv = torch.int16, torch.int32, lambda a, b: -(-a // b)
    gl.NVMMASharedLayout = gl.SwizzledSharedLayout = lambda *given: None
    gl.allocate_shared_memory = lambda dtype, shape, layout: Box(*shape)
    gl.warp_specialize = lambda parts, warps, registers: partitions.extend(parts)
    barriers = (Box(schedule.num_stages, 1), Box(schedule.num_stages + 1, 1), Box(1))
    monkeypatch.setattr(hopper_packed_kernel, "allocate_barriers", lambda *given: barriers)
    for name in ("fence_async_shared", "await_predecessor"):
        monkeypatch.setattr(hopper_packed_kernel, name, lambda *given: None)
    for name in ("words", "factors"):
        box = values[name].block_shape
        values[name] = SimpleNamespace(block_shape=box, dtype=None, layout=None)
    values |= {"num_tiles_ptr": Pointer(torch.tensor([5])), "IS_DEPENDENT": False}
    values["num_tall_tiles_ptr"] = values["num_tiles_ptr"]
    options = ("num_warps", "maxnreg")
    hopper_packed_kernel.project_packed_kernel.fn(
        **{name: value for name, value in values.items() if name not in options}
    )
    *consumers, (_, load) = partitions
    columns = columns_of_part(1000, schedule, 16) // 128
    assert load[4] == (5, 3 * split, 3, columns)
    assert load[-1] == (None if split == 1 else split)
    assert len(consumers) == 2
    for number, (_, (of_all, _, consumer, kind)) in enumerate(consumers):
        assert of_all[2] == (5, 3 * split, 380, columns, values["num_slots"])
        assert (consumer, kind[AT_SPLIT]) == (number, split)


@pytest.mark.parametrize("split", [None, 2, 3])
def test_the_producer_loads_each_part_of_every_block_once(
    split: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 tiles, 5 column blocks of 2 blocks of W, 4 stages of 128 columns a part; 7 programs."""
    parts = split or 1
    num_k_blocks = 4
    words, factors, x = (SimpleNamespace(block_type=SimpleNamespace(nbytes=0)) for _ in range(3))
    loaded: list[tuple[int, int]] = []
    for program in range(7):
        copies = gluon_on_cpu(monkeypatch, program, 7)
        hopper_packed_kernel._load.fn(
            (x, words, factors, Box(6, 16, 64), Box(3), Box(3), Box(3), Box(3)),
            None,
            Pointer(torch.tensor([1, 4])),
            None,
            (2, 5 * parts, 10, num_k_blocks),
            2,
            32,
            1,
            split,
        )
        items = range(program, 2 * 5 * parts, 7)
        assert len(copies) == 4 * num_k_blocks * len(items)
        for at, index in enumerate(items):
            tile, block = divmod(index // parts, 5)
            part = index % parts
            for step in range(num_k_blocks):
                of_step = copies[4 * (at * num_k_blocks + step) :][:4]
                k = 128 * (part * num_k_blocks + step)
                w_block = (1, 4)[tile] * 10 + 2 * block
                assert of_step == [
                    (words, [w_block, k // 16, 0]),
                    (factors, [w_block, k // 32, 0]),
                    (x, [tile * 16, k]),
                    (x, [tile * 16, k + 64]),
                ]
                loaded.append((w_block, k))
    assert len(set(loaded)) == len(loaded) == 2 * 5 * parts * num_k_blocks


@pytest.mark.parametrize("slabs", [1, 2])
@pytest.mark.parametrize("split", [1, 2, 3])
def test_the_epilogue_leaves_each_part_in_its_row_and_the_bias_in_the_first(
    split: int, slabs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of consumer 1 of two; column block 1, of which the last columns are past the end."""
    gluon_on_cpu(monkeypatch, 0, 1)
    monkeypatch.setattr(hopper_packed_epilogue, "gl", vars(hopper_packed_kernel)["gl"])
    found: list[Any] = []
    monkeypatch.setattr(hopper_packed_epilogue, "_add_bias", hopper_packed_epilogue._add_bias.fn)
    monkeypatch.setattr(
        hopper_packed_epilogue, "finish_columns", lambda *given: found.append(given)
    )
    width = 64 * slabs
    sums = torch.arange(16.0).view(16, 1).repeat(1, width)
    monkeypatch.setattr(
        hopper_packed_epilogue, "_in_output_order", lambda *given: (plain(sums), plain(sums))
    )
    of_slab = plain(torch.arange(0, 128, 2))
    monkeypatch.setattr(hopper_packed_epilogue, "_columns_of_slab", lambda *given: of_slab)
    num_columns, expert, block = 128 * slabs * 2 - 10, 3, 1
    bias = torch.randn(5 * num_columns)
    slots = plain(torch.arange(16).flip(0))
    kind = (2, "none", True, 1, False, False, 1, 16, 0, "int4", 1, slabs, split)
    first = (block * slabs + slabs // 2) * 128
    for part in range(split):
        bias_ptr = Pointer(bias)
        hopper_packed_epilogue.finish_item.fn(
            (torch.zeros(64, 16),) * slabs,
            (slots, "weights"),
            (plain(1), plain(block * split + part)),
            (Pointer(torch.tensor([0, expert])), None, "weights", bias_ptr, None, "out"),
            (2, 2 * split, num_columns, 7, 14),
            None,
            None,
            1,
            kind,
        )
        gate, _, column, _, rows, is_row, row_weights, pointers, *_ = found.pop()
        assert column == first
        assert rows.tolist() == [slot * split + part for slot in reversed(range(16))]
        assert is_row.tolist() == [slot < 14 for slot in reversed(range(16))]
        assert row_weights == "weights"
        if split == 1:
            assert pointers == (bias_ptr, "out", None)
            assert torch.equal(gate, sums)
            continue
        assert pointers == (None, "out", None)
        columns = first + (torch.arange(0, 128, 2) if slabs == 1 else torch.arange(width))
        own = bias[expert * num_columns + columns.clamp(max=num_columns - 1)]
        own = torch.where((columns < num_columns) & (part == 0), own, 0.0)
        assert torch.equal(gate.as_subclass(Tensor), sums + own)


def test_a_call_sums_the_parts_of_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the GEMMs, which splits what they leave; in a poisoned workspace."""
    case = ExpertsCase("parts", 12, 3, 96, 64, 2, dtype=torch.bfloat16)
    packed = PackedCase("parts", case, int4(32))
    device = torch.device("cpu")
    kernel, expert_input = TritonExperts(packed.shape), case.expert_input(device)
    prepared = kernel.prepare_weights(packed.weights(device))
    expected = kernel.run(expert_input, prepared, Workspace(device))
    tiles = HopperPackedExpertsTiles(16, NARROW, replace(NARROW, split_k=3))
    plain_tiles = choose_tiles_of_packed(12, None, packed.shape, device)
    taken: list[tuple[tuple[int, ...], torch.dtype]] = []

    def in_parts(*given: Any, out: Tensor, **named: Any) -> None:
        taken.append((tuple(out.shape), out.dtype))
        whole = torch.full((24, 96), torch.nan, dtype=case.dtype)
        project_packed(*given, out=whole, **(named | {"tiles": plain_tiles}))
        shares = torch.tensor([0.25, -2.0, 2.75])
        out.copy_((whole.float()[:, None] * shares[:, None]).flatten(0, 1))

    monkeypatch.setattr(triton_experts, "choose_tiles_of_packed", lambda *given: tiles)
    monkeypatch.setattr(expert_projections, "project_packed", in_parts)
    output = kernel.run(expert_input, prepared, poisoned_workspace(device, 1 << 20))
    assert taken == [((72, 96), PARTS_DTYPE)]
    assert_close(output, expected)
    assert math.isfinite(float(output.sum()))
