"""A stand-in for the operator `moe_wna16_marlin_gemm` of vLLM 0.26 on a CPU.

It has the real one's schema, refuses what the real one refuses, and reads its layout: where each
code lies follows here, number by number, from the lane of a matrix product that holds it
(`code_positions`, ...), not from the product's reshapes. Products are summed in float32. As on a
GPU, sizes that no thread block fits are refused, only the slots in the tiles are written, what a
tile's padding or what lies past the last tile holds is never looked at, and the locks are 0 before
and after. `calls` notes what was asked for.

`registered` puts it in torch.ops; other signatures make other generations of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.e2m1 import E2M1_VALUES

OPERATOR = "moe_wna16_marlin_gemm"
# As the library of vLLM 0.26.0 registers it.
SCHEMA = (
    f"{OPERATOR}(Tensor! a, Tensor? c_or_none,Tensor! b_q_weight, Tensor? b_bias_or_none,"
    "Tensor! b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none,"
    "Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor! workspace,Tensor sorted_token_ids,"
    "Tensor! expert_ids, Tensor! num_tokens_past_padded,Tensor! topk_weights, int moe_block_size, "
    "int top_k, bool mul_topk_weights, int b_type_id,int size_m, int size_n, int size_k,"
    "bool is_full_k, bool use_atomic_add,bool use_fp32_reduce, bool is_zp_float,int thread_k, "
    "int thread_n, int blocks_per_sm) -> Tensor"
)
# As sglang's sgl_kernel does (0.3), and vLLM after it gave up act-order.
SGLANG_SCHEMA = (
    SCHEMA.replace("Tensor? a_scales, Tensor? global_scale", "Tensor? global_scale_or_none")
    .replace(
        "bool mul_topk_weights, int b_type_id", "bool mul_topk_weights, bool is_ep, int b_q_type_id"
    )
    .replace("is_full_k", "is_k_full")
    .replace(",int thread_k, int thread_n, int blocks_per_sm", "")
)
WITHOUT_ORDER_SCHEMA = SCHEMA.replace("Tensor? g_idx_or_none, Tensor? perm_or_none, ", "").replace(
    "bool is_full_k, ", ""
)
# vllm.scalar_type.scalar_types.NAME.id: bits, what is taken off a code.
UINT4, UINT4B8, UINT8B128, E2M1 = (
    0x4000000000400,
    0x4000000100400,
    0x4000001000800,
    0x2000000010102,
)
BITS = {UINT4: 4, UINT4B8: 4, UINT8B128: 8, E2M1: 4}
GROUPS = {UINT4: (-1, 32, 64, 128), UINT4B8: (-1, 32, 64, 128), UINT8B128: (-1, 32, 64, 128)}
MULTIPROCESSORS = 132

calls: list[dict[str, Any]] = []


@contextmanager
def registered(schema: str = SCHEMA, namespace: str = "_moe_C") -> Iterator[None]:
    """The operator in torch.ops, until the end; on meta tensors it does nothing."""
    name = schema.partition("(")[0]
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(schema)
    names = [part.split()[-1].partition("=")[0] for part in _arguments(schema)]

    def on_cpu(*values: Any) -> Tensor:
        return _gemm(dict(zip(names, values, strict=True)))

    library.impl(name, on_cpu, "CPU")
    library.impl(name, lambda a, c, *_: c, "Meta")
    calls.clear()
    try:
        yield
    finally:
        library._destroy()


def _arguments(schema: str) -> list[str]:
    return schema.partition("(")[2].partition(") ->")[0].split(",")


def _gemm(given: dict[str, Any]) -> Tensor:
    a, words, scales = (given[n] for n in ("a", "b_q_weight", "b_scales"))
    c: Tensor = given["c_or_none"]
    kind = given["b_type_id"] if "b_type_id" in given else given["b_q_type_id"]
    size_m, size_n, size_k, top_k = (given[n] for n in ("size_m", "size_n", "size_k", "top_k"))
    zeros, order = given["b_zeros_or_none"], given.get("perm_or_none")
    block, slots = given["moe_block_size"], given["sorted_token_ids"]
    calls.append({"moe_block_size": block, "size_m": size_m, "top_k": top_k})
    bits = BITS[kind]
    _require(block == 8 or (block % 16 == 0 and 16 <= block <= 64), f"moe_block_size={block}")
    _require(a.shape == (size_m, size_k) and a.is_contiguous(), "a")
    _require(a.dtype in (torch.bfloat16, torch.float16) and a.dtype is c.dtype, "dtypes")
    _require(a.data_ptr() % 16 == 0, "a is read 16 bytes at a time")
    _require(c.shape == (size_m * top_k, size_n) and c.is_contiguous(), "c")
    _require(words.shape[1:] == (size_k // 16, size_n * bits // 2), "b_q_weight")
    _require(words.dtype is torch.int32 and words.is_contiguous(), "b_q_weight")
    _require(scales.dim() == 3 and scales.shape[2] == size_n and scales.is_contiguous(), "b_scales")
    num_groups = scales.shape[1]
    _require(size_k % num_groups == 0, "size_k is not divisible by b_scales.size(1)")
    group = size_k // num_groups if num_groups > 1 else -1
    if order is not None:
        _require(order.shape == (len(words), size_k) and order.is_contiguous(), "perm")
        _require(order.dtype is torch.int32 and given["g_idx_or_none"].shape[-1] == size_k, "g_idx")
        _require(num_groups > 1, "For act_order, num_groups must be > 1")
    if kind == E2M1:
        _require(scales.dtype is torch.float8_e8m0fnu, "b_scale scalar type")
        _require(a.dtype is torch.bfloat16 and group == 32, "Unsupported shapes")
    else:
        _require(scales.dtype is a.dtype and group in GROUPS[kind], "Unsupported shapes")
    _require((zeros is not None) == (kind == UINT4), "b_type when has_zp")
    if zeros is not None:
        _require(zeros.shape == (len(words), num_groups, size_n // 8), "b_zeros")
        _require(zeros.dtype is torch.int32 and zeros.is_contiguous(), "b_zeros")
    _require(size_n % 128 == 0 and size_k % 64 == 0, "Invalid thread config")
    locks = given["workspace"]
    least = min(size_n // 64 * (slots.numel() // block), MULTIPROCESSORS * 4)
    _require(locks.numel() >= least and locks.dtype is torch.int32, "workspace.numel")
    _require(not locks.any(), "a program would wait for ever")
    _require(not given["use_atomic_add"] and given["use_fp32_reduce"], "not in a fixed order")
    _require(not given["mul_topk_weights"], "weights the results")
    _require(slots.dtype is given["expert_ids"].dtype is torch.int32, "int32")
    _require(given["num_tokens_past_padded"].dtype is torch.int32, "int32")

    bias = given["b_bias_or_none"]
    num_positions = int(given["num_tokens_past_padded"])
    _require(num_positions <= slots.numel(), "num_tokens_past_padded")
    experts = given["expert_ids"].tolist()
    for tile in range(num_positions // block):
        expert = experts[tile]
        own = slots[tile * block : (tile + 1) * block]
        # The real one counts those below size_m * top_k and takes so many from the front.
        own = own[: int((own < size_m * top_k).sum())].long()
        x = a[own // top_k].float()
        if order is not None:
            x = x[:, order[expert].long()]
        zero_words = None if zeros is None else zeros[expert]
        result = x @ weight_of(kind, words[expert], scales[expert], zero_words)
        if bias is not None:
            result += bias[expert][row_positions(size_n)].float()
        c[own] = result.to(c.dtype)
    return c


def weight_of(kind: int, words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """One expert's weight [K, N] in float32, of its words [K / 16, ..], scales [G, N] and zero
    points [G, N / 8]."""
    (num_groups, size_n), size_k, bits = scales.shape, words.shape[0] * 16, BITS[kind]
    codes = _fields(words.flatten(), bits)[code_positions(size_k, size_n, bits)]
    groups = torch.arange(size_k) // (size_k // num_groups)
    if kind == E2M1:
        values = torch.tensor(E2M1_VALUES)[codes]
        order = fp8_positions(size_n)
    else:
        order = group_positions(size_n) if num_groups > 1 else row_positions(size_n)
        zero = torch.tensor(0 if kind == UINT4 else 2 ** (bits - 1))
        if zeros is not None:
            zero = _fields(zeros.flatten(), 4).view(num_groups, -1)[:, zero_positions(size_n)]
            zero = zero[groups]
        values = (codes - zero).float()
    weight: Tensor = values * scales.float()[:, order][groups]
    return weight


def _fields(words: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 32, bits)
    fields: Tensor = (words.long()[:, None] >> shifts) & (2**bits - 1)
    return fields.flatten()


@cache
def code_positions(size_k: int, size_n: int, bits: int) -> Tensor:
    """[K, N] where in a weight's fields, counted through all words, each code is."""
    positions = torch.full((size_k, size_n), -1)
    # The order in which the kernel unpacks a word gives the fields of its codes.
    interleave = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else [0, 2, 1, 3]
    field = 0
    for first_k in range(0, size_k, 16):
        for first_n in range(0, size_n, 64):
            for lane in range(32):
                for product in range(4):
                    held = [
                        (first_k + k, first_n + 16 * product + 8 * half + lane // 4)
                        for half in range(2)
                        for k in (2 * (lane % 4) + i for i in (0, 1, 8, 9))
                    ]
                    for first in range(0, 8, len(interleave)):
                        for taken in interleave:
                            positions[held[first + taken]] = field
                            field += 1
    assert (positions >= 0).all()
    return positions


@cache
def group_positions(size_n: int) -> Tensor:
    """[N] where in a group's scales each row's is."""
    return _inverse([64 * (p // 64) + p % 64 // 8 + 8 * (p % 8) for p in range(size_n)])


@cache
def row_positions(size_n: int) -> Tensor:
    """[N] where each row's scale or bias is, of which there is one."""
    offsets = (0, 1, 8, 9, 16, 17, 24, 25)
    return _inverse([32 * (p // 32) + 2 * (p % 32 // 8) + offsets[p % 8] for p in range(size_n)])


@cache
def zero_positions(size_n: int) -> Tensor:
    """[N] in which field of a group's zero points each row's is."""
    interleave = (0, 2, 4, 6, 1, 3, 5, 7)
    places = [8 * (f // 8) + interleave[f % 8] for f in range(size_n)]
    return _inverse([64 * (p // 64) + p % 64 // 8 + 8 * (p % 8) for p in places])


@cache
def fp8_positions(size_n: int) -> Tensor:
    """[N] where in a group's 8-bit scales each row's is."""
    places = [4 * (p // 4) + (0, 2, 1, 3)[p % 4] for p in range(size_n)]
    return _inverse([64 * (p // 64) + p % 64 // 8 + 8 * (p % 8) for p in places])


def _inverse(row_at: list[int]) -> Tensor:
    positions = torch.empty(len(row_at), dtype=torch.int64)
    positions[row_at] = torch.arange(len(row_at))
    return positions


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(f"{OPERATOR}: {what}")
