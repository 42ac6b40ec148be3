"""The Marlin layouts against the stand-in's, which counts lanes, and against the package's own."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.base import ActivationKind, ExpertsShape
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.marlin_layout import (
    e8m0_scales,
    row_scales,
    scales_of,
    words_of,
    zero_point_words,
)
from ep_runtime.kernels.marlin_package import bind_marlin
from ep_runtime.kernels.marlin_weights import marlin_fault, repack_for_marlin, weight_type_id
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.packing import pack_pairs
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantScheme
from tests import fake_marlin
from tests.kernels.cases import ExpertsCase
from tests.kernels.packed_cases import MXFP4, NVFP4, PackedCase, int4, int8

CASE = ExpertsCase("case", 4, 2, 256, 192, 2, dtype=torch.bfloat16)
ORDERED = replace(int4(64), has_input_order=True)
SCHEMES = [
    int4(32),
    int4(64, has_zero_points=True),
    int4(None),
    int4(None, has_zero_points=True),
    int8(64),
    int8(None),
    MXFP4,
    ORDERED,
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_repacked_weights_are_the_dequantised_ones(scheme: QuantScheme) -> None:
    """Of all that a lane reads, and of neither projection's tensors but its own."""
    packed = PackedCase("case", CASE, scheme)
    stored = packed.weights(torch.device("cpu"))
    repacked = repack_for_marlin(stored, packed.shape)
    kind = weight_type_id(scheme)
    for name in ("w13", "w2"):
        values, quant = getattr(repacked, name), getattr(repacked, f"{name}_quant")
        given = getattr(stored, f"{name}_quant")
        expected = dequantize(
            QuantizedTensor(
                getattr(stored, name),
                replace(given, input_order=None),  # the rows' columns are put in order instead
                scheme,
            ),
            packed.num_parts if name == "w13" else 1,
        )
        for expert in range(CASE.num_experts):
            zeros = None if quant.zero_points is None else quant.zero_points[expert]
            weight = fake_marlin.weight_of(kind, values[expert], quant.scales[expert], zeros)
            assert torch.equal(weight.T, expected[expert])


def test_the_words_of_one_tile_by_hand() -> None:
    """Lane 5 is row 1 of 8 and columns 2, 3, 10, 11; j of 2 adds 32 rows."""
    rows, columns = torch.meshgrid(torch.arange(64), torch.arange(16), indexing="ij")
    marked = (rows == 33) & (columns == 10)
    codes = torch.where(marked, 9, 0).to(torch.uint8)
    words = words_of(pack_pairs(codes), 4).flatten()
    assert words.shape == (128,)
    assert words.nonzero().flatten().tolist() == [4 * 5 + 2]
    assert int(words[4 * 5 + 2]) == 9 << 4  # l 0, b 0, h 1: field 1
    words = words_of(codes, 8).flatten()
    assert words.nonzero().flatten().tolist() == [2 * (4 * 5 + 2)]
    assert int(words[2 * (4 * 5 + 2)]) == 9 << 8


def test_the_orders_of_scales_by_hand() -> None:
    rows = torch.arange(64, dtype=torch.float32)
    grouped = scales_of(torch.stack([rows, rows + 100], dim=-1))
    assert grouped.shape == (2, 64)
    assert grouped[0, :9].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1]
    assert torch.equal(grouped[1], grouped[0] + 100)
    single = scales_of(rows[:, None])
    assert single.shape == (1, 64)
    assert single[0, :10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    assert torch.equal(row_scales(rows), single[0])
    zeros = (torch.arange(64) // 8).to(torch.uint8)[:, None]
    assert int(zero_point_words(zeros)[0, 0]) == 0x75316420
    bytes_of = e8m0_scales(torch.arange(64, dtype=torch.uint8)[:, None].expand(64, 2))
    assert bytes_of.view(torch.uint8)[1, :4].tolist() == [0, 16, 8, 24]


@pytest.mark.parametrize(
    ("scheme", "number"),
    [
        (int4(has_zero_points=True), fake_marlin.UINT4),
        (int4(), fake_marlin.UINT4B8),
        (int8(), fake_marlin.UINT8B128),
        (MXFP4, fake_marlin.E2M1),
    ],
    ids=str,
)
def test_the_numbers_of_the_value_types(scheme: QuantScheme, number: int) -> None:
    """As vllm.scalar_type gives them."""
    assert weight_type_id(scheme) == number


def shape(scheme: QuantScheme = ORDERED, **changes: object) -> ExpertsShape:
    return replace(CASE.shape, scheme=scheme, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            shape(hidden_size=320),
            r"hidden_size \(320\) is not a multiple of 128$",
        ),
        (shape(intermediate_size=96), r"moe_intermediate_size \(96\) is not a multiple of 64"),
        (
            shape(int4(96)),
            r"quantization.group_size \(96\) is not among its 32, 64, 128$",
        ),
        (
            shape(int4()),
            r"\(128\) does not divide moe_intermediate_size \(192\)$",
        ),
        (shape(int8(64, has_zero_points=True)), "no kernel for int8 with zero points"),
        (shape(replace(int4(None), has_input_order=True)), "needs several groups in a row"),
        (shape(intermediate_size=64), r"group_size is 64, .* moe_intermediate_size 64"),
        (shape(MXFP4, dtype=torch.float16), "mxfp4 in bfloat16 alone"),
    ],
)
def test_what_the_gemm_has_no_kernel_for_is_refused_by_its_key(
    layer: ExpertsShape, message: str
) -> None:
    assert re.search(message, str(marlin_fault(layer)))


def test_an_ungated_layer_needs_twice_the_intermediate_size() -> None:
    """Then w13's rows are the intermediate size itself."""
    relu2 = replace(CASE, kind=ActivationKind.RELU2)
    ungated = replace(relu2.shape, scheme=int4(64))
    assert "(192) is not a multiple of 128" in str(marlin_fault(ungated))
    assert marlin_fault(replace(ungated, intermediate_size=256)) is None


def test_nvfp4_is_none_of_its_schemes() -> None:
    with pytest.raises(PlanError, match="set quantization: int4_w4a16"):
        repack_for_marlin(CASE.weights(torch.device("cpu")), shape(NVFP4))


# --- beside the package's own repacking ---


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
def test_words_equal_the_packages_own_repacking(bits: int) -> None:
    """vLLM's operator turns GPTQ's words, 32 / bits columns of one row, into Marlin's."""
    device = torch.device("cuda")
    try:
        bind_marlin("marlin", device)
    except PlanError as fault:
        pytest.skip(str(fault))
    repack = getattr(torch.ops._C, "gptq_marlin_repack", None) or _load_repack()
    num_rows, num_columns = 256, 192
    codes = torch.randint(0, 2**bits, (num_rows, num_columns), dtype=torch.uint8, device=device)
    values = pack_pairs(codes) if bits == 4 else codes
    stored: Tensor = values.contiguous().view(torch.int32).T.contiguous()
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    theirs = repack(stored, nothing, num_columns, num_rows, bits, False)
    assert torch.equal(words_of(values, bits), theirs)


def _load_repack() -> Any:
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("vllm")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for library in (path for folder in folders for path in Path(folder).glob("_C*.so")):
        torch.ops.load_library(str(library))
    repack = getattr(torch.ops._C, "gptq_marlin_repack", None)
    if repack is None:
        pytest.skip("no gptq_marlin_repack is installed")
    return repack
