"""The launches of `symm_mem` one by one, on one device: time against bytes, and the host's work.

All ranks of an EP group are virtual ranks of this process, and the peers' memory is on the same
device. So this shows what the kernels and the host cost, and nothing of a link. Each kernel is
timed in a CUDA graph of its own, as often launched by every rank, in the order of a call, so that
no launch waits for one behind it.

    python -m benchmarks.symm_mem_launches --json R.json --plot R.png       # from the root

On a CPU (TRITON_INTERPRET=1, small sizes) it runs to be tested; its times mean nothing there.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.arguments import status_of, token_counts, whole_number
from benchmarks.symm_mem_plot import write_plot
from ep_runtime.all2all.base import BackendShape, EPGroup, RoutedTokens
from ep_runtime.all2all.symm_mem import SymmMemBackend
from ep_runtime.all2all.symmetric_buffer import SymmetricBuffer, virtual_buffers
from ep_runtime.config import DTYPES, MoEConfig
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.symm_put_results import put_results
from ep_runtime.kernels.symm_put_tokens import put_tokens
from ep_runtime.kernels.symm_wait import sum_results, wait_for_dispatch
from ep_runtime.launch.bench_inputs import NUM_INPUT_SETS, Case, load_of, make_input_sets
from ep_runtime.launch.bench_plot import prepare_plot_file
from ep_runtime.launch.environment import describe_versions
from ep_runtime.launch.json_file import prepare_json_file, write_json
from ep_runtime.placement import place_experts

SCHEMA_VERSION = 1
CALLS_PER_GRAPH = 8
REPLAYS = 50
HOST_ROUNDS = 100
COPY_BYTES = 1 << 30
FORMULAS = {
    "put_tokens": "own rows in; a row as it is sent out per rank; routing, P * (8 K + 4) a row",
    "wait_for_dispatch": "none: it reads P counters",
    "put_results": "a row in and out per received foreign row; 4 K + 4 of routing each",
    "sum_results": "a row in per (row, rank) pair; a row out per own row. It waits first",
}


@dataclass(frozen=True)
class Launch:
    """One kernel of a call. us: of the slowest rank's launches, median. floor_us: bytes at the
    rate of a copy on this device, measured in the same run."""

    name: str
    us: float
    bytes: int | None
    gbps: float | None
    floor_us: float | None
    formula: str


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=whole_number, default=2)
    parser.add_argument(
        "--tokens-per-rank", type=token_counts, default="1,8,32,128,4096", help="with commas"
    )
    parser.add_argument("--hidden-size", type=whole_number, default=7168)
    parser.add_argument("--num-experts", type=whole_number, default=256)
    parser.add_argument("--top-k", type=whole_number, default=8)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--rows", choices=sorted(RowScheme), default="model", help="as they travel")
    parser.add_argument("--routing", default="random", choices=("random", "balanced", "zipf"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="a PNG; symm_mem_plot.py draws older records")
    return parser.parse_args(arguments)


def median_us(call: Callable[[int], object], device: torch.device) -> float:
    """Of one call, which gets a running number. Each use makes the same number of calls."""
    if device.type == "cpu":
        start = time.perf_counter()
        for index in range(NUM_INPUT_SETS):
            call(index)
        return (time.perf_counter() - start) / NUM_INPUT_SETS * 1e6
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(CALLS_PER_GRAPH):
            call(index)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    milliseconds = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return float(statistics.median(milliseconds)) * 1e3 / CALLS_PER_GRAPH


class VirtualRanks:
    """The backends of all ranks, and what each sends."""

    def __init__(self, case: Case, num_ranks: int, device: torch.device, rows: RowScheme) -> None:
        self.case, self.device, self.num_ranks = case, device, num_ranks
        moe = case.moe
        self.shape = BackendShape(
            num_experts=moe.num_experts,
            hidden_size=moe.hidden_size,
            top_k=moe.top_k,
            dtype=moe.torch_dtype,
            max_tokens_per_rank=case.tokens_per_rank,
            placement=place_experts("linear", moe.num_experts, num_ranks),
            rows=rows,
        )
        buffers: list[SymmetricBuffer] = []

        def open_buffer(group: EPGroup, num_bytes: int) -> SymmetricBuffer:
            if not buffers:
                buffers.extend(virtual_buffers(num_ranks, num_bytes, device))
            return buffers[group.rank]

        self.backends = [
            SymmMemBackend(
                EPGroup(None, rank, num_ranks, device), self.shape, open_buffer=open_buffer
            )
            for rank in range(num_ranks)
        ]
        self.sets: list[list[RoutedTokens]] = [
            make_input_sets(case, ep_rank=rank, ep_size=num_ranks, seed=0, device=device)
            for rank in range(num_ranks)
        ]
        num_received = num_ranks * case.tokens_per_rank
        self.output = torch.randn(
            num_received, moe.hidden_size, dtype=moe.torch_dtype, device=device
        )

    def round(self, index: int, marks: list[float] | None = None) -> None:
        """One call on every rank, step by step, on one stream; host times between the steps."""

        def mark() -> None:
            if marks is not None:
                marks.append(time.perf_counter())

        pairs = list(zip(self.backends, self.sets, strict=True))
        mark()
        dispatching = [b.dispatch(b.prepare(sets[index % NUM_INPUT_SETS])) for b, sets in pairs]
        mark()
        received = [pending.wait() for pending in dispatching]
        mark()
        combining = [
            backend.combine(self.output, handle)
            for backend, (_, handle) in zip(self.backends, received, strict=True)
        ]
        mark()
        for pending in combining:
            pending.wait()
        mark()

    def kernels(self) -> dict[str, Callable[[int, int], object]]:
        """Each kernel of a call by name, as a function of rank and input set."""
        limits, num_tokens = self.backends[0].limits, self.case.tokens_per_rank
        row_bytes = self.shape.hidden_size * self.shape.dtype.itemsize
        num_foreign = (self.num_ranks - 1) * num_tokens
        is_small = num_foreign * row_bytes < limits.comm_stream_bytes

        def put(rank: int, index: int) -> None:
            tokens = self.sets[rank][index % NUM_INPUT_SETS]
            backend = self.backends[rank]
            put_tokens(
                backend.channels[0],
                (tokens.hidden_states, tokens.topk_ids, tokens.topk_weights),
                first_row=rank * num_tokens,
                max_programs=backend.dispatch_programs,
            )

        def wait(rank: int, index: int) -> None:
            channel = self.backends[rank].channels[0]
            wait_for_dispatch(channel, limit_ns=channel.wait_limit_ns)

        def put_back(rank: int, index: int) -> None:
            backend = self.backends[rank]
            put_results(
                backend.channels[0],
                self.output,
                num_own_rows=num_tokens,
                first_own_row=rank * num_tokens,
                max_programs=backend.put_programs if is_small else limits.combine_programs,
            )

        def sum_up(rank: int, index: int) -> Tensor:
            return sum_results(
                self.backends[rank].channels[0],
                self.output,
                self.sets[rank][index % NUM_INPUT_SETS].topk_ids,
                first_own_row=rank * num_tokens,
                bias=None,
                is_joined=False,
            )

        return {
            "put_tokens": put,
            "wait_for_dispatch": wait,
            "put_results": put_back,
            "sum_results": sum_up,
        }

    def bytes_of_kernels(self) -> dict[str, int | None]:
        """What FORMULAS say, of the busiest rank, mean over the input sets."""
        loads = [load_of(sets, self.shape.placement) for sets in self.sets]
        row, top_k = self.shape.hidden_size * self.shape.dtype.itemsize, self.shape.top_k
        num_tokens, num_ranks = self.case.tokens_per_rank, self.num_ranks
        pairs = max(sum(load.rows_to) for load in loads) / NUM_INPUT_SETS
        back = [
            sum(load.rows_to[rank] for source, load in enumerate(loads) if source != rank)
            for rank in range(num_ranks)
        ]
        foreign = (num_ranks - 1) * num_tokens
        routing = num_tokens * num_ranks * (8 * top_k + 4)
        return {
            "put_tokens": round(num_tokens * row + pairs * self.shape.sent_row_bytes + routing),
            "wait_for_dispatch": None,
            "put_results": round(2 * max(back) / NUM_INPUT_SETS * row + foreign * (4 * top_k + 4)),
            "sum_results": round((pairs + num_tokens) * row),
        }


def measure_launches(ranks: VirtualRanks, copy_gbps: float | None) -> list[Launch]:
    """Each kernel, on every rank the same number of times before the next one's turn."""
    num_bytes = ranks.bytes_of_kernels()
    launches = []
    for name, launch in ranks.kernels().items():
        times = [median_us(partial(launch, rank), ranks.device) for rank in range(ranks.num_ranks)]
        worst, size = max(times), num_bytes[name]
        launches.append(
            Launch(
                name=name,
                us=worst,
                bytes=size,
                gbps=size / worst / 1e3 if size else None,
                floor_us=size / copy_gbps / 1e3 if size and copy_gbps else None,
                formula=FORMULAS[name],
            )
        )
    return launches


