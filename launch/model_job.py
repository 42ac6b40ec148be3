"""What a rank does for a checkpoint: logits of its prompts, greedy decoding, the comparison."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ep_runtime.all2all.base import EPGroup
from ep_runtime.all2all.collectives import Collective, gather_texts
from ep_runtime.distributed import EPContext
from ep_runtime.expert_parallel_model import ExpertParallelModel
from ep_runtime.families import moe_layer_ids
from ep_runtime.launch.report import Check, RankResult, shared_expert_check, worst_of
from ep_runtime.launch.run_config import RunConfig
from ep_runtime.launch.workload import prompts_of, vocab_size_of
from ep_runtime.models import greedy_generate, load_model
from ep_runtime.reference_model import load_reference_model
from ep_runtime.tiny import write_tiny_checkpoint

LOGIT_LIMIT = 2e-4
# Where rows are quantised to fp8 (6e-2 a layer at most): the reference's are not, so that a row
# whose routing or argmax is nearly a tie goes another way, and these are not held to be equal.
FP8_LOGIT_LIMIT = 0.1
Prompts = list[list[int]]


@dataclass(frozen=True)
class ModelOutcome:
    """What the ranks computed; logits_of_dp_rank is there on rank 0 of a checked run alone.

    logits_of_dp_rank[d]: [tokens, vocab] float32 on the CPU, prompt after prompt.
    """

    checkpoint: Path
    prompts_of_dp_rank: list[Prompts]
    eos_token_ids: tuple[int, ...]
    logits_of_dp_rank: list[Tensor]


def run_model(
    config: RunConfig, ctx: EPContext, world: EPGroup
) -> tuple[ExpertParallelModel, RankResult, ModelOutcome]:
    """Load, compute every prompt's logits in one forward, decode; a collective of all ranks."""
    started = time.perf_counter()
    checkpoint = checkpoint_of(config, ctx, world)
    all_prompts = prompts_of(
        config.workload,
        checkpoint,
        dp_size=config.parallel.dp_size,
        vocab_size=vocab_size_of(checkpoint),
    )
    is_checked = config.check == "logits"
    model = load_model(
        checkpoint,
        ctx,
        experts=config.kernel.experts,
        shared_experts=config.shared_experts,
        dtype="float32" if is_checked else None,
    )
    loaded = time.perf_counter()
    prompts = all_prompts[ctx.dp_rank]
    for layer in model.moe_layers:
        layer.record_timings(True)
    before = time.perf_counter()
    logits = compute_logits(model, prompts, ctx.device, every_position=is_checked)
    after = time.perf_counter()
    num_forwards, generated, eos = 1, [], eos_token_ids(model, checkpoint)
    if config.workload.max_new_tokens:
        output = greedy_generate(model, ctx, prompts, config.workload.max_new_tokens, eos)
        num_forwards += output.num_steps
        generated = output.tokens
    decoded = time.perf_counter()
    outcome = ModelOutcome(
        checkpoint,
        all_prompts,
        eos,
        gather_logits(logits, all_prompts, ctx, world) if is_checked else [],
    )
    result = RankResult(
        rank=ctx.rank,
        dp_rank=ctx.dp_rank,
        tp_rank=ctx.tp_rank,
        device=str(ctx.device),
        num_prompts=len(prompts),
        num_tokens=sum(len(prompt) for prompt in prompts),
        layer_calls=num_forwards * len(model.moe_layers),
        shared_expert_calls=sum(layer.stats.shared_expert_calls for layer in model.moe_layers),
        tokens_per_expert=sum_loads(model),
        tokens_per_expert_of_layer=loads_of_layers(model),
        phase_seconds=sum_phases(model),
        seconds={"load": loaded - started, "forward": after - before, "decode": decoded - after},
        generated_tokens=generated,
    )
    return model, result, outcome


def checkpoint_of(config: RunConfig, ctx: EPContext, world: EPGroup) -> Path:
    """The checkpoint's folder; a tiny one is written by rank 0 while the others wait."""
    if config.model.checkpoint is not None:
        return Path(config.model.checkpoint)
    tiny = config.model.tiny
    folder = Path(config.output_dir).expanduser() / "checkpoint"
    if tiny is not None and ctx.rank == 0:
        write_tiny_checkpoint(tiny.family, folder, seed=tiny.seed)
    gather_texts("written", world)
    return folder


def compute_logits(
    model: ExpertParallelModel, prompts: Prompts, device: torch.device, *, every_position: bool
) -> Tensor:
    """[tokens, vocab] of all positions, prompt after prompt, or [P, vocab] of the last ones."""
    longest = max((len(prompt) for prompt in prompts), default=1)
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    input_ids = torch.tensor(padded, dtype=torch.int64).view(-1, longest).to(device)
    is_token = torch.tensor(mask, dtype=torch.int64).view(-1, longest).to(device)
    output = model(
        input_ids=input_ids,
        attention_mask=is_token,
        logits_to_keep=0 if every_position else 1,
    )
    logits: Tensor = output.logits
    return logits[is_token.bool()] if every_position else logits[:, -1]


