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


def rows_fault(kernel: ExpertsCapabilities, parallel: ParallelConfig) -> str | None:
    """Why a kernel cannot serve the named `dispatch_dtype`, with the cure; None where it can."""
    named = named_rows(parallel)
    if named is None or named in _taken(kernel):
        return None
    return (
        f"it takes rows as {_listed(_taken(kernel))}, and dispatch_dtype is {named}; use "
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
    weights' own arithmetic wants such rows and both can: then nothing is lost on the way.
    """
    named = named_rows(parallel)
    if named is not None:
        return named, f"dispatch_dtype is {named}"
    stored = f"the experts' weights (quantization: {moe.quantization.weight})"
    if moe.quantization.rows is not RowScheme.FP8_GROUP:
        return RowScheme.MODEL, f"{stored} do not compute on such rows"
    for side, can in (
        (f"backend {backend.name} sends", backend.row_schemes),
        (f"experts {kernel.name} takes", _taken(kernel)),
    ):
        if RowScheme.FP8_GROUP not in can:
            return RowScheme.MODEL, f"{side} rows as {_listed(can)}"
    return RowScheme.FP8_GROUP, f"{stored} compute on fp8 rows"


def _taken(kernel: ExpertsCapabilities) -> frozenset[RowScheme]:
    """A monolithic kernel takes rows before anything is dispatched."""
    is_monolithic = kernel.kind is ExpertsKind.MONOLITHIC
    return frozenset({RowScheme.MODEL}) if is_monolithic else kernel.rows


def _listed(schemes: frozenset[RowScheme]) -> str:
    return ", ".join(sorted(schemes))