def measure_host(ranks: VirtualRanks) -> dict[str, float]:
    """Host microseconds of one rank's call by step, median; nothing waits for the device."""
    rounds = HOST_ROUNDS if ranks.device.type == "cuda" else 2
    steps: list[list[float]] = []
    for index in range(rounds):
        marks: list[float] = []
        ranks.round(index, marks)
        steps.append([b - a for a, b in pairwise(marks)])
        if index % 10 == 9 and ranks.device.type == "cuda":
            torch.cuda.synchronize()  # so that the queue of launches is never full
    medians = [statistics.median(step) * 1e6 / ranks.num_ranks for step in zip(*steps, strict=True)]
    names = ("prepare_and_dispatch", "join_dispatch", "combine", "join_combine")
    return dict(zip(names, medians, strict=True)) | {"call": sum(medians)}


def count_launches(ranks: VirtualRanks) -> tuple[dict[str, float] | None, str | None]:
    """Device activities of one rank's call by name, as the profiler sees them; or why not."""
    if ranks.device.type != "cuda":
        return None, "the profiler sees launches on CUDA only"
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        ranks.round(0)
        torch.cuda.synchronize()
    counts: dict[str, float] = {}
    for event in profiler.events() or []:
        if str(event.device_type).endswith("CUDA"):
            counts[event.name] = counts.get(event.name, 0) + 1 / ranks.num_ranks
    if not counts:
        return None, "the profiler saw nothing on the device"
    return counts, None


