"""Random experts as every scheme stores them."""

from typing import Any

import torch

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.kernels.quant.storage import quantized_tensor, tensors_of
from ep_runtime.launch.seeded_stored import draw_stored

SCHEMES: dict[str, Any] = {
    "fp8_block": "fp8_block",
    "fp8_channel": "fp8_channel",
    "int4": {"weight": "int4_w4a16", "group_size": 32, "has_zero_points": True},
    "int8_act_order": {"weight": "int8_w8a16", "group_size": 64, "has_input_order": True},
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
}


def quantized_moe(scheme: str, **changes: Any) -> MoEConfig:
    """5 experts; neither size is a multiple of 128, and gate and up share a block of w13's rows."""
    values: dict[str, Any] = {
        "hidden_size": 160,
        "moe_intermediate_size": 192,
        "num_experts": 5,
        "top_k": 2,
        "dtype": "bfloat16",
        "quantization": SCHEMES[scheme],
    }
    return MoEConfig(**(values | changes))


def stored_weights(moe: MoEConfig, seed: int = 0) -> dict[str, Any]:
    """What `load_experts` takes, and `reference_layer`."""
    generator = torch.Generator().manual_seed(seed)
    hidden, width = moe.hidden_size, moe.moe_intermediate_size
    num_parts = 2 if moe.experts_activation().is_gated else 1

    def stacked(rows: int, columns: int, num_parts: int) -> QuantizedTensor:
        experts = [
            draw_stored(
                moe.quantization,
                rows,
                columns,
                num_parts=num_parts,
                dtype=moe.torch_dtype,
                generator=generator,
            )
            for _ in range(moe.num_experts)
        ]
        names = tensors_of(experts[0])
        tensors = {name: torch.cat([tensors_of(e)[name] for e in experts]) for name in names}
        return quantized_tensor(tensors, moe.quantization)

    return {
        "w13": stacked(num_parts * width, hidden, num_parts),
        "w2": stacked(hidden, width, 1),
        "router": torch.randn(moe.num_experts, hidden, generator=generator),
    }
