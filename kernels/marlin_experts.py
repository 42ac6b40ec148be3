"""Experts over the fused Marlin GEMM of an installed package, for the standard format.

Six launches: align the slots into tiles (many in two), turn the number of tiles into one of
positions, GEMM, activate, GEMM, weight and sum. None waits for the device, so a call can be
captured into a CUDA graph. The GEMMs' sums across programs are taken in a fixed order in float32,
so equal inputs give bit-equal results. Beside the workspace a GEMM takes at most 35 MB of torch's
allocator.

A program of the GEMM that shares a block of sums with others waits, holding its multiprocessor,
until those with higher numbers have added theirs: so the grid must be on the device as a whole. Its
locks must be 0 before a launch, are 0 after it, and belong to one launch at a time: one kernel
object serves one stream.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.activate_slots import activate_slots
from ep_runtime.kernels.activation import gate_up_columns
from ep_runtime.kernels.align_blocks import (
    AlignedSlots,
    align_slots,
    align_workspace_bytes,
)
from ep_runtime.kernels.base import (
    ActivationKind,
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    ExpertsCapabilities,
    ExpertsKind,
    ExpertsShape,
    ExpertWeights,
    InputFormat,
    ModularExperts,
    StandardExpertInput,
)
from ep_runtime.kernels.devices import H200_MULTIPROCESSORS, num_multiprocessors
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.marlin_package import (
    CAPABILITIES,
    NAMESPACES,
    MarlinOperator,
    bind_marlin,
)
from ep_runtime.kernels.marlin_weights import (
    MARLIN_SCHEMES,
    marlin_fault,
    repack_for_marlin,
    weight_type_id,
)
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.row_passes import row_passes, rows_per_pass
from ep_runtime.kernels.sum_slots import sum_slots
from ep_runtime.kernels.tiles import rows_per_expert
from ep_runtime.kernels.workspace import Workspace, aligned_bytes

_FIRST_PACKAGE, *_OTHER_PACKAGES = NAMESPACES
# Of the GEMM: 8 to 64 positions; 48, which it has too, is no power of two.
HEIGHTS = (8, 16, 32, 64)
_LOCKS_PER_MULTIPROCESSOR = 4  # of which one runs at most 4 programs
_ALIGNMENT = 16  # bytes that the GEMM reads at once


class MarlinExperts(ModularExperts):
    """The fused Marlin GEMM over the local experts; weights in 4 or 8 bits, products in 16.

    Making one needs no package, since plans are made where none is; it is bound with the weights.
    Of float16 layers, a raw result past 65504 is infinite: it is rounded before it is weighted.
    """

    capabilities = ExpertsCapabilities(
        name="marlin",
        kind=ExpertsKind.MODULAR,
        formats=frozenset({InputFormat.STANDARD}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        device_types=frozenset({"cuda"}),
        activations=frozenset(ActivationKind),
        schemes=MARLIN_SCHEMES,
        supports_bias=True,
        needs_triton=True,
        needs_package=_FIRST_PACKAGE,
        or_packages=tuple(_OTHER_PACKAGES),
        compute_capabilities=CAPABILITIES,
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.UNSAFE,
                "a program of marlin's GEMM waits, holding its multiprocessor, for those with "
                "higher numbers, so launches that are each partly on the device can wait for ever; "
                "its locks are one launch's at a time",
                record="benchmarks/results/audit_marlin.json",
            ),
        ),
    )

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)
        self._operator: MarlinOperator | None = None
        self._locks = torch.empty(0, dtype=torch.int32)
        self._slots = torch.empty(0, dtype=torch.int32)

    @classmethod
    def shape_fault(cls, shape: ExpertsShape) -> str | None:
        """Sizes and groups that the GEMM has no kernel for."""
        return marlin_fault(shape)

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Repack the weights, bind the package's operator, and make the locks, all 0.

        Raises PlanError where no package can be used, or its operator lacks what the layer has.
        """
        name, device, scheme = self.capabilities.name, weights.w13.device, self.shape.scheme
        if fault := marlin_fault(self.shape):
            raise PlanError(f"experts {name} cannot be used: {fault}")
        operator = bind_marlin(name, device)
        for key, is_needed, is_there in (
            ("expert_bias", self.shape.has_bias, operator.supports_bias),
            (
                "quantization.has_input_order",
                scheme.has_input_order,
                operator.supports_input_order,
            ),
        ):
            if is_needed and not is_there:
                raise PlanError(
                    f"experts {name}: {key} is true, which {operator.source} has no argument for; "
                    f"install vllm 0.26 (ep-runtime[marlin]) or use experts: reference"
                )
        self._operator = operator
        self._locks = torch.zeros(_num_locks(device), dtype=torch.int32, device=device)
        most_slots = rows_per_pass(self.shape.top_k) * self.shape.top_k
        self._slots = torch.arange(most_slots, dtype=torch.int32, device=device)
        return repack_for_marlin(weights, self.shape)

    @property
    def operator(self) -> MarlinOperator:
        """What was bound. Raises PlanError before `prepare_weights`."""
        if self._operator is None:
            raise PlanError(
                f"experts {self.capabilities.name} runs on weights that its prepare_weights "
                f"returned; call it first"
            )
        return self._operator

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call of `max_rows` rows or fewer, whatever tiles it is cut into."""
        shape = self.shape
        num_slots = min(max_rows, rows_per_pass(shape.top_k)) * shape.top_k
        num_experts = shape.num_local_experts
        if num_slots == 0 or num_experts == 0:
            return 0
        size = num_slots * shape.dtype.itemsize
        # The first projection's results are dead before the second's are taken.
        widest = max(gate_up_columns(shape), shape.hidden_size)
        slots = aligned_bytes(size * shape.intermediate_size) + aligned_bytes(size * widest)
        tables = max(align_workspace_bytes(num_slots, num_experts, height) for height in HEIGHTS)
        return tables + aligned_bytes(4) + slots

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows from num_rows on come out as 0.

        Each slot's raw result is rounded to the layer's dtype before it is weighted.
        """
        name = self.capabilities.name
        if not isinstance(expert_input, StandardExpertInput):
            raise PlanError(f"experts: {name} takes the standard format; choose experts: reference")
        if expert_input.scales is not None:
            raise PlanError(
                f"experts {name} takes rows in the layer's dtype, and these are in fp8; set "
                f"dispatch_dtype: model"
            )
        rows, dtype = expert_input.hidden_states, self.shape.dtype
        if expert_input.topk_ids.numel() == 0 or weights.w13.shape[0] == 0:
            return torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        output = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        for part, out in row_passes(expert_input, output):
            self._run_pass(part, weights, workspace, out)
        return output

    def _run_pass(
        self,
        expert_input: StandardExpertInput,
        weights: ExpertWeights,
        workspace: Workspace,
        output: Tensor,
    ) -> None:
        """Compute the rows of one pass into `output` [n, H]."""
        shape, num_experts = self.shape, weights.w13.shape[0]
        rows = expert_input.hidden_states
        height = choose_height(len(rows), expert_input.num_source_rows, shape)
        num_slots = expert_input.topk_ids.numel()
        with workspace.frame():
            aligned = align_slots(
                expert_input, num_local_experts=num_experts, block_m=height, workspace=workspace
            )
            num_positions = workspace.take((1,), torch.int32)
            torch.mul(aligned.num_tiles, height, out=num_positions)
            activated = workspace.take((num_slots, shape.intermediate_size), shape.dtype)
            with workspace.frame():
                gate_up = workspace.take((num_slots, gate_up_columns(shape)), shape.dtype)
                self._multiply(
                    _readable(rows),
                    (weights.w13, weights.w13_quant, weights.w13_bias),
                    (aligned, num_positions),
                    topk_weights=expert_input.topk_weights,
                    out=gate_up,
                )
                activate_slots(
                    gate_up,
                    expert_input,
                    shape.activation,
                    num_local_experts=num_experts,
                    out=activated,
                )
            outputs = workspace.take((num_slots, shape.hidden_size), shape.dtype)
            self._multiply(
                activated,
                (weights.w2, weights.w2_quant, weights.w2_bias),
                (aligned, num_positions),
                topk_weights=expert_input.topk_weights,
                out=outputs,
            )
            sum_slots(
                outputs,
                expert_input,
                num_local_experts=num_experts,
                out=output,
                slot_positions=self._slots[:num_slots],
            )

    def _multiply(
        self,
        rows: Tensor,
        projection: tuple[Tensor, QuantParameters | None, Tensor | None],
        tiles: tuple[AlignedSlots, Tensor],
        *,
        topk_weights: Tensor,
        out: Tensor,
    ) -> None:
        """out[s] = rows[s // k] @ weight[expert of s].T + bias, raw, for the slots in the tiles.

        rows: [n, K] contiguous, of k = N / n slots each. projection: words, parameters and bias as
        `repack_for_marlin` returns them. tiles: and the number of their positions, [1] int32.
        topk_weights: of no effect on raw results. out: [N, columns] contiguous; other slots are
        not written.
        """
        (words, quant, bias), (aligned, num_positions) = projection, tiles
        if quant is None:
            raise PlanError("experts marlin runs on weights that its prepare_weights returned")
        self.operator(
            {
                "a": rows,
                "c_or_none": out,
                "b_q_weight": words,
                "b_bias_or_none": bias,
                "b_scales": quant.scales,
                "b_zeros_or_none": quant.zero_points,
                # Where all of K is here, groups follow each other in stored order: of the groups'
                # own table only the size is looked at.
                "g_idx_or_none": quant.input_order,
                "perm_or_none": quant.input_order,
                "workspace": self._locks,
                "sorted_token_ids": aligned.slots,
                "expert_ids": aligned.tile_experts,
                "num_tokens_past_padded": num_positions,
                "topk_weights": topk_weights,
                "moe_block_size": aligned.block_m,
                "top_k": aligned.num_slots // len(rows),
                "b_type_id": weight_type_id(self.shape.scheme),
                "size_m": len(rows),
                "size_n": out.shape[1],
                "size_k": rows.shape[1],
            }
        )


def choose_height(num_rows: int, num_source_rows: int | None, shape: ExpertsShape) -> int:
    """The lowest tile of which an even share of the slots fills at most nine tenths; else the
    highest. That is also vLLM 0.26's choice (`fused_marlin_moe`), but for its tile of 48."""
    share = rows_per_expert(num_rows, num_source_rows, shape)
    return next((height for height in HEIGHTS if share < 0.9 * height), HEIGHTS[-1])


def _readable(rows: Tensor) -> Tensor:
    """The rows as the GEMM reads them; copies only what is not so already."""
    dense = rows.contiguous()
    return dense if dense.data_ptr() % _ALIGNMENT == 0 else dense.clone()


def _num_locks(device: torch.device) -> int:
    on_device = num_multiprocessors(device, off_gpu=H200_MULTIPROCESSORS)
    return on_device * _LOCKS_PER_MULTIPROCESSOR
