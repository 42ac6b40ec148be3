"""Uneven `all_to_all_single`: a row travels once to each rank that holds one of its experts.

Wire protocol, N = (row, rank) pairs that this rank sends, R = pairs that it receives:

1. prepare finds the pairs, in order of destination and then of row, and packs local ids (-1 for
   slots that live elsewhere) and weights of each into one int32 message [N, 2K]. The host reads
   how many pairs go to each rank.
2. dispatch issues the exchange of these counts [P] and returns. Joining it waits on the host for
   the counts, which size the receive buffers, then issues messages and rows together and joins
   both.
3. combine issues the way back with the splits swapped: one result row for each pair, summed over a
   row's slots by the experts kernel. Waiting joins it and sums each row's results in float32, in
   the order of the ranks.

Waits: the host in prepare (it reads the counts from the device) and in the join of dispatch; on
gloo also in the join of combine, on NCCL only the stream does. Cannot be captured.

Order on the wire: collectives are issued where dispatch is called, where its Pending is first
joined, and where combine is called; ranks make these calls in the same order.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    RoutedTokens,
)
from ep_runtime.all2all.collectives import Collective, host_device, start_all_to_all
from ep_runtime.all2all.expert_ids import IdTable
from ep_runtime.all2all.routing_message import pack_routing, unpack_routing
from ep_runtime.kernels.base import (
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    InputFormat,
    StandardExpertInput,
)


@dataclass(frozen=True)
class RowsToSend:
    """The (row, rank) pairs of this rank's rows, in order of rank, then of row.

    hidden_states: [N, H] copies of the rows. message: [N, 2K] int32, ids local to the destination
    and weights' bits. row_of_pair: [N] int64, which own row. send_counts: [P] int64 on the host's
    device. num_rows: T.
    """

    hidden_states: Tensor
    message: Tensor
    row_of_pair: Tensor
    send_counts: Tensor
    num_rows: int


@dataclass(frozen=True)
class ReturnPath:
    """What combine needs to bring results home: the splits, and which row each pair belongs to."""

    row_of_pair: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    num_rows: int


@dataclass
class PendingDispatch:
    """Counts in flight; then rows in flight; then landed. Keeps its buffers until joined."""

    group: EPGroup
    prepared: RowsToSend
    receive_counts: Tensor
    counts_exchange: Collective
    _landed: tuple[ExpertInput, ReturnPath] | None = field(default=None, init=False)

    def join(self) -> None:
        """Wait for the counts, send the rows, order the current stream behind them."""
        if self._landed is None:
            self._landed = self._exchange_rows()

    def wait(self, bias: Tensor | None = None) -> tuple[ExpertInput, ReturnPath]:
        if bias is not None:
            raise ValueError("all_to_all's dispatch takes no bias")
        if self._landed is None:
            self._landed = self._exchange_rows()
        return self._landed

    def _exchange_rows(self) -> tuple[ExpertInput, ReturnPath]:
        self.counts_exchange.join()
        counts = tuple(int(n) for n in self.receive_counts.tolist())
        sent = tuple(int(n) for n in self.prepared.send_counts.tolist())
        rows, message = self.prepared.hidden_states, self.prepared.message
        received_rows = rows.new_empty((sum(counts), rows.shape[1]))
        received_message = message.new_empty((sum(counts), message.shape[1]))
        exchanges = [
            start_all_to_all(to, source, self.group, receive_counts=counts, send_counts=sent)
            for to, source in ((received_message, message), (received_rows, rows))
        ]
        for exchange in exchanges:
            exchange.join()
        topk_ids, topk_weights = unpack_routing(received_message)
        return (
            StandardExpertInput(received_rows, topk_ids, topk_weights),
            ReturnPath(self.prepared.row_of_pair, sent, counts, self.prepared.num_rows),
        )


@dataclass
class PendingCombine:
    """Results on their way home. Keeps both ends' buffers until joined."""

    exchange: Collective
    sent: Tensor
    returned: Tensor
    handle: ReturnPath

    def join(self) -> None:
        self.exchange.join()

    def wait(self, bias: Tensor | None = None) -> Tensor:
        """Sum each row's results in float32, ranks in order; [T, H] in the input's dtype."""
        if bias is not None:
            raise ValueError("all_to_all's combine takes no bias; add it to the result")
        self.join()
        handle, returned = self.handle, self.returned
        summed = returned.new_zeros((handle.num_rows, returned.shape[1]), dtype=torch.float32)
        start = 0
        for count in handle.send_counts:
            # A rank's pairs are distinct rows, so this adds in one order only.
            pairs = slice(start, start + count)
            summed.index_add_(0, handle.row_of_pair[pairs], returned[pairs].float())
            start += count
        return summed.to(returned.dtype)


