"""Both projections of all experts on Hopper, for many rows: TMA, asynchronous matrix units, Gluon.

Shapes: P positions in expert order (kernels/align_blocks.py), R rows as the caller has them, K
columns summed over, N columns of the result, E experts. Position tiles are 128 rows; tile t belongs
wholly to expert tile_experts[t]. kernels/hopper_reference.py has the definitions.

One program a multiprocessor works through (row tile, column block) pairs; the number of row tiles
is read from the device. Three partitions of warps:

    producer    1 warp, 24 registers    TMA of X [128, 64] and W [256, 64] into a ring of stages
    consumer 0  4 warps, 240 registers  rows 0-63 of the tile: X [64, 64] @ W.T, 64 x 256 float32
    consumer 1  4 warps, 240 registers  rows 64-127, the same W

Rows of 16 bits may also be *gathered*: X is [R, K] as the caller has it, and the producer finds the
row of each position by its slot, so that no pass has to put rows in expert order first. TMA cannot
do that on Hopper (a request a row would be 128 a stage), so the producer then has 4 warps: 8 copies
of 16 bytes a thread and stage (cp.async), into the places where TMA's swizzle would have put them,
none of which it waits for. W comes as before. Registers: 40 for these warps, 232 for consumers.

The numbers are of 16-bit operands (kernels/hopper_kernel_half.py); of e4m3 a block has 128 columns
of K, the same bytes, and consumers wait for block g + 1 before they are done with block g
(kernels/hopper_kernel_fp8.py). Parts common to both: kernels/hopper_producer.py and
hopper_tiles.py.

Why so. 64 x 256 a warp group is the shape that reads the least shared memory for a product, and
its accumulator (128 registers) leaves room for an epilogue in registers. Consumers share a stage's
W, so that 48 KiB feed 128 x 256 x 64 products; tiles of their own (ping-pong) would need twice the
traffic. They are not held together: consumer 1 starts each tile when consumer 0 has finished its
first block (`turn` below, `lead_blocks`), either alone keeps the matrix units busy, and so that
lead of about one epilogue hides the epilogues, each under the other consumer's products.

The epilogue goes straight from registers to memory. In the matrix units' layout a thread holds
pairs of columns 8 apart, which would make 4-byte stores. So W's rows are *shuffled* in shared
memory: of 32 rows, row 8 q + 2 j + b goes to 8 j + 2 q + b, by a 5-D view of W that TMA reads as
it reads any other. Then a thread's values are 8 consecutive columns: 16-byte stores, no shared
memory, no barrier. N (I where gated) has to be a multiple of 32; of other sizes pairs are stored.

Gated activations: a column block is 128 gate rows and the same 128 up rows of W; ungated, 256.

Barriers. S stages; L lead_blocks; n blocks of 64 columns of K a tile (TMA fills the last with
zeros). g counts a program's blocks over all its tiles: block g is in stage g % S, in round g // S.

    barrier   arrivals a phase   phase r completes when        who waits for it, which phase
    full[s]   1, with 48 KiB     block r S + s has landed      consumers before block g: g // S
     gathered 129, with 32 KiB   (below)                       the same
    empty[s]  2, the consumers   both have read block r S + s  producer before block g: g // S - 1
    turn      1, consumer 0      it has finished block L - 1   consumer 1 before block 0 of its
                                 of its r-th tile              r-th tile: r

Gathered, the arrivals at full are the thread's that expects W's bytes and one of each of the 128
threads, which the hardware makes when all copies that the thread has begun have landed
(cp.async.mbarrier.arrive.noinc: counted in the 129, not added to them). A thread begins the copies
of a block only after its own wait for `empty`, so none of them, and no arrival, is early.

Two proxies: cp.async writes by the generic one, wgmma reads by the async one. Write before read: a
consumer thread's wait for `full` orders the copies of all threads before it, and then its own
fence.proxy.async, between that wait and the stage's first wgmma, makes them visible to what it
issues. Read before the next write: a wgmma that has been waited for is fenced implicitly, and that
wait comes before the arrival at `empty`. X's stages are written by copies alone and W's by TMA
alone, so writes never cross proxies. TMA writes by the async proxy: not gathered, no fence.

Waiting for phase -1 passes at once (parity 1 of a fresh barrier). A consumer releases block g when
g + 1 is issued and g is done, so that at most one is outstanding, and a tile's last block before
its epilogue. On e4m3 its wait for block g + 1 comes before the release of g, which the producer
does not need for block g + 1: S is 2 or more. Nothing waits in a circle: the producer waits for the
consumers S blocks behind it;
consumer 1 for consumer 0, which needs L + 1 <= S stages for that; consumer 0 only for the producer.
No parity is mistaken for the next but one: for full and empty because the ring holds S blocks; for
turn because consumer 0 finishes block (r + 1) n + L - 1, which is of its tile r + 1, only after
consumer 1 has released block (r + 1) n + L - 1 - S, which with n >= S is of tile r or later, so
consumer 1 has passed its wait for r. With n < S turn is not used. In the end every wait has been
met; the last arrivals at `empty` are waited for by nobody. Without tiles nothing waits or arrives.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ep_runtime.kernels.base import Activation
from ep_runtime.kernels.devices import (
    H200_MULTIPROCESSORS,
    TMA_ALIGNMENT,
    num_multiprocessors,
    tma_reads,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.hopper_kernel_fp8 import project_fp8_kernel
from ep_runtime.kernels.hopper_kernel_half import project_kernel
from ep_runtime.kernels.hopper_producer import CHUNK
from ep_runtime.kernels.hopper_tiles import (
    BLOCK_M,
    DEFAULT_SCHEDULE,
    SHUFFLED_ROWS,
    STAGE_ROWS,
    HopperSchedule,
    describe_rows,
    describe_weights,
    num_column_blocks,
)

FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16, FP8)


class ExpertTiles(Protocol):
    """Which expert each tile of 128 positions belongs to, and which slot a position holds.

    slots: [max_tiles * 128] int32; the number of slots on the padding of an expert's last tile.
    tile_experts: [max_tiles] int32. num_tiles: [1] int32 on the device; nothing beyond is read.
    """

    @property
    def slots(self) -> Tensor: ...
    @property
    def tile_experts(self) -> Tensor: ...
    @property
    def num_tiles(self) -> Tensor: ...
    @property
    def block_m(self) -> int: ...


@dataclass(frozen=True)
class Fp8Scales:
    """Float32 multipliers of e4m3 operands, contiguous; as kernels/quant/ defines them.

    rows: [P, ceil(K / 128)], one for 128 columns of a row.
    weights: [E, ceil(N / 128), ceil(K / 128)], one for a 128 x 128 block; of a gated w13 the gate's
    blocks, then the up's, each ceil(I / 128).
    out: [P, ceil(I / 128)], written where the first projection's result is to be e4m3; else None.
    """

    rows: Tensor
    weights: Tensor
    out: Tensor | None = None


def project_gate_up_hopper(
    hidden_states: Tensor,
    w13: Tensor,
    tiles: ExpertTiles,
    *,
    activation: Activation,
    out: Tensor,
    bias: Tensor | None = None,
    scales: Fp8Scales | None = None,
    top_k: int | None = None,
    schedule: HopperSchedule = DEFAULT_SCHEDULE,
) -> None:
    """First projection: out[p] = act(w13[expert of p] @ x[p] + bias), by position.

    hidden_states: without top_k x itself, [P, K] bf16, fp16, or e4m3 with scales, contiguous, in
    expert order; padding rows hold 0. With top_k, [R, K] bf16 or fp16 rows that `can_gather` takes:
    x[p] is row slots[p] // top_k, or 0 where slots[p] is R * top_k; rows without a slot are not
    read. w13: [E, 2I, K] of the same dtype, gate rows first, then up ([E, I, K] where not gated).
    bias: [E, 2I] (or [E, I]), or None. out: [P, I] contiguous, 16 bits wide, or e4m3 with
    `scales.out`; every row of the num_tiles tiles is written, padding too, and none beyond. Sums
    and activation in float32, rounded once. Does not wait for the device. Raises PlanError for what
    cannot be read.
    """
    num_columns = w13.shape[1] // 2 if activation.is_gated else w13.shape[1]
    _launch(
        hidden_states,
        w13,
        tiles,
        out=out,
        num_columns=num_columns,
        bias=bias,
        scales=scales,
        activation=activation,
        top_k=top_k,
        topk_weights=None,
        schedule=schedule,
    )


def project_down_hopper(
    activated: Tensor,
    w2: Tensor,
    tiles: ExpertTiles,
    *,
    out: Tensor,
    bias: Tensor | None = None,
    scales: Fp8Scales | None = None,
    topk_weights: Tensor | None = None,
    schedule: HopperSchedule = DEFAULT_SCHEDULE,
) -> None:
    """Second projection: w2[expert of p] @ activated[p] + bias, weighted by slot or by position.

    activated: [P, K] bf16, fp16, or e4m3 with scales, contiguous. w2: [E, N, K] of the same dtype.
    bias: [E, N], or None. topk_weights: float32 contiguous, one a slot. With them out is
    [num_slots, N] contiguous, by slot, and each row is multiplied by its slot's weight in float32;
    slots that no position holds stay unwritten. Without them out is [P, N], by position, every row
    of the num_tiles tiles. Does not wait for the device. Raises PlanError for what TMA cannot read.
    """
    _launch(
        activated,
        w2,
        tiles,
        out=out,
        num_columns=w2.shape[1],
        bias=bias,
        scales=scales,
        activation=None,
        top_k=None,
        topk_weights=topk_weights,
        schedule=schedule,
    )


def check_hopper_gemm(k_size: int, dtype: torch.dtype, block_m: int = BLOCK_M) -> None:
    """Raise PlanError, naming what is in the way, for operands that this kernel cannot take."""
    if dtype not in _DTYPES:
        raise PlanError(f"the Hopper GEMM multiplies bfloat16, float16 or e4m3, not {dtype}")
    if not tma_reads(k_size, dtype.itemsize):
        raise PlanError(
            f"rows of {k_size} {dtype} values are not a multiple of {TMA_ALIGNMENT} bytes, which "
            f"TMA needs; choose the triton experts, or pad the hidden and intermediate sizes"
        )
    if block_m != BLOCK_M:
        raise PlanError(f"the Hopper GEMM takes tiles of {BLOCK_M} positions, not {block_m}")


def can_gather(x: Tensor) -> bool:
    """Whether rows [R, K] can be gathered by slot: 16 bits wide, starts at multiples of 16 bytes.

    Rows may have gaps between them, their values none.
    """
    starts = (x.data_ptr(), x.stride(0) * x.element_size(), x.shape[1] * x.element_size())
    is_aligned = all(start % TMA_ALIGNMENT == 0 for start in starts)
    return x.element_size() == 2 and x.stride(1) == 1 and is_aligned


def _launch(
    x: Tensor,
    w: Tensor,
    tiles: ExpertTiles,
    *,
    out: Tensor,
    num_columns: int,
    bias: Tensor | None,
    scales: Fp8Scales | None,
    activation: Activation | None,
    top_k: int | None,
    topk_weights: Tensor | None,
    schedule: HopperSchedule,
) -> None:
    k_size = x.shape[1]
    check_hopper_gemm(k_size, x.dtype, tiles.block_m)
    _check_tensors(x, w, out, scales, top_k)
    num_positions = x.shape[0] if top_k is None else out.shape[0]
    if num_positions == 0 or num_columns == 0:
        return
    is_gated = activation is not None and activation.is_gated
    num_halves = 2 if is_gated else 1
    block_n = STAGE_ROWS // num_halves
    is_shuffled = schedule.is_shuffled and num_columns % SHUFFLED_ROWS == 0
    max_pairs = num_positions // BLOCK_M * num_column_blocks(num_columns, is_gated=is_gated)
    num_slots = 0
    if top_k is not None:
        num_slots = x.shape[0] * top_k
    elif topk_weights is not None:
        num_slots = out.shape[0]
    gathering = (top_k, None if top_k is None else x.stride(0) // CHUNK)
    on_device = num_multiprocessors(x.device, off_gpu=H200_MULTIPROCESSORS)
    num_programs = min(on_device, max_pairs)
    kernel: Any = project_kernel if scales is None else project_fp8_kernel
    kernel[(num_programs,)](
        x if top_k is not None else describe_rows(x),
        describe_weights(w.view(-1, k_size), block_n, is_shuffled=is_shuffled),
        *(gathering if scales is None else (scales.rows, scales.weights, scales.out)),
        tiles.tile_experts,
        tiles.num_tiles,
        tiles.slots if topk_weights is not None or top_k is not None else None,
        topk_weights,
        bias,
        out,
        num_slots,
        num_columns,
        k_size,
        activation.alpha if activation is not None else None,
        activation.limit if activation is not None else None,
        ACTIVATION=activation.kind.value if activation is not None else "none",
        NUM_HALVES=num_halves,
        HAS_COLUMN_TAIL=num_columns % block_n != 0,
        STAGES=schedule.num_stages,
        GROUP=schedule.group_tiles,
        LEAD=schedule.lead_blocks,
        num_warps=4,
        # 12 warps start with it; setmaxnreg then makes 240, 240 and 24 of three times 168, or 232,
        # 232 and 40.
        maxnreg=168,
    )


def _check_tensors(
    x: Tensor, w: Tensor, out: Tensor, scales: Fp8Scales | None, top_k: int | None
) -> None:
    if (x.dtype is FP8) != (scales is not None):
        raise PlanError(f"rows are {x.dtype}: e4m3 operands need scales, and no others take any")
    is_out_fp8 = scales is not None and scales.out is not None
    if (out.dtype is FP8) != is_out_fp8:
        raise PlanError(f"out is {out.dtype}: e4m3 needs scales.out, and no other dtype takes it")
    if w.dtype != x.dtype or (scales is None and out.dtype != x.dtype):
        raise PlanError(
            f"rows {x.dtype}, weights {w.dtype} and out {out.dtype} must be of one dtype"
        )
    named = {"weights": w, "out": out}
    if top_k is None:
        named["rows"] = x
    elif not can_gather(x):
        raise PlanError(
            f"rows that are gathered by slot must be 16 bits wide and start at multiples of "
            f"{TMA_ALIGNMENT} bytes; these are {x.dtype} {tuple(x.shape)} with strides "
            f"{x.stride()} at {x.data_ptr():#x}"
        )
    if scales is not None:
        named |= {"scales.rows": scales.rows, "scales.weights": scales.weights}
    for name, tensor in named.items():
        if not tensor.is_contiguous():
            raise PlanError(
                f"the Hopper GEMM's {name} must be contiguous; of {tuple(tensor.shape)} the "
                f"strides are {tensor.stride()}"
            )
