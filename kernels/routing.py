"""From router logits to expert ids and weights: the definition, in plain torch.

Shapes: T rows, E experts, K top-k slots, G expert groups of E / G neighbouring experts.
"""

import torch
from torch import Tensor

from ep_runtime.kernels.base import Routing, RoutingSpec
from ep_runtime.kernels.errors import ConfigError

# What DeepSeek-V3's router adds to the sum it divides by, so that 0 / 0 is 0.
NORM_EPSILON = 1e-20


def route_tokens(logits: Tensor, spec: RoutingSpec, correction_bias: Tensor | None) -> Routing:
    """Choose each row's experts and their weights.

    logits: [T, E], taken as float32; T may be 0.
    correction_bias: [E] or None; added to the scores for the choice, in float32; weights come
    from the scores without it.

    Returns K distinct ids a row in falling order of choice; equal ones in rising order of id.
    A row whose scores hold a NaN (a NaN logit; +inf under softmax) is not routed: its ids are -1
    and its weights 0. Does not wait for the device. Raises ConfigError for a spec or bias that
    fits no row.

    Sources: Mixtral and Qwen-MoE (softmax), DeepSeek-V2 (groups scored by their best expert),
    DeepSeek-V3 (sigmoid, correction bias, groups scored by the sum of their two best).

    Example: scores (.5, .4), bias (0, 5), K = 1, not normalised: expert 1 with weight .4.
    """
    check_routing(logits, spec, correction_bias)
    logits = logits.float()
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if spec.n_group > 1:
        choice = choice.masked_fill(~_chosen_groups(choice, spec), float("-inf"))
    ids = _largest(choice, spec.top_k)
    weights = scores.gather(1, ids)
    if spec.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + NORM_EPSILON)
    weights = weights * spec.routed_scaling_factor
    not_routed = scores.isnan().any(dim=-1, keepdim=True)
    return Routing(
        topk_ids=ids.masked_fill(not_routed, -1).to(torch.int32),
        topk_weights=weights.masked_fill(not_routed, 0.0),
    )


def keep_known_ids(topk_ids: Tensor, num_experts: int) -> Tensor:
    """int32 ids; -1 in place of one outside [0, num_experts)."""
    is_known = (topk_ids >= 0) & (topk_ids < num_experts)
    return torch.where(is_known, topk_ids, -1).to(torch.int32)


def count_slots(counts: Tensor, topk_ids: Tensor, num_rows: Tensor | None) -> None:
    """Add to `counts` each local expert's slots.

    counts: [E_local] int64. topk_ids: [R, K] local ids or -1. num_rows: [1], of which rows count;
    None: all. Does not wait for the device.
    """
    if counts.numel() == 0 or topk_ids.numel() == 0:
        return
    is_here = topk_ids >= 0
    if num_rows is not None:
        rows = torch.arange(topk_ids.shape[0], device=topk_ids.device)
        is_here = is_here & (rows < num_rows)[:, None]
    index = torch.where(is_here, topk_ids, 0).flatten().long()
    counts.scatter_add_(0, index, is_here.flatten().long())


def check_routing(logits: Tensor, spec: RoutingSpec, correction_bias: Tensor | None) -> None:
    """Raise ConfigError for a spec, logits or a bias that `route_tokens` does not take."""
    _check_spec(spec)
    _check_tensors(logits, spec, correction_bias)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row; of equal ones the lower index first.

    A stable sort, because torch.topk leaves the order of equal values open.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _chosen_groups(choice: Tensor, spec: RoutingSpec) -> Tensor:
    """[T, E] bool: whether an expert's group is among its row's `topk_group` best.

    Example: E = 4, G = 2, topk_group 1, max: choice (.1, .4, .3, .2) gives (1, 1, 0, 0);
    with top2_sum the groups tie at .5 and the lower one is taken.
    """
    grouped = choice.view(len(choice), spec.n_group, spec.num_experts // spec.n_group)
    if spec.group_score == "max":
        group_scores = grouped.amax(dim=-1)
    else:
        group_scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    groups = _largest(group_scores, spec.topk_group)
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, groups, True)
    return chosen.repeat_interleave(grouped.shape[-1], dim=1)


def _check_spec(spec: RoutingSpec) -> None:
    if spec.scoring not in ("softmax", "sigmoid"):
        raise ConfigError(f"scoring ({spec.scoring!r}) must be softmax or sigmoid")
    if spec.group_score not in ("max", "top2_sum"):
        raise ConfigError(f"group_score ({spec.group_score!r}) must be max or top2_sum")
    if not 1 <= spec.top_k <= spec.num_experts:
        raise ConfigError(f"top_k ({spec.top_k}) must be in 1..num_experts ({spec.num_experts})")
    if spec.n_group < 1 or spec.num_experts % spec.n_group:
        raise ConfigError(
            f"n_group ({spec.n_group}) must divide num_experts ({spec.num_experts}) evenly"
        )
    if not 1 <= spec.topk_group <= spec.n_group:
        raise ConfigError(f"topk_group ({spec.topk_group}) must be in 1..n_group ({spec.n_group})")
    group_size = spec.num_experts // spec.n_group
    if spec.top_k > spec.topk_group * group_size:
        raise ConfigError(
            f"top_k ({spec.top_k}) exceeds the {spec.topk_group * group_size} experts that "
            f"topk_group ({spec.topk_group}) groups of {group_size} hold; raise topk_group"
        )
    if spec.n_group > 1 and spec.group_score == "top2_sum" and group_size < 2:
        raise ConfigError(
            f"group_score top2_sum needs groups of 2 experts or more; num_experts "
            f"({spec.num_experts}) over n_group ({spec.n_group}) gives {group_size}"
        )


def _check_tensors(logits: Tensor, spec: RoutingSpec, correction_bias: Tensor | None) -> None:
    if logits.ndim != 2 or logits.shape[1] != spec.num_experts:
        raise ConfigError(
            f"router logits have shape {list(logits.shape)}; "
            f"num_experts ({spec.num_experts}) asks for [T, {spec.num_experts}]"
        )
    if correction_bias is not None and correction_bias.shape != (spec.num_experts,):
        raise ConfigError(
            f"correction_bias has shape {list(correction_bias.shape)}; "
            f"num_experts ({spec.num_experts}) asks for [{spec.num_experts}]"
        )
