"""Packed codes inside a kernel: the fields of 16-bit words as the 16-bit values they stand for.

Every step treats the two words of a register at once, and every value is exact. It rests on two
facts about binary floats. A code in the last bits of the mantissa of a power of two that counts
ones there, 128 of bfloat16 or 1024 of float16, is that number plus the code. And sign, exponent and
mantissa of an e2m1 code, put where a wider float has them, are its value but for the difference of
the biases, a power of two, subnormal codes included.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.packed_nf3 import nf3_values_of

# Triton's interpreter has no inline assembly.
_USE_ASSEMBLY = tl.constexpr(not is_interpreting())


@triton.jit
def values_of(words, centres, INDEX: tl.constexpr, STORED: tl.constexpr, DTYPE: tl.constexpr):
    """Field INDEX of each int16 word, lowest bits first, as DTYPE: exactly what it stands for.

    STORED: int4 (four fields), its code less a zero point; int8 (two), the same; e2m1 (four).
    centres: zero points + `centre_of`, DTYPE, of a shape that broadcasts to the words'. Of nf3
    words are three planes of sixteen fields (kernels/packed_nf3.py).
    """
    assembly: tl.constexpr = _assembly(INDEX, STORED, DTYPE)
    if STORED == "nf3":
        return nf3_values_of(words, INDEX, DTYPE)
    elif _USE_ASSEMBLY and assembly != "" and STORED == "e2m1":
        return tl.inline_asm_elementwise(
            assembly, "=r,r", [words], dtype=DTYPE.value, is_pure=True, pack=2
        )
    elif _USE_ASSEMBLY and assembly != "":
        return tl.inline_asm_elementwise(
            assembly, "=r,r,r", [words, centres], dtype=DTYPE.value, is_pure=True, pack=2
        )
    elif STORED == "e2m1":
        codes = (words.to(tl.int32) >> (4 * INDEX)) & 15
        exponents = (codes >> 1) & 3
        # In halves: 0, 1, then 2 or 3 times a power of two.
        normal = (2 + (codes & 1)) << tl.maximum(exponents - 1, 0)
        halves = tl.where(exponents == 0, codes & 1, normal)
        return (0.5 * tl.where(codes < 8, halves, -halves).to(tl.float32)).to(DTYPE)
    else:
        bits: tl.constexpr = 8 if STORED == "int8" else 4
        codes = (words.to(tl.int32) >> (bits * INDEX)) & ((1 << bits) - 1)
        return (codes + centre_of(STORED, DTYPE)).to(DTYPE) - centres


@triton.constexpr_function
def centre_of(stored, dtype):
    """What the conversion to a dtype has added to a code before it subtracts the zero point."""
    if str(dtype) == "bf16":
        return -128 if stored == "int8" else 128
    return 1024 if str(dtype) == "fp16" else 0


@triton.constexpr_function
def _assembly(index, stored, float_type):
    """The conversion of a register of two words, $1, with centres $2; empty where there is none.

    lop3 with 0xea is (a & b) | c, with 0x6a (a & b) ^ c.
    """
    dtype = str(float_type)
    if dtype not in ("bf16", "fp16"):
        return ""
    head = "{ .reg .b32 codes, signs; "
    if stored == "e2m1":
        # The sign goes to bit 15, the others to bits 6 to 8 of bfloat16 and 9 to 11 of float16.
        left = (6 if dtype == "bf16" else 9) - 4 * index
        shift = f"shl.b32 codes, $1, {left}; " if left >= 0 else f"shr.u32 codes, $1, {-left}; "
        is_bfloat16 = dtype == "bf16"
        mask = "0x01c001c0" if is_bfloat16 else "0x0e000e00"
        factor = "0x7e807e80" if is_bfloat16 else "0x74007400"  # 2^126 or 2^14
        return (
            f"{head}shl.b32 signs, $1, {12 - 4 * index}; and.b32 signs, signs, 0x80008000; {shift}"
            f"lop3.b32 codes, codes, {mask}, signs, 0xea; mov.b32 signs, {factor}; "
            f"mul.rn.{'bf16x2' if is_bfloat16 else 'f16x2'} $0, codes, signs; }}"
        )
    head += f"shr.u32 codes, $1, {(8 if stored == 'int8' else 4) * index}; "
    if stored == "int8" and dtype == "bf16":
        # bfloat16 counts ones in seven bits. So 128 plus the code's last seven, less 128 where its
        # eighth is set and else 256: the code less 128.
        return (
            f"{head}lop3.b32 signs, codes, 0x00800080, 0x43804380, 0x6a; "
            "lop3.b32 codes, codes, 0x007f007f, 0x43004300, 0xea; "
            "sub.rn.bf16x2 codes, codes, signs; sub.rn.bf16x2 $0, codes, $2; }"
        )
    mask = "0x00ff00ff" if stored == "int8" else "0x000f000f"
    magic, kind = ("0x43004300", "bf16x2") if dtype == "bf16" else ("0x64006400", "f16x2")
    return f"{head}lop3.b32 codes, codes, {mask}, {magic}, 0xea; sub.rn.{kind} $0, codes, $2; }}"
