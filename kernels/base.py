"""What an experts kernel takes, returns and declares.

Shapes: R rows received by this rank, K top-k slots a row, H hidden size, I intermediate size,
E_local experts of this rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import ClassVar, final

import torch
from torch import Tensor

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import (
    UNQUANTISED,
    QuantParameters,
    QuantScheme,
    RowScheme,
    WeightScheme,
)
from ep_runtime.kernels.workspace import Workspace


class Concurrency(StrEnum):
    """Whether a kernel may run beside other work on the same device; later is stricter."""

    CERTIFIED = "certified"  # reviewed: no global state, its own workspace; a test shows it
    EXCLUSIVE = "exclusive"  # needs the whole device: resident grid, grid barrier
    UNSAFE = "unsafe"  # known or suspected to break beside other work, or never reviewed


_STRICTNESS = tuple(Concurrency)


def stricter(a: Concurrency, b: Concurrency) -> Concurrency:
    """The stricter of two classes: UNSAFE over EXCLUSIVE over CERTIFIED."""
    return max(a, b, key=_STRICTNESS.index)


@dataclass(frozen=True)
class ConcurrencyRule:
    """The class of a kernel for calls of at most `max_tokens` rows.

    max_tokens: inclusive bound on received rows; None for any number.
    evidence: for CERTIFIED, the test that shows it (`tests/file.py::test`); else the reason.
    owns: for CERTIFIED, what a call keeps beside its arguments and result: workspaces, locks,
    semaphores, static buffers, and what parts them from another call's; "nothing" is an answer.
    record: JSON of a run of `ep-runtime audit streams --device cuda` that shows it too, or "".
    """

    max_tokens: int | None
    concurrency: Concurrency
    evidence: str
    owns: str = ""
    record: str = ""

    def __post_init__(self) -> None:
        if not self.evidence.strip():
            raise ConfigError(
                f"a concurrency rule ({self.concurrency}) has no evidence; name the test that "
                f"shows it, or the reason"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(
                f"a concurrency rule's max_tokens ({self.max_tokens}) must be above 0, or None for "
                f"any number of rows: {self.evidence}"
            )


NEVER_REVIEWED = (ConcurrencyRule(None, Concurrency.UNSAFE, "never reviewed"),)


def concurrency_rule(rules: Sequence[ConcurrencyRule], num_tokens: int) -> ConcurrencyRule:
    """The rule for a launch that may receive up to `num_tokens` rows.

    Any smaller number may come as well, so of all rules up to the one that covers `num_tokens`
    the strictest holds, the last of equally strict ones; UNSAFE where none covers it.
    """
    met: list[ConcurrencyRule] = []
    for rule in rules:
        met.append(rule)
        if rule.max_tokens is None or num_tokens <= rule.max_tokens:
            return max(reversed(met), key=lambda r: _STRICTNESS.index(r.concurrency))
    return ConcurrencyRule(None, Concurrency.UNSAFE, f"not declared for {num_tokens} rows")


class ActivationKind(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"
    RELU2 = "relu2"


@dataclass(frozen=True)
class Activation:
    """The function between the two projections; `kernels/activation.py` defines each.

    alpha, limit: of swigluoai (gpt-oss: 1.702 and 7.0). `limit` None means no clamping.
    """

    kind: ActivationKind = ActivationKind.SILU
    alpha: float = 1.702
    limit: float | None = None

    @property
    def is_gated(self) -> bool:
        """Gated kinds take [.., 2I] (gate first, then up); relu2 takes [.., I]."""
        return self.kind is not ActivationKind.RELU2


class InputFormat(StrEnum):
    STANDARD = "standard"
    BATCHED = "batched"


@dataclass(frozen=True)
class StandardExpertInput:
    """Rows as they landed, each with its slots on this rank.

    hidden_states: [R, H] contiguous rows; R may be 0. In the layer's dtype, or e4m3 with scales.
    topk_ids: [R, K] int32 local expert ids in [0, E_local); -1 for a slot that is not here.
    topk_weights: [R, K] float32 router weights; meaningless where the id is -1.
    num_rows: [1] int32 on the device, rows from it on are unwritten memory; None: all R are rows.
    scales: None, or of e4m3 rows [R, ceil(H / 128)] float32: what each group of columns is
    multiplied by.
    num_source_rows: how many rows of all ranks were routed, of which these have landed; None where
    the host does not know. What it expects of the routing goes by this, no result does.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    num_rows: Tensor | None = None
    scales: Tensor | None = None
    num_source_rows: int | None = None


