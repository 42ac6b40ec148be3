"""The contract of an all-to-all backend as cases that any backend can be put through.

Experts are coded: expert e returns (e + 1) * row, so a lost, doubled or misplaced share can be read
off. The first columns of a row say which EP rank and row it is, so a rank can check what landed on
it. Data is seeded by rank: any rank can rebuild any other's.

A backend outside this tree registers itself in a rank function that then calls `check_case`, and
runs it through `tests.harness.run_ranks` with `case.parallel(name)` for each of `contract_cases`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ep_runtime.all2all.base import (
    All2AllBackend,
    BackendCapabilities,
    BackendShape,
    CombineBias,
    ExpertPlacement,
    RoutedTokens,
)
from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.base import BatchedExpertInput, ExpertInput, StandardExpertInput
from ep_runtime.kernels.quant.fp8_rows import (
    dequantize_rows,
    num_groups,
    quantize_rows_reference,
)
from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.modular_kernel import num_rounds, round_rows, rows_in_round
from ep_runtime.placement import place_experts
from ep_runtime.row_counts import tp_slice

Device = Literal["auto", "cpu", "cuda"]
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
FP8_TOLERANCE = 6e-2  # against rows that were not quantised
# Of a row that another library quantised: now and then it rounds to the next number.
_FP8_ROW_TOLERANCE = 2e-2


@dataclass(frozen=True)
class ContractCase:
    """One situation that every backend must get right; `name` is its id and reads as a sentence.

    tokens: rows of each DP rank. routing: mixed (random, one slot in five not routed) | full |
    one_expert (all slots of all rows) | unrouted | last_rank (experts of the last EP rank only).
    """

    name: str
    tokens: tuple[int, ...]
    tp_size: int = 1
    ep_size: int | None = None
    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 16
    dtype: torch.dtype = torch.float32
    strategy: Literal["linear", "round_robin"] = "linear"
    routing: str = "mixed"
    max_tokens_per_rank: int = 16
    num_layers: int = 1
    rows: RowScheme = RowScheme.MODEL

    @property
    def group_size(self) -> int:
        return self.ep_size or len(self.tokens) * self.tp_size

    @property
    def has_even_experts(self) -> bool:
        return self.num_experts % self.group_size == 0

    def parallel(self, backend: str, device: Device = "cpu") -> ParallelConfig:
        return ParallelConfig(
            dp_size=len(self.tokens),
            tp_size=self.tp_size,
            ep_size=self.group_size,
            device=device,
            all2all_backend=backend,
            expert_placement_strategy=self.strategy,
            max_tokens_per_rank=self.max_tokens_per_rank,
            timeout_s=60,
        )

    def placement(self) -> ExpertPlacement:
        return place_experts(self.strategy, self.num_experts, self.group_size)

    def shape(self) -> BackendShape:
        return BackendShape(
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            top_k=self.top_k,
            dtype=self.dtype,
            max_tokens_per_rank=self.max_tokens_per_rank,
            placement=self.placement(),
            rows=self.rows,
        )


EIGHT_RANKS = (3, 0, 7, 1, 16, 2, 0, 5)
_ONE_RANK = (
    ContractCase("one rank", (5,)),
    ContractCase("one rank without rows", (0,)),
    ContractCase("one rank in bf16", (9,), dtype=torch.bfloat16),
    ContractCase("one rank takes three rounds", (11,), max_tokens_per_rank=4),
)
_EVEN = (
    ContractCase("uneven rows", (3, 5)),
    ContractCase("uneven rows over the padding", (7, 9)),
    ContractCase("equal rows", (6, 6)),
    ContractCase("no rows on the last rank", (4, 0)),
    ContractCase("no rows on the first rank", (0, 4)),
    ContractCase("no rows on any rank", (0, 0)),
    ContractCase("empty ranks over three layers", (4, 0), num_layers=3),
    ContractCase("no rows at all over three layers", (0, 0), num_layers=3),
    ContractCase("three layers in a row", (3, 5), num_layers=3),
    ContractCase("rounds of unequal ranks", (9, 2), max_tokens_per_rank=4),
    ContractCase("rounds of which one rank has none", (10, 0), max_tokens_per_rank=4),
    ContractCase("rounds that divide the rows", (8, 8), max_tokens_per_rank=4),
    ContractCase("every slot routed", (5, 6), routing="full"),
    ContractCase("no slot routed", (5, 6), routing="unrouted"),
    ContractCase("every row to one expert", (5, 6), routing="one_expert"),
    ContractCase("every row to the last rank", (5, 6), routing="last_rank"),
    ContractCase("one slot a row", (5, 6), top_k=1),
    ContractCase("as many slots as experts", (5, 6), top_k=8),
    ContractCase("more slots than experts of a rank", (5, 6), num_experts=4, top_k=3),
    ContractCase("round robin placement", (5, 6), strategy="round_robin"),
    ContractCase("bf16", (7, 9), dtype=torch.bfloat16),
    ContractCase("float16", (7, 9), dtype=torch.float16),
    ContractCase("four ranks", (3, 0, 7, 1)),
    ContractCase("four ranks, experts everywhere", (3, 2, 7, 1), top_k=8, routing="full"),
    ContractCase("four ranks in bf16", (3, 0, 7, 1), top_k=6, dtype=torch.bfloat16),
    ContractCase("four ranks with rounds", (9, 0, 2, 4), num_layers=3, max_tokens_per_rank=4),
    ContractCase("eight ranks", EIGHT_RANKS, num_experts=16, num_layers=3),
    ContractCase("eight ranks in bf16", EIGHT_RANKS, num_experts=64, top_k=8, dtype=torch.bfloat16),
    ContractCase("eight ranks with rounds", EIGHT_RANKS, max_tokens_per_rank=4),
    ContractCase("two groups of two", (3, 5, 0, 2), ep_size=2),
    ContractCase("two groups of four", EIGHT_RANKS, ep_size=4),
    ContractCase("two groups, one without rows", (3, 5, 0, 0), ep_size=2, num_layers=2),
    ContractCase("a DP group cut over two TP ranks", (5,), tp_size=2),
    ContractCase("TP slices of two DP groups", (5, 1), tp_size=2),
    ContractCase("a TP group over two EP groups", (5,), tp_size=4, ep_size=2),
)
_UNEVEN = (
    ContractCase("five experts on two ranks", (5, 6), num_experts=5),
    ContractCase(
        "five experts in turn on two ranks", (5, 6), num_experts=5, strategy="round_robin"
    ),
    ContractCase("29 experts on four ranks", (5, 6, 0, 2), num_experts=29, top_k=4),
    ContractCase("29 experts on eight ranks", EIGHT_RANKS, num_experts=29, top_k=8),
    ContractCase("two experts on four ranks", (5, 6, 0, 2), num_experts=2),
    ContractCase(
        "two experts in turn on four ranks", (5, 6, 0, 2), num_experts=2, strategy="round_robin"
    ),
)
_FP8 = tuple(
    replace(case, name=f"{case.name}, rows in fp8", rows=RowScheme.FP8_GROUP)
    for case in (
        ContractCase("one rank", (5,), hidden_size=256),
        ContractCase("bf16", (7, 9), hidden_size=256, dtype=torch.bfloat16),
        ContractCase("a partial group", (3, 5), hidden_size=300),
        ContractCase("rounds of which one rank has none", (10, 0), max_tokens_per_rank=4),
        ContractCase("four ranks over three layers", (3, 0, 7, 1), top_k=4, num_layers=3),
        ContractCase("eight ranks", EIGHT_RANKS, num_experts=64, top_k=8, hidden_size=256),
    )
)


def contract_cases(capabilities: BackendCapabilities) -> list[ContractCase]:
    """The cases that a backend with these capabilities must pass."""
    cases = list(_ONE_RANK)
    if RowScheme.FP8_GROUP in capabilities.row_schemes:
        cases += _FP8
    if capabilities.max_ep_size == 1:
        return cases
    cases += _EVEN
    if capabilities.uneven_experts:
        cases += _UNEVEN
    return [c for c in cases if c.group_size <= (capabilities.max_ep_size or c.group_size)]


def seeded_rows(case: ContractCase, dp_rank: int, layer: int, device: torch.device) -> RoutedTokens:
    """All rows of a DP rank, before rounds and TP slices; the same on whichever rank asks."""
    generator = torch.Generator().manual_seed(1000 * layer + dp_rank)
    num_rows, experts = case.tokens[dp_rank], case.num_experts
    hidden = torch.randint(-64, 64, (num_rows, case.hidden_size), generator=generator) / 32
    hidden[:, 0] = dp_rank + 1
    hidden[:, 1] = torch.arange(num_rows)
    scores = torch.rand(num_rows, experts, generator=generator)
    if case.routing == "last_rank":
        owners = torch.tensor(case.placement().rank_of)
        scores[:, owners == case.group_size - 1] += 1
    topk_ids = scores.topk(case.top_k, dim=1).indices.to(torch.int32)
    if case.routing == "one_expert":
        topk_ids.fill_(experts - 1)
    elif case.routing == "unrouted":
        topk_ids.fill_(-1)
    elif case.routing == "mixed":
        topk_ids[torch.rand(topk_ids.shape, generator=generator) < 0.2] = -1
    weights = torch.rand(topk_ids.shape, generator=generator) + 0.25
    weights[topk_ids < 0] = float("nan")  # meaningless there: must not reach a result
    return RoutedTokens(
        hidden.to(case.dtype).to(device), topk_ids.to(device), weights.to(device), ()
    )


def expected_output(tokens: RoutedTokens, rows: RowScheme = RowScheme.MODEL) -> Tensor:
    """[T, H] float32: the sum over routed slots of weight * (id + 1) * row, as the row is sent."""
    ids = tokens.topk_ids
    shares = torch.where(ids >= 0, tokens.topk_weights * (ids + 1), 0.0)
    return shares.sum(dim=1, keepdim=True) * sent_rows(tokens.hidden_states, rows)


def sent_rows(hidden_states: Tensor, rows: RowScheme) -> Tensor:
    """[T, H] float32: what the experts see of rows that are sent so."""
    if rows is RowScheme.MODEL:
        return hidden_states.float()
    return dequantize_rows(*quantize_rows_reference(hidden_states), torch.float32)


def received_rows(received: ExpertInput) -> Tensor:
    """What was received, in its shape, as float32."""
    values, scales = received.hidden_states, received.scales
    if scales is None:
        return values.float()
    flat = dequantize_rows(values.flatten(0, -2), scales.flatten(0, -2), torch.float32)
    return flat.view(values.shape)


def expert_factors(expert_ids: tuple[int, ...], device: torch.device) -> Tensor:
    """[E_local + 1] float32: what each local expert multiplies by; last, for no expert, 0."""
    return torch.tensor([*(float(e + 1) for e in expert_ids), 0.0], device=device)


def coded_experts(received: ExpertInput, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """What this rank's coded experts return, in the form an experts kernel does.

    factors: see `expert_factors`. dtype: the layer's. Does not wait for the device.
    """
    rows = received_rows(received)
    if isinstance(received, BatchedExpertInput):
        return (factors[:-1, None, None] * rows).to(dtype)
    ids = received.topk_ids.long()
    shares = torch.where(ids >= 0, received.topk_weights * factors[ids], 0.0).sum(1, keepdim=True)
    output = torch.where(shares != 0, shares * rows, 0.0)
    if received.num_rows is not None:
        is_row = torch.arange(len(output), device=rows.device) < received.num_rows
        output = torch.where(is_row[:, None], output, float("nan"))
    return output.to(dtype)


def check_case(ctx: EPContext, backend_name: str, case: ContractCase) -> None:
    """Put a backend through a case on this rank; raises AssertionError with what differed."""
    backend = ctx.backend(backend_name, case.shape())
    outputs: list[tuple[Tensor, Tensor]] = []
    torch.set_deterministic_debug_mode("warn")  # torch.empty is NaN from here on
    for layer in range(case.num_layers):
        whole = seeded_rows(case, ctx.dp_rank, layer, ctx.device)
        own = _part(whole, tp_slice(case.tokens[ctx.dp_rank], ctx.parallel.tp_size, ctx.tp_rank))
        before = [t.clone() for t in (own.hidden_states, own.topk_ids, own.topk_weights)]
        output = run_layer(ctx, backend, case, own, layer)
        assert output.dtype == case.dtype
        assert output.shape == own.hidden_states.shape
        assert_close(output, expected_output(own, case.rows), case.dtype)
        if case.rows is RowScheme.FP8_GROUP:
            exact = expected_output(own)
            assert (output.float() - exact).norm() <= FP8_TOLERANCE * exact.norm()
        after = (own.hidden_states, own.topk_ids, own.topk_weights)
        assert all(_same_bits(a, b) for a, b in zip(before, after, strict=True)), "input written"
        outputs.append((output, output.clone()))
    for output, copy in outputs:
        assert _same_bits(output, copy), "a later call changed an earlier output"


def run_layer(
    ctx: EPContext,
    backend: All2AllBackend[Any, Any],
    case: ContractCase,
    own: RoutedTokens,
    layer: int = 0,
) -> Tensor:
    """prepare, dispatch, coded experts, combine over all rounds; checks what lands here."""
    counts = ctx.rows_per_rank(case.tokens[ctx.dp_rank])
    limit = case.max_tokens_per_rank
    factors = expert_factors(case.placement().experts_of(ctx.ep_rank), ctx.device)
    outputs = []
    for index in range(num_rounds(counts, limit)):
        in_round = rows_in_round(counts, index, limit)
        tokens = _part(own, round_rows(own.hidden_states.shape[0], index, limit), in_round)
        dispatching = backend.dispatch(backend.prepare(tokens))
        dispatching.join()
        dispatching.join()
        received, handle = dispatching.wait()
        _check_landed(ctx, case, received, layer, index, counts)
        expert_output = coded_experts(received, factors, case.dtype)
        combining = backend.combine(expert_output, handle)
        outputs.append(combining.wait())
    return torch.cat(outputs)


def check_bias_rule(ctx: EPContext, backend_name: str, case: ContractCase) -> None:
    """A bias is added exactly once where the backend declares it, and refused elsewhere."""
    backend = ctx.backend(backend_name, case.shape())
    kind = backend.capabilities.combine_bias
    whole = seeded_rows(case, ctx.dp_rank, 0, ctx.device)
    own = _part(whole, slice(None), ctx.rows_per_rank(case.tokens[ctx.dp_rank]))
    bias = torch.full_like(own.hidden_states, 100.0 * (ctx.rank + 1))
    factors = expert_factors(case.placement().experts_of(ctx.ep_rank), ctx.device)

    received, handle = backend.dispatch(backend.prepare(own)).wait()
    expert_output = coded_experts(received, factors, case.dtype)
    if kind is not CombineBias.AT_ISSUE:
        assert _refuses(lambda: backend.combine(expert_output, handle, bias=bias))
    given = bias if kind is CombineBias.AT_ISSUE else None
    combining = backend.combine(expert_output, handle, bias=given)
    if kind is CombineBias.AT_JOIN:
        output = combining.wait(bias=bias)
    else:
        assert _refuses(lambda: combining.wait(bias=bias))
        output = combining.wait()
    added = 0.0 if kind is CombineBias.NONE else bias.float()
    assert_close(output, expected_output(own, case.rows) + added, case.dtype)


def check_gathering(ctx: EPContext, backend_name: str, case: ContractCase) -> None:
    """gather_rows gives every rank all rows in rank order; sum_scatter_rows sums them home."""
    backend: Any = ctx.backend(backend_name, case.shape())
    counts = ctx.rows_per_rank(case.tokens[ctx.dp_rank])
    rows_of = [
        seeded_rows(case, rank, 0, ctx.device).hidden_states for rank in range(ctx.world_size)
    ]
    gathered = backend.gather_rows(rows_of[ctx.ep_rank], counts)
    assert _same_bits(gathered, torch.cat(rows_of))
    summed = backend.sum_scatter_rows(gathered * (ctx.ep_rank + 1), counts)
    factor = sum(rank + 1 for rank in range(ctx.ep_group.size))
    assert_close(summed, rows_of[ctx.ep_rank].float() * factor, case.dtype)
    assert _same_bits(gathered, torch.cat(rows_of)), "input written"


def check_graph(ctx: EPContext, backend_name: str, case: ContractCase) -> None:
    """A captured call, replayed on the rows of other layers, gives what the eager call gives."""
    backend = ctx.backend(backend_name, case.shape())
    factors = expert_factors(case.placement().experts_of(ctx.ep_rank), ctx.device)
    counts = ctx.rows_per_rank(case.tokens[ctx.dp_rank])
    layers = [seeded_rows(case, ctx.dp_rank, layer, ctx.device) for layer in range(3)]
    static = _part(layers[0], slice(None), counts)

    def call() -> Tensor:
        received, handle = backend.dispatch(backend.prepare(static)).wait()
        output = coded_experts(received, factors, case.dtype)
        return backend.combine(output, handle).wait()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    for layer in layers:
        static.hidden_states.copy_(layer.hidden_states)
        static.topk_ids.copy_(layer.topk_ids)
        static.topk_weights.copy_(layer.topk_weights)
        graph.replay()
        assert_close(output, expected_output(layer, case.rows), case.dtype)
        assert _same_bits(output, call()), "replay and eager differ"


def assert_close(output: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative Frobenius error within the dtype's tolerance; exact zeros where all is zero."""
    assert torch.isfinite(output).all(), "memory that nobody wrote reached the result"
    difference = (output.double() - expected.double()).norm()
    assert difference <= TOLERANCES[dtype] * expected.double().norm(), (output, expected)


