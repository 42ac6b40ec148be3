"""A stand-in for the package deep_gemm (API generation V2, on sm_90) on a CPU.

It keeps V2's signatures, dtypes and layouts, refuses what the real one refuses, and is as
inconvenient: an expert is read from a block's first row, a block is stored whole, past an expert's
capacity too, and the alignment is a setting of the process. Products are summed in float32.
`calls` notes what was asked for. A test puts it in `sys.modules` as deep_gemm.

B scales that are not contiguous and A scales that are not laid out for TMA are refused, where the
real one copies the latter, in another launch and memory of its own: nothing here may need that.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BLOCK_M = 128
HALF = 64  # rows of one group of warps: the unit that is computed or not

calls: list[tuple[str, dict[str, Any]]] = []
_alignment = 128

Scaled = tuple[Tensor, Tensor]


def module_with(*names: str) -> ModuleType:
    """A deep_gemm that has these names and nothing else: another generation of it."""
    module = ModuleType("deep_gemm")
    for name in names:
        setattr(module, name, object())
    return module


def without_arithmetic() -> ModuleType:
    """A deep_gemm whose GEMMs do nothing, for tensors without memory."""
    module = ModuleType("deep_gemm")
    for name in ("m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"):
        setattr(module, name, lambda *operands, **options: None)
    module.get_mk_alignment_for_contiguous_layout = lambda: 128  # type: ignore[attr-defined]
    return module


def get_mk_alignment_for_contiguous_layout() -> int:
    return _alignment


def set_mk_alignment_for_contiguous_layout(value: int) -> None:
    global _alignment
    _alignment = value


def m_grouped_fp8_gemm_nt_contiguous(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    grouped_layout: Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    assert recipe is None
    assert recipe_a is None
    assert recipe_b is None
    assert not use_psum_layout
    assert expected_m_for_psum_layout is None
    calls.append(("contiguous", {"m": len(a[0]), "ue8m0": not disable_ue8m0_cast}))
    (num_rows, num_columns), (num_experts, width) = a[0].shape, b[0].shape[:2]
    _require(grouped_layout.is_contiguous() and grouped_layout.dtype is torch.int32, "layout")
    _require(grouped_layout.shape == (num_rows,), "m == m__")
    _require(d.shape == (num_rows, width) and d.dtype is torch.bfloat16, "m == m_ and n == n_")
    _check_operands(a[0][None], a[1][None], b, d[None])
    x, w = _dequantised(*a), [_weight(b, expert) for expert in range(num_experts)]
    assert x.shape[1] == num_columns
    d.fill_(torch.nan)
    for start in range(0, num_rows, _alignment):
        expert = max(0, int(grouped_layout[start]))
        for half in range(start, min(start + _alignment, num_rows), HALF):
            rows = slice(half, half + HALF)
            is_computed = int(grouped_layout[half]) >= 0
            d[rows] = (x[rows] @ w[expert].T).bfloat16() if is_computed else 0.0


def m_grouped_fp8_gemm_nt_masked(
    a: Scaled,
    b: Scaled,
    d: Tensor,
    masked_m: Tensor,
    expected_m: int,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    assert recipe is None
    assert recipe_a is None
    assert recipe_b is None
    calls.append(("masked", {"expected_m": expected_m, "ue8m0": not disable_ue8m0_cast}))
    num_experts, capacity, _ = a[0].shape
    _require(b[0].shape[0] == num_experts == masked_m.numel(), "num_groups == num_groups_")
    _require(masked_m.is_contiguous() and masked_m.dtype is torch.int32, "masked_m")
    _require(expected_m > 0 and capacity > 0, "expected_m > 0 and m > 0")
    _require(d.shape == (num_experts, capacity, b[0].shape[1]), "m == m_ and n == n_")
    _require(d.dtype is torch.bfloat16, "d.scalar_type() == torch::kBFloat16")
    _check_operands(*a, b, d)
    flat = d.view(num_experts * capacity, -1)
    # The last first: what is stored past a capacity then stays, as it does when its block is late.
    for expert in reversed(range(num_experts)):
        count = int(masked_m[expert])
        x = _dequantised(a[0][expert], a[1][expert])
        for start in range(0, count, BLOCK_M):
            block = flat.new_zeros((BLOCK_M, d.shape[2]))
            computed = x[start : min(start + BLOCK_M, start + -(-(count - start) // HALF) * HALF)]
            block[: len(computed)] = computed @ _weight(b, expert).T
            first = expert * capacity + start
            flat[first : first + BLOCK_M] = block[: len(flat) - first]


def _check_operands(values: Tensor, scales: Tensor, b: Scaled, d: Tensor) -> None:
    """values [B, M, K], scales [B, M, K / 128], d [B, M, N]: dtypes, strides and alignment."""
    (num_batches, num_rows, num_columns), (num_experts, width, _) = values.shape, b[0].shape
    groups = -(-num_columns // 128)
    _require(values.dtype is b[0].dtype is torch.float8_e4m3fn, "kFloat8_e4m3fn")
    _require(b[0].shape[2] == num_columns, "k == k_")
    _require(scales.dtype is b[1].dtype is torch.float32, "sf dtype")
    _require(scales.shape == (num_batches, num_rows, groups), "sf.size(-1) == ceil_div(k, gran_k)")
    _require(b[1].shape == (num_experts, -(-width // 128), groups), "sf.size(-2)")
    _require(values.is_contiguous() and b[0].is_contiguous() and d.is_contiguous(), "major")
    _require(b[1].is_contiguous(), "sf.stride(-1) == 1")
    _require(num_rows % 4 == 0, "TMA-aligned scales")
    _require(scales.stride()[1:] == (1, num_rows), "MN-major scales")
    _require(num_batches == 1 or scales.stride(0) == groups * num_rows, "MN-major scales")
    _require(width % 8 == 0 and num_columns % 16 == 0, "TMA strides")
    for tensor in (values, scales, b[0], d):
        _require(tensor.data_ptr() % 16 == 0, "TMA addresses")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"Assertion error (csrc/apis/gemm.hpp): {what}")


def _dequantised(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.repeat_interleave(128, dim=1)[:, : values.shape[1]]


def _weight(b: Scaled, expert: int) -> Tensor:
    values, scales = b[0][expert].float(), b[1][expert]
    wide = scales.repeat_interleave(128, dim=0)[: values.shape[0]]
    return values * wide.repeat_interleave(128, dim=1)[:, : values.shape[1]]
