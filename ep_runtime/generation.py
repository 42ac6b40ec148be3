"""Greedy decoding with a KV cache, in which finished and empty ranks go on with zero rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ep_runtime.distributed import EPContext
from ep_runtime.expert_parallel_model import ExpertParallelModel
from ep_runtime.kernels.errors import ConfigError


@dataclass(frozen=True)
class GreedyOutput:
    """What one rank's prompts were continued with.

    tokens: for each prompt its new tokens, the end-of-sequence token included.
    next_token_logits: [P, vocab] after the prompt; last_logits: [P, vocab] that the last token
    was chosen from. num_steps: forwards of the EP group, equal on its ranks.
    """

    tokens: list[list[int]]
    next_token_logits: Tensor
    last_logits: Tensor
    num_steps: int


@torch.no_grad()
def greedy_generate(
    model: ExpertParallelModel,
    ctx: EPContext,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_id: int | Sequence[int] | None = None,
) -> GreedyOutput:
    """Continue this rank's prompts with the likeliest tokens; a collective of the EP group.

    prompts: token ids, at least one each; a rank may have none; the TP ranks of a DP group pass
    the same. Prompts are padded on the left; one that is finished leaves the batch and the
    cache. A rank that has none left goes on with zero rows until all are done, which the ranks
    see in the row counts that a step agrees on.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens ({max_new_tokens}) must be 1 or more")
    if any(len(prompt) == 0 for prompt in prompts):
        raise ConfigError("a prompt has no tokens; give each at least one")
    ends = set(_as_tuple(eos_token_id))
    batch = _Batch(model, prompts, ctx.device)
    tokens: list[list[int]] = [[] for _ in prompts]
    logits = torch.zeros(
        (2, len(prompts), model.config.vocab_size),
        dtype=model.plan.moe.torch_dtype,
        device=ctx.device,
    )
    first, last = logits.unbind()
    num_steps = 0
    while True:
        num_rows = batch.input_ids.numel()
        with ctx.step(num_rows) as counts:
            if not counts.any_rows:
                break
            output = model.forward_in_step(
                batch.input_ids, batch.mask, past_key_values=batch.cache, logits_to_keep=1
            ).logits[:, -1:]
        if batch.prompts:
            last[batch.prompts] = output[:, 0]
            if num_steps == 0:
                first.copy_(last)
            chosen = output[:, 0].argmax(-1)
            for prompt, token in zip(batch.prompts, chosen.tolist(), strict=True):
                tokens[prompt].append(token)
            batch.go_on(
                chosen,
                [
                    i
                    for i, prompt in enumerate(batch.prompts)
                    if len(tokens[prompt]) < max_new_tokens and tokens[prompt][-1] not in ends
                ],
            )
        num_steps += 1
    return GreedyOutput(tokens, first, last, num_steps)


class _Batch:
    """The prompts that are not finished: their cache, mask and next input.

    prompts: numbers of the prompts in rows' order. input_ids: [B, n], first the whole prompts
    padded on the left, then one token each. mask: [B, past + n] int64, 0 for padding.
    """

    def __init__(
        self, model: ExpertParallelModel, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        from transformers import DynamicCache

        self.prompts = list(range(len(prompts)))
        self.cache = DynamicCache(config=model.config) if prompts else None
        longest = max((len(prompt) for prompt in prompts), default=1)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self.input_ids = torch.tensor(padded, dtype=torch.int64).view(-1, longest).to(device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64)
        columns = torch.arange(longest)
        self.mask = (columns >= longest - lengths[:, None]).long().to(device)

    def go_on(self, chosen: Tensor, keep: list[int]) -> None:
        """Feed the chosen tokens [B] next; rows not in `keep` leave."""
        rows = torch.tensor(keep, dtype=torch.int64, device=chosen.device)
        self.input_ids = chosen[rows, None]
        mask = self.mask[rows]
        self.mask = torch.cat([mask, mask.new_ones((len(keep), 1))], dim=1)
        if len(keep) < len(self.prompts):
            self.prompts = [self.prompts[i] for i in keep]
            if not keep:
                self.cache = None
            elif self.cache is not None:
                self.cache.batch_select_indices(rows)


def _as_tuple(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
