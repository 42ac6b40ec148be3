"""When the kernels of a layer's calls ran, read from a profiler's trace, and what overlapped.

Each rank's calls are launched by a thread of its own; the profiler joins launch and kernel by a
correlation number.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ep_runtime.all2all.symm_mem import SymmMemLimits
from ep_runtime.config import MoEConfig
from ep_runtime.plan import Plan
from tests.ep_runtime.virtual_layer import (
    call_all,
    make_virtual_layer,
    plan_virtual_layer,
)

PUT, SUM, WAIT = "_put_results_kernel", "_sum_results_kernel", "_wait_kernel"
LAST_OF_EXPERTS = "_sum_slots_kernel"
_PRODUCT = re.compile("gemm|nvjet|cutlass|sm90_", re.IGNORECASE)
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class KernelSpan:
    """thread: that launched it, one for each rank. start_us, end_us: since the first began."""

    thread: int
    name: str
    stream: int
    start_us: float
    end_us: float


def kernel_spans(trace: Mapping[str, Any]) -> list[KernelSpan]:
    """The kernels of a chrome trace, in time."""
    events = trace["traceEvents"]
    threads = {
        event["args"]["correlation"]: int(event["tid"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = [event for event in events if event.get("cat") == "kernel"]
    first = min((event["ts"] for event in kernels), default=0.0)
    spans = [
        KernelSpan(
            threads[event["args"]["correlation"]],
            event["name"][:60],
            int(event["args"]["stream"]),
            round(event["ts"] - first, 3),
            round(event["ts"] + event["dur"] - first, 3),
        )
        for event in kernels
    ]
    return sorted(spans, key=lambda span: span.start_us)


@dataclass(frozen=True)
class WindowOverlap:
    """One rank's call. window_us: from the end of its experts to the wait for the results.

    put_us: of its own combine's put. shared_us: of the shared expert's kernels, which are those of
    its stream from the first product behind the experts to the last before the sum. outside_us: of
    those, time not in the window. beside_put_us: time while the rank's own put was in flight.
    """

    thread: int
    num_shared_kernels: int
    window_us: float
    put_us: float
    shared_us: float
    outside_us: float
    beside_put_us: float


def window_overlaps(spans: list[KernelSpan]) -> list[WindowOverlap]:
    """Of a trace in which every rank made one call of one round."""
    threads = dict.fromkeys(span.thread for span in spans if SUM in span.name)
    return [_window_overlap([s for s in spans if s.thread == thread]) for thread in threads]


def _window_overlap(own: list[KernelSpan]) -> WindowOverlap:
    (put,) = [span for span in own if PUT in span.name]
    (total,) = [span for span in own if SUM in span.name]
    main = [span for span in own if span.stream == total.stream]
    begin = max(span.end_us for span in main if LAST_OF_EXPERTS in span.name)
    behind = [s for s in main if s.start_us >= begin and s is not put and s is not total]
    waits = [s for s in behind if WAIT in s.name]
    end = min(s.start_us for s in (total, *waits))
    products = [s.start_us for s in behind if _PRODUCT.search(s.name)]
    shared = [s for s in behind if s not in waits and products and s.start_us >= min(products)]
    shared_us = sum(s.end_us - s.start_us for s in shared)
    return WindowOverlap(
        own[0].thread,
        len(shared),
        round(end - begin, 3),
        round(put.end_us - put.start_us, 3),
        round(shared_us, 3),
        round(shared_us - sum(_common(s, begin, end) for s in shared), 3),
        round(sum(_common(s, put.start_us, put.end_us) for s in shared), 3),
    )


def _common(span: KernelSpan, begin: float, end: float) -> float:
    return max(0.0, min(span.end_us, end) - max(span.start_us, begin))


def overlap_faults(overlaps: list[WindowOverlap]) -> list[str]:
    """Why the shared expert did not run in its windows, beside the puts; empty where it did."""
    faults = []
    for found in overlaps:
        if found.shared_us <= 0:
            faults.append(f"thread {found.thread}: no kernel of the shared expert was seen")
        if found.outside_us > 0.02 * found.shared_us:
            faults.append(f"thread {found.thread}: {found.outside_us:.1f} us outside the window")
        wanted = 0.25 * min(found.put_us, found.shared_us)
        if found.beside_put_us < wanted:
            faults.append(
                f"thread {found.thread}: {found.beside_put_us:.1f} us beside the put, "
                f"wanted {wanted:.1f}"
            )
    return faults


TRACED = MoEConfig(
    hidden_size=7168,
    moe_intermediate_size=2048,
    num_experts=8,
    top_k=4,
    num_shared_experts=1,
    dtype="bfloat16",
)
NUM_RANKS, NUM_TOKENS = 2, 2048
# Programs of a put on the communication stream: of two it takes longer than the other rank's
# experts, which hold all multiprocessors of the GPU that both share.
LIMITS = SymmMemLimits(wait_limit_s=20, put_programs=2, combine_programs=2)


def trace_layer(overlap: str = "auto") -> tuple[Plan, list[KernelSpan]]:
    """A call of two virtual ranks of one GPU, after two that warm up."""
    import json
    import tempfile
    from pathlib import Path

    from torch.profiler import ProfilerActivity, profile

    device = torch.device("cuda", torch.cuda.current_device())
    plan = plan_virtual_layer(
        TRACED, NUM_RANKS, device, experts="triton", overlap=overlap, max_tokens=NUM_TOKENS
    )
    ranks = make_virtual_layer(plan, device, LIMITS)
    rows = [
        torch.randn(NUM_TOKENS, TRACED.hidden_size, device=device, dtype=torch.bfloat16)
        for _ in ranks
    ]
    torch.cuda.synchronize()
    for _ in range(2):
        call_all(ranks, rows)
        torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call_all(ranks, rows)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return plan, kernel_spans(trace)


def summary(plan: Plan, spans: list[KernelSpan]) -> dict[str, Any]:
    """What is recorded of a trace, as JSON."""
    overlaps = window_overlaps(spans)
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layer": TRACED.model_dump(mode="json"),
        "virtual_ranks": NUM_RANKS,
        "tokens_per_rank": NUM_TOKENS,
        "put_programs": LIMITS.put_programs,
        "combine_programs": LIMITS.combine_programs,
        "schedule": str(plan.regime(NUM_TOKENS).schedule),
        "windows": [asdict(found) for found in overlaps],
        "faults": overlap_faults(overlaps),
        "kernels": [asdict(span) for span in spans],
    }
