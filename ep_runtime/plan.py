"""The plan: backend, kernel, placement and shared-expert schedule, decided before anything runs."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    ExpertPlacement,
    shape_fault,
)
from ep_runtime.all2all.registry import backend_class, backend_names
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.kernels.base import (
    ActivationKind,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertsShape,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.machine import Machine, TritonMode
from ep_runtime.ownership import (
    Owner,
    Ownership,
    Regime,
    SharedExpertQuestion,
    SharedExpertToken,
    decide_ownership,
)
from ep_runtime.placement import place_experts
from ep_runtime.shared_expert import SharedExpert

_ONLY_BY_NAME = "Triton's interpreter is for tests; name it to use it all the same"


@dataclass(frozen=True)
class Rejection:
    """An alternative that was not picked. kind: backend | experts | owner."""

    kind: str
    name: str
    reason: str


@dataclass(frozen=True)
class RankBytes:
    """Device memory of one layer on one EP rank, in bytes.

    experts: this rank's weights. router (float32), shared: on every rank. receive: the most that
    landed rows, ids and weights take in one round; of batched rows, capacity and counts.
    workspace: the kernel's scratch, one for all layers.
    """

    experts: int
    router: int
    shared: int
    receive: int
    workspace: int


@dataclass(frozen=True)
class Plan:
    """A frozen decision; equal on all ranks of an EP group."""

    moe: MoEConfig
    parallel: ParallelConfig
    shared_experts: SharedExpertsConfig
    machine: Machine
    backend: str
    experts: str
    placement: ExpertPlacement
    ownership: Ownership
    rejections: tuple[Rejection, ...]
    bytes_per_rank: tuple[RankBytes, ...]

    def regime(self, num_tokens: int) -> Regime:
        """The shared expert's schedule for a call in which no rank has more rows than that."""
        return self.ownership.regime(num_tokens)

    def draw_token(self) -> SharedExpertToken:
        """The right to run the shared expert once; each layer call draws one."""
        return SharedExpertToken(self.ownership.owner)

    def experts_shape(self, ep_rank: int) -> ExpertsShape:
        """What the experts kernel of a rank is built for."""
        return _experts_shape(self.moe, self.placement.num_local_experts(ep_rank))

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as JSON values."""
        return {
            "moe": self.moe.model_dump(),
            "parallel": self.parallel.model_dump(),
            "shared_experts": self.shared_experts.model_dump(),
            "machine": self.machine.to_dict(),
            "backend": self.backend,
            "experts": self.experts,
            "placement": {
                "strategy": self.placement.strategy,
                "experts_of_rank": [
                    list(self.placement.experts_of(rank)) for rank in range(self.placement.ep_size)
                ],
            },
            "owner": {
                "name": self.ownership.owner,
                "rule": self.ownership.rule,
                "reason": self.ownership.reason,
            },
            "regimes": [vars(regime) for regime in self.ownership.regimes],
            "rejections": [vars(rejection) for rejection in self.rejections],
            "bytes_per_rank": [vars(rank) for rank in self.bytes_per_rank],
        }

    def digest(self) -> str:
        """A hash over everything ranks must agree on; 64 hexadecimal digits."""
        agreed = self.to_dict()
        # Two devices of one model may report slightly different totals.
        del agreed["machine"]["device_memory_bytes"]
        return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()

    def explain(self) -> str:
        """The plan for a reader: what was chosen, what was not, and why."""
        from ep_runtime.plan_text import explain_plan

        return "\n".join(explain_plan(self))


def resolve_plan(
    moe: MoEConfig,
    parallel: ParallelConfig,
    machine: Machine,
    *,
    experts: str = "auto",
    shared_experts: SharedExpertsConfig | None = None,
) -> Plan:
    """Choose a backend, a kernel and the shared expert's owner. Pure: no GPU, no process group.

    Raises PlanError where a named choice cannot be honoured or nothing fits, ConfigError for an
    unknown name.
    """
    shared_experts = shared_experts or SharedExpertsConfig()
    placement = place_experts(parallel.expert_placement_strategy, moe.num_experts, parallel.ep_size)
    shape = BackendShape(
        num_experts=moe.num_experts,
        hidden_size=moe.hidden_size,
        top_k=moe.top_k,
        dtype=moe.torch_dtype,
        max_tokens_per_rank=parallel.max_tokens_per_rank,
        placement=placement,
    )
    backend, kernel, rejections = _choose(moe, parallel, machine, experts, shape)
    ownership = decide_ownership(
        SharedExpertQuestion(
            has_shared_expert=moe.has_shared_expert,
            backend=backend,
            experts=kernel,
            shared_concurrency=SharedExpert.concurrency_rules,
            device_type=machine.device_type,
            ep_size=parallel.ep_size,
            max_tokens_per_rank=parallel.max_tokens_per_rank,
            overlap=shared_experts.overlap,
            token_threshold=shared_experts.token_threshold,
        )
    )
    return Plan(
        moe=moe,
        parallel=parallel,
        shared_experts=shared_experts,
        machine=machine,
        backend=backend.name,
        experts=kernel.name,
        placement=placement,
        ownership=ownership,
        rejections=(*rejections, *_rejected_owners(ownership, backend)),
        bytes_per_rank=tuple(
            _rank_bytes(moe, kernel.name, shape, backend.receive_bytes(shape, rank), rank)
            for rank in range(parallel.ep_size)
        ),
    )


def _choose(
    moe: MoEConfig, parallel: ParallelConfig, machine: Machine, experts: str, shape: BackendShape
) -> tuple[BackendCapabilities, ExpertsCapabilities, tuple[Rejection, ...]]:
    """The first usable pair, in the registries' order, of those that the user's names allow."""
    named_backend, named_experts = parallel.all2all_backend, experts
    backends = [
        backend_class(name).capabilities
        for name in (backend_names() if named_backend == "auto" else (named_backend,))
    ]
    kernels = [
        experts_class(name).capabilities
        for name in (experts_names() if named_experts == "auto" else (named_experts,))
    ]
    backend_faults = {
        b.name: _backend_fault(b, shape, machine, by_name=named_backend != "auto") for b in backends
    }
    kernel_faults = {
        k.name: _experts_fault(k, moe, machine, by_name=named_experts != "auto") for k in kernels
    }
    if named_backend != "auto" and (fault := backend_faults[named_backend]):
        raise PlanError(f"all2all_backend {named_backend} cannot be used: {fault}")
    if named_experts != "auto" and (fault := kernel_faults[named_experts]):
        raise PlanError(f"experts {named_experts} cannot be used: {fault}")

    usable_backends = [b for b in backends if backend_faults[b.name] is None]
    usable_kernels = [k for k in kernels if kernel_faults[k.name] is None]
    pair_faults = {
        (b.name, k.name): _pair_fault(b, k, parallel)
        for b in usable_backends
        for k in usable_kernels
    }
    for backend in usable_backends:
        for kernel in usable_kernels:
            if pair_faults[backend.name, kernel.name] is None:
                with_kernel = {n: pair_faults.get((n, kernel.name)) for n in backend_faults}
                with_backend = {n: pair_faults.get((backend.name, n)) for n in kernel_faults}
                rejections = (
                    *_rejections("backend", backend.name, backend_faults, with_kernel),
                    *_rejections("experts", kernel.name, kernel_faults, with_backend),
                )
                return backend, kernel, rejections
    faults = [f"backend {n}: {f}" for n, f in backend_faults.items() if f]
    faults += [f"experts {n}: {f}" for n, f in kernel_faults.items() if f]
    faults += [fault for fault in pair_faults.values() if fault]
    raise PlanError("no backend and experts kernel fit together: " + "; ".join(faults))


def _rejections(
    kind: str,
    chosen: str,
    faults: dict[str, str | None],
    pair_faults: dict[str, str | None],
) -> Iterator[Rejection]:
    """Why each candidate but the chosen one was not picked: its own fault, else the one it has
    with the other side's choice."""
    for name, fault in faults.items():
        if name != chosen:
            why = fault or pair_faults[name] or f"usable, but {chosen} comes first in auto's order"
            yield Rejection(kind, name, why)