@dataclass(frozen=True)
class BatchedExpertInput:
    """Rows sorted by expert, each expert with the same capacity.

    hidden_states: [E_local, capacity, H]; rows past an expert's count are unwritten memory.
    num_rows_per_expert: [E_local] int32 on the device.
    num_source_rows: how many rows of all ranks these are copies of, so that at most top_k times as
    many are here; None where the host does not know.
    scales: None, or of e4m3 rows [E_local, capacity, ceil(H / 128)] float32, any strides.
    """

    hidden_states: Tensor
    num_rows_per_expert: Tensor
    num_source_rows: int | None = None
    scales: Tensor | None = None


ExpertInput = StandardExpertInput | BatchedExpertInput


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of one rank's experts, in the layer's dtype or as its scheme stores them.

    w13: [E_local, 2I, H], gate rows first, then up ([E_local, I, H] where not gated).
    w2: [E_local, H, I].
    w13_bias: [E_local, 2I] (or [E_local, I]) and w2_bias: [E_local, H], both or neither.
    w13_quant, w2_quant: of a quantised scheme, both; the values then are as `QuantizedTensor` says.
    """

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    w13_quant: QuantParameters | None = None
    w2_quant: QuantParameters | None = None

    @property
    def num_experts(self) -> int:
        """E_local; of a hybrid, whose values are of one tier, from its tiers."""
        tiers = None if self.w13_quant is None else self.w13_quant.tiers
        return self.w13.shape[0] if tiers is None else tiers.shape[0]


@dataclass(frozen=True)
class ExpertsShape:
    """What a kernel is built for; fixed for the life of a layer.

    num_experts: of the layer, those of other ranks included, among which rows spread; None: the
    local ones are all.
    """

    num_local_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    activation: Activation
    dtype: torch.dtype
    has_bias: bool = False
    scheme: QuantScheme = UNQUANTISED
    num_experts: int | None = None


class ExpertsKind(StrEnum):
    MODULAR = "modular"  # wrapped by prepare / dispatch / combine
    MONOLITHIC = "monolithic"  # routing and experts in one launch, no window


@dataclass(frozen=True)
class ExpertsCapabilities:
    """What an experts kernel declares; the resolver reads nothing else of it.

    schemes: weight storage it takes. rows: how rows may be stored that it is given;
    model_rows_only: of these schemes only in the layer's dtype (`rows_of`). fp8_products: schemes
    of which it multiplies e4m3 rows, so that it quantises rows that come otherwise.
    is_reference: it is what other kernels are compared with, so nothing beside it is quantised, or
    multiplied by kernels of our own, that does not have to be (ep_runtime/shared_compute.py).
    needs_triton: its launches go through Triton (on a CPU: through the interpreter).
    needs_package: an optional package; or_packages: others, any of which does as well.
    compute_capabilities: of the CUDA devices it runs on, (9, 0) for sm_90; None: of any.
    concurrency: rules in order of rising max_tokens; received rows are what is counted.
    """

    name: str
    kind: ExpertsKind
    formats: frozenset[InputFormat]
    dtypes: frozenset[torch.dtype]
    device_types: frozenset[str]
    activations: frozenset[ActivationKind]
    schemes: frozenset[WeightScheme] = frozenset({WeightScheme.NONE})
    rows: frozenset[RowScheme] = frozenset({RowScheme.MODEL})
    model_rows_only: frozenset[WeightScheme] = frozenset()
    fp8_products: frozenset[WeightScheme] = frozenset()
    supports_bias: bool = False
    is_reference: bool = False
    needs_triton: bool = False
    needs_package: str | None = None
    or_packages: tuple[str, ...] = ()
    compute_capabilities: frozenset[tuple[int, int]] | None = None
    concurrency: tuple[ConcurrencyRule, ...] = NEVER_REVIEWED

    def __post_init__(self) -> None:
        bounds = [rule.max_tokens for rule in self.concurrency]
        finite = [bound for bound in bounds if bound is not None]
        rises = all(a < b for a, b in pairwise(finite))
        if None in bounds[:-1] or not rises:
            raise ConfigError(
                f"experts {self.name}: the concurrency rules' max_tokens {bounds} must rise, with "
                f"None, for any number, only in the last"
            )

    def rows_of(self, weight: WeightScheme) -> frozenset[RowScheme]:
        """How rows may be stored that it is given with weights of a scheme."""
        return frozenset({RowScheme.MODEL}) if weight in self.model_rows_only else self.rows


class Experts(ABC):
    """Base of every experts kernel. Subclasses are `ModularExperts` or `MonolithicExperts`."""

    capabilities: ClassVar[ExpertsCapabilities]

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape = shape

    @final
    @classmethod
    def concurrency(cls, num_tokens: int) -> Concurrency:
        """The class of a launch that may receive up to `num_tokens` rows."""
        return concurrency_rule(cls.capabilities.concurrency, num_tokens).concurrency

    @classmethod
    def shape_fault(cls, shape: ExpertsShape) -> str | None:
        """Why the kernel cannot serve a layer of this shape, naming the key; None where it can.

        Asked by the plan before it is made, of the first rank's shape; capabilities hold already,
        but that Triton and the package it needs may not be installed.
        """
        return None

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Bring loaded weights into the kernel's own layout, once; the same by default.

        The layer keeps no tensor that was given and not returned: one of the same values in other
        strides takes its place, what is stored otherwise is the kernel's alone.
        """
        return weights

    def tuning_text(
        self, device_name: str, compute_capability: tuple[int, int] | None = None
    ) -> str | None:
        """Where its tiles on such a device come from, for a reader; None: it has none.

        compute_capability: (9, 0) for sm_90; None where unknown.
        """
        return None

    def check(self) -> None:  # noqa: B027
        """Raise RankFailure once a wait inside a launch has run out; most kernels wait for nobody.

        Does not wait for the device.
        """

    @abstractmethod
    def workspace_bytes(self, max_rows: int) -> int:
        """Workspace that a call of up to `max_rows` received rows takes."""


