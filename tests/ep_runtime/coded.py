"""Layers whose output says who took part: expert e returns code[e] * x, the shared one its own.

Column 0 of every row is 1, so gate . row is 32 for a gate of 32 * e_0, and silu(32) is 32 in
float32. With up the identity and w2 = code / 32 * identity the expert is exactly code * x.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine, TritonMode
from ep_runtime.plan import resolve_plan
from ep_runtime.streams import CpuStreams
from tests.ep_runtime.recording import RecordingStreams, record_shared_expert

HIDDEN = 8
# Read in decimal: digit e counts expert e, the digit 10^5 the shared expert.
POWERS_OF_TEN = (1.0, 10.0, 100.0, 1000.0, 10000.0)
SHARED_DIGIT = 100000.0

MACHINES = {
    "cpu": Machine("cpu", "cpu", TritonMode.UNUSABLE),
    "cuda": Machine("simulated", "cuda", TritonMode.UNUSABLE),
}


def coded_config(num_experts: int, top_k: int, **changes: Any) -> MoEConfig:
    """A float32 layer with one shared expert of the routed width."""
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": HIDDEN,
        "num_experts": num_experts,
        "top_k": top_k,
        "num_shared_experts": 1,
        "dtype": "float32",
    }
    return MoEConfig(**(values | changes))


def coded_weights(
    moe: MoEConfig, codes: Sequence[float], shared_code: float | None
) -> dict[str, Any]:
    """What `load_experts` takes. The router likes expert e for rows with a large column e + 1."""
    router = torch.zeros(moe.num_experts, HIDDEN)
    for expert in range(moe.num_experts):
        router[expert, 1 + expert % (HIDDEN - 1)] = 1.0
    w13, w2 = (torch.stack(part) for part in zip(*map(_expert, codes), strict=True))
    weights: dict[str, Any] = {"w13": w13, "w2": w2, "router": router}
    if shared_code is not None:
        shared13, shared2 = _expert(shared_code)
        gate = torch.zeros(1, HIDDEN) if moe.shared_expert_gate else None
        weights["shared"] = {"w13": shared13, "w2": shared2, "gate": gate}
    return weights


def _expert(code: float) -> tuple[Tensor, Tensor]:
    gate = torch.zeros(HIDDEN, HIDDEN)
    gate[:, 0] = 32.0
    return torch.cat([gate, torch.eye(HIDDEN)]), torch.eye(HIDDEN) * (code / 32)


def coded_rows(num_rows: int, seed: int) -> Tensor:
    """[num_rows, H] small integers that differ between seeds; column 0 is 1."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = torch.randint(1, 8, (num_rows, HIDDEN), generator=generator).float()
    rows[:, 0] = 1.0
    return rows


def coded_routing(
    num_rows: int, moe: MoEConfig, seed: int, weight: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Distinct ids for each row, and equal weights."""
    generator = torch.Generator().manual_seed(2000 + seed)
    scores = torch.rand(num_rows, moe.num_experts, generator=generator)
    ids = scores.argsort(dim=1)[:, : moe.top_k]
    return ids, torch.full(ids.shape, weight)


def coded_output(
    rows: Tensor, ids: Tensor, weights: Tensor, codes: Sequence[float], shared: float
) -> Tensor:
    """What the layer must return, in closed form; ids outside the codes add nothing."""
    total = torch.full((rows.shape[0], 1), shared)
    for expert, code in enumerate(codes):
        total += (weights * (ids == expert)).sum(dim=1, keepdim=True) * code
    return rows * total


def build_layer(
    ctx: EPContext,
    moe: MoEConfig,
    *,
    backend: str,
    experts: str,
    device: str = "cpu",
    overlap: str = "auto",
    token_threshold: int = 256,
) -> MoELayer:
    """A layer on CPU ranks, planned for a CPU or for a CUDA device whose streams are recorded."""
    if device == "cuda":
        if not isinstance(ctx.streams, RecordingStreams):
            ctx.streams = RecordingStreams()
    else:
        ctx.streams = CpuStreams()
    plan = resolve_plan(
        moe,
        ctx.parallel.model_copy(update={"all2all_backend": backend}),
        MACHINES[device],
        experts=experts,
        shared_experts=SharedExpertsConfig.model_validate(
            {"overlap": overlap, "token_threshold": token_threshold}
        ),
    )
    layer = MoELayer(moe, ctx, plan=plan)
    if layer.shared is not None:
        record_shared_expert(layer)
    return layer
