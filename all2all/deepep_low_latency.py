"""DeepEP's low-latency mode (package deep_ep, API generation V1): batched rows, for decode.

Wire protocol, with M = max_tokens_per_rank, made up to what the kernels take, P = EP ranks:

1. prepare numbers the experts as DeepEP does, in int64, and pads the hidden size to one that its
   kernels are compiled for. A rank without rows sends one that is not routed: an empty tensor has
   no address. Where equal ids in a row could overflow an expert's M places for this rank, they are
   folded into the first of them, with the sum of their weights.
2. dispatch launches the send: a row goes once to each of its experts, in bf16, or as e4m3 with a
   float32 scale for every 128 columns, which the send makes of it. Joining launches the receive,
   which packs [E_local, P * M, H] rows (and [E_local, P * M, H / 128] scales, column-major) and
   [E_local] counts.
3. combine launches the send of each expert's raw rows; joining launches the receive, which weights
   and sums them in float32 at the row's own rank, into memory of ours.

Both halves run on the stream on which the first was launched, so join on that one. Waits: never
the host; the receiving kernels wait for the peers on the device. Can be captured. The buffer
alternates between two halves, so that a call's result stands until the next call but one; a
result that is asked for later is refused.

With one rank nothing is sent and deep_ep is not imported (`all2all/deepep_one_rank.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    RoutedTokens,
    landed_batched_bytes,
    num_row_scales,
)
from ep_runtime.all2all.deepep_one_rank import OneRankBuffer
from ep_runtime.all2all.deepep_package import (
    PaddedTokens,
    bind_deep_ep,
    expert_numbers,
    open_buffer,
    pad_tokens,
    padded,
    refuse_unfit_shape,
)
from ep_runtime.kernels.base import (
    BatchedExpertInput,
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    InputFormat,
)
from ep_runtime.kernels.errors import CapacityError, PlanError
from ep_runtime.kernels.quant.scheme import RowScheme

# What the kernels of 1.2.1 are compiled for.
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MAX_TOP_K = 11
# Calls whose results the buffer holds.
NUM_RESULTS = 2


@dataclass(frozen=True)
class LowLatencyCall:
    """What combine needs of a dispatch. layout: DeepEP's handle. number: the call's."""

    tokens: PaddedTokens
    layout: Any
    number: int


@dataclass
class PendingReceive:
    """Rows or results that are on their way; `hook` launches the kernel that receives them."""

    backend: "DeepEPLowLatencyBackend"
    number: int
    hook: Callable[[], None]
    _is_joined: bool = field(default=False, init=False)

    def join(self) -> None:
        if not self._is_joined:
            self.backend.require_standing(self.number)
            self.hook()
            self._is_joined = True


@dataclass
class PendingDispatch(PendingReceive):
    """rows: [E_local, P * M, H], scales: None, or [E_local, P * M, ceil(H / 128)] float32, counts:
    [E_local] int32; all unwritten until joined."""

    rows: Tensor
    scales: Tensor | None
    counts: Tensor
    handle: LowLatencyCall

    def wait(self, bias: Tensor | None = None) -> tuple[ExpertInput, LowLatencyCall]:
        if bias is not None:
            raise ValueError("deepep_low_latency's dispatch takes no bias")
        self.join()
        num_source_rows = self.handle.tokens.num_source_rows
        received = BatchedExpertInput(self.rows, self.counts, num_source_rows, self.scales)
        return received, self.handle


@dataclass
class PendingCombine(PendingReceive):
    """output: [max(T, 1), H padded], unwritten until joined. sent: kept until then."""

    sent: Tensor
    output: Tensor
    num_rows: int
    hidden_size: int

    def wait(self, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            raise ValueError("deepep_low_latency's combine takes no bias; add it to the result")
        self.join()
        return self.output[: self.num_rows, : self.hidden_size].contiguous()


class DeepEPLowLatencyBackend:
    """Rows go to each of their experts, and raw results come home to be weighted and summed."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="deepep_low_latency",
        format=InputFormat.BATCHED,
        supports_async=True,
        combine_bias=CombineBias.NONE,
        uneven_experts=False,
        supports_cuda_graph=True,
        device_types=frozenset({"cuda"}),
        needs_package="deep_ep",
        needs_peer_access=True,
        auto_max_tokens=256,
        receive_bytes=landed_batched_bytes,
        dtypes=frozenset({torch.bfloat16}),
        row_schemes=frozenset(RowScheme),
        ep_sizes=frozenset({1, 2, 4, 8}),
        max_top_k=MAX_TOP_K,
        max_hidden_size=HIDDEN_SIZES[-1],
        communication=ConcurrencyRule(
            None,
            Concurrency.UNSAFE,
            "DeepEP means its kernels to run beside others, and no test here shows it: they hold "
            "multiprocessors while they wait for peers",
        ),
    )

    def __init__(self, group: EPGroup, shape: BackendShape) -> None:
        """Raises PlanError where DeepEP or its kernels cannot serve the shape."""
        name = self.capabilities.name
        refuse_unfit_shape(self.capabilities, shape)
        self._group, self._shape = group, shape
        self._hidden_size = min(size for size in HIDDEN_SIZES if size >= shape.hidden_size)
        self._numbers = expert_numbers(shape, group.device)
        # The kernels want P * M to be a multiple of 4.
        self._row_step = 4 // gcd(4, group.size)
        self._max_rows = -(-shape.max_tokens_per_rank // self._row_step) * self._row_step
        self._num_calls = 0
        self._buffer: Any
        if group.size == 1:
            self._buffer = OneRankBuffer()
            return
        deep_ep = bind_deep_ep(name)
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            self._max_rows, self._hidden_size, group.size, shape.num_experts
        )
        self._buffer = open_buffer(
            deep_ep,
            group,
            name,
            num_nvl_bytes=0,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=shape.num_experts // group.size,
        )
        self._refuse_short_queues()

    def _refuse_short_queues(self) -> None:
        """DeepEP never asks whether a queue is full, so each must hold 2 * (M + 1) entries."""
        depth = self._buffer.nvshmem_qp_depth
        needed = 2 * (self._max_rows + 1)
        if needed > depth:
            self.close()
            largest = (depth // 2 - 1) // self._row_step * self._row_step
            raise PlanError(
                f"max_tokens_per_rank ({self._shape.max_tokens_per_rank}) needs queues of {needed} "
                f"entries in deepep_low_latency, and NVSHMEM_QP_DEPTH is {depth}; lower it to "
                f"{largest}, or start with a larger NVSHMEM_QP_DEPTH"
            )

    def prepare(self, tokens: RoutedTokens) -> PaddedTokens:
        """Raises CapacityError where a rank has more rows than the buffer is built for."""
        limit = self._shape.max_tokens_per_rank
        if max(tokens.rows_per_rank) > limit:
            raise CapacityError(
                f"rows_per_rank {list(tokens.rows_per_rank)} has more than max_tokens_per_rank "
                f"({limit}) rows on a rank; call in rounds or raise parallel.max_tokens_per_rank"
            )
        ids, weights = tokens.topk_ids, tokens.topk_weights
        if self._numbers is not None:
            ids = self._numbers.look_up(ids)
        if ids.numel() > self._max_rows:
            ids, weights = fold_equal_ids(ids, weights)
        numbered = replace(tokens, topk_ids=ids, topk_weights=weights)
        return pad_tokens(numbered, self._hidden_size)

    def dispatch(self, prepared: PaddedTokens) -> PendingDispatch:
        self._group.check()
        in_fp8, hidden_size = self._shape.rows is RowScheme.FP8_GROUP, self._shape.hidden_size
        rows, counts, layout, _, hook = self._buffer.low_latency_dispatch(
            prepared.hidden_states,
            prepared.topk_ids,
            self._max_rows,
            self._shape.num_experts,
            use_fp8=in_fp8,
            return_recv_hook=True,
        )
        scales = None
        if in_fp8:
            rows, scales = rows
            scales = scales[..., : num_row_scales(hidden_size)]
        rows = rows[..., :hidden_size]
        handle = LowLatencyCall(prepared, layout, self._next_call())
        return PendingDispatch(self, handle.number, hook, rows, scales, counts, handle)

    def combine(
        self, expert_output: Tensor, handle: LowLatencyCall, bias: Tensor | None = None
    ) -> PendingCombine:
        """expert_output: [E_local, P * M, H]; rows past the counts are not read."""
        if bias is not None:
            raise ValueError("deepep_low_latency's combine takes no bias; add it to the result")
        self._group.check()
        self.require_standing(handle.number)
        sent = padded(expert_output, self._hidden_size)
        tokens = handle.tokens
        # Memory of ours, since the layer's output outlives the calls that reuse the buffer.
        output = torch.empty_like(tokens.hidden_states)
        _, _, hook = self._buffer.low_latency_combine(
            sent,
            tokens.topk_ids,
            tokens.topk_weights,
            handle.layout,
            return_recv_hook=True,
            out=output,
        )
        return PendingCombine(
            self, self._next_call(), hook, sent, output, tokens.num_rows, self._shape.hidden_size
        )

    def check(self) -> None:
        return None

    def close(self) -> None:
        """A collective of the group: DeepEP's buffers go together."""
        self._buffer.destroy()

    def require_standing(self, number: int) -> None:
        """Raise RuntimeError where later calls have reused the memory of call `number`'s result."""
        later = self._num_calls - number
        if later >= NUM_RESULTS:
            raise RuntimeError(
                f"deepep_low_latency holds the results of {NUM_RESULTS} calls, and {later} came "
                f"after the one that is asked for now; combine one dispatch before starting two "
                f"others"
            )

    def _next_call(self) -> int:
        self._num_calls += 1
        return self._num_calls


def fold_equal_ids(topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Give each row's ids once: the first keeps the id and the sum of the weights, others get -1.

    Example: ids [[2, 5, 2]] with weights [[.1, .2, .3]] give [[2, 5, -1]] and [[.4, .2, ?]].
    """
    is_equal = topk_ids[:, :, None] == topk_ids[:, None, :]
    weights = torch.where(is_equal, topk_weights[:, None, :], 0.0).sum(dim=2)
    is_repeated = is_equal.tril(diagonal=-1).any(dim=2)
    return torch.where(is_repeated, -1, topk_ids), weights
