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
from benchmarks.experts_contenders import Contender, Unavailable, require
from benchmarks.experts_data import RoutedRows
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.quant.scheme import MXFP4_GROUP
from ep_runtime.launch.environment import package_version

_PACKAGE = "tokenspeed-triton-kernels"
_Operand = tuple[Any, Any]  # a weight in the package's layout, and its PrecisionConfig


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
        self._weights = [self._own_layout(one) for one in weights]

    def _own_layout(self, weights: ExpertWeights) -> tuple[_Operand, _Operand]:
        """w13 with interleaved rows, and w2; MXFP4 in the layouts that the package recommends."""
        plain = self._matmul.PrecisionConfig
        if self.table.scheme == "bf16":
            return (_interleaved(weights.w13).mT, plain()), (weights.w2.mT, plain())
        if self.table.scheme != "mxfp4" or not (weights.w13_quant and weights.w2_quant):
            raise Unavailable(f"{_PACKAGE} is measured in bf16 and mxfp4, not {self.table.scheme}")
        return (
            self._mxfp4(_interleaved(weights.w13), _interleaved(weights.w13_quant.scales)),
            self._mxfp4(weights.w2, weights.w2_quant.scales),
        )

    def _mxfp4(self, values: Tensor, scales: Tensor) -> _Operand:
        """values: [E, N, K / 2] uint8, scales: [E, N, K / 32] uint8."""
        tensor, layout = _module("tensor"), _module("tensor_details.layout")
        value_layout = layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2)
        scale_layout = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=-2, num_warps=8)
        wrapped = tensor.wrap_torch_tensor(values.mT, dtype=tensor.FP4)
        operand = tensor.convert_layout(wrapped, value_layout)
        scale = tensor.convert_layout(tensor.wrap_torch_tensor(scales.mT), scale_layout)
        precision = self._matmul.PrecisionConfig(b_mx_scale=scale, b_microblock_size=MXFP4_GROUP)
        return operand, precision

    def bind(self, rows: RoutedRows, weight_set: int) -> Callable[[], Tensor]:
        (w13, precision13), (w2, precision2) = self._weights[weight_set]
        matmul = self._matmul.matmul
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
                precision_config=precision13,
                fused_activation=self._activation,
            )
            slots = matmul(
                activated, w2, None, ragged, scatter_indx=order, precision_config=precision2
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
