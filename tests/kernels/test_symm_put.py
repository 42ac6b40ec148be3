"""Putting into, and summing from, the memory of several ranks, against the definitions."""

import time
from dataclasses import dataclass

import pytest
import torch

from ep_runtime.kernels.quant.scheme import RowScheme
from ep_runtime.kernels.symm_channel import (
    ARRIVAL_SHARES,
    Channel,
    ExpertHomes,
    FailedWait,
    SlotLayout,
    first_received_row,
)
from ep_runtime.kernels.symm_put_results import put_results, put_results_reference
from ep_runtime.kernels.symm_put_tokens import put_tokens, put_tokens_reference
from ep_runtime.kernels.symm_wait import (
    sum_results,
    sum_results_reference,
    wait_for_dispatch,
    wait_for_results,
)
from tests.kernels.symm_channels import make_channels


@dataclass(frozen=True)
class PutCase:
    """Rows of each rank, and how they are routed; `name` is the id."""

    name: str
    tokens: tuple[int, ...]
    num_experts: int = 8
    top_k: int = 2
    hidden_size: int = 32
    dtype: torch.dtype = torch.float32
    max_programs: int = 3
    rows: RowScheme = RowScheme.MODEL


CASES = [
    PutCase("one rank", (5,)),
    PutCase("two ranks", (3, 5)),
    PutCase("a rank without rows", (3, 0, 4)),
    PutCase("no rows at all", (0, 0)),
    PutCase("hidden size that divides nothing", (3, 5), hidden_size=27, dtype=torch.bfloat16),
    PutCase("hidden size of several column blocks", (2, 3), hidden_size=4100, max_programs=4),
    PutCase("more rows than a block", (70, 3), dtype=torch.float16),
    PutCase("experts that do not divide", (4, 3), num_experts=5, top_k=5),
    PutCase("a rank without experts", (2, 2, 2), num_experts=2, top_k=1),
    PutCase("more ids than one block of routing", (40, 2), num_experts=40, top_k=9),
    PutCase("one program for everything", (9, 7), hidden_size=4100, max_programs=1),
]
FP8_CASES = [
    PutCase(f"{name}, in fp8", tokens, rows=RowScheme.FP8_GROUP, **changes)
    for name, tokens, changes in (
        ("one rank", (5,), {"hidden_size": 256}),
        ("two ranks in bf16", (3, 5), {"hidden_size": 256, "dtype": torch.bfloat16}),
        ("a rank without rows", (3, 0, 4), {"hidden_size": 384, "dtype": torch.float16}),
        ("no rows at all", (0, 0), {}),
        ("less than one group", (3, 5), {"hidden_size": 27, "dtype": torch.bfloat16}),
        ("a partial last group", (3, 5), {"hidden_size": 300, "dtype": torch.bfloat16}),
        ("several column blocks", (2, 3), {"hidden_size": 4100, "max_programs": 4}),
        ("more rows than a block", (70, 3), {"hidden_size": 130}),
    )
]
MANY_RANKS = PutCase("more ranks than bits in a word", (1, *[0] * 68, 1), num_experts=140, top_k=24)


