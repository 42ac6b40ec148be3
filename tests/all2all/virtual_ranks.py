"""Ranks of one process over `virtual_buffers`, for stress tests of `symm_mem`."""

import random

import torch
from torch import Tensor

from ep_runtime.all2all.base import BackendShape, EPGroup, RoutedTokens
from ep_runtime.all2all.symm_mem import SymmMemBackend, SymmMemLimits
from ep_runtime.all2all.symmetric_buffer import SymmetricBuffer, virtual_buffers
from ep_runtime.kernels.base import ExpertInput, StandardExpertInput
from ep_runtime.kernels.quant.scheme import MAX_E4M3
from tests.all2all.contract import received_rows

# Few enough programs that spinning ranks leave a GPU to the ranks they wait for.
LIMITS = SymmMemLimits(wait_limit_s=20, put_programs=8, combine_programs=8, comm_stream_bytes=4096)


def virtual_groups(
    num_ranks: int, device: torch.device, abort: Tensor | None = None
) -> list[EPGroup]:
    """Of each rank; what is built over the same groups shares their slots."""
    return [EPGroup(None, rank, num_ranks, device, abort=abort) for rank in range(num_ranks)]


def make_virtual_ranks(
    shape: BackendShape,
    device: torch.device,
    limits: SymmMemLimits = LIMITS,
    groups: list[EPGroup] | None = None,
) -> list[SymmMemBackend]:
    """One backend of each rank of the shape's placement. groups: None for new ones."""
    num_ranks = shape.placement.ep_size
    buffers: list[SymmetricBuffer] = []

    def open_buffer(group: EPGroup, num_bytes: int) -> SymmetricBuffer:
        if not buffers:
            buffers.extend(virtual_buffers(num_ranks, num_bytes, device))
        return buffers[group.rank]

    return [
        SymmMemBackend(group, shape, limits=limits, open_buffer=open_buffer)
        for group in groups or virtual_groups(num_ranks, device)
    ]


def stress_tokens(
    shape: BackendShape, rows_per_rank: tuple[int, ...], rank: int, round_index: int
) -> RoutedTokens:
    """Rows that say (rank, token, round) in their first columns; any rank can rebuild them.

    With 448 in a group of whole numbers up to 16 its scale is 1, and fp8 loses nothing of it.
    """
    generator = torch.Generator().manual_seed(1_000_003 * round_index + rank)
    num_rows = rows_per_rank[rank]
    rows = torch.randint(-8, 8, (num_rows, shape.hidden_size), generator=generator).float()
    rows[:, 0] = rank + 1
    rows[:, 1] = torch.arange(num_rows)
    rows[:, 2] = round_index % 16
    rows[:, 3] = MAX_E4M3
    ids = torch.randint(-1, shape.num_experts, (num_rows, shape.top_k), generator=generator)
    weights = torch.randint(1, 5, ids.shape, generator=generator).float()
    weights[ids < 0] = float("nan")
    return RoutedTokens(rows.to(shape.dtype), ids.to(torch.int32), weights, rows_per_rank)


def to_device(tokens: RoutedTokens, device: torch.device) -> RoutedTokens:
    return RoutedTokens(
        tokens.hidden_states.to(device),
        tokens.topk_ids.to(device),
        tokens.topk_weights.to(device),
        tokens.rows_per_rank,
    )


def expert_scale(shape: BackendShape, rank: int, device: torch.device) -> Tensor:
    """[E_local + 1]: what each expert of a rank multiplies by, its global id + 1; 0 at the end."""
    scale = [*(e + 1.0 for e in shape.placement.experts_of(rank)), 0.0]
    return torch.tensor(scale, device=device)


def coded_output(received: ExpertInput, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Expert e returns scale[e] * row; small whole numbers, exact in float32. Can be captured.

    dtype: the layer's.
    """
    assert isinstance(received, StandardExpertInput)
    ids = received.topk_ids.long()
    shares = torch.where(ids >= 0, received.topk_weights * scale[ids], 0.0).sum(1, keepdim=True)
    return torch.where(shares != 0, shares * received_rows(received), 0.0).to(dtype)


def wanted_output(tokens: RoutedTokens) -> Tensor:
    """[T, H] float32: what combine must return."""
    ids = tokens.topk_ids
    shares = torch.where(ids >= 0, tokens.topk_weights * (ids + 1), 0.0).sum(1, keepdim=True)
    return shares * tokens.hidden_states.float()


def random_counts(shape: BackendShape, chance: random.Random) -> tuple[int, ...]:
    """Rows of each rank in one round: often none, often all that fit."""
    limit = shape.max_tokens_per_rank
    return tuple(
        chance.choice((0, limit, chance.randint(0, limit))) for _ in range(shape.placement.ep_size)
    )
