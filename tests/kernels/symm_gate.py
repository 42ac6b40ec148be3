"""Compile for sm_90 what a call of `symm_mem` would launch, and read the machine code's order.

Run as `python -m tests.kernels.symm_gate` in a process without TRITON_INTERPRET; needs no GPU.
Prints one JSON list of `GateEntry`.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ep_runtime.kernels.launch import PreparedLaunch
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.symm_channel import Channel, ExpertHomes, SlotLayout
from ep_runtime.kernels.symm_put_results import put_results
from ep_runtime.kernels.symm_put_tokens import put_tokens
from ep_runtime.kernels.symm_wait import sum_results, wait_for_dispatch
from tests.kernels.compile_gate import Launch, compile_launch


@dataclass(frozen=True)
class GateEntry:
    """What one compiled kernel does with global memory, in the order of the code.

    releases, acquires: atomics of that kind at system scope. unguarded_releases: releases with no
    block-wide barrier between them and the store before; unguarded_acquires: acquires with none
    between them and the load after. other_atomics: of any other kind or scope. widest_store_bytes:
    of the stores. looks: loads of the abort word that are volatile, which PTX defines as relaxed at
    system scope, and behind a predicate; other_looks: any other use of its address.
    """

    kernel: str
    dtype: str
    rows: str
    shared_bytes: int
    releases: int
    acquires: int
    unguarded_releases: int
    unguarded_acquires: int
    other_atomics: int
    widest_store_bytes: int
    looks: int
    other_looks: int


_INSTRUCTION = re.compile(r"\b(?:bar\.sync|(?:atom|red|st|ld)\.(?:volatile\.)?global[\w.:]*)")


def read_ptx(kernel: str, dtype: str, rows: str, compiled: Any) -> GateEntry:
    """Follow stores, loads, barriers and atomics through the PTX from top to bottom."""
    counts = dict.fromkeys(
        ("releases", "acquires", "unguarded_releases", "unguarded_acquires", "other_atomics"), 0
    )
    store_is_open = acquire_is_open = False
    widest = 0
    for instruction in _INSTRUCTION.findall(compiled.asm["ptx"]):
        if instruction == "bar.sync":
            store_is_open = acquire_is_open = False
        elif instruction.startswith("st."):
            store_is_open = True
            vector = re.search(r"\.v(\d)\.", instruction)
            width = int(re.findall(r"\.[bfu](\d+)", instruction)[-1])
            widest = max(widest, width // 8 * (int(vector.group(1)) if vector else 1))
        elif instruction.startswith("ld."):
            counts["unguarded_acquires"] += acquire_is_open
            acquire_is_open = False
        elif ".sys.release." in instruction:
            counts["releases"] += 1
            counts["unguarded_releases"] += store_is_open
        elif ".sys.acquire." in instruction:
            counts["acquires"] += 1
            acquire_is_open = True
        else:
            counts["other_atomics"] += 1
    looks, other_looks = count_looks(compiled)
    return GateEntry(
        kernel,
        dtype,
        rows,
        compiled.metadata.shared,
        **counts,
        widest_store_bytes=widest,
        looks=looks,
        other_looks=other_looks,
    )


def count_looks(compiled: Any) -> tuple[int, int]:
    """(volatile loads behind a predicate, any other use) of the abort word's address."""
    passed = [name for name, kind in compiled.src.signature.items() if kind != "constexpr"]
    if "abort_ptr" not in passed:
        return 0, 0
    ptx = compiled.asm["ptx"]
    parameter = rf"_param_{passed.index('abort_ptr')}\]"
    registers = re.findall(rf"ld\.param\.b64\s+(%rd\d+), \[\w+{parameter}", ptx)
    uses = [line for r in registers for line in ptx.splitlines() if re.search(rf"{r}\b", line)]
    looks = [use for use in uses if re.search(r"@%p\d+ ld\.volatile\.global\.b64 .*, \[", use)]
    return len(looks), len(uses) - len(looks) - len(registers)


def catch_prepared_launches(call: Callable[[], object]) -> list[Launch]:
    """What a call would launch, none of it launched; its tensors are meta tensors."""
    caught: list[Launch] = []

    def catch(self: PreparedLaunch, grid: Any, *varying: Any, stream: Any = None) -> None:
        caught.append((self.kernel, (*varying, *self.bound), dict(self.options)))

    released = PreparedLaunch.__call__
    PreparedLaunch.__call__ = catch  # type: ignore[method-assign]
    try:
        call()
    finally:
        PreparedLaunch.__call__ = released  # type: ignore[method-assign]
    return caught


def launches(
    num_ranks: int, num_tokens: int, *, hidden_size: int, dtype: torch.dtype, rows: RowScheme
) -> list[Launch]:
    """The (kernel, arguments, keywords) of a dispatch and a combine, caught on meta tensors."""

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def word(size: int = 1) -> torch.Tensor:
        return empty(size, dtype=torch.int64)

    layout = SlotLayout(num_ranks, num_tokens, hidden_size, 8, dtype, rows)
    memory = empty(layout.num_bytes, dtype=torch.uint8)
    homes = ExpertHomes(empty(256, dtype=torch.int32), empty(256, dtype=torch.int32))
    words = (word(), word(), word(), word())
    channel = Channel(layout, 1, memory, word(num_ranks), homes, *words, 10**11)
    ids = empty(num_tokens, 8, dtype=torch.int32)
    tokens = (empty(num_tokens, hidden_size), ids, empty(num_tokens, 8, dtype=torch.float32))
    outputs = empty(num_ranks * num_tokens, hidden_size)
    first_row = num_tokens

    def call() -> None:
        put_tokens(channel, tokens, first_row=first_row, max_programs=132)
        wait_for_dispatch(channel, limit_ns=10**11)
        put_results(
            channel, outputs, num_own_rows=num_tokens, first_own_row=first_row, max_programs=64
        )
        for is_joined in (False, True):
            sum_results(
                channel,
                outputs,
                ids,
                first_own_row=first_row,
                bias=empty(num_tokens, hidden_size),
                is_joined=is_joined,
            )

    return catch_prepared_launches(call)


def entries() -> Iterator[GateEntry]:
    """Decode and prefill, both tile sizes and widths of a number, rows as they are and in fp8; and
    many ranks with rows that cannot be aligned, of 602 bytes and of 301."""
    as_is, in_fp8 = RowScheme.MODEL, RowScheme.FP8_GROUP
    for num_ranks, num_tokens, hidden_size, dtype, rows in (
        (2, 1, 7168, torch.bfloat16, as_is),
        (8, 512, 2880, torch.float32, as_is),
        (72, 64, 301, torch.bfloat16, as_is),
        (2, 1, 7168, torch.bfloat16, in_fp8),
        (2, 512, 7168, torch.bfloat16, in_fp8),
        (8, 512, 2880, torch.float32, in_fp8),
        (72, 64, 301, torch.bfloat16, in_fp8),
    ):
        for kernel, arguments, keywords in launches(
            num_ranks, num_tokens, hidden_size=hidden_size, dtype=dtype, rows=rows
        ):
            # All but dispatch's put is the same for fp8 rows.
            if rows is as_is or kernel.__name__ == "_put_tokens_kernel":
                compiled = compile_launch(kernel, arguments, dict(keywords))
                yield read_ptx(kernel.__name__, str(dtype), str(rows), compiled)


if __name__ == "__main__":
    print(json.dumps([asdict(entry) for entry in entries()]))
