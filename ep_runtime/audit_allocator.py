"""Allocator stress: consumers that begin late, and freed memory that is NaN at once.

Work on the aux stream, on communication streams and, between phases, on the main stream begins
behind a spinning kernel, by chance. After each phase every free block of the main stream is taken,
filled with ones in all bits (NaN, id -1) and given back: whatever is still read by a stream that
nobody waited for is read wrong. Results are compared, bit by bit, with those of a layer that
overlaps nothing.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ep_runtime.all2all.comm_stream import CommStream
from ep_runtime.audit_gpu import (
    ROWS,
    DelayingCuda,
    Gpu,
    GpuResult,
    GpuSite,
    gpu_layer,
    random_rows,
    schedules_of,
)
from ep_runtime.audit_streams import AuditCase
from ep_runtime.layer import MoELayer
from ep_runtime.plan import Plan

# Of streams beside the main one, and of the caller's rows: longer than the host takes to free
# memory, find it and refill it, which is milliseconds.
MAX_DELAY_US = 6000
_MAX_PHASE_DELAY_US = 200  # of the main stream, which fills
_ALL_ONES = 255


class AllocatorStress:
    """Delays and refills; `phase` takes the place of a layer's phase timer."""

    def __init__(self, gpu: Gpu, seed: int) -> None:
        self.gpu, self.chance = gpu, random.Random(seed)
        self.cuda = DelayingCuda(gpu, self.chance, MAX_DELAY_US)
        self.num_refilled = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a phase; refill what it freed, where it ran on the main stream."""
        if self.chance.random() < 0.25:
            self.gpu.spin(self.chance.uniform(1, _MAX_PHASE_DELAY_US))
        yield
        self.refill()

    def refill(self) -> None:
        """Take every free block of the main stream, write NaN, give it back."""
        gpu = self.gpu
        if gpu.cuda.current_stream(gpu.device) != gpu.cuda.default_stream(gpu.device):
            return
        taken = [
            torch.empty(num_bytes, dtype=torch.uint8, device=gpu.device)
            for num_bytes in gpu.free_blocks()
        ]
        for block in taken:
            block.fill_(_ALL_ONES)
        self.num_refilled += len(taken)

    @contextmanager
    def late_streams(self, site: GpuSite) -> Iterator[None]:
        """What a site's streams and every `CommStream` are given begins late."""
        follow, delay, cuda = CommStream.follow_current_stream, self.cuda.delay, self.gpu.cuda

        def late(stream: CommStream) -> None:
            follow(stream)
            with cuda.stream(stream._stream):
                delay()

        site.cuda = self.cuda
        setattr(CommStream, "follow_current_stream", late)  # noqa: B010
        try:
            yield
        finally:
            setattr(CommStream, "follow_current_stream", follow)  # noqa: B010
            site.cuda = cuda


def stress_allocator(
    plans: tuple[Plan, Plan],
    fill: Callable[[MoELayer], None],
    case: AuditCase,
    site: GpuSite,
    *,
    iterations: int,
    seed: int,
    seconds: float,
    step: Callable[[str], None],
) -> GpuResult:
    """Calls under stress, so many or for so many seconds, at least one.

    plans: the case's, and one that overlaps nothing. step: told before each call.
    """
    started = time.monotonic()
    gpu, site.faults = site.gpu, []
    plan, serial_plan = plans
    given = [random_rows(plan.moe, gpu.device, num_rows, seed + num_rows) for num_rows in ROWS]
    with gpu_layer(serial_plan, fill, site) as serial, torch.no_grad():
        wanted = []
        for rows in given:
            step(f"{len(rows)} rows of {case.backend} with {case.experts}, alone")
            wanted.append(serial(rows))
        gpu.finish()
    stress = AllocatorStress(gpu, seed)
    num_wrong = num_done = 0
    with stress.late_streams(site), gpu_layer(plan, fill, site) as layer, torch.no_grad():
        for rows in given:
            layer(rows)
        setattr(layer._timer, "phase", stress.phase)  # noqa: B010
        end = time.monotonic() + seconds
        while num_done < iterations and (num_done == 0 or time.monotonic() < end):
            step(f"allocator stress of {case.backend} with {case.experts}, call {num_done}")
            index = stress.chance.randrange(len(ROWS))
            output = _call_and_drop_rows(layer, given[index], stress)
            num_wrong += not is_bit_equal(output, wanted[index])
            num_done += 1
    return GpuResult(
        "allocator",
        case,
        str(layer.experts.concurrency(max(ROWS))),
        schedules_of(plan),
        num_iterations=num_done,
        num_wrong=num_wrong,
        faults=tuple(dict.fromkeys(site.faults)),
        seconds=time.monotonic() - started,
    )


def _call_and_drop_rows(layer: MoELayer, rows: Tensor, stress: AllocatorStress) -> Tensor:
    """One call on rows that are late, that nobody holds once it has returned, and that are
    overwritten then."""
    if stress.chance.random() < 0.5:
        stress.gpu.spin(stress.chance.uniform(1, MAX_DELAY_US))
    copied: Any = rows.clone()
    output: Tensor = layer(copied)
    del copied
    stress.refill()
    return output


def is_bit_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits; waits for the current stream."""
    return bool(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)))
