"""Hopper's packed GEMM: rule, refusals and compiled code without a GPU; its results with one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels import hopper_packed_schedule
from ep_runtime.kernels.align_blocks import AlignedSlots, align_slots, align_slots_reference
from ep_runtime.kernels.base import (
    ActivationKind,
    BatchedExpertInput,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import ConfigError, PlanError
from ep_runtime.kernels.grouped_gemm import (
    GemmRows,
    project_down_reference,
    project_gate_up_reference,
)
from ep_runtime.kernels.hopper_packed_gemm import (
    HopperPackedSchedule,
    columns_of_part,
    project_down_hopper_packed,
    project_gate_up_hopper_packed,
)
from ep_runtime.kernels.hopper_packed_layout import hopper_words, pack_hopper_weights
from ep_runtime.kernels.hopper_packed_schedule import (
    HopperPackedExpertsTiles,
    choose_tiles_of_packed,
    hopper_packed_tiles,
    takes_hopper_packed,
)
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.sum_slots import PARTS_DTYPE, sum_slots
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launch.tune_command import refuse_what_has_no_tiles
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.kernels.packed_cases import MXFP4, NVFP4, PackedCase, int4, int8
from tests.kernels.packed_parts import expected_parts
from tests.tolerances import TOLERANCES, assert_close, relative_error

ROOT = Path(__file__).parents[2]
MAX_SHARED_BYTES = 227 * 1024
LAYER = ExpertsCase("layer", 40, 5, 512, 256, 2, dtype=torch.bfloat16)
INT4 = PackedCase("int4", LAYER, int4())


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(hopper_packed_schedule, "_is_sm_90", lambda device: device.type == "cuda")
    return torch.device("cuda")


@pytest.mark.parametrize(
    ("case", "scheme", "expected"),
    [
        (LAYER, int4(), True),
        (LAYER, int4(64, has_zero_points=True), True),
        (LAYER, int4(1024), True),
        (LAYER, int4(None), True),
        (replace(LAYER, dtype=torch.float16), int4(), True),
        (replace(LAYER, hidden_size=168, intermediate_size=72), int4(), True),
        (LAYER, int4(32), True),
        (LAYER, MXFP4, True),
        (replace(LAYER, dtype=torch.float16), MXFP4, False),
        (LAYER, int8(), False),
        (LAYER, NVFP4, True),
        (replace(LAYER, dtype=torch.float16), NVFP4, False),
        (LAYER, QuantScheme(), False),
        (LAYER, QuantScheme(WeightScheme.INT4, 128, has_input_order=True), False),
        (replace(LAYER, dtype=torch.float32), int4(), False),
        (replace(LAYER, hidden_size=164), int4(), False),
        (replace(LAYER, intermediate_size=100), int4(), False),
    ],
)
def test_one_rule_says_which_layers_it_takes(
    case: ExpertsCase, scheme: QuantScheme, expected: bool, on_hopper: torch.device
) -> None:
    shape = PackedCase("any", case, scheme).shape
    assert takes_hopper_packed(shape, on_hopper) is expected
    assert not takes_hopper_packed(shape, torch.device("cpu"))


def test_a_call_is_cut_for_the_kernel_that_its_weights_are_packed_for(
    on_hopper: torch.device,
) -> None:
    assert isinstance(
        choose_tiles_of_packed(64, None, INT4.shape, on_hopper), HopperPackedExpertsTiles
    )
    on_cpu = choose_tiles_of_packed(64, None, INT4.shape, torch.device("cpu"))
    assert isinstance(on_cpu, PackedExpertsTiles)


def test_tune_refuses_layers_without_tiles(on_hopper: torch.device) -> None:
    with pytest.raises(ConfigError, match="as int4_w4a16 run on Hopper's packed GEMM here"):
        refuse_what_has_no_tiles([INT4.shape], on_hopper)
    refuse_what_has_no_tiles([INT4.shape], torch.device("cpu"))


def test_tiles_get_no_lower_with_more_rows() -> None:
    every = (0, 1, 8, 16, 32, 64, 128, 4096)
    heights = [hopper_packed_tiles(rows, INT4.shape, 5).block_m for rows in every]
    assert heights == sorted(heights)
    assert heights[0] == 16
    assert heights[-1] == 128


@pytest.mark.parametrize("rows", [2, 20])
def test_layers_with_fewer_items_than_multiprocessors_cut_them_finer(rows: int) -> None:
    """Mixtral: 64 blocks of 256 rows of an expert's first projection, 16 of its second."""
    case = ExpertsCase("mixtral", 1, 8, 4096, 14336, 2, dtype=torch.bfloat16)
    shape = PackedCase("mixtral", case, int4()).shape

    def slabs(num_experts: int) -> list[tuple[int, int]]:
        tiles = hopper_packed_tiles(rows, shape, num_experts)
        return [(one.num_consumers, one.num_slabs) for one in (tiles.gate_up, tiles.down)]

    usual = (2, 2)
    assert slabs(1) == [(4, 1), (2, 1)]  # 112 and 16 items
    assert slabs(2) == [usual, (2, 1)]  # 224 and 32
    assert slabs(8) == [usual, (4, 1)]  # 896 and 128
    assert slabs(9) == [usual, usual]
    assert hopper_packed_tiles(100, shape, 1) == hopper_packed_tiles(100, shape, 8)


