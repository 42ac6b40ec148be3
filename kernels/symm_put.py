"""What both puts of `symm_mem` share: their blocks, where a row goes, and the arrival at the end.

Each put launch ends in an arrival: every program adds its share to this rank's counter in the
memory of every peer, with release semantics, after all its stores. The shares of a launch add up to
ARRIVAL_SHARES whatever its grid is, and also with zero rows. Once a wait of this rank has run out,
nothing is put and nobody is told: its peers may still be reading what would be overwritten.

The puts are in `kernels/symm_put_tokens.py` and `kernels/symm_put_results.py`.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import triton
import triton.language as tl

from ep_runtime.kernels.interpreter import is_interpreting

# Rows up to which a row is spread over several programs: the first bytes leave sooner.
FEW_ROWS = 32
RANKS_IN_MASK = 64  # bits of the word that says where a row goes


@dataclass(frozen=True)
class PutTiles:
    """One program's share of a put: a block of rows and of columns, and its warps."""

    block_rows: int
    block_columns: int
    num_warps: int

    def num_blocks(self, num_rows: int, num_columns: int) -> int:
        """Example: 5 rows of 300 columns in blocks of 2 x 128: 3 * 3."""
        return -(-num_rows // self.block_rows) * -(-num_columns // self.block_columns)


def choose_put_tiles(
    hidden_size: int, itemsize: int, *, has_few_rows: bool, min_columns: int = 1
) -> PutTiles:
    """Few rows: 4 KiB a block, so that a row of 14 KiB leaves from four programs at once; many:
    16 KiB, four 16-byte stores a thread in flight. Short rows share a block. In the interpreter
    a program costs 65 us whatever its size."""
    if is_interpreting():
        columns = min(triton.next_power_of_2(hidden_size), 4096)
        return PutTiles(32, max(columns, min_columns), num_warps=4)
    block_bytes, num_warps = (4096, 4) if has_few_rows else (16384, 8)
    elements = block_bytes // itemsize
    columns = max(min(triton.next_power_of_2(hidden_size), elements), min_columns)
    return PutTiles(1 if has_few_rows else elements // columns, columns, num_warps)


@triton.jit
def rank_mask(
    ids_ptr,
    rank_of_ptr,
    rows,
    is_row,
    num_experts,
    first_rank,
    TOP_K: tl.constexpr,
    RANKS_IN_MASK: tl.constexpr,
):
    """[rows] int64: bit b is set where one of a row's experts is on rank first_rank + b."""
    ranks = tl.zeros(rows.shape, dtype=tl.int64)
    for k in tl.static_range(TOP_K):
        ids = tl.load(ids_ptr + rows * TOP_K + k, mask=is_row, other=-1)
        is_routed = (ids >= 0) & (ids < num_experts)
        bits = tl.load(rank_of_ptr + ids, mask=is_routed, other=-1) - first_rank
        is_in_mask = is_routed & (bits >= 0) & (bits < RANKS_IN_MASK)
        bits = tl.where(is_in_mask, bits, 0).to(tl.int64)
        ranks |= tl.where(is_in_mask, 1, 0).to(tl.int64) << bits
    return ranks


@triton.jit
def arrive(
    peers_ptr,
    arrivals_offset,
    rank,
    has_failed,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    SHARES: tl.constexpr,
):
    """Release this program's stores: add its share to this rank's counter at every peer.

    All threads' stores come before the barrier, and the barrier before the thread that releases.
    A failed rank adds nothing.
    """
    peers = tl.arange(0, BLOCK_RANKS)
    is_peer = peers < NUM_RANKS
    bases = tl.load(peers_ptr + peers, mask=is_peer, other=0)
    counters = (bases + arrivals_offset + rank * 8).to(tl.pointer_type(tl.int64))
    share = tl.where(tl.program_id(0) == 0, SHARES + 1 - tl.num_programs(0), 1).to(tl.int64)
    shares = tl.zeros([BLOCK_RANKS], dtype=tl.int64) + share
    tl.debug_barrier()
    arrives = is_peer & (has_failed == 0)
    tl.atomic_add(counters, shares, mask=arrives, sem="release", scope="sys")
