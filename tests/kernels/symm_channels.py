"""Slots of several ranks in one process, for tests of the kernels over them."""

import torch

from ep_runtime.kernels.symm_channel import Channel, ExpertHomes, SlotLayout


def make_channels(
    layout: SlotLayout, homes: ExpertHomes, device: torch.device, *, wait_limit_s: float = 2.0
) -> list[Channel]:
    """One channel of each rank. Floats are NaN and ids 77 until something is written."""
    memories = []
    for _ in range(layout.ep_size):
        whole = torch.zeros(layout.num_bytes + 256, dtype=torch.uint8, device=device)
        start = -whole.data_ptr() % 256
        memories.append(whole[start : start + layout.num_bytes])
    peers = torch.tensor([m.data_ptr() for m in memories], dtype=torch.int64, device=device)

    def word(pinned: bool = False) -> torch.Tensor:
        if pinned and device.type == "cuda":
            return torch.zeros(1, dtype=torch.int64, pin_memory=True)
        return torch.zeros(1, dtype=torch.int64, device=device)

    channels = []
    for rank, memory in enumerate(memories):
        for name in ("topk_weights", "rows", "scales", "results"):
            if name in layout.regions:
                layout.view(memory, name).fill_(float("nan"))
        for name in ("topk_ids", "origins"):
            layout.view(memory, name).fill_(77)
        channels.append(
            Channel(
                layout=layout,
                rank=rank,
                memory=memory,
                peers=peers,
                homes=homes,
                epoch=word(),
                failed=word(),
                record=word(pinned=True),
                abort=word(pinned=True),
                wait_limit_ns=int(wait_limit_s * 1e9),
            )
        )
    return channels
