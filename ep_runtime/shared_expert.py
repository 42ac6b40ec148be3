"""The shared expert: one dense gated MLP that every row passes, whatever the router says."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import Concurrency, ConcurrencyRule
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.kernels.quant.storage import (
    empty_stored,
    part_of,
    quantized_tensor,
    stored_shapes,
    tensors_of,
)
from ep_runtime.ownership import Owner, SharedExpertToken
from ep_runtime.shared_compute import SharedCompute
from ep_runtime.small_passes import make_activate

# Part of a checkpoint -> the parameter that holds it, and which of how many parts of its rows.
_PARTS = {
    "shared_gate_proj": ("w13", 0, 2),
    "shared_up": ("w13", 1, 2),
    "shared_down": ("w2", 0, 1),
    "shared_gate": ("gate", 0, 1),
}


class SharedExpert(nn.Module):
    """All shared experts of a layer as one MLP of their total width S, on every rank.

    w13: [2S, H], gate rows first, then up ([S, H] where the activation is not gated).
    w2: [H, S]. gate: [1, H] or None; the output is multiplied by sigmoid(gate . row).
    With compute `fp8` w13 and w2 are e4m3, and w13_scales and w2_scales (else None) their float32
    scales, one for a 128 x 128 block; of w13 the gate's blocks, then the up's.
    It is never multiplied by routed_scaling_factor. It runs on the current stream, through
    kernels/shared_projections.py, or through library matrix products, whose workspaces torch keeps
    per stream.
    """

    concurrency_rules: ClassVar[tuple[ConcurrencyRule, ...]] = (
        ConcurrencyRule(
            None,
            Concurrency.CERTIFIED,
            "tests/ep_runtime/test_shared_expert.py::test_two_streams_do_not_disturb_each_other",
            owns="scratch from torch's allocator and the library's workspace, one for each stream; "
            "tables that nothing writes",
            record="benchmarks/results/audit_triton.json",
        ),
    )

    def __init__(
        self,
        moe: MoEConfig,
        device: torch.device,
        compute: SharedCompute = SharedCompute.LIBRARY,
    ) -> None:
        """compute: the plan's. With `fp8`, moe.shared_quantization is fp8_block."""
        super().__init__()
        width, hidden, dtype = moe.shared_intermediate_size, moe.hidden_size, moe.torch_dtype
        self.activation, self.compute = moe.experts_activation(), compute
        self.scheme, self._num_parts = moe.shared_quantization, 2 if self.activation.is_gated else 1
        rows13 = width * self._num_parts
        self.w13: nn.Parameter
        self.w2: nn.Parameter
        self.w13_scales: nn.Parameter | None = None
        self.w2_scales: nn.Parameter | None = None

        def weight(*shape: int) -> nn.Parameter:
            empty = torch.empty(shape, dtype=dtype, device=device)
            return nn.Parameter(empty, requires_grad=False)

        def stored(name: str, rows: int, columns: int, num_parts: int) -> None:
            shapes = stored_shapes(self.scheme, rows, columns, num_parts=num_parts, dtype=dtype)
            for key, tensor in empty_stored(shapes, 1, device).items():
                attribute = name if key == "values" else f"{name}_{key}"
                setattr(self, attribute, nn.Parameter(tensor[0], requires_grad=False))

        if compute is SharedCompute.FP8:
            stored("w13", rows13, hidden, self._num_parts)
            stored("w2", hidden, width, 1)
        else:
            self.w13 = weight(rows13, hidden)
            self.w2 = weight(hidden, width)
        self.gate = weight(1, hidden) if moe.shared_expert_gate else None
        self._activate = make_activate(self.activation, width, device)
        self._projections = None
        if compute is not SharedCompute.LIBRARY:
            # Late: without Triton the rest still runs.
            from ep_runtime.kernels.shared_projections import SharedProjections, SharedShape

            is_fp8 = compute is SharedCompute.FP8
            shape = SharedShape(hidden, width, self.activation, dtype, is_fp8)
            self._projections = SharedProjections(shape, device)
        self.calls = 0

    def run(
        self, hidden_states: Tensor, *, token: SharedExpertToken, by: Owner, out: Tensor
    ) -> Tensor:
        """Compute [T, H] into `out` and return it; uses up the call's token.

        hidden_states: [T, H] own rows, T may be 0. out: [T, H] of the same dtype.
        """
        token.consume(by)
        self.calls += 1
        if self._projections is not None and self._projections.takes_rows(len(hidden_states)):
            from ep_runtime.kernels.dense_gemm import DenseWeight

            self._projections.run(
                hidden_states,
                DenseWeight(self.w13, self.w13_scales, self._num_parts),
                DenseWeight(self.w2, self.w2_scales),
                out=out,
            )
        else:
            hidden = self._activate(linear(hidden_states, self.w13))
            torch.mm(hidden, self.w2.t(), out=out)
        if self.gate is not None:
            out.mul_(torch.sigmoid(linear(hidden_states, self.gate)))
        return out

    def stored(self, name: str) -> QuantizedTensor | None:
        """w13 or w2 as it is stored (E = 1); None where it is in the layer's dtype."""
        scales = getattr(self, f"{name}_scales", None)
        if scales is None:
            return None
        tensors = {"values": getattr(self, name)[None], "scales": scales[None]}
        return quantized_tensor(tensors, self.scheme)

    def places(self, part: str) -> dict[str, Tensor] | Tensor | None:
        """Where a part of a checkpoint goes (`shared_up`): its tensors (E = 1) by name where they
        are kept as stored, else one in the layer's dtype; None where there is no place for it."""
        name, index, num_parts = _PARTS[part]
        stored = self.stored(name)
        if stored is not None:
            return {
                key: part_of(key, tensor, index, num_parts)
                for key, tensor in tensors_of(stored).items()
            }
        parameter: Tensor | None = getattr(self, name)
        return None if parameter is None else parameter.chunk(num_parts)[index]

    @torch.no_grad()
    def fill(self, shared: Mapping[str, Tensor | QuantizedTensor | None]) -> None:
        """Copy w13, w2 and gate; what is quantised is kept so, or dequantised, by the compute.

        shared: of the right shapes, QuantizedTensors (E = 1) of the layer's shared_quantization.
        """
        for name, given in shared.items():
            if given is None:
                continue
            kept = self.stored(name)
            if not isinstance(given, QuantizedTensor):
                getattr(self, name).copy_(given)
            elif kept is None:
                num_parts = self._num_parts if name == "w13" else 1
                getattr(self, name).copy_(dequantize(given, num_parts)[0])
            else:
                places = tensors_of(kept)
                for key, tensor in tensors_of(given).items():
                    places[key].copy_(tensor)
