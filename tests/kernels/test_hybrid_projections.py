"""Steps of hybrid projections, cut anywhere, against the dequantised weights."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.hybrid_launch import _projection
from ep_runtime.kernels.hybrid_projections import multiply_down_hybrid, multiply_gate_up_hybrid
from ep_runtime.kernels.hybrid_tiers import NF3, NVFP4, pack_hybrid_weights, tier_weights
from ep_runtime.kernels.interpreter import prepare_launch
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.kernels.resident_shares import Sizes
from tests.kernels.cases import ExpertsCase
from tests.kernels.hybrid_cases import HybridCase
from tests.tolerances import relative_error

# Two and three steps of 256 columns, the last of each partial; experts 1 and 2 are numbers 0 and 1,
# in NVFP4, 0 and 3 are numbers 2 and 3.
HYBRID = HybridCase(
    "steps", ExpertsCase("steps", 5, 4, 544, 288, 2, dtype=torch.float32), nvfp4_experts=(1, 2)
)
NUMBERS = [1, 2, 0, 3]
BLOCK_T, BLOCK_N, STEP = 16, 64, 256


# As the products get them, loaded: not told apart where they are 1.
@triton.jit(do_not_specialize=["number", "block", "first", "last"])
def _gate_up_kernel(
    x_ptr,
    words,
    scales_ptr,
    num_groups,
    global_scales_ptr,
    nf3_words,
    nf3_scales_ptr,
    nf3_groups,
    rows_per_expert,
    out_ptr,  # [2, BLOCK_N, BLOCK_T]
    number,
    block,
    first,
    last,
    num_rows,
    hidden_size,
    intermediate_size,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    gate, up = multiply_gate_up_hybrid(
        (
            (words, scales_ptr, num_groups),
            (nf3_words, nf3_scales_ptr, nf3_groups),
            global_scales_ptr,
            2,
        ),
        (x_ptr, hidden_size, 1),
        number,
        block,
        first,
        last,
        Sizes(num_rows, hidden_size, intermediate_size, rows_per_expert),
        True,
        BLOCK_T,
        TILE,
    )
    BLOCK_N: tl.constexpr = TILE[0]
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    tl.store(out_ptr + inside, gate)
    tl.store(out_ptr + BLOCK_N * BLOCK_T + inside, up)


@triton.jit(do_not_specialize=["active_nvfp4", "block", "first", "last"])
def _down_kernel(
    activated_ptr,
    list_ptr,
    words,
    scales_ptr,
    num_groups,
    global_scales_ptr,
    nf3_words,
    nf3_scales_ptr,
    nf3_groups,
    out_ptr,  # [BLOCK_N, BLOCK_T]
    active_nvfp4,
    block,
    first,
    last,
    hidden_size,
    intermediate_size,
    BLOCK_T: tl.constexpr,
    TILE: tl.constexpr,
):
    result = multiply_down_hybrid(
        (
            (words, scales_ptr, num_groups),
            (nf3_words, nf3_scales_ptr, nf3_groups),
            global_scales_ptr,
            2,
            active_nvfp4,
        ),
        (activated_ptr, intermediate_size),
        list_ptr,
        block,
        first,
        last,
        Sizes(BLOCK_T, hidden_size, intermediate_size, 0),
        BLOCK_T,
        TILE,
    )
    BLOCK_N: tl.constexpr = TILE[0]
    inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    tl.store(out_ptr + inside, result)


def weights_on(device: torch.device) -> tuple[ExpertWeights, Tensor, Tensor]:
    """Packed, and each projection dequantised, [E, N, K]."""
    stored = HYBRID.weights(device)
    assert stored.w13_quant is not None
    assert stored.w2_quant is not None
    w13 = dequantize(QuantizedTensor(stored.w13, stored.w13_quant, HYBRID.scheme), 2)
    w2 = dequantize(QuantizedTensor(stored.w2, stored.w2_quant, HYBRID.scheme), 1)
    return pack_hybrid_weights(stored), w13, w2


@pytest.mark.parametrize(("number", "block"), [(1, 0), (2, 4)])
def test_parts_of_a_first_projections_steps_add_up(
    number: int, block: int, device: torch.device
) -> None:
    """The last block of 64 has 32 of the 288 columns. Rows past num_rows count as 0."""
    prepare_launch(device)
    packed, w13, _ = weights_on(device)
    nvfp4, nf3 = tier_weights(packed, NVFP4), tier_weights(packed, NF3)
    tier = _projection(nvfp4.w13, nvfp4.w13_quant, nf3.w13, nf3.w13_quant, BLOCK_N)
    rows = torch.randn(5, 544, generator=torch.Generator().manual_seed(1)).to(device)
    exact = (w13[NUMBERS[number]] @ rows.T).unflatten(0, (2, 288))[:, 64 * block : 64 * block + 64]
    for cut in (0, 1, 2, 3):
        total = torch.zeros(2, BLOCK_N, BLOCK_T, device=device)
        for first, last in ((0, cut), (cut, 3)):
            out = torch.full_like(total, torch.nan)
            _gate_up_kernel[(1,)](
                rows,
                *tier,
                576,
                out,
                number,
                block,
                first,
                last,
                5,
                544,
                288,
                BLOCK_T=BLOCK_T,
                TILE=(BLOCK_N, STEP, 1),
            )
            total += out
        found = total[:, : exact.shape[1]]
        assert relative_error(found[..., :5], exact) < 1e-6
        assert not found[..., 5:].any()


@pytest.mark.parametrize("active", [[0, 1, 3], [1], [2, 3], [0, 2]], ids=str)
def test_parts_of_a_second_projections_steps_add_up_over_both_tiers(
    active: list[int], device: torch.device
) -> None:
    prepare_launch(device)
    packed, _, w2 = weights_on(device)
    nvfp4, nf3 = tier_weights(packed, NVFP4), tier_weights(packed, NF3)
    tier = _projection(nvfp4.w2, nvfp4.w2_quant, nf3.w2, nf3.w2_quant, BLOCK_N)
    generator = torch.Generator().manual_seed(2)
    activated = torch.randn(len(active), BLOCK_T, 288, generator=generator).to(device)
    block, steps = 8, 2 * len(active)  # the last block of 64 has 32 of the 544 columns
    exact = sum(
        w2[NUMBERS[number]][512:] @ rows.T for number, rows in zip(active, activated, strict=True)
    )
    assert isinstance(exact, Tensor)
    listed = torch.tensor(active, dtype=torch.int32, device=device)
    for cut in (0, 1, steps - 1):
        total = torch.zeros(BLOCK_N, BLOCK_T, device=device)
        for first, last in ((0, cut), (cut, steps)):
            out = torch.full_like(total, torch.nan)
            _down_kernel[(1,)](
                activated,
                listed,
                *tier,
                out,
                sum(number < 2 for number in active),
                block,
                first,
                last,
                544,
                288,
                BLOCK_T=BLOCK_T,
                TILE=(BLOCK_N, STEP, 1),
            )
            total += out
        assert relative_error(total[:32], exact) < 1e-6
