"""The stream audit: the runner's real code on a CPU, against recorded streams of a GPU.

Every backend and experts kernel that can be planned for a GPU of one rank, with overlap on and off,
runs a small layer of the given structure a few times. Recorded is what each stream reads, writes
and frees; found is what nothing orders, and what runs beside a kernel that is not certified to have
company. Cut down are sizes (streams do not depend on them) and row bounds, so that a few rows cover
every regime of the plan: less than a round, several rounds, above the token threshold, none.

What it cannot see: the kernels and streams inside DeepEP and NCCL (one rank only copies); waits on
the device (arrival counters of `symm_mem`): between ranks nothing is recorded; whether a
certificate tells the truth; hazards inside one launch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from ep_runtime.all2all.registry import backend_class, backend_names
from ep_runtime.audit_stand_ins import EXPERTS as STAND_IN_EXPERTS
from ep_runtime.audit_stand_ins import (
    collectives_on_their_own_stream,
    registered_stand_ins,
)
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.base import Concurrency, ExpertsKind, concurrency_rule, stricter
from ep_runtime.kernels.errors import EPRuntimeError
from ep_runtime.kernels.quant.scheme import QuantScheme
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine, TritonMode
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.rendezvous import Rendezvous
from ep_runtime.stream_history import Unordered
from ep_runtime.stream_recorder import StreamRecorder
from ep_runtime.streams import CudaStreams

CANNOT_SEE = (
    "kernels and streams inside DeepEP and NCCL: one rank copies in their place",
    "waits on the device (symm_mem's arrival counters), and anything between ranks",
    "hazards inside one launch, and whether a kernel's class is true: tests on a GPU show that",
)
MAX_TOKENS_PER_RANK = 2
TOKEN_THRESHOLD = 3
# Of the calls, in order: one round, two rounds, above the threshold, none, one round again.
ROWS = (2, 3, 4, 0, 1)
# Of the hidden and the intermediate size; quantised weights come in groups of up to 128.
_MAX_SIZE, _MAX_QUANTIZED_SIZE = 64, 256


@dataclass(frozen=True)
class AuditCase:
    """One combination. experts, backend: names in the registries. overlap: auto | off."""

    backend: str
    experts: str
    overlap: str


@dataclass(frozen=True)
class AuditResult:
    """What a case showed. skip_reason: why it was not run; then all else is empty."""

    case: AuditCase
    owner: str = ""
    schedules: tuple[str, ...] = ()
    num_operations: int = 0
    unordered: tuple[Unordered, ...] = ()
    misplaced: tuple[str, ...] = ()
    skip_reason: str | None = None

    @property
    def faults(self) -> list[str]:
        """All that was found, in words."""
        return [*map(str, self.unordered), *self.misplaced]


def audited_config(moe: MoEConfig) -> MoEConfig:
    """The same structure with small sizes, and so few experts that a CPU is quick."""
    most = _MAX_QUANTIZED_SIZE if moe.quantization.is_quantised else _MAX_SIZE
    per_group = max(2, -(-2 * moe.top_k // moe.topk_group))
    num_experts = min(moe.num_experts, moe.n_group * per_group)
    return MoEConfig.model_validate(
        moe.model_dump()
        | {
            "hidden_size": min(moe.hidden_size, most),
            "moe_intermediate_size": min(moe.moe_intermediate_size, most),
            "shared_intermediate_size": min(moe.shared_intermediate_size, most),
            "num_experts": num_experts,
            "quantization": scheme_of_fewer(moe, num_experts),
        }
    )


def scheme_of_fewer(moe: MoEConfig, num_experts: int) -> QuantScheme:
    """The layer's scheme with so many experts left; of a hybrid, every second one is in NVFP4."""
    if not moe.quantization.nvfp4_experts or num_experts == moe.num_experts:
        return moe.quantization
    return replace(moe.quantization, nvfp4_experts=tuple(range(0, num_experts, 2)))


def audited_machine(*, with_triton: bool) -> Machine:
    """One GPU, as the plan sees it; DeepEP's backends copy on one rank and need no package."""
    triton = TritonMode.COMPILED if with_triton else TritonMode.UNUSABLE
    return Machine("recorded", "cuda", triton, packages=("deep_ep",), num_devices=1)


def audit_layer(
    moe: MoEConfig, fill: Callable[[MoELayer], None], cases: Sequence[AuditCase]
) -> Iterator[AuditResult]:
    """Audit a layer, case by case.

    moe: as `audited_config` gives it. fill: gives a layer its weights (and finishes loading).
    """
    for case in cases:
        yield audit_case(moe, fill, case)


def all_cases(*, with_triton: bool | None = None) -> list[AuditCase]:
    """Every backend with every kernel, registered or standing in, overlap on and off.

    with_triton: with stand-ins that launch Triton kernels; None: where it is interpreted.
    """
    launches = _has_triton() if with_triton is None else with_triton
    with registered_stand_ins(StreamRecorder(), with_triton=launches) as stand_in_backends:
        names = [
            (backend, experts)
            for backend in (*backend_names(), *stand_in_backends)
            for experts in (*experts_names(), *STAND_IN_EXPERTS)
            # On one rank nothing is gathered, so a monolithic kernel meets no backend.
            if backend == "local" or not _is_monolithic(experts)
        ]
    return [AuditCase(b, e, overlap) for b, e in names for overlap in ("auto", "off")]


