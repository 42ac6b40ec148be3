"""Loads a Hugging Face checkpoint as an expert-parallel model."""

import base64
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from ep_runtime.agreement import agree_plan
from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.config import MoEConfig, SharedExpertsConfig
from ep_runtime.distributed import EPContext
from ep_runtime.expert_loading import (
    ExpertBuffers,
    ExpertLoader,
    LoadReport,
    prove_coverage,
    wanted_parts,
)
from ep_runtime.expert_parallel_model import ExpertParallelModel, MoEBlock
from ep_runtime.generation import GreedyOutput as GreedyOutput
from ep_runtime.generation import greedy_generate as greedy_generate
from ep_runtime.kernels.errors import CheckpointError, RankFailure
from ep_runtime.kernels.quant.storage import tensors_of
from ep_runtime.layer import MoELayer
from ep_runtime.machine import Machine
from ep_runtime.opened_checkpoint import OpenedCheckpoint
from ep_runtime.plan import Plan, resolve_plan
from ep_runtime.skeleton import load_dense
from ep_runtime.stored_weight import StoredWeight
from ep_runtime.weight_reader import WeightReader

ResultT = TypeVar("ResultT")


def load_model(
    path: str | Path,
    ctx: EPContext,
    *,
    experts: str = "auto",
    shared_experts: SharedExpertsConfig | None = None,
    dtype: str | torch.dtype | None = None,
    progress: bool = True,
) -> ExpertParallelModel:
    """Load a Hugging Face checkpoint, each rank its own experts; a collective of all ranks.

    path: a directory with config.json and safetensors files; no code of it is run.
    dtype: of the model, None for the checkpoint's own; quantised experts stay as they are stored,
    and everything else that is quantised is dequantised into it. progress: a bar on rank 0's
    stderr.

    Raises on all ranks: CheckpointError (a tensor is missing, left over, misshapen, damaged, or
    not read exactly once; ranks see different checkpoints), ConfigError, PlanError. Where only
    one rank fails, the others raise RankFailure with its reason.
    """
    opened, digests = _agree(
        ctx, lambda: OpenedCheckpoint(path, dtype), lambda opened: opened.digest
    )
    if len(set(digests)) > 1:
        others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        raise CheckpointError(
            f"{path}: ranks {others} see another checkpoint than rank 0; give every rank the same"
        )
    machine = Machine.detect(ctx.device.type)
    plans: dict[MoEConfig, Plan] = {}  # more than one where some layers are not quantised
    for moe in dict.fromkeys((opened.moe, *opened.moe_of_layer.values())):
        plans[moe] = resolve_plan(
            moe, ctx.parallel, machine, experts=experts, shared_experts=shared_experts
        )
        agree_plan(plans[moe], ctx.step_group)
    skeleton = opened.skeleton
    # The layers that receive most come first: the backends of the others find room beside theirs.
    most_bytes = {moe: max(b.receive for b in plan.bytes_per_rank) for moe, plan in plans.items()}
    largest_first = sorted(opened.moe_of_layer.items(), key=lambda item: -most_bytes[item[1]])
    built = {i: MoELayer(moe, ctx, plan=plans[moe]) for i, moe in largest_first}
    layers = {i: built[i] for i in opened.moe_of_layer}
    with opened.reader:
        report, reports = _agree(
            ctx,
            lambda: _load_weights(opened, layers, ctx, progress=progress and ctx.rank == 0),
            lambda report: report.experts_read,
        )
    wanted = wanted_parts(opened.names.slots, opened.moe.num_experts)
    for first in range(0, ctx.world_size, ctx.parallel.ep_size):
        group = reports[first : first + ctx.parallel.ep_size]
        prove_coverage(wanted, group)
    _agree(ctx, lambda: _finish_loading(layers), lambda _: None)
    for i, layer in layers.items():
        skeleton.set_block(i, MoEBlock(layer, skeleton.family.returns_router_scores))
    return ExpertParallelModel(skeleton, list(layers.values()), plans[opened.moe], report).eval()


def _finish_loading(layers: Mapping[int, MoELayer]) -> None:
    """Bring the experts into their kernels' layouts, which may refuse values of this rank's."""
    for i, layer in layers.items():
        try:
            layer.finish_loading()
        except CheckpointError as error:
            raise CheckpointError(f"layer {i}, experts of rank {layer.ctx.rank}: {error}") from None


