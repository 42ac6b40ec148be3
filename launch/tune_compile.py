"""Fill Triton's cache before anything is timed: many processes, each compiling some candidates."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import torch

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.launch.tune_candidates import Candidate
from ep_runtime.launch.tune_problem import TuneProblem

Job = tuple[ExpertsShape, Candidate]
# Jobs of a process at a time: few, since they take unequally long.
_JOBS_AT_A_TIME = 8


def compile_candidates(jobs: Sequence[Job], num_processes: int) -> str | None:
    """Compile each once, whatever number of rows it is for; None, or why it could not go on.

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
        small = small_shape(shape)
        if small not in problems:
            problems[small] = TuneProblem(small, 1, device, num_sets=1)
        try:
            problems[small].calls(candidate)[0]()
            torch.cuda.synchronize()
        except Exception:
            continue


def small_shape(shape: ExpertsShape) -> ExpertsShape:
    """The same sizes and so the same kernels, with as few experts as a row can go to."""
    few = max(2, shape.top_k)
    return replace(shape, num_local_experts=few, num_experts=few)