class AllToAllBackend:
    """Rows go where their experts are, and results come back."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="all_to_all",
        format=InputFormat.STANDARD,
        supports_async=True,
        combine_bias=CombineBias.NONE,
        uneven_experts=True,
        supports_cuda_graph=False,
        communication=ConcurrencyRule(
            None,
            Concurrency.CERTIFIED,
            "tests/ep_runtime/test_audit_streams.py"
            "::test_the_real_code_orders_everything_under_every_schedule",
            owns="each call's buffers, held by its Pending; NCCL's streams, one set a group",
            record="benchmarks/results/audit_triton.json",
        ),
    )

    def __init__(self, group: EPGroup, shape: BackendShape) -> None:
        self._group = group
        placement, device = shape.placement, group.device
        ranks = torch.tensor(placement.rank_of, dtype=torch.int64, device=device)
        local_ids = torch.tensor(placement.local_id_of, dtype=torch.int32, device=device)
        self._rank_of, self._local_id_of = IdTable(ranks), IdTable(local_ids)

    def prepare(self, tokens: RoutedTokens) -> RowsToSend:
        rank_of_slot = self._rank_of.look_up(tokens.topk_ids)
        local_ids = self._local_id_of.look_up(tokens.topk_ids)
        num_rows, size = tokens.hidden_states.shape[0], self._group.size
        # Column `size` takes the slots that go nowhere.
        is_needed = torch.zeros(
            (num_rows, size + 1), dtype=torch.bool, device=tokens.hidden_states.device
        )
        is_needed.scatter_(1, torch.where(rank_of_slot < 0, size, rank_of_slot), True)
        is_needed = is_needed[:, :size]
        rank_of_pair, row_of_pair = is_needed.t().nonzero(as_tuple=True)
        is_there = rank_of_slot[row_of_pair] == rank_of_pair[:, None]
        ids = torch.where(is_there, local_ids[row_of_pair], -1)
        return RowsToSend(
            hidden_states=tokens.hidden_states[row_of_pair],
            message=pack_routing(ids, tokens.topk_weights[row_of_pair]),
            row_of_pair=row_of_pair,
            send_counts=is_needed.sum(dim=0).to(host_device(self._group)),
            num_rows=num_rows,
        )

    def dispatch(self, prepared: RowsToSend) -> PendingDispatch:
        receive_counts = torch.empty_like(prepared.send_counts)
        exchange = start_all_to_all(receive_counts, prepared.send_counts, self._group)
        return PendingDispatch(self._group, prepared, receive_counts, exchange)

    def combine(
        self, expert_output: Tensor, handle: ReturnPath, bias: Tensor | None = None
    ) -> PendingCombine:
        if bias is not None:
            raise ValueError("all_to_all's combine takes no bias; add it to the result")
        sent = expert_output.contiguous()
        returned = sent.new_empty((sum(handle.send_counts), sent.shape[1]))
        exchange = start_all_to_all(
            returned,
            sent,
            self._group,
            receive_counts=handle.send_counts,
            send_counts=handle.receive_counts,
        )
        return PendingCombine(exchange, sent, returned, handle)

    def check(self) -> None:
        return None

    def close(self) -> None:
        return None
