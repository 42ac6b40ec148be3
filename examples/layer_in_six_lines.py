"""One expert-parallel MoE layer.

python examples/layer_in_six_lines.py
torchrun --nproc-per-node 2 examples/layer_in_six_lines.py
"""

import os

import torch

import ep_runtime as ep

E, HIDDEN, WIDTH = 8, 64, 32
num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)  # the same weights on every rank; each keeps its own experts
w13, w2 = torch.randn(E, 2 * WIDTH, HIDDEN) / 8, torch.randn(E, HIDDEN, WIDTH) / 6
shared = {"w13": torch.randn(2 * WIDTH, HIDDEN) / 8, "w2": torch.randn(HIDDEN, WIDTH) / 6}
moe = ep.MoEConfig(
    hidden_size=HIDDEN,
    moe_intermediate_size=WIDTH,
    num_experts=E,
    top_k=2,
    num_shared_experts=1,
    dtype="float32",
)

# The six lines.
ctx = ep.init_distributed(ep.ParallelConfig(dp_size=num_ranks))
layer = ep.MoELayer(moe, ctx)
layer.load_experts(w13=w13, w2=w2, router=torch.randn(E, HIDDEN), shared=shared)
rows = torch.randn(5 + ctx.rank, HIDDEN).to(ctx.device)  # ranks may differ, or have none
print(f"rank {ctx.rank}: {list(layer(rows).shape)}, load {layer.stats.tokens_per_expert.tolist()}")
ctx.close()
