"""The shared expert: one dense gated MLP that every row passes, whatever the router says."""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import Concurrency, ConcurrencyRule
from ep_runtime.ownership import Owner, SharedExpertToken
from ep_runtime.small_passes import make_activate


class SharedExpert(nn.Module):
    """All shared experts of a layer as one MLP of their total width S, on every rank.

    w13: [2S, H], gate rows first, then up ([S, H] where the activation is not gated).
    w2: [H, S]. gate: [1, H] or None; the output is multiplied by sigmoid(gate . row).
    It is never multiplied by routed_scaling_factor. It runs on the current stream, through
    library matrix products, whose workspaces torch keeps per stream.
    """

    concurrency_rules: ClassVar[tuple[ConcurrencyRule, ...]] = (
        ConcurrencyRule(
            None,
            Concurrency.CERTIFIED,
            "tests/ep_runtime/test_shared_expert.py::test_two_streams_do_not_disturb_each_other",
            owns="scratch from torch's allocator and the library's workspace, one for each stream",
            record="benchmarks/results/audit_triton.json",
        ),
    )

    def __init__(self, moe: MoEConfig, device: torch.device) -> None:
        super().__init__()
        width, hidden, dtype = moe.shared_intermediate_size, moe.hidden_size, moe.torch_dtype
        self.activation = moe.experts_activation()
        rows13 = width * (2 if self.activation.is_gated else 1)

        def weight(*shape: int) -> nn.Parameter:
            empty = torch.empty(shape, dtype=dtype, device=device)
            return nn.Parameter(empty, requires_grad=False)

        self.w13 = weight(rows13, hidden)
        self.w2 = weight(hidden, width)
        self.gate = weight(1, hidden) if moe.shared_expert_gate else None
        self._activate = make_activate(self.activation, width, device)
        self.calls = 0

    def run(
        self, hidden_states: Tensor, *, token: SharedExpertToken, by: Owner, out: Tensor
    ) -> Tensor:
        """Compute [T, H] into `out` and return it; uses up the call's token.

        hidden_states: [T, H] own rows, T may be 0. out: [T, H] of the same dtype.
        """
        token.consume(by)
        self.calls += 1
        hidden = self._activate(linear(hidden_states, self.w13))
        torch.mm(hidden, self.w2.t(), out=out)
        if self.gate is not None:
            out.mul_(torch.sigmoid(linear(hidden_states, self.gate)))
        return out
