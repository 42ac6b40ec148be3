"""What a packed GEMM leaves of a second projection whose K is split."""

from dataclasses import replace

import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.grouped_gemm import GemmRows, project_down_reference
from ep_runtime.kernels.sum_slots import PARTS_DTYPE


def expected_parts(
    plain: ExpertWeights,
    activated: Tensor,
    aligned: AlignedSlots,
    topk_weights: Tensor | None,
    columns: int,
    split_k: int,
) -> Tensor:
    """Rows [N * split_k, H] of parts of so many columns each, NaN where nothing is written.

    plain: dequantised. activated: [P, K].
    """
    size = (aligned.num_slots * split_k, plain.w2.shape[1])
    expected = torch.full(size, torch.nan, dtype=PARTS_DTYPE, device=activated.device)
    for part in range(split_k):
        own = slice(part * columns, (part + 1) * columns)
        project_down_reference(
            GemmRows(activated[:, own]),
            replace(plain, w2=plain.w2[..., own], w2_bias=None if part else plain.w2_bias),
            aligned,
            slot_weights=topk_weights,
            out=expected[part::split_k],
        )
    return expected
