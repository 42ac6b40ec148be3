"""Weights repacked for Hopper's packed GEMM: nothing lost, and in the places its registers read.

`fragment_of` here is kernels/hopper_packed_values.py in plain torch, with its arithmetic.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ep_runtime.kernels.base import ActivationKind
from ep_runtime.kernels.errors import CheckpointError
from ep_runtime.kernels.hopper_packed_layout import (
    HopperWords,
    block_rows,
    exponent_scales,
    hopper_words,
    pack_hopper_weights,
    pack_hopper_words,
    unpack_codes,
    unpack_factors,
)
from ep_runtime.kernels.quant.packing import pack_pairs
from tests.kernels.cases import ExpertsCase
from tests.kernels.packed_cases import MXFP4, NVFP4, PackedCase, int4

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = [(128, 64), (256, 384), (208, 192), (96, 40)]


@dataclass(frozen=True)
class Stored:
    """Codes [N, K], scales [N, groups], zero points alike or None; group_size None: a row."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_size: int | None

    def packed(self, *, is_gated: bool) -> HopperWords:
        return pack_hopper_words(
            pack_pairs(self.codes)[None],
            self.scales[None],
            self.group_size,
            is_gated=is_gated,
            zero_points=None if self.zeros is None else self.zeros[None],
        )

    def weights(self) -> Tensor:
        """As 16-bit weights: scale * (code - zero), rounded once."""
        zeros = torch.full_like(self.scales, 8) if self.zeros is None else self.zeros
        values = (self.codes.float() - self._wide(zeros)) * self._wide(self.scales)
        return values.to(self.scales.dtype)

    def _wide(self, factors: Tensor) -> Tensor:
        columns = self.codes.shape[1]
        return factors.float().repeat_interleave(self.group_size or columns, 1)[:, :columns]


