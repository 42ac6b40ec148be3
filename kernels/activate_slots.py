"""The activation between two GEMMs that do not apply it themselves: of slots, or of all rows.

Shapes: R rows, K slots a row, N = R * K slots, I intermediate size.
"""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation, StandardExpertInput
from ep_runtime.kernels.dependent_launch import await_predecessor, launch_options
from ep_runtime.kernels.grouped_gemm import activate
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch
from ep_runtime.kernels.launch import PreparedLaunch

_NUM_WARPS = 8


def activate_slots(
    gate_up: Tensor,
    expert_input: StandardExpertInput,
    activation: Activation,
    *,
    num_local_experts: int,
    out: Tensor,
) -> None:
    """out[s] = activation(gate_up[s]) for each slot s that is on this rank, computed in float32.

    gate_up: [N, 2I] contiguous, gate first, then up; [N, I] where not gated. out: [N, I]
    contiguous, in the same dtype. Slots whose id is outside [0, num_local_experts), and those of
    rows from num_rows on, are neither read nor written. Moves 3 * I elements a slot. One launch;
    does not wait for the device.
    """
    num_slots, width = out.shape
    if num_slots == 0:
        return
    prepare_launch(out.device)
    ids = expert_input.topk_ids.contiguous()
    block_slots, block_columns = _block_of(width)
    num_blocks = triton.cdiv(width, block_columns)
    _activate_slots_kernel[(triton.cdiv(num_slots, block_slots) * num_blocks,)](
        gate_up,
        ids,
        expert_input.num_rows,
        out,
        num_slots,
        ids.shape[1],
        width,
        num_local_experts,
        activation.alpha,
        activation.limit,
        ACTIVATION=activation.kind.value,
        IS_GATED=activation.is_gated,
        BLOCK_SLOTS=block_slots,
        BLOCK_COLUMNS=block_columns,
        num_warps=_NUM_WARPS,
        **launch_options(out.device),
    )


class RowActivation:
    """`apply_activation` of rows, in one launch a call; plain torch takes four."""

    def __init__(self, activation: Activation, width: int, device: torch.device) -> None:
        """width: I."""
        self._width = width
        self._block_rows, self._block_columns = _block_of(width)
        self._launch = PreparedLaunch(
            _activate_slots_kernel,
            device,
            options={"num_warps": _NUM_WARPS},
            top_k=1,
            width=width,
            num_experts=0,
            alpha=activation.alpha,
            limit=activation.limit,
            ACTIVATION=activation.kind.value,
            IS_GATED=activation.is_gated,
            BLOCK_SLOTS=self._block_rows,
            BLOCK_COLUMNS=self._block_columns,
            IS_DEPENDENT=False,
        )

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [R, 2I] contiguous, gate first; [R, I] where not gated. A fresh [R, I]."""
        num_rows = gate_up.shape[0]
        out = gate_up.new_empty((num_rows, self._width))
        if num_rows:
            blocks = triton.cdiv(num_rows, self._block_rows)
            grid = (blocks * triton.cdiv(self._width, self._block_columns),)
            self._launch(grid, gate_up, None, None, out, num_rows)
        return out


def _block_of(width: int) -> tuple[int, int]:
    """Slots and columns of a program."""
    if is_interpreting():  # a program costs 65 us whatever its size
        return 64, min(triton.next_power_of_2(width), 4096)
    return 4, min(triton.next_power_of_2(width), 512)


def activate_slots_reference(
    gate_up: Tensor,
    expert_input: StandardExpertInput,
    activation: Activation,
    *,
    num_local_experts: int,
    out: Tensor,
) -> None:
    """The definition of `activate_slots`."""
    ids = expert_input.topk_ids
    is_own = (ids >= 0) & (ids < num_local_experts)
    if expert_input.num_rows is not None:
        rows = torch.arange(ids.shape[0], device=ids.device)
        is_own &= (rows < expert_input.num_rows)[:, None]
    slots = is_own.flatten()
    out[slots] = apply_activation(gate_up[slots].float(), activation).to(out.dtype)


@triton.jit(do_not_specialize=["num_slots"])
def _activate_slots_kernel(
    gate_up_ptr,  # [N, 2I] or [N, I]
    ids_ptr,  # [R, K], or None: every slot
    num_rows_ptr,  # [1] or None
    out_ptr,  # [N, I]
    num_slots,
    top_k,
    width,
    num_experts,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program a block of slots and of columns."""
    await_predecessor(IS_DEPENDENT)
    num_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    block = tl.program_id(0)
    slots = (block // num_blocks).to(tl.int64) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    columns = block % num_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_slot = slots < num_slots
    if num_rows_ptr is not None:
        is_slot &= slots < tl.load(num_rows_ptr).to(tl.int64) * top_k
    if ids_ptr is not None:
        ids = tl.load(ids_ptr + slots, mask=is_slot, other=-1)
        is_slot = (ids >= 0) & (ids < num_experts)
    mask = is_slot[:, None] & (columns < width)[None, :]
    row_width = width * 2 if IS_GATED else width
    gate_ptrs = gate_up_ptr + slots[:, None] * row_width + columns[None, :]
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = gate
    if IS_GATED:
        up = tl.load(gate_ptrs + width, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, up, alpha, limit, ACTIVATION)
    out_ptrs = out_ptr + slots[:, None] * width + columns[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)
