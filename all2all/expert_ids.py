"""Tables over the global expert ids, as tensors on a group's device."""

import torch
from torch import Tensor

from ep_runtime.all2all.base import EPGroup, ExpertPlacement


def local_expert_map(placement: ExpertPlacement, group: EPGroup) -> Tensor:
    """[E] int32: a global id to this rank's local id, -1 where another rank holds the expert.

    Example: linear, 5 experts on 2 ranks, rank 1: (-1, -1, -1, 0, 1).
    """
    pairs = zip(placement.rank_of, placement.local_id_of, strict=True)
    ids = [local_id if rank == group.rank else -1 for rank, local_id in pairs]
    return torch.tensor(ids, dtype=torch.int32, device=group.device)


def look_up(table: Tensor, topk_ids: Tensor) -> Tensor:
    """table[topk_ids] where the id is in [0, E), else -1; the shape of topk_ids, table's dtype."""
    num_experts = table.numel()
    if num_experts == 0:
        return torch.full_like(topk_ids, -1, dtype=table.dtype)
    is_routed = (topk_ids >= 0) & (topk_ids < num_experts)
    found = table[topk_ids.clamp(0, num_experts - 1).long()]
    return torch.where(is_routed, found, -1)
