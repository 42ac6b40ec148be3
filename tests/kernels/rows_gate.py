"""Compile for sm_90 what aligning, permuting and quantising rows would launch; needs no GPU.

Run as `python -m tests.kernels.rows_gate` in a process without TRITON_INTERPRET. The product's own
launches are caught on meta tensors. Prints one JSON list of `GateEntry`.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
import triton
from torch import Tensor

from ep_runtime.kernels.align_batched import align_batched_rows
from ep_runtime.kernels.align_blocks import AlignedSlots, align_slots, max_tiles
from ep_runtime.kernels.base import BatchedExpertInput, StandardExpertInput
from ep_runtime.kernels.permute import permute_rows
from ep_runtime.kernels.quant.fp8_rows import num_groups, quantize_rows
from ep_runtime.kernels.workspace import Workspace
from tests.kernels.compile_gate import catch_launches, compile_launch

META = torch.device("meta")
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class GateEntry:
    """What one compiled kernel takes of a multiprocessor, and how wide it moves memory.

    stack_bytes: of a thread; registers that did not fit lie there.
    """

    case: str
    kernel: str
    num_warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    widest_load_bytes: int
    widest_store_bytes: int


def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def align(num_slots: int, num_experts: int, block_m: int) -> None:
    """Eight slots a row, rows bounded on the device."""
    ids = empty(num_slots // 8, 8, dtype=torch.int32)
    expert_input = StandardExpertInput(empty(0), ids, empty(0), empty(1, dtype=torch.int32))
    align_slots(
        expert_input, num_local_experts=num_experts, block_m=block_m, workspace=Workspace(META)
    )


def align_strided() -> None:
    """int64 ids, every second column."""
    expert_input = StandardExpertInput(
        empty(0), empty(5000, 16, dtype=torch.int64)[:, ::2], empty(0)
    )
    for rows in (slice(100), slice(5000)):
        part = StandardExpertInput(empty(0), expert_input.topk_ids[rows], empty(0))
        align_slots(part, num_local_experts=40, block_m=64, workspace=Workspace(META))


def align_batched(num_experts: int, capacity: int) -> None:
    expert_input = BatchedExpertInput(
        empty(num_experts, capacity, 0), empty(num_experts, dtype=torch.int32)
    )
    align_batched_rows(expert_input, block_m=64, workspace=Workspace(META))


def permute(rows_dtype: torch.dtype, out_dtype: torch.dtype, hidden_size: int) -> None:
    num_rows, top_k, groups = 4096, 8, num_groups(hidden_size)
    tiles = max_tiles(num_rows * top_k, 128, 128)
    aligned = AlignedSlots(
        empty(tiles * 128, dtype=torch.int32),
        empty(tiles, dtype=torch.int32),
        empty(tiles, dtype=torch.int32),
        empty(1, dtype=torch.int32),
        empty(1, dtype=torch.int32),
        tiles,
        128,
        num_rows * top_k,
    )
    expert_input = StandardExpertInput(
        empty(num_rows, hidden_size, dtype=rows_dtype),
        empty(num_rows, top_k, dtype=torch.int32),
        empty(num_rows, top_k),
        scales=empty(num_rows, groups) if rows_dtype is FP8 else None,
    )
    permute_rows(
        expert_input,
        aligned,
        out=empty(tiles * 128, hidden_size, dtype=out_dtype),
        out_scales=empty(groups, tiles * 128) if out_dtype is FP8 else None,
    )


def quantize(dtype: torch.dtype, num_rows: int, hidden_size: int) -> None:
    quantize_rows(
        empty(num_rows, hidden_size, dtype=dtype),
        out_values=empty(num_rows, hidden_size, dtype=FP8),
        out_scales=empty(num_rows, num_groups(hidden_size)),
    )


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Decode and prefill, every mode, and sizes that divide nothing."""
    for sizes in ((256, 64, 16), (4096, 64, 64), (65536, 256, 128), (65536, 1500, 128)):
        yield f"align {sizes}", partial(align, *sizes)
    yield "align int64 ids, strided", align_strided
    yield "align batched (32, 4096)", partial(align_batched, 32, 4096)
    for rows_dtype, out_dtype, hidden_size in (
        (torch.bfloat16, torch.bfloat16, 7168),
        (torch.bfloat16, FP8, 7168),
        (torch.bfloat16, FP8, 300),
        (FP8, FP8, 7168),
        (FP8, torch.bfloat16, 7168),
    ):
        name = f"permute {rows_dtype} to {out_dtype}, {hidden_size}"
        yield name, partial(permute, rows_dtype, out_dtype, hidden_size)
    for dtype, num_rows, hidden_size in (
        (torch.bfloat16, 1, 7168),
        (torch.bfloat16, 4096, 7168),
        (torch.float32, 4096, 300),
    ):
        name = f"quantize {dtype} {num_rows} x {hidden_size}"
        yield name, partial(quantize, dtype, num_rows, hidden_size)


def widest_bytes(ptx: str, kind: str) -> int:
    """Of the loads (ld) or stores (st) of global memory."""
    accesses = re.findall(rf"\b{kind}\.global[\w.:]*", ptx)
    widest = 0
    for access in accesses:
        vector = re.search(r"\.v(\d)\.", access)
        bits = int(re.findall(r"\.[bfsu](\d+)", access)[-1])
        widest = max(widest, bits // 8 * (int(vector.group(1)) if vector else 1))
    return widest


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack, of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ((registers, stack_bytes),) = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack_bytes)


def entries() -> Iterator[GateEntry]:
    for case, call in calls():
        for kernel, arguments, keywords in catch_launches(call):
            compiled = compile_launch(kernel, arguments, dict(keywords))
            registers, stack_bytes = resources(compiled.asm["cubin"])
            yield GateEntry(
                case=case,
                kernel=kernel.__name__,
                num_warps=compiled.metadata.num_warps,
                registers=registers,
                shared_bytes=compiled.metadata.shared,
                stack_bytes=stack_bytes,
                widest_load_bytes=widest_bytes(compiled.asm["ptx"], "ld"),
                widest_store_bytes=widest_bytes(compiled.asm["ptx"], "st"),
            )


def main() -> None:
    print(json.dumps([asdict(entry) for entry in entries()]))


if __name__ == "__main__":
    main()
