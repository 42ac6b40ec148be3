"""Calls of the Hopper GEMM for its tests: tiles of slots, operands, also quantised ones."""

from dataclasses import dataclass

import torch

from ep_runtime.kernels.base import Activation, ActivationKind
from ep_runtime.kernels.hopper_gemm import FP8, Fp8Scales
from ep_runtime.kernels.hopper_tiles import BLOCK_M, DEFAULT_SCHEDULE, HopperSchedule

SILU = Activation()
UNWRITTEN = 2**31 - 1


@dataclass(frozen=True)
class Tiles:
    slots: torch.Tensor
    tile_experts: torch.Tensor
    num_tiles: torch.Tensor
    block_m: int = BLOCK_M


@dataclass(frozen=True)
class HopperCase:
    """rows: of each expert."""

    name: str
    rows: tuple[int, ...]
    hidden: int
    inner: int
    activation: Activation = SILU
    has_bias: bool = False
    schedule: HopperSchedule = DEFAULT_SCHEDULE

    def __str__(self) -> str:
        return self.name

    @property
    def num_slots(self) -> int:
        return sum(self.rows)

    @property
    def projected(self) -> int:
        """Rows of an expert's w13."""
        return self.inner * (2 if self.activation.is_gated else 1)

    def num_source_rows(self, top_k: int) -> int:
        """An odd number of rows of `top_k` slots that leaves some slots with no position."""
        return (self.num_slots // top_k + 2) | 1

    def tiles(self, device: torch.device, all_slots: int | None = None) -> Tiles:
        """Slots in random order, padded by expert, and two tiles of unwritten memory.

        all_slots: of which `num_slots` have a position; None: these are all.
        """
        all_slots = self.num_slots if all_slots is None else all_slots
        order = torch.randperm(all_slots, generator=torch.Generator().manual_seed(1))
        order = order[: self.num_slots]
        slots, experts = [], []
        for expert, run in enumerate(order.split(list(self.rows))):
            height = -(-len(run) // BLOCK_M)
            slots += [run, torch.full((height * BLOCK_M - len(run),), all_slots)]
            experts += [expert] * height
        slots += [torch.full((2 * BLOCK_M,), UNWRITTEN)]
        return Tiles(
            torch.cat(slots).to(device, torch.int32),
            torch.tensor([*experts, *[UNWRITTEN] * 2], dtype=torch.int32, device=device),
            torch.tensor([len(experts)], dtype=torch.int32, device=device),
        )


SWIGLUOAI = Activation(ActivationKind.SWIGLUOAI, limit=1.0)
GELU = Activation(ActivationKind.GELU)
RELU2 = Activation(ActivationKind.RELU2)
HOPPER_CASES = (
    HopperCase("one full tile", (128,), 256, 256),
    HopperCase("an expert without tiles", (5, 0, 300, 129), 576, 512),
    HopperCase("sizes that divide nothing", (33, 128, 1), 304, 112, SWIGLUOAI, True),
    HopperCase("shuffled with a tail", (200, 70), 416, 160, GELU, True),
    HopperCase("not gated, half a block over", (1000,) * 16, 512, 1152, RELU2, True),
    HopperCase("no tiles", (0, 0), 256, 256),
    HopperCase("one block of K", (128, 3), 64, 32),
    HopperCase("many tiles a program", (2000, 3000, 100), 1152, 1024),
    HopperCase("no lead", (700, 3), 512, 512, schedule=HopperSchedule(lead_blocks=0)),
    HopperCase("lead of 2", (2000, 3), 1024, 512, schedule=HopperSchedule(lead_blocks=2)),
    HopperCase("3 stages", (700, 3), 512, 512, schedule=HopperSchedule(3, group_tiles=3)),
    HopperCase("not shuffled", (700, 3), 512, 512, schedule=HopperSchedule(is_shuffled=False)),
)


def randn(*size: int, seed: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(device, torch.bfloat16)


def spread_rows(
    tiles: Tiles, num_rows: int, hidden: int, *, top_k: int, gap: int, device: torch.device
) -> torch.Tensor:
    """[num_rows, hidden] rows `gap` columns apart, NaN between them and where no slot is used."""
    used = tiles.slots[: int(tiles.num_tiles) * BLOCK_M].long()
    used = used[used < num_rows * top_k] // top_k
    x = torch.full((num_rows, hidden + gap), torch.nan, device=device, dtype=torch.bfloat16)
    x[used, :hidden] = randn(num_rows, hidden, seed=1, device=device)[used]
    return x[:, :hidden]


def quantise_operands(
    x: torch.Tensor, w: torch.Tensor, *, num_parts: int
) -> tuple[torch.Tensor, torch.Tensor, Fp8Scales]:
    """x [P, K] by 128 columns of a row, w [E, N, K] by blocks of 128 x 128 within each part."""
    x_values, x_scales = _quantise_blocks(x, 1)
    parts = [_quantise_blocks(part, 128) for part in w.chunk(num_parts, dim=1)]
    w_values = torch.cat([values.view(torch.uint8) for values, _ in parts], dim=1).view(FP8)
    return x_values, w_values, Fp8Scales(x_scales, torch.cat([s for _, s in parts], dim=1))


def _quantise_blocks(x: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and the scales of blocks of `height` x 128 that bring their largest to 448."""
    rows, columns = x.shape[-2:]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % 128, 0, -rows % height))
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, height))
    largest = blocks.abs().amax((-1, -3)).clamp_min(1e-10)
    wide = largest.repeat_interleave(height, -2).repeat_interleave(128, -1)
    values = padded * (448.0 / wide)
    return values[..., :rows, :columns].to(FP8).contiguous(), (largest / 448.0).contiguous()
