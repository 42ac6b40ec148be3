"""OpenAI's triton_kernels, in the package tokenspeed-triton-kernels.

A call is: bit matrix and slot order from the given ids, a gathering GEMM with SwiGLU in it, a
scattering GEMM, and the weighted sum. Its SwiGLU is silu(gate) * (up + 1), gate and up columns
interleaved.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.experts_cells import LayerShape, Table
from benchmarks.experts_contenders import Contender, require
from benchmarks.experts_data import RoutedRows
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.launch.environment import package_version

_PACKAGE = "tokenspeed-triton-kernels"


class TritonKernels(Contender):
    up_shift = 1.0

    def __init__(self, shape: LayerShape, table: Table, weights: Sequence[ExpertWeights]) -> None:
        super().__init__(shape, table, weights)
        add_names_of_newer_triton()
        self._matmul = _module("matmul")
        swiglu, specs = _module("swiglu").swiglu_fn, self._matmul.FnSpecs
        self._activation = self._matmul.FusedActivation(
            specs("swiglu", swiglu, ("alpha", "limit"), reduction_n=2), (1.0, None)
        )
        self._weights = [(_interleaved(one.w13).mT, one.w2.mT) for one in weights]

    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        w13, w2 = self._weights[weight_set]
        matmul, precision = self._matmul.matmul, self._matmul.PrecisionConfig()
        top_k_of, reduce = _module("topk").topk, _module("reduce").reduce
        make_ragged = _module("tensor").make_ragged_tensor_metadata
        num_rows, top_k = rows.local_ids.shape
        ids = rows.local_ids.contiguous()
        # The softmax over a row's chosen logits gives its weights back.
        logits = torch.zeros(num_rows, self.shape.num_local_experts, device=self.device)
        logits.scatter_(1, rows.local_ids.long(), rows.topk_weights.log())

        def call() -> Tensor:
            routing = top_k_of(logits, top_k, apply_softmax=True, y_indx=ids)
            counts, order = routing.mask_metadata.col_sum, routing.mask_metadata.col_sorted_indx
            ragged = make_ragged(counts, num_rows * top_k)
            activated = matmul(
                rows.hidden_states,
                w13,
                None,
                ragged,
                gather_indx=torch.div(order, top_k, rounding_mode="floor"),
                precision_config=precision,
                fused_activation=self._activation,
            )
            slots = matmul(
                activated, w2, None, ragged, scatter_indx=order, precision_config=precision
            )
            slots = slots.view(num_rows, top_k, -1)
            scale = routing.vals.view(num_rows, top_k, 1).expand(slots.shape)
            output: Tensor = reduce(slots, dim=1, scale=scale)[0]
            return output

        return call

    def facts(self) -> dict[str, Any]:
        return {_PACKAGE: package_version(_PACKAGE)}


def _interleaved(w13: Tensor) -> Tensor:
    """[E, 2I, H] with rows gate 0, up 0, gate 1, ... from gate first, then up."""
    num_experts, rows, hidden_size = w13.shape
    halves = w13.view(num_experts, 2, rows // 2, hidden_size)
    return halves.transpose(1, 2).reshape(num_experts, rows, hidden_size)


def _module(name: str) -> Any:
    return require(f"triton_kernels.{name}", _PACKAGE)


def add_names_of_newer_triton() -> None:
    """Give Triton 3.6 what the package asks of a newer one; nothing where it is there."""
    target_info = require("triton.language.target_info", "triton")
    jit = require("triton.runtime.jit", "triton")
    if not hasattr(target_info, "is_hip_gfx1250"):
        target_info.is_hip_gfx1250 = jit.constexpr_function(_is_hip_gfx1250)
    for name in ("def_file_line_number", "def_file_col_number"):  # of debug information only
        if not hasattr(jit.JITFunction, name):
            setattr(jit.JITFunction, name, 1)


def _is_hip_gfx1250() -> bool:
    return False
