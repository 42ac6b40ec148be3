"""What ranks run: the MoE layers of checkpoints, on rows and ids that are given."""

import torch
from torch import Tensor

from ep_runtime.distributed import EPContext
from ep_runtime.models import load_model

ROWS = (6, 3, 0, 5)  # of each rank


def rows_and_ids(
    rank: int, hidden_size: int, num_experts: int, top_k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 rows that bfloat16 holds exactly; different experts a row; weights."""
    generator = torch.Generator().manual_seed(50 + rank)
    rows = torch.randn(ROWS[rank], hidden_size, generator=generator).bfloat16().float()
    ids = torch.rand(ROWS[rank], num_experts, generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(ROWS[rank], top_k, generator=generator)
    return rows, ids.to(torch.int32), weights


@torch.no_grad()
def outputs_of_layers(
    ctx: EPContext, paths: dict[str, str], dtype: str
) -> dict[str, list[list[Tensor]]]:
    """Name -> of each MoE layer the output for each rank's rows that this rank has: its own, or
    with one rank all of them."""
    results: dict[str, list[list[Tensor]]] = {}
    whose = [ctx.rank] if ctx.world_size > 1 else range(len(ROWS))
    for name, path in paths.items():
        model = load_model(path, ctx, experts="reference", dtype=dtype, progress=False)
        results[name] = []
        for layer in model.moe_layers:
            moe = layer.moe
            outputs = []
            for rank in whose:
                rows, ids, weights = rows_and_ids(rank, moe.hidden_size, moe.num_experts, moe.top_k)
                output = layer(rows.to(moe.torch_dtype), topk_ids=ids, topk_weights=weights)
                outputs.append(output.float())
            results[name].append(outputs)
    return results
