"""What the experts benchmark measures: layer shapes, tables, cells, and the formulas behind them.

A cell is one layer shape with M tokens on every rank of its EP group. Nothing here needs Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ep_runtime.kernels.quant.scheme import FP8_GROUP, MXFP4_GROUP, NVFP4_GROUP

# What a roofline is drawn with, on one H200: bytes read, bf16 and fp8 products. Fixed; a run's own
# are in "ceilings".
BYTES_PER_SECOND = 4.27e12
# Packed weights are multiplied in bf16.
FLOPS_PER_SECOND = {
    "bf16": 795e12,
    "fp8_block": 1590e12,
    **dict.fromkeys(("int4_g128", "int8_g128", "mxfp4", "nvfp4"), 795e12),
}
# Of packed schemes: bits of a weight, columns that share a scale, bytes of that.
PACKED_BITS = {
    "int4_g128": (4, 128, 2),
    "int8_g128": (8, 128, 2),
    "mxfp4": (4, MXFP4_GROUP, 1),
    "nvfp4": (4, NVFP4_GROUP, 1),
}


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer over an EP group, seen by rank 0, which holds the first experts."""

    name: str
    num_experts: int
    ep_size: int
    hidden_size: int
    intermediate_size: int
    top_k: int

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.ep_size

    def expert_bytes(self, scheme: str) -> int:
        """Bytes of one expert's w13 and w2 as stored, scales included.

        Example: hidden 4096, intermediate 1536: 37,748,736 in bf16, 18,878,976 in fp8_block,
        9,732,096 in int4_g128. The three float32 of an expert in nvfp4 are not counted.
        """
        num_weights = 3 * self.hidden_size * self.intermediate_size
        if scheme in PACKED_BITS:
            bits, group, scale_bytes = PACKED_BITS[scheme]
            of_w13 = 2 * self.intermediate_size * -(-self.hidden_size // group)
            of_w2 = self.hidden_size * -(-self.intermediate_size // group)
            return num_weights * bits // 8 + scale_bytes * (of_w13 + of_w2)
        if scheme == "bf16":
            return 2 * num_weights
        blocks_h = -(-self.hidden_size // FP8_GROUP)
        blocks_i = -(-self.intermediate_size // FP8_GROUP)
        return num_weights + 4 * 3 * blocks_h * blocks_i

    def flops(self, num_pairs: float) -> float:
        """Of both projections of `num_pairs` (row, expert) pairs, a multiply and an add each."""
        return num_pairs * 6 * self.hidden_size * self.intermediate_size


SHAPES = {
    shape.name: shape
    for shape in (
        LayerShape("qwen3_235b_ep2", 128, 2, 4096, 1536, 8),
        LayerShape("deepseek_v3_ep32", 256, 32, 7168, 2048, 8),
        LayerShape("deepseek_v3_ep2", 256, 2, 7168, 2048, 8),
        LayerShape("mixtral_8x7b", 8, 1, 4096, 14336, 2),
    )
}


@dataclass(frozen=True)
class Target:
    """What this project's time over another's is to be at most.

    over: peers, of which the fastest that is right is taken in each cell; empty: this project's own
    time for a byte of weights in the table `per_byte_of`, where both are bound by memory.
    largest, geometric_mean: over the cells; None: not asked. tokens_per_rank: of which cells; None:
    of all.
    """

    over: tuple[str, ...] = ()
    largest: float | None = None
    geometric_mean: float | None = None
    tokens_per_rank: int | None = None
    per_byte_of: str | None = None


@dataclass(frozen=True)
class Table:
    """Cells that are read together.

    routing: `local`: M rows, each with top_k of this rank's experts, as many pairs as M tokens on
    every rank bring here. `ep`: M tokens on every rank choose among all experts; of them the rows
    that landed on rank 0, with -1 in the slots of other ranks' experts.
    implementations: in the order of the columns; the first is this project's.
    baseline: what this project's time is held against beside its peers, or None.
    targets: what is asked of this project's times.
    """

    name: str
    title: str
    scheme: str
    routing: str
    implementations: tuple[str, ...]
    baseline: str | None = None
    targets: tuple[Target, ...] = ()

    def has(self, shape: LayerShape) -> bool:
        """Whether the shape is in it: without other ranks no slot is empty."""
        return self.baseline is None or shape.ep_size > 1


TABLES = {
    table.name: table
    for table in (
        Table(
            "bf16",
            "bf16, every slot local",
            "bf16",
            "local",
            ("ep_runtime", "triton_kernels", "vllm_triton"),
        ),
        Table(
            "bf16_empty_slots",
            "bf16, EP routing with -1 slots; packed: its pairs as rows of one slot",
            "bf16",
            "ep",
            ("ep_runtime", "ep_runtime_packed", "vllm_triton"),
            baseline="ep_runtime_packed",
        ),
        Table(
            "fp8_block",
            "fp8 block, EP routing with -1 slots",
            "fp8_block",
            "ep",
            ("ep_runtime", "vllm_triton", "deep_gemm", "deep_gemm_host_counts"),
        ),
        Table(
            "int4_g128",
            "int4, a scale for 128 columns, every slot local",
            "int4_g128",
            "local",
            ("ep_runtime", "humming", "marlin", "moe_wna16", "ep_runtime_marlin"),
            targets=(
                Target(("humming", "marlin"), largest=1.0, geometric_mean=0.9),
                Target(("humming", "marlin"), largest=0.92, tokens_per_rank=4096),
                Target(("moe_wna16",), geometric_mean=1 / 3),
            ),
        ),
        Table(
            "mxfp4",
            "MXFP4, every slot local",
            "mxfp4",
            "local",
            ("ep_runtime", "triton_kernels", "humming", "marlin", "ep_runtime_marlin"),
            targets=(Target(("triton_kernels",), geometric_mean=0.75),),
        ),
        Table(
            "nvfp4",
            "NVFP4, every slot local",
            "nvfp4",
            "local",
            ("ep_runtime", "humming", "marlin", "ep_runtime_marlin"),
            targets=(Target(per_byte_of="int4_g128", largest=1.15),),
        ),
        Table(
            "int8_g128",
            "int8, a scale for 128 columns, every slot local",
            "int8_g128",
            "local",
            ("ep_runtime", "humming", "marlin", "moe_wna16", "ep_runtime_marlin"),
            targets=(Target(per_byte_of="int4_g128", largest=1.15),),
        ),
    )
}
TOKENS_PER_RANK = (1, 8, 32, 128, 512, 4096)


@dataclass(frozen=True)
class Cell:
    """One row of a table. tokens_per_rank: M."""

    table: Table
    shape: LayerShape
    tokens_per_rank: int

    @property
    def num_input_sets(self) -> int:
        """Sets of rows that take turns, so that no call finds its own in the cache."""
        return 4 if self.tokens_per_rank <= 128 else 2

    @property
    def calls_per_graph(self) -> int:
        """Many where calls are short, so that what a replay costs is lost among them."""
        return 8 if self.tokens_per_rank <= 128 else 2


def cells_of(
    tables: Sequence[str], shape: LayerShape, tokens_per_rank: Sequence[int]
) -> list[Cell]:
    """The cells of one shape, table by table."""
    return [
        Cell(TABLES[name], shape, num_tokens)
        for name in tables
        for num_tokens in tokens_per_rank
        if TABLES[name].has(shape)
    ]


@dataclass(frozen=True)
class Work:
    """What a cell asks for, mean over its input sets; its roofline is what no kernel can beat.

    rows: rows that landed. pairs: of a row and a local expert. active_experts: with a pair or more.
    """

    rows: float
    pairs: float
    active_experts: float
    weight_bytes: float
    flops: float
    roofline_us: float
    bound: str


def work_of(cell: Cell, *, rows: float, pairs: float, active_experts: float) -> Work:
    """The larger of the active experts' bytes over BYTES_PER_SECOND and FLOPs over their rate.

    Example: 64 active experts of 37,748,736 bytes at 4.27 TB/s: 566 us.
    """
    shape, scheme = cell.shape, cell.table.scheme
    weight_bytes = active_experts * shape.expert_bytes(scheme)
    flops = shape.flops(pairs)
    memory_us = weight_bytes / BYTES_PER_SECOND * 1e6
    compute_us = flops / FLOPS_PER_SECOND[scheme] * 1e6
    return Work(
        rows=rows,
        pairs=pairs,
        active_experts=active_experts,
        weight_bytes=weight_bytes,
        flops=flops,
        roofline_us=max(memory_us, compute_us),
        bound="memory" if memory_us >= compute_us else "compute",
    )
