"""Compile for sm_90 whatever a call of the triton experts would launch; needs no GPU.

Run as `python -m tests.kernels.compile_gate` in a process without TRITON_INTERPRET. The product's
own launches are caught on meta tensors, so nothing here repeats a kernel's signature. Prints one
JSON list of {kernel, weights, waits_first, shared_bytes}; what does not compile is a traceback.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels import dependent_launch, tiles
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
from ep_runtime.kernels.quant.storage import empty_stored, quantized_tensor, stored_shapes
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.workspace import Workspace

# A kernel, its positional and its keyword arguments.
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]

TARGET = GPUTarget("cuda", 90, 32)
POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_launch(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Compile a kernel as a launch with these arguments would specialise it."""
    names = ("num_warps", "num_stages", "launch_pdl")
    options = {name: keywords.pop(name) for name in names if name in keywords}
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
    kernel = TritonExperts(shape)
    weights = kernel.prepare_weights(_weights(shape))
    kernel.run(expert_input, weights, Workspace(torch.device("meta")))


def run_triton_batched_experts(shape: ExpertsShape, capacity: int) -> None:
    """One call of TritonBatchedExperts on meta tensors."""
    expert_input = BatchedExpertInput(
        _empty(shape.num_local_experts, capacity, shape.hidden_size, dtype=shape.dtype),
        _empty(shape.num_local_experts, dtype=torch.int32),
    )
    kernel = TritonBatchedExperts(shape)
    weights = kernel.prepare_weights(_weights(shape))
    kernel.run(expert_input, weights, Workspace(torch.device("meta")))


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _weights(shape: ExpertsShape) -> ExpertWeights:
    num_experts, hidden, inner = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    parts = 2 if shape.activation.is_gated else 1
    w13, w13_quant = _stored(shape, parts * inner, hidden, parts)
    w2, w2_quant = _stored(shape, hidden, inner, 1)

    def bias(num_columns: int) -> Tensor | None:
        return _empty(num_experts, num_columns, dtype=shape.dtype) if shape.has_bias else None

    return ExpertWeights(
        w13=w13,
        w2=w2,
        w13_bias=bias(parts * inner),
        w2_bias=bias(hidden),
        w13_quant=w13_quant,
        w2_quant=w2_quant,
    )


def _stored(
    shape: ExpertsShape, num_rows: int, num_columns: int, num_parts: int
) -> tuple[Tensor, QuantParameters | None]:
    """One projection of all experts as its scheme stores it."""
    num_experts = shape.num_local_experts
    if not shape.scheme.is_quantised:
        return _empty(num_experts, num_rows, num_columns, dtype=shape.dtype), None
    shapes = stored_shapes(
        shape.scheme, num_rows, num_columns, num_parts=num_parts, dtype=shape.dtype
    )
    weight = quantized_tensor(empty_stored(shapes, num_experts, torch.device("meta")), shape.scheme)
    return weight.values, weight.parameters


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
    cases += packed_gate_cases()
    for kind in ActivationKind:
        activation = Activation(kind, limit=7.0 if kind is ActivationKind.SWIGLUOAI else None)
        cases.append((ExpertsShape(3, 300, 97, 1, activation, torch.bfloat16, True), 33, False))
    return cases


def packed_gate_cases() -> list[tuple[ExpertsShape, int, bool]]:
    """Each height in the dtype that matters; each stored kind and dtype; zero points; groups."""
    int4 = QuantScheme(WeightScheme.INT4, 128)
    qwen = ExpertsShape(64, 4096, 1536, 8, Activation(), torch.bfloat16, scheme=int4)
    small = replace(qwen, num_local_experts=8, hidden_size=2048, intermediate_size=768)
    few = [
        replace(small, dtype=torch.float16, scheme=QuantScheme(WeightScheme.INT4, 64, True)),
        replace(
            small,
            activation=Activation(ActivationKind.RELU2),
            dtype=torch.float32,
            scheme=QuantScheme(WeightScheme.INT4, None, True),
        ),
        replace(small, scheme=QuantScheme(WeightScheme.INT8, 32, True)),
        replace(small, dtype=torch.float16, scheme=QuantScheme(WeightScheme.INT8, None)),
        replace(small, dtype=torch.float16, scheme=QuantScheme(WeightScheme.MXFP4)),
        replace(small, dtype=torch.float16, scheme=QuantScheme(WeightScheme.NVFP4)),
    ]
    many = [
        replace(small, scheme=QuantScheme(weight, 128))
        for weight in (WeightScheme.INT8, WeightScheme.MXFP4, WeightScheme.NVFP4)
    ]
    few_items = replace(small, num_local_experts=2, hidden_size=512, intermediate_size=4096)
    few += [
        replace(few_items, scheme=QuantScheme(WeightScheme.INT8, 128)),
        replace(few_items, has_bias=True, scheme=QuantScheme(WeightScheme.NVFP4)),
    ]
    cases = [(qwen, num_rows, True) for num_rows in (32, 128, 4096)]
    cases += [(shape, 2, False) for shape in few]
    return cases + [(shape, 512, False) for shape in many]


def batched_gate_cases() -> list[tuple[ExpertsShape, int]]:
    """Few and many rows in the dtype that a batched backend has; sizes that divide nothing."""
    silu = Activation()
    decode = ExpertsShape(32, 7168, 2048, 8, silu, torch.bfloat16)
    odd = ExpertsShape(3, 300, 97, 1, silu, torch.float32, has_bias=True)
    packed = replace(decode, scheme=QuantScheme(WeightScheme.INT4, 128))
    return [(decode, 256), (decode, 4096), (packed, 256), (odd, 33)]


def waits_first(ptx: str) -> bool:
    """Whether a dependent launch lets its successor come and waits before it touches memory."""
    access = re.search(r"\b(ld|st|atom|red)\.(\w+\.)*global|\bcp\.async|\bcp\.reduce", ptx)
    first = len(ptx) if access is None else access.start()
    return (
        0 <= ptx.find("griddepcontrol.launch_dependents") < ptx.find("griddepcontrol.wait") < first
    )


def main() -> None:
    # As on a GPU: a meta tensor's device has no capability to ask for.
    dependent_launch._has_dependent_launch = cache(lambda device: True)
    patch.object(tiles, "num_multiprocessors", lambda device, off_gpu: 132).start()
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
                entry["waits_first"] = waits_first(compiled.asm["ptx"])
                entry["parts"] = keywords.get("SPLIT", keywords.get("NUM_PARTS", 1))
                report.append({**entry, "shared_bytes": shared_bytes})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
