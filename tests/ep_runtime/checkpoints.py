"""Tiny checkpoints and what the single-process transformers model makes of them, once a session."""

import atexit
import shutil
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ep_runtime.tiny import write_tiny_checkpoint

FAMILY_NAMES = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
)
for _family in FAMILY_NAMES:  # here, so that the ranks' fork server has them (tests/harness.py)
    import_module(f"transformers.models.{_family}.modeling_{_family}")
# Unequal lengths; the last is one token long.
PROMPTS = ((17, 250, 3, 88, 41), (200, 7, 7, 7, 119, 260, 31, 5, 64), (12, 300, 77), (5,))
NEW_TOKENS = 16


@cache
def scratch_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix="ep_runtime_checkpoints_"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def tiny_checkpoint(family: str) -> Path:
    return write_tiny_checkpoint(family, scratch_directory() / family)


@cache
def transformers_model(family: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=torch.float32)


@cache
@torch.no_grad()
def expected_logits(family: str) -> tuple[Tensor, ...]:
    """[n, vocab] of each prompt, computed alone."""
    model = transformers_model(family)
    return tuple(model(input_ids=torch.tensor([prompt])).logits[0] for prompt in PROMPTS)


@cache
@torch.no_grad()
def expected_tokens(family: str, eos_token_id: int | None = None) -> tuple[tuple[int, ...], ...]:
    """What transformers' own greedy search continues each prompt with, computed alone."""
    tokens = []
    for prompt in PROMPTS:
        output = transformers_model(family).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=eos_token_id if eos_token_id is not None else -1,
            pad_token_id=0,
        )
        tokens.append(tuple(output[0, len(prompt) :].tolist()))
    return tuple(tokens)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(directory / "model.safetensors")
    return tensors


def copy_with_tensors(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """The same configuration with other tensors, in one file."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "config.json", target / "config.json")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    return target