def _part(tokens: RoutedTokens, rows: slice, rows_per_rank: tuple[int, ...] = ()) -> RoutedTokens:
    return RoutedTokens(
        tokens.hidden_states[rows], tokens.topk_ids[rows], tokens.topk_weights[rows], rows_per_rank
    )


def _check_landed(
    ctx: EPContext,
    case: ContractCase,
    received: ExpertInput,
    layer: int,
    round_index: int,
    counts: tuple[int, ...],
) -> None:
    """Every (row, slot) of this rank's experts landed exactly once, with its row and weight."""
    values, scales = received.hidden_states, received.scales
    assert values.shape[-1] == case.hidden_size
    if case.rows is RowScheme.MODEL:
        assert values.dtype is case.dtype
        assert scales is None
    else:
        assert scales is not None
        assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
        assert scales.shape == (*values.shape[:-1], num_groups(case.hidden_size))
    expert_ids = case.placement().experts_of(ctx.ep_rank)
    wanted = []
    first_rank = ctx.rank - ctx.ep_rank
    for ep_rank in range(ctx.ep_group.size):
        dp_rank, tp_rank = divmod(first_rank + ep_rank, ctx.parallel.tp_size)
        whole = seeded_rows(case, dp_rank, layer, torch.device("cpu"))
        own = _part(whole, tp_slice(case.tokens[dp_rank], ctx.parallel.tp_size, tp_rank))
        rows = round_rows(counts[ep_rank], round_index, case.max_tokens_per_rank)
        sent = replace(
            _part(own, rows), hidden_states=sent_rows(own.hidden_states[rows], case.rows)
        )
        wanted += _slots(sent, {e: e for e in expert_ids})
    if isinstance(received, StandardExpertInput):
        num_rows = len(received.hidden_states)
        if received.num_rows is not None:
            num_rows = int(received.num_rows)
        landed_rows = RoutedTokens(
            received_rows(received)[:num_rows].cpu(),
            received.topk_ids[:num_rows].cpu(),
            received.topk_weights[:num_rows].cpu(),
            (),
        )
        assert landed_rows.topk_ids.dtype == torch.int32
        assert landed_rows.topk_weights.dtype == torch.float32
        is_local = (landed_rows.topk_ids >= -1) & (landed_rows.topk_ids < len(expert_ids))
        assert is_local.all(), "an id is neither local nor -1"
        landed = _slots(landed_rows, dict(enumerate(expert_ids)))
    else:
        landed = [
            (expert, *row.float().tolist())
            for local, expert in enumerate(expert_ids)
            for row in received_rows(received)[local, : received.num_rows_per_expert[local]].cpu()
        ]
        wanted = [slot[:1] + slot[2:] for slot in wanted]
        if case.rows is RowScheme.FP8_GROUP:
            landed = _nearest(landed, wanted)
    assert sorted(landed) == sorted(wanted)


