"""NF3 weights as the packed kernels read them, and what the kernels make of them."""

import re
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.packed_nf3 import _assembly
from ep_runtime.kernels.quant.nf3 import NF3_VALUES, ZERO_CODE, quantize_nf3, unpack_codes
from ep_runtime.kernels.quant.packed_weights import pack_weight, packed_layout, unpack_words
from ep_runtime.kernels.quant.scheme import (
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.triton_experts import TritonExperts
from tests.kernels.cases import ExpertsCase
from tests.kernels.packed_cases import PackedCase
from tests.kernels.test_packed_experts import reference, run
from tests.tolerances import assert_close

NF3 = QuantScheme(WeightScheme.NF3)
LAYOUT = packed_layout(NF3)
# Columns in two blocks, and in part of one.
SMALL = ExpertsCase("small", 7, 2, 288, 96, 2, dtype=torch.bfloat16)


class Nf3Case(PackedCase):
    """Weights whose every value is one that quantising gives."""

    def weights(self, device: torch.device) -> ExpertWeights:
        plain = self.case.weights(torch.device("cpu"))

        def stored(weight: Tensor) -> tuple[Tensor, QuantParameters]:
            experts = [quantize_nf3(one) for one in weight]
            scales = torch.cat([one.parameters.scales for one in experts])
            values = torch.cat([one.values for one in experts])
            return values.to(device), QuantParameters(scales.to(device))

        w13, w13_quant = stored(plain.w13)
        w2, w2_quant = stored(plain.w2)
        return replace(
            self.case.weights(device), w13=w13, w2=w2, w13_quant=w13_quant, w2_quant=w2_quant
        )


def test_words_take_three_bits_a_column_of_whole_blocks_and_lose_nothing() -> None:
    weight = torch.randn(2, 5, 288, generator=torch.Generator().manual_seed(1))
    stored = [quantize_nf3(one) for one in weight]
    values = torch.cat([one.values for one in stored])
    scales = torch.cat([one.parameters.scales for one in stored])
    words, quant = pack_weight(values, QuantParameters(scales), LAYOUT)
    assert words.shape == (2, 5, 2 * 48)
    assert words.nbytes * 8 == 3 * 2 * 5 * 512
    assert torch.equal(unpack_words(words, 288, LAYOUT), unpack_codes(values))
    assert (unpack_words(words, 512, LAYOUT)[..., 288:] == ZERO_CODE).all()
    assert quant.scales.shape == (2, 8, 5)
    assert torch.equal(quant.scales[:, :5].mT, scales)
    assert not quant.scales[:, 5:].any()


def test_planes_are_laid_out_as_the_kernels_file_says() -> None:
    """Column i * 16 + j is field i of word j."""
    codes = torch.zeros(1, 1, 256, dtype=torch.uint8)
    codes[0, 0, 3 * 16 + 2] = 5  # field 3 of word 2: 01 at bit 6 of the first plane, bit 3 above
    codes[0, 0, 9 * 16 + 4] = 2  # field 9 of word 4: 10 at bit 2 of the second
    from ep_runtime.kernels.quant.nf3 import pack_codes

    words, _ = pack_weight(
        pack_codes(codes), QuantParameters(torch.ones(1, 1, 4, dtype=torch.bfloat16)), LAYOUT
    )
    first, second, upper = words[0, 0].view(3, 16).tolist()
    assert first == [0, 0, 1 << 6, *[0] * 13]
    assert second == [0, 0, 0, 0, 2 << 2, *[0] * 11]
    assert upper == [0, 0, 1 << 3, *[0] * 13]


CASES = [
    Nf3Case("bfloat16", SMALL, NF3),
    Nf3Case("float16_bias", replace(SMALL, dtype=torch.float16, has_bias=True), NF3),
    Nf3Case("float32", replace(SMALL, dtype=torch.float32), NF3),
]


@pytest.mark.parametrize("packed", CASES, ids=str)
def test_the_triton_experts_equal_the_reference(packed: Nf3Case, device: torch.device) -> None:
    expert_input = packed.case.expert_input(device)
    output = run(TritonExperts(packed.shape), packed, expert_input)
    assert_close(output, reference(packed, expert_input))


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
@pytest.mark.parametrize("index", range(16))
def test_the_assembly_gives_each_codes_exact_value(
    index: int, dtype: torch.dtype, name: str
) -> None:
    """Run instruction by instruction as the PTX manual defines them, on every pair of codes, with
    all other bits set and clear."""
    text = _assembly(index, tl.bfloat16 if name == "bf16" else tl.float16)
    program = str(getattr(text, "value", text))
    bits = torch.tensor(NF3_VALUES).to(dtype).view(torch.int16).int() & 0xFFFF
    for others in (0, 0xFFFFFFFF):
        for low in range(8):
            for high in range(8):
                pair, upper = others, others
                for half, code in ((0, low), (16, high)):
                    at = half + 2 * (index % 8)
                    pair = pair & ~(3 << at) | (code & 3) << at
                    upper = upper & ~(1 << half + index) | (code >> 2) << half + index
                expected = int(bits[low]) | int(bits[high]) << 16
                assert execute(program, pair & 0xFFFFFFFF, upper & 0xFFFFFFFF) == expected


def execute(program: str, first: int, second: int) -> int:
    """A PTX program of 32-bit registers: what it leaves in $0. Defined by the PTX ISA, sections
    "Logic and Shift Instructions" and "Data Movement: prmt"."""
    registers = {"$1": first, "$2": second}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in re.sub(r"^\{ \.reg [^;]*;|\}$", "", program.strip()).split(";"):
        if not line.strip():
            continue
        name, rest = line.split(maxsplit=1)
        target, *operands = (part.strip() for part in rest.split(","))
        given = [value(operand) for operand in operands]
        registers[target] = _OPERATIONS[name](given) & 0xFFFFFFFF
    return registers["$0"]


def _lop3(given: list[int]) -> int:
    a, b, c, table = given
    result = 0
    for bit in range(32):
        row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        result |= (table >> row & 1) << bit
    return result


def _prmt(given: list[int]) -> int:
    low, high, selector = given
    octets = (low | high << 32).to_bytes(8, "little")
    result = 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        octet = octets[nibble & 7]
        if nibble & 8:  # the sign, replicated
            octet = 255 if octet & 128 else 0
        result |= octet << 8 * place
    return result


_OPERATIONS = {
    "mov.b32": lambda given: given[0],
    "and.b32": lambda given: given[0] & given[1],
    "or.b32": lambda given: given[0] | given[1],
    "shl.b32": lambda given: given[0] << given[1],
    "shr.u32": lambda given: given[0] >> given[1],
    "lop3.b32": _lop3,
    "prmt.b32": _prmt,
}


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 64, 256, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_height_equals_the_reference_on_cuda(num_rows: int, dtype: torch.dtype) -> None:
    case = ExpertsCase("large", num_rows, 8, 1024, 480, 4, dtype=dtype)
    packed = Nf3Case("cuda", case, NF3)
    expert_input = case.expert_input(torch.device("cuda"))
    output = run(TritonExperts(packed.shape), packed, expert_input)
    assert_close(output, reference(packed, expert_input))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_identity_shows_each_weight_exactly_on_cuda(dtype: torch.dtype) -> None:
    """relu2 of one-hot rows through w13, so that a value in another's place would show."""
    from ep_runtime.kernels.align_blocks import align_slots_reference
    from ep_runtime.kernels.base import Activation, ActivationKind, StandardExpertInput
    from ep_runtime.kernels.packed_gemm import project_gate_up_packed
    from ep_runtime.kernels.packed_schedule import PackedTiles
    from ep_runtime.kernels.quant.dequantize import dequantize
    from ep_runtime.kernels.triton_operands import pack_triton_weights

    device, size = torch.device("cuda"), 256
    stored = quantize_nf3(torch.randn(64, size, generator=torch.Generator().manual_seed(1)))
    values, scales = stored.values.to(device), stored.parameters.scales.to(device)
    exact = dequantize(QuantizedTensor(values, QuantParameters(scales), NF3))[0]
    weights = ExpertWeights(
        values, values, w13_quant=QuantParameters(scales), w2_quant=QuantParameters(scales)
    )
    rows = torch.eye(size, dtype=dtype, device=device)
    ids = torch.zeros(size, 1, dtype=torch.int32, device=device)
    aligned = align_slots_reference(
        StandardExpertInput(rows, ids, ids.float()), num_local_experts=1, block_m=16
    )
    out = torch.full((len(aligned.slots), 64), torch.nan, device=device)
    project_gate_up_packed(
        rows,
        pack_triton_weights(weights, NF3),
        aligned,
        layout=LAYOUT,
        top_k=1,
        activation=Activation(ActivationKind.RELU2),
        tiles=PackedTiles(64, num_warps=4, num_stages=2),
        out=out,
    )
    assert torch.equal(out, exact.T.clamp(min=0).square())
