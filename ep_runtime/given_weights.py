"""Checks the tensors that a user hands to `MoELayer.load_experts`, before any is copied."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import (
    UNQUANTISED,
    QuantizedTensor,
    QuantScheme,
    WeightScheme,
)
from ep_runtime.kernels.quant.storage import (
    StoredShape,
    num_stored,
    stored_shapes,
    take_experts,
    tensors_of,
    tiers_of,
)

_LOADABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def is_wanted(
    name: str, target: Tensor | None, given: object, num_experts: int | None = None
) -> bool:
    """Whether to copy `given` into `target`; ConfigError where exactly one of the two is there, or
    `given` cannot be copied.

    num_experts: E, where `given` has all experts and `target` this rank's.
    """
    if target is None and given is None:
        return False
    if target is None:
        raise ConfigError(f"{name} is given, and the layer's configuration has none; leave it out")
    if given is None:
        raise ConfigError(f"{name} is missing; the layer's configuration has it")
    if isinstance(given, QuantizedTensor):
        raise ConfigError(
            f"{name} is a QuantizedTensor ({given.scheme.weight}), and the layer's quantization is "
            f"none; give a plain tensor, or build the layer with MoEConfig(quantization=...)"
        )
    if not isinstance(given, Tensor) or given.is_meta or given.dtype not in _LOADABLE:
        got = f"{given.dtype} on {given.device}" if isinstance(given, Tensor) else type(given)
        raise ConfigError(
            f"{name} is {got}; wanted a tensor with data, in float32, float64, bfloat16 or float16"
        )
    shape = list(target.shape) if num_experts is None else [num_experts, *target.shape[1:]]
    _check_shape(name, given, shape)
    return True


def own_experts(
    name: str,
    given: Any,
    *,
    shapes: Mapping[str, StoredShape],
    scheme: QuantScheme,
    num_experts: int,
    experts: list[int],
    key: str = "quantization",
) -> dict[str, Tensor]:
    """The stored tensors of some experts of a QuantizedTensor of all E, by name.

    shapes: what the layer has of each expert. key: the configuration's, for messages. Raises
    ConfigError that names the tensor.
    """
    if not isinstance(given, QuantizedTensor):
        got = "missing" if given is None else f"{type(given).__name__}"
        raise ConfigError(
            f"{name} is {got}; the layer's {key} is {scheme.weight}, which takes a QuantizedTensor"
        )
    if given.scheme != scheme:
        raise ConfigError(
            f"{name} is stored as {_keys_of(given.scheme)}, and the layer's {key} is "
            f"{_keys_of(scheme)}; build the layer with that of its tensors"
        )
    tensors = tensors_of(given)
    for missing in [key for key in shapes if key not in tensors]:
        raise ConfigError(f"{_key(name, missing)} is missing; {scheme.weight} has it")
    for key, tensor in tensors.items():
        label = _key(name, key)
        if key not in shapes:
            raise ConfigError(f"{label} is given, and {scheme.weight} has none; leave it out")
        wanted = shapes[key]
        is_cast = wanted.dtype in _LOADABLE and tensor.dtype in _LOADABLE
        if tensor.is_meta or (tensor.dtype != wanted.dtype and not is_cast):
            raise ConfigError(
                f"{label} is {tensor.dtype} on {tensor.device}; wanted {wanted.dtype} with data"
            )
        num_entries = num_stored(key, scheme, range(num_experts))
        _check_shape(label, tensor, [num_entries, *wanted.shape])
    _check_tiers(name, given, num_experts)
    own = tensors_of(take_experts(given, experts))
    for key, tensor in own.items():
        reason = _VALUE_FAULTS.get(key)
        if reason is None:
            continue
        is_wrong = _is_wrong(key, tensor.to(shapes[key].dtype), scheme)
        for entry in is_wrong.nonzero().flatten().tolist()[:1]:
            expert = [e for e in experts if num_stored(key, scheme, [e])][entry]
            raise ConfigError(f"{_key(name, key)} of expert {expert} {reason}")
    return own


def check_shared(shared: Mapping[str, Any], moe: MoEConfig) -> None:
    """ConfigError, naming the tensor, where w13 and w2 of a quantised shared expert are not
    QuantizedTensors (E = 1) as `moe.shared_quantization` stores them."""
    width, hidden, scheme = moe.shared_intermediate_size, moe.hidden_size, moe.shared_quantization
    num_parts = 2 if moe.experts_activation().is_gated else 1
    for name, rows, columns, parts in (
        ("w13", num_parts * width, hidden, num_parts),
        ("w2", hidden, width, 1),
    ):
        own_experts(
            f'shared["{name}"]',
            shared.get(name),
            shapes=stored_shapes(scheme, rows, columns, num_parts=parts, dtype=moe.torch_dtype),
            scheme=scheme,
            num_experts=1,
            experts=[0],
            key="shared_quantization",
        )


def _keys_of(scheme: QuantScheme) -> str:
    """As a user writes it. Example: {weight: int4_w4a16, group_size: 128}."""
    given = {field.name: getattr(scheme, field.name) for field in fields(scheme)}
    keys = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in given.items()
        if key == "weight" or value != getattr(UNQUANTISED, key)
    }
    return f"{{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}"


def _check_tiers(name: str, given: QuantizedTensor, num_experts: int) -> None:
    """A hybrid's tiers name each place of each tier once, those that its scheme says in nvfp4."""
    if given.parameters.tiers is None:
        return
    in_nvfp4 = [expert in given.scheme.nvfp4_experts for expert in range(num_experts)]
    if not torch.equal(given.parameters.tiers.cpu(), tiers_of(in_nvfp4)):
        raise ConfigError(
            f"{_key(name, 'tiers')} are not those of quantization.nvfp4_experts "
            f"{list(given.scheme.nvfp4_experts)} with each tier's experts in rising order; use "
            f"join_tiers"
        )


_VALUE_FAULTS = {
    "scales": "has a scale that is NaN or infinite",
    "global_scales": "has a scale that is NaN or infinite",
    "nf3_scales": "has a scale that is NaN or infinite",
    "input_order": "must name every column once",
}


def _is_wrong(key: str, tensor: Tensor, scheme: QuantScheme) -> Tensor:
    """[E] whether an expert's tensor, in the dtype that the layer keeps, cannot be right."""
    if key == "input_order":
        columns = torch.arange(tensor.shape[1], dtype=tensor.dtype, device=tensor.device)
        return (tensor.sort(dim=1).values != columns).any(dim=1)
    if scheme.weight is WeightScheme.MXFP4:
        tensor = tensor.view(torch.float8_e8m0fnu)
    return ~torch.isfinite(tensor.float().flatten(1)).all(dim=1)


def _key(name: str, key: str) -> str:
    return f"{name}.values" if key == "values" else f"{name}.parameters.{key}"


def _check_shape(name: str, given: Tensor, shape: list[int]) -> None:
    if list(given.shape) != shape:
        raise ConfigError(f"{name} has shape {list(given.shape)}; wanted {shape}")
