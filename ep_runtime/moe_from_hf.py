"""A family's configuration as MoEConfig, and how its experts are stored."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ep_runtime.config import SHARED_SCHEMES, MoEConfig
from ep_runtime.families import FAMILIES, PROJECTIONS, Family, family_of, read_hf_config
from ep_runtime.hf_config import HFConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.format import WeightFormat
from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme
from ep_runtime.quantization import CheckpointQuantization, experts_format, read_quantization

logger = logging.getLogger(__name__)

HIDDEN_ACTS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
DTYPE_NAMES = ("float32", "bfloat16", "float16")


def expert_modules(family: Family, layer: int, num_experts: int) -> Iterator[tuple[str, ...]]:
    """The path of each expert projection of a layer as a linear layer, in every spelling that
    writers of quantised checkpoints use: as on disk, as in transformers' memory, or a mixture."""
    path = f"{family.layers}.{layer}"
    if family.disk_experts is None:
        yield (f"{path}.{family.disk_block}.experts",)
        return
    blocks = dict.fromkeys((family.disk_block, "mlp"))
    spellings = dict.fromkeys((family.disk_experts, PROJECTIONS))
    for expert in range(num_experts):
        for part in range(len(PROJECTIONS)):
            yield tuple(
                f"{path}.{block}.experts.{expert}.{names[part]}"
                for block in blocks
                for names in spellings
            )


def expert_formats(
    config: Any, quantization: CheckpointQuantization | None, num_experts: int
) -> dict[int, WeightFormat | None]:
    """MoE layer -> the format of its routed experts; None: not quantised.

    Raises ConfigError where experts of one layer are stored differently.
    """
    reader = read_hf_config(config)
    family = FAMILIES[reader.model_type]
    formats: dict[int, WeightFormat | None] = {}
    for layer in family.moe_layers(reader):
        modules = expert_modules(family, layer, num_experts)
        where = f"{family.layers}.{layer}"
        formats[layer] = (
            None if quantization is None else experts_format(quantization, where, modules)
        )
    return formats


def shared_schemes(
    config: Any, quantization: CheckpointQuantization | None
) -> Mapping[int, QuantScheme]:
    """MoE layer -> how `quantization_config` says that its shared expert is stored, of schemes that
    are kept so; another is dequantised as it is read. Empty where there is none."""
    reader = read_hf_config(config)
    family = FAMILIES[reader.model_type]
    if family.shared is None or quantization is None:
        return {}
    blocks = dict.fromkeys((family.disk_block, "mlp"))
    schemes = {}
    for layer in family.moe_layers(reader):
        modules = [f"{family.layers}.{layer}.{block}.{family.shared}" for block in blocks]
        forms = [
            quantization.format_of(*(f"{module}.{name}" for module in modules))
            for name in PROJECTIONS
        ]
        schemes[layer] = kept_shared_scheme(forms)
    return schemes


def kept_shared_scheme(forms: Sequence[WeightFormat | None]) -> QuantScheme:
    """The scheme that a shared expert's three projections are kept in: theirs where it is one that
    is kept and they have it alike, else none."""
    schemes = {UNQUANTISED if form is None else form.scheme for form in forms}
    scheme = schemes.pop()
    return UNQUANTISED if schemes or scheme.weight not in SHARED_SCHEMES else scheme


def moe_config_from_hf(config: Any) -> MoEConfig:
    """The MoE layers of a transformers config, or of config.json as a dict.

    `quantization` is that of the first layer whose experts are quantised, `shared_quantization` of
    the first whose shared expert is; `load_model` looks at each layer.

    Raises ConfigError: an unknown family (lists the supported ones), a missing key, or a value
    that changes the model in a way that is not supported.
    """
    family = family_of(config)
    quantization = read_quantization(config)
    reader = read_hf_config(config)
    _check_required(reader, family)
    values: dict[str, Any] = dict(family.fixed)
    optional = {"n_group", "topk_group", "swiglu_limit", "num_shared_experts"}
    for name, key in family.keys.items():
        value = reader.get(key) if name in optional else reader[key]
        if value is not None:
            values[name] = value
    if family.grouped_by and reader.get(family.grouped_by[0]) != family.grouped_by[1]:
        values |= {"n_group": 1, "topk_group": 1}
    if _leaves_no_group_out(values):
        values |= {"n_group": 1, "topk_group": 1, "group_score": "max"}
    if values.get("activation") == "swigluoai":
        values["swiglu_alpha"] = reader.get("swiglu_alpha", 1.702)
    else:
        values["activation"] = _activation(reader["hidden_act"], reader.model_type)
    values["dtype"] = _dtype_name(reader)
    moe = MoEConfig(**values)
    if quantization is None:
        return moe
    formats = expert_formats(config, quantization, moe.num_experts).values()
    scheme = next((form.scheme for form in formats if form is not None), moe.quantization)
    moe = moe.with_quantization(scheme)
    shared = [one for one in shared_schemes(config, quantization).values() if one.is_quantised]
    return moe.with_shared_quantization(shared[0]) if shared and moe.has_shared_expert else moe


def _leaves_no_group_out(values: Mapping[str, Any]) -> bool:
    """Whether all experts are in reach, as with one group; values that fit no layer leave that to
    MoEConfig, which refuses them."""
    num_experts, n_group = values["num_experts"], values.get("n_group", 1)
    topk_group = values.get("topk_group", 1)
    if not all(type(number) is int and number > 0 for number in (num_experts, n_group, topk_group)):
        return False
    return bool(n_group == topk_group and num_experts % n_group == 0)


def _check_required(reader: HFConfig, family: Family) -> None:
    for key, allowed in family.required.items():
        value = reader.get(key, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"{key} ({value!r}) is not supported for {family.model_type}; it must be "
                f"{' or '.join(repr(choice) for choice in allowed)}"
            )
    for key, honoured in family.ignored_keys.items():
        if reader.get(key, honoured) != honoured:
            logger.warning(
                "%s (%r) is ignored for %s, as transformers does",
                key,
                reader.get(key),
                family.model_type,
            )


def _activation(hidden_act: Any, model_type: str) -> str:
    if not isinstance(hidden_act, str) or hidden_act not in HIDDEN_ACTS:
        raise ConfigError(
            f"hidden_act ({hidden_act!r}) is not supported for {model_type}; choose one of: "
            f"{', '.join(HIDDEN_ACTS)}"
        )
    return HIDDEN_ACTS[hidden_act]


def _dtype_name(reader: HFConfig) -> str:
    """float32 where the configuration names none, as transformers does."""
    value = reader.get("dtype")
    if value is None and not reader.is_transformers_config:  # there it is a deprecated alias
        value = reader.get("torch_dtype")
    value = "float32" if value is None else value
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ConfigError(
            f"dtype ({name}) is not supported; choose one of: {', '.join(DTYPE_NAMES)}"
        )
    return name