def _backend_fault(
    backend: BackendCapabilities, shape: BackendShape, machine: Machine, *, by_name: bool
) -> str | None:
    fault = shape_fault(backend, shape) or _device_fault(
        backend.device_types, backend.needs_triton, backend.needs_package, machine
    )
    return fault if fault or by_name else _auto_fault(backend, shape, machine)


def _auto_fault(backend: BackendCapabilities, shape: BackendShape, machine: Machine) -> str | None:
    """Why `auto` passes over a backend that would be used if it were named."""
    if backend.needs_triton and machine.triton is TritonMode.INTERPRETER:
        return _ONLY_BY_NAME
    if backend.needs_peer_access and not machine.nvlink:
        known = "unknown whether" if machine.nvlink is None else "not so that"
        return f"it is {known} NVLink joins every two devices; name it to use it all the same"
    ep_size = shape.placement.ep_size
    if backend.needs_peer_access and machine.num_devices % ep_size:
        return (
            f"an EP group of {ep_size} ranks does not lie within one host of "
            f"{machine.num_devices} devices; name it to use it all the same"
        )
    limit, wanted = backend.auto_max_tokens, shape.max_tokens_per_rank
    if limit is not None and wanted > limit:
        return f"it is for decode: max_tokens_per_rank ({wanted}) is above {limit}"
    return None


