"""One layer with so many rows an expert, as calls that `ep-runtime tune` times and checks.

Shapes: N slots, P padded positions, H hidden size, I intermediate size.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from ep_runtime.kernels.align_blocks import AlignedSlots, align_slots, align_slots_reference
from ep_runtime.kernels.base import ExpertsShape, ExpertWeights, StandardExpertInput
from ep_runtime.kernels.expert_projections import project_slots
from ep_runtime.kernels.grouped_gemm import GemmRows, project_down, project_gate_up
from ep_runtime.kernels.hopper_gemm import (
    Fp8Scales,
    project_down_hopper,
    project_gate_up_hopper,
)
from ep_runtime.kernels.hopper_tiles import HopperSchedule
from ep_runtime.kernels.packed_gemm import project_down_packed, project_gate_up_packed
from ep_runtime.kernels.packed_schedule import PackedTiles
from ep_runtime.kernels.quant.fp8_rows import num_groups
from ep_runtime.kernels.quant.packed_weights import packed_layout
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.tiles import GemmTiles, rows_per_expert
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.triton_operands import take_activated
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.launch.tune_candidates import Candidate, Tiles
from ep_runtime.launch.tune_inputs import (
    Expected,
    as_float32,
    as_operand,
    draw_activated,
    draw_rows,
    draw_weights,
    expect,
    multiplies_fp8,
    relative_error,
)

Call = Callable[[], object]
# Several times what an L2 holds: of smaller weights each set of rows has its own.
MIN_WEIGHT_BYTES = 256 << 20
# Largest relative Frobenius error of a right result, by the type that it or what it is made of was
# rounded to: 3 bits of mantissa give about 0.03, 8 about 0.003.
FLOAT32_LIMIT, HALF_LIMIT, FP8_LIMIT = 1e-4, 1e-2, 6e-2


class RowSet:
    """One set of rows that landed, as the projections take them, for every height of tiles."""

    def __init__(
        self,
        shape: ExpertsShape,
        weights: ExpertWeights,
        num_source_rows: int,
        generator: torch.Generator,
    ) -> None:
        self.shape, self.weights = shape, weights
        self.expert_input = draw_rows(shape, num_source_rows, generator)
        self.rows = as_operand(self.expert_input.hidden_states, shape)
        num_slots = self.expert_input.topk_ids.numel()
        self.activated = draw_activated(shape, num_slots, generator)
        self.out = torch.empty(
            (num_slots, shape.hidden_size), dtype=shape.dtype, device=generator.device
        )
        self._by_height: dict[int, HeightOperands] = {}

    def of_height(self, block_m: int) -> "HeightOperands":
        if block_m not in self._by_height:
            self._by_height[block_m] = HeightOperands(self, block_m)
        return self._by_height[block_m]


class HeightOperands:
    """A RowSet in tiles of block_m positions."""

    def __init__(self, rows: RowSet, block_m: int) -> None:
        self.aligned: AlignedSlots = align_slots_reference(
            rows.expert_input, num_local_experts=rows.shape.num_local_experts, block_m=block_m
        )
        num_positions = self.aligned.max_tiles * block_m
        workspace = Workspace(rows.out.device)
        self.gate_up_out = take_activated(num_positions, rows.shape, workspace)
        self.activated = take_activated(num_positions, rows.shape, workspace)
        slots = self.aligned.slots.long()
        is_slot = slots < self.aligned.num_slots
        self.positions, self.slots = is_slot.nonzero().flatten(), slots[is_slot]
        _put(rows.activated, self.slots, self.activated, self.positions)
        self._rows, self._ordered = rows, None if rows.rows.scales is None else num_positions

    @cached_property
    def hopper_rows(self) -> GemmRows:
        """What the Hopper GEMM reads: rows to gather, of fp8 those in expert order."""
        source = self._rows.rows
        if source.scales is None or self._ordered is None:
            return source
        size = (self._ordered, source.values.shape[1])
        values = torch.zeros(size, dtype=torch.uint8, device=source.values.device)
        scales = source.scales.new_zeros((self._ordered, num_groups(size[1])))
        ordered = GemmRows(values.view(source.values.dtype), scales)
        row_of_slot = self.slots // self._rows.shape.top_k
        _put(source, row_of_slot, ordered, self.positions)
        return ordered


def _put(source: GemmRows, rows: Tensor, out: GemmRows, positions: Tensor) -> None:
    """out[positions] = source[rows]; by bits, since torch does not index e4m3 everywhere."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[source.values.element_size()]
    out.values.view(bits)[positions] = source.values.view(bits)[rows]
    if source.scales is not None and out.scales is not None:
        out.scales[positions] = source.scales[rows]


