"""Co-run stress: an experts kernel beside company on a second stream, bit-compared with alone.

Company is a synthetic occupant that holds 1 to all multiprocessors (kernels/occupant.py), the
layer's shared expert, or the same kernel once more on other rows in a workspace of its own. Which,
how much, for how long, and who comes first is a seeded schedule. A call whose kernel is not
certified for its number of rows is joined with its company, as the plan does; `unjoined` runs it
beside all the same, to see whether its class could be another.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ep_runtime.audit_gpu import Gpu, GpuResult, GpuSite, gpu_layer, random_rows
from ep_runtime.audit_streams import AuditCase
from ep_runtime.kernels.base import BatchedExpertInput, Concurrency, StandardExpertInput
from ep_runtime.kernels.experts_operators import flatten_tensors, rebuild_tensors
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.layer import MoELayer
from ep_runtime.ownership import Owner, SharedExpertToken
from ep_runtime.plan import Plan

CO_RUN_ROWS = (1, 8, 200, 2048)
CO_RUN_MAX_TOKENS = max(CO_RUN_ROWS)
MAX_DURATION_US = 400
_STEPS_IN_FLIGHT = 16
_ALL_ONES = 255


class Company(StrEnum):
    OCCUPANT = "occupant"
    SHARED_EXPERT = "shared_expert"
    SAME_KERNEL = "same_kernel"


@dataclass(frozen=True)
class CoRunStep:
    """One iteration. call: index of the kernel's call, company_call: of the same kernel's other,
    which has other rows, so that results which change places are seen.

    num_multiprocessors, duration_us: of an occupant. kernel_delay_us: the kernel's stream spins so
    long before it.
    """

    call: int
    company: Company
    company_call: int
    num_multiprocessors: int
    duration_us: int
    kernel_delay_us: int
    company_first: bool


def co_run_steps(
    seed: int, *, num_calls: int, num_multiprocessors: int, companies: Sequence[Company]
) -> Iterator[CoRunStep]:
    """Without end; equal for equal arguments. One occupant in four holds the whole device."""
    chance = random.Random(seed)
    while True:
        some = chance.randint(1, num_multiprocessors)
        held = chance.choice((1, num_multiprocessors, some, some))
        yield CoRunStep(
            call=chance.randrange(num_calls),
            company=chance.choice(tuple(companies)),
            company_call=chance.randrange(num_calls),
            num_multiprocessors=held,
            duration_us=chance.randint(5, MAX_DURATION_US),
            kernel_delay_us=chance.choice((0, 0, chance.randint(1, MAX_DURATION_US // 4))),
            company_first=chance.random() < 0.75,
        )


@dataclass(frozen=True)
class KernelCall:
    """A launch of a layer's experts kernel, to be made again.

    run: in a workspace, [.., H]. is_valid: what of its result is specified, or None: all.
    concurrency: the kernel's class for that many rows.
    """

    run: Callable[[Workspace], Tensor]
    is_valid: Tensor | None
    concurrency: Concurrency

    def bits(self, output: Tensor) -> Tensor:
        """The result's bits, 0 where it is not specified."""
        held = output if self.is_valid is None else torch.where(self.is_valid, output, 0)
        return held.contiguous().view(torch.uint8)


def capture_call(layer: MoELayer, rows: Tensor) -> KernelCall:
    """What a layer's call on these rows gives its kernel, copied. One round."""
    experts: Any = layer.experts
    run = experts.run
    calls: list[KernelCall] = []
    concurrency = experts.concurrency(len(rows))

    def modular(expert_input: Any, weights: Any, workspace: Workspace) -> Tensor:
        held = _copied(expert_input)
        again = lambda workspace: run(held, weights, workspace)  # noqa: E731
        calls.append(KernelCall(again, _specified(held), concurrency))
        return run(expert_input, weights, workspace)  # type: ignore[no-any-return]

    def monolithic(hidden: Tensor, logits: Tensor, *, context: Any, workspace: Workspace) -> Tensor:
        held = hidden.clone(), logits.clone()
        own = replace(context, tokens_per_expert=context.tokens_per_expert.clone())
        again = lambda workspace: run(*held, context=own, workspace=workspace)  # noqa: E731
        calls.append(KernelCall(again, None, concurrency))
        return run(hidden, logits, context=context, workspace=workspace)  # type: ignore[no-any-return]

    is_monolithic = experts.capabilities.kind == "monolithic"
    experts.run = monolithic if is_monolithic else modular
    try:
        layer(rows)
    finally:
        del experts.run
    (call,) = calls
    return call


def _copied(value: Any) -> Any:
    return rebuild_tensors(value, [tensor.clone() for tensor in flatten_tensors(value)])


def _specified(expert_input: StandardExpertInput | BatchedExpertInput) -> Tensor | None:
    rows = expert_input.hidden_states
    if isinstance(expert_input, BatchedExpertInput):
        index = torch.arange(rows.shape[1], device=rows.device)
        return (index < expert_input.num_rows_per_expert[:, None])[:, :, None]
    if expert_input.num_rows is None:
        return None
    return (torch.arange(len(rows), device=rows.device) < expert_input.num_rows)[:, None]