def audit_case(moe: MoEConfig, fill: Callable[[MoELayer], None], case: AuditCase) -> AuditResult:
    """Plan one case, run it, and say what was found."""
    recorder = StreamRecorder()
    with ExitStack() as stack:
        stack.enter_context(registered_stand_ins(recorder, with_triton=_has_triton()))
        try:
            plan = plan_case(moe, case)
        except (EPRuntimeError, ImportError) as error:
            return AuditResult(case, skip_reason=plan_fault(error))
        with recorded_layer(plan, fill, recorder) as layer:
            call_layer(layer, recorder)
        regimes = {layer.plan.regime(rows).schedule: None for rows in ROWS}
        return AuditResult(
            case=case,
            owner=str(plan.ownership.owner),
            schedules=tuple(str(schedule) for schedule in regimes),
            num_operations=recorder.history.num_operations,
            unordered=tuple(recorder.history.unordered),
            misplaced=tuple(recorder.history.misplaced),
        )


def plan_case(moe: MoEConfig, case: AuditCase) -> Plan:
    """The plan of a case; raises as `resolve_plan`."""
    return resolve_plan(
        moe,
        ParallelConfig(
            device="cpu",
            all2all_backend=case.backend,
            max_tokens_per_rank=MAX_TOKENS_PER_RANK,
        ),
        audited_machine(with_triton=_has_triton()),
        experts=case.experts,
        shared_experts=SharedExpertsConfig.model_validate(
            {"overlap": case.overlap, "token_threshold": TOKEN_THRESHOLD}
        ),
    )


@contextmanager
def recorded_layer(
    plan: Plan, fill: Callable[[MoELayer], None], recorder: StreamRecorder
) -> Iterator[MoELayer]:
    """A layer of one rank whose streams are recorded, and whose phases name the operations."""
    with ExitStack() as stack:
        ctx = stack.enter_context(_one_rank(plan))
        ctx.streams = CudaStreams(ctx.device, recorder.make_cuda("aux"))
        layer = MoELayer(plan.moe, ctx, plan=plan)
        fill(layer)
        for name, parameter in layer.named_parameters():
            recorder.know(parameter, name)
        for channel in getattr(layer._runner.kernel.backend, "channels", ()):
            recorder.know(channel.memory, "the slots of symm_mem")
        if ctx.workspace.num_bytes:
            with ctx.workspace.frame():
                recorder.know(ctx.workspace.take((1,), torch.uint8), "the workspace")
        watch_layer(layer, recorder)
        stack.enter_context(collectives_on_their_own_stream(recorder, ctx.device))
        yield layer


def watch_layer(layer: MoELayer, recorder: StreamRecorder) -> None:
    """Name the phases of the layer's calls, and hold each kernel to its class."""
    setattr(layer._timer, "phase", recorder.labelled)  # noqa: B010
    kernel = layer._runner.kernel
    _watch_launch(
        kernel.experts, "experts", kernel.experts.concurrency(MAX_TOKENS_PER_RANK), recorder
    )
    if layer.shared is not None:
        rule = concurrency_rule(layer.shared.concurrency_rules, max(ROWS))
        # Next to communication that is not certified it must be alone, whatever its own class is.
        communication = backend_class(layer.plan.backend).capabilities.communication
        strictest = stricter(rule.concurrency, communication.concurrency)
        _watch_launch(layer.shared, "shared", strictest, recorder)


def _watch_launch(
    owner: Any, label: str, concurrency: Concurrency, recorder: StreamRecorder
) -> None:
    """Have `owner.run` recorded as needing the device to itself, unless it is certified."""
    if concurrency is Concurrency.CERTIFIED:
        return
    run = owner.run

    def alone(*arguments: Any, **keywords: Any) -> Any:
        with recorder.alone(label):
            return run(*arguments, **keywords)

    owner.run = alone


def call_layer(layer: MoELayer, recorder: StreamRecorder) -> None:
    """Call the layer as a caller does that reads its output and writes its rows anew."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.empty(max(ROWS), layer.moe.hidden_size, dtype=layer.moe.torch_dtype)
    recorder.know(buffer, "hidden_states")
    given = [torch.randn(buffer.shape, generator=generator) for _ in ROWS]
    with recorder, torch.no_grad():
        for num_rows, values in zip(ROWS, given, strict=True):
            with recorder.labelled("caller writes its rows"):
                buffer.copy_(values)
            output: Tensor = layer(buffer[:num_rows])
            with recorder.labelled("caller reads the output"):
                output.clone()
            del output
        recorder.collect_freed()


@contextmanager
def _one_rank(plan: Plan) -> Iterator[EPContext]:
    with init_distributed(plan.parallel, rendezvous=Rendezvous(HashStore(), 0, 1)) as ctx:
        yield ctx


def _is_monolithic(experts: str) -> bool:
    return experts_class(experts).capabilities.kind is ExpertsKind.MONOLITHIC


def _has_triton() -> bool:
    if find_spec("triton") is None:
        return False
    from ep_runtime.kernels.interpreter import is_interpreting

    return is_interpreting()


def plan_fault(error: Exception) -> str:
    """Why a case cannot be planned, in short."""
    return str(error).partition(" cannot be used: ")[2] or str(error)