class LayerWeights:
    """Random weights of one layer, for every number of rows: as stored and as prepared.

    Small ones are drawn `num_sets` times, so that they cannot stay in the cache.
    """

    def __init__(self, shape: ExpertsShape, device: torch.device, *, num_sets: int = 2) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        self.plain = [draw_weights(shape, generator)]
        if _num_bytes(self.plain[0]) < MIN_WEIGHT_BYTES:
            self.plain += [draw_weights(shape, generator) for _ in range(1, num_sets)]
        self.prepared = [TritonExperts(shape).prepare_weights(weights) for weights in self.plain]


class TuneProblem:
    """Random rows of one layer, and calls of its projections on them in turn.

    weights: of the layer; None: drawn here.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        num_source_rows: int,
        device: torch.device,
        *,
        num_sets: int = 2,
        weights: LayerWeights | None = None,
    ) -> None:
        self.shape, self.device = shape, device
        self.rows_per_expert = rows_per_expert(num_source_rows, num_source_rows, shape)
        generator = torch.Generator(device=device).manual_seed(num_source_rows)
        weights = weights or LayerWeights(shape, device, num_sets=num_sets)
        self._plain, prepared = weights.plain, weights.prepared
        self.sets = [
            RowSet(shape, prepared[index % len(prepared)], num_source_rows, generator)
            for index in range(num_sets)
        ]
        most_rows = max(len(rows.expert_input.hidden_states) for rows in self.sets)
        num_bytes = TritonExperts(shape).workspace_bytes(most_rows)
        self._workspace = Workspace(device, num_bytes)

    @cached_property
    def expected(self) -> Expected:
        """Of the first set."""
        first = self.sets[0]
        return expect(self.shape, first.expert_input, self._plain[0], first.activated)

    @property
    def expected_bytes(self) -> float:
        """Of the weights that a call reads at least: those of the experts in use."""
        per_expert = _num_bytes(self._plain[0]) / self.shape.num_local_experts
        active = [len(rows.expert_input.topk_ids.unique()) for rows in self.sets]
        none_here = [bool((rows.expert_input.topk_ids < 0).any()) for rows in self.sets]
        return per_expert * (sum(active) - sum(none_here)) / len(self.sets)

    @property
    def expected_flops(self) -> float:
        pairs = sum(int((rows.expert_input.topk_ids >= 0).sum()) for rows in self.sets)
        num_weights = 3 if self.shape.activation.is_gated else 2
        product = self.shape.hidden_size * self.shape.intermediate_size
        return 2.0 * num_weights * product * pairs / len(self.sets)

    def calls(self, candidate: Candidate) -> list[Call]:
        """One launch for each set, which does not wait for the device."""
        return [partial(_launch, rows, candidate) for rows in self.sets]

    def whole_calls(self, tiles: Tiles) -> list[Call]:
        """Alignment and both projections for each set, with what belongs to them."""
        return [partial(self._run_whole, rows, tiles) for rows in self.sets]

    def error_of(self, candidate: Candidate) -> float:
        """Of the first set's result, from poisoned memory; NaN where something was not written."""
        rows = self.sets[0]
        at = rows.of_height(candidate.block_m)
        if candidate.projection == "gate_up":
            for tensor in (at.gate_up_out.values, at.gate_up_out.scales):
                _poison(tensor)
            _launch(rows, candidate)
            written = as_float32(at.gate_up_out)[at.positions]
            return relative_error(written, self.expected.gate_up[at.slots])
        _poison(rows.out)
        _launch(rows, candidate)
        return self._error_by_slot(rows.out, self.expected.down)

    def whole_error(self, tiles: Tiles) -> float:
        """Of the first set's slots after both projections, likewise."""
        with self._workspace.frame():
            self._workspace.take((self._workspace.num_bytes,), torch.uint8).fill_(255)
        out = self._run_whole(self.sets[0], tiles)
        return self._error_by_slot(out, self.expected.whole)

    def limit_of(self, candidate: Candidate) -> float:
        """The largest error of a right result of one projection."""
        if multiplies_fp8(self.shape) and candidate.projection == "gate_up":
            return FP8_LIMIT
        return FLOAT32_LIMIT if self.shape.dtype is torch.float32 else HALF_LIMIT

    @property
    def whole_limit(self) -> float:
        if multiplies_fp8(self.shape):
            return FP8_LIMIT
        return FLOAT32_LIMIT if self.shape.dtype is torch.float32 else HALF_LIMIT

    def _run_whole(self, rows: RowSet, tiles: Tiles) -> Tensor:
        with self._workspace.frame():
            aligned = align_slots(
                rows.expert_input,
                num_local_experts=self.shape.num_local_experts,
                block_m=tiles.block_m,
                workspace=self._workspace,
            )
            return project_slots(
                rows.expert_input,
                rows.weights,
                aligned,
                shape=self.shape,
                tiles=tiles,
                workspace=self._workspace,
            )

    def _error_by_slot(self, out: Tensor, expected: Tensor) -> float:
        is_local = self.expected.is_local
        return relative_error(out[is_local], expected[is_local])