def _nearest(
    landed: list[tuple[float, ...]], wanted: list[tuple[float, ...]]
) -> list[tuple[float, ...]]:
    """Each landed (expert, row...) as the wanted one of the same expert that it is a rounding of;
    as it is where there is none."""
    found = []
    for slot in landed:
        row = torch.tensor(slot[1:])
        near = [
            other
            for other in wanted
            if other[0] == slot[0]
            and (torch.tensor(other[1:]) - row).norm() <= _FP8_ROW_TOLERANCE * row.norm()
        ]
        found.append(near[0] if near else slot)
    return found


def _slots(tokens: RoutedTokens, global_id_of: dict[int, int]) -> list[tuple[float, ...]]:
    """(global expert id, weight, row...) of each slot whose id is a key of `global_id_of`."""
    return [
        (global_id_of[expert], weight, *row)
        for row, ids, weights in zip(
            tokens.hidden_states.float().tolist(),
            tokens.topk_ids.tolist(),
            tokens.topk_weights.tolist(),
            strict=True,
        )
        for expert, weight in zip(ids, weights, strict=True)
        if expert in global_id_of
    ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape and bytes, NaN included."""
    bytes_a, bytes_b = (t.contiguous().view(torch.uint8) for t in (a, b))
    return a.shape == b.shape and torch.equal(bytes_a, bytes_b)


def _refuses(call: Any) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False
