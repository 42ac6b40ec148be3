"""Backends and experts kernels with every declared capability, registered as a user would.

`register` makes them choosable in this process: a rank function calls it first.

Backends: `async_none`, `async_at_issue`, `async_at_join` (all_to_all with each bias kind),
`batched_none`, `batched_at_issue`, `batched_at_join` (batched rows, combine weighs and sums),
`sync` (naive under another name). Kernels: `certified`, `exclusive`, `unsafe`, `batched`,
`raising`, and the monolithic `mono_certified`, `mono_exclusive`, `mono_unsafe`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

import ep_runtime as ep
from ep_runtime.all2all.all_to_all import AllToAllBackend
from ep_runtime.all2all.base import (
    All2AllBackend,
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    Pending,
    RoutedTokens,
)
from ep_runtime.all2all.collectives import Collective, start_all_gather, start_reduce_scatter
from ep_runtime.all2all.expert_ids import IdTable, local_expert_map
from ep_runtime.all2all.naive import NaiveBackend
from ep_runtime.kernels.base import (
    ActivationKind,
    BatchedExpertInput,
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertWeights,
    InputFormat,
    MonolithicContext,
    MonolithicExperts,
    StandardExpertInput,
)
from ep_runtime.kernels.reference_experts import (
    ReferenceExperts,
    run_standard_reference,
)
from ep_runtime.kernels.routing import route_tokens
from ep_runtime.kernels.workspace import Workspace
from tests.ep_runtime.recording import record


@dataclass
class _Recorded:
    """A Pending that notes its join, and takes a bias only as its backend declared."""

    name: str
    inner: Pending[Any]
    kind: CombineBias
    issued_bias: Tensor | None = None
    is_joined: bool = False

    def join(self) -> None:
        self.inner.join()
        if not self.is_joined:
            record(f"join {self.name}")
        self.is_joined = True

    def wait(self, bias: Tensor | None = None) -> Any:
        self.join()
        value = self.inner.wait()
        if bias is not None:
            if self.kind is not CombineBias.AT_JOIN or self.name != "combine":
                raise ValueError(f"{self.name} takes no bias at the join")
            return value + bias
        return value if self.issued_bias is None else value + self.issued_bias


class _Recording:
    """Notes dispatch and combine of the backend it is mixed into."""

    capabilities: ClassVar[BackendCapabilities]

    def dispatch(self, prepared: Any) -> Any:
        pending = super().dispatch(prepared)  # type: ignore[misc]
        record("dispatch")
        return _Recorded("dispatch", pending, CombineBias.NONE)

    def combine(self, expert_output: Tensor, handle: Any, bias: Tensor | None = None) -> Any:
        kind = self.capabilities.combine_bias
        if bias is not None and kind is not CombineBias.AT_ISSUE:
            raise ValueError("combine takes no bias as it is issued")
        pending = super().combine(expert_output, handle)  # type: ignore[misc]
        record("combine")
        # A copy: the bias is what it is now, not what it will be at the join.
        return _Recorded("combine", pending, kind, None if bias is None else bias.clone())


@dataclass(frozen=True)
class _Gathering:
    """Rows, ids and weights of all ranks, under way."""

    backend: "BatchedBackend"
    tokens: RoutedTokens
    most_rows: int
    gathered: tuple[Tensor, Tensor, Tensor]
    collectives: tuple[Collective, ...]

    def join(self) -> None:
        for collective in self.collectives:
            collective.join()

    def wait(self, bias: Tensor | None = None) -> tuple[ExpertInput, "_Layout"]:
        self.join()
        return self.backend.lay_out(self)


@dataclass(frozen=True)
class _Layout:
    """Where each batched row came from: (gathered row, weight) of row i of expert e."""

    row_of: list[Tensor]
    weight_of: list[Tensor]
    num_rows: int
    num_gathered: int


@dataclass(frozen=True)
class _Scattering:
    collective: Collective
    own: Tensor
    num_rows: int
    dtype: torch.dtype

    def join(self) -> None:
        self.collective.join()

    def wait(self, bias: Tensor | None = None) -> Tensor:
        self.join()
        return self.own[: self.num_rows].to(self.dtype)


class BatchedBackend:
    """Every row to every rank, laid out by expert; combine weighs, sums and scatters back."""

    def __init__(self, group: EPGroup, shape: BackendShape) -> None:
        self._group, self._shape = group, shape
        self._local_of = IdTable(local_expert_map(shape.placement, group))

    def prepare(self, tokens: RoutedTokens) -> RoutedTokens:
        return tokens

    def dispatch(self, prepared: RoutedTokens) -> _Gathering:
        most_rows = max(prepared.rows_per_rank)
        parts = []
        for rows, fill in (
            (prepared.hidden_states, 0),
            (prepared.topk_ids, -1),
            (prepared.topk_weights, 0),
        ):
            own = rows.new_full((most_rows, rows.shape[1]), fill)
            own[: rows.shape[0]] = rows
            gathered = rows.new_empty((self._group.size * most_rows, rows.shape[1]))
            parts.append((gathered, start_all_gather(gathered, own, self._group)))
        gathered_rows = (parts[0][0], parts[1][0], parts[2][0])
        return _Gathering(self, prepared, most_rows, gathered_rows, tuple(c for _, c in parts))

    def lay_out(self, gathering: _Gathering) -> tuple[ExpertInput, _Layout]:
        rows, ids, weights = gathering.gathered
        local = self._local_of.look_up(ids)
        num_local = self._shape.placement.num_local_experts(self._group.rank)
        # An expert meets a row once for each of its equal ids.
        batched = rows.new_full((num_local, max(1, ids.numel()), rows.shape[1]), float("nan"))
        row_of, weight_of = [], []
        for expert in range(num_local):
            row, slot = torch.where(local == expert)
            batched[expert, : len(row)] = rows[row]
            row_of.append(row)
            weight_of.append(weights[row, slot])
        counts = torch.tensor([len(row) for row in row_of], dtype=torch.int32)
        own = gathering.tokens.hidden_states.shape[0]
        return BatchedExpertInput(batched, counts), _Layout(row_of, weight_of, own, rows.shape[0])

    def combine(
        self, expert_output: Tensor, handle: _Layout, bias: Tensor | None = None
    ) -> _Scattering:
        sums = torch.zeros((handle.num_gathered, expert_output.shape[2]), dtype=torch.float32)
        for expert, (row, weight) in enumerate(zip(handle.row_of, handle.weight_of, strict=True)):
            sums.index_add_(0, row, expert_output[expert, : len(row)].float() * weight[:, None])
        own = sums.new_empty((handle.num_gathered // self._group.size, sums.shape[1]))
        collective = start_reduce_scatter(own, sums, self._group)
        return _Scattering(collective, own, handle.num_rows, expert_output.dtype)

    def check(self) -> None:
        return None

    def close(self) -> None:
        return None


def _register_backends() -> None:
    for kind in CombineBias:
        standard = replace(AllToAllBackend.capabilities, name=f"async_{kind}", combine_bias=kind)
        batched = BackendCapabilities(
            name=f"batched_{kind}",
            format=InputFormat.BATCHED,
            supports_async=True,
            combine_bias=kind,
            uneven_experts=True,
            supports_cuda_graph=False,
            communication=AllToAllBackend.capabilities.communication,
        )
        bases: list[tuple[type[All2AllBackend[Any, Any]], BackendCapabilities]] = [
            (AllToAllBackend, standard),
            (BatchedBackend, batched),  # type: ignore[list-item]
        ]
        for base, capabilities in bases:
            cls = type(capabilities.name, (_Recording, base), {"capabilities": capabilities})
            ep.register_backend(capabilities.name, cls)
    sync = replace(NaiveBackend.capabilities, name="sync")
    ep.register_backend("sync", type("sync", (_Recording, NaiveBackend), {"capabilities": sync}))


class RecordedExperts(ReferenceExperts):
    """The reference kernel, noting each launch; NaN in every row that no contract asks for."""

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        record("experts")
        output = super().run(expert_input, weights, workspace)
        if isinstance(expert_input, BatchedExpertInput):
            for expert, count in enumerate(expert_input.num_rows_per_expert.tolist()):
                output[expert, count:] = float("nan")
        return output


class RaisingExperts(RecordedExperts):
    """Fails at every launch."""

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        record("experts")
        raise ArithmeticError("the experts kernel failed")


class ShortExperts(RecordedExperts):
    """Returns one row too few."""

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        return super().run(expert_input, weights, workspace)[:-1]


class Monolithic(MonolithicExperts):
    """Routes by the definition, then computes this rank's experts."""

    def workspace_bytes(self, max_rows: int) -> int:
        return 0

    def run(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        context: MonolithicContext,
        workspace: Workspace,
    ) -> Tensor:
        record("experts")
        routing = route_tokens(router_logits, context.routing, context.correction_bias)
        local = IdTable(context.expert_map).look_up(routing.topk_ids)
        for slot in local[local >= 0].tolist():
            context.tokens_per_expert[slot] += 1
        return run_standard_reference(
            StandardExpertInput(hidden_states, local, routing.topk_weights),
            context.weights,
            self.shape.activation,
        )


