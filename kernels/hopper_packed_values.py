"""Packed codes of Hopper's packed GEMM as fragments of wgmma's left operand, in registers.

A *slab* is 64 rows and 64 columns of W. Its 4-bit codes are 32-bit words, four for each thread of a
warp group: word j holds the thread's eight codes of columns 16 j to 16 j + 15, the four registers
of a 64 x 16 fragment, register p in bits 4 p to 4 p + 3 (its even column) and 16 + 4 p to 19 + 4 p
(its odd one). So a thread's words are 16 bytes, one load; (word >> 4 p) & 0x000f000f are the
codes of one, and nothing ever moves between threads.

In tensors: words [32, 32] int16, row 8 w + g and column 8 t + 2 j + b of warp w, lane 4 g + t; the
fragment [64, 64], rows 16 w + 8 h + g and columns 16 j + 8 c + 2 t + b, where p = 2 c + h.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# A thread's four words are consecutive; threads in order, four to a row.
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 32],
    )
)
# What a thread needs of a group of columns, four numbers: of both its rows of two slabs.
FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 4],
    )
)


# Sign, exponent and mantissa of an e2m1 code where bfloat16 has them, of both halves of a word.
_E2M1_MASK = "0x81c081c0"


@gluon.constexpr_function
def conversion(stored, is_scaled, has_centres, dtype):
    """Assembly that turns $4 into four registers of two 16-bit values each.

    int4: 128 + code is 0x4300 | code of bfloat16, which counts ones in its last seven bits there;
    of float16 1024 + code is 0x6400 | code. From it that plus 8, or the centre, is subtracted,
    exactly. Then the row's scale multiplies it, rounded once. e2m1 in bfloat16: as
    kernels/hopper_packed_layout.py spreads its bits they are the value times 2^-126, which the
    scale multiplies, exactly.
    Inputs: $4 words, scales of both rows where scaled, centres of both rows where there are any.
    """
    kind = "bf16x2" if str(dtype) == "bf16" else "f16x2"
    if stored == "e2m1":
        if not is_scaled or has_centres or kind != "bf16x2":
            raise ValueError("e2m1 weights are bfloat16 with scales and without zero points here")
        return _e2m1_conversion()
    lines = ["{ .reg .b32 q, v;"]
    for p in range(4):
        target = "v" if is_scaled else f"${p}"
        magic = "0x43004300" if kind == "bf16x2" else "0x64006400"
        source = "$4"
        if p > 0:
            lines.append(f"shr.u32 q, $4, {4 * p};")
            source = "q"
        lines.append(f"lop3.b32 v, {source}, 0x000f000f, {magic}, 0xea;")
        if not has_centres:
            lines.append(f"mov.b32 q, {magic.replace('00', '08')};")
        subtracted = f"${(7 if is_scaled else 5) + p % 2}" if has_centres else "q"
        lines.append(f"sub.rn.{kind} {target}, v, {subtracted};")
        if is_scaled:
            lines.append(f"mul.rn.{kind} ${p}, v, ${5 + p % 2};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _e2m1_conversion():
    lines = ["{ .reg .b32 q, v;", f"and.b32 v, $4, {_E2M1_MASK};", "mul.rn.bf16x2 $0, v, $5;"]
    for p in (1, 2):
        lines += [f"shl.b32 v, $4, {3 * p};", f"and.b32 v, v, {_E2M1_MASK};"]
        lines.append(f"mul.rn.bf16x2 ${p}, v, ${5 + p % 2};")
    # Of the last one the mantissa and lower exponent bit, the upper one, the sign: 0xe4 takes what
    # is under the mask from the first operand, the rest from the second.
    lines += ["shr.u32 v, $4, 4;", "shr.u32 q, $4, 5;", "lop3.b32 v, v, q, 0x00c000c0, 0xe4;"]
    lines += ["shl.b32 q, $4, 1;", "lop3.b32 v, q, v, 0x80008000, 0xe4;"]
    lines += [f"and.b32 v, v, {_E2M1_MASK};", "mul.rn.bf16x2 $3, v, $6; }"]
    return " ".join(lines)


@gluon.constexpr_function
def four_of(dtype):
    return (dtype, dtype, dtype, dtype)


@gluon.jit
def split_factors(factors):
    """[32, 4] as loaded: (slab 0's upper rows, lower rows), (slab 1's), [32, 1] each."""
    lower, upper = factors.reshape([32, 2, 2]).split()
    lower_0, lower_1 = lower.split()
    upper_0, upper_1 = upper.split()
    return (_as_column(lower_0), _as_column(upper_0)), (_as_column(lower_1), _as_column(upper_1))


@gluon.jit
def _as_column(factors):
    return gl.expand_dims(gl.convert_layout(factors, gl.SliceLayout(1, WORDS)), 1)


@gluon.jit
def from_word(first, second, WORD: gl.constexpr):
    """Pairs [32, 1], or the first [32, 32], of a slab's columns as pairs [32, 32], by word: those
    of the second from word WORD on, which is column 16 WORD."""
    # Word j of a thread, of which the compiler knows the number: nothing is left of the choice.
    word = gl.arange(0, 32, gl.SliceLayout(0, WORDS)) // 2 % 4
    is_second = gl.expand_dims(word >= WORD, 0)
    return gl.where(is_second, second[0], first[0]), gl.where(is_second, second[1], first[1])


@gluon.jit
def fragment_of(
    words, scales, centres, OPERAND: gl.constexpr, DTYPE: gl.constexpr, STORED: gl.constexpr
):
    """A slab's words [32, 32] as wgmma's left operand [64, 64]; scales, centres: pairs or None."""
    IS_SCALED: gl.constexpr = scales is not None
    HAS_CENTRES: gl.constexpr = centres is not None
    ASSEMBLY: gl.constexpr = conversion(STORED, IS_SCALED, HAS_CENTRES, DTYPE)
    TYPES: gl.constexpr = four_of(DTYPE)
    if IS_SCALED and HAS_CENTRES:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASSEMBLY,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, scales[0], scales[1], centres[0], centres[1]],
            TYPES,
            True,
            2,
        )
    elif IS_SCALED:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASSEMBLY, "=&r,=&r,=&r,=&r,r,r,r", [words, scales[0], scales[1]], TYPES, True, 2
        )
    elif HAS_CENTRES:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASSEMBLY, "=&r,=&r,=&r,=&r,r,r,r", [words, centres[0], centres[1]], TYPES, True, 2
        )
    else:
        p0, p1, p2, p3 = gl.inline_asm_elementwise(
            ASSEMBLY, "=&r,=&r,=&r,=&r,r", [words], TYPES, True, 2
        )
    upper = gl.join(p0, p2)
    lower = gl.join(p1, p3)
    values = gl.join(upper, lower).reshape([4, 8, 4, 4, 2, 2, 2])  # w, g, t, j, b, c, h
    values = values.permute([0, 6, 1, 3, 5, 2, 4]).reshape([64, 64])
    return gl.convert_layout(values, OPERAND, assert_trivial=True)
