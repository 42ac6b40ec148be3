"""The three checks of the stream audit on a GPU, one case after another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from ep_runtime.audit_allocator import stress_allocator
from ep_runtime.audit_co_run import CO_RUN_MAX_TOKENS, stress_co_run
from ep_runtime.audit_gpu import MAX_TOKENS_PER_RANK, GpuResult, GpuSite, plan_gpu_case
from ep_runtime.audit_sanitizer import sanitize_case, sanitizer_mode
from ep_runtime.audit_stand_ins import EXPERTS as STAND_IN_EXPERTS
from ep_runtime.audit_stand_ins import registered_stand_ins
from ep_runtime.audit_streams import AuditCase, plan_fault
from ep_runtime.config import MoEConfig
from ep_runtime.kernels.errors import ConfigError, EPRuntimeError, first_line
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.plan import Plan

CHECKS = ("sanitizer", "allocator", "co_run")
GPU_CANNOT_SEE = (
    "views of one storage that begin at different bytes: the sanitizer goes by the first byte",
    "kernels and streams inside DeepEP and NCCL, and peers: one rank copies in their place",
    "what did not happen in these runs: stresses show races that their schedules met",
    "whether a kernel writes what its operator does not declare",
)
# Of backends on which a kernel is run alone, the first that can be planned.
_CO_RUN_BACKENDS = ("local", "deepep_low_latency")
# Iterations of a co-run for each call under allocator stress, which takes milliseconds.
_CO_RUNS_PER_CALL = 50
# Of the time for stresses, what a case of a check has beside one of another.
_SHARES = {"sanitizer": 0, "allocator": 1, "co_run": 10}


@dataclass(frozen=True)
class GpuAuditOptions:
    """checks: of CHECKS. iterations: of each co-run; an allocator stress makes one call for 50.
    seconds: of all stresses together, compilation not counted. unjoined: kernels that are not
    certified have company too. hang_s: a step that takes longer is taken to hang."""

    checks: tuple[str, ...] = CHECKS
    iterations: int = 2000
    seconds: float = 60.0
    seed: int = 0
    unjoined: bool = False
    hang_s: float = 60.0

    def __post_init__(self) -> None:
        for check in self.checks:
            if check not in CHECKS:
                raise ConfigError(f"--checks {check}: is unknown; choose among {', '.join(CHECKS)}")
        for name, value in (("iterations", self.iterations), ("seconds", self.seconds)):
            if value <= 0:
                raise ConfigError(f"--{name} ({value:g}) must be above 0")


@dataclass(frozen=True)
class PlannedCheck:
    """check: of CHECKS. backends: to be tried in this order until one can be planned."""

    check: str
    case: AuditCase
    backends: tuple[str, ...]


def planned_checks(cases: Sequence[AuditCase], checks: Sequence[str]) -> list[PlannedCheck]:
    """What is to be run, in order. The sanitizer takes every case, the allocator stress those that
    may overlap, a co-run each kernel once and no stand-in."""
    planned: list[PlannedCheck] = []
    for check in checks:
        if check == "co_run":
            names = dict.fromkeys(c.experts for c in cases if c.experts not in STAND_IN_EXPERTS)
            planned += [
                PlannedCheck(check, AuditCase("", name, "auto"), _CO_RUN_BACKENDS) for name in names
            ]
            continue
        planned += [
            PlannedCheck(check, case, (case.backend,))
            for case in cases
            if check == "sanitizer" or case.overlap == "auto"
        ]
    return planned


def run_checks(
    moe: MoEConfig,
    fill: Callable[[MoELayer], None],
    planned: Sequence[PlannedCheck],
    options: GpuAuditOptions,
    *,
    site: GpuSite,
    machine: Machine,
    step: Callable[[str], None],
) -> Iterator[GpuResult]:
    """Run them in turn. A check that raises is a fault; where the device is lost by it, the rest is
    skipped. step: told what runs, for a watchdog."""
    checker = _Checker(moe, fill, options, site, machine, step)
    with registered_stand_ins(site, with_triton=True):
        plans = [checker.plan(item) for item in planned]
        shares = sum(
            _SHARES[item.check]
            for plan, item in zip(plans, planned, strict=True)
            if isinstance(plan, Plan)
        )
        lost: str | None = None
        for item, plan in zip(planned, plans, strict=True):
            if isinstance(plan, str) or lost is not None:
                reason = plan if isinstance(plan, str) else f"the device is lost: {lost}"
                yield GpuResult(item.check, item.case, skip_reason=reason)
                continue
            case = replace(item.case, backend=plan.backend)
            try:
                seconds = options.seconds * _SHARES[item.check] / max(shares, 1)
                yield checker.run(item.check, case, plan, seconds)
            except Exception as error:
                fault = f"{type(error).__name__}: {str(error).strip()}"
                yield GpuResult(item.check, case, faults=(fault,))
                lost = _why_lost(site)


def _why_lost(site: GpuSite) -> str | None:
    try:
        site.gpu.finish()
    except Exception as error:
        return first_line(error)
    return None


@dataclass
class _Checker:
    moe: MoEConfig
    fill: Callable[[MoELayer], None]
    options: GpuAuditOptions
    site: GpuSite
    machine: Machine
    step: Callable[[str], None]

    def plan(self, item: PlannedCheck) -> Plan | str:
        """The plan of the first backend that has one, or why there is none."""
        why: list[str] = []
        # A kernel may take fewer rows than a co-run has at most.
        limits = (CO_RUN_MAX_TOKENS,) if item.check == "co_run" else ()
        for limit, backend in product((*limits, MAX_TOKENS_PER_RANK), item.backends):
            try:
                return self._plan(replace(item.case, backend=backend), limit)
            except (EPRuntimeError, ImportError) as error:
                why.append(plan_fault(error))
        return "; ".join(dict.fromkeys(why))

    def _plan(self, case: AuditCase, max_tokens_per_rank: int) -> Plan:
        on_cpu = self.site.gpu.device.type == "cpu"
        return plan_gpu_case(
            self.moe,
            case,
            self.machine,
            max_tokens_per_rank=max_tokens_per_rank,
            device="cpu" if on_cpu else "cuda",
        )

    def run(self, check: str, case: AuditCase, plan: Plan, seconds: float) -> GpuResult:
        options = self.options
        self.step(f"{check} of {case.backend} with {case.experts}, overlap {case.overlap}")
        if check == "sanitizer":
            return sanitize_case(
                plan, self.fill, case, self.site, sanitizer=_sanitizer(), step=self.step
            )
        if check == "allocator":
            serial = self._plan(replace(case, overlap="off"), MAX_TOKENS_PER_RANK)
            return stress_allocator(
                (plan, serial),
                self.fill,
                case,
                self.site,
                iterations=max(1, options.iterations // _CO_RUNS_PER_CALL),
                seed=options.seed,
                seconds=seconds,
                step=self.step,
            )
        return stress_co_run(
            plan,
            self.fill,
            case,
            self.site,
            iterations=options.iterations,
            seed=options.seed,
            seconds=seconds,
            unjoined=options.unjoined,
            step=self.step,
        )


@cache
def _sanitizer() -> tuple[Any, type[Exception]]:
    return sanitizer_mode()
