"""What is sent in a benchmark: a few sets of seeded rows and routing, and what they weigh."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ep_runtime.all2all.base import BackendShape, ExpertPlacement, RoutedTokens
from ep_runtime.config import MoEConfig
from ep_runtime.kernels.quant.scheme import QuantScheme
from ep_runtime.kernels.quant.storage import stored_shapes
from ep_runtime.launch.bench_config import BenchConfig
from ep_runtime.launch.workload import make_routing, make_rows

# Calls take turns among so many sets, so that no call finds its own input in a cache.
NUM_INPUT_SETS = 4


@dataclass(frozen=True)
class Case:
    """One combination of sizes, dtype and routing."""

    moe: MoEConfig
    routing: str
    tokens_per_rank: int

    def sizes(self) -> dict[str, int | str]:
        """What tells cases apart, under the configuration's keys."""
        moe = self.moe
        return {
            "tokens_per_rank": self.tokens_per_rank,
            "hidden_size": moe.hidden_size,
            "num_experts": moe.num_experts,
            "top_k": moe.top_k,
            "moe_intermediate_size": moe.moe_intermediate_size,
            "dtype": moe.dtype,
            "quantization": str(moe.quantization.weight),
            "routing": self.routing,
        }


def cases_of(config: BenchConfig, moe: MoEConfig) -> list[Case]:
    """The cases of one layer."""
    return [
        Case(moe, routing, num_tokens)
        for routing in config.routing
        for num_tokens in config.tokens_per_rank
    ]


def make_input_sets(
    case: Case, *, ep_rank: int, ep_size: int, seed: int, device: torch.device
) -> list[RoutedTokens]:
    """A rank's rows and where they go, NUM_INPUT_SETS times from different seeds.

    Under routing `model` the ids are random: the layer's own router decides in `layer` alone.
    """
    kind = "random" if case.routing == "model" else case.routing
    sets = []
    for index in range(NUM_INPUT_SETS):
        own_seed = seed * NUM_INPUT_SETS + index
        rows = make_rows(case.moe, case.tokens_per_rank, seed=own_seed, dp_rank=ep_rank)
        routing = make_routing(kind, case.moe, case.tokens_per_rank, seed=own_seed, dp_rank=ep_rank)
        if routing is None:
            raise RuntimeError(f"routing {kind} gives no ids")
        sets.append(
            RoutedTokens(
                hidden_states=rows.to(device),
                topk_ids=routing.topk_ids.to(device),
                topk_weights=routing.topk_weights.to(device),
                rows_per_rank=(case.tokens_per_rank,) * ep_size,
            )
        )
    return sets


@dataclass(frozen=True)
class Load:
    """What a rank's input sets ask for, over all of them.

    rows_to: rows that go to each rank which holds one of their experts, own rank included.
    experts_hit: global ids that are chosen at least once, per set.
    """

    rows_to: list[int]
    experts_hit: list[list[int]]


def load_of(sets: Sequence[RoutedTokens], placement: ExpertPlacement) -> Load:
    """Count this rank's rows by destination; a row counts once for a rank, however many slots."""
    rank_of = torch.tensor(placement.rank_of)
    rows_to = torch.zeros(placement.ep_size, dtype=torch.int64)
    hit = []
    for tokens in sets:
        ids = tokens.topk_ids.cpu().long()
        goes_there = torch.zeros(len(ids), placement.ep_size, dtype=torch.bool)
        goes_there.scatter_(1, rank_of[ids], True)
        rows_to += goes_there.sum(0)
        hit.append([int(expert) for expert in ids.unique()])
    return Load(rows_to.tolist(), hit)


def link_bytes(loads: Sequence[Load], row_bytes: int) -> int:
    """Bytes of rows through the busiest rank's link, in the busier direction, a call.

    loads: of every rank. row_bytes: of one row as it travels. Each (row, other rank) pair counts
    once: the least that must travel.
    """
    sent = [sum(load.rows_to) - load.rows_to[rank] for rank, load in enumerate(loads)]
    received = [
        sum(load.rows_to[rank] for source, load in enumerate(loads) if source != rank)
        for rank in range(len(loads))
    ]
    rows = max(*sent, *received) / NUM_INPUT_SETS
    return round(rows * row_bytes)


def experts_bytes(loads: Sequence[Load], moe: MoEConfig, shape: BackendShape) -> int:
    """Bytes of the busiest rank's experts a call: weights hit, rows in and out, each once."""
    itemsize, placement = moe.torch_dtype.itemsize, shape.placement
    per_expert = expert_weight_bytes(moe)
    in_and_out = shape.sent_row_bytes + moe.hidden_size * itemsize
    most = 0.0
    for rank in range(placement.ep_size):
        num_rows = sum(load.rows_to[rank] for load in loads)
        num_hit = 0
        for index in range(NUM_INPUT_SETS):
            hit = {expert for load in loads for expert in load.experts_hit[index]}
            num_hit += sum(placement.rank_of[expert] == rank for expert in hit)
        most = max(most, num_hit * per_expert + num_rows * in_and_out)
    return round(most / NUM_INPUT_SETS)


def shared_bytes(case: Case) -> int:
    """Bytes of the shared expert a call: its weights as stored, rows in and out, each once."""
    moe = case.moe
    weights = _weight_bytes(moe, moe.shared_intermediate_size, moe.shared_quantization)
    return weights + case.tokens_per_rank * 2 * moe.hidden_size * moe.torch_dtype.itemsize


def expert_weight_bytes(moe: MoEConfig) -> int:
    """Bytes of w13 and w2 of a routed expert as its scheme stores them, scales included."""
    return _weight_bytes(moe, moe.moe_intermediate_size, moe.quantization)


def _weight_bytes(moe: MoEConfig, width: int, scheme: QuantScheme) -> int:
    hidden = moe.hidden_size
    if not scheme.is_quantised:
        return expert_elements(moe, width) * moe.torch_dtype.itemsize
    parts = 2 if moe.experts_activation().is_gated else 1
    num_bytes = 0
    for rows, columns, num_parts in ((parts * width, hidden, parts), (hidden, width, 1)):
        shapes = stored_shapes(scheme, rows, columns, num_parts=num_parts, dtype=moe.torch_dtype)
        num_bytes += sum(prod(one.shape) * one.dtype.itemsize for one in shapes.values())
    return num_bytes


def expert_elements(moe: MoEConfig, width: int) -> int:
    """Elements of w13 and w2 of an expert of that width."""
    return moe.hidden_size * width * (3 if moe.experts_activation().is_gated else 2)
