"""Both projections of all experts on Hopper with 4-bit weights: TMA, wgmma with W in registers.

Shapes: P positions in expert order (kernels/align_blocks.py), R rows as the caller has them, K
columns summed over, N columns of the result, E experts. Weights as kernels/hopper_packed_layout.py
leaves them; the definitions are those of kernels/grouped_gemm.py on dequantised weights.

One program, or some a multiprocessor, works through (tile, column block) pairs; the number of tiles
is read from the device. Of the second projection an item may be one of `split_k` parts of K, where
there are fewer pairs than multiprocessors: each part leaves a row of float32, and what sums a row's
slots sums them too (kernels/sum_slots.py). Partitions of warps:

    producer   1 warp: a stage's words and factors by TMA, and x of the second projection. Of the
               first, which gathers rows by slot, 4 warps: x by cp.async, as kernels/hopper_gemm.py
    consumers  1, 2 or 4 of 4 warps, each 128 or 64 rows of W: out.T = W @ x.T, so that W is wgmma's
               left operand, in registers, and a tile may be as low as 16 rows

A consumer loads its words from shared memory, 16 bytes a thread for 64 x 64 weights, makes a
fragment of them (kernels/hopper_packed_values.py) while the product of the one before runs
(kernels/hopper_packed_products.py), and stores results from registers: W's rows are in such an
order that a thread holds gate and up of the same, and consecutive, columns.

Barriers, S stages, C consumers, L lead_blocks. Block g is the g-th of 64 * chunks columns of K that
a program takes, over all its items; it is in stage g % S, in round g // S.

    barrier   arrivals a phase   phase r completes when        who waits for it, which phase
    full[s]   1, with its bytes  block r S + s has landed      consumers before block g: g // S
     gathered 129                (and all threads' copies)     the same
    empty[s]  C                  all have read block r S + s   producer before block g: g // S - 1
    turn      1, consumer 0      it has finished block L - 1   consumer 1 before its r-th item: r
                                 of its r-th item

A consumer fetches words of block g + 1 before it releases block g, so it holds two stages and S is
at least 2. Why nothing waits in a circle, and no parity is mistaken, kernels/hopper_gemm.py says.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_runtime.kernels.align_blocks import AlignedSlots
from ep_runtime.kernels.base import Activation
from ep_runtime.kernels.dependent_launch import launch_options
from ep_runtime.kernels.devices import H200_MULTIPROCESSORS, TMA_ALIGNMENT, num_multiprocessors
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.hopper_gemm import can_gather
from ep_runtime.kernels.hopper_packed_kernel import project_packed_kernel
from ep_runtime.kernels.hopper_packed_layout import (
    BLOCK_ROWS,
    CHUNK_COLUMNS,
    MIN_GROUP,
    HopperWords,
)
from ep_runtime.kernels.hopper_packed_products import stages_at_a_time
from ep_runtime.kernels.hopper_producer import CHUNK
from ep_runtime.kernels.sum_slots import PARTS_DTYPE

HEIGHTS = (16, 32, 64, 128)
_DTYPES = (torch.bfloat16, torch.float16)
_REGISTERS = 65536
# Columns that share the one scale of a row, as the kernel counts groups: more than any row has.
_WHOLE_ROW = 1 << 30


@dataclass(frozen=True)
class HopperPackedSchedule:
    """How a launch is laid out; results do not depend on it, but for the order of sums.

    num_consumers: warp groups that multiply: 1, 2 or 4. num_slabs: of 64 rows of W that each has:
    2, or 1 of 2 or 4 consumers, so that more of them take turns at converting and multiplying.
    num_chunks: 64 columns each, of a stage. group_tiles: as HopperSchedule's. programs_per_sm: of
    the grid. scales_sums: a group's scale multiplies its sum of products, exactly, instead of its
    weights (which rounds them as dequantised 16-bit weights are): up to 64 rows a tile. cuts_tiles:
    a tile of which half is empty, an expert's last, is multiplied as half of one, after all tall
    tiles (`AlignedSlots`), so that programs have about as many of each; with code of its own: not
    with scales_sums. lead_blocks: by how many stages consumer 1 of two lets consumer 0 go
    ahead in each item; 0 lets both go. split_k: parts of K that an item's products are cut into, of
    the second projection, each a row of the result (`project_down_hopper_packed`).
    """

    num_consumers: int = 2
    num_chunks: int = 2
    num_stages: int = 4
    group_tiles: int = 8
    programs_per_sm: int = 1
    scales_sums: bool = False
    cuts_tiles: bool = False
    lead_blocks: int = 0
    num_slabs: int = 2
    split_k: int = 1

    def __post_init__(self) -> None:
        if self.num_consumers not in (1, 2, 4):
            raise PlanError(f"num_consumers ({self.num_consumers}) must be 1, 2 or 4")
        if self.num_slabs not in (1, 2) or self.num_consumers * self.num_slabs < 2:
            raise PlanError(
                f"num_slabs ({self.num_slabs}) must be 2, or 1 for num_consumers 2 or 4; "
                f"num_consumers is {self.num_consumers}"
            )
        if self.num_chunks * self.num_slabs < 2:
            raise PlanError("num_chunks (1) with num_slabs 1: a stage must have two steps; take 2")
        if self.num_stages < 2:
            raise PlanError(f"num_stages ({self.num_stages}) must be at least 2")
        has_turns = self.num_consumers == 2 and not self.scales_sums
        if self.lead_blocks and not (has_turns and self.lead_blocks < self.num_stages):
            raise PlanError(
                f"lead_blocks ({self.lead_blocks}) is for two consumers without scales_sums, and "
                f"must be below num_stages ({self.num_stages})"
            )
        if self.cuts_tiles and self.scales_sums:
            raise PlanError("cuts_tiles and scales_sums cannot be combined: leave one out")
        if self.split_k < 1:
            raise PlanError(f"split_k ({self.split_k}) must be at least 1")


def columns_of_part(k_size: int, schedule: HopperPackedSchedule, height: int) -> int:
    """Columns of K that each of `split_k` parts has: whole stages, as many as run at a time. Of the
    last parts some, or all, are past the end; these count as 0.

    Example: K 1000 in 3 parts, stages of 128 columns: 384, so that the last has 232.
    """
    at_a_time = 1
    if not schedule.scales_sums:
        at_a_time = stages_at_a_time(schedule.num_chunks, schedule.num_slabs, height == HEIGHTS[-1])
    columns: int = CHUNK_COLUMNS * schedule.num_chunks * at_a_time
    return -(-k_size // (columns * schedule.split_k)) * columns


def project_gate_up_hopper_packed(
    hidden_states: Tensor,
    w13: HopperWords,
    tiles: AlignedSlots,
    *,
    activation: Activation,
    out: Tensor,
    top_k: int,
    bias: Tensor | None = None,
    schedule: HopperPackedSchedule,
) -> None:
    """First projection, rows gathered by slot: out[p] = act(w13[expert of p] @ x[p] + bias).

    hidden_states: [R, K] bf16 or fp16 that `can_gather` takes; x[p] is row slots[p] // top_k; other
    rows are not read. bias: [E, 2I] (or [E, I]), or None. out: [P, I] contiguous, by position;
    padding and positions past the last tile stay unwritten. Does not wait for the device. PlanError
    for what cannot be read.
    """
    _launch(
        hidden_states,
        w13,
        tiles,
        out=out,
        bias=bias,
        activation=activation,
        top_k=top_k,
        topk_weights=None,
        schedule=schedule,
    )


def project_down_hopper_packed(
    activated: Tensor,
    w2: HopperWords,
    tiles: AlignedSlots,
    *,
    out: Tensor,
    topk_weights: Tensor | None,
    bias: Tensor | None = None,
    schedule: HopperPackedSchedule,
) -> None:
    """Second projection: out[slot of p] = slot's weight * (w2[expert] @ activated[p] + bias).

    activated: [P, K] bf16 or fp16, rows 16 bytes or a multiple apart. topk_weights: [N] float32,
    contiguous; None: 1. bias: [E, H], or None. out: [N, H] contiguous, by slot; slots that no
    position holds stay unwritten. With split_k parts it is [N * split_k, H] in PARTS_DTYPE, and row
    s * split_k + p is slot s's over columns [p * c, (p + 1) * c) of K, c as `columns_of_part` says,
    weighted; the bias is in part 0. Does not wait for the device. PlanError for what cannot be
    read.
    """
    _launch(
        activated,
        w2,
        tiles,
        out=out,
        bias=bias,
        activation=None,
        top_k=None,
        topk_weights=topk_weights,
        schedule=schedule,
    )


def _launch(
    x: Tensor,
    weights: HopperWords,
    tiles: AlignedSlots,
    *,
    out: Tensor,
    bias: Tensor | None,
    activation: Activation | None,
    top_k: int | None,
    topk_weights: Tensor | None,
    schedule: HopperPackedSchedule,
) -> None:
    _check(x, weights, tiles, out, schedule, gathers=top_k is not None)
    k_size, num_columns = x.shape[1], weights.num_columns
    consumers, chunks = schedule.num_consumers, schedule.num_chunks
    blocks = consumers * schedule.num_slabs // 2
    num_positions = x.shape[0] if top_k is None else out.shape[0]
    if num_positions == 0 or num_columns == 0:
        return
    width = (64 if weights.is_gated else 128) * blocks
    group = weights.group_size or _WHOLE_ROW
    factor_box = [blocks, max(1, CHUNK_COLUMNS * chunks // group), weights.factors.shape[-1]]
    num_slots = out.shape[0] // schedule.split_k if top_k is None else x.shape[0] * top_k
    max_items = num_positions // tiles.block_m * -(-num_columns // width) * schedule.split_k
    on_device = num_multiprocessors(x.device, off_gpu=H200_MULTIPROCESSORS)
    programs = min(on_device * schedule.programs_per_sm, max_items)
    max_registers, consumer_registers = _registers(schedule, gathers=top_k is not None)
    kernel: Any = project_packed_kernel
    kernel[(programs,)](
        x if top_k is not None else _describe_rows(x, tiles.block_m),
        _describe(weights.words.flatten(0, 1), [blocks, 4 * chunks, 256], 32),
        _describe(weights.factors.flatten(0, 1), factor_box, 16),
        top_k,
        None if top_k is None else x.stride(0) // CHUNK,
        tiles.tile_experts,
        tiles.tile_order if schedule.cuts_tiles else None,
        tiles.tile_order.numel(),
        tiles.num_tiles,
        tiles.num_tall_tiles,
        tiles.slots,
        topk_weights,
        bias,
        weights.global_scales,
        out,
        num_slots,
        num_columns,
        k_size,
        activation.alpha if activation is not None else None,
        activation.limit if activation is not None else None,
        ACTIVATION=activation.kind.value if activation is not None else "none",
        HEIGHT=tiles.block_m,
        GROUP=group,
        CHUNKS=chunks,
        STAGES=schedule.num_stages,
        NUM_CONSUMERS=consumers,
        SLABS=schedule.num_slabs,
        HAS_COLUMN_TAIL=num_columns % width != 0,
        GROUP_TILES=schedule.group_tiles,
        CONSUMER_REGISTERS=consumer_registers,
        SCALES_SUMS=schedule.scales_sums,
        LEAD=schedule.lead_blocks,
        STORED=weights.stored,
        SPLIT=schedule.split_k,
        num_warps=4,
        maxnreg=max_registers,
        **launch_options(x.device),
    )


def _check(
    x: Tensor,
    weights: HopperWords,
    tiles: AlignedSlots,
    out: Tensor,
    schedule: HopperPackedSchedule,
    *,
    gathers: bool,
) -> None:
    """PlanError, naming what is in the way, for operands that the kernel cannot take."""
    dtype, split_k = weights.factors.dtype, schedule.split_k
    if split_k > 1 and gathers:
        raise PlanError(
            f"split_k ({split_k}) is for the second projection: activations take whole sums; leave "
            f"it out of the first"
        )
    if split_k > 1 and (out.dtype != PARTS_DTYPE or out.shape[0] % split_k):
        raise PlanError(
            f"out {out.dtype} {tuple(out.shape)} of split_k ({split_k}) parts must be "
            f"{PARTS_DTYPE}, and its rows as many for each slot"
        )
    of_out = dtype if split_k > 1 else out.dtype
    if dtype not in _DTYPES or x.dtype != dtype or of_out != dtype:
        raise PlanError(
            f"rows {x.dtype}, scales {dtype} and out {out.dtype} of Hopper's packed GEMM must be "
            f"of one dtype, bfloat16 or float16"
        )
    if tiles.block_m not in HEIGHTS:
        raise PlanError(f"Hopper's packed GEMM takes tiles of {HEIGHTS} rows, not {tiles.block_m}")
    if schedule.cuts_tiles and tiles.block_m == HEIGHTS[0]:
        raise PlanError(f"cuts_tiles has no half of tiles of {HEIGHTS[0]} rows; leave it out")
    if schedule.scales_sums and tiles.block_m > 64:
        raise PlanError(f"scales_sums takes tiles of up to 64 rows, not {tiles.block_m}")
    group = weights.group_size
    if group is not None and (group < MIN_GROUP or group & (group - 1)):
        raise PlanError(
            f"group_size ({group}) must be a power of two from {MIN_GROUP} on for Hopper's packed "
            f"GEMM; repack the weights with pack_weight, for the Triton kernels"
        )
    if schedule.scales_sums and group is not None and group < CHUNK_COLUMNS:
        raise PlanError(f"scales_sums takes no groups of {group} columns; leave it out")
    chunks = -(-x.shape[1] // CHUNK_COLUMNS)
    width = BLOCK_ROWS // 2 if weights.is_gated else BLOCK_ROWS
    expected = (-(-weights.num_columns // width), 4 * chunks, 256)
    if weights.words.shape[1:] != expected or out.shape[1] != weights.num_columns:
        raise PlanError(
            f"words of an expert {tuple(weights.words.shape[1:])} and out {tuple(out.shape)} must "
            f"be {expected} and [.., {weights.num_columns}] for rows {tuple(x.shape)}"
        )
    if not can_gather(x) if gathers else not _can_describe(x):
        raise PlanError(
            f"rows must start at multiples of {TMA_ALIGNMENT} bytes; these are {x.dtype} "
            f"{tuple(x.shape)} with strides {x.stride()} at {x.data_ptr():#x}"
        )
    for name, tensor in (("out", out), ("words", weights.words), ("factors", weights.factors)):
        if not tensor.is_contiguous():
            raise PlanError(
                f"{name} must be contiguous for Hopper's packed GEMM; of {tuple(tensor.shape)} the "
                f"strides are {tensor.stride()}"
            )


def _can_describe(x: Tensor) -> bool:
    """Whether TMA can read [P, K] rows of 16 bits."""
    starts = (x.data_ptr(), x.stride(0) * x.element_size())
    return x.stride(1) == 1 and all(start % TMA_ALIGNMENT == 0 for start in starts)


def _registers(schedule: HopperPackedSchedule, *, gathers: bool) -> tuple[int, int]:
    """A thread's at the start, and a consumer's when they have been dealt out anew."""
    groups = schedule.num_consumers + 1  # of 128 threads; a single producer's warp counts as one
    share = _REGISTERS // 128 // schedule.programs_per_sm
    start = min(share // groups // 8 * 8, 248)
    loader = 40 if gathers else 24
    dealt = start * groups - loader
    return start, min(dealt // schedule.num_consumers // 8 * 8, 240)


def _describe_rows(x: Tensor, height: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [height, CHUNK_COLUMNS], layout)


def _describe(x: Tensor, block: list[int], bits: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(0, bits, len(block))
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
