"""Which rank of an EP group holds which expert."""

from ep_runtime.all2all.base import ExpertPlacement
from ep_runtime.kernels.errors import ConfigError

STRATEGIES = ("linear", "round_robin")


def place_experts(strategy: str, num_experts: int, ep_size: int) -> ExpertPlacement:
    """Spread experts over the ranks of an EP group; the first ranks hold one more if uneven.

    linear: contiguous blocks. Example: 29 experts on 8 ranks hold 4, 4, 4, 4, 4, 3, 3, 3.
    round_robin: expert e on rank e % ep_size. Example: 5 on 2 ranks: {0, 2, 4} and {1, 3}.
    """
    if strategy == "linear":
        base, extra = divmod(num_experts, ep_size)
        counts = [base + (rank < extra) for rank in range(ep_size)]
        owned = [(rank, i) for rank, count in enumerate(counts) for i in range(count)]
    elif strategy == "round_robin":
        owned = [(e % ep_size, e // ep_size) for e in range(num_experts)]
    else:
        raise ConfigError(
            f"expert_placement_strategy {strategy!r} is unknown; choose one of: "
            f"{', '.join(STRATEGIES)}"
        )
    return ExpertPlacement(
        strategy=strategy,
        ep_size=ep_size,
        rank_of=tuple(rank for rank, _ in owned),
        local_id_of=tuple(local_id for _, local_id in owned),
    )
