"""vLLM's modular experts classes: Triton, and DeepGEMM's contiguous grouped GEMM.

A call is what vLLM runs between its prepare and its finalize: activations are quantised (fp8),
slots aligned or permuted, both GEMMs, the activation, and the weighted sum over the slots.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.experts_cells import LayerShape, Table
from benchmarks.experts_contenders import Contender, require
from benchmarks.experts_data import RoutedRows
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.scheme import FP8_GROUP
from ep_runtime.launch.environment import package_version

_BLOCK = [FP8_GROUP, FP8_GROUP]  # of e4m3 weights, with one scale
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
# It only bounds buffers of the batched formats, which are not used here.
_MAX_NUM_TOKENS = 256


def vllm_module(name: str) -> Any:
    """One of vLLM's fused_moe modules."""
    return require(f"{_FUSED_MOE}.{name}", "vllm")


@dataclass(frozen=True)
class VllmLayer:
    """One of vLLM's experts objects, and the two weights that it is called with."""

    experts: Any
    w13: Tensor
    w2: Tensor


class VllmExperts(Contender):
    """Base of the classes of one interface; subclasses name theirs."""

    class_of: ClassVar[tuple[str, str]]

    def __init__(self, shape: LayerShape, table: Table, weights: Sequence[ExpertWeights]) -> None:
        super().__init__(shape, table, weights)
        module, name = self.class_of
        self.experts_type = getattr(vllm_module(module), name)
        self.silu = vllm_module("activation").MoEActivation.SILU
        self.num_experts, self.expert_map = self._experts_seen()
        config = self._layer_config()
        self.layers = [self.build_layer(config, one) for one in weights]

    def build_layer(self, config: Any, weights: ExpertWeights) -> VllmLayer:
        """Of one set of weights, in the layout that the class wants."""
        experts = self.experts_type(config, _quant_config(weights))
        return VllmLayer(experts, weights.w13, weights.w2)

    def layer_of(self, rows: RoutedRows, weight_set: int) -> VllmLayer:
        """Whose experts are called with these rows."""
        return self.layers[weight_set]

    def size_n(self) -> int:
        """What the class calls N where it is asked for workspaces."""
        return 2 * self.shape.intermediate_size

    def output_of(self, size: tuple[int, ...], workspace13: Tensor) -> Tensor:
        """Where a call leaves its result: memory of its own, or part of the first workspace."""
        return torch.empty(size, dtype=torch.bfloat16, device=self.device)

    def _experts_seen(self) -> tuple[int, Tensor | None]:
        """Ids of local rows are local; of EP routing global, mapped to local or -1."""
        num_local = self.shape.num_local_experts
        if self.table.routing == "local" or self.shape.ep_size == 1:
            return num_local, None
        num_experts = self.shape.num_experts
        expert_map = torch.full((num_experts,), -1, dtype=torch.int32, device=self.device)
        expert_map[:num_local] = torch.arange(num_local, dtype=torch.int32, device=self.device)
        return num_experts, expert_map

    def _layer_config(self) -> Any:
        config = vllm_module("config")
        return config.FusedMoEConfig(
            num_experts=self.num_experts,
            experts_per_token=self.shape.top_k,
            hidden_dim=self.shape.hidden_size,
            intermediate_size=self.shape.intermediate_size,
            num_local_experts=self.shape.num_local_experts,
            num_logical_experts=self.num_experts,
            activation=self.silu,
            device=self.device,
            routing_method=config.RoutingMethodType.TopK,
            moe_parallel_config=config.FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
            max_num_tokens=_MAX_NUM_TOKENS,
        )

    def token_counts(self, rows: RoutedRows) -> Any:
        """vLLM's `expert_tokens_meta`; None: the host knows no counts."""
        return None

    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        layer = self.layer_of(rows, weight_set)
        counts = self.token_counts(rows)
        is_fp8 = self.table.scheme == "fp8_block"
        ids = rows.global_ids
        num_rows, hidden_size = rows.hidden_states.shape
        *workspace_sizes, output_size = layer.experts.workspace_shapes(
            num_rows,
            self.size_n(),
            hidden_size,
            ids.shape[1],
            self.num_experts,
            self.shape.num_local_experts,
            counts,
            self.silu,
        )
        quantise = vllm_module("utils").moe_kernel_quantize_input

        def call() -> Tensor:
            states, scales = rows.hidden_states, None
            if is_fp8:
                states, scales = quantise(states, None, torch.float8_e4m3fn, False, _BLOCK)
            workspace13, workspace2 = (
                torch.empty(math.prod(size), dtype=torch.bfloat16, device=self.device)
                for size in workspace_sizes
            )
            output = self.output_of(output_size, workspace13)
            layer.experts.apply(
                output,
                states,
                layer.w13,
                layer.w2,
                rows.topk_weights,
                ids,
                self.silu,
                self.num_experts,
                self.expert_map,
                scales,
                None,
                workspace13,
                workspace2,
                counts,
                False,
            )
            return output

        return call

    def facts(self) -> dict[str, Any]:
        return {"vllm": package_version("vllm"), "class": self.class_of[1]}


class VllmTriton(VllmExperts):
    class_of = ("experts.triton_moe", "TritonExperts")

    def facts(self) -> dict[str, Any]:
        """has_tuned_tiles: whether vLLM ships a file of tiles for this shape on this device."""
        shape, tuned = self.shape, vllm_module("fused_moe").get_moe_configs
        key = (shape.num_local_experts, shape.intermediate_size)
        is_fp8 = self.table.scheme == "fp8_block"
        tiles = tuned(*key, "fp8_w8a8", *_BLOCK) if is_fp8 else tuned(*key, None)
        return super().facts() | {"has_tuned_tiles": tiles is not None}


class DeepGemm(VllmExperts):
    """Without counts on the host: buffers for the worst case, as a CUDA graph needs."""

    class_of = ("experts.deep_gemm_moe", "DeepGemmExperts")


class DeepGemmHostCounts(DeepGemm):
    """With the exact counts on the host, as after a dispatch that the host waits for."""

    def token_counts(self, rows: RoutedRows) -> Any:
        num_local = self.shape.num_local_experts
        counts = torch.bincount(rows.local_ids[rows.local_ids >= 0], minlength=num_local).int()
        return vllm_module("modular_kernel").ExpertTokensMetadata(
            expert_num_tokens=counts, expert_num_tokens_cpu=counts.cpu()
        )


def _quant_config(weights: ExpertWeights) -> Any:
    config = vllm_module("config")
    if weights.w13_quant is None or weights.w2_quant is None:
        return config.FUSED_MOE_UNQUANTIZED_CONFIG
    return config.fp8_w8a8_moe_quant_config(
        weights.w13_quant.scales, weights.w2_quant.scales, block_shape=_BLOCK
    )
