"""NF3 codes inside a kernel: the fields of three planes of 16-bit words as 16-bit values.

Three bits do not divide sixteen, so a block's codes lie in three words for every sixteen columns:
the lower two bits of fields 0 to 7 in the first, of fields 8 to 15 in the second, the upper bit of
all sixteen in the third (kernels/quant/packed_weights.py packs them so). `prmt`, which picks bytes
out of eight by the nibbles of a selector, looks the eight values up: one table of their low bytes,
one of their high bytes, for the two words of a register at once.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import struct
from collections.abc import Callable

import triton
import triton.language as tl

from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.quant.nf3 import NF3_VALUES

# Triton's interpreter has no inline assembly.
_USE_ASSEMBLY = tl.constexpr(not is_interpreting())


def _tables(bits_of: Callable[[float], int]) -> tuple[str, ...]:
    """Registers that hold the low bytes of values 0 to 3 and 4 to 7, then the high bytes."""
    bits = [bits_of(value) for value in NF3_VALUES]
    quarters = ((shift, first) for shift in (0, 8) for first in (0, 4))
    return tuple(
        f"{int.from_bytes([one >> shift & 255 for one in bits[first : first + 4]], 'little'):#010x}"
        for shift, first in quarters
    )


# A bfloat16 is the upper half of the float32.
_BF16_TABLES = tl.constexpr(
    _tables(lambda value: int.from_bytes(struct.pack("<f", value)[2:], "little"))
)
_FP16_TABLES = tl.constexpr(
    _tables(lambda value: int.from_bytes(struct.pack("<e", value), "little"))
)
_V0, _V1, _V2, _V3, _V4, _V5, _V6, _V7 = (tl.constexpr(value) for value in NF3_VALUES)


@triton.jit
def load_nf3_words(words, row, first, KW: tl.constexpr):
    """The planes of the block of 16 * KW columns from `first` on, [BLOCK_N, KW] int16 each."""
    start = first // 16 * 3
    return (
        words.load([row, start]),
        words.load([row, start + KW]),
        words.load([row, start + 2 * KW]),
    )


@triton.jit
def nf3_values_of(planes, INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """Field INDEX of 16 as DTYPE: exactly its NF3 value."""
    low = planes[INDEX // 8]
    assembly: tl.constexpr = _assembly(INDEX, DTYPE)
    if _USE_ASSEMBLY and assembly != "":
        return tl.inline_asm_elementwise(
            assembly, "=r,r,r", [low, planes[2]], dtype=DTYPE.value, is_pure=True, pack=2
        )
    else:
        pair = (low.to(tl.int32) >> (2 * (INDEX % 8))) & 3
        is_upper = ((planes[2].to(tl.int32) >> INDEX) & 1) != 0
        lower = tl.where(pair < 2, tl.where(pair == 0, _V0, _V1), tl.where(pair == 2, _V2, _V3))
        upper = tl.where(pair < 2, tl.where(pair == 0, _V4, _V5), tl.where(pair == 2, _V6, _V7))
        return tl.where(is_upper, upper, lower).to(DTYPE)


@triton.constexpr_function
def _assembly(index, float_type):
    """The conversion of a register of two words, low bits $1 and upper bits $2; empty where there
    is none.

    lop3 with 0xf8 is a | (b & c). The two codes, at bits 0 and 16, become the first two nibbles of
    a selector; `prmt` by 0x5140 puts low and high bytes of the two values together.
    """
    dtype = str(float_type)
    if dtype not in ("bf16", "fp16"):
        return ""
    low0, low1, high0, high1 = (_BF16_TABLES if dtype == "bf16" else _FP16_TABLES).value
    shift = f"shl.b32 upper, $2, {2 - index}" if index < 2 else f"shr.u32 upper, $2, {index - 2}"
    return (
        "{ .reg .b32 codes, upper, table0, table1; "
        f"shr.u32 codes, $1, {2 * (index % 8)}; and.b32 codes, codes, 0x00030003; {shift}; "
        "lop3.b32 codes, codes, upper, 0x00040004, 0xf8; "
        "shr.u32 upper, codes, 12; or.b32 codes, codes, upper; "
        f"mov.b32 table0, {low0}; mov.b32 table1, {low1}; "
        "prmt.b32 upper, table0, table1, codes; "
        f"mov.b32 table0, {high0}; mov.b32 table1, {high1}; "
        "prmt.b32 codes, table0, table1, codes; "
        "prmt.b32 $0, upper, codes, 0x5140; }"
    )
