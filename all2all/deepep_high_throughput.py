"""DeepEP's normal mode within one host (package deep_ep, API generation V1), for prefill.

Wire protocol:

1. prepare numbers the experts as DeepEP does, in int64, and pads the hidden size to whole units of
   512 bytes. A rank without rows sends one that is not routed: an empty tensor has no address.
2. dispatch counts the rows for each rank and sends every row once to each rank that holds one of
   its experts, with its local ids (-1 for slots that live elsewhere) and weights. As many rows as
   the ranks have together bound what is received (`num_worst_tokens`); ids behind it are -1.
3. combine sends the one result row of each received row home, where a row's results are summed in
   float32, in the order of the ranks, without weights: the experts kernel has applied them. The
   bias is added there, before rounding.

Rows and results travel on DeepEP's communication stream, on the multiprocessors that
`deep_ep.Buffer.num_sms` names; joining orders the current stream behind them. Waits: never the
host. DeepEP could also size what is received by the true counts, but then waits for all ranks
while it holds Python's lock: the heartbeat would stop, and a rank that waits be taken for dead.

With one rank nothing is sent and deep_ep is not imported (`all2all/deepep_one_rank.py`).
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    RoutedTokens,
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
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    InputFormat,
    StandardExpertInput,
)

ROW_UNIT_BYTES = 512
MAX_TOP_K = 32  # one lane of a warp a slot


@dataclass(frozen=True)
class ReturnPath:
    """What combine needs of a dispatch. layout: DeepEP's handle."""

    layout: Any
    num_sent: int
    num_rows: int


@dataclass
class PendingTransfer:
    """Rows or results on the communication stream. event: behind them; sent: kept until joined."""

    event: Any
    sent: tuple[Tensor | None, ...]
    _is_joined: bool = field(default=False, init=False)

    def join(self) -> None:
        if not self._is_joined:
            self.event.current_stream_wait()
            self._is_joined = True


@dataclass
class PendingDispatch(PendingTransfer):
    """rows: [R, H padded]. topk_ids: [R, K] int64, local or -1. topk_weights: [R, K] float32.

    R is the number of rows of all ranks; behind the landed ones rows are unwritten and ids -1.
    """

    rows: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    hidden_size: int
    handle: ReturnPath

    def wait(self, bias: Tensor | None = None) -> tuple[ExpertInput, ReturnPath]:
        if bias is not None:
            raise ValueError("deepep_high_throughput's dispatch takes no bias")
        self.join()
        received = StandardExpertInput(
            hidden_states=self.rows[:, : self.hidden_size].contiguous(),
            topk_ids=self.topk_ids.to(torch.int32),
            topk_weights=self.topk_weights,
            num_source_rows=self.rows.shape[0],
        )
        return received, self.handle


@dataclass
class PendingCombine(PendingTransfer):
    """output: [max(T, 1), H padded], with the bias in it."""

    output: Tensor
    num_rows: int
    hidden_size: int

    def wait(self, bias: Tensor | None = None) -> Tensor:
        if bias is not None:
            raise ValueError("deepep_high_throughput's combine takes its bias when it is issued")
        self.join()
        return self.output[: self.num_rows, : self.hidden_size].contiguous()


class DeepEPHighThroughputBackend:
    """A row goes once to each rank that needs it; one summed row comes back from each."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="deepep_high_throughput",
        format=InputFormat.STANDARD,
        supports_async=True,
        combine_bias=CombineBias.AT_ISSUE,
        uneven_experts=False,
        supports_cuda_graph=False,
        device_types=frozenset({"cuda"}),
        needs_package="deep_ep",
        needs_peer_access=True,
        dtypes=frozenset({torch.bfloat16}),
        ep_sizes=frozenset({1, 2, 4, 8}),
        max_top_k=MAX_TOP_K,
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
        unit = ROW_UNIT_BYTES // shape.dtype.itemsize
        self._hidden_size = -(-shape.hidden_size // unit) * unit
        self._numbers = expert_numbers(shape, group.device)
        self._buffer: Any
        if group.size == 1:
            self._buffer = OneRankBuffer()
            return
        deep_ep = bind_deep_ep(name)
        row_bytes = self._hidden_size * shape.dtype.itemsize
        configs = (
            deep_ep.Buffer.get_dispatch_config(group.size),
            deep_ep.Buffer.get_combine_config(group.size),
        )
        num_bytes = max(c.get_nvl_buffer_size_hint(row_bytes, group.size) for c in configs)
        self._buffer = open_buffer(deep_ep, group, name, num_nvl_bytes=num_bytes, num_rdma_bytes=0)

    def prepare(self, tokens: RoutedTokens) -> PaddedTokens:
        if self._numbers is not None:
            tokens = replace(tokens, topk_ids=self._numbers.look_up(tokens.topk_ids))
        return pad_tokens(tokens, self._hidden_size)

    def dispatch(self, prepared: PaddedTokens) -> PendingDispatch:
        self._group.check()
        per_rank, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            prepared.topk_ids, self._shape.num_experts
        )
        rows, topk_ids, topk_weights, _, layout, event = self._buffer.dispatch(
            prepared.hidden_states,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=prepared.topk_ids,
            topk_weights=prepared.topk_weights,
            num_worst_tokens=max(1, prepared.num_source_rows),
            async_finish=True,
        )
        handle = ReturnPath(layout, prepared.hidden_states.shape[0], prepared.num_rows)
        sent = (prepared.hidden_states, prepared.topk_ids, prepared.topk_weights)
        return PendingDispatch(
            event, sent, rows, topk_ids, topk_weights, self._shape.hidden_size, handle
        )

    def combine(
        self, expert_output: Tensor, handle: ReturnPath, bias: Tensor | None = None
    ) -> PendingCombine:
        """expert_output: [R, H], weighted and summed. bias: [T, H], in the rows' dtype."""
        self._group.check()
        sent = padded(expert_output, self._hidden_size)
        if bias is not None:
            bias = padded(bias, self._hidden_size, min_rows=handle.num_sent)
        output, _, event = self._buffer.combine(sent, handle.layout, bias=bias, async_finish=True)
        return PendingCombine(event, (sent, bias), output, handle.num_rows, self._shape.hidden_size)

    def check(self) -> None:
        return None

    def close(self) -> None:
        """A collective of the group: DeepEP's buffers go together."""
        self._buffer.destroy()
