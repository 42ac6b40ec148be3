"""A kernel that only reads weights: what is left to gain where reading them is all that counts."""

# Triton kernels carry no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch

_PROGRAMS_PER_MULTIPROCESSOR = 4
_NUM_WARPS = 8
_BLOCK = 8192


class ExpertsReader:
    """Reads the first experts' weights, one launch a projection."""

    def __init__(self, device: torch.device) -> None:
        self._num_programs = 2
        if device.type == "cuda" and not is_interpreting():
            properties = torch.cuda.get_device_properties(device)
            self._num_programs = _PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count
        # Written, so that the reading is not left out.
        size = self._num_programs * _BLOCK
        self._out = torch.empty(size, dtype=torch.int16, device=device)

    def __call__(self, weights: ExpertWeights, num_experts: int) -> Tensor:
        """weights: of a 16-bit dtype, contiguous. Returns the exclusive or of words of w2's, by
        place in a program's block; valid until the next call."""
        prepare_launch(self._out.device)
        for weight in (weights.w13, weights.w2):
            words = weight[:num_experts].view(torch.int16)
            _read_kernel[(self._num_programs,)](
                words, words.numel(), self._out, BLOCK=_BLOCK, num_warps=_NUM_WARPS
            )
        return self._out


@triton.jit
def _read_kernel(
    words_ptr,  # [N] int16
    num_words,
    out_ptr,  # [programs * BLOCK] int16
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.int16)
    for first in tl.range(program * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        total ^= tl.load(words_ptr + offsets, mask=offsets < num_words, other=0)
    tl.store(out_ptr + program * BLOCK + tl.arange(0, BLOCK), total)
