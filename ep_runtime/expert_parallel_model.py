"""transformers' model around our MoE layers: one forward for this rank's prompts."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ep_runtime.expert_loading import LoadReport
from ep_runtime.layer import MoELayer
from ep_runtime.plan import Plan
from ep_runtime.skeleton import Skeleton


@dataclass(frozen=True)
class ModelOutput:
    """logits: [B, n, vocab] in the model's dtype. past_key_values: the cache, or None."""

    logits: Tensor
    past_key_values: Any = None


class MoEBlock(nn.Module):
    """Stands where transformers has an MoE block: flattens [B, n, H] to rows and back."""

    def __init__(self, layer: MoELayer, returns_router_scores: bool) -> None:
        super().__init__()
        self.layer = layer
        self._returns_router_scores = returns_router_scores

    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, None]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self.layer(rows).view(hidden_states.shape)
        return (output, None) if self._returns_router_scores else output


class ExpertParallelModel(nn.Module):
    """A causal language model whose experts are spread over the ranks; `load_model` makes it.

    config: transformers' configuration object. moe_layers: the MoE layers in order. plan: theirs;
    where a checkpoint leaves the experts of some layers unquantised, that of the quantised ones
    (each layer has its own as `layer.plan`). load_report: what this rank read.
    """

    def __init__(
        self, skeleton: Skeleton, layers: Sequence[MoELayer], plan: Plan, report: LoadReport
    ) -> None:
        super().__init__()
        self.transformers_model = skeleton.model
        self.config = skeleton.model.config
        self.moe_layers = tuple(layers)
        self.plan = plan
        self.load_report = report
        self.ctx = layers[0].ctx
        # transformers renamed the argument in 5.2x; the old name would warn in each call.
        parameters = inspect.signature(skeleton.model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> ModelOutput:
        """Compute the logits of this rank's prompts; a collective of the EP group.

        input_ids: [B, n] int64; B may be 0 and differ between ranks, the TP ranks of a DP group
        pass the same. With no rows the dense part is skipped, each MoE layer is called in order
        with [0, H], and the logits are [0, n, vocab].
        attention_mask: [B, past + n], 0 for padding; position_ids [B, n] count its ones where
        they are not given, as transformers' generate does.
        past_key_values: a transformers Cache, extended in place. logits_to_keep: only the last
        so many positions of each row; 0 for all.
        """
        with self.ctx.step(input_ids.numel()):
            return self.forward_in_step(
                input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep
            )

    def forward_in_step(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> ModelOutput:
        """`forward` inside a `ctx.step(input_ids.numel())` that the caller has opened."""
        if input_ids.numel() == 0:
            return self._forward_without_rows(input_ids, past_key_values, logits_to_keep)
        if position_ids is None and attention_mask is not None:
            positions = attention_mask.long().cumsum(-1) - 1
            positions = positions.masked_fill(attention_mask == 0, 0)
            position_ids = positions[:, -input_ids.shape[1] :]
        output = self.transformers_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache or past_key_values is not None,
            logits_to_keep=logits_to_keep,
            **{self._cache_argument: past_key_values},
        )
        return ModelOutput(output.logits, getattr(output, self._cache_argument))

    def _forward_without_rows(
        self, input_ids: Tensor, past_key_values: Any, logits_to_keep: int
    ) -> ModelOutput:
        dtype, device = self.moe_layers[0].moe.torch_dtype, self.ctx.device
        for layer in self.moe_layers:
            layer(torch.empty((0, layer.moe.hidden_size), dtype=dtype, device=device))
        batch, length = input_ids.shape
        kept = min(length, logits_to_keep) if logits_to_keep else length
        logits = torch.empty((batch, kept, self.config.vocab_size), dtype=dtype, device=device)
        return ModelOutput(logits, past_key_values)
