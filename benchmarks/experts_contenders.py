"""What the experts benchmark compares: one class an implementation, built by name.

Each is given the same weights and rows. What is absent, or does not take a scheme, says so by
raising Unavailable when it is built: it is left out of the record's times, with that reason.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.experts_cells import LayerShape, Table
from benchmarks.experts_data import RoutedRows
from benchmarks.experts_quantise import PACKED_SCHEMES
from ep_runtime.kernels.base import (
    Activation,
    ExpertsShape,
    ExpertWeights,
    InputFormat,
    ModularExperts,
    StandardExpertInput,
)
from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme, RowScheme, WeightScheme
from ep_runtime.kernels.registry import experts_class
from ep_runtime.kernels.workspace import Workspace

OWN_EXPERTS = "triton"
# Bound by an adapter of this project's: what is measured is this project's call of it.
OWN_MARLIN = "marlin"
SCHEMES = {
    "bf16": UNQUANTISED,
    "fp8_block": QuantScheme(WeightScheme.FP8_BLOCK),
    **PACKED_SCHEMES,
}


class Unavailable(Exception):
    """An implementation cannot be measured here; the message says why."""


class Contender(ABC):
    """One implementation with its weights in its own layout. Everything of a call is counted.

    up_shift: what its activation adds to `up` (see `experts_data.reference`).
    is_peer: whether it is another project's.
    """

    up_shift: ClassVar[float] = 0.0
    is_peer: ClassVar[bool] = True

    def __init__(self, shape: LayerShape, table: Table, weights: Sequence[ExpertWeights]) -> None:
        self.shape, self.table = shape, table
        self.num_weight_sets = len(weights)
        self.device = weights[0].w13.device

    @abstractmethod
    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        """A call over these rows that can be captured. All are bound before any is captured."""

    def landed_rows(self, output: Tensor, rows: RoutedRows) -> Tensor:
        """A call's output as [R, H]."""
        return output

    def facts(self) -> dict[str, Any]:
        """What a reader should know of it: versions, whether it is tuned for the shape."""
        return {}


class OwnExperts(Contender):
    """This project's kernel, through its public class; activations arrive as bf16 rows."""

    is_peer = False

    def __init__(self, shape: LayerShape, table: Table, weights: Sequence[ExpertWeights]) -> None:
        super().__init__(shape, table, weights)
        name = self.experts_name()
        experts = experts_class(name)(
            ExpertsShape(
                num_local_experts=shape.num_local_experts,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                top_k=self.slots_per_row(),
                activation=Activation(),
                dtype=torch.bfloat16,
                scheme=_own_scheme(name, table.scheme),
                num_experts=self.num_experts(),
            )
        )
        if not isinstance(experts, ModularExperts):
            raise Unavailable(f"experts {name} is monolithic: it does its own routing")
        self.experts = experts
        self.weights = [experts.prepare_weights(one) for one in weights]
        self.workspace = Workspace(self.device)

    def experts_name(self) -> str:
        """Which kernel of the registry."""
        return OWN_EXPERTS

    def slots_per_row(self) -> int:
        return self.shape.top_k

    def num_experts(self) -> int:
        """Among how many experts the rows' slots spread."""
        is_local = self.table.routing == "local"
        return self.shape.num_local_experts if is_local else self.shape.num_experts

    def expert_input(self, rows: RoutedRows) -> StandardExpertInput:
        return StandardExpertInput(rows.hidden_states, rows.local_ids, rows.topk_weights)

    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        expert_input, weights = self.expert_input(rows), self.weights[weight_set]
        num_rows = expert_input.hidden_states.shape[0]
        self.workspace.reserve(self.experts.workspace_bytes(num_rows))
        return lambda: self.experts.run(expert_input, weights, self.workspace)

    def facts(self) -> dict[str, Any]:
        return {"experts": self.experts_name()}


class OwnMarlin(OwnExperts):
    """This project's kernel over an installed Marlin, through its public class."""

    def experts_name(self) -> str:
        return OWN_MARLIN


class PackedOwnExperts(OwnExperts):
    """The same on the same pairs without an empty slot: each pair a row of its own, K = 1."""

    def slots_per_row(self) -> int:
        return 1

    def num_experts(self) -> int:
        return self.shape.num_local_experts

    def expert_input(self, rows: RoutedRows) -> StandardExpertInput:
        row, slot = _pairs(rows)
        return StandardExpertInput(
            rows.hidden_states[row],
            rows.local_ids[row, slot, None],
            rows.topk_weights[row, slot, None],
        )

    def landed_rows(self, output: Tensor, rows: RoutedRows) -> Tensor:
        total = torch.zeros_like(rows.hidden_states, dtype=torch.float32)
        return total.index_add_(0, _pairs(rows)[0], output.float())


def _pairs(rows: RoutedRows) -> tuple[Tensor, Tensor]:
    """Row and slot of each pair, in the order of the rows."""
    row, slot = (rows.local_ids >= 0).nonzero(as_tuple=True)
    return row, slot


def _own_scheme(experts: str, name: str) -> QuantScheme:
    """The table's scheme, if the kernel declares it and takes its rows in bf16."""
    scheme, capabilities = SCHEMES[name], experts_class(experts).capabilities
    what = f"experts {experts}"
    packages = [capabilities.needs_package, *capabilities.or_packages]
    if packages[0] is not None and not any(find_spec(package) for package in packages if package):
        raise Unavailable(f"{what} needs a package: {' or '.join(filter(None, packages))}")
    if scheme.weight not in capabilities.schemes:
        raise Unavailable(
            f"{what} takes no {scheme.weight} weights: {_names(capabilities.schemes)}"
        )
    if RowScheme.MODEL not in capabilities.rows:
        raise Unavailable(f"{what} takes no rows in bf16: {_names(capabilities.rows)}")
    if InputFormat.STANDARD not in capabilities.formats:
        raise Unavailable(f"{what} takes no standard rows: {_names(capabilities.formats)}")
    return scheme


def _names(values: frozenset[Any]) -> str:
    return ", ".join(sorted(str(value) for value in values))


# Modules of peers import the peer's package when they are asked for a contender.
_CONTENDERS = {
    "ep_runtime": "benchmarks.experts_contenders:OwnExperts",
    "ep_runtime_packed": "benchmarks.experts_contenders:PackedOwnExperts",
    "triton_kernels": "benchmarks.experts_triton_kernels:TritonKernels",
    "vllm_triton": "benchmarks.experts_vllm:VllmTriton",
    "ep_runtime_marlin": "benchmarks.experts_contenders:OwnMarlin",
    "marlin": "benchmarks.experts_vllm_packed:Marlin",
    "moe_wna16": "benchmarks.experts_vllm_packed:MoeWna16",
    "humming": "benchmarks.experts_humming:Humming",
    "deep_gemm": "benchmarks.experts_vllm:DeepGemm",
    "deep_gemm_host_counts": "benchmarks.experts_vllm:DeepGemmHostCounts",
}


def contender_class(name: str) -> type[Contender]:
    """The class behind a name; it imports no peer yet."""
    module, attribute = _CONTENDERS[name].split(":")
    cls: type[Contender] = getattr(import_module(module), attribute)
    return cls


def require(module: str, package: str) -> Any:
    """A peer's module; Unavailable where the package is not installed or does not import."""
    try:
        return import_module(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise Unavailable(f"{package} does not import: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Example: ImportError: No module named 'vllm'."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:240]