def measure_copy(device: torch.device) -> float | None:
    """GB/s of a large copy on the device, bytes read plus bytes written; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_us(lambda _: target.copy_(source), device) / 1e3


def measure_call(ranks: VirtualRanks) -> float | None:
    """Device microseconds of a whole call, all ranks one after another, divided by them."""
    if ranks.device.type != "cuda":
        return None
    return median_us(ranks.round, ranks.device) / ranks.num_ranks


def measure_case(ranks: VirtualRanks, copy_gbps: float | None) -> Any:
    for index in range(NUM_INPUT_SETS):
        ranks.round(index)
    counts, no_counts = count_launches(ranks)
    host, call_us = measure_host(ranks), measure_call(ranks)
    # Last: these leave the slot in the middle of a call.
    launches = measure_launches(ranks, copy_gbps)
    return {
        **ranks.case.sizes(),
        "launches": [asdict(launch) for launch in launches],
        "launches_us": sum(launch.us for launch in launches),
        "call_us": call_us,
        "host_us": host,
        "launches_per_call": sum(counts.values()) if counts else None,
        "launch_names": counts,
        "launches_skip_reason": no_counts,
    }


def main(arguments: Sequence[str]) -> int:
    options = parse_arguments(arguments)
    return status_of(lambda: measure(options, arguments))


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    prepare_json_file(options.json)
    prepare_plot_file(options.plot)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    copy_gbps = measure_copy(device)
    cases = []
    print("tokens  launch               us     GB/s    floor us")
    for num_tokens in options.tokens_per_rank:
        moe = MoEConfig(
            hidden_size=options.hidden_size,
            moe_intermediate_size=1,
            num_experts=options.num_experts,
            top_k=options.top_k,
            dtype=options.dtype,
        )
        case = Case(moe, options.routing, num_tokens)
        ranks = VirtualRanks(case, options.ranks, device, RowScheme(options.rows))
        cases.append(measure_case(ranks, copy_gbps))
        for launch in cases[-1]["launches"]:
            gbps, floor = launch["gbps"] or float("nan"), launch["floor_us"] or float("nan")
            print(
                f"{num_tokens:6}  {launch['name']:18} {launch['us']:8.2f} {gbps:7.1f} {floor:8.2f}"
            )
        host, call_us = cases[-1]["host_us"]["call"], cases[-1]["call_us"]
        print(
            f"{num_tokens:6}  whole call: device us {call_us}, host us {host:.1f}, launches "
            f"{cases[-1]['launches_per_call']}"
        )
    record = {
        "schema_version": SCHEMA_VERSION,
        "command": "symm_mem_launches",
        "command_line": shlex.join(["python", "-m", "benchmarks.symm_mem_launches", *arguments]),
        "environment": describe_versions(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "requested": {k: v for k, v in vars(options).items() if k not in ("json", "plot")},
        "method": (
            f"each kernel in a CUDA graph of {CALLS_PER_GRAPH} launches over {NUM_INPUT_SETS} "
            f"input sets, median of {REPLAYS} replays, slowest of the virtual ranks; peers' "
            f"memory on the same device"
        ),
        "copy_gbps": copy_gbps,
        "cases": cases,
    }
    write_json(options.json, record)
    if options.plot is not None:
        write_plot(record, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
