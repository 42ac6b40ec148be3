"""Integers of 4 and 8 bits in 32-bit words, and pairs of 4 bits in bytes.

All of it for little-endian hosts, as safetensors' files are.
"""

import torch
from torch import Tensor


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """The fields of each word, lowest bits first, as they follow along the last axis.

    words: [..., W] int32. Returns [..., W * 32 / bits] uint8.

    Example: bits 4 turns 0x76543210 into 0, 1, 2, 3, 4, 5, 6, 7.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    fields: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return fields.to(torch.uint8).flatten(-2)


def bytes_of(words: Tensor) -> Tensor:
    """The bytes of int32 words [..., W] as [..., 4 W] uint8: 8-bit fields, or pairs of 4 bits."""
    return words.contiguous().view(torch.uint8)


def pack_pairs(codes: Tensor) -> Tensor:
    """Codes [..., K] uint8 below 16, K even, as [..., K / 2]: the even column in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(pairs: Tensor) -> Tensor:
    """The inverse of `pack_pairs`: [..., K / 2] uint8 as codes [..., K] uint8."""
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
