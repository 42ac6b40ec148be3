"""All-gather of every row to every rank, reduce-scatter of the results.

Wire protocol, with M = the most rows that a rank of the group has in this round:

1. prepare pads the own rows to M with zero rows that no expert is chosen for, and packs ids and
   weights into one int32 message [M, 2K] (the weights' bits unchanged).
2. dispatch all-gathers the message and the rows: [P * M, ..] on every rank. Ids that this rank
   does not hold become -1.
3. combine reduce-scatters [P * M, H] to the own [M, H] and strips the padding. Sums of more than
   two contributions of a 16-bit dtype are made in float32.

Waits: on gloo the host waits in dispatch and in combine; on NCCL only the stream does. Nothing is
read back from the device, so with equal, static counts it can be captured.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    Finished,
    RoutedTokens,
)
from ep_runtime.all2all.collectives import start_all_gather, start_reduce_scatter
from ep_runtime.all2all.expert_ids import IdTable, local_expert_map
from ep_runtime.all2all.routing_message import pack_routing, unpack_routing
from ep_runtime.kernels.base import (
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    InputFormat,
    StandardExpertInput,
)


@dataclass(frozen=True)
class PaddedRows:
    """Own rows, padded to the group's largest count M.

    hidden_states: [M, H]. message: [M, 2K] int32, ids (-1 in the padding) and weights' bits.
    num_rows: T, how many of them are real.
    """

    hidden_states: Tensor
    message: Tensor
    num_rows: int


class NaiveBackend:
    """Every rank sees every row and computes its own experts' share."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="naive",
        format=InputFormat.STANDARD,
        supports_async=False,
        combine_bias=CombineBias.NONE,
        uneven_experts=True,
        supports_cuda_graph=True,
        gathers_rows=True,
        communication=ConcurrencyRule(
            None,
            Concurrency.CERTIFIED,
            "tests/ep_runtime/test_audit_streams.py"
            "::test_the_real_code_orders_everything_under_every_schedule",
            owns="each call's buffers, joined before it returns; NCCL's streams, one set a group",
            record="benchmarks/results/audit_triton.json",
        ),
    )

    def __init__(self, group: EPGroup, shape: BackendShape) -> None:
        self._group = group
        self._local_ids = IdTable(local_expert_map(shape.placement, group))

    def prepare(self, tokens: RoutedTokens) -> PaddedRows:
        num_rows = tokens.hidden_states.shape[0]
        most_rows = max(tokens.rows_per_rank)
        return PaddedRows(
            hidden_states=_padded(tokens.hidden_states, most_rows, 0),
            message=_padded(pack_routing(tokens.topk_ids, tokens.topk_weights), most_rows, -1),
            num_rows=num_rows,
        )

    def dispatch(self, prepared: PaddedRows) -> Finished[tuple[ExpertInput, int]]:
        message = self._gather(prepared.message)
        topk_ids, topk_weights = unpack_routing(message)
        received = StandardExpertInput(
            hidden_states=self._gather(prepared.hidden_states),
            topk_ids=self._local_ids.look_up(topk_ids),
            topk_weights=topk_weights,
            num_source_rows=topk_ids.shape[0],
        )
        return Finished((received, prepared.num_rows))

    def combine(
        self, expert_output: Tensor, handle: int, bias: Tensor | None = None
    ) -> Finished[Tensor]:
        """handle: T, the number of own rows."""
        if bias is not None:
            raise ValueError("naive's combine takes no bias; add it to the result")
        return Finished(self._sum_scatter(expert_output)[:handle])

    def gather_rows(self, rows: Tensor, rows_per_rank: tuple[int, ...]) -> Tensor:
        """[T, n] on each rank to [sum(rows_per_rank), n] on every rank, in rank order."""
        most_rows = max(rows_per_rank)
        gathered = self._gather(_padded(rows, most_rows, 0))
        if all(count == most_rows for count in rows_per_rank):
            return gathered
        blocks = torch.split(gathered, most_rows)
        return torch.cat([block[:n] for block, n in zip(blocks, rows_per_rank, strict=True)])

    def sum_scatter_rows(self, rows: Tensor, rows_per_rank: tuple[int, ...]) -> Tensor:
        """Sum [sum(rows_per_rank), n] over the ranks; returns this rank's own [T, n]."""
        most_rows = max(rows_per_rank)
        if any(count != most_rows for count in rows_per_rank):
            blocks = torch.split(rows, list(rows_per_rank))
            rows = torch.cat([_padded(block, most_rows, 0) for block in blocks])
        return self._sum_scatter(rows)[: rows_per_rank[self._group.rank]]

    def check(self) -> None:
        return None

    def close(self) -> None:
        return None

    def _gather(self, rows: Tensor) -> Tensor:
        num_rows = self._group.size * rows.shape[0]
        gathered = rows.new_empty((num_rows, *rows.shape[1:]))
        start_all_gather(gathered, rows, self._group).join()
        return gathered

    def _sum_scatter(self, rows: Tensor) -> Tensor:
        """[P * M, n] to the own [M, n]: fresh, in the dtype of `rows`."""
        sum_dtype = rows.dtype
        if self._group.size > 2 and rows.dtype.itemsize < 4:
            sum_dtype = torch.float32
        contributions = rows.to(sum_dtype).contiguous()
        own_rows = rows.shape[0] // self._group.size
        summed = contributions.new_empty((own_rows, *rows.shape[1:]))
        start_reduce_scatter(summed, contributions, self._group).join()
        return summed.to(rows.dtype)


def _padded(rows: Tensor, num_rows: int, fill: int) -> Tensor:
    """`rows` contiguous, followed by rows of `fill` up to num_rows; a copy only where needed."""
    missing = num_rows - rows.shape[0]
    if missing == 0:
        return rows.contiguous()
    return torch.cat([rows, rows.new_full((missing, *rows.shape[1:]), fill)])
