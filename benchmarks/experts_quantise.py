"""Random weights in fewer bits for the experts benchmark, by each scheme's usual rounding.

N output rows, K input columns of one expert, in float32; codes as `QuantizedTensor` lays them out.
All schemes of a seed round the same weights.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.e2m1 import E2M1_VALUES
from ep_runtime.kernels.quant.packing import pack_pairs
from ep_runtime.kernels.quant.scheme import (
    MAX_E4M3,
    MXFP4_GROUP,
    NVFP4_GROUP,
    QuantParameters,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.storage import quantized_tensor, stored_shapes

PACKED_SCHEMES = {
    "int4_g128": QuantScheme(WeightScheme.INT4, group_size=128),
    "int8_g128": QuantScheme(WeightScheme.INT8, group_size=128),
    "mxfp4": QuantScheme(WeightScheme.MXFP4),
    "nvfp4": QuantScheme(WeightScheme.NVFP4),
}
_LARGEST_E2M1 = 6.0
_MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(E2M1_VALUES[:8]))


def packed_weights(
    sizes: tuple[int, int, int],
    scheme: str,
    draw: Callable[[int, int], Tensor] | None,
    device: torch.device,
) -> ExpertWeights:
    """w13 and w2 of E experts.

    sizes: E, H, I. draw: float32 [N, K] of the next projection, w13 of every expert before any w2;
    None: codes of 0 and scales of 1, for what needs no numbers.
    """
    num_experts, size_h, size_i = sizes
    stored = PACKED_SCHEMES[scheme]
    parts: list[tuple[Tensor, QuantParameters]] = []
    for rows, columns, num_parts in ((2 * size_i, size_h, 2), (size_h, size_i, 1)):
        shapes = stored_shapes(stored, rows, columns, num_parts=num_parts, dtype=torch.bfloat16)
        tensors = {
            name: torch.empty((num_experts, *one.shape), dtype=one.dtype, device=device)
            for name, one in shapes.items()
        }
        if draw is None:
            for name, tensor in tensors.items():
                tensor.copy_(torch.tensor(0.0 if name == "values" else 1.0))
        else:
            for expert in range(num_experts):
                for name, tensor in quantise(draw(rows, columns), stored.weight, num_parts).items():
                    tensors[name][expert].view(torch.uint8).copy_(tensor.view(torch.uint8))
        one = quantized_tensor(tensors, stored)
        parts.append((one.values, one.parameters))
    (w13, w13_quant), (w2, w2_quant) = parts
    return ExpertWeights(w13=w13, w2=w2, w13_quant=w13_quant, w2_quant=w2_quant)


def quantise(weight: Tensor, scheme: WeightScheme, num_parts: int) -> dict[str, Tensor]:
    """One projection [N, K] as `values`, `scales` and, of nvfp4, `global_scales` [num_parts].

    int4, int8: the largest of 128 columns becomes 7.5 or 127.5, codes symmetric around the middle.
    mxfp4: the largest of 32 columns lies in [4, 8), so that above 6 is cut off (OCP MX 1.0, 6.3).
    nvfp4: the largest of 16 columns becomes 6; all scales share a float32 that makes theirs 448.
    """
    if scheme is WeightScheme.MXFP4:
        groups = weight.unflatten(-1, (-1, MXFP4_GROUP))
        exponent = groups.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - 2
        codes = _e2m1_codes(groups * torch.exp2(-exponent).unsqueeze(-1))
        return {"values": pack_pairs(codes), "scales": (exponent + 127).to(torch.uint8)}
    if scheme is WeightScheme.NVFP4:
        groups = weight.unflatten(-1, (-1, NVFP4_GROUP))
        largest = groups.abs().amax(-1)
        of_all = largest.max() / (_LARGEST_E2M1 * MAX_E4M3)
        scales = (largest / _LARGEST_E2M1 / of_all).to(torch.float8_e4m3fn)
        codes = _e2m1_codes(groups / (scales.float() * of_all).clamp(min=1e-30).unsqueeze(-1))
        return {
            "values": pack_pairs(codes),
            "scales": scales,
            "global_scales": of_all.repeat(num_parts),
        }
    middle = 8 if scheme is WeightScheme.INT4 else 128
    groups = weight.unflatten(-1, (-1, 128))
    scales = (groups.abs().amax(-1) / (middle - 0.5)).to(torch.bfloat16)
    steps = (groups / scales.float().unsqueeze(-1)).round()
    codes = (steps.clamp(-middle, middle - 1) + middle).to(torch.uint8).flatten(-2)
    return {"values": pack_pairs(codes) if middle == 8 else codes, "scales": scales}


def _e2m1_codes(values: Tensor) -> Tensor:
    """[N, G, g] as the nearest codes [N, G * g] uint8; a tie goes to the larger magnitude."""
    midpoints = torch.tensor(_MIDPOINTS, device=values.device)
    magnitude = torch.bucketize(values.abs(), midpoints, right=True)
    return (magnitude + 8 * (values < 0)).to(torch.uint8).flatten(-2)