def _experts_fault(
    kernel: ExpertsCapabilities, moe: MoEConfig, machine: Machine, *, by_name: bool
) -> str | None:
    if moe.torch_dtype not in kernel.dtypes:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        return f"dtype {moe.dtype} is not among its {', '.join(names)}"
    if ActivationKind(moe.activation) not in kernel.activations:
        return (
            f"activation {moe.activation} is not among its {', '.join(sorted(kernel.activations))}"
        )
    if "none" not in kernel.schemes:
        return f"it takes weights stored as {', '.join(sorted(kernel.schemes))}, not unquantised"
    if moe.expert_bias and not kernel.supports_bias:
        return "it has no bias, and expert_bias is true"
    if moe.apply_router_weight_on_input and kernel.kind is ExpertsKind.MONOLITHIC:
        return "it is monolithic and weighs results, and apply_router_weight_on_input is true"
    if not kernel.concurrency:
        return "it declares no concurrency rule"
    fault = _device_fault(kernel.device_types, kernel.needs_triton, kernel.needs_package, machine)
    interpreted = kernel.needs_triton and machine.triton is TritonMode.INTERPRETER
    if fault is None and interpreted and not by_name:
        return _ONLY_BY_NAME
    return fault


def _device_fault(
    device_types: frozenset[str], needs_triton: bool, needs_package: str | None, machine: Machine
) -> str | None:
    if machine.device_type not in device_types:
        return (
            f"it runs on {', '.join(sorted(device_types))}, and the device is {machine.device_type}"
        )
    if needs_triton and machine.triton is TritonMode.UNUSABLE:
        if machine.device_type == "cpu":
            return (
                "it needs Triton, which runs on a CPU only where TRITON_INTERPRET=1 was set "
                "before the process started"
            )
        return "it needs Triton, which is not installed; pip install triton"
    if needs_package and needs_package not in machine.packages:
        return f"it needs the package {needs_package}, which is not installed"
    return None


def _pair_fault(
    backend: BackendCapabilities, kernel: ExpertsCapabilities, parallel: ParallelConfig
) -> str | None:
    if kernel.kind is ExpertsKind.MONOLITHIC:
        if parallel.ep_size > 1 and not backend.gathers_rows:
            return (
                f"experts {kernel.name} is monolithic and needs rows and router logits gathered, "
                f"which backend {backend.name} does not do; use all2all_backend: naive"
            )
        return None
    if backend.format not in kernel.formats:
        return (
            f"backend {backend.name} delivers {backend.format} rows, and experts {kernel.name} "
            f"takes {', '.join(sorted(kernel.formats))}; change all2all_backend or experts"
        )
    return None


def _rejected_owners(ownership: Ownership, backend: BackendCapabilities) -> Iterator[Rejection]:
    if ownership.owner is Owner.NONE:
        why_not_run = "the layer has no shared expert"
        yield Rejection("owner", Owner.RUNNER, why_not_run)
        yield Rejection("owner", Owner.MODULAR_KERNEL, why_not_run)
        return
    yield Rejection("owner", Owner.NONE, "the layer has a shared expert")
    if ownership.owner is Owner.RUNNER:
        yield Rejection("owner", Owner.MODULAR_KERNEL, ownership.reason)
    else:
        yield Rejection(
            "owner",
            Owner.RUNNER,
            f"backend {backend.name} leaves its communication in flight around the shared expert, "
            f"on the compute stream",
        )


def _experts_shape(moe: MoEConfig, num_local_experts: int) -> ExpertsShape:
    return ExpertsShape(
        num_local_experts=num_local_experts,
        hidden_size=moe.hidden_size,
        intermediate_size=moe.moe_intermediate_size,
        top_k=moe.top_k,
        activation=moe.experts_activation(),
        dtype=moe.torch_dtype,
        has_bias=moe.expert_bias,
    )


def _rank_bytes(
    moe: MoEConfig, experts: str, shape: BackendShape, receive_bytes: int, ep_rank: int
) -> RankBytes:
    num_local_experts = shape.placement.num_local_experts(ep_rank)
    itemsize = moe.torch_dtype.itemsize
    hidden, width = moe.hidden_size, moe.moe_intermediate_size
    rows13 = width * (2 if moe.experts_activation().is_gated else 1)
    per_expert = rows13 * hidden + hidden * width
    if moe.expert_bias:
        per_expert += rows13 + hidden
    shared = (rows13 // width + 1) * hidden * moe.shared_intermediate_size
    if moe.shared_expert_gate:
        shared += hidden
    rows = shape.placement.ep_size * shape.max_tokens_per_rank
    kernel = experts_class(experts)(_experts_shape(moe, num_local_experts))
    return RankBytes(
        experts=num_local_experts * per_expert * itemsize,
        router=4 * moe.num_experts * (hidden + moe.router_bias + moe.has_correction_bias),
        shared=shared * itemsize,
        receive=receive_bytes,
        workspace=kernel.workspace_bytes(rows),
    )
