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
from ep_runtime.dispatch_rows import choose_rows, rows_fault
from ep_runtime.kernel_times import pick_kernel
from ep_runtime.kernels.base import (
    ActivationKind,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertsShape,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.machine import Machine, TritonMode

# The extras that install the optional packages.
_EXTRAS = {"deep_ep": "deepep", "deep_gemm": "deepgemm", "vllm": "marlin"}
_ONLY_BY_NAME = "Triton's interpreter is for tests; name it to use it all the same"


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
    kernel_faults = {
        k.name: _experts_fault(k, moe, machine, by_name=named_experts != "auto")
        or rows_fault(k, moe, parallel)
        or _capacity_fault(k, parallel)
        or experts_class(k.name).shape_fault(
            experts_shape(moe, shape.placement.num_local_experts(0))
        )
        for k in kernels
    }
    if named_backend != "auto" and (fault := backend_faults[named_backend]):
        raise PlanError(f"all2all_backend {named_backend} cannot be used: {fault}")
    if named_experts != "auto" and (fault := kernel_faults[named_experts]):
        raise PlanError(f"experts {named_experts} cannot be used: {fault}")

    usable_backends = [b for b in backends if backend_faults[b.name] is None]
    usable_kernels = [k for k in kernels if kernel_faults[k.name] is None]
    pair_faults = {
        (b.name, k.name): _pair_fault(b, k, moe, parallel)
        or _kind_fault(k, by_name=named_experts != "auto")
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
    return shape_fault(backend, shape) or _device_fault(
        backend.device_types, backend.needs_triton, (backend.needs_package,), machine
    )


def _auto_fault(
    backend: BackendCapabilities, shape: BackendShape, parallel: ParallelConfig, machine: Machine
) -> str | None:
    """Why `auto` passes over a backend that would be used if it were named."""
    if backend.needs_triton and machine.triton is TritonMode.INTERPRETER:
        return _ONLY_BY_NAME
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
    if moe.quantization.weight not in kernel.schemes:
        weight = moe.quantization.weight
        others = [n for n in experts_names() if _takes_weights(n, weight, machine)]
        cure = f"; use experts: {' or '.join(others)}" if by_name and others else ""
        return (
            f"it takes weights stored as {', '.join(sorted(kernel.schemes))}, and quantization is "
            f"{weight}{cure}"
        )
    if moe.expert_bias and not kernel.supports_bias:
        return "it has no bias, and expert_bias is true"
    if moe.apply_router_weight_on_input and kernel.kind is ExpertsKind.MONOLITHIC:
        return "it is monolithic and weighs results, and apply_router_weight_on_input is true"
    if not kernel.concurrency:
        return "it declares no concurrency rule"
    packages = (kernel.needs_package, *kernel.or_packages)
    fault = _device_fault(kernel.device_types, kernel.needs_triton, packages, machine)
    fault = fault or _capability_fault(kernel, machine)
    interpreted = kernel.needs_triton and machine.triton is TritonMode.INTERPRETER
    if fault is None and interpreted and not by_name:
        return _ONLY_BY_NAME
    return fault


def _takes_weights(name: str, weight: WeightScheme, machine: Machine) -> bool:
    """Whether a kernel may be told of as another for weights stored so, on that machine."""
    kernel = experts_class(name).capabilities
    packages = (kernel.needs_package, *kernel.or_packages)
    return (
        weight in kernel.schemes
        and kernel.kind is not ExpertsKind.MONOLITHIC
        and _device_fault(kernel.device_types, kernel.needs_triton, packages, machine) is None
        and _capability_fault(kernel, machine) is None
    )


def _kind_fault(kernel: ExpertsCapabilities, *, by_name: bool) -> str | None:
    """Why `auto` passes over a kernel of that kind: a layer that it chose for may be given ids."""
    if kernel.kind is ExpertsKind.MONOLITHIC and not by_name:
        return "it is monolithic and takes no given topk_ids; name it to use it all the same"
    return None


def _capacity_fault(kernel: ExpertsCapabilities, parallel: ParallelConfig) -> str | None:
    """Of a monolithic kernel, which gets all rows of the group at once, and declares no class for
    more of them than it takes."""
    most = kernel.concurrency[-1].max_tokens if kernel.concurrency else None
    received = parallel.ep_size * parallel.max_tokens_per_rank
    if kernel.kind is not ExpertsKind.MONOLITHIC or most is None or received <= most:
        return None
    of_a_rank = most // parallel.ep_size
    cure = f"set max_tokens_per_rank: {of_a_rank}, or choose" if of_a_rank else "choose"
    return (
        f"it takes at most {most} rows at once, and ep_size ({parallel.ep_size}) times "
        f"max_tokens_per_rank ({parallel.max_tokens_per_rank}) is {received}; {cure} experts: "
        f"triton"
    )


def _device_fault(
    device_types: frozenset[str],
    needs_triton: bool,
    packages: tuple[str | None, ...],
    machine: Machine,
) -> str | None:
    """packages: any one of them is needed, the usual one first; None in its place: none is."""
    if machine.device_type not in device_types:
        return (
            f"it runs on {', '.join(sorted(device_types))}, and the device is {machine.device_type}"
        )
    if needs_triton and machine.triton is TritonMode.UNUSABLE:
        if machine.device_type == "cpu":
            return (
                "it needs Triton, which runs on a CPU only where TRITON_INTERPRET=1 was set "
                "before the process started (ep-runtime run sets it where it is named)"
            )
        return "it needs Triton, which is not installed; pip install triton"
    if packages[0] is not None and not set(packages) & set(machine.packages):
        extra = _EXTRAS.get(packages[0])
        cure = f"; install ep-runtime[{extra}]" if extra else ""
        names = " or ".join(filter(None, packages))
        return f"it needs the package {names}, which is not installed{cure}"
    return None


def _capability_fault(kernel: ExpertsCapabilities, machine: Machine) -> str | None:
    """A machine that does not know its device's capability is not refused for it."""
    wanted, found = kernel.compute_capabilities, machine.compute_capability
    if wanted is None or found is None or found in wanted:
        return None
    names = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(wanted))
    return f"it runs on {names}, and {machine.name} is sm_{found[0]}{found[1]}"


def _pair_fault(
    backend: BackendCapabilities,
    kernel: ExpertsCapabilities,
    moe: MoEConfig,
    parallel: ParallelConfig,
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
    rows, _ = choose_rows(moe, parallel, backend, kernel)
    taken = kernel.rows_of(moe.quantization.weight)
    if rows not in taken:
        return (
            f"backend {backend.name} sends rows as {rows} here, and experts {kernel.name} takes "
            f"{', '.join(sorted(taken))}; change all2all_backend or experts"
        )
    return None
