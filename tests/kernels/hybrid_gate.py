"""Compile for sm_90 whatever a call of the hybrid experts would launch; needs no GPU.

Run as `python -m tests.kernels.hybrid_gate` in a process without TRITON_INTERPRET, as
tests/kernels/compile_gate.py. Prints one JSON list of {kernel, dtype, rows, waits_first,
num_releases, releases_behind_a_barrier, shared_bytes}.
"""

import json
import re
from functools import cache, partial

import torch

from ep_runtime.kernels import dependent_launch
from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.hybrid_experts import HybridExperts
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.quant.storage import empty_hybrid, quantized_tensor, stored_shapes
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.compile_gate import catch_launches, compile_launch, waits_first

META = torch.device("meta")
HYBRID = QuantScheme(WeightScheme.HYBRID, nvfp4_experts=(0, 3, 5))
DECODE = ExpertsShape(8, 7168, 2048, 8, Activation(), torch.bfloat16, scheme=HYBRID)
RELU2 = Activation(ActivationKind.RELU2)
# One row and the most rows of a grid, more rows than it takes; a dtype, activation and sizes each.
CASES = [
    (DECODE, 1),
    (DECODE, 256),
    (ExpertsShape(8, 352, 96, 3, RELU2, torch.float16, scheme=HYBRID), 64),
]
_STORE = re.compile(r"\bst\.(?!shared)|\bred\.")
_RELEASE = re.compile(r"\batom\.(\w+\.)*(release|acq_rel)")


def meta_weights(shape: ExpertsShape) -> ExpertWeights:
    """As a layer holds them, without memory."""
    hidden, width = shape.hidden_size, shape.intermediate_size
    parts = 2 if shape.activation.is_gated else 1
    stored = []
    for rows, columns, num_parts in ((parts * width, hidden, parts), (hidden, width, 1)):
        shapes = stored_shapes(shape.scheme, rows, columns, num_parts=num_parts, dtype=shape.dtype)
        tensors = empty_hybrid(shapes, shape.scheme, range(shape.num_local_experts), META)
        stored.append(quantized_tensor(tensors, shape.scheme))
    w13, w2 = stored
    return ExpertWeights(w13.values, w2.values, w13_quant=w13.parameters, w2_quant=w2.parameters)


def run_hybrid_experts(shape: ExpertsShape, num_rows: int) -> None:
    """One call on meta tensors; a count on the device where there are many rows."""
    expert_input = StandardExpertInput(
        torch.empty(num_rows, shape.hidden_size, dtype=shape.dtype, device=META),
        torch.empty(num_rows, shape.top_k, dtype=torch.int32, device=META),
        torch.empty(num_rows, shape.top_k, dtype=torch.float32, device=META),
        torch.empty(1, dtype=torch.int32, device=META) if num_rows > 1 else None,
    )
    kernel = HybridExperts(shape)
    kernel.run(expert_input, kernel.prepare_weights(meta_weights(shape)), Workspace(META))


def releases_behind_a_barrier(ptx: str) -> bool:
    """Whether a `bar.sync` stands between each release and the last store before it."""
    for release in _RELEASE.finditer(ptx):
        before = ptx[: release.start()]
        stores = [store.start() for store in _STORE.finditer(before)]
        if stores and "bar.sync" not in before[stores[-1] :]:
            return False
    return True


def main() -> None:
    # As on a GPU: a meta tensor's device has no capability to ask for.
    dependent_launch._has_dependent_launch = cache(lambda device: True)
    report = []
    seen = set()
    for shape, num_rows in CASES:
        for kernel, arguments, keywords in catch_launches(
            partial(run_hybrid_experts, shape, num_rows)
        ):
            keywords = dict(keywords)
            is_resident = keywords.pop("launch_cooperative_grid", False)
            compiled = compile_launch(kernel, arguments, keywords)
            if compiled.hash in seen:
                continue
            seen.add(compiled.hash)
            ptx = compiled.asm["ptx"]
            report.append(
                {
                    "kernel": kernel.__name__,
                    "dtype": str(shape.dtype),
                    "rows": num_rows,
                    "waits_first": is_resident or waits_first(ptx),
                    "num_releases": len(_RELEASE.findall(ptx)),
                    "releases_behind_a_barrier": releases_behind_a_barrier(ptx),
                    "shared_bytes": compiled.metadata.shared,
                }
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
