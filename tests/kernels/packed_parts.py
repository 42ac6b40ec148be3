"""What Hopper's packed GEMM leaves of a second projection whose K is split."""

from dataclasses import replace

import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.grouped_gemm import GemmRows, project_down_reference
from ep_runtime.kernels.hopper_packed_gemm import (
    PARTS_DTYPE,
    HopperPackedSchedule,
    columns_of_part,
)


def expected_parts(
    plain: ExpertWeights,
    activated: Tensor,
    aligned: AlignedSlots,
    topk_weights: Tensor | None,
    schedule: HopperPackedSchedule,
) -> Tensor:
    """Rows [N * split_k, H] as `project_down_hopper_packed` says, NaN where it writes nothing.

    plain: dequantised. activated: [P, K].
    """
    columns = columns_of_part(activated.shape[1], schedule, aligned.block_m)
    size = (aligned.num_slots * schedule.split_k, plain.w2.shape[1])
    expected = torch.full(size, torch.nan, dtype=PARTS_DTYPE, device=activated.device)
    for part in range(schedule.split_k):
        own = slice(part * columns, (part + 1) * columns)
        project_down_reference(
            GemmRows(activated[:, own]),
            replace(plain, w2=plain.w2[..., own], w2_bias=None if part else plain.w2_bias),
            aligned,
            slot_weights=topk_weights,
            out=expected[part :: schedule.split_k],
        )
    return expected