@pytest.mark.parametrize("scheme", [int4(), int4(32, has_zero_points=True), MXFP4, NVFP4], ids=str)
@pytest.mark.parametrize("num_experts", [2, 8, 64])
def test_the_stages_of_every_call_fit_a_multiprocessor(
    scheme: QuantScheme, num_experts: int
) -> None:
    """Of which each program takes 1 KiB for the device, and at most 512 bytes for barriers."""
    case = ExpertsCase("qwen3", 1, 64, 4096, 1536, 8, dtype=torch.bfloat16)
    shape = PackedCase("qwen3", case, scheme).shape
    group_size = packed_layout(scheme).group_size or case.hidden_size
    for rows in ROWS_OF.values():
        tiles = hopper_packed_tiles(rows, shape, num_experts)
        for one in (tiles.gate_up, tiles.down):
            columns, blocks = 64 * one.num_chunks, one.num_consumers * one.num_slabs // 2
            groups = max(1, columns // group_size) * (2 if scheme.has_zero_points else 1)
            stage = 2 * columns * tiles.block_m + blocks * (64 * columns + 256 * groups)
            of_program = one.num_stages * stage + 512 + 1024
            assert one.programs_per_sm * of_program <= 228 * 1024, (tiles.block_m, one)


def launched(**changes: Any) -> None:
    """A first projection on meta tensors, with something changed; refused before it is launched."""
    case = PackedCase("refused", LAYER, int4())
    weights = pack_hopper_weights(case.weights(torch.device("cpu")), case.shape)
    w13, _ = hopper_words(weights, case.shape)
    w13 = replace(w13, **{k: v for k, v in changes.items() if hasattr(w13, k)})
    expert_input = LAYER.expert_input(torch.device("cpu"))
    aligned = align_slots_reference(
        expert_input, num_local_experts=5, block_m=changes.get("block_m", 16)
    )
    project_gate_up_hopper_packed(
        changes.get("rows", expert_input.hidden_states),
        w13,
        aligned,
        activation=case.shape.activation,
        out=torch.empty(len(aligned.slots), changes.get("width", 256), dtype=torch.bfloat16),
        top_k=2,
        schedule=HopperPackedSchedule(
            cuts_tiles=changes.get("cuts_tiles", False),
            scales_sums=changes.get("scales_sums", False),
            split_k=changes.get("split_k", 1),
        ),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": torch.zeros(40, 512, dtype=torch.float16)}, "must be of one dtype"),
        ({"rows": torch.zeros(40, 516, dtype=torch.bfloat16)[:, 1:513]}, "multiples of 16 bytes"),
        ({"rows": torch.zeros(40, 576, dtype=torch.bfloat16)}, r"must be \(4, 36, 256\)"),
        ({"block_m": 8}, r"tiles of \(16, 32, 64, 128\) rows, not 8"),
        ({"block_m": 16, "cuts_tiles": True}, "no half of tiles of 16 rows"),
        ({"block_m": 128, "scales_sums": True}, "up to 64 rows, not 128"),
        ({"group_size": 96}, r"group_size \(96\) must be a power of two from 16 on"),
        ({"group_size": 16, "scales_sums": True}, "scales_sums takes no groups of 16 columns"),
        ({"width": 192}, "words of an expert"),
        ({"split_k": 2}, r"split_k \(2\) is for the second projection"),
    ],
    ids=[
        "dtype",
        "alignment",
        "columns",
        "height",
        "half",
        "sums",
        "group",
        "short",
        "width",
        "parts",
    ],
)
def test_operands_that_it_cannot_read_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        launched(**changes)


