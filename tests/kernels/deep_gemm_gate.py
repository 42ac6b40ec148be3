"""Compile for sm_90 whatever Triton kernels a call of the deep_gemm experts launches; needs no GPU.

Run as `python -m tests.kernels.deep_gemm_gate` in a process without TRITON_INTERPRET. Prints one
JSON list of the kernels' names; a kernel that does not compile is a traceback.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    BatchedExpertInput,
    ExpertsShape,
    StandardExpertInput,
)
from ep_runtime.kernels.deep_gemm_batched_experts import DeepGemmBatchedExperts
from ep_runtime.kernels.deep_gemm_experts import DeepGemmExperts
from ep_runtime.kernels.workspace import Workspace
from tests import fake_deep_gemm
from tests.kernels.compile_gate import _empty, _weights, catch_launches, compile_launch
from tests.kernels.fp8_cases import FP8_BLOCK

QWEN = ExpertsShape(64, 2048, 768, 8, Activation(), torch.bfloat16, scheme=FP8_BLOCK)


def run_standard(shape: ExpertsShape, num_rows: int) -> None:
    """One call on meta tensors."""
    expert_input = StandardExpertInput(
        _empty(num_rows, shape.hidden_size, dtype=shape.dtype),
        _empty(num_rows, shape.top_k, dtype=torch.int32),
        _empty(num_rows, shape.top_k, dtype=torch.float32),
        _empty(1, dtype=torch.int32),
    )
    kernel = DeepGemmExperts(shape)
    weights = kernel.prepare_weights(_weights(shape))
    kernel.run(expert_input, weights, Workspace(torch.device("meta")))


def run_batched(shape: ExpertsShape, capacity: int) -> None:
    """One call on meta tensors."""
    num_experts = shape.num_local_experts
    expert_input = BatchedExpertInput(
        _empty(num_experts, capacity, shape.hidden_size, dtype=shape.dtype),
        _empty(num_experts, dtype=torch.int32),
    )
    kernel = DeepGemmBatchedExperts(shape)
    weights = kernel.prepare_weights(_weights(shape))
    kernel.run(expert_input, weights, Workspace(torch.device("meta")))


def calls() -> list[Callable[[], None]]:
    """Few and many rows, and each activation."""
    clamped = replace(QWEN, activation=Activation(ActivationKind.SWIGLUOAI, limit=7.0))
    others = [
        replace(QWEN, activation=Activation(kind))
        for kind in (ActivationKind.GELU, ActivationKind.RELU2)
    ]
    standard = [partial(run_standard, QWEN, num_rows) for num_rows in (1, 4096)]
    standard += [partial(run_standard, shape, 32) for shape in (clamped, *others)]
    return [*standard, partial(run_batched, QWEN, 128), partial(run_batched, QWEN, 300)]


def main() -> None:
    sys.modules["deep_gemm"] = fake_deep_gemm.without_arithmetic()
    names, seen = [], set()
    for call in calls():
        for kernel, arguments, keywords in catch_launches(call):
            on_a_gpu = {"IS_DEPENDENT": True} if "IS_DEPENDENT" in keywords else {}
            compiled = compile_launch(kernel, arguments, {**keywords, **on_a_gpu})
            if compiled.hash not in seen:
                seen.add(compiled.hash)
                names.append(kernel.__name__)
    print(json.dumps(names))


if __name__ == "__main__":
    main()
