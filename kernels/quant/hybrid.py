"""A layer's experts in two tiers: the frequently used in NVFP4, the others in NF3.

Frequent experts get more bits, so the error lies where fewer rows go. Each expert is whole in its
tier, gate, up and down. NVFP4 is as modelopt stores it (kernels/quant/nvfp4.py), gate and up with a
float32 scale each; NF3 as kernels/quant/nf3.py defines it. `quantization_config` in config.json:

    quant_method: nvfp4_nf3_hybrid
    nvfp4_group_size: 16
    nf3_group_size: 64
    nf3_codebook: the eight values of NF3, so that a file says what its codes stand for
    nvfp4_experts: {"<decoder layer>": [ids of the experts in NVFP4], ...}

A layer that is not named is not quantised; one whose list is empty is all NF3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.format import Projection, StoredTensor, WeightFormat
from ep_runtime.kernels.quant.nf3 import NF3_VALUES, Nf3Format
from ep_runtime.kernels.quant.nvfp4 import Nvfp4Format, Nvfp4Writer
from ep_runtime.kernels.quant.scheme import (
    NF3_GROUP,
    NVFP4_GROUP,
    QuantizedTensor,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.settings import QuantizationSettings
from ep_runtime.kernels.quant.storage import expert_of, tiers_of

METHOD = "nvfp4_nf3_hybrid"  # of quantization_config
_CURE = "make the checkpoint again with `ep-runtime quantize`"


@dataclass(frozen=True)
class HybridFormat(WeightFormat):
    """How one layer's experts are stored. nvfp4_experts: global ids, rising."""

    nvfp4_experts: tuple[int, ...]

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(WeightScheme.HYBRID, nvfp4_experts=self.nvfp4_experts)

    def of_expert(self, expert: int) -> WeightFormat:
        if expert in self.nvfp4_experts:
            return Nvfp4Format(Nvfp4Writer.MODELOPT)
        return Nf3Format()

    def stored(self, projection: Projection) -> Mapping[str, StoredTensor]:
        raise TypeError("a hybrid stores each expert in its own format: of_expert")

    def convert(self, tensors: Mapping[str, Tensor], projection: Projection) -> QuantizedTensor:
        raise TypeError("a hybrid stores each expert in its own format: of_expert")


def read_hybrid(values: Mapping[str, Any]) -> dict[int, HybridFormat]:
    """Decoder layer -> the format of its experts. Raises ConfigError that names the key."""
    settings = QuantizationSettings(values)
    settings.choice("nvfp4_group_size", (NVFP4_GROUP,), cure=_CURE)
    settings.choice("nf3_group_size", (NF3_GROUP,), cure=_CURE)
    settings.choice("nf3_codebook", (list(NF3_VALUES),), cure=_CURE)
    layers = settings.get("nvfp4_experts")
    if not isinstance(layers, Mapping) or not layers:
        raise settings.error(
            "nvfp4_experts",
            f"({layers!r}) must name, for each layer, its experts in NVFP4; {_CURE}",
        )
    return {
        _layer_number(settings, layer): HybridFormat(_expert_ids(settings, layer, experts))
        for layer, experts in layers.items()
    }


def _layer_number(settings: QuantizationSettings, layer: Any) -> int:
    if not isinstance(layer, str) or not layer.isdecimal():
        raise settings.error("nvfp4_experts", f"has the key {layer!r}, which is no layer's number")
    return int(layer)


def _expert_ids(settings: QuantizationSettings, layer: str, experts: Any) -> tuple[int, ...]:
    is_list = isinstance(experts, list | tuple)
    if not is_list or any(type(one) is not int or one < 0 for one in experts):
        raise settings.error(
            f"nvfp4_experts.{layer}", f"({experts!r}) must be a list of experts' numbers"
        )
    if len(set(experts)) != len(experts):
        raise settings.error(f"nvfp4_experts.{layer}", f"({experts!r}) names an expert twice")
    return tuple(sorted(experts))


def hybrid_config(nvfp4_experts: Mapping[int, tuple[int, ...]]) -> dict[str, Any]:
    """The `quantization_config` that `read_hybrid` reads, by decoder layer."""
    return {
        "quant_method": METHOD,
        "nvfp4_group_size": NVFP4_GROUP,
        "nf3_group_size": NF3_GROUP,
        "nf3_codebook": list(NF3_VALUES),
        "nvfp4_experts": {str(layer): list(ids) for layer, ids in sorted(nvfp4_experts.items())},
    }


def join_tiers(
    nvfp4: QuantizedTensor, nf3: QuantizedTensor, nvfp4_experts: tuple[int, ...]
) -> QuantizedTensor:
    """One projection of all experts of a layer from its two tiers, each in rising order of ids.

    nvfp4: of E4 experts; nf3: of the other E3; either may have none ([0, ...]). nvfp4_experts: the
    global ids of the first, in [0, E4 + E3). ValueError where these are not E4 different ids.
    """
    num_experts = len(nvfp4.values) + len(nf3.values)
    given = set(nvfp4_experts)
    if len(given) != len(nvfp4.values) or not given <= set(range(num_experts)):
        raise ValueError(
            f"nvfp4_experts {nvfp4_experts} must be {len(nvfp4.values)} of {num_experts} experts"
        )
    tiers = tiers_of([expert in given for expert in range(num_experts)])
    parameters = QuantParameters(
        nvfp4.parameters.scales,
        global_scales=nvfp4.parameters.global_scales,
        nf3_values=nf3.values,
        nf3_scales=nf3.parameters.scales,
        tiers=tiers.to(nvfp4.device),
    )
    scheme = QuantScheme(WeightScheme.HYBRID, nvfp4_experts=tuple(sorted(given)))
    return QuantizedTensor(nvfp4.values, parameters, scheme)


def dequantize_hybrid(weight: QuantizedTensor, num_parts: int = 1) -> Tensor:
    """The weight [E, N, K] in float32. Waits for the device."""
    tiers = weight.parameters.tiers
    if tiers is None:
        raise ValueError("hybrid weights have tiers; these have none")
    return torch.cat([dequantize(expert_of(weight, e), num_parts) for e in range(len(tiers))])
