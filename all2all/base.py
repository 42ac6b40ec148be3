"""The all-to-all contract: prepare, dispatch, combine.

Shapes: T own rows in this round, R rows received, K top-k slots, H hidden size, P = EP ranks.
Every rank of the EP group makes the same calls in the same order, also with T = 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ep_runtime.kernels.base import NEVER_REVIEWED, ConcurrencyRule, ExpertInput, InputFormat
from ep_runtime.kernels.quant.scheme import RowScheme

ValueT = TypeVar("ValueT")
ValueT_co = TypeVar("ValueT_co", covariant=True)
PreparedT = TypeVar("PreparedT")
HandleT = TypeVar("HandleT")


class CombineBias(StrEnum):
    """Whether, and when, combine takes the shared expert's output to add."""

    NONE = "none"
    AT_ISSUE = "at_issue"  # combine(..., bias=...): must be ready when combine is issued
    AT_JOIN = "at_join"  # Pending.wait(bias=...): may be computed while combine is in flight


@dataclass(frozen=True)
class ExpertPlacement:
    """Which rank of an EP group holds which expert; `ep_runtime/placement.py` makes them.

    rank_of: [E] EP rank of each global expert. local_id_of: [E] its index on that rank.
    Example: linear, 5 experts on 2 ranks: rank_of (0, 0, 0, 1, 1), local_id_of (0, 1, 2, 0, 1).
    """

    strategy: str
    ep_size: int
    rank_of: tuple[int, ...]
    local_id_of: tuple[int, ...]

    def experts_of(self, ep_rank: int) -> tuple[int, ...]:
        """Global ids of a rank's experts, in the order of their local ids."""
        mine = [e for e, rank in enumerate(self.rank_of) if rank == ep_rank]
        return tuple(sorted(mine, key=lambda e: self.local_id_of[e]))

    def num_local_experts(self, ep_rank: int) -> int:
        """How many experts a rank holds; may be 0."""
        return self.rank_of.count(ep_rank)


@dataclass(frozen=True)
class BackendShape:
    """What a backend is built for. Layers of equal shape share one backend.

    dtype: of own rows, expert outputs and results. rows: how dispatch sends rows.
    """

    num_experts: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype
    max_tokens_per_rank: int
    placement: ExpertPlacement
    rows: RowScheme = RowScheme.MODEL

    @property
    def sent_row_bytes(self) -> int:
        """Of one row on its way to the experts, scales included."""
        return sent_row_bytes(self.hidden_size, self.dtype, self.rows)


def sent_row_bytes(hidden_size: int, dtype: torch.dtype, rows: RowScheme) -> int:
    """Of one row that dispatch sends. Example: 300 columns in fp8: 300 + 3 scales of 4 bytes."""
    if rows is RowScheme.FP8_GROUP:
        return hidden_size + 4 * num_row_scales(hidden_size)
    return hidden_size * dtype.itemsize


def num_row_scales(hidden_size: int) -> int:
    """Of one row in fp8. Example: 300 columns have 3."""
    # Not above: it imports Triton, which may only be imported once it is known how it runs.
    from ep_runtime.kernels.quant.fp8_rows import num_groups

    return num_groups(hidden_size)


def landed_bytes(shape: BackendShape, ep_rank: int) -> int:
    """Rows, ids and weights that land in one round, at most; nothing lands on one rank alone."""
    placement = shape.placement
    if placement.ep_size == 1:
        return 0
    row_bytes = shape.sent_row_bytes + shape.top_k * 8
    return placement.ep_size * shape.max_tokens_per_rank * row_bytes


def landed_batched_bytes(shape: BackendShape, ep_rank: int) -> int:
    """The same in the batched format, where each expert has room for every row."""
    placement = shape.placement
    if placement.ep_size == 1:
        return 0
    capacity = placement.ep_size * shape.max_tokens_per_rank
    expert_bytes = capacity * shape.sent_row_bytes + 4
    return placement.num_local_experts(ep_rank) * expert_bytes


@dataclass(frozen=True)
class BackendCapabilities:
    """What a backend declares; the resolver reads nothing else of it.

    uneven_experts: ranks may hold different numbers of experts.
    gathers_rows: it is a GatheringBackend, so a monolithic kernel can run behind it.
    needs_peer_access: ranks reach each other's memory: one host, every two devices on NVLink.
    auto_max_tokens: `auto` takes it up to this max_tokens_per_rank; None for any.
    receive_bytes: (shape, ep_rank) -> device memory that received rows take, at most; once for
    all layers of that shape.
    max_ep_size, ep_sizes, max_top_k, max_hidden_size: None for any. dtypes: of a layer's rows.
    row_schemes: how dispatch can send them.
    communication: the class of what it has in flight, counted in received rows. The shared expert
    runs beside it only where that is CERTIFIED, on the aux stream and in a window alike.
    """

    name: str
    format: InputFormat
    supports_async: bool
    combine_bias: CombineBias
    uneven_experts: bool
    supports_cuda_graph: bool
    device_types: frozenset[str] = frozenset({"cpu", "cuda"})
    gathers_rows: bool = False
    max_ep_size: int | None = None
    needs_triton: bool = False
    needs_package: str | None = None
    dtypes: frozenset[torch.dtype] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    ep_sizes: frozenset[int] | None = None
    max_top_k: int | None = None
    max_hidden_size: int | None = None
    row_schemes: frozenset[RowScheme] = frozenset({RowScheme.MODEL})
    needs_peer_access: bool = False
    auto_max_tokens: int | None = None
    receive_bytes: Callable[[BackendShape, int], int] = landed_bytes
    communication: ConcurrencyRule = NEVER_REVIEWED[0]


