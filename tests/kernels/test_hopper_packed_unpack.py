"""Packed weights as 16-bit ones again: the ones that the packed GEMM multiplies; and when."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels import hopper_packed_schedule
from ep_runtime.kernels.base import Activation, ActivationKind
from ep_runtime.kernels.hopper_packed_layout import hopper_words, pack_hopper_weights
from ep_runtime.kernels.hopper_packed_schedule import (
    UNPACKED_FROM,
    HopperPackedExpertsTiles,
    choose_tiles_of_packed,
    unpacked_bytes,
)
from ep_runtime.kernels.hopper_packed_unpack import unpack_weight, unpack_weight_reference
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.cases import ExpertsCase, poisoned_workspace
from tests.kernels.packed_cases import PackedCase, int4, int8
from tests.tolerances import assert_close

ODD = ExpertsCase("odd", 4, 2, 168, 104, 2, dtype=torch.bfloat16)
CASES = [
    PackedCase("int4", ODD, int4()),
    PackedCase("zeros", ODD, int4(64, has_zero_points=True)),
    PackedCase(
        "zeros_a_row_float16",
        replace(ODD, dtype=torch.float16, kind=ActivationKind.RELU2),
        int4(None, has_zero_points=True),
    ),
]


def poisoned(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.full_like(like, torch.nan, dtype=dtype)


@pytest.mark.parametrize("packed", CASES, ids=str)
def test_weights_come_back_as_they_are_dequantised(
    packed: PackedCase, device: torch.device
) -> None:
    """The kernel, its definition, and float32 weights rounded once: bit for bit."""
    stored = packed.weights(device)
    plain = packed.dequantized(stored)
    words = hopper_words(pack_hopper_weights(stored, packed.shape), packed.shape)
    for one, expected in zip(words, (plain.w13, plain.w2), strict=True):
        dtype = packed.case.dtype
        outs = [poisoned(expected, dtype), poisoned(expected, dtype)]
        unpack_weight(one, outs[0])
        unpack_weight_reference(one, outs[1])
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], expected.to(dtype))


def test_only_calls_of_very_many_rows_of_weights_that_fit_unpack_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hopper_packed_schedule, "_is_sm_90", lambda device: device.type == "cuda")
    case = ExpertsCase("prefill", 1, 8, 7168, 2048, 8, dtype=torch.bfloat16)
    shape, device = PackedCase("prefill", case, int4()).shape, torch.device("cuda")

    def unpacks(num_rows: int, of: int = 8, *, is_batched: bool = False) -> bool:
        layer = replace(shape, num_local_experts=of)
        tiles = choose_tiles_of_packed(num_rows, None, layer, device, is_batched=is_batched)
        assert isinstance(tiles, HopperPackedExpertsTiles)
        assert not tiles.unpacks or tiles.block_m == 128
        return tiles.unpacks

    assert unpacks(UNPACKED_FROM)
    assert not unpacks(UNPACKED_FROM - 1)
    assert not unpacks(UNPACKED_FROM, is_batched=True)
    assert not unpacks(1 << 20, of=128)  # 7 GiB
    assert unpacked_bytes(UNPACKED_FROM, shape) == 8 * 2 * 2048 * 7168 * 2
    assert unpacked_bytes(UNPACKED_FROM - 1, shape) == 0
    ungated = replace(shape, activation=Activation(ActivationKind.RELU2), num_local_experts=32)
    assert unpacked_bytes(4 * UNPACKED_FROM, ungated) == 32 * 2048 * 7168 * 2
    for never in (replace(shape, scheme=int8()), replace(shape, dtype=torch.float32)):
        assert unpacked_bytes(UNPACKED_FROM, never) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [ActivationKind.SILU, ActivationKind.RELU2])
def test_a_call_that_unpacks_equals_the_reference(kind: ActivationKind) -> None:
    """Both projections take the same workspace one after the other; biases, zeros, a tail."""
    device = torch.device("cuda")
    case = ExpertsCase("long", 5000, 2, 328, 200, 2, kind=kind, dtype=torch.bfloat16, has_bias=True)
    packed = PackedCase("long", case, int4(64, has_zero_points=True))
    tiles = choose_tiles_of_packed(5000, None, packed.shape, device)
    assert isinstance(tiles, HopperPackedExpertsTiles)
    assert tiles.unpacks
    kernel, expert_input = TritonExperts(packed.shape), case.expert_input(device)
    stored = packed.weights(device)
    workspace = poisoned_workspace(device, kernel.workspace_bytes(5000))
    output = kernel.run(expert_input, kernel.prepare_weights(stored), workspace)
    assert not workspace.overflowed
    expected = ReferenceExperts(packed.shape).run(expert_input, stored, Workspace(device))
    assert_close(output, expected)
