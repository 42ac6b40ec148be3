"""A call that only reads weights: what is left to gain where reading them is all that counts."""

import torch
from torch import Tensor

from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.read_probe import read_output, read_words


class ExpertsReader:
    """Reads the first experts' weights, one launch a projection."""

    def __init__(self, device: torch.device) -> None:
        self._out = read_output(device)

    def __call__(self, weights: ExpertWeights, num_experts: int) -> Tensor:
        """weights: of a 16-bit dtype, contiguous. Returns the exclusive or of words of w2's, by
        place in a program's block; valid until the next call."""
        for weight in (weights.w13, weights.w2):
            read_words(weight[:num_experts].view(torch.int16), out=self._out)
        return self._out
