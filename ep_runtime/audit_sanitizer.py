"""torch's CUDA stream sanitizer over a layer: what no event orders is an error.

The sanitizer sees every operator of torch with what its schema reads and writes, the events that
order streams, and the allocator. Our kernels come to it as operators too (kernels/observed.py).
It tells tensors apart by the address of their first byte: two views of one storage that begin at
different places are different to it. The audit on a CPU goes by bytes. Tensors without memory have
no address: it goes by Python's id(), which later ones are given again, so that two of them on two
streams look like a race. They are left out here, since nobody reads or writes them.
"""

import io
import os
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import torch
from torch import Tensor

from ep_runtime.audit_gpu import (
    ROWS,
    GpuResult,
    GpuSite,
    gpu_layer,
    random_rows,
    schedules_of,
)
from ep_runtime.audit_streams import AuditCase
from ep_runtime.layer import MoELayer
from ep_runtime.plan import Plan


def sanitizer_mode() -> tuple[Any, type[Exception]]:
    """The sanitizer's dispatch mode, of which a process has one, and the error that it raises."""
    from torch.cuda import _sanitizer

    leave_out_empty_tensors(_sanitizer)
    return _sanitizer.cuda_sanitizer.dispatch, _sanitizer.CUDASanitizerErrors


def leave_out_empty_tensors(sanitizer: Any) -> None:
    """Have `torch.cuda._sanitizer` look at arguments with memory alone; again changes nothing."""
    if getattr(sanitizer.ArgumentHandler, "leaves_out_empty", False):
        return

    class WithMemory(sanitizer.ArgumentHandler):  # type: ignore[misc]
        leaves_out_empty = True

        def _handle_argument(self, value: Any, *arguments: Any, **keywords: Any) -> None:
            if not (isinstance(value, Tensor) and value.is_cuda and value.data_ptr() == 0):
                super()._handle_argument(value, *arguments, **keywords)

    sanitizer.ArgumentHandler = WithMemory


def describe_races(error: Exception) -> list[str]:
    """What the sanitizer's error says, a line for each pair of accesses; else the error's text."""
    races = [
        f"{_access(race.current_access)}; before it {_access(race.previous_access)}: not ordered"
        for race in getattr(error, "errors", ())
    ]
    return races or [str(error)]


def _access(access: Any) -> str:
    """Operator, stream, how and which arguments, and where in this library or its caller."""
    operator = str(access.operator).partition("(")[0]
    arguments = ", ".join([*access.aliases, *(["its output"] if access.is_output else [])])
    frames = [f for f in access.stack_trace if f"{os.sep}torch{os.sep}" not in f.filename]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{operator} on stream {access.stream:#x} {access.type} {arguments}{where}"


def sanitize_case(
    plan: Plan,
    fill: Callable[[MoELayer], None],
    case: AuditCase,
    site: GpuSite,
    *,
    sanitizer: tuple[Any, type[Exception]],
    step: Callable[[str], None],
) -> GpuResult:
    """Calls of every regime under the sanitizer, behind such calls without it that compile kernels.

    step: told before each call.
    """
    started = time.monotonic()
    gpu, site.faults = site.gpu, []
    mode, error_type = sanitizer
    faults: list[str] = []
    with gpu_layer(plan, fill, site) as layer:
        buffer = random_rows(plan.moe, gpu.device, max(ROWS), seed=0)
        given = [random_rows(plan.moe, gpu.device, max(ROWS), seed=1 + i) for i in range(len(ROWS))]
        for num_rows in ROWS:
            step(f"{num_rows} rows of {case.backend} with {case.experts}, without the sanitizer")
            layer(buffer[:num_rows])
        gpu.finish()
        num_calls = 0
        try:
            with redirect_stderr(io.StringIO()), mode, torch.no_grad():
                for num_rows, values in zip(ROWS, given, strict=True):
                    step(f"{num_rows} rows of {case.backend} with {case.experts}, sanitized")
                    # As a caller does that writes its rows anew and reads the output.
                    buffer.copy_(values)
                    output: Tensor = layer(buffer[:num_rows])
                    output.clone()
                    del output
                    num_calls += 1
        except error_type as error:
            faults += describe_races(error)
        gpu.finish()
    return GpuResult(
        "sanitizer",
        case,
        str(layer.experts.concurrency(max(ROWS))),
        schedules_of(plan),
        num_iterations=num_calls,
        faults=(*faults, *dict.fromkeys(site.faults)),
        seconds=time.monotonic() - started,
    )