class ModularExperts(Experts):
    """An experts kernel that a backend's prepare / dispatch / combine is wrapped around."""

    @abstractmethod
    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """Compute this rank's experts for the rows that landed.

        Standard input: returns a fresh [R, H] in the input's dtype; each row is the float32 sum
        over its local slots of weight * expert(row), 0 where it has none. Rows from num_rows on
        are unspecified. Batched input: returns a fresh [E_local, capacity, H] of raw rows.
        Never writes its inputs; does not wait for the device.
        """


class MonolithicExperts(Experts):
    """An experts kernel that does routing itself, in the same launch."""

    @abstractmethod
    def run(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        context: "MonolithicContext",
        workspace: Workspace,
    ) -> Tensor:
        """Route and compute this rank's experts.

        hidden_states: [R, H]; router_logits: [R, E] float32 over all experts.
        Returns a fresh [R, H], each row the weighted sum over its slots on this rank's experts.
        """


@dataclass(frozen=True)
class Routing:
    """Where each row goes.

    topk_ids: [T, K] int32 global expert ids; -1: not routed.
    topk_weights: [T, K] float32, final (normalised and scaled already).
    """

    topk_ids: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class RoutingSpec:
    """How router logits become ids and weights; `kernels/routing.py` defines it.

    scoring: softmax | sigmoid. group_score: max | top2_sum. n_group 1: no groups.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True)
class MonolithicContext:
    """What a monolithic kernel needs beside its rows.

    correction_bias: [E] float32 or None. expert_map: [E] int32, global id to local id or -1.
    tokens_per_expert: [E_local] int64; the kernel adds the slots it routed to its experts.
    """

    routing: RoutingSpec
    weights: ExpertWeights
    expert_map: Tensor
    tokens_per_expert: Tensor
    correction_bias: Tensor | None = None
