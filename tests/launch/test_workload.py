"""What the ranks are fed, and the seeded weights of a layer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.storage import quantized_tensor, tensors_of
from ep_runtime.launch.run_config import WorkloadSection
from ep_runtime.launch.seeded_layer import SeededWeights
from ep_runtime.launch.workload import make_routing, make_rows, prompts_of, share_out
from ep_runtime.layer import MoELayer
from tests.harness import run_ranks

MOE = MoEConfig(hidden_size=8, moe_intermediate_size=4, num_experts=5, top_k=2, dtype="float32")


def test_three_prompts_on_two_ranks_are_shared_two_and_one() -> None:
    assert [share_out(3, 2, rank) for rank in range(2)] == [slice(0, 2), slice(2, 3)]


@given(num_prompts=st.integers(0, 40), dp_size=st.integers(1, 12))
def test_every_prompt_goes_to_exactly_one_rank(num_prompts: int, dp_size: int) -> None:
    shares = [share_out(num_prompts, dp_size, rank) for rank in range(dp_size)]
    assert [i for share in shares for i in range(num_prompts)[share]] == list(range(num_prompts))
    sizes = [share.stop - share.start for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_text_without_a_tokenizer_is_read_as_bytes(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("hé\n\n  \nyo\n", encoding="utf-8")
    workload = WorkloadSection(prompts=str(tmp_path / "prompts.txt"))
    prompts = prompts_of(workload, tmp_path, dp_size=3, vocab_size=256)
    assert prompts == [[[104, 0xC3, 0xA9]], [[121, 111]], []]
    with pytest.raises(ConfigError, match=r"'hé' has the token id 195, and .* vocab_size is 128"):
        prompts_of(workload, tmp_path, dp_size=3, vocab_size=128)


def test_a_checkpoints_tokenizer_is_used(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "one": 7, "two": 9}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    (tmp_path / "prompts.txt").write_text("two one\nthree\n")
    workload = WorkloadSection(prompts=str(tmp_path / "prompts.txt"))
    assert prompts_of(workload, tmp_path, dp_size=1, vocab_size=10) == [[[9, 7], [0]]]


def test_tokens_per_rank_gives_one_random_prompt_a_rank_or_none(tmp_path: Path) -> None:
    workload = WorkloadSection(tokens_per_rank=[3, 0, 2], seed=5)
    prompts = prompts_of(workload, tmp_path, dp_size=3, vocab_size=50)
    assert [[len(prompt) for prompt in rank] for rank in prompts] == [[3], [], [2]]
    assert prompts == prompts_of(workload, tmp_path, dp_size=3, vocab_size=50)
    assert all(0 <= token < 50 for rank in prompts for prompt in rank for token in prompt)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("kind", ["balanced", "hotspot", "zipf"])
def test_a_routing_has_distinct_experts_and_weights_that_sum_to_one(
    kind: str, num_tokens: int
) -> None:
    routing = make_routing(kind, MOE, num_tokens, seed=0, dp_rank=1)
    assert routing is not None
    assert routing.topk_ids.shape == routing.topk_weights.shape == (num_tokens, 2)
    assert routing.topk_ids.dtype == torch.int32
    assert all(len(set(row)) == 2 for row in routing.topk_ids.tolist())
    torch.testing.assert_close(routing.topk_weights.sum(dim=1), torch.ones(num_tokens))


def test_routings_load_the_experts_as_they_say() -> None:
    def loads(kind: str) -> list[int]:
        routing = make_routing(kind, MOE, 50, seed=0, dp_rank=0)
        assert routing is not None
        return torch.bincount(routing.topk_ids.flatten(), minlength=5).tolist()

    assert loads("balanced") == [20, 20, 20, 20, 20]
    assert loads("hotspot") == [50, 50, 0, 0, 0]
    zipf = loads("zipf")
    assert zipf[0] > 2 * zipf[4] > 0
    assert make_routing("model", MOE, 3, seed=0, dp_rank=0) is None


def test_rows_differ_by_rank_and_seed_alone() -> None:
    rows = make_rows(MOE, 3, seed=0, dp_rank=0)
    assert torch.equal(rows, make_rows(MOE, 3, seed=0, dp_rank=0))
    assert not torch.equal(rows, make_rows(MOE, 3, seed=0, dp_rank=1))
    assert not torch.equal(rows, make_rows(MOE, 3, seed=1, dp_rank=0))


FULL = MoEConfig(
    hidden_size=8,
    moe_intermediate_size=4,
    num_experts=3,
    top_k=2,
    router_bias=True,
    has_correction_bias=True,
    expert_bias=True,
    num_shared_experts=1,
    shared_expert_gate=True,
    dtype="float32",
)


def filled_in_place_and_loaded(ctx: EPContext, moe: MoEConfig) -> bool:
    """Whether `fill` gives what `load_experts` gives for the same tensors."""
    weights = SeededWeights(moe, seed=3, device=ctx.device)
    filled, loaded = MoELayer(moe, ctx), MoELayer(moe, ctx)
    with torch.no_grad():
        for parameter in filled.parameters():
            parameter.data.view(torch.uint8).fill_(255)  # of floats, NaN
        weights.fill(filled)
    parts = ("w13", "w2", "w13_bias", "w2_bias")
    stacked: dict[str, Any] = {
        part: torch.stack([weights.expert(part, expert) for expert in range(3)]) for part in parts
    }
    if moe.quantization.is_quantised:
        for part in ("w13", "w2"):
            stored = [tensors_of(weights.stored(part, expert)) for expert in range(3)]
            names = stored[0].keys()
            tensors = {name: torch.cat([one[name] for one in stored]) for name in names}
            plain, stacked[part] = stacked[part], quantized_tensor(tensors, moe.quantization)
            assert torch.equal(dequantize(stacked[part], 2 if part == "w13" else 1), plain)
    loaded.load_experts(**stacked, **weights.whole())
    pairs = zip(filled.parameters(), loaded.parameters(), strict=True)
    return all(torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("quantization", ["none", "fp8_block", "int8_w8a16"])
def test_a_layer_filled_in_place_is_the_layer_that_load_experts_makes(quantization: str) -> None:
    moe = MoEConfig(**{**FULL.model_dump(), "quantization": quantization})
    parallel = ParallelConfig(dp_size=2, device="cpu")
    assert run_ranks(filled_in_place_and_loaded, parallel, moe) == [True, True]


def test_no_two_seeded_tensors_are_alike() -> None:
    weights = SeededWeights(FULL, seed=0, device=torch.device("cpu"))
    whole = weights.whole()
    tensors = [weights.expert(part, e) for part in ("w13", "w2") for e in range(3)]
    tensors += [whole["router"], whole["shared"]["w13"], whole["shared"]["w2"]]
    # Before they were scaled by their width.
    firsts = [round(float(t.flatten()[0]) * t.shape[-1] ** 0.5, 4) for t in tensors]
    assert len(set(firsts)) == len(firsts)
