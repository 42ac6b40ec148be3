"""Compile for sm_90 whatever Triton kernels a call of the marlin experts launches; needs no GPU.

Run as `python -m tests.kernels.marlin_gate` in a process without TRITON_INTERPRET. Prints one JSON
list of the kernels' names; a kernel that does not compile is a traceback.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    ExpertsShape,
    StandardExpertInput,
)
from ep_runtime.kernels.marlin_experts import MarlinExperts
from ep_runtime.kernels.workspace import Workspace
from tests import fake_marlin
from tests.kernels.compile_gate import _empty, _weights, catch_launches, compile_launch
from tests.kernels.packed_cases import int4

QWEN = ExpertsShape(64, 2048, 768, 8, Activation(), torch.bfloat16, scheme=int4())


def run_standard(shape: ExpertsShape, num_rows: int) -> None:
    """One call on meta tensors."""
    expert_input = StandardExpertInput(
        _empty(num_rows, shape.hidden_size, dtype=shape.dtype),
        _empty(num_rows, shape.top_k, dtype=torch.int32),
        _empty(num_rows, shape.top_k, dtype=torch.float32),
        _empty(1, dtype=torch.int32),
    )
    kernel = MarlinExperts(shape)
    weights = kernel.prepare_weights(_weights(shape))
    kernel.run(expert_input, weights, Workspace(torch.device("meta")))


def calls() -> list[Callable[[], None]]:
    """The lowest and the highest tiles, and each activation."""
    clamped = Activation(ActivationKind.SWIGLUOAI, limit=7.0)
    others = [
        replace(QWEN, activation=activation)
        for activation in (
            clamped,
            Activation(ActivationKind.GELU),
            Activation(ActivationKind.RELU2),
        )
    ]
    standard = [partial(run_standard, QWEN, num_rows) for num_rows in (1, 4096)]
    return [*standard, *(partial(run_standard, shape, 1) for shape in others)]


def main() -> None:
    names, seen = [], set()
    with fake_marlin.registered():
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