def _channels(case: PutCase, device: torch.device) -> list[Channel]:
    num_ranks, most_rows = len(case.tokens), max(1, *case.tokens)
    layout = SlotLayout(num_ranks, most_rows, case.hidden_size, case.top_k, case.dtype, case.rows)
    per_rank = -(-case.num_experts // num_ranks)
    experts = torch.arange(case.num_experts, dtype=torch.int32, device=device)
    return make_channels(layout, ExpertHomes(experts // per_rank, experts % per_rank), device)


def _tokens(
    case: PutCase, rank: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, ids (some -1, some past the last expert) and weights (NaN where not routed)."""
    generator = torch.Generator().manual_seed(rank)
    num_rows = case.tokens[rank]
    rows = torch.randn(num_rows, case.hidden_size, generator=generator)
    # Groups of zeros alone, and groups of very different sizes.
    rows[:1, : case.hidden_size // 2] = 0
    rows[1:] *= 10.0 ** torch.linspace(-6, 4, case.hidden_size)
    rows = rows.to(case.dtype)
    ids = torch.randint(-1, case.num_experts + 1, (num_rows, case.top_k), generator=generator)
    weights = torch.rand(num_rows, case.top_k, generator=generator)
    weights[(ids < 0) | (ids >= case.num_experts)] = float("nan")
    return rows.to(device), ids.to(torch.int32).to(device), weights.to(device)


def _same(got: list[Channel], wanted: list[Channel]) -> bool:
    return all(torch.equal(a.memory, b.memory) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("case", [*CASES, *FP8_CASES, MANY_RANKS], ids=lambda case: case.name)
def test_a_call_writes_and_sums_what_the_definitions_do_to_the_byte(
    case: PutCase, device: torch.device
) -> None:
    got, wanted = _channels(case, device), _channels(case, device)
    senders = [r for r in range(len(case.tokens)) if case is not MANY_RANKS or case.tokens[r]]
    tokens = {rank: _tokens(case, rank, device) for rank in senders}
    first_rows = [first_received_row(case.tokens, rank) for rank in range(len(case.tokens))]
    for rank in senders:
        put_tokens(
            got[rank],
            tokens[rank],
            first_row=first_rows[rank],
            max_programs=case.max_programs,
        )
        put_tokens_reference(wanted, rank, tokens[rank], first_row=first_rows[rank])
    assert _same(got, wanted)
    if case is MANY_RANKS:
        assert max(rank for rank, c in enumerate(got) if (c.topk_ids[:2] >= 0).any()) >= 64

    generator = torch.Generator().manual_seed(99)
    shape = (sum(case.tokens), case.hidden_size)
    outputs = [torch.randn(shape, generator=generator).to(case.dtype) for _ in case.tokens]
    outputs = [output.to(device) for output in outputs]
    for rank in range(len(case.tokens)):
        if case is MANY_RANKS and got[rank].topk_ids[: shape[0]].max() < 0:
            continue  # has nothing to send
        put_results(
            got[rank],
            outputs[rank],
            num_own_rows=case.tokens[rank],
            first_own_row=first_rows[rank],
            max_programs=case.max_programs,
        )
        put_results_reference(wanted, rank, outputs[rank])
    assert _same(got, wanted)

    for rank in senders:
        rows, ids, _ = tokens[rank]
        bias = torch.randn(rows.shape[0], 2 * rows.shape[1], device=device).to(case.dtype)[:, ::2]
        for added in (None, bias):
            result = sum_results(
                got[rank],
                outputs[rank],
                ids,
                first_own_row=first_rows[rank],
                bias=added,
                is_joined=True,
            )
            expected = sum_results_reference(
                got[rank],
                outputs[rank],
                ids,
                first_own_row=first_rows[rank],
                bias=added,
            )
            assert torch.equal(result, expected)
            assert torch.isfinite(result).all()


@pytest.mark.parametrize("max_programs", [1, 2, 5, 64])
def test_arrivals_add_up_to_the_same_whatever_the_grid_is(
    max_programs: int, device: torch.device
) -> None:
    case = PutCase("grid", (2, 70), hidden_size=4100)
    channels = _channels(case, device)
    for rank in range(2):
        put_tokens(
            channels[rank],
            _tokens(case, rank, device),
            first_row=(0, 2)[rank],
            max_programs=max_programs,
        )
    for channel in channels:
        assert channel.dispatch_arrivals.tolist() == [ARRIVAL_SHARES] * 2
        assert channel.combine_arrivals.tolist() == [0] * 2


def test_a_wait_that_runs_out_names_the_first_missing_peer_and_does_not_count_the_call(
    device: torch.device,
) -> None:
    channels = _channels(PutCase("wait", (1, 1, 1)), device)
    channel = channels[1]
    channel.dispatch_arrivals[:2] = ARRIVAL_SHARES
    wait_for_dispatch(channel, limit_ns=20_000_000)
    assert int(channel.failed.cpu()) == 1
    assert FailedWait.from_record(int(channel.record)) == FailedWait(2, 1, "dispatch")
    assert int(channel.epoch) == 0


def test_a_wait_ends_soon_after_the_host_has_set_the_abort_word(device: torch.device) -> None:
    channels = _channels(PutCase("aborted", (1, 1, 1)), device)
    channel = channels[1]
    channel.combine_arrivals[:2] = ARRIVAL_SHARES
    channel.epoch.fill_(1)
    channel.abort.fill_(1)
    started = time.monotonic()
    wait_for_results(channel, limit_ns=60_000_000_000)
    assert int(channel.failed.cpu()) == 1
    assert time.monotonic() - started < 10
    found = FailedWait.from_record(int(channel.record))
    assert found == FailedWait(2, 1, "combine", is_aborted=True)


def test_the_abort_word_does_not_end_a_wait_for_what_has_arrived(device: torch.device) -> None:
    channel = _channels(PutCase("arrived", (1, 1)), device)[0]
    channel.dispatch_arrivals[:] = ARRIVAL_SHARES
    channel.abort.fill_(1)
    wait_for_dispatch(channel, limit_ns=0)
    assert int(channel.epoch) == 1
    assert int(channel.failed) == int(channel.record) == 0


def test_a_wait_for_what_has_arrived_counts_the_call_and_records_nothing(
    device: torch.device,
) -> None:
    channels = _channels(PutCase("wait", (1, 1)), device)
    channel = channels[0]
    channel.dispatch_arrivals[:] = torch.tensor([ARRIVAL_SHARES, 2 * ARRIVAL_SHARES])
    channel.combine_arrivals[:] = ARRIVAL_SHARES
    wait_for_dispatch(channel, limit_ns=0)
    wait_for_results(channel, limit_ns=0)
    assert int(channel.epoch) == 1
    assert int(channel.failed) == int(channel.record) == 0


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_failed_rank_puts_nothing_and_its_sums_are_nan(
    is_joined: bool, device: torch.device
) -> None:
    case = PutCase("failed", (2, 2))
    channels = _channels(case, device)
    tokens = _tokens(case, 0, device)
    for rank in range(2):
        put_tokens(
            channels[rank],
            _tokens(case, rank, device),
            first_row=2 * rank,
            max_programs=2,
        )
    channel = channels[0]
    assert (channel.topk_ids[2:4] >= 0).any(), "there would be results to send"
    channel.failed.fill_(1)
    before = [c.memory.clone() for c in channels]
    output = torch.ones(4, case.hidden_size, device=device)
    put_results(channel, output, num_own_rows=2, first_own_row=0, max_programs=2)
    put_tokens(channel, tokens, first_row=0, max_programs=2)
    assert all(torch.equal(c.memory, b) for c, b in zip(channels, before, strict=True))
    summed = sum_results(
        channel,
        output,
        tokens[1],
        first_own_row=0,
        bias=None,
        is_joined=is_joined,
    )
    assert summed.isnan().all()
