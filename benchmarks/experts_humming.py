"""humming, through the adapter that vLLM has for it: an indexed grouped GEMM compiled by NVRTC.

Weights go in as a checkpoint stores them, and vLLM's own conversion repacks them. A call is what
vLLM runs between its prepare and its finalize. humming takes a tile for each projection by the
number of pairs, and aligns the slots once, for the first one's.
"""

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experts_cells import PACKED_BITS, LayerShape, Table
from benchmarks.experts_contenders import Unavailable, require
from benchmarks.experts_data import RoutedRows
from benchmarks.experts_vllm import VllmExperts, VllmLayer
from benchmarks.experts_vllm_packed import quants_of
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.launch.environment import package_version

_UTILS = "vllm.model_executor.layers.quantization.utils.humming_utils"


def checkpoint_config(scheme: str) -> dict[str, Any]:
    """The `quantization_config` under which humming reads the tensors of `checkpoint_tensors`."""
    if scheme == "mxfp4":
        return {"quant_method": "mxfp4"}
    if scheme == "nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    bits, group, _ = PACKED_BITS[scheme]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "type": "int",
        "num_bits": bits,
        "strategy": "group",
        "symmetric": True,
        "group_size": group,
    }


def checkpoint_tensors(scheme: str, values: Tensor, quant: QuantParameters) -> dict[str, Tensor]:
    """One projection of all experts, by suffix, as the scheme's writer lays it out.

    Integers: compressed-tensors' int32 words [E, N, K * bits / 32]; the others as they are.
    """
    if scheme in ("mxfp4", "nvfp4"):
        tensors = {"weight": values, "weight_scale": quant.scales}
        if quant.global_scales is not None:
            tensors["weight_scale_2"] = quant.global_scales
        return tensors
    return {"weight_packed": values.view(torch.int32), "weight_scale": quant.scales}


def entry_for(tiles: Sequence[Sequence[Any]], num_pairs: int) -> Any:
    """Of entries (above, up to, tiles): the tiles for a number of pairs."""
    for above, up_to, entry in tiles:
        if above < num_pairs <= up_to:
            return entry
    raise Unavailable(f"humming has no tiles for {num_pairs} pairs")


class Humming(VllmExperts):
    """humming's default tiles, 16-bit activations."""

    class_of = ("experts.fused_humming_moe", "HummingIndexedExperts")

    def __init__(self, shape: LayerShape, table: Table, weights: Sequence[ExpertWeights]) -> None:
        self._heights: dict[str, int] = {}
        super().__init__(shape, table, weights)

    def build_layer(self, config: Any, weights: ExpertWeights) -> VllmLayer:
        utils = require(_UTILS, "vllm")
        humming = require("vllm.utils.humming", "vllm")
        require("humming", "humming-kernels")
        shape, scheme = self.shape, self.table.scheme
        layer: Any = nn.Module()
        layer.moe_config, layer.params_dtype = config, torch.bfloat16
        layer.local_num_experts = layer.global_num_experts = shape.num_local_experts
        layer.hidden_size = shape.hidden_size
        layer.intermediate_size_per_partition = shape.intermediate_size
        both = zip(("w13", "w2"), (weights.w13, weights.w2), quants_of(weights), strict=True)
        for name, values, quant in both:
            for suffix, tensor in checkpoint_tensors(scheme, values, quant).items():
                parameter = nn.Parameter(tensor, requires_grad=False)
                layer.register_parameter(f"{name}_{suffix}", parameter)
        utils.convert_to_humming_moe_kernel_format(
            layer, checkpoint_config(scheme), input_schema=humming.HummingInputSchema()
        )
        quant_config = utils.get_humming_moe_quant_config(layer)
        experts = _outside_a_forward(self.experts_type)(layer, config, quant_config)
        return VllmLayer(experts, layer.w13_weight, layer.w2_weight)

    def layer_of(self, rows: RoutedRows, weight_set: int) -> VllmLayer:
        """With the one entry of each projection's tiles that this number of pairs takes.

        The adapter would compile all entries, about 20 kernels a projection, to launch the same.
        """
        layer = self.layers[weight_set]
        experts = copy(layer.experts)
        for name in ("w13", "w2"):
            tiles = entry_for(getattr(experts, f"{name}_tuning_config"), rows.local_ids.numel())
            self._heights[name] = tiles["block_shape"][0]
            every_count = [[0, 1 << 30, tiles]]
            setattr(experts, f"{name}_tuning_config", every_count)
            setattr(experts, f"{name}_tuning_config_str", json.dumps(every_count))
        return replace(layer, experts=experts)

    def size_n(self) -> int:
        return self.shape.intermediate_size

    def output_of(self, size: tuple[int, ...], workspace13: Tensor) -> Tensor:
        """The adapter leaves it at the beginning of its first workspace."""
        num_rows, hidden_size = size
        return workspace13[: num_rows * hidden_size].view(num_rows, hidden_size)

    def facts(self) -> dict[str, Any]:
        """block_heights: of the last rows' tiles, by projection; slots are aligned to w13's."""
        package = "humming-kernels"
        heights = {"block_heights": dict(self._heights)}
        return super().facts() | {package: package_version(package)} | heights


def _outside_a_forward(experts_type: Any) -> Any:
    """The class with a count of pairs that does not ask vLLM's forward context, which is not there.

    Without data parallelism the context's answer is the same.
    """

    class OutsideAForward(experts_type):  # type: ignore[misc]
        def get_global_valid_shape_m(self, topk_ids: Tensor) -> int:
            return topk_ids.numel()

    return OutsideAForward
