"""Launches over Marlin's GEMMs for `marlin_streams.py`: experts, a shared expert, one column.

Weights are random codes (`launch/seeded_stored.py`). Every job has a kernel object of its own, and
so locks of its own, unless it is given another's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import align_slots
from ep_runtime.kernels.base import (
    Activation,
    ExpertsShape,
    ExpertWeights,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.marlin_experts import HEIGHTS, MarlinExperts
from ep_runtime.kernels.marlin_weights import weight_type_id
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantScheme, WeightScheme
from ep_runtime.kernels.quant.storage import quantized_tensor, tensors_of
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launch.seeded_stored import draw_stored

INT4 = QuantScheme(WeightScheme.INT4, 128)
# As a checkpoint's method stores weights. Compressed-tensors' WNA16 is GPTQ's layout to the GEMM.
SCHEMES = {
    "gptq": INT4,
    "awq": replace(INT4, has_zero_points=True),
    "int8": QuantScheme(WeightScheme.INT8, 128),
    "mxfp4": QuantScheme(WeightScheme.MXFP4),
}
DEVICE = torch.device("cuda")
_DTYPE = torch.bfloat16
HIDDEN, WIDTH = 4096, 1536
_COLUMN_HEIGHT = HEIGHTS[0]


@dataclass
class Job:
    """launch: on the current stream, in tensors of its own. locks: what its GEMMs wait with."""

    name: str
    launch: Callable[[], Tensor]
    locks: Tensor


def experts_job(
    name: str,
    seed: int,
    num_rows: int,
    *,
    num_experts: int = 64,
    top_k: int = 8,
    scheme: QuantScheme = INT4,
    locks: Tensor | None = None,
) -> Job:
    """A call of the experts kernel. One expert of top 1 is a dense layer: a shared expert."""
    shape = _shape(num_experts, HIDDEN, WIDTH, top_k, scheme)
    kernel, weights = _prepared(shape, seed, locks)
    rows = _rows(shape, num_rows, seed)
    workspace = Workspace(rows.hidden_states.device, kernel.workspace_bytes(num_rows))
    return Job(
        f"{name}: {num_experts} experts, {num_rows} rows",
        lambda: kernel.run(rows, weights, workspace),
        kernel._locks,
    )


def column_job(seed: int) -> Job:
    """One GEMM of one block of sums, 8192 columns by 128: all programs that share it wait in one
    chain."""
    shape = _shape(1, 128, 8192, 1, INT4)
    kernel, weights = _prepared(shape, seed, None)
    rows = _rows(shape, 1, seed)
    workspace = Workspace(rows.hidden_states.device, 1 << 20)
    aligned = align_slots(rows, num_local_experts=1, block_m=_COLUMN_HEIGHT, workspace=workspace)
    num_positions = aligned.num_tiles * _COLUMN_HEIGHT
    activated = torch.randn(1, 8192, device=workspace.device).to(_DTYPE)

    def launch() -> Tensor:
        out = torch.empty(1, 128, dtype=_DTYPE, device=workspace.device)
        projection = (weights.w2, weights.w2_quant, weights.w2_bias)
        kernel._multiply(
            activated,
            projection,
            (aligned, num_positions),
            topk_weights=rows.topk_weights,
            out=out,
        )
        return out

    return Job("one column: 8192 by 128", launch, kernel._locks)


def dense_job(seed: int, num_rows: int) -> Job:
    """vLLM 0.26's dense `marlin_gemm` (csrc/libtorch_stable/quantization/marlin/marlin.cu), whose
    layout is the fused one's of one expert. Raises PlanError without it."""
    operator = _dense_operator()
    shape = _shape(1, HIDDEN, WIDTH, 1, INT4)
    kernel, weights = _prepared(shape, seed, None)
    quant = weights.w13_quant
    if quant is None:
        raise PlanError("the dense marlin_gemm runs on weights in int4")
    words, scales, kind = weights.w13[0], quant.scales[0], weight_type_id(INT4)
    x = torch.randn(num_rows, HIDDEN, device=words.device).to(_DTYPE)
    sizes = (num_rows, 2 * WIDTH, HIDDEN)

    def launch() -> Tensor:
        # a, c, b and its bias, b_scales, a_scales, global_scale, b_zeros, g_idx, perm, workspace,
        # type, sizes, is_k_full, use_atomic_add, use_fp32_reduce, is_zp_float.
        absent = (None, None, None, None, None)
        flags = (True, False, True, False)
        result: Tensor = operator(
            *(x, None, words, None, scales), *absent, kernel._locks, kind, *sizes, *flags
        )
        return result

    return Job(f"dense marlin_gemm: {num_rows} rows", launch, kernel._locks)


def _dense_operator() -> Callable[..., Tensor]:
    spec = find_spec("vllm")
    for folder in list(spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder).glob("_C*.so")):
            torch.ops.load_library(str(library))
    operator: Callable[..., Tensor] | None = getattr(torch.ops._C, "marlin_gemm", None)
    if operator is None:
        raise PlanError("the operator _C::marlin_gemm is not there; install vllm 0.26")
    return operator


def _shape(
    num_experts: int, hidden: int, width: int, top_k: int, scheme: QuantScheme
) -> ExpertsShape:
    return ExpertsShape(num_experts, hidden, width, top_k, Activation(), _DTYPE, scheme=scheme)


def _prepared(
    shape: ExpertsShape, seed: int, locks: Tensor | None
) -> tuple[MarlinExperts, ExpertWeights]:
    """A kernel and its weights. locks: another's in place of its own."""
    kernel = MarlinExperts(shape)
    weights = kernel.prepare_weights(draw_weights(shape, seed, DEVICE))
    if locks is not None:
        kernel._locks = locks
    return kernel, weights


def draw_weights(shape: ExpertsShape, seed: int, device: torch.device) -> ExpertWeights:
    """Random codes, scales for which a layer's values stay about as large."""
    generator = torch.Generator(device).manual_seed(seed)

    def projection(rows: int, columns: int, num_parts: int) -> QuantizedTensor:
        experts = [
            draw_stored(
                shape.scheme,
                rows,
                columns,
                num_parts=num_parts,
                dtype=shape.dtype,
                generator=generator,
            )
            for _ in range(shape.num_local_experts)
        ]
        by_name = [tensors_of(expert) for expert in experts]
        stacked = {name: torch.cat([one[name] for one in by_name]) for name in by_name[0]}
        return quantized_tensor(stacked, shape.scheme)

    w13 = projection(2 * shape.intermediate_size, shape.hidden_size, 2)
    w2 = projection(shape.hidden_size, shape.intermediate_size, 1)
    return ExpertWeights(w13.values, w2.values, w13_quant=w13.parameters, w2_quant=w2.parameters)


def _rows(shape: ExpertsShape, num_rows: int, seed: int) -> StandardExpertInput:
    """Each row's experts are different ones, chosen evenly."""
    generator = torch.Generator(DEVICE).manual_seed(1000 + seed)
    rows = torch.randn(num_rows, shape.hidden_size, device=DEVICE, generator=generator)
    scores = torch.rand(num_rows, shape.num_local_experts, device=DEVICE, generator=generator)
    ids = scores.topk(shape.top_k, dim=1).indices.to(torch.int32)
    weights = torch.rand(num_rows, shape.top_k, device=DEVICE, generator=generator)
    return StandardExpertInput(rows.to(_DTYPE), ids, weights / shape.top_k)