def eos_token_ids(model: ExpertParallelModel, checkpoint: Path) -> tuple[int, ...]:
    """Where decoding ends: generation_config.json's ids, else config.json's."""
    from transformers import GenerationConfig

    ids: Any = model.config.eos_token_id
    if (checkpoint / "generation_config.json").is_file():
        generation_ids = GenerationConfig.from_pretrained(checkpoint).eos_token_id
        ids = ids if generation_ids is None else generation_ids
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def gather_logits(
    logits: Tensor, prompts_of_dp_rank: Sequence[Prompts], ctx: EPContext, world: EPGroup
) -> list[Tensor]:
    """Every DP rank's logits on rank 0, an empty list on the others; a collective of all."""
    counts = [sum(len(prompt) for prompt in prompts) for prompts in prompts_of_dp_rank]
    own = logits.float().cpu()
    if world.process_group is None:
        return [own]
    padded = own.new_zeros((max(counts), own.shape[1]))
    if ctx.tp_rank == 0:
        padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in range(world.size)] if ctx.rank == 0 else None
    work = dist.gather(padded, gathered, dst=0, async_op=True, group=world.process_group)
    Collective(world, work, waits_on_host=True).join()
    first_ranks = (gathered or [])[:: ctx.parallel.tp_size]
    return [rows[:count] for rows, count in zip(first_ranks, counts, strict=False)]


def sum_loads(model: ExpertParallelModel) -> list[int]:
    """[E] slots on this rank's experts, over all MoE layers."""
    loads = [layer.stats.tokens_per_expert for layer in model.moe_layers]
    return [int(count) for count in torch.stack(loads).sum(dim=0)]


def loads_of_layers(model: ExpertParallelModel) -> dict[str, list[int]]:
    """Decoder layer -> [E] slots on this rank's experts."""
    numbers = moe_layer_ids(model.config)
    return {
        str(number): layer.stats.tokens_per_expert.tolist()
        for number, layer in zip(numbers, model.moe_layers, strict=True)
    }


def sum_phases(model: ExpertParallelModel) -> dict[str, float]:
    """Seconds of each phase, over all MoE layers."""
    total: dict[str, float] = {}
    for layer in model.moe_layers:
        for phase, seconds in layer.timings.items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


@torch.no_grad()
def model_checks(
    config: RunConfig,
    outcome: ModelOutcome,
    ranks: Sequence[RankResult],
    *,
    has_shared: bool,
    in_fp8: bool,
) -> list[Check]:
    """On rank 0: every DP rank's logits and tokens against transformers' own model, which has the
    same weights, dequantised.

    The single-process model takes each prompt alone, without padding. in_fp8: whether the ranks'
    experts multiply rows in fp8.
    """
    if config.check == "off":
        return []
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    reference = load_reference_model(outcome.checkpoint)
    reference.to(ranks[0].device)
    device, max_new_tokens = ranks[0].device, config.workload.max_new_tokens
    reference.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(1, max_new_tokens),
        eos_token_id=list(outcome.eos_token_ids) or None,
        pad_token_id=0,
    )
    largest = 0.0
    differences = []
    other_argmax = other_tokens = 0
    first_of = {rank.dp_rank: rank for rank in ranks if rank.tp_rank == 0}
    for dp_rank, prompts in enumerate(outcome.prompts_of_dp_rank):
        start = 0
        for number, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device=device)
            expected = reference(input_ids=ids, use_cache=False).logits[0].float().cpu()
            got = outcome.logits_of_dp_rank[dp_rank][start : start + len(prompt)]
            start += len(prompt)
            differences.append(float((got - expected).abs().max()))
            largest = max(largest, float(expected.abs().max()))
            other_argmax += int((got.argmax(-1) != expected.argmax(-1)).sum())
            if max_new_tokens:
                mask = torch.ones_like(ids)
                continued = reference.generate(input_ids=ids, attention_mask=mask)
                tokens = continued[0, len(prompt) :].tolist()
                other_tokens += tokens != first_of[dp_rank].generated_tokens[number]
    limit = FP8_LOGIT_LIMIT if in_fp8 else LOGIT_LIMIT
    worst = worst_of(differences) / (largest or 1.0)
    checks = [Check("logits: largest difference / largest logit", worst, limit)]
    if not in_fp8:
        checks.append(Check("logits: tokens with another argmax", other_argmax, 0))
    if max_new_tokens and not in_fp8:
        checks.append(Check("greedy decoding: prompts continued differently", other_tokens, 0))
    return [*checks, shared_expert_check(ranks, has_shared_expert=has_shared)]
