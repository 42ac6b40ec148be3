"""An all-to-all backend that lives outside the package: one class, registered under a name.

python examples/out_of_tree_backend.py
torchrun --nproc-per-node 2 examples/out_of_tree_backend.py

Wire protocol, with n_r the rows of rank r in this round, which every rank knows:

1. dispatch: each rank in turn broadcasts its n_r rows and their routing message; nothing is padded.
2. combine: the results of rank r's rows are reduced to rank r, in float32.

Waits: the host in each broadcast and reduce on gloo, the stream on NCCL. It cannot be captured,
since the number of rows is part of the launch.
"""

import os
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import ep_runtime as ep
from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    Finished,
    RoutedTokens,
)
from ep_runtime.all2all.collectives import Collective, device_backend
from ep_runtime.all2all.expert_ids import IdTable, local_expert_map
from ep_runtime.all2all.routing_message import pack_routing, unpack_routing
from ep_runtime.kernels.base import ExpertInput, InputFormat, StandardExpertInput


class BroadcastBackend:
    """Every rank sees every row and computes its own experts' share, without padding.

    The handle is rows_per_rank: everything combine needs, so calls can overlap.
    """

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="broadcast",
        format=InputFormat.STANDARD,
        supports_async=False,
        combine_bias=CombineBias.NONE,
        uneven_experts=True,
        supports_cuda_graph=False,
    )

    def __init__(self, group: EPGroup, shape: BackendShape) -> None:
        self._group = group
        self._local_ids = IdTable(local_expert_map(shape.placement, group))

    def prepare(self, tokens: RoutedTokens) -> RoutedTokens:
        return tokens

    def dispatch(self, prepared: RoutedTokens) -> Finished[tuple[ExpertInput, tuple[int, ...]]]:
        counts = prepared.rows_per_rank
        topk_ids, topk_weights = unpack_routing(
            self._from_all(pack_routing(prepared.topk_ids, prepared.topk_weights), counts)
        )
        received = StandardExpertInput(
            hidden_states=self._from_all(prepared.hidden_states, counts),
            topk_ids=self._local_ids.look_up(topk_ids),
            topk_weights=topk_weights,
        )
        return Finished((received, counts))

    def combine(
        self, expert_output: Tensor, handle: tuple[int, ...], bias: Tensor | None = None
    ) -> Finished[Tensor]:
        if bias is not None:
            raise ValueError("broadcast's combine takes no bias; add it to the result")
        parts = [part.float().contiguous() for part in torch.split(expert_output, list(handle))]
        group = self._group
        for rank, part in enumerate(parts):
            if len(part) and group.process_group is not None:
                work = dist.reduce(part, group_dst=rank, group=group.process_group, async_op=True)
                self._join(work, part)
        own = parts[group.rank]
        # A fresh tensor, also where float() and split() gave a view of the experts' output.
        return Finished(own.to(expert_output.dtype, copy=True))

    def check(self) -> None:
        return None

    def close(self) -> None:
        return None

    def _from_all(self, own: Tensor, counts: tuple[int, ...]) -> Tensor:
        """[T, n] on each rank to [sum(counts), n] on every rank, in rank order."""
        group = self._group
        blocks = [own.new_empty((count, own.shape[1])) for count in counts]
        blocks[group.rank] = own.contiguous()
        for rank, block in enumerate(blocks):
            if len(block) and group.process_group is not None:
                work = dist.broadcast(
                    block, group_src=rank, group=group.process_group, async_op=True
                )
                self._join(work, block)
        return torch.cat(blocks)

    def _join(self, work: object, rows: Tensor) -> None:
        """Wait, but not for ever: a rank that fails ends every rank's wait."""
        waits_on_host = device_backend(self._group, rows.device.type) == "gloo"
        Collective(self._group, work, waits_on_host).join()


def main() -> None:
    ep.register_backend("broadcast", BroadcastBackend)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    moe = ep.MoEConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=5, top_k=2, dtype="float32"
    )
    torch.manual_seed(0)
    w13, w2 = torch.randn(5, 64, 64) / 8, torch.randn(5, 64, 32) / 6
    router = torch.randn(5, 64)
    parallel = ep.ParallelConfig(dp_size=num_ranks, all2all_backend="broadcast")
    with ep.init_distributed(parallel) as ctx:
        layer = ep.MoELayer(moe, ctx)
        layer.load_experts(w13=w13, w2=w2, router=router)
        output = layer(torch.randn(3 + ctx.rank, 64).to(ctx.device))
        print(f"rank {ctx.rank}: {layer.plan.backend} gave {list(output.shape)}")


if __name__ == "__main__":
    main()
