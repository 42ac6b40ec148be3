"""The backend of one rank: no communication.

Wire protocol: none. prepare maps global expert ids to local ones; dispatch hands the caller's own
rows to the experts kernel; combine hands its output back. Never waits; can be captured.
"""

from typing import ClassVar

from torch import Tensor

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    CombineBias,
    EPGroup,
    Finished,
    RoutedTokens,
)
from ep_runtime.all2all.expert_ids import IdTable, local_expert_map
from ep_runtime.kernels.base import (
    Concurrency,
    ConcurrencyRule,
    ExpertInput,
    InputFormat,
    StandardExpertInput,
)
from ep_runtime.kernels.errors import ConfigError


class LocalBackend:
    """All experts on this rank."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        name="local",
        format=InputFormat.STANDARD,
        supports_async=False,
        combine_bias=CombineBias.NONE,
        uneven_experts=True,
        supports_cuda_graph=True,
        max_ep_size=1,
        communication=ConcurrencyRule(
            None,
            Concurrency.CERTIFIED,
            "tests/ep_runtime/test_audit_streams.py"
            "::test_the_real_code_orders_everything_under_every_schedule",
            owns="nothing; it launches no communication",
            record="benchmarks/results/audit_triton.json",
        ),
    )

    def __init__(self, group: EPGroup, shape: BackendShape) -> None:
        if group.size != 1:
            raise ConfigError(
                f"all2all_backend local needs ep_size 1, got ep_size ({group.size}); use "
                f"all2all_backend: naive or all_to_all"
            )
        self._local_ids = IdTable(local_expert_map(shape.placement, group))

    def prepare(self, tokens: RoutedTokens) -> StandardExpertInput:
        return StandardExpertInput(
            hidden_states=tokens.hidden_states.contiguous(),
            topk_ids=self._local_ids.look_up(tokens.topk_ids),
            topk_weights=tokens.topk_weights.contiguous(),
            num_source_rows=tokens.topk_ids.shape[0],
        )

    def dispatch(self, prepared: StandardExpertInput) -> Finished[tuple[ExpertInput, None]]:
        return Finished((prepared, None))

    def combine(
        self, expert_output: Tensor, handle: None, bias: Tensor | None = None
    ) -> Finished[Tensor]:
        if bias is not None:
            raise ValueError("local's combine takes no bias; add it to the result")
        return Finished(expert_output)

    def check(self) -> None:
        return None

    def close(self) -> None:
        return None
