"""Compile for sm_90 what a call of the resident experts would launch, and read the machine code.

Run as `python -m tests.kernels.resident_gate` in a process without TRITON_INTERPRET; needs no GPU.
Prints one JSON list of `GateEntry`.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from ep_runtime.kernels.base import (
    Activation,
    ActivationKind,
    ExpertsShape,
    MonolithicContext,
    RoutingSpec,
)
from ep_runtime.kernels.resident_experts import ResidentExperts
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.compile_gate import (
    Launch,
    _empty,
    _weights,
    catch_launches,
    compile_launch,
)


@dataclass(frozen=True)
class GateEntry:
    """What one compiled launch takes, and does with global memory in the order of the code.

    releases, acquires: atomics that release or acquire (or both) at the device's scope.
    unguarded_releases: with no block-wide barrier between them and the store before;
    unguarded_acquires: with none between them and the first access behind. is_cooperative: whether
    the launch says that programs wait for each other.
    """

    case: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    releases: int
    acquires: int
    unguarded_releases: int
    unguarded_acquires: int
    is_cooperative: bool


_INSTRUCTION = re.compile(
    r"\b(?:bar\.sync|cp\.async\.c|cp\.async\.bulk\.tensor"
    r"|(?:atom|red|st|ld)\.global[\w.:]*)"
)
_KEYS = ("releases", "acquires", "unguarded_releases", "unguarded_acquires")


def count_accesses(ptx: str) -> dict[str, int]:
    """Follow stores, loads, barriers and atomics from top to bottom."""
    counts = dict.fromkeys(_KEYS, 0)
    store_is_open = acquire_is_open = False
    for instruction in _INSTRUCTION.findall(ptx):
        if instruction == "bar.sync":
            store_is_open = acquire_is_open = False
            continue
        counts["unguarded_acquires"] += acquire_is_open
        acquire_is_open = False
        if instruction.startswith("st."):
            store_is_open = True
        if re.search(r"\.gpu\.(release|acq_rel)\.", instruction):
            counts["releases"] += 1
            counts["unguarded_releases"] += store_is_open
        if re.search(r"\.gpu\.(acquire|acq_rel)\.", instruction):
            counts["acquires"] += 1
            acquire_is_open = True
    return counts


def assemble(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, as the assembler says."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        arguments = ["-v", "--gpu-name=sm_90a", str(source), "-o", str(source.with_suffix(".o"))]
        done = subprocess.run(
            [str(assembler), *arguments], capture_output=True, text=True, check=True
        )
    (registers,) = re.findall(r"Used (\d+) registers", done.stderr)
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    return int(registers), sum(map(int, spilled))


def catch_launch(shape: ExpertsShape, num_rows: int, routing: RoutingSpec) -> Launch:
    """The launch of a call, caught on meta tensors."""
    kernel = ResidentExperts(shape)
    num_experts = routing.num_experts
    is_biased = routing.scoring == "sigmoid"
    context = MonolithicContext(
        routing=routing,
        weights=kernel.prepare_weights(_weights(shape)),
        expert_map=_empty(num_experts, dtype=torch.int32),
        tokens_per_expert=_empty(shape.num_local_experts, dtype=torch.int64),
        correction_bias=_empty(num_experts, dtype=torch.float32) if is_biased else None,
    )
    (launch,) = catch_launches(
        lambda: kernel.run(
            _empty(num_rows, shape.hidden_size, dtype=shape.dtype),
            _empty(num_rows, num_experts, dtype=torch.float32),
            context=context,
            workspace=Workspace(torch.device("meta")),
        )
    )
    return launch


def gate_cases() -> Iterator[tuple[str, ExpertsShape, int, RoutingSpec]]:
    """Each height with DeepSeek-V3's sizes; both scorings, groups; each dtype; gated and not, sizes
    that divide nothing, with a bias."""
    silu = Activation()
    softmax = RoutingSpec(256, 8)
    deepseek = RoutingSpec(256, 8, "sigmoid", 8, 4, "top2_sum", True, 2.5)
    large = ExpertsShape(8, 7168, 2048, 8, silu, torch.bfloat16)
    yield "softmax, 32 rows", large, 32, softmax
    yield "deepseek, 8 rows", large, 8, deepseek
    yield "deepseek, 64 rows, float16", replace(large, dtype=torch.float16), 64, deepseek
    yield "float32, 64 rows", replace(large, dtype=torch.float32), 64, softmax
    for kind in (ActivationKind.SWIGLUOAI, ActivationKind.RELU2):
        odd = ExpertsShape(3, 300, 97, 1, Activation(kind, limit=7.0), torch.bfloat16, True)
        yield f"{kind}, odd sizes", odd, 5, RoutingSpec(7, 1)


def entries() -> Iterator[GateEntry]:
    for name, shape, num_rows, routing in gate_cases():
        kernel, arguments, keywords = catch_launch(shape, num_rows, routing)
        compiled: Any = compile_launch(kernel, arguments, dict(keywords))
        ptx = compiled.asm["ptx"]
        registers, spilled = assemble(ptx)
        yield GateEntry(
            name,
            compiled.metadata.shared,
            registers,
            spilled,
            **count_accesses(ptx),
            is_cooperative=keywords.get("launch_cooperative_grid", False),
        )


if __name__ == "__main__":
    print(json.dumps([asdict(entry) for entry in entries()]))
