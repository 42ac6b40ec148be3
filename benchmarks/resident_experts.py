"""The `resident` experts beside `triton` and a kernel that only reads, on one GPU, few tokens.

    python -m benchmarks.resident_experts --json R.json

Run from the repository's root. A case has T rows, each of which chooses the same `active` experts
of this rank, and other ranks' for the rest of its slots. On a CPU (TRITON_INTERPRET=1, small sizes)
it runs to be tested; its times mean nothing there.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import positive_number, status_of, whole_number
from benchmarks.experts_data import error_of, worst
from benchmarks.experts_timing import GraphReplay, time_in_turns
from benchmarks.resident_contenders import NUM_WEIGHT_SETS, Case, CaseRun, Layer
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.kernels.resident_tiles import MAX_ROWS, block_rows, resident_tiles
from ep_runtime.launch.bench_statistics import summarise
from ep_runtime.launch.environment import describe_devices, describe_versions
from ep_runtime.launch.json_file import prepare_json_file, write_json

SCHEMA_VERSION = 1
CALLS_PER_REPLAY = 8
METHOD = {
    "time": f"events around replays of a CUDA graph of {CALLS_PER_REPLAY} calls, divided by them",
    "order": "in each round every contender has a turn, in an order rotated by the round's number",
    "rotation": f"calls take turns among {NUM_WEIGHT_SETS} sets of weights",
    "triton": "the experts alone, ids and weights of the slots given",
    "route+triton": "from the router's logits, as a layer of one rank runs it: routing and the "
    "count of slots in a launch each (kernels/fused_routing.py), the look-up of local ids in plain "
    "torch, the experts",
    "resident": "from the router's logits, in one launch, the count of slots included",
    "read": "a kernel that only reads the active experts' weights; no hard limit",
    "tb_per_s": "bytes of the active experts' weights over the median",
    "speedup_over": "the other's median over this one's",
    "error": "relative Frobenius errors against float32 arithmetic, the worst of the weight sets",
}


@dataclass
class HostReplay:
    """As `GraphReplay` where there is no CUDA: the calls themselves, by the host's clock."""

    calls: Sequence[Callable[[], Tensor]]

    def __post_init__(self) -> None:
        self.outputs = [call() for call in self.calls]

    def run(self, num_replays: int) -> list[float]:
        seconds = []
        for _ in range(num_replays):
            start = time.perf_counter()
            for call in self.calls:
                call()
            seconds.append((time.perf_counter() - start) / len(self.calls))
        return seconds


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resident_experts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tokens", default="1,2,4,8,16", help="with commas")
    parser.add_argument("--num-experts", default="8,256", help="of the layer, with commas")
    parser.add_argument("--active-experts", default="1,2,4,8", help="of this rank, with commas")
    parser.add_argument("--local-experts", type=whole_number, default=8)
    parser.add_argument("--hidden-size", type=whole_number, default=7168)
    parser.add_argument("--intermediate-size", type=whole_number, default=2048)
    parser.add_argument("--top-k", type=whole_number, default=8)
    parser.add_argument("--rounds", type=whole_number, default=12)
    parser.add_argument("--turn-ms", type=positive_number, default=3.0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """Every combination; raises ConfigError for tokens that no launch takes."""
    lists = {}
    for name in ("num_experts", "active_experts", "tokens"):
        text = getattr(options, name)
        try:
            lists[name] = [int(number) for number in text.split(",")]
        except ValueError:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {text}: numbers with commas, as 1,8") from None
    if not all(1 <= tokens <= MAX_ROWS for tokens in lists["tokens"]):
        raise ConfigError(f"--tokens {options.tokens}: a resident launch takes 1 to {MAX_ROWS}")
    for num_experts in lists["num_experts"]:
        for active in lists["active_experts"]:
            for tokens in lists["tokens"]:
                yield Case(tokens, num_experts, active)


def measure_case(run: CaseRun, options: argparse.Namespace) -> dict[str, Any]:
    is_cuda = run.layer.device.type == "cuda"
    make_replay: Callable[..., GraphReplay | HostReplay] = GraphReplay if is_cuda else HostReplay
    num_calls = CALLS_PER_REPLAY if is_cuda else NUM_WEIGHT_SETS
    replays = {
        name: make_replay([partial(call, i % NUM_WEIGHT_SETS) for i in range(num_calls)])
        for name, call in run.contenders().items()
    }
    seconds = time_in_turns(
        replays,
        calls=num_calls,
        num_rounds=options.rounds,
        turn_seconds=options.turn_ms / 1e3,
    )
    run.resident.check()
    times = {name: summarise(found) for name, found in seconds.items()}
    expected = run.expected()
    num_bytes = run.case.active_experts * run.layer.expert_bytes
    contenders = {}
    for name, replay in replays.items():
        median = times[name].median
        # As the last replay left them.
        outputs = zip(replay.outputs[:NUM_WEIGHT_SETS], expected, strict=True)
        error = None if name == "read" else worst([error_of(*pair) for pair in outputs])
        contenders[name] = {
            "times_us": asdict(times[name]) | {"min": min(seconds[name]) * 1e6},
            "tb_per_s": num_bytes / median / 1e6,
            "speedup_over": {
                other: times[other].median / median for other in ("triton", "route+triton")
            },
            "error": None if error is None else asdict(error),
            "is_right": error is None or error.is_within("bf16"),
        }
    return asdict(run.case) | {"weight_bytes": num_bytes, "contenders": contenders}


def print_case(entry: dict[str, Any]) -> None:
    head = f"{entry['tokens']:6} {entry['num_experts']:7} {entry['active_experts']:6}"
    for name, one in entry["contenders"].items():
        speedup = one["speedup_over"]
        print(
            f"{head}  {name:12} {one['times_us']['median']:9.2f} {one['tb_per_s']:6.3f} "
            f"{speedup['triton']:6.3f} {speedup['route+triton']:6.3f}"
            f"{'' if one['is_right'] else '  WRONG'}",
            flush=True,
        )


def measure(options: argparse.Namespace, command_line: str) -> int:
    prepare_json_file(options.json)
    cases = list(cases_of(options))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not is_interpreting():
        raise ConfigError("there is no CUDA device; set TRITON_INTERPRET=1 to run on the CPU")
    torch.manual_seed(0)
    layer = Layer(
        device,
        num_local_experts=options.local_experts,
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        top_k=options.top_k,
    )
    faults = [case.fault(layer.num_local_experts, layer.top_k) for case in cases]
    if None not in faults:
        raise ConfigError(f"no case can be measured; of the first: {faults[0]}")
    entries: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    print(
        "tokens experts active  contender           us   TB/s  speed-up over triton, route+triton"
    )
    for case, fault in zip(cases, faults, strict=True):
        if fault is not None:
            left_out.append(asdict(case) | {"reason": fault})
            continue
        entries.append(measure_case(CaseRun(layer, case), options))
        print_case(entries[-1])
    is_right = all(one["is_right"] for entry in entries for one in entry["contenders"].values())
    tiles = {
        block_rows(case.tokens): asdict(resident_tiles(case.tokens, layer.shape(case.num_experts)))
        for case in cases
    }
    write_json(
        options.json,
        {
            "schema_version": SCHEMA_VERSION,
            "command": "resident_experts",
            "command_line": command_line,
            "environment": describe_versions() | {"devices": describe_devices()},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            "requested": {k: v for k, v in vars(options).items() if k != "json"},
            "method": METHOD,
            "resident_tiles": tiles,
            "cases": entries,
            "not_measured": left_out,
            "passed": is_right,
        },
    )
    return 0 if is_right else 1


def main(arguments: Sequence[str]) -> int:
    """Exit status 1: a result is wrong. 2: the options are."""
    command_line = shlex.join(["python", "-m", "benchmarks.resident_experts", *arguments])
    options = parse_arguments(arguments)
    return status_of(lambda: measure(options, command_line))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
