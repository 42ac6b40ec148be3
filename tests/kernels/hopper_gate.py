"""Compile for sm_90 what calls of the Hopper GEMM would launch; needs no GPU.

Run as `python -m tests.kernels.hopper_gate` in a process without TRITON_INTERPRET. Launches are
caught on meta tensors. Prints one JSON list of what the compiled code is; a kernel that does not
compile is a traceback.
"""

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from ep_runtime.kernels.base import Activation, ActivationKind
from ep_runtime.kernels.hopper_gemm import (
    FP8,
    Fp8Scales,
    project_down_hopper,
    project_gate_up_hopper,
)
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from tests.kernels.hopper_cases import Tiles

TARGET = GPUTarget("cuda", 90, 32)
NUM_POSITIONS = 1024
NUM_EXPERTS = 4


@dataclass(frozen=True)
class GateCase:
    """One launch: the first projection where an activation is given, else the second."""

    name: str
    k_size: int
    num_columns: int
    activation: ActivationKind | None = None
    has_bias: bool = False
    is_weighted: bool = False
    is_fp8: bool = False
    lead_blocks: int = 1
    top_k: int | None = None


CASES = (
    GateCase("silu", 7168, 2048, ActivationKind.SILU),
    GateCase("swigluoai with bias, not shuffled", 304, 104, ActivationKind.SWIGLUOAI, True),
    GateCase("down with bias and a tail", 2048, 160, None, True, is_weighted=True, lead_blocks=2),
    GateCase("gathered: silu", 7168, 2048, ActivationKind.SILU, top_k=8),
    GateCase("gathered: odd chunks, top 1", 264, 104, ActivationKind.SWIGLUOAI, True, top_k=1),
    GateCase("fp8: silu, quantised", 7168, 2048, ActivationKind.SILU, is_fp8=True),
    GateCase("fp8: down", 2048, 7168, is_weighted=True, is_fp8=True),
    GateCase("nobody leads", 7168, 2048, ActivationKind.SILU, lead_blocks=0),
    GateCase("fp8: nobody leads", 2048, 7168, is_weighted=True, is_fp8=True, lead_blocks=0),
)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def launch(case: GateCase) -> None:
    activation = None if case.activation is None else Activation(case.activation, limit=7.0)
    num_parts = 2 if activation is not None and activation.is_gated else 1
    dtype = FP8 if case.is_fp8 else torch.bfloat16
    groups, blocks = -(-case.k_size // 128), num_parts * -(-case.num_columns // 128)
    tiles = Tiles(
        slots=empty(NUM_POSITIONS, dtype=torch.int32),
        tile_experts=empty(NUM_POSITIONS // 128, dtype=torch.int32),
        num_tiles=empty(1, dtype=torch.int32),
    )
    x = empty(NUM_POSITIONS, case.k_size, dtype=dtype)
    w = empty(NUM_EXPERTS, num_parts * case.num_columns, case.k_size, dtype=dtype)
    bias = empty(NUM_EXPERTS, num_parts * case.num_columns) if case.has_bias else None
    schedule = HopperSchedule(lead_blocks=case.lead_blocks)
    out_scales = empty(NUM_POSITIONS, blocks // num_parts, dtype=torch.float32)
    scales = Fp8Scales(
        empty(NUM_POSITIONS, groups, dtype=torch.float32),
        empty(NUM_EXPERTS, blocks, groups, dtype=torch.float32),
        out_scales if activation is not None else None,
    )
    shared: dict[str, Any] = {"bias": bias, "schedule": schedule}
    shared["scales"] = scales if case.is_fp8 else None
    if activation is None:
        out = empty(NUM_POSITIONS, case.num_columns)
        weights = empty(NUM_POSITIONS, dtype=torch.float32) if case.is_weighted else None
        project_down_hopper(x, w, tiles, out=out, topk_weights=weights, **shared)
    else:
        out = empty(NUM_POSITIONS, case.num_columns, dtype=dtype)
        if case.top_k is not None:
            x = x[: NUM_POSITIONS // case.top_k]
        project_gate_up_hopper(
            x, w, tiles, activation=activation, out=out, top_k=case.top_k, **shared
        )


def catch_launch(case: GateCase) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The kernel that a case launches, its arguments and keywords; nothing is launched."""
    caught: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def catch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        caught.append((kernel, arguments, keywords))

    released = JITFunction.run
    JITFunction.run = catch
    try:
        launch(case)
    finally:
        JITFunction.run = released
    (found,) = caught
    return found


def compile_gluon(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Compile a Gluon kernel as a launch with these arguments would specialise it."""
    keywords = dict(keywords)
    options = {name: keywords.pop(name) for name in ("num_warps", "maxnreg")}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        kind, key = native_specialize_impl(
            CUDABackend, value, False, not parameter.do_not_specialize, True
        )
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif key == "D":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=options)


def dead_barriers(ttgir: str) -> list[str]:
    """Barriers that are set up and that no partition is given: other things get their memory."""
    views = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    barriers = {views.get(name, name) for name in re.findall(r"init_barrier (%\w+)", ttgir)}
    (given,) = re.findall(r"ttg\.warp_specialize\(([^)]*)\)", ttgir)
    return sorted(barriers - set(given.split(", ")))


def assemble(ptx: str) -> str:
    """What ptxas says of it: spills, registers, warnings."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        ptxas = triton.knobs.nvidia.ptxas.path
        command = [ptxas, "-v", "--gpu-name=sm_90a", str(source), "-o", f"{folder}/kernel.cubin"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def main() -> None:
    report = []
    for case in CASES:
        compiled = compile_gluon(*catch_launch(case))
        ptx = compiled.asm["ptx"]
        products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+\.\w+\.\w+)", ptx)
        report.append(
            {
                "name": case.name,
                "is_fp8": case.is_fp8,
                "gathers": case.top_k is not None,
                # Of 16 bytes a thread; the assembler takes no other size with .cg.
                "copies": ptx.count("cp.async.cg.shared.global"),
                "narrow_copies": ptx.count("cp.async.ca.shared.global"),
                "copies_arrive": ptx.count("cp.async.mbarrier.arrive.noinc.shared.b64"),
                "full_counts": sorted(set(re.findall(r"mbarrier\.init\S+ \S+, (\d+);", ptx))),
                "proxy_fences": ptx.count("fence.proxy.async"),
                "dead_barriers": dead_barriers(compiled.asm["ttgir"]),
                "shared_bytes": compiled.metadata.shared,
                "num_warps": compiled.metadata.num_warps,
                "products": sorted(set(products)),
                "stores": sorted(set(re.findall(r"st\.global[.\w]*", ptx))),
                "registers": sorted(map(int, re.findall(r"setmaxnreg\.\S+\s+(\d+);", ptx))),
                "assembler": assemble(ptx),
            }
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
