"""vLLM's kernels for packed weights: the fused Marlin MoE, and Triton's `moe_wna16`.

Marlin is called through vLLM's modular class, its weights repacked by vLLM's own functions.
`moe_wna16` is what `fused_experts` runs on packed integers as they are stored.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts_cells import PACKED_BITS, LayerShape, Table
from benchmarks.experts_contenders import Contender, Unavailable, require
from benchmarks.experts_data import RoutedRows
from benchmarks.experts_vllm import VllmExperts, VllmLayer, vllm_module
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.launch.environment import package_version

_UTILS = "vllm.model_executor.layers.quantization.utils"
_CONFIGS = {"int4_g128": "int4_w4a16_moe_quant_config", "int8_g128": "int8_w8a16_moe_quant_config"}


def gptq_words(values: Tensor, bits: int) -> Tensor:
    """GPTQ's layout, which Marlin's repacking starts from: int32 [E, K * bits / 32, N].

    values: as `QuantizedTensor` says. A word holds consecutive columns of a row, lowest bits first.
    """
    num_experts, rows, _ = values.shape
    return values.view(torch.int32).view(num_experts, rows, -1).transpose(1, 2).contiguous()


def quants_of(weights: ExpertWeights) -> tuple[QuantParameters, QuantParameters]:
    """Of w13 and w2, which packed weights have."""
    if weights.w13_quant is None or weights.w2_quant is None:
        raise Unavailable("these weights have no scales")
    return weights.w13_quant, weights.w2_quant


class Marlin(VllmExperts):
    """fused_marlin_moe. A package pruned to one kernel fails on the other formats' first call."""

    class_of = ("experts.marlin_moe", "MarlinExperts")

    def size_n(self) -> int:
        return self.shape.intermediate_size

    def build_layer(self, config: Any, weights: ExpertWeights) -> VllmLayer:
        scheme = self.table.scheme
        if scheme in _CONFIGS:
            return self._integers(config, weights)
        fp4, moe_config = require(f"{_UTILS}.marlin_utils_fp4", "vllm"), vllm_module("config")
        w13_quant, w2_quant = quants_of(weights)
        layer = SimpleNamespace(
            params_dtype=torch.bfloat16,
            num_experts=self.shape.num_local_experts,
            hidden_size=self.shape.hidden_size,
            intermediate_size_per_partition=self.shape.intermediate_size,
        )
        if scheme == "mxfp4":
            w13, w2, *scales = fp4.prepare_moe_mxfp4_layer_for_marlin(
                layer, weights.w13, weights.w2, w13_quant.scales, w2_quant.scales, None, None
            )
            quant_config = moe_config.mxfp4_w4a16_moe_quant_config(scales[0], scales[1])
        else:
            w13, s13, g13, w2, s2, g2 = fp4.prepare_nvfp4_moe_layer_for_marlin(
                layer,
                *(weights.w13, w13_quant.scales, _one_global_scale(w13_quant)),
                *(weights.w2, w2_quant.scales, _one_global_scale(w2_quant)),
                True,
            )
            quant_config = moe_config.nvfp4_w4a16_moe_quant_config(g13, g2, s13, s2)
        return VllmLayer(self.experts_type(config, quant_config), w13, w2)

    def _integers(self, config: Any, weights: ExpertWeights) -> VllmLayer:
        bits, group, _ = PACKED_BITS[self.table.scheme]
        ops, utils = require("vllm._custom_ops", "vllm"), require(f"{_UTILS}.marlin_utils", "vllm")
        order = torch.empty(self.shape.num_local_experts, 0, dtype=torch.int32, device=self.device)
        repacked, scales = [], []
        both = zip((weights.w13, weights.w2), quants_of(weights), strict=True)
        for values, quant in both:
            rows, columns = values.shape[1], quant.scales.shape[2] * group
            words = gptq_words(values, bits)
            repacked.append(ops.gptq_marlin_moe_repack(words, order, columns, rows, bits))
            by_group = quant.scales.transpose(1, 2).contiguous()
            scales.append(utils.marlin_moe_permute_scales(by_group, columns, rows, group))
        quant_config = getattr(vllm_module("config"), _CONFIGS[self.table.scheme])(
            *scales, block_shape=[0, group]
        )
        return VllmLayer(self.experts_type(config, quant_config), *repacked)


def _one_global_scale(quant: QuantParameters) -> Tensor:
    """[E] of nvfp4 weights, whose parts share it here; vLLM keeps one an expert."""
    if quant.global_scales is None:
        raise Unavailable("nvfp4 weights without global scales")
    return quant.global_scales[:, 0].contiguous()


class MoeWna16(Contender):
    """Packed integers as they are stored, two codes a byte; vLLM picks tiles by the row count."""

    def __init__(self, shape: LayerShape, table: Table, weights: Sequence[ExpertWeights]) -> None:
        super().__init__(shape, table, weights)
        if table.scheme not in _CONFIGS:
            raise Unavailable(f"moe_wna16 takes {' and '.join(_CONFIGS)}, not {table.scheme}")
        self._fused_experts = vllm_module("fused_moe").fused_experts
        make_config = getattr(vllm_module("config"), _CONFIGS[table.scheme])
        block_shape = [0, PACKED_BITS[table.scheme][1]]
        self._weights = weights
        self._configs = [
            make_config(*(quant.scales for quant in quants_of(one)), block_shape=block_shape)
            for one in weights
        ]

    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        weights, config = self._weights[weight_set], self._configs[weight_set]

        def call() -> Tensor:
            output: Tensor = self._fused_experts(
                rows.hidden_states,
                weights.w13,
                weights.w2,
                rows.topk_weights,
                rows.local_ids,
                quant_config=config,
            )
            return output

        return call

    def facts(self) -> dict[str, Any]:
        return {"vllm": package_version("vllm"), "function": "fused_experts"}