def shape_fault(backend: BackendCapabilities, shape: BackendShape) -> str | None:
    """Why a backend cannot serve layers of a shape, with the cure; None where it can."""
    ep_size = shape.placement.ep_size
    if backend.max_ep_size is not None and ep_size > backend.max_ep_size:
        return f"it serves ep_size up to {backend.max_ep_size}, and ep_size is {ep_size}"
    if backend.ep_sizes is not None and ep_size not in backend.ep_sizes:
        sizes = ", ".join(str(size) for size in sorted(backend.ep_sizes))
        return (
            f"it serves ep_size {sizes}, and ep_size is {ep_size}; use all2all_backend: all_to_all"
        )
    if not backend.uneven_experts and shape.num_experts % ep_size:
        return (
            f"num_experts ({shape.num_experts}) must be divisible by ep_size ({ep_size}) for "
            f"{backend.name}; use all2all_backend: all_to_all or pad the experts"
        )
    if shape.dtype not in backend.dtypes:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in backend.dtypes))
        return (
            f"dtype {str(shape.dtype).removeprefix('torch.')} is not among its {names}; use "
            f"dtype: {names.split(', ')[0]} or all2all_backend: all_to_all"
        )
    if shape.rows not in backend.row_schemes:
        return (
            f"it sends rows as {', '.join(sorted(backend.row_schemes))}, and dispatch_dtype is "
            f"{shape.rows}; use dispatch_dtype: auto or another all2all_backend"
        )
    for key, value, limit in (
        ("top_k", shape.top_k, backend.max_top_k),
        ("hidden_size", shape.hidden_size, backend.max_hidden_size),
    ):
        if limit is not None and value > limit:
            return f"{key} ({value}) is above its {limit}; use all2all_backend: all_to_all"
    return None


def _nobody_failed() -> None:
    return None


def _nobody_ended(waited_s: float) -> None:
    return None


@dataclass(frozen=True)
class EPGroup:
    """One rank's view of its EP group.

    process_group: None where size is 1. check: raises RankFailure once some rank has failed;
    host waits call it while they poll. check_wait: called with the seconds that a host has waited
    for the group's ranks: raises RankFailure too once one of them has ended and will never come.
    abort: [1] int64 in memory that the host writes and the device reads (pinned, on CUDA), not 0
    once `check` would raise, for waits on the device; None where nobody watches. shared: what the
    group's backends have in common, under names of their own.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    size: int
    device: torch.device
    check: Callable[[], None] = field(default=_nobody_failed, compare=False)
    check_wait: Callable[[float], None] = field(default=_nobody_ended, compare=False)
    abort: Tensor | None = field(default=None, compare=False)
    shared: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class RoutedTokens:
    """One round's own rows and where they go.

    hidden_states: [T, H]. topk_ids: [T, K] int32 global ids in [0, E), or -1: not routed.
    topk_weights: [T, K] float32, final. rows_per_rank: T of each EP rank in this round, agreed
    by all ranks before the call; each at most max_tokens_per_rank.
    """

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    rows_per_rank: tuple[int, ...]


class Pending(Protocol[ValueT_co]):
    """Communication that was issued and not yet joined."""

    def join(self) -> None:
        """Order the current stream (on a CPU: the caller) behind the communication; idempotent."""

    def wait(self, bias: Tensor | None = None) -> ValueT_co:
        """Join and give the result, once. `bias`: [T, H], only of a combine whose backend
        declares AT_JOIN; it is added to the sum."""


@dataclass(frozen=True)
class Finished(Generic[ValueT]):
    """The Pending of a synchronous backend."""

    value: ValueT

    def join(self) -> None:
        return None

    def wait(self, bias: Tensor | None = None) -> ValueT:
        if bias is not None:
            raise ValueError("this backend's combine takes no bias at the join")
        return self.value


class All2AllBackend(Protocol[PreparedT, HandleT]):
    """One all-to-all backend; generic in what travels from prepare to dispatch to combine.

    A call's state is in `PreparedT` and `HandleT`, never on self, so calls of several layers
    can share a backend.
    """

    capabilities: ClassVar[BackendCapabilities]

    def __init__(self, group: EPGroup, shape: BackendShape) -> None:
        """Allocate what the backend keeps; a collective of the group."""

    def prepare(self, tokens: RoutedTokens) -> PreparedT:
        """Lay out (and quantise) the rows to send. Never writes them."""

    def dispatch(self, prepared: PreparedT) -> Pending[tuple[ExpertInput, HandleT]]:
        """Send each row to the ranks that hold its experts."""

    def combine(
        self, expert_output: Tensor, handle: HandleT, bias: Tensor | None = None
    ) -> Pending[Tensor]:
        """Bring results home and sum them: a fresh [T, H] in the input's dtype.

        `bias`: [T, H], only where the backend declares AT_ISSUE; it is added once, by the row's
        own rank.
        """

    def check(self) -> None:
        """Raise RankFailure once a wait on the device has run out; never waits."""

    def close(self) -> None:
        """Release what __init__ allocated; raises as `check`, after it has."""


class GatheringBackend(All2AllBackend[PreparedT, HandleT], Protocol[PreparedT, HandleT]):
    """A backend that a monolithic kernel can run behind."""

    def gather_rows(self, rows: Tensor, rows_per_rank: tuple[int, ...]) -> Tensor:
        """[T, n] on each rank to [sum(rows_per_rank), n] on every rank, in rank order."""

    def sum_scatter_rows(self, rows: Tensor, rows_per_rank: tuple[int, ...]) -> Tensor:
        """Sum [sum(rows_per_rank), n] over the ranks; returns this rank's own [T, n]."""
