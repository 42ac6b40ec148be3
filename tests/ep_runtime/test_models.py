"""Whole models on 1, 2 and 4 ranks against the single-process transformers model."""

import os
import signal
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.all2all.collectives import gather_texts
from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext
from ep_runtime.expert_loading import ExpertBuffers, ExpertLoader
from ep_runtime.failure import FailureLimits
from ep_runtime.generation import greedy_generate
from ep_runtime.kernels.base import ExpertWeights
from ep_runtime.kernels.errors import CheckpointError, ConfigError, RankFailure
from ep_runtime.models import load_model
from ep_runtime.stored_weight import StoredWeight
from ep_runtime.tensor_names import Slot
from tests.ep_runtime.checkpoints import (
    FAMILY_NAMES,
    NEW_TOKENS,
    PROMPTS,
    copy_with_tensors,
    expected_logits,
    expected_tokens,
    read_tensors,
    tiny_checkpoint,
    transformers_model,
)
from tests.harness import rank_outcomes, run_ranks

MAX_LOGIT_ERROR = 2e-4  # of the largest logit
# Prompts of each DP rank: unequal lengths and counts, and a rank without any.
SPLITS = {1: ((0, 1, 2, 3),), 2: ((0, 1, 3), (2,)), 4: ((1,), (), (0, 2), (3,))}


@dataclass(frozen=True)
class World:
    """A number of ranks and how they share the work."""

    dp_size: int
    tp_size: int = 1
    backend: str = "auto"

    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            dp_size=self.dp_size,
            tp_size=self.tp_size,
            all2all_backend=self.backend,
            device="cpu",
            # With all_to_all the longer batches take two rounds.
            max_tokens_per_rank=16 if self.backend == "all_to_all" else 64,
        )

    def __str__(self) -> str:
        tp = f"_tp{self.tp_size}" if self.tp_size > 1 else ""
        return f"dp{self.dp_size}{tp}_{self.backend}"


WORLDS = [World(1)] + [
    World(dp, tp, backend)
    for dp, tp in ((2, 1), (4, 1), (2, 2))
    for backend in ("naive", "all_to_all")
]


@dataclass(frozen=True)
class RankResult:
    """logits, tokens: by prompt number. shared_calls: of each layer; num_forwards: the model's."""

    logits: dict[int, Tensor]
    tokens: dict[int, tuple[int, ...]]
    shared_calls: list[int]
    num_forwards: int
    zero_rows_shape: tuple[int, ...]


