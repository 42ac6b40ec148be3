"""One slot of symmetric memory: what lies where in it, and how the kernels reach it.

Every rank of a group has the same layout in its own memory, so a peer's tensor is found at the
peer's base address plus the same offset. Several layouts may take turns in one slot: what no
layout moves are the counters, and the border between what dispatch and what combine receives.

Shapes: P ranks, M rows a rank may send at most, K top-k slots, H hidden size, G = ceil(H / 128)
groups of columns, E experts.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from ep_runtime.kernels.quant.fp8_rows import num_groups
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.workspace import aligned_bytes

PreparedT = TypeVar("PreparedT")

# What one rank adds to each peer's arrival counter in one phase of one call, however many programs
# it uses: all but the first add 1, the first adds the rest. So the receiver needs to know nothing
# of the sender's launch. A power of two far above any number of programs; int64 counters pass
# 2**63 only after 2**43 calls.
ARRIVAL_SHARES = 1 << 20


@dataclass(frozen=True)
class Region:
    """A tensor in a slot: `offset` bytes from the slot's start."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


# A tensor's name, shape and dtype.
_NamedTensor = tuple[str, tuple[int, ...], torch.dtype]
_COUNTERS = ("dispatch_arrivals", "combine_arrivals")


def _region_bytes(tensor: _NamedTensor) -> int:
    _, shape, dtype = tensor
    return aligned_bytes(prod(shape) * dtype.itemsize)


@dataclass(frozen=True)
class SlotSpace:
    """The two buffers of a slot, behind its counters: bytes for all that dispatch receives, and
    behind them bytes for what combine receives. Multiples of 256."""

    receive_bytes: int
    result_bytes: int

    def holds(self, other: "SlotSpace") -> bool:
        """Whether each buffer is at least as large as the other's."""
        return self.widened(other) == self

    def widened(self, other: "SlotSpace") -> "SlotSpace":
        """The smallest that holds both."""
        return SlotSpace(
            max(self.receive_bytes, other.receive_bytes),
            max(self.result_bytes, other.result_bytes),
        )


def slot_bytes(ep_size: int, space: SlotSpace) -> int:
    """Of one slot of a group of ep_size ranks."""
    return 2 * aligned_bytes(8 * ep_size) + space.receive_bytes + space.result_bytes


@dataclass(frozen=True)
class SlotLayout:
    """The regions of one slot, each 256-byte aligned.

    dispatch_arrivals, combine_arrivals: [P] int64, counted up by the peer of that index.
    topk_ids [P * M, K] int32, topk_weights [P * M, K] float32, origins [P * M] int32,
    rows [P * M, H]: what dispatch receives. origins: source rank * M + row there. rows: in dtype,
    or with row_scheme FP8_GROUP in e4m3; then scales [P * M, G] float32 are there too.
    results: [P, M, H] in dtype, what combine receives: from rank p, for own row t, at [p, t].

    space: of the slot that it lies in; None: a slot of its own size. Raises ValueError where the
    space is too small.
    """

    ep_size: int
    max_tokens_per_rank: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype
    row_scheme: RowScheme = RowScheme.MODEL
    space: SlotSpace | None = None

    def __post_init__(self) -> None:
        if self.space is not None and not self.space.holds(self.needs):
            raise ValueError(f"a slot of {self.space} cannot hold {self}, which needs {self.needs}")

    @property
    def has_scales(self) -> bool:
        return self.row_scheme is RowScheme.FP8_GROUP

    @cached_property
    def needs(self) -> SlotSpace:
        """The smallest space that holds it."""
        received, results = self._received_tensors, self._results_tensor
        return SlotSpace(sum(map(_region_bytes, received)), _region_bytes(results))

    @property
    def _received_tensors(self) -> tuple[_NamedTensor, ...]:
        num_rows = self.ep_size * self.max_tokens_per_rank
        row_dtype = torch.float8_e4m3fn if self.has_scales else self.dtype
        scales = ("scales", (num_rows, num_groups(self.hidden_size)), torch.float32)
        return (
            ("topk_ids", (num_rows, self.top_k), torch.int32),
            ("topk_weights", (num_rows, self.top_k), torch.float32),
            ("origins", (num_rows,), torch.int32),
            ("rows", (num_rows, self.hidden_size), row_dtype),
            *((scales,) if self.has_scales else ()),
        )

    @property
    def _results_tensor(self) -> _NamedTensor:
        shape = (self.ep_size, self.max_tokens_per_rank, self.hidden_size)
        return ("results", shape, self.dtype)

    @cached_property
    def regions(self) -> dict[str, Region]:
        """By name, in the order in which they lie."""
        counters = ((name, (self.ep_size,), torch.int64) for name in _COUNTERS)
        regions: dict[str, Region] = {}
        offset = 0
        for name, shape, dtype in (*counters, *self._received_tensors):
            regions[name] = Region(offset, shape, dtype)
            offset += aligned_bytes(regions[name].num_bytes)
        name, shape, dtype = self._results_tensor
        space = self.space or self.needs
        regions[name] = Region(self.num_bytes - space.result_bytes, shape, dtype)
        return regions

    @cached_property
    def num_bytes(self) -> int:
        """Of one slot."""
        return slot_bytes(self.ep_size, self.space or self.needs)

    def view(self, memory: Tensor, name: str) -> Tensor:
        """A region of a slot's memory ([num_bytes] uint8) as a tensor; no copy."""
        region = self.regions[name]
        flat = memory[region.offset : region.offset + region.num_bytes]
        return flat.view(region.dtype).view(region.shape)

    def offset(self, name: str) -> int:
        """Bytes from the slot's start to a region; 0 of scales that are not there."""
        return self.regions[name].offset if name in self.regions else 0


