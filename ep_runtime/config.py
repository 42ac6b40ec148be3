"""What a user configures: the MoE layer, the parallelism, the shared expert's schedule."""

from typing import Any, Literal, Self

import torch
from pydantic import AliasChoices, Field, field_serializer, field_validator, model_validator

from ep_runtime.kernels.base import Activation, ActivationKind, RoutingSpec
from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme, WeightScheme
from ep_runtime.quantization_key import check_scheme, parse_scheme, write_scheme
from ep_runtime.strict_model import StrictModel

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# How a shared expert may be stored; another scheme is dequantised as it is read.
SHARED_SCHEMES = (WeightScheme.NONE, WeightScheme.FP8_BLOCK)
MAX_TIMEOUT_S = 30 * 24 * 3600  # a longer wait is a slip of the pen


class MoEConfig(StrictModel):
    """One MoE layer, in the field's own terms.

    shared_intermediate_size: total width of all shared experts; default
    num_shared_experts * moe_intermediate_size; 0 means there is none.
    n_group, topk_group: equal where all experts are in reach, so both are 1 then; group_score
    top2_sum is for several groups. swiglu_alpha, swiglu_limit: of swigluoai; None: not clamped.
    quantization: how the routed experts' weights are stored; a scheme's name, or its keys
    ({weight: int4_w4a16, group_size: 128}). The router is never quantised.
    shared_quantization: how the shared expert's are: none or fp8_block.
    """

    hidden_size: int = Field(gt=0, strict=True)
    moe_intermediate_size: int = Field(gt=0, strict=True)
    num_experts: int = Field(gt=0, strict=True)
    top_k: int = Field(gt=0, strict=True)
    activation: Literal["silu", "gelu", "swigluoai", "relu2"] = "silu"
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    n_group: int = Field(default=1, gt=0, strict=True)
    topk_group: int = Field(default=1, gt=0, strict=True)
    group_score: Literal["max", "top2_sum"] = "max"
    norm_topk_prob: bool = Field(default=True, strict=True)
    routed_scaling_factor: float = Field(default=1.0, strict=True, allow_inf_nan=False)
    has_correction_bias: bool = Field(default=False, strict=True)
    router_bias: bool = Field(default=False, strict=True)
    expert_bias: bool = Field(default=False, strict=True)
    swiglu_alpha: float = Field(default=1.702, strict=True, allow_inf_nan=False)
    swiglu_limit: float | None = Field(default=None, gt=0, strict=True, allow_inf_nan=False)
    num_shared_experts: int = Field(default=0, ge=0, strict=True)
    shared_intermediate_size: int = Field(default=0, ge=0, strict=True)
    shared_expert_gate: bool = Field(default=False, strict=True)
    apply_router_weight_on_input: bool = Field(default=False, strict=True)
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: QuantScheme = UNQUANTISED
    shared_quantization: QuantScheme = UNQUANTISED

    @field_validator("quantization", "shared_quantization", mode="plain")
    @classmethod
    def _parse_quantization(cls, value: Any) -> QuantScheme:
        return parse_scheme(value)

    @field_serializer("quantization", "shared_quantization")
    def _write_quantization(self, value: QuantScheme) -> str | dict[str, Any]:
        return write_scheme(value)

    @model_validator(mode="before")
    @classmethod
    def _default_shared_width(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("shared_intermediate_size") is None:
            shared = values.get("num_shared_experts", 0)
            width = values.get("moe_intermediate_size", 0)
            if isinstance(shared, int) and isinstance(width, int):
                values = {**values, "shared_intermediate_size": shared * width}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_shared_experts > 0 and self.shared_intermediate_size == 0:
            raise ValueError(
                f"num_shared_experts ({self.num_shared_experts}) has no effect with "
                f"shared_intermediate_size 0; drop one of the two"
            )
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most num_experts ({self.num_experts})"
            )
        if self.num_experts % self.n_group:
            raise ValueError(
                f"n_group ({self.n_group}) must divide num_experts ({self.num_experts})"
            )
        if self.topk_group > self.n_group:
            raise ValueError(
                f"topk_group ({self.topk_group}) must be at most n_group ({self.n_group})"
            )
        in_reach = self.topk_group * (self.num_experts // self.n_group)
        if self.top_k > in_reach:
            raise ValueError(
                f"top_k ({self.top_k}) must be at most the {in_reach} experts of "
                f"topk_group ({self.topk_group}) groups"
            )
        if self.topk_group == self.n_group > 1:
            raise ValueError(
                f"n_group ({self.n_group}) has no effect with topk_group ({self.topk_group}), "
                f"which leaves no group out; drop both or lower topk_group"
            )
        if self.group_score == "top2_sum" and self.n_group == 1:
            raise ValueError(
                "group_score (top2_sum) has no effect with n_group 1; drop it or set n_group and "
                "topk_group"
            )
        if self.group_score == "top2_sum" and self.num_experts // self.n_group < 2:
            raise ValueError(
                f"group_score top2_sum needs groups of 2 experts or more; num_experts "
                f"({self.num_experts}) / n_group ({self.n_group}) is 1"
            )
        if self.apply_router_weight_on_input and self.top_k != 1:
            raise ValueError(
                f"apply_router_weight_on_input needs top_k 1, got top_k ({self.top_k})"
            )
        if self.shared_expert_gate and self.shared_intermediate_size == 0:
            raise ValueError(
                "shared_expert_gate has no effect without a shared expert; set "
                "num_shared_experts or shared_intermediate_size, or drop it"
            )
        if self.shared_quantization.weight not in SHARED_SCHEMES:
            raise ValueError(
                f"shared_quantization ({self.shared_quantization.weight}) is not supported for a "
                f"shared expert; choose one of: {', '.join(SHARED_SCHEMES)}"
            )
        if self.shared_quantization.is_quantised and self.shared_intermediate_size == 0:
            raise ValueError(
                f"shared_quantization ({self.shared_quantization.weight}) has no effect without a "
                f"shared expert; set num_shared_experts or shared_intermediate_size, or drop it"
            )
        for key in ("swiglu_alpha", "swiglu_limit"):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default and self.activation != "swigluoai":
                raise ValueError(
                    f"{key} ({value}) has no effect with activation {self.activation}; drop it or "
                    f"use activation: swigluoai"
                )
        check_scheme(
            self.quantization,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            moe_intermediate_size=self.moe_intermediate_size,
        )
        return self

    @classmethod
    def from_hf(cls, config: Any) -> "MoEConfig":
        """Read a transformers config (or its dict) of any supported family."""
        from ep_runtime.moe_from_hf import moe_config_from_hf

        return moe_config_from_hf(config)

    def with_quantization(self, scheme: QuantScheme) -> "MoEConfig":
        """The same layer with its experts stored another way; checked like any other."""
        return MoEConfig(**{**self.model_dump(), "quantization": scheme})

    def with_shared_quantization(self, scheme: QuantScheme) -> "MoEConfig":
        """The same layer with its shared expert stored another way; checked like any other."""
        return MoEConfig(**{**self.model_dump(), "shared_quantization": scheme})

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def has_shared_expert(self) -> bool:
        return self.shared_intermediate_size > 0

    def routing_spec(self) -> RoutingSpec:
        """The part of this that a router needs."""
        return RoutingSpec(
            num_experts=self.num_experts,
            top_k=self.top_k,
            scoring=self.scoring,
            n_group=self.n_group,
            topk_group=self.topk_group,
            group_score=self.group_score,
            norm_topk_prob=self.norm_topk_prob,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    def experts_activation(self) -> Activation:
        """The part of this that an experts kernel needs."""
        return Activation(
            ActivationKind(self.activation), alpha=self.swiglu_alpha, limit=self.swiglu_limit
        )


class ParallelConfig(StrictModel):
    """How the ranks share the work; `rank = dp_rank * tp_size + tp_rank`.

    ep_size: None means the whole world, dp_size * tp_size.
    dispatch_dtype: how rows travel to the experts. model: in the layer's dtype; fp8: e4m3 with a
    float32 scale for every 128 columns; auto: fp8 where the experts' weights are stored so that
    they compute on such rows, and backend and kernel can.
    timeout_s: of the process group's collectives; at most 30 days.
    """

    dp_size: int = Field(
        default=1,
        gt=0,
        strict=True,
        validation_alias=AliasChoices("dp_size", "data_parallel_size"),
    )
    tp_size: int = Field(
        default=1,
        gt=0,
        strict=True,
        validation_alias=AliasChoices("tp_size", "tensor_parallel_size"),
    )
    ep_size: int = Field(
        default=0,
        ge=0,
        strict=True,
        validation_alias=AliasChoices("ep_size", "expert_parallel_size"),
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    all2all_backend: str = "auto"
    dispatch_dtype: Literal["auto", "model", "fp8"] = "auto"
    expert_placement_strategy: Literal["linear", "round_robin"] = "linear"
    max_tokens_per_rank: int = Field(default=256, gt=0, strict=True)
    timeout_s: float = Field(default=600, gt=0, le=MAX_TIMEOUT_S, strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _default_ep_size(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = [key for key in ("ep_size", "expert_parallel_size") if values.get(key) is not None]
        if given:
            if values[given[0]] == 0:
                raise ValueError("ep_size must be 1 or more; leave it out for all ranks")
            return values
        dp = values.get("dp_size", values.get("data_parallel_size", 1))
        tp = values.get("tp_size", values.get("tensor_parallel_size", 1))
        rest = {k: v for k, v in values.items() if k not in ("ep_size", "expert_parallel_size")}
        if isinstance(dp, int) and isinstance(tp, int) and dp > 0 and tp > 0:
            return {**rest, "ep_size": dp * tp}
        return rest

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.world_size % self.ep_size:
            raise ValueError(
                f"ep_size ({self.ep_size}) must divide dp_size * tp_size "
                f"({self.dp_size} * {self.tp_size} = {self.world_size})"
            )
        return self

    @property
    def world_size(self) -> int:
        return self.dp_size * self.tp_size


class SharedExpertsConfig(StrictModel):
    """When the shared expert may run beside other work.

    token_threshold: above this many rows on any rank it is not overlapped.
    """

    overlap: Literal["auto", "off"] = "auto"
    token_threshold: int = Field(default=256, ge=0, strict=True)