def draw(
    num_rows: int,
    num_columns: int,
    group_size: int | None = 128,
    *,
    has_zeros: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Stored:
    generator = torch.Generator().manual_seed(num_rows)
    codes = torch.randint(0, 16, (num_rows, num_columns), generator=generator).to(torch.uint8)
    groups = 1 if group_size is None else -(-num_columns // group_size)
    scales = (torch.rand(num_rows, groups, generator=generator) + 0.5).to(dtype)
    zeros = torch.randint(0, 16, (num_rows, groups), generator=generator).to(torch.uint8)
    return Stored(codes, scales, zeros if has_zeros else None, group_size)


def fragment_of(words: Tensor, scales: Tensor, centres: Tensor | None, stored: str) -> Tensor:
    """Of a slab's words [32, 32] int16: [64, 64].

    scales, centres: [groups, 32, h] of the slab's 1, 2 or 4 groups of columns, row 8 w + g of h.
    """
    dtype = scales.dtype
    offset = 128 if dtype is torch.bfloat16 else 1024
    if centres is None:
        centres = torch.full_like(scales, offset + 8)
    # Word j of a thread's four is column 8 t + 2 j + b.
    group = torch.arange(32) // 2 % 4 * len(scales) // 4
    registers = []
    for p in range(4):
        if stored == "e2m1":
            values = e2m1_register(words.int(), p)
        else:
            codes = (words.int() >> 4 * p) & 15
            values = (codes + offset).to(dtype) - centres[group, :, p % 2].T
        registers.append(values * scales[group, :, p % 2].T)
    p0, p1, p2, p3 = registers
    values = torch.stack((torch.stack((p0, p2), -1), torch.stack((p1, p3), -1)), -1)
    return values.reshape(4, 8, 4, 4, 2, 2, 2).permute(0, 6, 1, 3, 5, 2, 4).reshape(64, 64)


def e2m1_register(words: Tensor, p: int) -> Tensor:
    """Of half words' code p the value times 2^-126, as its bits in bfloat16."""
    if p < 3:
        bits = (words << 3 * p) & 0x81C0
    else:
        bits = ((words << 1) & 0x8000) | ((words >> 5) & 0x0100) | ((words >> 4) & 0x00C0)
    return bits.to(torch.uint16).view(torch.bfloat16)


def blocks_of(packed: HopperWords) -> list[Tensor]:
    """The weights of every block as the kernel sees them: slabs [2, 64, K], rows of a slab."""
    found = []
    size = packed.group_size or 1 << 20
    for words, factors in zip(packed.words[0], packed.factors[0], strict=True):
        slabs = words.contiguous().view(torch.int16).reshape(-1, 2, 32, 32)  # chunks, slabs
        # TMA brings 0 for groups past the last one.
        factors = torch.cat([factors, torch.zeros_like(factors[:3])])
        parts: list[list[Tensor]] = [[], []]
        for chunk, pair in enumerate(slabs):
            first = 64 * chunk // size
            groups = factors[first : first + max(1, 64 // size)]
            numbers = groups.reshape(len(groups), -1, 32, 2, 2)  # ., part, 8 w + g, slab, h
            for i, slab in enumerate(pair):
                centres = numbers[:, 1, :, i] if packed.has_centres else None
                parts[i].append(fragment_of(slab, numbers[:, 0, :, i], centres, packed.stored))
        found.append(torch.stack([torch.cat(part, 1) for part in parts]))
    return found


def results_of(slabs: Tensor, *, is_gated: bool) -> Tensor:
    """Slabs [2, 64, K] by the columns that the kernel's epilogue takes their rows for.

    Gated: the gate's 64 rows, then the up's; else 128 rows.
    """
    fields = slabs.reshape(2, 4, 2, 8, -1)  # i, w, h, g, .
    order = (2, 1, 3, 0, 4) if is_gated else (1, 3, 0, 2, 4)
    return fields.permute(order).reshape(128, -1)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("num_rows", "num_columns"), SIZES)
def test_packed_codes_and_scales_come_back(num_rows: int, num_columns: int, is_gated: bool) -> None:
    stored = draw(num_rows, num_columns)
    packed = stored.packed(is_gated=is_gated)
    rows = block_rows(packed.num_columns, is_gated=is_gated)
    assert torch.equal(unpack_codes(packed.words[0], rows, num_rows, num_columns), stored.codes)
    assert torch.equal(unpack_factors(packed.factors[0], rows, num_rows), stored.scales)


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("num_rows", "num_columns"), SIZES)
@pytest.mark.parametrize(
    ("group_size", "has_zeros", "dtype"),
    [
        (128, False, torch.bfloat16),
        (64, True, torch.bfloat16),
        (256, True, torch.float16),
        (None, False, torch.float16),
        (32, True, torch.bfloat16),
        (16, True, torch.float16),
    ],
)
def test_registers_hold_the_weights_of_the_rows_that_the_results_are_stored_to(
    num_rows: int,
    num_columns: int,
    is_gated: bool,
    group_size: int | None,
    has_zeros: bool,
    dtype: torch.dtype,
) -> None:
    stored = draw(num_rows, num_columns, group_size, has_zeros=has_zeros, dtype=dtype)
    assert_held(stored.weights(), stored.packed(is_gated=is_gated))


@pytest.mark.parametrize("is_gated", [True, False])
def test_registers_hold_mxfp4_weights(is_gated: bool) -> None:
    """K ends in the middle of a chunk; scales from 2^-60 to 2^64, weights times 2^-64."""
    stored = draw(208, 160, 32)
    exponents = torch.arange(208 * 5).remainder(125).reshape(208, 5).add(67).to(torch.uint8)
    scales = exponent_scales(exponents, torch.bfloat16)
    assert torch.equal(scales.double(), 2.0 ** (exponents.double() - 127))
    packed = pack_hopper_words(
        pack_pairs(stored.codes)[None], scales[None], 32, is_gated=is_gated, stored="e2m1"
    )
    weights = E2M1[stored.codes.int()] * scales.float().repeat_interleave(32, 1)
    assert_held((weights * 2.0**-64).bfloat16(), packed)


@pytest.mark.parametrize("is_gated", [True, False])
def test_registers_hold_nvfp4_weights_without_their_global_scales(is_gated: bool) -> None:
    """K ends in every quarter of a chunk; all of e4m3's scales, weights times 2^-64, exactly."""
    for num_columns in (64, 80, 160, 240):
        stored = draw(208, num_columns, 16)
        groups = num_columns // 16
        codes = torch.arange(208 * groups).remainder(127).to(torch.uint8).reshape(208, groups)
        scales = codes.view(torch.float8_e4m3fn)
        packed = pack_hopper_words(
            pack_pairs(stored.codes)[None],
            scales.bfloat16()[None],
            16,
            is_gated=is_gated,
            stored="e2m1",
        )
        weights = E2M1[stored.codes.int()] * scales.float().repeat_interleave(16, 1)
        scaled = (weights * 2.0**-64).bfloat16()
        assert torch.equal(scaled.float(), weights * 2.0**-64)
        assert_held(scaled, packed)


@pytest.mark.parametrize("kind", [ActivationKind.SILU, ActivationKind.RELU2])
def test_an_nvfp4_layer_keeps_its_global_scales_beside_the_words(kind: ActivationKind) -> None:
    """Of the layer as it is stored: registers times the global scales of gate and up, or of all."""
    case = ExpertsCase("nvfp4", 4, 3, 96, 48, 2, dtype=torch.bfloat16, kind=kind)
    packed = PackedCase("nvfp4", case, NVFP4)
    stored = packed.weights(torch.device("cpu"))
    plain = packed.dequantized(stored)
    words = hopper_words(pack_hopper_weights(stored, packed.shape), packed.shape)
    for one, expected in zip(words, (plain.w13, plain.w2), strict=True):
        assert (one.group_size, one.stored) == (16, "e2m1")
        assert one.global_scales is not None
        assert one.global_scales.shape == (3, 2 if one.is_gated else 1)
        for expert in range(3):
            factors = one.global_scales[expert].repeat_interleave(
                expected.shape[1] // one.global_scales.shape[1]
            )
            held = expected[expert] / factors[:, None] * 2.0**-64
            of_expert = replace(
                one, words=one.words[expert, None], factors=one.factors[expert, None]
            )
            assert_held(held.bfloat16(), of_expert)


def test_exponent_scales_are_powers_of_two_from_the_smallest_on() -> None:
    exponents = torch.arange(255, dtype=torch.uint8)
    scales = exponent_scales(exponents, torch.bfloat16)
    assert torch.equal(scales.double(), 2.0 ** (exponents.double() - 127))


@pytest.mark.parametrize(("scale", "words"), [(192, r"192 \(2\^65;"), (255, "255 is NaN")])
def test_scales_of_a_broken_checkpoint_are_refused_where_they_are(scale: int, words: str) -> None:
    case = ExpertsCase("layer", 4, 3, 96, 64, 2, dtype=torch.bfloat16)
    packed = PackedCase("mxfp4", case, MXFP4)
    weights = packed.weights(torch.device("cpu"))
    pack_hopper_weights(weights, packed.shape)
    assert weights.w2_quant is not None
    weights.w2_quant.scales[2, 40, 1] = scale
    with pytest.raises(CheckpointError, match=rf"w2 scales: expert 2, row 40, .* 32 .*{words}"):
        pack_hopper_weights(weights, packed.shape)


def assert_held(weights: Tensor, packed: HopperWords) -> None:
    """Weights [N, K], in the kernel's output order, bit for bit; 0 past the last row."""
    num_rows, num_columns, is_gated = *weights.shape, packed.is_gated
    blocks = blocks_of(packed)
    results = torch.stack([results_of(block, is_gated=is_gated) for block in blocks])
    results = results[..., :num_columns]
    if is_gated:  # [blocks, part, column]
        parts = results.unflatten(1, (2, 64)).transpose(0, 1).flatten(1, 2)
        actual, rest = parts[:, : num_rows // 2].flatten(0, 1), parts[:, num_rows // 2 :]
    else:
        actual, rest = results.flatten(0, 1)[:num_rows], results.flatten(0, 1)[num_rows:]
    assert torch.equal(actual, weights)
    assert not rest.any()


def test_experts_are_packed_one_after_the_other() -> None:
    one, other = draw(128, 128), draw(128, 128, has_zeros=True)
    codes = (one.codes, 15 - other.codes)
    values = torch.stack([pack_pairs(each) for each in codes])
    packed = pack_hopper_words(values, torch.stack([one.scales] * 2), 128, is_gated=False)
    rows = block_rows(128, is_gated=False)
    for expert in range(2):
        assert torch.equal(unpack_codes(packed.words[expert], rows, 128, 128), codes[expert])


def test_a_layer_is_packed_projection_by_projection() -> None:
    """Zero points are then in the factors, and both projections keep their experts in front."""
    case = ExpertsCase("layer", 4, 3, 96, 40, 2, dtype=torch.bfloat16, has_bias=True)
    packed = PackedCase("zeros", case, int4(64, has_zero_points=True))
    weights = pack_hopper_weights(packed.weights(torch.device("cpu")), packed.shape)
    w13, w2 = hopper_words(weights, packed.shape)
    assert weights.w13.shape == (3, 1, 8, 256)
    assert w13.factors.shape == (3, 1, 2, 256)
    assert weights.w2.shape == (3, 1, 4, 256)
    assert w2.factors.shape == (3, 1, 1, 256)
    assert (w13.num_columns, w13.is_gated, w2.num_columns, w2.is_gated) == (40, True, 96, False)
    assert w13.has_centres
    assert w2.has_centres
    assert weights.w13_quant is not None
    assert weights.w13_quant.zero_points is None
