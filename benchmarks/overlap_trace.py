"""When the kernels of one layer call over `symm_mem` ran, and what ran beside its combine's put.

    python -m benchmarks.overlap_trace --json benchmarks/results/overlap_trace.json

Run from the repository's root, on one GPU that the ranks share as virtual ones. The profiler's
times of every kernel of one call are kept, once with overlap and once without. Exit status 1 where
the shared expert did not run inside its window, beside the put in flight. It shows that the overlap
is real; what it saves is measured between GPUs (`ep2_layer_*.yaml`).
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.arguments import status_of
from ep_runtime.launch.environment import describe_versions
from ep_runtime.launch.json_file import prepare_json_file, write_json
from tests.ep_runtime.overlap_trace import summary, trace_layer

SCHEMA_VERSION = 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap_trace", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    given_arguments = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(given_arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device to trace")
    return status_of(lambda: trace(given, given_arguments))


def trace(given: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Trace both ways, print and write what was found; the exit status."""
    prepare_json_file(given.json)
    found = {overlap: summary(*trace_layer(overlap)) for overlap in ("auto", "off")}
    for overlap, one in found.items():
        print(f"overlap {overlap}: {one['schedule']}, {len(one['kernels'])} kernels")
        for window in one["windows"]:
            print(
                f"  window {window['window_us']} us, put {window['put_us']} us, shared expert "
                f"{window['shared_us']} us, of it beside the put {window['beside_put_us']} us"
            )
    faults = found["auto"]["faults"]
    for fault in faults:
        print(f"FAILED: {fault}")
    write_json(
        given.json,
        {
            "schema_version": SCHEMA_VERSION,
            "command_line": shlex.join(["python", "-m", "benchmarks.overlap_trace", *arguments]),
            "environment": describe_versions(),
            "passed": not faults,
            "overlap": found["auto"],
            # Without overlap the shared expert is not in a window, so no fault is meant.
            "no_overlap": {key: value for key, value in found["off"].items() if key != "faults"},
        },
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
