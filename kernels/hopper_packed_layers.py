"""Which layers Hopper's packed GEMM takes, by what a plan knows of them: no device is asked."""

import torch

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.devices import tma_reads
from ep_runtime.kernels.quant.packed_weights import packed_fault
from ep_runtime.kernels.quant.scheme import WeightScheme

CAPABILITY = (9, 0)  # of its devices


def suits_hopper_packed(shape: ExpertsShape) -> bool:
    """Whether sm_90 runs such a layer on Hopper's packed GEMM.

    int4 in order, with or without zero points, in groups of 32 columns or more; mxfp4 and nvfp4 of
    bfloat16 layers; 16-bit rows, sizes whose rows TMA can read (cp.async copies the same).
    """
    scheme = shape.scheme
    is_e2m1 = scheme.weight in (WeightScheme.MXFP4, WeightScheme.NVFP4)
    takes_codes = shape.dtype is torch.bfloat16 if is_e2m1 else scheme.weight is WeightScheme.INT4
    sizes = (shape.hidden_size, shape.intermediate_size)
    return (
        takes_codes
        and packed_fault(scheme) is None
        and shape.dtype.itemsize == 2
        and all(tma_reads(size, shape.dtype.itemsize) for size in sizes)
    )
