"""Quantised weights as the packed kernels read them: repacked once, when a layer is loaded.

E experts, N output rows, K input columns, G groups of columns. A row becomes int16 words of F
fields, four of 4 bits or two of 8, block by block of F * KW columns: field i of a block's word j,
lowest bits first, is the block's column i * KW + j (kernels/packed_tiles.py says why). Of nf3 a
block has sixteen fields of 3 bits in three planes of KW words (kernels/packed_nf3.py). K is filled
up with codes of 0 (of nf3, of the value 0) to whole blocks, and G to the groups of those, with
scales of 0; scales and zero points lie [E, G, N], so that a group's are next to each other.

Example: KW = 2, 4 bits, columns 0 to 7: the words are 0x6420 and 0x7531.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import ceil

import torch
from torch import Tensor

from ep_runtime.kernels.quant.nf3 import BITS, CODES_PER_WORDS, ZERO_CODE, unpack_codes
from ep_runtime.kernels.quant.packing import pack_pairs, unpack_pairs
from ep_runtime.kernels.quant.scheme import (
    FIXED_GROUPS,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)

# What a field of a word is, as the kernels call it.
_STORED = {
    WeightScheme.INT4: "int4",
    WeightScheme.INT8: "int8",
    WeightScheme.MXFP4: "e2m1",
    WeightScheme.NVFP4: "e2m1",
    WeightScheme.NF3: "nf3",
}
_FIELDS = {"int4": 4, "int8": 2, "e2m1": 4, "nf3": 16}  # of a word; of nf3, of its three planes
PACKED_SCHEMES = frozenset(_STORED)
# Columns that may share a scale in int4 and int8; a whole row may as well.
GROUP_SIZES = frozenset(32 << power for power in range(6))
_NF3_WORDS = 16  # of a plane; a block is then as wide as int4's, with four groups
_MAX_WORDS = 64  # of a block; as many bytes as TMA reads of a row at once


@dataclass(frozen=True)
class PackedLayout:
    """What a word is, how wide a block is, and how many columns share a scale; w13 and w2 alike.

    stored: int4 | int8 | e2m1 | nf3. words_per_block: KW, of a row (and a plane). group_size: None
    where a whole row shares one scale.
    """

    stored: str
    words_per_block: int
    group_size: int | None

    @property
    def fields_per_word(self) -> int:
        return _FIELDS[self.stored]

    @property
    def num_planes(self) -> int:
        """Words that hold a field; the planes of a block follow each other in a row."""
        return BITS if self.stored == "nf3" else 1

    @property
    def columns_per_block(self) -> int:
        return self.fields_per_word * self.words_per_block

    def num_blocks(self, num_columns: int) -> int:
        return ceil(num_columns / self.columns_per_block)

    def num_words(self, num_columns: int) -> int:
        """Of a row."""
        return self.num_blocks(num_columns) * self.num_planes * self.words_per_block

    def num_groups(self, num_columns: int) -> int:
        """Of the columns filled up to whole blocks."""
        if self.group_size is None:
            return 1
        return ceil(self.num_blocks(num_columns) * self.columns_per_block / self.group_size)


def is_packed(scheme: QuantScheme) -> bool:
    """Whether kernels read such weights packed."""
    return scheme.weight in PACKED_SCHEMES


def packed_fault(scheme: QuantScheme) -> str | None:
    """Why weights of a packed scheme have no layout, naming the key; None where they have one.

    Without a cure: which other kernels take them depends on the layer and the machine.
    """
    if scheme.has_input_order:
        return (
            "it reads columns in the order of the rows', and quantization.has_input_order is true "
            "(act-order)"
        )
    size = scheme.group_size
    if scheme.weight not in FIXED_GROUPS and size is not None and size not in GROUP_SIZES:
        return (
            f"quantization.group_size ({size}) is not among its "
            f"{', '.join(map(str, sorted(GROUP_SIZES)))}"
        )
    return None


@cache
def packed_layout(scheme: QuantScheme) -> PackedLayout:
    """The layout for a scheme: the widest block of whose fields each has one scale.

    ValueError for a scheme without one, or with a `packed_fault`.
    """
    if not is_packed(scheme):
        raise ValueError(f"weights stored as {scheme.weight} have no packed layout")
    if fault := packed_fault(scheme):
        raise ValueError(
            f"weights stored as {scheme.weight} cannot be packed: {fault}; choose experts: auto"
        )
    size = FIXED_GROUPS.get(scheme.weight, scheme.group_size)
    if scheme.weight is WeightScheme.NF3:
        return PackedLayout(_STORED[scheme.weight], _NF3_WORDS, size)
    return PackedLayout(_STORED[scheme.weight], min(size or _MAX_WORDS, _MAX_WORDS), size)


def pack_weight(
    values: Tensor, quant: QuantParameters, layout: PackedLayout
) -> tuple[Tensor, QuantParameters]:
    """Repack one projection of all experts, one by one.

    values: as `QuantizedTensor` says, [E, N, K] uint8, [E, N, K / 2], or nf3's [E, N, W] int32.
    Returns words [E, N, blocks * KW] int16 (of nf3 [E, N, blocks * 3 * KW]), and scales [E, G, N]
    in their own dtype and zero points [E, G, N] uint8 or None.
    Beside what it returns it takes about 4 * N * K bytes.
    """
    num_experts, num_rows, num_columns = values.shape
    if layout.stored == "nf3":
        num_columns = num_columns // BITS * CODES_PER_WORDS
    elif layout.fields_per_word == 4:
        num_columns *= 2
    words = values.new_empty(
        (num_experts, num_rows, layout.num_words(num_columns)), dtype=torch.int16
    )
    for expert in range(num_experts):
        words[expert] = _pack_expert(values[expert], layout)
    num_groups = layout.num_groups(num_columns)
    zeros, global_scales = quant.zero_points, quant.global_scales
    return words, replace(
        quant,
        scales=_by_group(quant.scales, num_groups),
        zero_points=None if zeros is None else _by_group(zeros, num_groups),
        global_scales=None if global_scales is None else global_scales.contiguous(),
    )


def _pack_expert(values: Tensor, layout: PackedLayout) -> Tensor:
    """One expert's values as words [N, blocks * KW] int16, of nf3 [N, blocks * 3 * KW]."""
    if layout.stored == "nf3":
        return _pack_planes(unpack_codes(values), layout)
    codes = unpack_pairs(values) if layout.fields_per_word == 4 else values
    width = layout.num_blocks(codes.shape[1]) * layout.columns_per_block
    padded = codes.new_zeros((codes.shape[0], width))
    padded[:, : codes.shape[1]] = codes
    # [N, blocks, F, KW] -> [N, blocks, KW, F]
    of_words = padded.unflatten(1, (-1, layout.fields_per_word, layout.words_per_block)).mT
    fields = of_words.flatten(1)
    return (pack_pairs(fields) if layout.fields_per_word == 4 else fields).view(torch.int16)


