"""How rows travel to the experts: in the layer's dtype, or in fp8.

Reads the configuration and declared capabilities, nothing that one rank alone knows.
"""

from ep_runtime.all2all.base import BackendCapabilities
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernels.base import ExpertsCapabilities, ExpertsKind
from ep_runtime.kernels.quant.scheme import RowScheme


def named_rows(parallel: ParallelConfig) -> RowScheme | None:
    """What `dispatch_dtype` asks for; None for auto."""
    return None if parallel.dispatch_dtype == "auto" else RowScheme(parallel.dispatch_dtype)


def rows_fault(kernel: ExpertsCapabilities, moe: MoEConfig, parallel: ParallelConfig) -> str | None:
    """Why a kernel cannot serve the named `dispatch_dtype`, with the cure; None where it can."""
    named, taken = named_rows(parallel), taken_rows(kernel, moe)
    if named is None or named in taken:
        return None
    stored = ""
    if moe.quantization.weight in kernel.model_rows_only:
        stored = f" with weights stored as {moe.quantization.weight}"
    return (
        f"it takes rows as {_listed(taken)}{stored}, and dispatch_dtype is {named}; use "
        f"dispatch_dtype: auto or other experts"
    )


def choose_rows(
    moe: MoEConfig,
    parallel: ParallelConfig,
    backend: BackendCapabilities,
    kernel: ExpertsCapabilities,
) -> tuple[RowScheme, str]:
    """The rows that a backend sends to a kernel, and why not the other kind.

    The named kind, which both can (`shape_fault`, `rows_fault`). Of itself fp8 exactly where the
    kernel multiplies such rows with these weights and both can: it would quantise them alike, so
    nothing is lost on the way.
    """
    named = named_rows(parallel)
    if named is not None:
        return named, f"dispatch_dtype is {named}"
    weight = moe.quantization.weight
    if weight not in kernel.fp8_products:
        reason = f"experts {kernel.name} does not multiply such rows (quantization: {weight})"
        return RowScheme.MODEL, reason
    for side, can in (
        (f"backend {backend.name} sends", backend.row_schemes),
        (f"experts {kernel.name} takes", taken_rows(kernel, moe)),
    ):
        if RowScheme.FP8_GROUP not in can:
            return RowScheme.MODEL, f"{side} rows as {_listed(can)}"
    reason = f"experts {kernel.name} multiplies fp8 rows (quantization: {weight})"
    return RowScheme.FP8_GROUP, reason


def taken_rows(kernel: ExpertsCapabilities, moe: MoEConfig) -> frozenset[RowScheme]:
    """How a kernel may be given rows; a monolithic one takes them before they are dispatched."""
    if kernel.kind is ExpertsKind.MONOLITHIC:
        return frozenset({RowScheme.MODEL})
    return kernel.rows_of(moe.quantization.weight)


def _listed(schemes: frozenset[RowScheme]) -> str:
    return ", ".join(sorted(schemes))
