"""The shared expert's kernels run in the combine window: in a trace of virtual ranks, on a GPU."""

from typing import Any

import pytest
import torch

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.ownership import Schedule
from ep_runtime.reference import reference_layer
from tests.all2all.virtual_ranks import LIMITS
from tests.ep_runtime.overlap_trace import (
    LAST_OF_EXPERTS,
    NUM_RANKS,
    PUT,
    SUM,
    WAIT,
    KernelSpan,
    kernel_spans,
    overlap_faults,
    trace_layer,
    window_overlaps,
)
from tests.ep_runtime.virtual_layer import call_all, make_virtual_layer, plan_virtual_layer
from tests.tolerances import assert_close

THREAD = 41


def kernel(
    name: str, correlation: int, ts: float, dur: float, stream: int = 7, tid: int = THREAD
) -> list[dict[str, Any]]:
    arguments = {"correlation": correlation, "stream": stream}
    launch = {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 1, "dur": 1, "tid": tid}
    run = {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": arguments}
    return [launch | {"args": {"correlation": correlation}}, run]


def made_trace(shared_start: float, shared_us: float) -> dict[str, Any]:
    """Experts to 50; a put of 100 from there; the wait at 200. The host was long ahead."""
    return {
        "traceEvents": [
            {"name": "process_name", "ph": "M"},
            *kernel("nvjet_of_the_router", 9, 2, 3),
            *kernel(LAST_OF_EXPERTS, 1, 10, 40),
            *kernel("at::native::count_slots", 8, 50, 2),
            *kernel(PUT, 2, 50, 100, stream=13),
            *kernel("nvjet_gemm", 3, shared_start, shared_us - 10),
            *kernel("at::native::silu", 7, shared_start + shared_us - 10, 10),
            *kernel(WAIT, 6, 200, 5),
            *kernel(SUM, 4, 205, 10),
            *kernel("nvjet of nobody", 5, 60, 10, tid=42),
        ]
    }


def test_kernels_know_their_thread_stream_and_time() -> None:
    spans = kernel_spans(made_trace(60, 80))
    assert spans[0] == KernelSpan(THREAD, "nvjet_of_the_router", 7, 0, 3)
    assert spans[-1] == KernelSpan(THREAD, SUM, 7, 203, 213)
    assert {span.thread for span in spans} == {THREAD, 42}
    assert [span.stream for span in spans if PUT in span.name] == [13]


@pytest.mark.parametrize(
    ("start", "duration", "words"),
    [
        (60, 80, []),
        (160, 30, ["0.0 us beside the put"]),
        (195, 80, ["75.0 us outside the window", "beside the put"]),
    ],
)
def test_overlap_is_told_from_its_absence(start: float, duration: float, words: list[str]) -> None:
    (found,) = window_overlaps(kernel_spans(made_trace(start, duration)))
    assert (found.window_us, found.put_us, found.shared_us) == (150, 100, duration)
    assert found.num_shared_kernels == 2
    faults = overlap_faults([found])
    assert len(faults) == len(words)
    assert all(word in fault for word, fault in zip(words, faults, strict=True))


def test_no_kernel_of_a_shared_expert_is_a_fault() -> None:
    trace = made_trace(60, 80)
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e["name"] != "nvjet_gemm"]
    faults = overlap_faults(window_overlaps(kernel_spans(trace)))
    assert "no kernel of the shared expert was seen" in faults[0]


@pytest.mark.skipif(not is_interpreting(), reason="Triton compiles for CUDA in this process")
@pytest.mark.parametrize("overlap", ["auto", "off"])
def test_virtual_ranks_of_a_layer_equal_the_reference(overlap: str) -> None:
    moe = MoEConfig(
        hidden_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        top_k=2,
        num_shared_experts=1,
        dtype="float32",
    )
    cpu = torch.device("cpu")
    plan = plan_virtual_layer(moe, 2, cpu, experts="reference", overlap=overlap, max_tokens=8)
    assert plan.regime(8).schedule.overlaps == (overlap == "auto")
    ranks = make_virtual_layer(plan, cpu, LIMITS)
    rows = [
        torch.randn(count, 32, generator=torch.Generator().manual_seed(count)) for count in (5, 3)
    ]
    outputs = [call_all(ranks, rows) for _ in range(2)][-1]
    shared, router = ranks[0].runner._shared, ranks[0].runner._router
    assert shared is not None
    assert shared.calls == 2
    for own, output in zip(rows, outputs, strict=True):
        wanted = reference_layer(
            own,
            moe,
            w13=torch.cat([rank.weights.w13 for rank in ranks]),
            w2=torch.cat([rank.weights.w2 for rank in ranks]),
            router=router.weight,
            shared={"w13": shared.w13, "w2": shared.w2, "gate": None},
        )
        assert_close(output, wanted)


@pytest.mark.gpu
def test_the_shared_expert_runs_inside_the_window_beside_the_put_in_flight() -> None:
    plan, spans = trace_layer()
    assert plan.regime(1).schedule is Schedule.COMBINE_WINDOW
    overlaps = window_overlaps(spans)
    assert len(overlaps) == NUM_RANKS
    assert overlap_faults(overlaps) == []


@pytest.mark.gpu
def test_without_overlap_no_kernel_of_it_runs_beside_the_put() -> None:
    plan, spans = trace_layer("off")
    assert plan.regime(1).schedule is Schedule.COMBINE_JOINED
    puts = [span for span in spans if PUT in span.name]
    waits = [span for span in spans if WAIT in span.name]
    assert len(puts) == NUM_RANKS
    # A dispatch's and a combine's; the shared expert comes behind the second.
    assert len(waits) == 2 * NUM_RANKS
    assert all(found.beside_put_us == 0 for found in window_overlaps(spans))
