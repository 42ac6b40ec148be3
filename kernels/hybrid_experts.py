"""Experts whose weights are in two tiers, NVFP4 and NF3, as Triton kernels; standard format.

Few rows go through one launch of a resident grid over both tiers (kernels/hybrid_launch.py), more
through each tier's grouped GEMMs (kernels/hybrid_tiers.py). Both are EXCLUSIVE: the first waits for
its own programs, and one layer's calls go either way as rows come, so nothing may run beside it.
"""

import torch
from torch import Tensor

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
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.hybrid_launch import HybridGrid
from ep_runtime.kernels.hybrid_tiers import pack_hybrid_weights, run_tiers, tiers_bytes
from ep_runtime.kernels.quant.scheme import RowScheme, WeightScheme
from ep_runtime.kernels.row_passes import row_passes, rows_per_pass
from ep_runtime.kernels.workspace import Workspace


class HybridExperts(ModularExperts):
    """Both tiers' experts; equal inputs give bit-equal results on one device.

    On a CPU it runs in Triton's interpreter, for tests.
    """

    capabilities = ExpertsCapabilities(
        name="nvfp4_nf3_hybrid",
        kind=ExpertsKind.MODULAR,
        formats=frozenset({InputFormat.STANDARD}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        device_types=frozenset({"cpu", "cuda"}),
        activations=frozenset(ActivationKind),
        schemes=frozenset({WeightScheme.HYBRID}),
        rows=frozenset({RowScheme.MODEL}),
        needs_triton=True,
        concurrency=(
            ConcurrencyRule(
                None,
                Concurrency.EXCLUSIVE,
                "few rows go through a grid that waits for its own programs, which all must be on "
                "the device at once; more through per-tier GEMMs, which have no certificate of "
                "their own",
                owns="frames of the workspace it is given; barrier words for each workspace, 0 "
                "between launches; one word of pinned memory for a failure",
                record="benchmarks/results/audit_nvfp4_nf3_hybrid.json",
            ),
        ),
    )

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__(shape)
        self.grid = HybridGrid(shape)

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        """Both tiers repacked for the packed kernels; tiers stay as they are."""
        return pack_hybrid_weights(weights)

    def workspace_bytes(self, max_rows: int) -> int:
        """Enough for a call of `max_rows` rows or fewer, whichever way it goes."""
        num_rows = min(max_rows, rows_per_pass(self.shape.top_k))
        if num_rows * self.shape.top_k == 0 or self.shape.num_local_experts == 0:
            return 0
        return max(tiers_bytes(num_rows, self.shape), self.grid.workspace_bytes(num_rows))

    def check(self) -> None:
        """Raise RankFailure once a wait inside a launch of this layer has run out."""
        self.grid.check()

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        """See `ModularExperts.run`; rows from num_rows on come out as 0.

        Raises RankFailure once a wait of an earlier call has run out.
        """
        if not isinstance(expert_input, StandardExpertInput):
            raise PlanError(
                "experts: nvfp4_nf3_hybrid takes the standard format; choose experts: reference"
            )
        self.grid.check()
        rows, dtype = expert_input.hidden_states, self.shape.dtype
        if expert_input.scales is not None:
            raise PlanError(
                f"rows came as {rows.dtype} with scales, and with weights stored as "
                f"{WeightScheme.HYBRID} they must be in the layer's dtype; use "
                f"dispatch_dtype: model"
            )
        if expert_input.topk_ids.numel() == 0 or weights.num_experts == 0:
            return torch.zeros(rows.shape, dtype=dtype, device=rows.device)
        output = torch.empty(rows.shape, dtype=dtype, device=rows.device)
        if self.grid.takes(len(rows), rows.device):
            self.grid.run(expert_input, weights, workspace, output)
            return output
        for part, out in row_passes(expert_input, output):
            run_tiers(part, weights, self.shape, workspace, out)
        return output
