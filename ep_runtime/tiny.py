"""Tiny checkpoints with random weights, one for each family, written by transformers itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ep_runtime.config import DTYPES
from ep_runtime.families import FAMILIES
from ep_runtime.kernels.errors import ConfigError

HIDDEN_SIZE = 64
VOCAB_SIZE = 320  # bytes, and some ids above them

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
}
_GQA: Mapping[str, Any] = {"num_key_value_heads": 2}
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_DEEPSEEK: Mapping[str, Any] = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
# Sizes that divide nothing and expert counts that 2 and 4 ranks share unevenly are among them.
_FAMILY_VALUES: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {**_GQA, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **_GQA,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 72,
    },
    "qwen3_moe": {
        **_GQA,
        "head_dim": 16,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "olmoe": {**_GQA, "num_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 32},
    "deepseek_v2": {
        **_MLA,
        **_DEEPSEEK,
        "n_shared_experts": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 4.0,
    },
    "deepseek_v3": {
        **_MLA,
        **_DEEPSEEK,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        **_GQA,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 9,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "gpt_oss": {
        **_GQA,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
}
# Standard deviation of the weights. With the usual 0.02 a model this narrow routes and answers
# nearly alike for every token, and a wrong expert would not show.
_INITIALIZER_RANGE = 0.15


def tiny_config(family: str, *, layers: int = 2, **overrides: Any) -> Any:
    """The transformers config of a family's tiny model; `overrides` are its own keys."""
    if family not in FAMILIES:
        raise ConfigError(
            f"family {family!r} is not supported; choose one of: {', '.join(FAMILIES)}"
        )
    from transformers import CONFIG_MAPPING

    values = {
        **_COMMON,
        **_FAMILY_VALUES[family],
        "num_hidden_layers": layers,
        "initializer_range": _INITIALIZER_RANGE,
        **overrides,
    }
    return CONFIG_MAPPING[family](**values)


def write_tiny_checkpoint(
    family: str,
    directory: str | Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    layers: int = 2,
    **overrides: Any,
) -> Path:
    """Write a tiny model with random weights through `save_pretrained`; returns the directory.

    family: a supported model_type. layers: decoder layers; DeepSeek's and GLM's first is dense.
    overrides: configuration keys in the family's spelling. Leaves torch's generator as it was.
    """
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, layers=layers, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                _give_effect(name, tensor)
    with _without_progress_bar():
        model.save_pretrained(directory)
    return Path(directory)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _give_effect(name: str, tensor: torch.Tensor) -> None:
    """Random values where transformers starts at zero, so that a part left out would show.

    The correction bias is about as large as the differences of the sigmoid scores.
    """
    if name.endswith("e_score_correction_bias"):
        tensor.normal_(std=0.2)
    elif name.endswith("bias"):
        tensor.normal_(std=_INITIALIZER_RANGE)
    elif name.endswith("norm.weight"):
        tensor.normal_(mean=1.0, std=0.1)
