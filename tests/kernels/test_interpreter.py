"""Canaries: what Triton's interpreter gets wrong unless it is repaired."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from ep_runtime.kernels.interpreter import install, is_interpreting, prepare_launch

ROOT = Path(__file__).parents[2]


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets))
    tl.store(out_ptr + offsets, product.to(tl.bfloat16))


@triton.jit
def _arithmetic_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)
    tl.store(out_ptr + offsets, a + b)
    tl.store(out_ptr + SIZE + offsets, a * b)
    tl.store(out_ptr + 2 * SIZE + offsets, tl.where(a > b, a, b))
    tl.store(out_ptr + 3 * SIZE + offsets, tl.cumsum(a, axis=0))
    tl.store(out_ptr + 4 * SIZE + offsets, a * 0.5)
    tl.store(out_ptr + 5 * SIZE, tl.sum(a, axis=0))


@triton.jit
def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets).to(out_ptr.dtype.element_ty))


@triton.jit
def _count_steps_kernel(out_ptr, size, STEP: tl.constexpr):
    steps = 0
    for _ in range(tl.cdiv(size, STEP)):
        steps += 1
    tl.store(out_ptr, steps)


def bf16(*size: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(device, torch.bfloat16)


def test_bf16_dot_accumulates_in_float32(device: torch.device) -> None:
    prepare_launch(device)
    a, b = bf16(32, 32, seed=1, device=device), bf16(32, 32, seed=2, device=device)
    out = torch.full_like(a, torch.nan)
    _dot_kernel[(1,)](a, b, out, SIZE=32)
    # One rounding to bfloat16 apart, where float32 sums differ in order.
    torch.testing.assert_close(out, (a.float() @ b.float()).bfloat16(), rtol=2**-8, atol=1e-6)


def test_bf16_arithmetic_rounds_once(device: torch.device) -> None:
    prepare_launch(device)
    a, b = bf16(64, seed=3, device=device), bf16(64, seed=4, device=device)
    out = torch.full((5 * 64 + 1,), torch.nan, dtype=torch.bfloat16, device=device)
    _arithmetic_kernel[(1,)](a, b, out, SIZE=64)
    torch.testing.assert_close(out[:64], a + b, rtol=0, atol=0)
    torch.testing.assert_close(out[64:128], a * b, rtol=0, atol=0)
    torch.testing.assert_close(out[128:192], torch.maximum(a, b), rtol=0, atol=0)
    torch.testing.assert_close(out[256:320], a * 0.5, rtol=0, atol=0)
    # Long sums: Triton on a GPU may round between the steps of a bfloat16 scan.
    torch.testing.assert_close(out[192:256].float(), a.float().cumsum(0), rtol=0.05, atol=0.1)
    torch.testing.assert_close(out[320].float(), a.float().sum(), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16])
def test_float32_is_rounded_to_nearest_even(device: torch.device, target: torch.dtype) -> None:
    prepare_launch(device)
    # Halfway cases on both sides of an even number, then infinities, NaN and a subnormal.
    step = 2.0**-7 if target is torch.bfloat16 else 2.0**-10
    special = [1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, float("inf"), -float("inf")]
    values = torch.tensor([*special, float("nan"), 1e-40, 3.0], device=device)
    out = torch.zeros(8, dtype=target, device=device)
    _cast_kernel[(1,)](values, out, SIZE=8)
    torch.testing.assert_close(out, values.to(target), rtol=0, atol=0, equal_nan=True)


def test_integers_become_bf16_by_value(device: torch.device) -> None:
    prepare_launch(device)
    values = torch.arange(-4, 4, dtype=torch.int32, device=device)
    out = torch.full((8,), torch.nan, dtype=torch.bfloat16, device=device)
    _cast_kernel[(1,)](values, out, SIZE=8)
    assert out.tolist() == values.tolist()


def test_range_takes_a_tensor(device: torch.device) -> None:
    prepare_launch(device)
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _count_steps_kernel[(1,)](out, 33, STEP=8)
    assert out.item() == 5


@pytest.mark.skipif(not is_interpreting(), reason="the interpreter is not in use")
def test_install_twice_changes_nothing() -> None:
    import triton.runtime.interpreter as interpreter

    install()
    before = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float
    install()
    assert before == (interpreter.InterpreterBuilder.create_dot, interpreter._convert_float)


def run_without_variable(program: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_on_cpu_tensors_are_refused_where_triton_compiles() -> None:
    output = run_without_variable(
        "import torch\n"
        "from ep_runtime.kernels.errors import PlanError\n"
        "from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch\n"
        "import ep_runtime.kernels.triton_experts\n"
        "import os; os.environ['TRITON_INTERPRET'] = '1'  # too late to count\n"
        "print(is_interpreting())\n"
        "try: prepare_launch(torch.device('cpu'))\n"
        "except PlanError as error: print(error)\n"
    )
    assert output.splitlines()[0] == "False"
    assert "TRITON_INTERPRET=1" in output
