"""Compile the occupant for sm_90; needs no GPU. Prints JSON of what it takes.

Run as `python -m tests.kernels.occupant_gate` in a process without TRITON_INTERPRET.
"""

import json
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from ep_runtime.kernels.occupant import occupy
from tests.kernels.hopper_gate import compile_gluon


def main() -> None:
    caught: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def catch(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        caught.append((kernel, arguments, keywords))

    released = JITFunction.run
    JITFunction.run = catch
    try:
        occupy(torch.device("meta"), num_multiprocessors=132, duration_us=5_000_000)
    finally:
        JITFunction.run = released
    kernel, arguments, keywords = caught[0]
    compiled = compile_gluon(kernel, arguments, keywords | {"maxnreg": None})
    ptx = compiled.asm["ptx"]
    report = {
        "shared_bytes": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
        "clock_reads": ptx.count("%globaltimer"),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
