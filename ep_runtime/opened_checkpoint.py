"""Opens a Hugging Face checkpoint: reads what its headers say, and checks it against the model."""

from pathlib import Path
from typing import Any

import torch

from ep_runtime.checkpoint import CheckpointReader, read_config
from ep_runtime.config import DTYPES, MoEConfig
from ep_runtime.families import moe_config_from_hf
from ep_runtime.kernels.errors import CheckpointError, ConfigError
from ep_runtime.skeleton import build_skeleton, transformers_config
from ep_runtime.tensor_names import MoELayout, NameMap, map_names, slot_shapes


class OpenedCheckpoint:
    """What is known of a checkpoint before its weights are read; every name has its place.

    dtype: of all weights; None for the checkpoint's own. Reads config.json and the files' headers.
    Raises CheckpointError or ConfigError for everything that these show to be wrong.
    """

    def __init__(self, path: str | Path, dtype: str | torch.dtype | None) -> None:
        values = read_config(path)
        quantization = values.get("quantization_config")
        if quantization:
            is_mapping = isinstance(quantization, dict)
            method = quantization.get("quant_method", "unknown") if is_mapping else quantization
            raise CheckpointError(
                f"{path}: quantization_config ({method}) is not supported; give a checkpoint in "
                f"{', '.join(DTYPES)}"
            )
        moe_config_from_hf(values)  # an unknown family is told of here
        config = transformers_config(values)
        self.reader = CheckpointReader(path)
        name = _dtype_name(dtype, config, self.reader)
        self.moe = MoEConfig(**{**moe_config_from_hf(config).model_dump(), "dtype": name})
        self.skeleton = build_skeleton(config, self.moe.torch_dtype)
        if not self.skeleton.moe_layers:
            raise CheckpointError(f"{path}: config.json describes a model without MoE layers")
        layout = MoELayout(
            self.skeleton.family,
            self.moe,
            self.skeleton.moe_layers,
            config.num_hidden_layers,
            self.skeleton.tied,
        )
        self.names: NameMap = map_names(self.reader.tensors, layout, self.skeleton.shapes)
        shapes = slot_shapes(self.moe, self.skeleton.family)
        for slot, name in self.names.slots.items():
            self.reader.check(name, shapes[slot.part])
        for name in self.names.dense:
            self.reader.check(name, self.skeleton.shapes[name])
        self.digest = self.reader.digest()


def _dtype_name(dtype: str | torch.dtype | None, config: Any, reader: CheckpointReader) -> str:
    """The name of the dtype asked for, else config.json's, else that of the embeddings."""
    wanted = dtype if dtype is not None else getattr(config, "dtype", None)
    if wanted is None:
        stored = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        info = reader.tensors.get("model.embed_tokens.weight")
        wanted = stored.get(info.dtype if info else "F32", "float32")
    name = str(wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype ({name}) is not supported; choose one of: {', '.join(DTYPES)}")
    return name
