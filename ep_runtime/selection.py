"""Which backend and which experts kernel: the first backend that fits with a kernel, of the kernels
that fit with it the one that measured tables show to be the fastest, and why not the others.

Reads declared capabilities, the configuration, the machine and ep_runtime/kernel_times.py's tables;
nothing else. A layer has one kernel, since each keeps weights in a layout of its own; what it is
chosen for is rows up to the layer's max_tokens_per_rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ep_runtime.all2all.base import BackendCapabilities, BackendShape, shape_fault
from ep_runtime.all2all.registry import backend_class, backend_names
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernel_faults import (
    ONLY_BY_NAME,
    experts_fault,
    kind_fault,
    missing_fault,
    other_kernels,
    pair_fault,
    type_fault,
    with_cure,
)
from ep_runtime.kernel_times import pick_kernel
from ep_runtime.kernels.base import ExpertsCapabilities, ExpertsShape
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.machine import Machine, TritonMode


@dataclass(frozen=True)
class Rejection:
    """An alternative that was not picked. kind: backend | experts | dispatch | owner."""

    kind: str
    name: str
    reason: str


def choose_kernels(
    moe: MoEConfig, parallel: ParallelConfig, machine: Machine, experts: str, shape: BackendShape
) -> tuple[BackendCapabilities, ExpertsCapabilities, tuple[Rejection, ...]]:
    """The first backend, in the registry's order, that fits with a kernel, and the kernel picked of
    those that fit with it; of those that the user's names allow."""
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
        b.name: _backend_fault(b, shape, machine)
        or (_auto_fault(b, shape, parallel, machine) if named_backend == "auto" else None)
        for b in backends
    }
    layer = experts_shape(moe, shape.placement.num_local_experts(0))
    kernel_faults = {
        k.name: experts_fault(k, moe, parallel, machine, layer, by_name=named_experts != "auto")
        for k in kernels
    }
    if named_backend != "auto" and (fault := backend_faults[named_backend]):
        raise PlanError(f"all2all_backend {named_backend} cannot be used: {fault}")
    if named_experts != "auto" and (fault := kernel_faults[named_experts]):
        usable = [b for b in backends if backend_faults[b.name] is None]
        others = other_kernels(named_experts, usable, moe, parallel, machine, layer)
        raise PlanError(f"experts {named_experts} cannot be used: {with_cure(fault, others)}")

    usable_backends = [b for b in backends if backend_faults[b.name] is None]
    usable_kernels = [k for k in kernels if kernel_faults[k.name] is None]
    pair_faults = {
        (b.name, k.name): pair_fault(b, k, moe, parallel)
        or kind_fault(k, by_name=named_experts != "auto")
        for b in usable_backends
        for k in usable_kernels
    }
    for backend in usable_backends:
        fitting = [k.name for k in usable_kernels if pair_faults[backend.name, k.name] is None]
        if fitting:
            chosen, slower = _pick(fitting, moe, parallel, machine, shape)
            with_kernel = {n: pair_faults.get((n, chosen)) for n in backend_faults}
            with_backend = {n: pair_faults.get((backend.name, n)) for n in kernel_faults}
            later = f"usable, but {backend.name} comes first in auto's order"
            rejections = (
                *_rejections("backend", backend.name, backend_faults, with_kernel, {}, later),
                *_rejections("experts", chosen, kernel_faults, with_backend, slower, ""),
            )
            return backend, experts_class(chosen).capabilities, rejections
    faults = [f"backend {n}: {f}" for n, f in backend_faults.items() if f]
    faults += [f"experts {n}: {f}" for n, f in kernel_faults.items() if f]
    faults += [fault for fault in pair_faults.values() if fault]
    raise PlanError("no backend and experts kernel fit together: " + "; ".join(faults))


def experts_shape(moe: MoEConfig, num_local_experts: int) -> ExpertsShape:
    """What an experts kernel of a rank with so many experts is built for."""
    return ExpertsShape(
        num_local_experts=num_local_experts,
        hidden_size=moe.hidden_size,
        intermediate_size=moe.moe_intermediate_size,
        top_k=moe.top_k,
        activation=moe.experts_activation(),
        dtype=moe.torch_dtype,
        has_bias=moe.expert_bias,
        scheme=moe.quantization,
        num_experts=moe.num_experts,
    )


def _pick(
    names: Sequence[str],
    moe: MoEConfig,
    parallel: ParallelConfig,
    machine: Machine,
    shape: BackendShape,
) -> tuple[str, dict[str, str]]:
    """Of kernels that fit, in auto's order, the one to take on the first rank's share of the layer;
    and why not each of the others."""
    one = experts_shape(moe, shape.placement.num_local_experts(0))
    return pick_kernel(names, one, machine.name, parallel.max_tokens_per_rank)


def _rejections(
    kind: str,
    chosen: str,
    faults: dict[str, str | None],
    pair_faults: dict[str, str | None],
    slower: Mapping[str, str],
    later: str,
) -> Iterator[Rejection]:
    """Why each candidate but the chosen one was not picked: its own fault, else the one it has
    with the other side's choice, else that another of those that fit was taken."""
    for name, fault in faults.items():
        if name != chosen:
            why = fault or pair_faults[name] or slower.get(name, later)
            yield Rejection(kind, name, why)


def _backend_fault(
    backend: BackendCapabilities, shape: BackendShape, machine: Machine
) -> str | None:
    return (
        type_fault(backend.device_types, machine)
        or shape_fault(backend, shape)
        or missing_fault(backend.needs_triton, (backend.needs_package,), machine)
    )


def _auto_fault(
    backend: BackendCapabilities, shape: BackendShape, parallel: ParallelConfig, machine: Machine
) -> str | None:
    """Why `auto` passes over a backend that would be used if it were named."""
    if backend.needs_triton and machine.triton is TritonMode.INTERPRETER:
        return ONLY_BY_NAME
    if backend.needs_peer_access and not machine.nvlink:
        known = "unknown whether" if machine.nvlink is None else "not so that"
        return f"it is {known} NVLink joins every two devices; name it to use it all the same"
    ep_size, num_devices = shape.placement.ep_size, machine.num_devices
    is_in_one_host = parallel.world_size <= num_devices or num_devices % ep_size == 0
    if backend.needs_peer_access and not is_in_one_host:
        return (
            f"an EP group of {ep_size} of {parallel.world_size} ranks does not lie within one host "
            f"of {num_devices} devices; name it to use it all the same"
        )
    limit, wanted = backend.auto_max_tokens, shape.max_tokens_per_rank
    if limit is not None and wanted > limit:
        return f"it is for decode: max_tokens_per_rank ({wanted}) is above {limit}"
    return None
