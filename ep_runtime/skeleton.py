"""transformers' own model without its MoE blocks: built without memory, then filled in place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ep_runtime.families import FAMILIES, Family, moe_layer_ids
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.stored_weight import StoredWeight
from ep_runtime.weight_reader import WeightReader


@dataclass(frozen=True)
class Skeleton:
    """A causal language model on the meta device whose MoE blocks are empty modules.

    moe_layers: the decoder layers that had a block, in order.
    shapes: dense tensors by name, as the checkpoint must have them.
    tied: for a name that shares its tensor with another, that other name.
    """

    model: Any
    family: Family
    moe_layers: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]

    def set_block(self, layer: int, block: nn.Module) -> None:
        """Put a module in the place of a layer's MoE block."""
        setattr(self.model.get_submodule(f"{self.family.layers}.{layer}"), self.family.block, block)


def transformers_config(config: dict[str, Any]) -> Any:
    """The transformers config object of a config.json; names no code of the checkpoint."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ConfigError(
            "loading a model needs transformers; pip install 'ep-runtime[hf]'"
        ) from error
    # What is quantised is dequantised as it is read, or is in our blocks.
    left_out = ("auto_map", "quantization_config", "compression_config")
    values = {key: value for key, value in config.items() if key not in left_out}
    # The blocks that would report router logits are replaced.
    values["output_router_logits"] = False
    try:
        return CONFIG_MAPPING[config["model_type"]].from_dict(values)
    except Exception as error:  # transformers' validation has no common base
        reason = " ".join(str(error).split())
        raise ConfigError(f"config.json is not valid: {reason}") from error


def build_skeleton(config: Any, dtype: torch.dtype) -> Skeleton:
    """Build transformers' model for a config object; takes no memory for weights.

    Raises ConfigError where transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    family = FAMILIES[config.model_type]
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # whatever the modelling code does with values that do not fit
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"transformers cannot build config.json's model: {reason}") from error
    moe_layers = moe_layer_ids(config)
    skeleton = Skeleton(model, family, moe_layers, {}, {})
    for layer in moe_layers:
        skeleton.set_block(layer, nn.Identity())
    tensors = model.state_dict(keep_vars=True)
    first_name: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        other = first_name.setdefault(id(tensor), name)
        if other != name:
            tied[name], tied[other] = other, name
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    model.eval().requires_grad_(False)
    return Skeleton(model, family, moe_layers, shapes, tied)


@torch.no_grad()
def load_dense(
    skeleton: Skeleton,
    weights: WeightReader,
    dense: Mapping[str, StoredWeight],
    device: torch.device,
    on_tensor: Callable[[int], None],
) -> int:
    """Give every dense tensor memory on `device` and read it from the checkpoint, dequantised where
    it is quantised.

    dense: those that the checkpoint has, by name; one that it lacks shares its tied one's.
    on_tensor: told the bytes of each weight read. Returns how many tensors were read.
    """
    model = skeleton.model
    tensors = model.state_dict(keep_vars=True)
    filled: dict[str, Tensor] = {}
    reader = weights.reader
    for name, weight in sorted(
        dense.items(), key=lambda item: (reader.tensors[item[1].name].file, item[0])
    ):
        before = reader.bytes_read
        filled[name] = torch.empty_like(tensors[name], device=device)
        weights.read_into(weight, filled[name])
        on_tensor(reader.bytes_read - before)
    for name in tensors:
        source = filled[name if name in filled else skeleton.tied[name]]
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if attribute in module._buffers:
            module._buffers[attribute] = source
        else:
            if not isinstance(source, nn.Parameter):
                source = nn.Parameter(source, requires_grad=False)
            module._parameters[attribute] = source
        filled[name] = source
    _restore_buffers(model, device)
    return sum(len(weight.tensors) for weight in dense.values())


def _restore_buffers(model: Any, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies) like from_pretrained."""
    for module in model.modules():
        names = [n for n in module._non_persistent_buffers_set if module._buffers[n] is not None]
        if not names:
            continue
        for name in names:
            # NaN shows a buffer that nothing computes.
            module._buffers[name] = torch.full_like(
                module._buffers[name], float("nan"), device=device
            )
        model._init_weights(module)
        for name in names:
            if not bool(torch.isfinite(module._buffers[name]).all()):
                raise RuntimeError(
                    f"transformers does not compute {name} of {type(module).__name__}; "
                    "this release is not supported"
                )
