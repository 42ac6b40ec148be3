"""Experts in one launch of a resident grid: routing, both projections, the sum; for decode.

What it does, phase by phase: kernels/resident_kernel.py.
"""

from functools import partial

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels.base import (
    ActivationKind,
    Concurrency,
    ConcurrencyRule,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertsShape,
    ExpertWeights,
    InputFormat,
    MonolithicContext,
    MonolithicExperts,
    RoutingSpec,
)
from ep_runtime.kernels.errors import CapacityError
from ep_runtime.kernels.resident_kernel import _resident_experts_kernel
from ep_runtime.kernels.resident_launch import LaunchArguments, ResidentGrid
from ep_runtime.kernels.resident_tiles import (
    MAX_ROWS,
    ResidentTiles,
    block_rows,
    resident_tiles,
    routed_at_once,
)
from ep_runtime.kernels.routing import NORM_EPSILON
from ep_runtime.kernels.triton_operands import prepare_triton_weights
from ep_runtime.kernels.workspace import Workspace


class ResidentExperts(MonolithicExperts):
    """One launch a call; equal inputs give bit-equal results on one device.

    A slot's result is not rounded before it is summed. Of the experts that any row of a call is
    routed to, weights must be finite: they are multiplied with the other rows too, by 0.

    On a CPU it runs in Triton's interpreter, for tests.
    """

    capabilities = ExpertsCapabilities(
        name="resident",
        kind=ExpertsKind.MONOLITHIC,
        formats=frozenset({InputFormat.STANDARD}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        device_types=frozenset({"cpu", "cuda"}),
        activations=frozenset(ActivationKind),
        supports_bias=True,
        needs_triton=True,
        compute_capabilities=frozenset({(9, 0)}),
        concurrency=(
            ConcurrencyRule(
                MAX_ROWS,
                Concurrency.EXCLUSIVE,
                "its grid waits for its own programs, which all must be on the device at once",
                owns="frames of the workspace it is given; barrier words for each workspace, 0 "
                "between launches; one word of pinned memory for a failure",
                record="benchmarks/results/audit_resident.json",
            ),
        ),
    )

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)
        self.grid = RoutingGrid(shape)

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Rows that TMA can read; copies only what is not so already."""
        return prepare_triton_weights(weights)

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call of up to `max_rows` rows, which is at most MAX_ROWS, on any device."""
        if max_rows == 0 or self.shape.num_local_experts == 0:
            return 0
        return self.grid.workspace_bytes(max_rows)

    def check(self) -> None:
        """Raise RankFailure once a wait inside a launch of this layer has run out."""
        self.grid.check()

    def run(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        *,
        context: MonolithicContext,
        workspace: Workspace,
    ) -> Tensor:
        """See `MonolithicExperts.run`. Raises RankFailure once a wait of an earlier call has run
        out, CapacityError for more than MAX_ROWS rows."""
        self.check()
        num_rows = len(hidden_states)
        if num_rows > MAX_ROWS:
            raise CapacityError(
                f"experts resident takes at most {MAX_ROWS} rows at once, not {num_rows}; lower "
                f"max_tokens_per_rank, or choose experts: triton"
            )
        output = torch.empty(
            hidden_states.shape, dtype=self.shape.dtype, device=hidden_states.device
        )
        if num_rows == 0 or context.weights.w13.shape[0] == 0:
            return output.zero_()
        self.grid.run(hidden_states, router_logits, context, workspace, output)
        return output


class RoutingGrid(ResidentGrid):
    """The resident launches of one layer, which route too; see `ResidentGrid`."""

    experts, instead = "resident", "triton"

    def tiles(self, num_rows: int) -> ResidentTiles:
        """See `ResidentGrid.tiles`."""
        return resident_tiles(num_rows, self.shape)

    def run(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        context: MonolithicContext,
        workspace: Workspace,
        output: Tensor,
    ) -> None:
        """Route and compute all rows, 1 to MAX_ROWS, into `output` [R, H]; one launch."""
        num_rows, num_experts = router_logits.shape
        self.launch(
            _resident_experts_kernel,
            partial(self._arguments, hidden_states, router_logits, context, output),
            output=output,
            kind=(
                num_rows <= routed_at_once(num_experts, block_rows(num_rows)),
                context.routing,
                context.correction_bias is None,
                *(tensor.data_ptr() % 16 == 0 for tensor in (hidden_states, router_logits)),
                *(stride % 16 for stride in (*hidden_states.stride(), *router_logits.stride())),
            ),
            workspace=workspace,
        )

    def _arguments(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        context: MonolithicContext,
        output: Tensor,
        workspace: Workspace,
        num_programs: int,
    ) -> LaunchArguments:
        shape, weights, routing = self.shape, context.weights, context.routing
        num_rows, num_experts = router_logits.shape
        tiles, at_once = self.tiles(num_rows), routed_at_once(num_experts, block_rows(num_rows))
        logits = router_logits if router_logits.stride(1) == 1 else router_logits.contiguous()
        hidden_size, intermediate_size = shape.hidden_size, shape.intermediate_size
        arguments = (
            hidden_states,
            *hidden_states.stride(),
            logits,
            logits.stride(0),
            _dense(context.correction_bias),
            context.expert_map.contiguous(),
            context.tokens_per_expert,
            _descriptor(weights.w13, tiles.gate_up),
            weights.w13_bias,
            _descriptor(weights.w2, tiles.down),
            weights.w2_bias,
            *self.shared_arguments(workspace, num_programs, output),
            num_experts,
            weights.w13.shape[1],
            hidden_size,
            intermediate_size,
            float(routing.routed_scaling_factor),
            *self.activation_arguments(),
        )
        constants = {
            "ROUTING": _routing_constants(routing),
            "BLOCK_ROWS": at_once,
            "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
            "ROUTES_ALL": num_rows <= at_once,
            "GATE_UP": (*tiles.gate_up, hidden_size % tiles.gate_up[1] == 0),
            "DOWN": (*tiles.down, intermediate_size % tiles.down[1] == 0),
        }
        return arguments, self.shared_constants(num_rows, routing.top_k) | constants


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _descriptor(values: Tensor, tile: tuple[int, int, int]) -> TensorDescriptor:
    """[E, rows, columns] as [E * rows, columns], read in blocks of tile[0] rows."""
    num_experts, num_rows, num_columns = values.shape
    return TensorDescriptor(
        values,
        [num_experts * num_rows, num_columns],
        [values.stride(1), 1],
        [tile[0], tile[1]],
    )


def _routing_constants(spec: RoutingSpec) -> tuple[object, ...]:
    """ROUTING of `route_rows`."""
    return (
        spec.scoring,
        spec.norm_topk_prob,
        NORM_EPSILON,
        spec.n_group,
        triton.next_power_of_2(spec.n_group),
        spec.topk_group,
        spec.group_score,
    )