def first_received_row(rows_per_rank: tuple[int, ...], source: int) -> int:
    """Where the rows of rank `source` begin in every rank's receive buffer.

    Example: rows_per_rank (3, 0, 5), source 2: 3.
    """
    return sum(rows_per_rank[:source])


@dataclass(frozen=True)
class ExpertHomes:
    """rank_of, local_id_of: [E] int32 on the device: each expert's rank and its id there."""

    rank_of: Tensor
    local_id_of: Tensor


@dataclass(frozen=True, eq=False)
class Channel:
    """One rank's end of one slot.

    memory: [num_bytes] uint8, this rank's slot. peers: [P] int64 on the device, the address of
    each rank's slot as this process reaches it, own included. homes: of the experts.
    epoch: [1] int64 on the device, dispatches joined so far. failed: [1] int64 on the device, not
    0 once a wait has run out; shared by all slots. record: [1] int64 in memory that the host reads
    without waiting: see `FailedWait`. abort: [1] int64 in memory that the host writes and the
    device reads (pinned, on CUDA); not 0 once no wait should go on. wait_limit_ns: how long a wait
    lasts at most.
    """

    layout: SlotLayout
    rank: int
    memory: Tensor
    peers: Tensor
    homes: ExpertHomes
    epoch: Tensor
    failed: Tensor
    record: Tensor
    abort: Tensor
    wait_limit_ns: int
    _prepared: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def prepared(self, make: Callable[..., PreparedT], *variant: Hashable) -> PreparedT:
        """`make(channel, *variant)`, made once: what a kernel's launches over it have in common."""
        key = (make, variant)
        if key not in self._prepared:
            self._prepared[key] = make(self, *variant)
        made: PreparedT = self._prepared[key]
        return made

    @cached_property
    def rows(self) -> Tensor:
        return self.layout.view(self.memory, "rows")

    @cached_property
    def scales(self) -> Tensor | None:
        """None where rows travel in the layer's dtype."""
        return self.layout.view(self.memory, "scales") if self.layout.has_scales else None

    @cached_property
    def topk_ids(self) -> Tensor:
        return self.layout.view(self.memory, "topk_ids")

    @cached_property
    def topk_weights(self) -> Tensor:
        return self.layout.view(self.memory, "topk_weights")

    @cached_property
    def origins(self) -> Tensor:
        return self.layout.view(self.memory, "origins")

    @cached_property
    def results(self) -> Tensor:
        return self.layout.view(self.memory, "results")

    @cached_property
    def dispatch_arrivals(self) -> Tensor:
        return self.layout.view(self.memory, "dispatch_arrivals")

    @cached_property
    def combine_arrivals(self) -> Tensor:
        return self.layout.view(self.memory, "combine_arrivals")


# Phases in a failure record; 0 means that nothing has failed.
DISPATCH_PHASE = 1
COMBINE_PHASE = 2
PHASE_NAMES = {DISPATCH_PHASE: "dispatch", COMBINE_PHASE: "combine"}
ABORTED = 4  # added to the phase of a wait that ended because the host said so
# A record is one word, so that the host never reads half of one: phase, peer, epoch.
PHASE_SHIFT = 56
PEER_SHIFT = 40


@dataclass(frozen=True)
class FailedWait:
    """Which wait ended too soon: for which peer, in which call of the slot (from 1), in which
    phase. is_aborted: the host ended it; else it had lasted as long as it may."""

    peer: int
    epoch: int
    phase: str
    is_aborted: bool = False

    @classmethod
    def from_record(cls, record: int) -> "FailedWait | None":
        """None where nothing has failed."""
        if record == 0:
            return None
        phase = record >> PHASE_SHIFT
        peer = record >> PEER_SHIFT & (1 << PHASE_SHIFT - PEER_SHIFT) - 1
        epoch = record & (1 << PEER_SHIFT) - 1
        return cls(peer, epoch, PHASE_NAMES[phase & ~ABORTED], bool(phase & ABORTED))
