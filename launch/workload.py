"""What the ranks are fed: prompts shared out over the DP ranks, or seeded rows and routing."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ep_runtime.checkpoint import read_config
from ep_runtime.config import MoEConfig
from ep_runtime.families import read_hf_config
from ep_runtime.kernels.base import Routing
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.run_config import WorkloadSection

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def share_out(num_prompts: int, dp_size: int, dp_rank: int) -> slice:
    """A DP rank's contiguous share; the first ranks have one more. Some may have none.

    Example: 3 prompts on 2 ranks: [0, 2) and [2, 3).
    """
    base, extra = divmod(num_prompts, dp_size)
    start = dp_rank * base + min(dp_rank, extra)
    return slice(start, start + base + (dp_rank < extra))


def read_prompts(path: Path) -> list[str]:
    """The non-empty lines of a text file, one prompt each; none is a ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"workload.prompts {path}: cannot be read: {error}") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"workload.prompts {path}: holds no prompt; write one a line")
    return prompts


def vocab_size_of(checkpoint: Path) -> int:
    """How many token ids the model has, as its config.json says."""
    size: int = read_hf_config(read_config(checkpoint))["vocab_size"]
    return size


def prompts_of(
    workload: WorkloadSection, checkpoint: Path, *, dp_size: int, vocab_size: int
) -> list[list[list[int]]]:
    """The token ids of every DP rank's prompts; the same on all ranks.

    A checkpoint with a tokenizer reads text with it, one without reads it as bytes.
    """
    if workload.tokens_per_rank is not None:
        return [
            [_random_ids(workload.seed or 0, rank, count, vocab_size)] if count else []
            for rank, count in enumerate(workload.tokens_per_rank)
        ]
    texts = read_prompts(Path(workload.prompts or ""))
    ids = [_encode(text, tokenizer) for tokenizer in [_tokenizer(checkpoint)] for text in texts]
    for text, prompt in zip(texts, ids, strict=True):
        if prompt and max(prompt) >= vocab_size:
            raise ConfigError(
                f"workload.prompts: {text[:40]!r} has the token id {max(prompt)}, and the model's "
                f"vocab_size is {vocab_size}; put the model's tokenizer into {checkpoint}"
            )
    return [ids[share_out(len(ids), dp_size, rank)] for rank in range(dp_size)]


def _tokenizer(checkpoint: Path) -> Any:
    if not any((checkpoint / name).is_file() for name in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model.checkpoint {checkpoint}: its tokenizer: {reason}") from None


def _encode(text: str, tokenizer: Any) -> list[int]:
    return list(text.encode()) if tokenizer is None else list(tokenizer(text)["input_ids"])


def _random_ids(seed: int, dp_rank: int, count: int, vocab_size: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + dp_rank)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()


def make_rows(moe: MoEConfig, num_tokens: int, *, seed: int, dp_rank: int) -> Tensor:
    """A DP rank's rows for one layer: [num_tokens, H] normal values in the layer's dtype."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + dp_rank)
    return torch.randn(num_tokens, moe.hidden_size, generator=generator).to(moe.torch_dtype)


def make_routing(
    kind: str, moe: MoEConfig, num_tokens: int, *, seed: int, dp_rank: int
) -> Routing | None:
    """Where a layer's rows go; None where its own router decides (`model`).

    balanced: experts in turn. hotspot: every row to the first top_k experts. random, zipf: drawn
    without repetition, each expert alike, or expert e in proportion to 1 / (e + 1).
    Weights are positive and sum to 1 a row.
    """
    if kind == "model":
        return None
    generator = torch.Generator().manual_seed(seed * 1_000_003 + dp_rank + 1)
    slots = torch.arange(num_tokens * moe.top_k).view(num_tokens, moe.top_k)
    if kind == "balanced":
        ids = (slots + dp_rank * moe.top_k) % moe.num_experts
    elif kind == "hotspot":
        ids = slots % moe.top_k
    elif num_tokens == 0:
        ids = slots
    else:
        chances = torch.ones(moe.num_experts)
        if kind == "zipf":
            chances = 1.0 / torch.arange(1, moe.num_experts + 1)
        chances = chances.expand(num_tokens, -1)
        ids = torch.multinomial(chances, moe.top_k, generator=generator)
    weights = torch.rand(num_tokens, moe.top_k, generator=generator) + 0.1
    return Routing(ids.to(torch.int32), weights / weights.sum(dim=1, keepdim=True))
