"""The producer of the Hopper GEMMs: operands into the ring of stages, by TMA or gathered by slot.

kernels/hopper_gemm.py says how it works together with the consumers.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from ep_runtime.kernels.hopper_tiles import TILE_ROWS, locate_pair, next_stage

# Elements of 16 bits in the 16 bytes that a thread copies at once.
CHUNK = 8
_CHUNK = gl.constexpr(CHUNK)
# Threads that gather, each of which arrives at `full`.
NUM_GATHERING_THREADS = gl.constexpr(128)


@gluon.jit
def locate_rows(x_ptr, gather, tile, BLOCK_K: gl.constexpr):
    """Where the chunks of a tile's rows start, [128, BLOCK_K] pointers, and which are no padding.

    Of 128 threads each has one chunk of 8 rows, 16 rows apart; 8 neighbours have a row's 128 bytes.
    """
    slots_ptr, num_slots, top_k, row_chunks, _ = gather
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, _CHUNK], [4, 8], [4, 1], [1, 0])
    rows = gl.arange(0, TILE_ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))
    slots = gl.load(slots_ptr + tile * TILE_ROWS + rows)
    row_ptrs = x_ptr + (slots // top_k).to(gl.int64) * row_chunks * _CHUNK
    pointers = gl.expand_dims(row_ptrs, 1) + gl.expand_dims(columns, 0)
    return pointers, gl.expand_dims(slots < num_slots, 1)


@gluon.jit
def gather_columns(pointers, is_row, k, k_size, bar, x_stage):
    """BLOCK_K columns of a tile's rows into a stage; 0 on padding and past the last column.

    Each thread arrives at `bar` when its copies have landed; it does not wait for them.
    """
    LAYOUT: gl.constexpr = pointers.type.layout
    BLOCK_K: gl.constexpr = pointers.shape[1]
    # By chunks, so that the compiler sees that a chunk is copied or left out as a whole.
    chunks = (k + gl.arange(0, BLOCK_K, gl.SliceLayout(0, LAYOUT))) // _CHUNK
    mask = is_row & gl.expand_dims(chunks < k_size // _CHUNK, 0)
    async_copy.async_copy_global_to_shared(x_stage, pointers + k, mask=mask)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def load_operands(
    operands,  # X and W, stages, barriers; X is a descriptor, or gathered a pointer
    gather,  # None, or slots_ptr, num_slots, top_k, row_chunks, k_size
    tile_experts_ptr,
    sizes,
    NUM_HALVES: gl.constexpr,
    GROUP: gl.constexpr,
):
    """The producer: fill the stages in the order in which the consumers read them."""
    x, w_desc, x_stages, w_stages, full, empty = operands
    num_tiles, num_blocks, num_columns, num_k_blocks = sizes
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    BLOCK_N: gl.constexpr = 256 // NUM_HALVES
    IS_SHUFFLED: gl.constexpr = len(w_desc.block_shape) == 5
    W_BYTES: gl.constexpr = NUM_HALVES * w_desc.block_type.nbytes
    STAGE_BYTES: gl.constexpr = W_BYTES + (x.block_type.nbytes if gather is None else 0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for index in range(gl.program_id(0), num_tiles * num_blocks, gl.num_programs(0)):
        tile, block = locate_pair(index, num_tiles, num_blocks, GROUP)
        expert = gl.load(tile_experts_ptr + tile)
        w_row = expert * (NUM_HALVES * num_columns) + block * BLOCK_N
        if gather is not None:
            pointers, is_row = locate_rows(x, gather, tile, BLOCK_K)
        for k_block in range(num_k_blocks):
            k = k_block * BLOCK_K
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, STAGE_BYTES)
            if gather is None:
                x_at = [tile * TILE_ROWS, k]
                tma.async_copy_global_to_shared(x, x_at, bar, x_stages.index(stage))
            for half in gl.static_range(NUM_HALVES):
                row = w_row + half * num_columns
                w_stage = w_stages.index(stage * NUM_HALVES + half)
                if IS_SHUFFLED:
                    w_at = [row // 32, 0, 0, 0, k]
                    tma.async_copy_global_to_shared(w_desc, w_at, bar, w_stage)
                else:
                    tma.async_copy_global_to_shared(w_desc, [row, k], bar, w_stage)
            if gather is not None:
                gather_columns(pointers, is_row, k, gather[4], bar, x_stages.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)