def test_schedules_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(PlanError, match=r"num_consumers \(3\) must be 1, 2 or 4"):
        HopperPackedSchedule(num_consumers=3)
    with pytest.raises(
        PlanError, match=r"num_slabs \(1\) must be 2, or 1 for num_consumers 2 or 4"
    ):
        HopperPackedSchedule(num_consumers=1, num_slabs=1)
    with pytest.raises(PlanError, match="a stage must have two steps"):
        HopperPackedSchedule(num_chunks=1, num_slabs=1)
    with pytest.raises(PlanError, match=r"num_stages \(1\) must be at least 2"):
        HopperPackedSchedule(num_stages=1)
    with pytest.raises(PlanError, match=r"lead_blocks \(1\) is for two consumers"):
        HopperPackedSchedule(num_consumers=4, lead_blocks=1)
    with pytest.raises(PlanError, match="cannot be combined"):
        HopperPackedSchedule(scales_sums=True, cuts_tiles=True)
    with pytest.raises(PlanError, match=r"split_k \(0\) must be at least 1"):
        HopperPackedSchedule(split_k=0)


def test_it_compiles_for_sm_90_into_what_it_was_written_for() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.hopper_packed_gate"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for entry in json.loads(done.stdout):
        dtype, height = entry["dtype"], entry["height"]
        cut = {height, height // 2} if height >= 64 else {height}
        kinds = {f"m64n{rows}k16.f32.{dtype}.{dtype}" for rows in cut}
        assert set(entry["products"]) == kinds, entry
        assert entry["left_in_registers"], entry
        assert entry["dependent"] == 1, entry
        assert entry["shared_bytes"] * entry["programs_per_sm"] <= MAX_SHARED_BYTES, entry
        assert "serialized" not in entry["assembler"], entry
        stores = entry["assembler"].split(" bytes spill stores")[0].rsplit(maxsplit=1)[-1]
        assert int(stores) <= 64, entry


# CUDA only from here on: there is no interpreter for Gluon.

ODD = ExpertsCase("sizes_that_fill_no_block", 45, 6, 328, 200, 3, dtype=torch.bfloat16)
LONG = ExpertsCase("long", 700, 9, 1536, 640, 4, dtype=torch.bfloat16)
RELU2 = replace(ODD, has_bias=True, kind=ActivationKind.RELU2)
OAI = replace(ODD, has_bias=True, kind=ActivationKind.SWIGLUOAI, limit=1.0)
ON_CUDA = [
    PackedCase("int4", LAYER, int4()),
    PackedCase("zeros", LAYER, int4(has_zero_points=True)),
    PackedCase(
        "zeros, groups of 64, float16",
        replace(ODD, dtype=torch.float16),
        int4(64, has_zero_points=True),
    ),
    PackedCase("odd sizes", ODD, int4()),
    PackedCase("relu2 with bias", RELU2, int4(256)),
    PackedCase("swigluoai with bias, a scale a row", OAI, int4(None)),
    PackedCase("swigluoai, a zero a row", OAI, int4(None, has_zero_points=True)),
    PackedCase("groups of 512, the last partial", LONG, int4(512)),
    PackedCase("groups of 1024, zeros", LONG, int4(1024, has_zero_points=True)),
    PackedCase("groups of 32, the last chunk half", replace(ODD, hidden_size=352), int4(32)),
    PackedCase("groups of 32, zeros", LONG, int4(32, has_zero_points=True)),
    PackedCase("mxfp4", replace(OAI, hidden_size=352, intermediate_size=224), MXFP4),
    PackedCase("mxfp4, long", LONG, MXFP4),
    PackedCase("nvfp4", replace(OAI, hidden_size=336, intermediate_size=208), NVFP4),
    PackedCase("nvfp4, relu2", replace(RELU2, hidden_size=304, intermediate_size=240), NVFP4),
    PackedCase("nvfp4, long", LONG, NVFP4),
    PackedCase("last tiles of every height", replace(LONG, num_rows=570, num_experts=33), int4()),
    PackedCase("few rows, many experts", replace(LONG, num_rows=9, num_experts=70), int4()),
]
# A schedule of each kind that the rule or its candidates have, beside the rule's own.
SCHEDULES = {
    16: [
        HopperPackedSchedule(2, 2, 5, 1, 2, True),
        HopperPackedSchedule(2, 4, 4, 1, 1, False),
        HopperPackedSchedule(4, 4, 4, 1, 1, True, num_slabs=1),
    ],
    32: [
        HopperPackedSchedule(2, 2, 4, 1, 2),
        HopperPackedSchedule(1, 2, 6, 1, 2, True),
        HopperPackedSchedule(2, 4, 4, 1, 1, False, True, num_slabs=1),
    ],
    64: [
        HopperPackedSchedule(2, 1, 8, 4, lead_blocks=2),
        HopperPackedSchedule(2, 2, 6, 4, scales_sums=True),
        HopperPackedSchedule(4, 2, 6, 4, num_slabs=1),
    ],
    128: [
        HopperPackedSchedule(2, 1, 8, 2),
        HopperPackedSchedule(1, 2, 4, 8, cuts_tiles=True),
        HopperPackedSchedule(2, 4, 2, 8, cuts_tiles=True, lead_blocks=1),
    ],
}
ROWS_OF = {16: 1.0, 32: 20.0, 64: 40.0, 128: 500.0}
# Compiling each case anew takes most of the time; these are cut and called in all ways.
IN_ALL_WAYS = [
    packed
    for packed in ON_CUDA
    if packed.name in {"zeros", "mxfp4, long", "nvfp4, long", "last tiles of every height"}
]


def each_with(usual: Sequence[int], in_all_ways: Sequence[int]) -> list[tuple[PackedCase, int]]:
    """Every case with the usual numbers, and those that are called in all ways with more."""
    return [(packed, number) for packed in ON_CUDA for number in usual] + [
        (packed, number) for packed in IN_ALL_WAYS for number in in_all_ways
    ]


def aligned_of(expert_input: StandardExpertInput, packed: PackedCase, height: int) -> AlignedSlots:
    return align_slots_reference(
        expert_input, num_local_experts=packed.case.num_experts, block_m=height
    )


def assert_only_these_and_close(out: Tensor, expected: Tensor) -> None:
    assert torch.equal(out.isnan(), expected.isnan()), "wrote a place of no slot, or not all"
    assert_close(out.nan_to_num(), expected.nan_to_num())


def poisoned(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    return torch.full((num_rows, num_columns), torch.nan, device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "height"), each_with([16, 64], [32, 128]), ids=str)
def test_projections_equal_their_definitions(packed: PackedCase, height: int) -> None:
    """Into NaN, from rows with gaps; and the same bits when it is done again."""
    device, case = torch.device("cuda"), packed.case
    expert_input = case.expert_input(device)
    aligned = aligned_of(expert_input, packed, height)
    stored = packed.weights(device)
    plain = packed.dequantized(stored)
    w13, w2 = hopper_words(pack_hopper_weights(stored, packed.shape), packed.shape)
    rule = hopper_packed_tiles(ROWS_OF[height], packed.shape, case.num_experts)
    assert rule.block_m == height
    is_short = (packed_layout(packed.scheme).group_size or 64) < 64
    is_in_all_ways = packed in IN_ALL_WAYS
    more = [one for one in SCHEDULES[height] if not (is_short and one.scales_sums)]
    more = more if is_in_all_ways else []
    is_slot = aligned.slots < aligned.num_slots

    wide = poisoned(case.num_rows, case.hidden_size + 24, case.dtype)
    wide[:, : case.hidden_size] = expert_input.hidden_states
    rows = wide[:, : case.hidden_size]
    num_positions, activation = len(aligned.slots), case.shape.activation
    expected = poisoned(num_positions, case.intermediate_size, torch.float32)
    project_gate_up_reference(
        GemmRows(rows), plain, aligned, top_k=case.top_k, activation=activation, out=expected
    )
    for schedule in (rule.gate_up, *more):
        outs = [poisoned(num_positions, case.intermediate_size, case.dtype) for _ in range(2)]
        for out in outs:
            project_gate_up_hopper_packed(
                rows,
                w13,
                aligned,
                activation=activation,
                out=out,
                top_k=case.top_k,
                bias=stored.w13_bias,
                schedule=schedule,
            )
        assert_only_these_and_close(outs[0], expected)
        assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())

    activated = poisoned(num_positions, case.intermediate_size, case.dtype)
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(int(is_slot.sum()), case.intermediate_size, generator=generator)
    activated[is_slot] = values.to(device, case.dtype)
    topk_weights = expert_input.topk_weights.flatten()
    for weights in (topk_weights, None) if is_in_all_ways else (topk_weights,):
        expected = poisoned(aligned.num_slots, case.hidden_size, torch.float32)
        project_down_reference(
            GemmRows(activated), plain, aligned, slot_weights=weights, out=expected
        )
        for schedule in (rule.down,) if weights is None else (rule.down, *more):
            outs = [poisoned(aligned.num_slots, case.hidden_size, case.dtype) for _ in range(2)]
            for out in outs:
                project_down_hopper_packed(
                    activated,
                    w2,
                    aligned,
                    out=out,
                    topk_weights=weights,
                    bias=stored.w2_bias,
                    schedule=schedule,
                )
            assert_only_these_and_close(outs[0], expected)
            assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())