def _declared(name: str, concurrency: Concurrency, **changes: Any) -> ExpertsCapabilities:
    rules = (ConcurrencyRule(None, concurrency, f"{name} says so"),)
    return replace(ReferenceExperts.capabilities, name=name, concurrency=rules, **changes)


def _register_experts() -> None:
    for concurrency in Concurrency:
        modular = _declared(str(concurrency), concurrency)
        monolithic = ExpertsCapabilities(
            name=f"mono_{concurrency}",
            kind=ExpertsKind.MONOLITHIC,
            formats=frozenset({InputFormat.STANDARD}),
            dtypes=modular.dtypes,
            device_types=modular.device_types,
            activations=frozenset(ActivationKind),
            supports_bias=True,
            concurrency=modular.concurrency,
        )
        for base, capabilities in ((RecordedExperts, modular), (Monolithic, monolithic)):
            cls = type(capabilities.name, (base,), {"capabilities": capabilities})
            ep.register_experts(capabilities.name, cls)
    batched = _declared("batched", Concurrency.CERTIFIED, formats=frozenset({InputFormat.BATCHED}))
    raising = _declared("raising", Concurrency.CERTIFIED)
    ep.register_experts("batched", type("batched", (RecordedExperts,), {"capabilities": batched}))
    ep.register_experts("raising", type("raising", (RaisingExperts,), {"capabilities": raising}))
    short = _declared("short", Concurrency.CERTIFIED)
    ep.register_experts("short", type("short", (ShortExperts,), {"capabilities": short}))


def register() -> None:
    """Make all of them choosable by name."""
    _register_backends()
    _register_experts()