class CoRun:
    """A kernel's calls beside company. num_wrong: [2] int64, results of the kernel and of its
    company that differ from those alone."""

    def __init__(
        self,
        layer: MoELayer,
        gpu: Gpu,
        *,
        seed: int,
        unjoined: bool = False,
        step: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Computes every result alone, on the main stream. step: told before each."""
        self.gpu, self.unjoined = gpu, unjoined
        moe, device = layer.moe, gpu.device
        most = layer.plan.parallel.max_tokens_per_rank
        given = [random_rows(moe, device, n, seed + n) for n in CO_RUN_ROWS if n <= most]
        self.calls: list[KernelCall] = []
        self._company_calls: list[KernelCall] = []
        for rows in given:
            step(f"{len(rows)} rows of {layer.plan.experts}, alone")
            self.calls.append(capture_call(layer, rows))
            self._company_calls.append(capture_call(layer, rows.flip(1)))
        num_bytes = layer.experts.workspace_bytes(most)
        self._workspaces = [Workspace(device, num_bytes) for _ in range(2)]
        self._shared, self._shared_rows = layer.shared, given[min(2, len(given) - 1)]
        self.num_wrong = torch.zeros(2, dtype=torch.int64, device=device)
        self.streams = [gpu.cuda.Stream(device) for _ in range(2)]
        self.wanted, self._wanted_of_company = (
            [call.bits(self._kernel(call, 0)) for call in calls]
            for calls in (self.calls, self._company_calls)
        )
        self.faults: list[str] = []
        for rows, call, wanted in zip(given, self.calls, self.wanted, strict=True):
            if not torch.equal(call.bits(self._kernel(call, 0)), wanted):
                self.faults.append(f"alone, two calls of {len(rows)} rows differ in their bits")
        self._wanted_shared = None if layer.shared is None else self._run_shared()
        gpu.finish()

    @property
    def companies(self) -> tuple[Company, ...]:
        return tuple(
            company
            for company in Company
            if company is not Company.SHARED_EXPERT or self._shared is not None
        )

    def is_joined(self, step: CoRunStep) -> bool:
        """Whether the kernel and its company are ordered."""
        classes = {self.calls[step.call].concurrency}
        if step.company is Company.SAME_KERNEL:
            classes.add(self.calls[step.company_call].concurrency)
        return not self.unjoined and classes != {Concurrency.CERTIFIED}

    def run(self, step: CoRunStep) -> None:
        """Issue one iteration; does not wait for the device."""
        joins = self.is_joined(step)
        parts = [self._issue_company, self._issue_kernel]
        for part in parts if step.company_first else reversed(parts):
            if joins:
                self.join()
            part(step)
        if joins:
            self.join()

    def join(self) -> None:
        """Order each stream behind the other."""
        first, second = self.streams
        first.wait_stream(second)
        second.wait_stream(first)

    def _issue_kernel(self, step: CoRunStep) -> None:
        with self.gpu.cuda.stream(self.streams[0]):
            if step.kernel_delay_us:
                self.gpu.spin(step.kernel_delay_us)
            call = self.calls[step.call]
            self._count(0, call.bits(self._kernel(call, 0)), self.wanted[step.call])

    def _issue_company(self, step: CoRunStep) -> None:
        with self.gpu.cuda.stream(self.streams[1]):
            if step.company is Company.OCCUPANT:
                done = self.gpu.occupy(step.num_multiprocessors, step.duration_us)
                self._count(1, done, torch.ones_like(done))
            elif step.company is Company.SAME_KERNEL:
                call = self._company_calls[step.company_call]
                found = call.bits(self._kernel(call, 1))
                self._count(1, found, self._wanted_of_company[step.company_call])
            elif self._wanted_shared is not None:
                self._count(1, self._run_shared(), self._wanted_shared)

    def _kernel(self, call: KernelCall, index: int) -> Tensor:
        """In the workspace of that index, which is NaN before."""
        workspace = self._workspaces[index]
        workspace.rest.fill_(_ALL_ONES)
        with workspace.frame():
            return call.run(workspace)

    def _run_shared(self) -> Tensor:
        if self._shared is None:
            raise RuntimeError("the layer has no shared expert to run beside its kernel")
        rows = self._shared_rows
        token = SharedExpertToken(Owner.RUNNER)
        return self._shared.run(rows, token=token, by=Owner.RUNNER, out=torch.empty_like(rows))

    def _count(self, index: int, found: Tensor, wanted: Tensor) -> None:
        self.num_wrong[index] += (found != wanted).any()


def stress_co_run(
    plan: Plan,
    fill: Callable[[MoELayer], None],
    case: AuditCase,
    site: GpuSite,
    *,
    iterations: int,
    seed: int,
    seconds: float,
    unjoined: bool,
    step: Callable[[str], None],
) -> GpuResult:
    """So many iterations, or for so many seconds, at least one. step: told what runs."""
    started = time.monotonic()
    num_done, joined = 0, False
    gpu = site.gpu
    with gpu_layer(plan, fill, site) as layer, torch.no_grad():
        run = CoRun(layer, gpu, seed=seed, unjoined=unjoined, step=step)
        steps = co_run_steps(
            seed,
            num_calls=len(run.calls),
            num_multiprocessors=gpu.num_multiprocessors,
            companies=run.companies,
        )
        end = time.monotonic() + seconds
        while num_done < iterations and (num_done == 0 or time.monotonic() < end):
            for planned in islice(steps, min(_STEPS_IN_FLIGHT, iterations - num_done)):
                step(f"co-run of {case.experts}, iteration {num_done}: {planned}")
                joined |= run.is_joined(planned)
                run.run(planned)
                num_done += 1
            gpu.finish()
        by_kernel, by_company = run.num_wrong.tolist()
        classes = dict.fromkeys(str(call.concurrency) for call in run.calls)
    faults = [*run.faults]
    if by_company:
        faults.append(f"results of the kernel's company differed {by_company} times")
    return GpuResult(
        "co_run",
        case,
        ", ".join(classes),
        joined=joined,
        num_iterations=num_done,
        num_wrong=by_kernel,
        faults=tuple(faults),
        seconds=time.monotonic() - started,
    )
