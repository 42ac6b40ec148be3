"""Compile for sm_90 what the shared expert's products would launch; needs no GPU.

Run as `python -m tests.kernels.shared_gate` in a process without TRITON_INTERPRET. The product's
own launches are caught on meta tensors. Prints one JSON list of `SharedEntry`.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ep_runtime.kernels import dependent_launch
from ep_runtime.kernels.base import Activation, ActivationKind
from ep_runtime.kernels.dense_gemm import DenseWeight
from ep_runtime.kernels.shared_projections import (
    FEW_ROWS_HALF,
    SharedProjections,
    SharedShape,
    choose_shared_tiles,
)
from tests.kernels.compile_gate import catch_launches, compile_launch, waits_first
from tests.kernels.rows_gate import resources, widest_bytes

META = torch.device("meta")


@dataclass(frozen=True)
class SharedEntry:
    """What one compiled kernel takes of a multiprocessor, and how it reads and multiplies.

    products: wgmma's, by shape and types; other_products: of registers alone. bulk_loads: TMA's.
    stack_bytes: of a thread; registers that did not fit lie there.
    """

    case: str
    kernel: str
    waits_first: bool
    registers: int
    shared_bytes: int
    stack_bytes: int
    products: tuple[str, ...]
    other_products: int
    bulk_loads: int
    widest_load_bytes: int


def cases() -> Iterator[tuple[SharedShape, int]]:
    """DeepSeek-V3's with few and many rows; each activation; sizes that divide nothing."""
    v3 = SharedShape(7168, 2048, Activation(), torch.bfloat16)
    for num_rows in (1, 17, FEW_ROWS_HALF):
        yield v3, num_rows
    for num_rows in (1, 17, 64, 128, 500):
        yield replace(v3, is_fp8=True), num_rows
    for number, kind in enumerate(ActivationKind):
        activation = Activation(kind, limit=7.0 if kind is ActivationKind.SWIGLUOAI else None)
        yield SharedShape(1008, 336, activation, torch.float16, number % 2 == 0), 33


def run(shape: SharedShape, num_rows: int) -> None:
    """One call of few rows on meta tensors."""

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=META)

    def weight(num_rows: int, num_columns: int, num_parts: int) -> DenseWeight:
        values = (num_parts * num_rows, num_columns)
        if not shape.is_fp8:
            return DenseWeight(empty(*values, dtype=shape.dtype), num_parts=num_parts)
        blocks = num_parts * -(-num_rows // 128), -(-num_columns // 128)
        return DenseWeight(empty(*values, dtype=torch.float8_e4m3fn), empty(*blocks), num_parts)

    rows = empty(num_rows, shape.hidden_size, dtype=shape.dtype)
    SharedProjections(shape, META).run_few(
        rows,
        weight(shape.width, shape.hidden_size, shape.num_parts),
        weight(shape.hidden_size, shape.width, 1),
        tiles=choose_shared_tiles(num_rows, shape, META),
        out=torch.empty_like(rows),
    )


def entries() -> Iterator[SharedEntry]:
    for shape, num_rows in cases():
        for kernel, arguments, keywords in catch_launches(lambda: run(shape, num_rows)):  # noqa: B023
            compiled = compile_launch(kernel, arguments, dict(keywords))
            ptx = compiled.asm["ptx"]
            registers, stack_bytes = resources(compiled.asm["cubin"])
            products = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+\.\w+\.\w+\.\w+)", ptx)
            stored = "fp8" if shape.is_fp8 else "half"
            yield SharedEntry(
                case=f"{num_rows} x {shape.hidden_size} x {shape.width} {stored}",
                kernel=kernel.__name__,
                waits_first=waits_first(ptx),
                registers=registers,
                shared_bytes=compiled.metadata.shared,
                stack_bytes=stack_bytes,
                products=tuple(sorted(set(products))),
                other_products=len(re.findall(r"\bmma\.sync", ptx)),
                bulk_loads=ptx.count("cp.async.bulk.tensor"),
                widest_load_bytes=widest_bytes(ptx, "ld"),
            )


def main() -> None:
    # As on a GPU: a meta tensor's device has no capability to ask for.
    dependent_launch._has_dependent_launch = cache(lambda device: True)
    print(json.dumps([asdict(entry) for entry in entries()]))


if __name__ == "__main__":
    main()
