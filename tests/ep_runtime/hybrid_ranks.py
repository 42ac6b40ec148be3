"""What a rank does with a hybrid checkpoint; imports little, since every rank imports it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_runtime.distributed import EPContext
from ep_runtime.models import load_model
from tests.ep_runtime.quantized_ranks import Prompts


@dataclass(frozen=True)
class HybridRank:
    """What one rank has. logits: by prompt number. nvfp4_experts: of each MoE layer."""

    logits: dict[int, Tensor]
    nvfp4_experts: list[tuple[int, ...]]
    held_bytes: int
    planned_bytes: int
    expert_bytes_read: int
    expert_bytes_in_checkpoint: int


def load_hybrid(ctx: EPContext, path: str, prompts: Prompts, experts: str) -> HybridRank:
    """Load in float32; the prompts go round."""
    model = load_model(path, ctx, experts=experts, dtype="float32", progress=False)
    logits = {}
    for number in range(ctx.rank, len(prompts) + ctx.rank, ctx.world_size):
        has_prompt = number < len(prompts)  # some ranks have none in the last round
        ids = torch.tensor([prompts[number]]) if has_prompt else torch.zeros(0, 1).long()
        output = model(input_ids=ids).logits
        if has_prompt:
            logits[number] = output[0]
    layers = model.moe_layers
    held = 0
    if experts == "reference":
        stored = [t for layer in layers for t in (layer.w13, layer.w2)]
        quants = [q for layer in layers for q in (layer.w13_quant, layer.w2_quant) if q]
        held = sum(t.nbytes for t in (*stored, *(t for q in quants for t in q.tensors())))
    return HybridRank(
        logits=logits,
        nvfp4_experts=[layer.moe.quantization.nvfp4_experts for layer in layers],
        held_bytes=held,
        planned_bytes=sum(x.plan.bytes_per_rank[ctx.ep_rank].experts for x in layers),
        expert_bytes_read=model.load_report.expert_bytes_read,
        expert_bytes_in_checkpoint=model.load_report.expert_bytes_in_checkpoint,
    )
