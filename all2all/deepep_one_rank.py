"""What DeepEP's buffer does, where there is one rank and so nothing to send.

DeepEP's kernels serve two ranks and more. Its backends work with one rank all the same: then they
hold this, which keeps to the calls and layouts of V1 that they use, in plain torch on the current
stream. It never waits for the device and can be captured.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class NothingToWaitFor:
    """An event of communication that never was."""

    def current_stream_wait(self) -> None:
        return None


class OneRankBuffer:
    """The part of `deep_ep.Buffer` that the backends call, for a group of one rank."""

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        return None, None, None, None, NothingToWaitFor()

    def dispatch(
        self, x: Tensor, *, topk_idx: Tensor, topk_weights: Tensor, **_: Any
    ) -> tuple[Any, ...]:
        """The rows themselves; every expert is local."""
        return x, topk_idx, topk_weights, [], None, NothingToWaitFor()

    def combine(
        self, x: Tensor, handle: None, *, bias: Tensor | None, async_finish: bool
    ) -> tuple[Tensor, None, NothingToWaitFor]:
        summed = x if bias is None else (x.float() + bias.float()).to(x.dtype)
        return summed, None, NothingToWaitFor()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool,
        return_recv_hook: bool,
    ) -> tuple[
        Tensor | tuple[Tensor, Tensor], Tensor, Tensor, NothingToWaitFor, Callable[[], None]
    ]:
        """[E, capacity, H] rows (with use_fp8: e4m3 and [E, capacity, ceil(H / 128)] scales) and
        [E] counts; the handle is each slot's place, [T * K]."""
        capacity = num_max_dispatch_tokens_per_rank
        slots = topk_idx.flatten()
        is_expert = slots[:, None] == torch.arange(num_experts, device=slots.device)
        seen = is_expert.cumsum(0, dtype=torch.int32)
        before = seen.gather(1, slots.clamp(min=0)[:, None])[:, 0] - 1
        # The last row takes the slots that are not routed.
        place = torch.where(slots < 0, num_experts * capacity, slots * capacity + before)

        def placed(part: Tensor) -> Tensor:
            spread = part.new_empty((num_experts * capacity + 1, part.shape[1]))
            spread.index_copy_(0, place, part.repeat_interleave(topk_idx.shape[1], dim=0))
            return spread[:-1].view(num_experts, capacity, part.shape[1])

        received: Tensor | tuple[Tensor, Tensor]
        if use_fp8:
            from ep_runtime.kernels.quant.fp8_rows import quantize_rows_reference

            values, scales = quantize_rows_reference(x)
            # As bytes: torch does not index fp8.
            placed_bytes = placed(values.contiguous().view(torch.uint8))
            received = placed_bytes.view(torch.float8_e4m3fn), placed(scales)
        else:
            received = placed(x)
        return received, seen[-1].contiguous(), place, NothingToWaitFor(), _do_nothing

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Tensor,
        *,
        out: Tensor,
        return_recv_hook: bool,
    ) -> tuple[Tensor, NothingToWaitFor, Callable[[], None]]:
        """Weighted sum over each row's slots, in float32, in the order of the slots."""
        rows = x.flatten(0, 1)
        slot_rows = rows[handle.clamp(max=len(rows) - 1)].view(*topk_idx.shape, -1)
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for k in range(topk_idx.shape[1]):
            weighted = topk_weights[:, k, None] * slot_rows[:, k].float()
            total += torch.where(topk_idx[:, k, None] >= 0, weighted, 0.0)
        return out.copy_(total), NothingToWaitFor(), _do_nothing

    def destroy(self) -> None:
        return None


def _do_nothing() -> None:
    return None
