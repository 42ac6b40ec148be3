"""What a rank does with quantised checkpoints; imports little, since every rank imports it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ep_runtime.distributed import EPContext
from ep_runtime.expert_loading import ExpertBuffers, ExpertLoader
from ep_runtime.models import load_model
from ep_runtime.stored_weight import StoredWeight
from ep_runtime.tensor_names import Slot

Prompts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Loaded:
    """What one rank has of one model. logits: by prompt number. schemes: by MoE layer."""

    logits: dict[int, Tensor]
    schemes: list[str]
    held_bytes: int
    planned_bytes: int
    expert_bytes_read: int
    expert_bytes_in_checkpoint: int
    dense_dtypes: set[torch.dtype]
    unused: tuple[str, ...]


def load_and_compute(
    ctx: EPContext, paths: dict[str, str], prompts_of: dict[str, Prompts]
) -> dict[str, Loaded]:
    """Every checkpoint in one start of the ranks, in float32; the prompts go round."""
    results = {}
    for name, path in paths.items():
        model = load_model(path, ctx, experts="reference", dtype="float32", progress=False)
        prompts, logits = prompts_of[name], {}
        for number in range(ctx.rank, len(prompts) + ctx.rank, ctx.world_size):
            has_prompt = number < len(prompts)  # some ranks have none in the last round
            ids = torch.tensor([prompts[number]]) if has_prompt else torch.zeros(0, 1).long()
            output = model(input_ids=ids).logits
            if has_prompt:
                logits[number] = output[0]
        layers, report = model.moe_layers, model.load_report
        quants = [q for layer in layers for q in (layer.w13_quant, layer.w2_quant) if q]
        biases = [b for layer in layers for b in (layer.w13_bias, layer.w2_bias) if b is not None]
        experts: list[Tensor] = [t for layer in layers for t in (layer.w13, layer.w2)]
        experts += [tensor for quant in quants for tensor in quant.tensors()]
        results[name] = Loaded(
            logits=logits,
            schemes=[str(layer.moe.quantization.weight) for layer in layers],
            held_bytes=sum(tensor.nbytes for tensor in (*experts, *biases)),
            planned_bytes=sum(x.plan.bytes_per_rank[ctx.ep_rank].experts for x in layers),
            expert_bytes_read=report.expert_bytes_read,
            expert_bytes_in_checkpoint=report.expert_bytes_in_checkpoint,
            dense_dtypes={
                parameter.dtype
                for key, parameter in model.transformers_model.named_parameters()
                if "self_attn" in key or "shared" in key
            },
            unused=report.unused,
        )
    return results


def load_and_find_slots(ctx: EPContext, path: str) -> tuple[list[str], int]:
    """(how rows travel, by MoE layer; pairs of symmetric slots in use)."""
    model = load_model(path, ctx, experts="triton", dtype="float32", progress=False)
    plans = [layer.plan for layer in model.moe_layers]
    backends = [ctx.backend(plan.backend, plan.backend_shape()) for plan in plans]
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()
    num_pairs = len({id(backend.slots) for backend in backends})  # type: ignore[attr-defined]
    return [str(plan.rows) for plan in plans], num_pairs


def load_with_a_gap(ctx: EPContext, path: str, rank: int, gap: tuple[int, str, int]) -> None:
    """As load_model, but one rank's record lacks (layer, part, expert)."""
    read = ExpertLoader.read

    def read_all_but_one(
        self: ExpertLoader, slot: Slot, weight: StoredWeight, into: ExpertBuffers
    ) -> None:
        read(self, slot, weight, into)
        self.record.pop(gap, None)

    if ctx.rank == rank:
        setattr(ExpertLoader, "read", read_all_but_one)  # noqa: B010  (mypy forbids the other)
    load_model(path, ctx, experts="reference", progress=False)
