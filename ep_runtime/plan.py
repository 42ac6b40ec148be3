"""The plan: backend, kernel, placement and shared-expert schedule, decided before anything runs."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ep_runtime.all2all.base import BackendCapabilities, BackendShape, ExpertPlacement
from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.dispatch_rows import choose_rows, named_rows
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.quant.storage import num_stored, stored_shapes
from ep_runtime.kernels.registry import experts_class
from ep_runtime.machine import Machine
from ep_runtime.ownership import (
    Owner,
    Ownership,
    Regime,
    SharedExpertQuestion,
    SharedExpertToken,
    decide_ownership,
)
from ep_runtime.placement import place_experts
from ep_runtime.selection import Rejection, choose_kernels, experts_shape
from ep_runtime.shared_compute import SharedCompute, choose_shared_compute
from ep_runtime.shared_expert import SharedExpert


@dataclass(frozen=True)
class RankBytes:
    """Device memory of one layer on one EP rank, in bytes.

    experts: this rank's weights as they are stored, scales and what else belongs to them included.
    router (float32), shared: on every rank. receive: the most that
    landed rows, ids and weights take in one round; of batched rows, capacity and counts; layers of
    equal shape have it in common, and with symm_mem those of other shapes too.
    workspace: the kernel's scratch, one for all layers.
    """

    experts: int
    router: int
    shared: int
    receive: int
    workspace: int


@dataclass(frozen=True)
class Plan:
    """A frozen decision; equal on all ranks of an EP group. rows: how dispatch sends them.
    shared_compute: how the shared expert is held and multiplied, where there is one."""

    moe: MoEConfig
    parallel: ParallelConfig
    shared_experts: SharedExpertsConfig
    machine: Machine
    backend: str
    experts: str
    rows: RowScheme
    placement: ExpertPlacement
    ownership: Ownership
    shared_compute: SharedCompute
    rejections: tuple[Rejection, ...]
    bytes_per_rank: tuple[RankBytes, ...]

    @property
    def multiplies_fp8_rows(self) -> bool:
        """Whether rows are quantised to fp8 on their way, by the kernel, or by the shared expert's
        products."""
        kernel = experts_class(self.experts).capabilities
        by_kernel = self.moe.quantization.weight in kernel.fp8_products
        by_shared = self.shared_compute is SharedCompute.FP8
        return by_kernel or by_shared or self.rows is RowScheme.FP8_GROUP

    def regime(self, num_tokens: int) -> Regime:
        """The shared expert's schedule for a call in which no rank has more rows than that."""
        return self.ownership.regime(num_tokens)

    def draw_token(self) -> SharedExpertToken:
        """The right to run the shared expert once; each layer call draws one."""
        return SharedExpertToken(self.ownership.owner)

    def experts_shape(self, ep_rank: int) -> ExpertsShape:
        """What the experts kernel of a rank is built for."""
        return experts_shape(self.moe, self.placement.num_local_experts(ep_rank))

    def backend_shape(self) -> BackendShape:
        """What the backend is built for."""
        return _backend_shape(self.moe, self.parallel, self.placement, self.rows)

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as JSON values."""
        return {
            "moe": self.moe.model_dump(),
            "parallel": self.parallel.model_dump(),
            "shared_experts": self.shared_experts.model_dump(),
            "machine": self.machine.to_dict(),
            "backend": self.backend,
            "experts": self.experts,
            "rows": self.rows,
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
            "shared_compute": self.shared_compute,
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
    named = named_rows(parallel) or RowScheme.MODEL
    shape = _backend_shape(moe, parallel, placement, named)
    backend, kernel, rejections = choose_kernels(moe, parallel, machine, experts, shape)
    rows, why_not_other = choose_rows(moe, parallel, backend, kernel)
    shape = replace(shape, rows=rows)
    not_sent = Rejection("dispatch", _other_rows(rows), why_not_other)
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
    shared_compute, why_not_shared = choose_shared_compute(moe, machine, kernel)
    not_computed = [
        Rejection("shared", other, reason)
        for other, reason in why_not_shared.items()
        if moe.has_shared_expert
    ]
    return Plan(
        moe=moe,
        parallel=parallel,
        shared_experts=shared_experts,
        machine=machine,
        backend=backend.name,
        experts=kernel.name,
        rows=rows,
        placement=placement,
        ownership=ownership,
        shared_compute=shared_compute,
        rejections=(*rejections, not_sent, *_rejected_owners(ownership, backend), *not_computed),
        bytes_per_rank=tuple(
            _rank_bytes(
                moe,
                kernel.name,
                shape,
                shared_compute,
                receive_bytes=backend.receive_bytes(shape, rank),
                ep_rank=rank,
            )
            for rank in range(parallel.ep_size)
        ),
    )


def _other_rows(rows: RowScheme) -> RowScheme:
    return next(scheme for scheme in RowScheme if scheme is not rows)


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


def _backend_shape(
    moe: MoEConfig, parallel: ParallelConfig, placement: ExpertPlacement, rows: RowScheme
) -> BackendShape:
    return BackendShape(
        num_experts=moe.num_experts,
        hidden_size=moe.hidden_size,
        top_k=moe.top_k,
        dtype=moe.torch_dtype,
        max_tokens_per_rank=parallel.max_tokens_per_rank,
        placement=placement,
        rows=rows,
    )


def _rank_bytes(
    moe: MoEConfig,
    experts: str,
    shape: BackendShape,
    shared_compute: SharedCompute,
    *,
    receive_bytes: int,
    ep_rank: int,
) -> RankBytes:
    local_experts = shape.placement.experts_of(ep_rank)
    num_local_experts = len(local_experts)
    itemsize = moe.torch_dtype.itemsize
    hidden, width = moe.hidden_size, moe.moe_intermediate_size
    num_parts = 2 if moe.experts_activation().is_gated else 1
    rows13 = width * num_parts
    experts_bytes = _projection_bytes(moe, rows13, hidden, num_parts, local_experts)
    experts_bytes += _projection_bytes(moe, hidden, width, 1, local_experts)
    if moe.expert_bias:
        experts_bytes += num_local_experts * (rows13 + hidden) * itemsize
    rows = shape.placement.ep_size * shape.max_tokens_per_rank
    kernel = experts_class(experts)(experts_shape(moe, num_local_experts))
    return RankBytes(
        experts=experts_bytes,
        router=4 * moe.num_experts * (hidden + moe.router_bias + moe.has_correction_bias),
        shared=_shared_bytes(moe, num_parts, shared_compute),
        receive=receive_bytes,
        workspace=kernel.workspace_bytes(rows),
    )


def _projection_bytes(
    moe: MoEConfig, rows: int, columns: int, num_parts: int, experts: Sequence[int]
) -> int:
    """Of w13 or w2 of some experts, as the layer holds them."""
    if not moe.quantization.is_quantised:
        return len(experts) * rows * columns * moe.torch_dtype.itemsize
    shapes = stored_shapes(
        moe.quantization, rows, columns, num_parts=num_parts, dtype=moe.torch_dtype
    )
    return sum(
        num_stored(name, moe.quantization, experts) * shape.num_bytes
        for name, shape in shapes.items()
    )


def _shared_bytes(moe: MoEConfig, num_parts: int, compute: SharedCompute) -> int:
    """Of the shared expert's w13, w2 and gate, as the layer holds them."""
    width, hidden, dtype = moe.shared_intermediate_size, moe.hidden_size, moe.torch_dtype
    gate_bytes = hidden * dtype.itemsize if moe.shared_expert_gate else 0
    if compute is not SharedCompute.FP8:
        return (num_parts + 1) * hidden * width * dtype.itemsize + gate_bytes
    shapes = (
        stored_shapes(moe.shared_quantization, rows, columns, num_parts=parts, dtype=dtype)
        for rows, columns, parts in ((num_parts * width, hidden, num_parts), (hidden, width, 1))
    )
    return sum(one.num_bytes for stored in shapes for one in stored.values()) + gate_bytes
