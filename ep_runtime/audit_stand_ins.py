"""What stands in for communication and for kernels of every class in both stream audits.

Their streams come from a `Site`: recorded ones on a CPU, a GPU's own in the audit on a GPU.

Collectives of one rank are copies; here each is issued on a communication stream of its own, behind
the current one, and joined as NCCL's are, so that `naive` and `all_to_all` are audited as they run
with several ranks. `stand_in_at_issue` and `stand_in_at_join` are `all_to_all` with the two ways in
which a combine takes the shared expert's output. `stand_in_symm_mem` is `symm_mem` with every put,
however small, on its communication stream, which it has on CUDA alone. The kernels are `reference`,
modular and monolithic, declared as each class.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ep_runtime.all2all import collectives
from ep_runtime.all2all.all_to_all import AllToAllBackend, ReturnPath
from ep_runtime.all2all.base import (
    All2AllBackend,
    BackendShape,
    CombineBias,
    EPGroup,
    Pending,
)
from ep_runtime.all2all.collectives import Collective
from ep_runtime.all2all.comm_stream import CommStream
from ep_runtime.all2all.expert_ids import IdTable
from ep_runtime.all2all.registry import stand_in_backends
from ep_runtime.kernels.base import (
    Concurrency,
    ConcurrencyRule,
    ExpertsKind,
    InputFormat,
    MonolithicContext,
    MonolithicExperts,
    StandardExpertInput,
)
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.reference_experts import ReferenceExperts, run_standard_reference
from ep_runtime.kernels.registry import stand_in_experts
from ep_runtime.kernels.routing import route_tokens
from ep_runtime.kernels.workspace import Workspace

EXPERTS = tuple(
    f"stand_in_{form}{concurrency}" for form in ("", "monolithic_") for concurrency in Concurrency
)


class Site(Protocol):
    """Where an audit runs."""

    def make_cuda(self, name: str) -> Any:
        """`torch.cuda`, or what stands in for it; streams made through it are called `name`."""

    def labelled(self, label: str) -> AbstractContextManager[None]:
        """Operations inside belong to that."""

    def look_at_collective(self) -> None:
        """A collective is being issued; note a fault where the current stream may carry none."""


@dataclass(frozen=True)
class _Work:
    """What NCCL gives for a collective that was issued."""

    cuda: Any
    done: Any

    def wait(self) -> None:
        """Order the current stream behind the collective."""
        self.cuda.current_stream().wait_event(self.done)


@contextmanager
def collectives_on_their_own_stream(site: Site, device: torch.device) -> Iterator[None]:
    """Issue the collectives of one rank as NCCL issues those of several."""
    cuda = site.make_cuda("collectives")
    stream = cuda.Stream(device)

    def copied(output: Tensor, rows: Tensor, group: EPGroup) -> Collective:
        site.look_at_collective()
        stream.wait_stream(cuda.current_stream())
        with cuda.stream(stream), site.labelled("collective"):
            output.copy_(rows)
        return Collective(group, _Work(cuda, stream.record_event()), waits_on_host=False)

    released = collectives._copied
    collectives._copied = copied
    try:
        yield
    finally:
        collectives._copied = released


@dataclass
class _Biased:
    """A combine that adds the shared expert's output.

    held: a copy of the bias, made on a communication stream as the combine was issued, and the
    work that made it; None where it is given at the join.
    """

    inner: Pending[Tensor]
    held: tuple[Tensor, _Work] | None

    def join(self) -> None:
        self.inner.join()
        if self.held is not None:
            self.held[1].wait()

    def wait(self, bias: Tensor | None = None) -> Tensor:
        self.join()
        if bias is None and self.held is not None:
            bias = self.held[0]
        total = self.inner.wait()
        return total if bias is None else total + bias


def _biased_backend(kind: CombineBias, site: Site) -> type[Any]:
    class BiasedBackend(AllToAllBackend):
        capabilities = replace(
            AllToAllBackend.capabilities, name=f"stand_in_{kind}", combine_bias=kind
        )

        def __init__(self, group: EPGroup, shape: BackendShape) -> None:
            super().__init__(group, shape)
            self._cuda = site.make_cuda("communication")
            self._stream = self._cuda.Stream(group.device)

        def combine(
            self, expert_output: Tensor, handle: ReturnPath, bias: Tensor | None = None
        ) -> Any:
            inner = super().combine(expert_output, handle)
            held = None
            if bias is not None:
                copied = torch.empty_like(bias)
                self._stream.wait_stream(self._cuda.current_stream())
                with self._cuda.stream(self._stream), site.labelled("combine"):
                    copied.copy_(bias)
                held = copied, _Work(self._cuda, self._stream.record_event())
            return _Biased(inner, held)

    return BiasedBackend


def _symm_mem_backend(site: Site) -> type[Any]:
    from ep_runtime.all2all.symm_mem import SymmMemBackend, SymmMemLimits

    class SymmMemOnCommStream(SymmMemBackend):
        capabilities = replace(SymmMemBackend.capabilities, name="stand_in_symm_mem")

        def __init__(self, group: EPGroup, shape: BackendShape) -> None:
            super().__init__(group, shape, limits=SymmMemLimits(comm_stream_bytes=0))
            cuda = site.make_cuda("communication")
            self._comm_stream = CommStream(group.device, len(self.channels), cuda)
            self._on_cuda = True

        def close(self) -> None:
            self._comm_stream = None
            super().close()

    return SymmMemOnCommStream


class _Monolithic(MonolithicExperts):
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
        routing = route_tokens(router_logits, context.routing, context.correction_bias)
        local = IdTable(context.expert_map).look_up(routing.topk_ids)
        here = local >= 0
        index = torch.where(here, local, 0).flatten().long()
        context.tokens_per_expert.scatter_add_(0, index, here.flatten().long())
        rows = StandardExpertInput(hidden_states, local, routing.topk_weights)
        shape = self.shape
        return run_standard_reference(rows, context.weights, shape.activation, shape.scheme)


def _experts_class(name: str, concurrency: Concurrency) -> type[Any]:
    is_monolithic = "monolithic" in name
    declared = replace(
        ReferenceExperts.capabilities,
        name=name,
        kind=ExpertsKind.MONOLITHIC if is_monolithic else ExpertsKind.MODULAR,
        formats=frozenset({InputFormat.STANDARD}) if is_monolithic else frozenset(InputFormat),
        rows=frozenset(RowScheme),
        concurrency=(ConcurrencyRule(None, concurrency, "a stand-in's declaration"),),
    )
    base: type[Any] = _Monolithic if is_monolithic else ReferenceExperts
    return type(name, (base,), {"capabilities": declared})


@contextmanager
def registered_stand_ins(site: Site, *, with_triton: bool) -> Iterator[tuple[str, ...]]:
    """Make the stand-ins choosable by name while this is open; gives the backends' names, the
    kernels' are EXPERTS. No list of names that a user is told has them."""
    made: list[type[All2AllBackend[Any, Any]]] = [
        _biased_backend(kind, site) for kind in (CombineBias.AT_ISSUE, CombineBias.AT_JOIN)
    ]
    if with_triton:
        made.append(_symm_mem_backend(site))
    kernels = [_experts_class(name, Concurrency(name.rpartition("_")[2])) for name in EXPERTS]
    with stand_in_backends(made), stand_in_experts(kernels):
        yield tuple(backend.capabilities.name for backend in made)