def run_one_model(ctx: EPContext, family: str, experts: str, path: str, greedy: bool) -> RankResult:
    model = load_model(path, ctx, experts=experts, progress=False)
    mine = SPLITS[ctx.parallel.dp_size][ctx.dp_rank]
    longest = max((len(PROMPTS[i]) for i in mine), default=3)
    ids = torch.zeros((len(mine), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(mine):
        ids[row, : len(PROMPTS[prompt])] = torch.tensor(PROMPTS[prompt])
        mask[row, : len(PROMPTS[prompt])] = 1
    logits = model(input_ids=ids, attention_mask=mask).logits
    num_forwards = 1
    tokens = {}
    if greedy:
        output = greedy_generate(model, ctx, [PROMPTS[i] for i in mine], NEW_TOKENS)
        num_forwards += output.num_steps
        tokens = {prompt: tuple(output.tokens[row]) for row, prompt in enumerate(mine)}
    return RankResult(
        logits={p: logits[row, : len(PROMPTS[p])].clone() for row, p in enumerate(mine)},
        tokens=tokens,
        shared_calls=[layer.stats.shared_expert_calls for layer in model.moe_layers],
        num_forwards=num_forwards,
        zero_rows_shape=tuple(logits.shape) if not mine else (),
    )


def run_all_models(
    ctx: EPContext, paths: dict[str, str], kernels: tuple[str, ...]
) -> dict[tuple[str, str], RankResult]:
    """Every family and kernel in one start of the ranks."""
    return {
        (family, experts): run_one_model(ctx, family, experts, path, experts == "reference")
        for family, path in paths.items()
        for experts in kernels
    }


@cache
def results_of(world: World) -> list[dict[tuple[str, str], RankResult]]:
    paths = {family: str(tiny_checkpoint(family)) for family in FAMILY_NAMES}
    kernels = ("reference", "triton")
    return run_ranks(run_all_models, world.parallel(), paths, kernels, timeout=240)


@pytest.mark.parametrize("experts", ["reference", "triton"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_logits_are_those_of_the_single_process_model(
    world: World, family: str, experts: str
) -> None:
    expected = expected_logits(family)
    largest = max(float(logits.abs().max()) for logits in expected)
    seen = set()
    for rank, by_model in enumerate(results_of(world)):
        result = by_model[family, experts]
        for prompt, logits in result.logits.items():
            assert logits.dtype == torch.float32
            error = float((logits - expected[prompt]).abs().max())
            assert error <= MAX_LOGIT_ERROR * largest, f"rank {rank} prompt {prompt}"
            assert torch.equal(logits.argmax(-1), expected[prompt].argmax(-1))
            seen.add(prompt)
        if not result.logits:
            assert result.zero_rows_shape == (0, 3, expected[0].shape[1])
    assert seen == set(range(len(PROMPTS)))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_greedy_tokens_are_those_of_transformers(world: World, family: str) -> None:
    expected = expected_tokens(family)
    for by_model in results_of(world):
        for prompt, tokens in by_model[family, "reference"].tokens.items():
            assert len(tokens) == NEW_TOKENS
            assert tokens == expected[prompt]


@pytest.mark.parametrize("experts", ["reference", "triton"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_the_shared_expert_runs_once_in_every_layer_call(
    world: World, family: str, experts: str
) -> None:
    has_shared = family in ("qwen2_moe", "deepseek_v2", "deepseek_v3", "glm4_moe")
    for by_model in results_of(world):
        result = by_model[family, experts]
        wanted = result.num_forwards if has_shared else 0
        assert result.shared_calls == [wanted] * len(result.shared_calls)
        assert result.num_forwards == (1 + NEW_TOKENS if experts == "reference" else 1)


def generate_with_end(ctx: EPContext, path: str, end: int) -> tuple[list[list[int]], int, Tensor]:
    model = load_model(path, ctx, experts="reference", progress=False)
    mine = [PROMPTS[i] for i in SPLITS[ctx.parallel.dp_size][ctx.dp_rank]]
    output = greedy_generate(model, ctx, mine, NEW_TOKENS, eos_token_id=end)
    return output.tokens, output.num_steps, output.next_token_logits


def end_token_for(family: str) -> int:
    """A token that ends some of rank 0's prompts early, and all of rank 1's before those."""
    plain = expected_tokens(family)
    for end in sorted({token for tokens in plain for token in tokens}):
        lengths = [t.index(end) + 1 if end in t else NEW_TOKENS for t in plain]
        first, second = ([lengths[i] for i in split] for split in SPLITS[2])
        if len(set(first)) > 1 and max(second) < max(first):
            return end
    raise AssertionError(f"no token of {family} ends its prompts at different steps")


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_finished_prompt_leaves_while_the_others_go_on(family: str) -> None:
    end = end_token_for(family)
    expected = expected_tokens(family, end)
    path = str(tiny_checkpoint(family))
    results = run_ranks(generate_with_end, World(2).parallel(), path, end)
    for rank, (tokens, num_steps, next_token_logits) in enumerate(results):
        mine = SPLITS[2][rank]
        assert [tuple(row) for row in tokens] == [expected[prompt] for prompt in mine]
        assert num_steps == max(len(row) for row in expected)
        for row, prompt in enumerate(mine):
            torch.testing.assert_close(
                next_token_logits[row], expected_logits(family)[prompt][-1], rtol=0, atol=1e-3
            )


def generate_one_each(ctx: EPContext, path: str) -> tuple[list[list[int]], int]:
    """Prompt 3 on DP rank 0, nothing elsewhere."""
    model = load_model(path, ctx, experts="reference", progress=False)
    output = greedy_generate(model, ctx, [PROMPTS[3]] if ctx.dp_rank == 0 else [], 3)
    return output.tokens, output.num_steps


def test_groups_that_do_not_line_up_stop_together() -> None:
    """tp_size 2 and ep_size 3: EP group 1 holds halves of two DP groups."""
    parallel = ParallelConfig(dp_size=3, tp_size=2, ep_size=3, device="cpu")
    results = run_ranks(generate_one_each, parallel, str(tiny_checkpoint("olmoe")))
    expected = list(expected_tokens("olmoe")[3][:3])
    for rank, (tokens, num_steps) in enumerate(results):
        assert tokens == ([expected] if rank < 2 else [])
        assert num_steps == 3


def load_less(ctx: EPContext, path: str, rank: int, expert: int) -> None:
    """As load_model, but one rank leaves an expert out."""
    read = ExpertLoader.read

    def read_all_but_one(
        self: ExpertLoader, slot: Slot, weight: StoredWeight, into: ExpertBuffers
    ) -> None:
        if slot.expert != expert:
            read(self, slot, weight, into)

    if ctx.rank == rank:
        setattr(ExpertLoader, "read", read_all_but_one)  # noqa: B010  (mypy forbids the other)
    load_model(path, ctx, experts="reference", progress=False)


def test_an_expert_that_no_rank_reads_ends_all_ranks() -> None:
    path = str(tiny_checkpoint("mixtral"))
    for outcome in rank_outcomes(load_less, World(2).parallel(), path, 1, 6):
        assert isinstance(outcome.error, CheckpointError)
        assert "layer 0 expert 6 down: 0 times" in str(outcome.error)


def load_what_a_kernel_refuses(ctx: EPContext, path: str) -> None:
    """As load_model, but rank 1's kernel finds a value that it cannot take."""
    from ep_runtime.kernels.reference_experts import ReferenceExperts

    def refuse(self: ReferenceExperts, weights: ExpertWeights) -> ExpertWeights:
        raise CheckpointError("w2 scales: expert 2 has one that is too large")

    if ctx.rank == 1:
        setattr(ReferenceExperts, "prepare_weights", refuse)  # noqa: B010
    load_model(path, ctx, experts="reference", progress=False)


def test_weights_that_a_ranks_kernel_refuses_end_all_ranks() -> None:
    path = str(tiny_checkpoint("mixtral"))
    parallel = World(2).parallel()
    outcomes = rank_outcomes(load_what_a_kernel_refuses, parallel, path)
    for outcome, error_type in zip(outcomes, (RankFailure, CheckpointError), strict=True):
        assert isinstance(outcome.error, error_type)
        assert "layer 0, experts of rank 1: w2 scales: expert 2" in str(outcome.error)
    assert "rank 1 failed to load the checkpoint" in str(outcomes[0].error)


def compare_dense_part(ctx: EPContext, path: str, expected: dict[str, Tensor]) -> list[str]:
    model = load_model(path, ctx, experts="reference", progress=False).transformers_model
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    common = [name for name in expected if name in tensors]
    assert not any(tensor.is_meta or tensor.requires_grad for tensor in tensors.values())
    assert not model.training
    return [name for name in common if torch.equal(tensors[name], expected[name])]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_dense_part_is_bit_equal_to_from_pretrained(family: str) -> None:
    model = transformers_model(family)
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    blocks = (".mlp.experts.", ".mlp.gate.", ".mlp.shared_expert", ".mlp.router.")
    expected = {
        name: tensor.detach()
        for name, tensor in expected.items()
        if not any(block in name for block in blocks)
    }
    assert any("rotary_emb.inv_freq" in name for name in expected)
    (equal,) = run_ranks(
        compare_dense_part, World(1).parallel(), str(tiny_checkpoint(family)), expected
    )
    assert sorted(equal) == sorted(expected)


def load_in(ctx: EPContext, path: str, dtype: Any) -> tuple[set[torch.dtype], str, Tensor]:
    model = load_model(path, ctx, experts="reference", dtype=dtype, progress=False)
    dense = {p.dtype for n, p in model.transformers_model.named_parameters() if ".layer." not in n}
    return dense, model.plan.moe.dtype, model(input_ids=torch.tensor([PROMPTS[0]])).logits


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_converts_the_whole_model(dtype: Any) -> None:
    path = str(tiny_checkpoint("qwen2_moe"))
    ((dense, moe, logits),) = run_ranks(load_in, World(1).parallel(), path, dtype)
    assert dense == {torch.bfloat16}
    assert moe == "bfloat16"
    assert logits.dtype == torch.bfloat16
    expected = expected_logits("qwen2_moe")[0]
    assert float((logits[0].float() - expected).norm() / expected.norm()) < 0.1


def test_a_named_dtype_that_is_unknown_is_refused() -> None:
    path = str(tiny_checkpoint("olmoe"))
    (outcome,) = rank_outcomes(load_in, World(1).parallel(), path, "float8")
    assert isinstance(outcome.error, ConfigError)
    assert "float8" in str(outcome.error)


def load_own(ctx: EPContext, paths: list[str]) -> tuple[int, int, int, dict[Any, Any]]:
    report = load_model(paths[ctx.rank], ctx, experts="reference", progress=False).load_report
    return (
        report.expert_bytes_read,
        report.expert_bytes_in_checkpoint,
        report.bytes_read,
        dict(report.experts_read),
    )


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_each_rank_reads_its_share_of_the_expert_bytes(family: str) -> None:
    path = tiny_checkpoint(family)
    results = run_ranks(load_own, World(4).parallel(), [str(path)] * 4)
    tensors = read_tensors(path)
    expert_bytes = sum(t.nbytes for name, t in tensors.items() if ".experts." in name)
    dense_bytes = sum(t.nbytes for t in tensors.values()) - expert_bytes
    num_experts = {"mixtral": 8, "gpt_oss": 6}[family]
    for rank, (own, total, everything, read) in enumerate(results):
        held = num_experts // 4 + (rank < num_experts % 4)
        assert own == expert_bytes * held // num_experts
        assert total == expert_bytes
        assert everything == own + dense_bytes
        assert all(len(experts) == held for experts in read.values())
    assert sum(own for own, *_ in results) == expert_bytes


def test_ranks_that_see_different_checkpoints_all_raise(tmp_path: Any) -> None:
    source = tiny_checkpoint("mixtral")
    tensors = read_tensors(source)
    other = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    paths = [str(source), str(copy_with_tensors(source, tmp_path / "other", other))]
    outcomes = rank_outcomes(load_own, World(2).parallel(), paths)
    for outcome in outcomes:
        assert isinstance(outcome.error, CheckpointError)
        assert "ranks [1] see another checkpoint than rank 0" in str(outcome.error)


def test_a_file_that_is_cut_short_on_one_rank_ends_all_ranks(tmp_path: Any) -> None:
    source = tiny_checkpoint("mixtral")
    cut = copy_with_tensors(source, tmp_path / "cut", read_tensors(source))
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    outcomes = rank_outcomes(load_own, World(2).parallel(), [str(source), str(cut)])
    assert isinstance(outcomes[0].error, RankFailure)
    assert "rank 1" in str(outcomes[0].error)
    assert "model.safetensors" in str(outcomes[0].error)
    assert isinstance(outcomes[1].error, CheckpointError)
    assert "model.safetensors" in str(outcomes[1].error)
    assert all(outcome.seconds < 20 for outcome in outcomes)


def stop_rank_1_while_it_loads(ctx: EPContext, path: str, number: signal.Signals) -> None:
    processes = [int(text) for text in gather_texts(str(os.getpid()), ctx.world_group)]

    def stop(self: ExpertLoader, slot: Slot, weight: StoredWeight, into: ExpertBuffers) -> None:
        os.kill(os.getpid(), number)

    if ctx.rank == 1:
        setattr(ExpertLoader, "read", stop)  # noqa: B010  (mypy forbids the other)
    try:
        load_model(path, ctx, experts="reference", progress=False)
    except RankFailure:
        if number == signal.SIGSTOP:
            os.kill(processes[1], signal.SIGKILL)  # so that the test need not wait for it
        raise


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_it_loads_is_named(number: signal.Signals) -> None:
    path = str(tiny_checkpoint("mixtral"))
    limits = FailureLimits(poll_interval_s=0.2, stale_after_s=3.0, farewell_s=1.0)
    outcomes = rank_outcomes(
        stop_rank_1_while_it_loads, World(2).parallel(), path, number, timeout=40, limits=limits
    )
    assert isinstance(outcomes[0].error, RankFailure), outcomes
    assert "rank 1 is gone" in str(outcomes[0].error)
    assert outcomes[0].seconds < 20
