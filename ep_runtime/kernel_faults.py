"""Why an experts kernel cannot be used for a layer on a machine, and which could be instead.

Of a kernel's faults those of the layer and the device come before what can be installed: nobody is
to install in vain.
"""

from collections.abc import Sequence

from ep_runtime.all2all.base import BackendCapabilities
from ep_runtime.all2all.registry import backend_class, backend_names
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.dispatch_rows import choose_rows, rows_fault
from ep_runtime.kernels.base import (
    ActivationKind,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertsShape,
)
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.machine import Machine, TritonMode

# The extras that install the optional packages.
_EXTRAS = {"deep_ep": "deepep", "deep_gemm": "deepgemm", "vllm": "marlin"}
ONLY_BY_NAME = "Triton's interpreter is for tests; name it to use it all the same"


def experts_fault(
    kernel: ExpertsCapabilities,
    moe: MoEConfig,
    parallel: ParallelConfig,
    machine: Machine,
    layer: ExpertsShape,
    *,
    by_name: bool,
) -> str | None:
    """Why a kernel cannot be used: what no other configuration or installation cures first, then
    what one does.

    layer: of the first rank. by_name: whether the user named it, and not `auto`.
    """
    fault = (
        type_fault(kernel.device_types, machine)
        or _capability_fault(kernel, machine)
        or _layer_fault(kernel, moe)
        or rows_fault(kernel, moe, parallel)
        or _capacity_fault(kernel, parallel)
        or experts_class(kernel.name).shape_fault(layer)
        or missing_fault(kernel.needs_triton, (kernel.needs_package, *kernel.or_packages), machine)
    )
    interpreted = kernel.needs_triton and machine.triton is TritonMode.INTERPRETER
    if fault is None and interpreted and not by_name:
        return ONLY_BY_NAME
    return fault


def pair_fault(
    backend: BackendCapabilities,
    kernel: ExpertsCapabilities,
    moe: MoEConfig,
    parallel: ParallelConfig,
) -> str | None:
    """Why a kernel cannot be wrapped by a backend."""
    if kernel.kind is ExpertsKind.MONOLITHIC:
        if parallel.ep_size > 1 and not backend.gathers_rows:
            capable = (n for n in backend_names() if backend_class(n).capabilities.gathers_rows)
            return (
                f"experts {kernel.name} is monolithic and needs rows and router logits gathered, "
                f"which backend {backend.name} does not do; use all2all_backend: "
                f"{' or '.join(capable)}"
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


def kind_fault(kernel: ExpertsCapabilities, *, by_name: bool) -> str | None:
    """Why `auto` passes over a kernel of that kind: a layer that it chose for may be given ids."""
    if kernel.kind is ExpertsKind.MONOLITHIC and not by_name:
        return "it is monolithic and takes no given topk_ids; name it to use it all the same"
    return None


def other_kernels(
    refused: str,
    backends: Sequence[BackendCapabilities],
    moe: MoEConfig,
    parallel: ParallelConfig,
    machine: Machine,
    layer: ExpertsShape,
) -> list[str]:
    """The kernels that could be named in the place of one that is refused, in auto's order: those
    that take the layer on that machine, given ids too, with one of the backends."""
    kernels = (experts_class(n).capabilities for n in experts_names() if n != refused)
    return [
        k.name
        for k in kernels
        if kind_fault(k, by_name=False) is None
        and experts_fault(k, moe, parallel, machine, layer, by_name=True) is None
        and any(pair_fault(backend, k, moe, parallel) is None for backend in backends)
    ]


def with_cure(fault: str, others: Sequence[str]) -> str:
    """A fault and its cures, which follow a semicolon: its own where it has one, and the kernels
    that can be named instead."""
    if not others:
        return fault
    before = ", or" if "; " in fault else ";"
    return f"{fault}{before} use experts: {' or '.join(others)}"


def _layer_fault(kernel: ExpertsCapabilities, moe: MoEConfig) -> str | None:
    """What a kernel declares that it has not, and the layer does."""
    if moe.torch_dtype not in kernel.dtypes:
        names = sorted(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes)
        return f"dtype {moe.dtype} is not among its {', '.join(names)}"
    if ActivationKind(moe.activation) not in kernel.activations:
        return (
            f"activation {moe.activation} is not among its {', '.join(sorted(kernel.activations))}"
        )
    if moe.quantization.weight not in kernel.schemes:
        return (
            f"it takes weights stored as {', '.join(sorted(kernel.schemes))}, and quantization is "
            f"{moe.quantization.weight}"
        )
    if moe.expert_bias and not kernel.supports_bias:
        return "it has no bias, and expert_bias is true"
    if moe.apply_router_weight_on_input and kernel.kind is ExpertsKind.MONOLITHIC:
        return "it is monolithic and weighs results, and apply_router_weight_on_input is true"
    if not kernel.concurrency:
        return "it declares no concurrency rule"
    return None


def _capacity_fault(kernel: ExpertsCapabilities, parallel: ParallelConfig) -> str | None:
    """Of a monolithic kernel, which gets all rows of the group at once, and declares no class for
    more of them than it takes."""
    most = kernel.concurrency[-1].max_tokens if kernel.concurrency else None
    received = parallel.ep_size * parallel.max_tokens_per_rank
    if kernel.kind is not ExpertsKind.MONOLITHIC or most is None or received <= most:
        return None
    of_a_rank = most // parallel.ep_size
    cure = f"; set max_tokens_per_rank: {of_a_rank}" if of_a_rank else ""
    return (
        f"it takes at most {most} rows at once, and ep_size ({parallel.ep_size}) times "
        f"max_tokens_per_rank ({parallel.max_tokens_per_rank}) is {received}{cure}"
    )


def type_fault(device_types: frozenset[str], machine: Machine) -> str | None:
    """Why what runs on such devices does not on that machine's."""
    if machine.device_type in device_types:
        return None
    return f"it runs on {', '.join(sorted(device_types))}, and the device is {machine.device_type}"


def _capability_fault(kernel: ExpertsCapabilities, machine: Machine) -> str | None:
    """A machine that does not know its device's capability is not refused for it."""
    wanted, found = kernel.compute_capabilities, machine.compute_capability
    if wanted is None or found is None or found in wanted:
        return None
    names = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(wanted))
    return f"it runs on {names}, and {machine.name} is sm_{found[0]}{found[1]}"


def missing_fault(
    needs_triton: bool, packages: tuple[str | None, ...], machine: Machine
) -> str | None:
    """What is to be installed or set, and how.

    packages: any one of them is needed, the usual one first; None in its place: none is.
    """
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
