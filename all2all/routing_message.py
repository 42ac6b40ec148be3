"""Expert ids and router weights of a row as one int32 message, so that they travel together."""

import torch
from torch import Tensor


def pack_routing(topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """[T, K] int32 ids and [T, K] float32 weights to [T, 2K] int32; the weights' bits unchanged."""
    bits = topk_weights.contiguous().view(torch.int32)
    return torch.cat([topk_ids.to(torch.int32), bits], dim=1)


def unpack_routing(message: Tensor) -> tuple[Tensor, Tensor]:
    """[R, 2K] int32 to [R, K] int32 ids and [R, K] float32 weights, both contiguous."""
    top_k = message.shape[1] // 2
    topk_ids = message[:, :top_k].contiguous()
    return topk_ids, message[:, top_k:].contiguous().view(torch.float32)
