"""Compile for sm_90 what calls of Hopper's packed GEMM would launch; needs no GPU.

Run as `python -m tests.kernels.hopper_packed_gate` in a process without TRITON_INTERPRET. Launches
are caught on meta tensors. Prints one JSON list of what the compiled code is; a kernel that does
not compile is a traceback.
"""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import Activation, ActivationKind, ExpertsShape
from ep_runtime.kernels.hopper_packed_gemm import (
    HopperPackedSchedule,
    project_down_hopper_packed,
    project_gate_up_hopper_packed,
)
from ep_runtime.kernels.hopper_packed_layout import HopperWords
from ep_runtime.kernels.hopper_packed_schedule import HopperPackedExpertsTiles, hopper_packed_tiles
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.sum_slots import PARTS_DTYPE
from tests.kernels.hopper_gate import assemble, compile_gluon, dead_barriers, empty

NUM_ROWS = 256
NUM_EXPERTS = 4


@dataclass(frozen=True)
class PackedGateCase:
    """One launch, as the rule cuts it: the first projection where an activation is given."""

    name: str
    rows_per_expert: float
    k_size: int
    num_columns: int
    activation: ActivationKind | None = None
    group_size: int | None = 128
    has_zeros: bool = False
    has_bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    stored: str = "int4"
    num_experts: int = 64  # with rows
    split_k: int = 1

    @property
    def cut(self) -> HopperPackedExpertsTiles:
        weight = WeightScheme.INT4
        if self.stored == "e2m1":
            weight = WeightScheme.NVFP4 if self.is_nvfp4 else WeightScheme.MXFP4
        scheme = QuantScheme(weight, self.group_size, self.has_zeros)
        activation = Activation(self.activation or ActivationKind.SILU)
        columns = self.num_columns
        shape = ExpertsShape(64, columns, columns, 8, activation, self.dtype, scheme=scheme)
        return hopper_packed_tiles(self.rows_per_expert, shape, self.num_experts)

    @property
    def is_nvfp4(self) -> bool:
        return self.stored == "e2m1" and self.group_size == 16

    @property
    def schedule(self) -> HopperPackedSchedule:
        one = self.cut.down if self.activation is None else self.cut.gate_up
        return replace(one, split_k=self.split_k)


CASES = (
    PackedGateCase("16: silu", 4, 4096, 1536, ActivationKind.SILU),
    PackedGateCase("16: silu, few items", 4, 7168, 2048, ActivationKind.SILU, 64, num_experts=8),
    PackedGateCase("16: down, mxfp4", 4, 2880, 2880, None, 32, has_bias=True, stored="e2m1"),
    PackedGateCase("16: down, 2 parts", 1, 14336, 4096, num_experts=2, split_k=2),
    PackedGateCase("16: down, mxfp4, 3 parts", 4, 2880, 2880, None, 32, stored="e2m1", split_k=3),
    PackedGateCase(
        "16: down, nvfp4, 4 parts",
        1,
        14336,
        4096,
        None,
        16,
        has_bias=True,
        stored="e2m1",
        num_experts=2,
        split_k=4,
    ),
    PackedGateCase("64: silu, nvfp4", 40, 4096, 1536, ActivationKind.SILU, 16, stored="e2m1"),
    PackedGateCase("64: down, zeros, float16", 40, 1536, 4096, None, 64, True, True, torch.float16),
    PackedGateCase("128: silu, a scale a row", 500, 7168, 2048, ActivationKind.SILU, None),
)


def launch(case: PackedGateCase) -> None:
    cut = case.cut
    is_gated = case.activation is not None
    blocks, parts = -(-case.num_columns // (64 if is_gated else 128)), 2 if is_gated else 1
    groups = 1 if case.group_size is None else -(-case.k_size // case.group_size)
    words = HopperWords(
        empty(NUM_EXPERTS, blocks, 4 * -(-case.k_size // 64), 256, dtype=torch.int32),
        empty(NUM_EXPERTS, blocks, groups, 256 if case.has_zeros else 128, dtype=case.dtype),
        case.num_columns,
        case.group_size,
        is_gated,
        case.stored,
        empty(NUM_EXPERTS, parts, dtype=torch.float32) if case.is_nvfp4 else None,
    )
    positions = 16 * cut.block_m
    tiles = AlignedSlots(
        slots=empty(positions, dtype=torch.int32),
        tile_experts=empty(16, dtype=torch.int32),
        tile_order=empty(16, dtype=torch.int32),
        num_tiles=empty(1, dtype=torch.int32),
        num_tall_tiles=empty(1, dtype=torch.int32),
        max_tiles=16,
        block_m=cut.block_m,
        num_slots=8 * NUM_ROWS,
    )
    bias = empty(NUM_EXPERTS, parts * case.num_columns, dtype=case.dtype) if case.has_bias else None
    if case.activation is not None:
        project_gate_up_hopper_packed(
            empty(NUM_ROWS, case.k_size, dtype=case.dtype),
            words,
            tiles,
            activation=Activation(case.activation, limit=7.0),
            out=empty(positions, case.num_columns, dtype=case.dtype),
            top_k=8,
            bias=bias,
            schedule=case.schedule,
        )
        return
    project_down_hopper_packed(
        empty(positions, case.k_size, dtype=case.dtype),
        words,
        tiles,
        out=empty(
            8 * NUM_ROWS * case.split_k,
            case.num_columns,
            dtype=case.dtype if case.split_k == 1 else PARTS_DTYPE,
        ),
        topk_weights=empty(8 * NUM_ROWS, dtype=torch.float32),
        bias=bias,
        schedule=case.schedule,
    )


def catch_launch(case: PackedGateCase) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
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


def main() -> None:
    report = []
    for case in CASES:
        kernel, arguments, keywords = catch_launch(case)
        compiled = compile_gluon(kernel, arguments, keywords | {"IS_DEPENDENT": True})
        ptx = compiled.asm["ptx"]
        # The left operand: four registers in braces, or a descriptor in one.
        products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)\s+\{[^}]*\}, (\{|%)", ptx)
        report.append(
            {
                "name": case.name,
                "height": keywords["HEIGHT"],
                "dtype": "f16" if case.dtype is torch.float16 else "bf16",
                "programs_per_sm": case.schedule.programs_per_sm,
                "products": sorted({kind for kind, _ in products}),
                "left_in_registers": bool(products) and all(left == "{" for _, left in products),
                "dependent": ptx.count("griddepcontrol.wait"),
                "dead_barriers": dead_barriers(compiled.asm["ttgir"]),
                "shared_bytes": compiled.metadata.shared,
                "assembler": assemble(ptx),
            }
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
