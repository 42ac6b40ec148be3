"""Fill Triton's cache before anything is timed: many processes, each compiling some candidates."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.launch.tune_candidates import Candidate
from ep_runtime.launch.tune_problem import TuneProblem

# A `small_shape`, and what is to be compiled for it.
Job = tuple[ExpertsShape, Candidate]
# Jobs of a process at a time: few, since they take unequally long.
_JOBS_AT_A_TIME = 8


def compile_candidates(jobs: Sequence[Job], num_processes: int) -> str | None:
    """Compile each of `compile_jobs`; None, or why it could not go on.

    What does not compile is left to the search, which meets and notes it again.
    """
    shares = [jobs[i : i + _JOBS_AT_A_TIME] for i in range(0, len(jobs), _JOBS_AT_A_TIME)]
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
            list(pool.map(_compile, shares))
    except BrokenProcessPool:
        return "a compiling process was killed; the rest is compiled one by one"
    return None


def _compile(jobs: Sequence[Job]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    problems: dict[ExpertsShape, TuneProblem] = {}
    for shape, candidate in jobs:
        if shape not in problems:
            problems[shape] = TuneProblem(shape, 1, device, num_sets=1)
        try:
            problems[shape].calls(candidate)[0]()
            torch.cuda.synchronize()
        except Exception:
            continue


def small_shape(shape: ExpertsShape) -> ExpertsShape:
    """A layer of few and small experts whose launches are compiled as this one's.

    Triton compiles an integer argument by whether it is 1 and whether 16 divides it, and the GEMMs
    by what 256 leaves of a size; e4m3 rows have a scale for 128 columns, so there whether 2048
    divides it counts too. Packed weights keep their sizes. Where this should miss something, the
    search compiles it itself.
    Example: 128 experts of 7168 x 2048, top-8, bf16: 2 of 256 x 256, top-2.
    """
    top_k = shape.top_k if shape.top_k == 1 or shape.top_k % 16 == 0 else 2
    few = max(2, top_k)
    small = replace(shape, num_local_experts=few, num_experts=few, top_k=top_k)
    if is_packed(shape.scheme):
        return small
    hidden_size, intermediate_size = (
        _small_size(size, has_scales=shape.scheme.is_quantised)
        for size in (shape.hidden_size, shape.intermediate_size)
    )
    return replace(small, hidden_size=hidden_size, intermediate_size=intermediate_size)


def _small_size(size: int, *, has_scales: bool) -> int:
    if has_scales and size % 2048 == 0:
        return 2048
    return min(size, 256 + size % 256)
