"""Compile for sm_90 whatever a call of the triton experts would launch; needs no GPU.

Run as `python -m tests.kernels.compile_gate` in a process without TRITON_INTERPRET. The product's
own launches are caught on meta tensors, so nothing here repeats a kernel's signature. Prints one
JSON list of {kernel, weights, shared_bytes}; a kernel that does not compile is a traceback.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    BatchedExpertInput,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.quant.scheme import (
    UNQUANTISED,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.triton_operands import prepare_triton_weights
from ep_runtime.kernels.workspace import Workspace

# A kernel, its positional and its keyword arguments.
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]

TARGET = GPUTarget("cuda", 90, 32)
POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_launch(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Compile a kernel as a launch with these arguments would specialise it."""
    options = {name: keywords.pop(name) for name in ("num_warps", "num_stages") if name in keywords}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        specialise = not parameter.do_not_specialize
        is_one = isinstance(value, int) and value == 1 and specialise
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTER_TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = POINTER_TYPES[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{value.block_shape}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and specialise:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGET, options=options)


def catch_launches(call: Callable[[], object]) -> list[Launch]:
    """What a call would launch, none of it launched; its tensors are meta tensors."""
    caught: list[Launch] = []

    def catch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        caught.append((kernel, arguments, keywords))

    released = JITFunction.run
    JITFunction.run = catch
    try:
        call()
    finally:
        JITFunction.run = released
    return caught


def run_triton_experts(shape: ExpertsShape, num_rows: int, *, with_num_rows: bool) -> None:
    """One call of TritonExperts on meta tensors; a single row comes quantised."""
    comes_quantised = num_rows == 1 and shape.dtype is torch.bfloat16
    expert_input = StandardExpertInput(
        _empty(
            num_rows,
            shape.hidden_size,
            dtype=torch.float8_e4m3fn if comes_quantised else shape.dtype,
        ),
        _empty(num_rows, shape.top_k, dtype=torch.int32),
        _empty(num_rows, shape.top_k, dtype=torch.float32),
        _empty(1, dtype=torch.int32) if with_num_rows else None,
        _empty(num_rows, -(-shape.hidden_size // 128), dtype=torch.float32)
        if comes_quantised
        else None,
    )
    TritonExperts(shape).run(expert_input, _weights(shape), Workspace(torch.device("meta")))


def run_triton_batched_experts(shape: ExpertsShape, capacity: int) -> None:
    """One call of TritonBatchedExperts on meta tensors."""
    expert_input = BatchedExpertInput(
        _empty(shape.num_local_experts, capacity, shape.hidden_size, dtype=shape.dtype),
        _empty(shape.num_local_experts, dtype=torch.int32),
    )
    TritonBatchedExperts(shape).run(expert_input, _weights(shape), Workspace(torch.device("meta")))


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _weights(shape: ExpertsShape) -> ExpertWeights:
    num_experts, hidden, inner = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    parts = 2 if shape.activation.is_gated else 1
    stored = torch.float8_e4m3fn if shape.scheme.is_quantised else shape.dtype

    def quant(num_rows: int, num_columns: int, parts: int) -> QuantParameters | None:
        if not shape.scheme.is_quantised:
            return None
        size: tuple[int, ...] = (num_experts, parts * num_rows)
        if shape.scheme.weight is WeightScheme.FP8_BLOCK:
            size = (num_experts, parts * -(-num_rows // 128), -(-num_columns // 128))
        return QuantParameters(_empty(*size, dtype=torch.float32))

    def bias(num_columns: int) -> Tensor | None:
        return _empty(num_experts, num_columns, dtype=shape.dtype) if shape.has_bias else None

    return prepare_triton_weights(
        ExpertWeights(
            w13=_empty(num_experts, parts * inner, hidden, dtype=stored),
            w2=_empty(num_experts, hidden, inner, dtype=stored),
            w13_bias=bias(parts * inner),
            w2_bias=bias(hidden),
            w13_quant=quant(inner, hidden, parts),
            w2_quant=quant(hidden, inner, 1),
        )
    )


def gate_cases() -> list[tuple[ExpertsShape, int, bool]]:
    """Each dtype with few and many rows; each activation; sizes that divide nothing; a bias."""
    silu = Activation()
    cases = [
        (ExpertsShape(64, 2048, 768, 8, silu, dtype), num_rows, num_rows > 1)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for num_rows in (1, 4096)
    ]
    for weight in (WeightScheme.FP8_BLOCK, WeightScheme.FP8_CHANNEL):
        for num_rows in (1, 32, 256, 4096):
            shape = ExpertsShape(8, 2048, 768, 8, silu, torch.bfloat16, scheme=QuantScheme(weight))
            cases.append((shape, num_rows, False))
    for kind in ActivationKind:
        activation = Activation(kind, limit=7.0 if kind is ActivationKind.SWIGLUOAI else None)
        cases.append((ExpertsShape(3, 300, 97, 1, activation, torch.bfloat16, True), 33, False))
    return cases


def batched_gate_cases() -> list[tuple[ExpertsShape, int]]:
    """Few and many rows in the dtype that a batched backend has; sizes that divide nothing."""
    silu = Activation()
    decode = ExpertsShape(32, 7168, 2048, 8, silu, torch.bfloat16)
    odd = ExpertsShape(3, 300, 97, 1, silu, torch.float32, has_bias=True)
    return [(decode, 256), (decode, 4096), (odd, 33)]


def main() -> None:
    report = []
    seen = set()
    calls: list[tuple[ExpertsShape, Callable[[], None]]] = [
        (shape, partial(run_triton_experts, shape, num_rows, with_num_rows=with_num_rows))
        for shape, num_rows, with_num_rows in gate_cases()
    ]
    calls += [
        (shape, partial(run_triton_batched_experts, shape, capacity))
        for shape, capacity in batched_gate_cases()
    ]
    for shape, call in calls:
        for kernel, arguments, keywords in catch_launches(call):
            compiled = compile_launch(kernel, arguments, dict(keywords))
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                shared_bytes = compiled.metadata.shared
                weights = str(shape.dtype if shape.scheme == UNQUANTISED else shape.scheme.weight)
                entry = {"kernel": kernel.__name__, "weights": weights}
                report.append({**entry, "shared_bytes": shared_bytes})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
