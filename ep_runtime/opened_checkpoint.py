"""Opens a Hugging Face checkpoint: reads what its headers say, and checks it against the model."""

import logging
from pathlib import Path
from typing import Any

import torch

from ep_runtime.checkpoint import CheckpointReader, read_config
from ep_runtime.config import DTYPES, MoEConfig
from ep_runtime.kernels.errors import CheckpointError, ConfigError
from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme
from ep_runtime.moe_from_hf import expert_formats, kept_shared_scheme, moe_config_from_hf
from ep_runtime.name_map import MoELayout, NameMap, map_names
from ep_runtime.quantization import read_quantization
from ep_runtime.skeleton import build_skeleton, transformers_config
from ep_runtime.tensor_names import SHARED_PARTS, Slot

logger = logging.getLogger(__name__)


class OpenedCheckpoint:
    """What is known of a checkpoint before its weights are read; every name has its place.

    dtype: of the model; None for the checkpoint's own. Reads config.json and the files' headers.
    moe: the MoE layers as `MoEConfig.from_hf` has them; moe_of_layer: each with its own
    quantization, which may differ between layers, the shared expert's as its tensors are.
    Raises CheckpointError or ConfigError for everything that these show to be wrong.
    """

    def __init__(self, path: str | Path, dtype: str | torch.dtype | None) -> None:
        values = read_config(path)
        quantization = read_quantization(values)
        planned = moe_config_from_hf(values)  # an unknown family is told of here
        config = transformers_config(values)
        self.reader = CheckpointReader(path)
        name = _dtype_name(dtype, config, self.reader)
        plain = MoEConfig(**{**moe_config_from_hf(config).model_dump(), "dtype": name})
        self.moe = plain.with_quantization(planned.quantization)
        self.skeleton = build_skeleton(config, self.moe.torch_dtype)
        if not self.skeleton.moe_layers:
            raise CheckpointError(f"{path}: config.json describes a model without MoE layers")
        formats = expert_formats(config, quantization, plain.num_experts)
        by_scheme = {
            scheme: plain.with_quantization(scheme)
            for scheme in {form.scheme if form else UNQUANTISED for form in formats.values()}
        }
        self.moe_of_layer: dict[int, MoEConfig] = {
            layer: by_scheme[form.scheme if form else UNQUANTISED]
            for layer, form in formats.items()
        }
        layout = MoELayout(
            self.skeleton.family,
            plain,
            self.skeleton.moe_layers,
            config.num_hidden_layers,
            self.skeleton.tied,
            quantization,
            formats,
        )
        self.names: NameMap = map_names(self.reader.tensors, layout, self.skeleton.shapes)
        for weight in (*self.names.slots.values(), *self.names.dense.values()):
            weight.check(self.reader)
        self.moe_of_layer = {
            layer: moe.with_shared_quantization(self._shared_scheme(layer))
            for layer, moe in self.moe_of_layer.items()
        }
        # One of the layers', whatever the lists in `quantization_config` say of a shared expert.
        self.moe = next(
            moe for moe in self.moe_of_layer.values() if moe.quantization == self.moe.quantization
        )
        self._log_unused()
        self.digest = self.reader.digest()

    def _shared_scheme(self, layer: int) -> QuantScheme:
        """How a layer keeps its shared expert, as its tensors are."""
        slots = (Slot(layer, part) for part in SHARED_PARTS.values())
        weights = [self.names.slots[slot] for slot in slots if slot in self.names.slots]
        return kept_shared_scheme([weight.format for weight in weights]) if weights else UNQUANTISED

    def _log_unused(self) -> None:
        """Say once which scales, that another runtime might use, are not."""
        scales = [name for name in self.names.unused if name.endswith("scale")]
        if scales:
            logger.warning(
                "%s: %d scales of activations or of a KV cache are not used (%s, ...); both stay "
                "in %s",
                self.reader.directory,
                len(scales),
                scales[0],
                self.moe.dtype,
            )


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
