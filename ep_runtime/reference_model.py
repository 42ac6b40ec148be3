"""transformers' own model of a checkpoint in float32 on one process: the oracle of `check: logits`.

Where the checkpoint is quantised, every weight is what its stored tensors stand for, and nothing
else is quantised: neither activations nor a KV cache.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ep_runtime.checkpoint import read_config
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.opened_checkpoint import OpenedCheckpoint
from ep_runtime.quantization import read_quantization
from ep_runtime.skeleton import transformers_config
from ep_runtime.tensor_names import path_of
from ep_runtime.weight_reader import WeightReader


@torch.no_grad()
def load_reference_model(path: str | Path) -> Any:
    """The whole model on the CPU, every expert included; no code of the checkpoint is run.

    Takes the memory of all weights in float32, twice while a quantised checkpoint is loaded.
    """
    from transformers import AutoModelForCausalLM

    values = read_config(path)
    if read_quantization(values) is None:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False
        )
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    opened = OpenedCheckpoint(path, torch.float32)
    with opened.reader:
        tensors = _plain_tensors(opened)
    config = transformers_config(values)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, loading = model_class.from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32, output_loading_info=True
    )
    faults = [*loading["missing_keys"], *loading["unexpected_keys"], *loading["mismatched_keys"]]
    if faults:
        raise ConfigError(f"transformers does not take the dequantised weights: {faults[:8]}")
    return model


def _plain_tensors(opened: OpenedCheckpoint) -> dict[str, Tensor]:
    """Every weight in float32, under the name that save_pretrained gives it."""
    weights, names, family = WeightReader(opened.reader), opened.names, opened.skeleton.family
    tensors: dict[str, Tensor] = {}
    of_slots = {"".join(path_of(slot, family)): weight for slot, weight in names.slots.items()}
    for name, weight in {**names.dense, **of_slots}.items():
        tensors[name] = torch.empty(weight.shape, dtype=torch.float32)
        if weight.num_experts is None:
            weights.read_into(weight, tensors[name])
            continue
        for expert in range(weight.num_experts):
            stored = weights.read_quantized(weight, torch.device("cpu"), expert)
            rows_first = dequantize(stored)[0]
            tensors[name][expert] = rows_first.T if family.fused.transposed else rows_first
    return tensors