def _pack_planes(codes: Tensor, layout: PackedLayout) -> Tensor:
    """Codes [N, K] of nf3 as three planes a block: kernels/packed_nf3.py says which bits."""
    fields, half = layout.fields_per_word, layout.fields_per_word // 2
    width = layout.num_blocks(codes.shape[1]) * layout.columns_per_block
    padded = codes.new_full((codes.shape[0], width), ZERO_CODE, dtype=torch.int32)
    padded[:, : codes.shape[1]] = codes
    blocks = padded.unflatten(1, (-1, fields, layout.words_per_block))  # [N, blocks, F, KW]
    shifts = torch.arange(fields, dtype=torch.int32, device=codes.device)[:, None]
    pairs = (blocks & 3) << (2 * (shifts % half))
    upper = (blocks >> 2) << shifts
    planes = (pairs[:, :, :half], pairs[:, :, half:], upper)
    words = torch.stack([plane.sum(2, dtype=torch.int32) for plane in planes], dim=2)
    return words.flatten(1).to(torch.int16)


def _unpack_planes(words: Tensor, layout: PackedLayout) -> Tensor:
    """The inverse, all columns of all blocks: codes [.., blocks * F * KW] uint8."""
    fields, half = layout.fields_per_word, layout.fields_per_word // 2
    shifts = torch.arange(fields, dtype=torch.int32, device=words.device)[:, None]
    planes = words.unflatten(-1, (-1, layout.num_planes, 1, layout.words_per_block)).int()
    first, second, upper = planes.unbind(-3)  # [.., blocks, 1, KW]
    pairs = torch.cat([first.expand(*first.shape[:-2], half, -1)] * 2, dim=-2).clone()
    pairs[..., half:, :] = second
    codes: Tensor = ((pairs >> (2 * (shifts % half))) & 3) | ((upper >> shifts) & 1) << 2
    return codes.to(torch.uint8).flatten(-3)


def unpack_words(words: Tensor, num_columns: int, layout: PackedLayout) -> Tensor:
    """The inverse: words of a row [.., W] int16 as codes [.., K] uint8."""
    if layout.stored == "nf3":
        return _unpack_planes(words, layout)[..., :num_columns]
    codes = words.contiguous().view(torch.uint8)
    if layout.fields_per_word == 4:
        codes = unpack_pairs(codes)
    blocks = codes.unflatten(-1, (-1, layout.words_per_block, layout.fields_per_word)).mT
    columns: Tensor = blocks.flatten(-3)[..., :num_columns]
    return columns


def _by_group(values: Tensor, num_groups: int) -> Tensor:
    """[E, N, groups] as [E, num_groups, N], filled up with 0."""
    num_experts, num_rows, present = values.shape
    by_group = values.new_zeros((num_experts, num_groups, num_rows))
    by_group[:, :present] = values.mT
    return by_group