@torch.no_grad()
def _load_weights(
    opened: OpenedCheckpoint, layers: Mapping[int, MoELayer], ctx: EPContext, *, progress: bool
) -> LoadReport:
    """Read the dense part and this rank's experts, in the order of the files."""
    reader, names = opened.reader, opened.names
    loader, weights = ExpertLoader(reader, opened.skeleton.family), WeightReader(reader)
    buffers = {i: _buffers_of(layer) for i, layer in layers.items()}
    expert_bytes = sum(w.num_bytes(reader) for slot, w in names.slots.items() if slot.is_routed)
    all_weights = (*names.slots.values(), *names.dense.values())
    all_bytes = sum(weight.num_bytes(reader) for weight in all_weights)
    own = len(layers[min(layers)].local_expert_ids) / opened.moe.num_experts
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task("", total=all_bytes - expert_bytes * (1 - own))
        num_tensors = load_dense(
            opened.skeleton,
            weights,
            names.dense,
            ctx.device,
            lambda num_bytes: bar.advance(task, num_bytes),
        )
        in_file_order = sorted(
            names.slots.items(), key=lambda item: reader.tensors[item[1].name].file
        )
        for slot, weight in in_file_order:
            before = reader.bytes_read
            if slot.is_routed:
                loader.read(slot, weight, buffers[slot.layer])
            else:
                _read_replicated(weights, weight, slot.part, layers[slot.layer])
                num_tensors += len(weight.tensors)
            bar.advance(task, reader.bytes_read - before)
    return LoadReport(
        bytes_read=reader.bytes_read,
        expert_bytes_read=loader.bytes_read,
        expert_bytes_in_checkpoint=expert_bytes,
        num_tensors_read=num_tensors + loader.num_tensors_read,
        experts_read=loader.experts_read(),
        unused=names.unused,
    )


def _buffers_of(layer: MoELayer) -> ExpertBuffers:
    """Where a layer's routed experts go."""
    return ExpertBuffers(
        layer.local_expert_ids,
        layer.w13,
        layer.w2,
        layer.w13_bias,
        layer.w2_bias,
        layer.w13_quant,
        layer.w2_quant,
        layer.moe.quantization,
    )


def _read_replicated(
    weights: WeightReader, weight: StoredWeight, part: str, layer: MoELayer
) -> None:
    """Read a weight that every rank holds: the router's, or a part of the shared expert."""
    places: Mapping[str, Tensor] | Tensor | None = {
        "router": layer.router.weight,
        "router_bias": layer.router.bias,
        "correction_bias": layer.router.correction_bias,
    }.get(part)
    if places is None and layer.shared is not None and part.startswith("shared"):
        places = layer.shared.places(part)
    if places is None:
        raise RuntimeError(f"the layer has no place for {part}")
    if isinstance(places, Tensor):
        weights.read_into(weight, places)
        return
    stored = tensors_of(weights.read_quantized(weight, layer.ctx.device))
    for name, place in places.items():
        place.copy_(stored[name])


def _agree(
    ctx: EPContext, action: Callable[[], ResultT], share: Callable[[ResultT], Any]
) -> tuple[ResultT, list[Any]]:
    """Do something that may fail on one rank only; a collective of all ranks.

    Returns the result, and what every rank shares of its own. Raises the rank's own error, or
    RankFailure where another rank failed.
    """
    result: ResultT | None = None
    shared: tuple[str | None, Any]
    error: Exception | None = None
    try:
        result = action()
        shared = (None, share(result))
    except Exception as failure:
        error, shared = failure, (f"{type(failure).__name__}: {failure}", None)
    try:
        texts = gather_texts(base64.b64encode(pickle.dumps(shared)).decode(), ctx.world_group)
    except RankFailure:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    by_rank = [pickle.loads(base64.b64decode(text)) for text in texts]
    for rank, (reason, _) in enumerate(by_rank):
        if reason is not None:
            raise RankFailure(f"rank {rank} failed to load the checkpoint: {reason}")
    return cast(ResultT, result), [value for _, value in by_rank]