def _num_bytes(weights: ExpertWeights) -> int:
    tensors = [weights.w13, weights.w2]
    for quant in (weights.w13_quant, weights.w2_quant):
        tensors += [] if quant is None else quant.tensors()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _poison(tensor: Tensor | None) -> None:
    """NaN, whatever the type."""
    if tensor is not None:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        tensor.view(bits).fill_(255 if tensor.element_size() == 1 else -1)


def _launch(rows: RowSet, candidate: Candidate) -> None:
    at, how = rows.of_height(candidate.block_m), candidate.how
    if isinstance(how, HopperSchedule):
        _launch_hopper(rows, at, candidate.projection == "gate_up", how)
    elif isinstance(how, PackedTiles):
        _launch_packed(rows, at, candidate.projection == "gate_up", how)
    elif candidate.projection == "gate_up":
        _launch_gate_up(rows, at, how)
    else:
        project_down(
            at.activated,
            rows.weights,
            at.aligned,
            slot_weights=_slot_weights(rows.expert_input),
            tiles=how,
            out=rows.out,
        )


def _launch_gate_up(rows: RowSet, at: HeightOperands, how: GemmTiles) -> None:
    project_gate_up(
        rows.rows,
        rows.weights,
        at.aligned,
        top_k=rows.shape.top_k,
        activation=rows.shape.activation,
        tiles=how,
        out=at.gate_up_out,
    )


def _launch_packed(rows: RowSet, at: HeightOperands, is_gate_up: bool, how: PackedTiles) -> None:
    layout = packed_layout(rows.shape.scheme)
    if is_gate_up:
        project_gate_up_packed(
            rows.rows.values,
            rows.weights,
            at.aligned,
            layout=layout,
            top_k=rows.shape.top_k,
            activation=rows.shape.activation,
            tiles=how,
            out=at.gate_up_out.values,
        )
        return
    project_down_packed(
        at.activated.values,
        rows.weights,
        at.aligned,
        layout=layout,
        slot_weights=_slot_weights(rows.expert_input),
        tiles=how,
        out=rows.out,
    )


def _launch_hopper(
    rows: RowSet, at: HeightOperands, is_gate_up: bool, schedule: HopperSchedule
) -> None:
    weights = rows.weights
    if not is_gate_up:
        project_down_hopper(
            at.activated.values,
            weights.w2,
            at.aligned,
            out=rows.out,
            scales=_fp8_scales(at.activated, weights.w2_quant),
            topk_weights=_slot_weights(rows.expert_input),
            schedule=schedule,
        )
        return
    operand = at.hopper_rows
    project_gate_up_hopper(
        operand.values,
        weights.w13,
        at.aligned,
        activation=rows.shape.activation,
        out=at.gate_up_out.values,
        scales=_fp8_scales(operand, weights.w13_quant, at.gate_up_out),
        top_k=rows.shape.top_k if operand.scales is None else None,
        schedule=schedule,
    )


def _slot_weights(expert_input: StandardExpertInput) -> Tensor:
    return expert_input.topk_weights.flatten()


def _fp8_scales(
    rows: GemmRows, quant: QuantParameters | None, out: GemmRows | None = None
) -> Fp8Scales | None:
    if rows.scales is None or quant is None:
        return None
    return Fp8Scales(rows.scales, quant.scales, None if out is None else out.scales)
