"""A plan for a reader: what was chosen, what was not, and why."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ep_runtime.all2all.base import ExpertPlacement
from ep_runtime.all2all.registry import backend_class
from ep_runtime.kernels.quant.scheme import QuantScheme, RowScheme, WeightScheme
from ep_runtime.kernels.registry import experts_class
from ep_runtime.plan import Plan, RankBytes
from ep_runtime.shared_compute import SharedCompute


def explain_plan(plan: Plan) -> Iterator[str]:
    """The lines of `Plan.explain`."""
    moe, parallel = plan.moe, plan.parallel
    num_groups = parallel.world_size // parallel.ep_size
    yield (
        f"plan {plan.digest()[:12]} for {plan.machine.name}: {parallel.world_size} ranks "
        f"(dp {parallel.dp_size} x tp {parallel.tp_size}), {num_groups} EP "
        f"group{'s' if num_groups > 1 else ''} of {parallel.ep_size}"
    )
    yield (
        f"layer      {moe.num_experts} experts, top-{moe.top_k}, hidden {moe.hidden_size}, "
        f"intermediate {moe.moe_intermediate_size}, {moe.activation}, {moe.dtype}"
        f"{_scheme_text(moe.quantization, moe.num_experts)}"
    )
    backend = backend_class(plan.backend).capabilities
    kernel = experts_class(plan.experts).capabilities
    yield (
        f"backend    {plan.backend}: {backend.format} rows, "
        f"{'asynchronous' if backend.supports_async else 'synchronous'}, "
        f"combine bias {backend.combine_bias}"
    )
    yield from _explain_rejections(plan, "backend")
    yield f"experts    {plan.experts}: {kernel.kind}"
    yield from _explain_tuning(plan)
    yield from _explain_rejections(plan, "experts")
    yield f"dispatch   rows {_rows_text(plan)}"
    yield from _explain_rejections(plan, "dispatch")
    yield f"placement  {plan.placement.strategy}, by rank of an EP group"
    yield from _explain_placement(plan.placement)
    yield from _explain_shared(plan)
    yield "bytes per rank, one layer"
    for ranks, text in _runs([_bytes_text(b) for b in plan.bytes_per_rank]):
        yield f"  {_ranks_text(ranks)}: {text}"


def _explain_tuning(plan: Plan) -> Iterator[str]:
    """Where the kernel's tiles come from, by rank of an EP group."""
    if plan.machine.device_type != "cuda":
        return
    kernel, machine = experts_class(plan.experts), plan.machine
    texts = [
        kernel(plan.experts_shape(rank)).tuning_text(machine.name, machine.compute_capability)
        for rank in range(plan.placement.ep_size)
    ]
    for ranks, text in _runs(texts):
        if text is not None:
            where = "" if len(ranks) == len(texts) else f", {_ranks_text(ranks)}"
            yield f"  tiles{where}: {text}"


def _rows_text(plan: Plan) -> str:
    if plan.rows is RowScheme.MODEL:
        return f"as {plan.rows}: in {plan.moe.dtype}"
    return f"as {plan.rows}: in e4m3, with a float32 scale for every 128 columns"


def _scheme_text(scheme: QuantScheme, num_experts: int) -> str:
    """Example: `, experts int4_w4a16 group 128 zero points`."""
    if not scheme.is_quantised:
        return ""
    text = f", experts {scheme.weight}"
    if scheme.weight is WeightScheme.HYBRID:
        in_nvfp4 = len(scheme.nvfp4_experts)
        text += f" ({in_nvfp4} in nvfp4, {num_experts - in_nvfp4} in nf3)"
    text += f" group {scheme.group_size}" if scheme.group_size else ""
    text += " zero points" if scheme.has_zero_points else ""
    return text + (" input order" if scheme.has_input_order else "")


def _explain_shared(plan: Plan) -> Iterator[str]:
    ownership = plan.ownership
    width = plan.moe.shared_intermediate_size
    gate = ", with a sigmoid gate" if plan.moe.shared_expert_gate else ""
    yield "shared     " + (f"width {width}{gate}" if width else "none")
    if width:
        yield f"  weights {_compute_text(plan)}"
        yield from _explain_rejections(plan, "shared")
    yield (f"  owner, every rank: {ownership.owner} ({ownership.rule}: {ownership.reason})")
    yield from _explain_rejections(plan, "owner")
    for regime in ownership.regimes:
        rows = "any rows" if regime.max_tokens is None else f"rows <= {regime.max_tokens}"
        if regime.max_tokens is None and len(ownership.regimes) > 1:
            rows = "more rows"
        yield f"  {rows}: {regime.schedule} ({regime.rule}: {regime.reason})"


def _compute_text(plan: Plan) -> str:
    """How the shared expert is held and multiplied."""
    stored, dtype = plan.moe.shared_quantization.weight, plan.moe.dtype
    if plan.shared_compute is SharedCompute.FP8:
        return f"as stored, in {stored}; rows are quantised, products are of e4m3"
    held = f"in {dtype}"
    if stored is not WeightScheme.NONE:
        held += f", dequantised from {stored}"
    if plan.shared_compute is SharedCompute.KERNELS:
        return f"{held}; products of few rows by our kernels, of more by the library"
    return f"{held}; products by the library"


def _explain_rejections(plan: Plan, kind: str) -> Iterator[str]:
    for rejection in plan.rejections:
        if rejection.kind == kind:
            yield f"  not {rejection.name}: {rejection.reason}"


def _explain_placement(placement: ExpertPlacement) -> Iterator[str]:
    counts = [placement.num_local_experts(rank) for rank in range(placement.ep_size)]
    for ranks, _ in _runs(counts):
        experts = [e for rank in ranks for e in placement.experts_of(rank)]
        each = " each" if len(ranks) > 1 else ""
        which = "" if not experts else f": {min(experts)}-{max(experts)}"
        if experts and placement.strategy == "round_robin" and placement.ep_size > 1:
            which += f", expert e on rank e % {placement.ep_size}"
        count = counts[ranks[0]]
        yield f"  {_ranks_text(ranks)}: {count} expert{'' if count == 1 else 's'}{each}{which}"


def _bytes_text(rank: RankBytes) -> str:
    parts = [f"{name} {format_bytes(size)}" for name, size in vars(rank).items()]
    return ", ".join(parts)


def _runs(values: Sequence[object]) -> Iterator[tuple[range, object]]:
    """Neighbouring ranks with equal values. Example: a, a, b gives ranks 0-1 and rank 2."""
    start = 0
    for value, group in groupby(values):
        end = start + len(list(group))
        yield range(start, end), value
        start = end


def _ranks_text(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def format_bytes(size: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