CUT = {
    32: HopperPackedSchedule(2, 4, 4, 1, 1, False, True, num_slabs=1),
    64: HopperPackedSchedule(2, 2, 6, 1, cuts_tiles=True, lead_blocks=2),
    128: HopperPackedSchedule(2, 2, 4, 8, cuts_tiles=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("height", CUT)
@pytest.mark.parametrize(
    "halves",
    [(2, 4, 2, 0, 2), (1, 0, 1, 1, 1), (3, 1, 0, 2, 5), (0, 0, 0, 0, 0)],
    ids=["all tall", "none tall", "both", "no tiles"],
)
def test_cut_tiles_in_the_order_of_the_alignment(halves: tuple[int, ...], height: int) -> None:
    """Experts of so many halves of a tile; poison between the order's ends, NaN in the output."""
    device, experts = torch.device("cuda"), torch.arange(5)
    ids = experts.repeat_interleave(torch.tensor(halves) * (height // 2))
    packed = replace(INT4, case=replace(LAYER, num_rows=len(ids) + 1))
    case = packed.case
    expert_input = case.expert_input(device)
    expert_input.topk_ids.fill_(-1)
    expert_input.topk_ids[:-1, 0] = ids[torch.randperm(len(ids))].to(device)
    workspace = poisoned_workspace(device, 1 << 20)
    aligned = align_slots(expert_input, num_local_experts=5, block_m=height, workspace=workspace)
    num_tall = sum(half // 2 for half in halves)
    assert aligned.num_tall_tiles.tolist() == [num_tall]
    stored = packed.weights(device)
    plain = packed.dequantized(stored)
    w13, w2 = hopper_words(pack_hopper_weights(stored, packed.shape), packed.shape)
    rows, activation = expert_input.hidden_states, case.shape.activation
    expected = poisoned(len(aligned.slots), case.intermediate_size, torch.float32)
    project_gate_up_reference(
        GemmRows(rows), plain, aligned, top_k=case.top_k, activation=activation, out=expected
    )
    activated = poisoned(len(aligned.slots), case.intermediate_size, case.dtype)
    project_gate_up_hopper_packed(
        rows,
        w13,
        aligned,
        activation=activation,
        out=activated,
        top_k=case.top_k,
        schedule=CUT[height],
    )
    assert_only_these_and_close(activated, expected)
    expected = poisoned(aligned.num_slots, case.hidden_size, torch.float32)
    project_down_reference(GemmRows(activated), plain, aligned, slot_weights=None, out=expected)
    out = poisoned(aligned.num_slots, case.hidden_size, case.dtype)
    project_down_hopper_packed(
        activated, w2, aligned, out=out, topk_weights=None, schedule=CUT[height]
    )
    assert_only_these_and_close(out, expected)


# Of the second projection, of which K is 1.6 to 5 stages of 128 columns in the cases below, so that
# the last parts have tails, or nothing at all.
IN_PARTS = [
    (16, HopperPackedSchedule(2, 2, 14, 1, 1, True, num_slabs=1, split_k=2)),
    (16, HopperPackedSchedule(2, 2, 14, 1, 1, True, num_slabs=1, split_k=4)),
    (16, HopperPackedSchedule(4, 2, 8, 1, 1, True, num_slabs=1, split_k=3)),
    (16, HopperPackedSchedule(2, 2, 4, 1, 2, True, split_k=4)),
    (32, HopperPackedSchedule(2, 2, 11, 1, num_slabs=1, split_k=3)),
    (64, HopperPackedSchedule(2, 2, 6, 1, cuts_tiles=True, lead_blocks=2, split_k=2)),
]
SPLIT = [
    packed
    for packed in ON_CUDA
    if packed.name
    in {
        "relu2 with bias",
        "swigluoai, a zero a row",
        "groups of 32, zeros",
        "mxfp4",
        "nvfp4",
        "nvfp4, long",
    }
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("height", "schedule"), IN_PARTS, ids=[f"{h} in {s.split_k}" for h, s in IN_PARTS]
)
@pytest.mark.parametrize("packed", SPLIT, ids=str)
def test_parts_of_k_equal_their_definitions_and_add_up(
    packed: PackedCase, height: int, schedule: HopperPackedSchedule
) -> None:
    """Into NaN, with the slots' weights and without; and the same bits when it is done again."""
    device, case = torch.device("cuda"), packed.case
    if (packed_layout(packed.scheme).group_size or 64) < 64:
        schedule = replace(schedule, scales_sums=False)
    expert_input = case.expert_input(device)
    aligned = aligned_of(expert_input, packed, height)
    stored = packed.weights(device)
    plain = packed.dequantized(stored)
    _, w2 = hopper_words(pack_hopper_weights(stored, packed.shape), packed.shape)
    is_slot = aligned.slots < aligned.num_slots
    activated = poisoned(len(aligned.slots), case.intermediate_size, case.dtype)
    generator = torch.Generator().manual_seed(9)
    values = torch.randn(int(is_slot.sum()), case.intermediate_size, generator=generator)
    activated[is_slot] = values.to(device, case.dtype)
    split_k, limit = schedule.split_k, TOLERANCES[case.dtype]
    for weights in (None, expert_input.topk_weights.flatten()):
        columns = columns_of_part(activated.shape[1], schedule, aligned.block_m)
        expected = expected_parts(plain, activated, aligned, weights, columns, split_k)
        outs = [poisoned(len(expected), case.hidden_size, PARTS_DTYPE) for _ in range(2)]
        for out in outs:
            project_down_hopper_packed(
                activated,
                w2,
                aligned,
                out=out,
                topk_weights=weights,
                bias=stored.w2_bias,
                schedule=schedule,
            )
        assert torch.equal(outs[0].isnan(), expected.isnan()), (
            "wrote a place of no slot, or not all"
        )
        assert torch.equal(outs[0].nan_to_num(), outs[1].nan_to_num())
        for part in range(split_k):
            found, right = (x[part::split_k].nan_to_num() for x in (outs[0], expected))
            assert relative_error(found, right) <= limit, part
    # The last have the slots' weights.
    sums = [poisoned(case.num_rows, case.hidden_size, case.dtype) for _ in range(2)]
    whole = poisoned(aligned.num_slots, case.hidden_size, torch.float32)
    project_down_reference(GemmRows(activated), plain, aligned, slot_weights=weights, out=whole)
    for rows, out, num_parts in ((outs[0], sums[0], split_k), (whole, sums[1], 1)):
        sum_slots(
            rows, expert_input, num_local_experts=case.num_experts, out=out, num_parts=num_parts
        )
    assert_close(sums[0], sums[1])


LONG_K = ExpertsCase("long K", 5, 3, 512, 7392, 2, dtype=torch.bfloat16)
BIASED_K = replace(LONG_K, has_bias=True, kind=ActivationKind.SWIGLUOAI, limit=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "packed",
    [
        PackedCase("int4", LONG_K, int4()),
        PackedCase("mxfp4", BIASED_K, MXFP4),
        PackedCase("nvfp4", BIASED_K, NVFP4),
    ],
    ids=str,
)
def test_calls_that_the_rule_splits_equal_the_reference(packed: PackedCase) -> None:
    """In a poisoned workspace of the promised size, again in a graph: the same bits."""
    device, case = torch.device("cuda"), packed.case
    tiles = choose_tiles_of_packed(case.num_rows, None, packed.shape, device)
    assert isinstance(tiles, HopperPackedExpertsTiles)
    assert tiles.down.split_k == 4
    kernel, expert_input = TritonExperts(packed.shape), case.expert_input(device)
    expert_input.topk_ids[0] = -1
    expert_input.hidden_states[0] = torch.nan
    prepared = kernel.prepare_weights(packed.weights(device))
    workspace = poisoned_workspace(device, kernel.workspace_bytes(case.num_rows))
    output = kernel.run(expert_input, prepared, workspace)
    assert not workspace.overflowed
    assert (output[0] == 0).all()
    assert_close(output, reference(packed, expert_input))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.run(expert_input, prepared, workspace)
    workspace._block.fill_(255)
    graph.replay()
    assert torch.equal(captured, output)


def reference(packed: PackedCase, expert_input: Any) -> Tensor:
    device = expert_input.hidden_states.device
    return ReferenceExperts(packed.shape).run(
        expert_input, packed.weights(device), Workspace(device)
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "num_rows"), each_with([40, 900], [1, 160]), ids=str)
def test_experts_equal_the_reference(packed: PackedCase, num_rows: int) -> None:
    """Whole calls of every height, in a poisoned workspace of the promised size."""
    device = torch.device("cuda")
    packed = replace(packed, case=replace(packed.case, num_rows=num_rows))
    assert takes_hopper_packed(packed.shape, device)
    kernel, expert_input = TritonExperts(packed.shape), packed.case.expert_input(device)
    expert_input.topk_ids[0] = -1  # a row without a local slot
    expert_input.hidden_states[0] = torch.nan
    prepared = kernel.prepare_weights(packed.weights(device))
    workspace = poisoned_workspace(device, kernel.workspace_bytes(num_rows))
    output = kernel.run(expert_input, prepared, workspace)
    assert not workspace.overflowed
    assert (output[0] == 0).all()
    assert_close(output, reference(packed, expert_input))


@pytest.mark.gpu
def test_rows_that_start_anywhere_and_no_rows_at_all() -> None:
    device = torch.device("cuda")
    kernel, case = TritonExperts(INT4.shape), LAYER
    prepared = kernel.prepare_weights(INT4.weights(device))
    expert_input = case.expert_input(device)
    expected = kernel.run(expert_input, prepared, Workspace(device))
    shifted = poisoned(case.num_rows, case.hidden_size + 3, case.dtype)[:, 1:-2]
    shifted.copy_(expert_input.hidden_states)
    moved = replace(expert_input, hidden_states=shifted)
    assert torch.equal(kernel.run(moved, prepared, Workspace(device)), expected)
    expert_input.topk_ids.fill_(-1)
    assert not kernel.run(expert_input, prepared, Workspace(device)).any()


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "capacity"), each_with([40], [3, 200]), ids=str)
def test_batched_rows_equal_the_reference(packed: PackedCase, capacity: int) -> None:
    """An expert without rows, one with few, one that is full; NaN past the counts."""
    device, case = torch.device("cuda"), packed.case
    counts = torch.zeros(case.num_experts, dtype=torch.int32, device=device)
    counts[0], counts[1] = capacity, 2
    generator = torch.Generator().manual_seed(5)
    size = (case.num_experts, capacity, case.hidden_size)
    rows = torch.randn(size, generator=generator).to(device, case.dtype)
    for expert, count in enumerate(counts.tolist()):
        rows[expert, count:] = torch.nan
    expert_input = BatchedExpertInput(rows, counts)
    kernel = TritonBatchedExperts(packed.shape)
    prepared = kernel.prepare_weights(packed.weights(device))
    workspace = poisoned_workspace(device, kernel.workspace_bytes(capacity))
    output = kernel.run(expert_input, prepared, workspace)
    assert not workspace.overflowed
    expected = reference(packed, expert_input)
    for expert, count in enumerate(counts.tolist()):
        assert_close(output[expert, :count], expected[expert, :count])


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [8, 700])
def test_graph_replay_equals_an_eager_call(num_rows: int) -> None:
    """With other ids, rows and workspace contents than it was captured with."""
    device, case = torch.device("cuda"), replace(LONG, num_rows=num_rows)
    packed = PackedCase("zeros", case, int4(has_zero_points=True))
    kernel = TritonExperts(packed.shape)
    prepared = kernel.prepare_weights(packed.weights(device))
    workspace = Workspace(device, kernel.workspace_bytes(num_rows))
    static = case.expert_input(device)
    kernel.run(static, prepared, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernel.run(static, prepared, workspace)
    for seed in (1, 2, 3):
        fresh = replace(case, seed=seed).expert_input(device)
        static.hidden_states.copy_(fresh.hidden_states)
        static.topk_ids.copy_(fresh.topk_ids)
        static.topk_weights.copy_(fresh.topk_weights)
        workspace._block.fill_(255)
        graph.replay()
        assert torch.equal(captured, kernel.run(fresh, prepared, Workspace(device)))
