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


class IdTable:
    """A value for each global expert id.

    table: [E], integers. It is copied, with a -1 behind it for ids that are no expert's.
    """

    def __init__(self, table: Tensor) -> None:
        self._values = torch.cat([table, table.new_full((1,), -1)])

    def look_up(self, topk_ids: Tensor) -> Tensor:
        """table[topk_ids] where the id is in [0, E), else -1; the ids' shape, the table's dtype."""
        # Index -1 is the last value, as E is.
        return self._values[topk_ids.clamp(-1, len(self._values) - 1)]
