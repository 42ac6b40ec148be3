"""Configuration values: defaults, aliases, and an error for every contradiction."""

from typing import Any

import pytest
import torch

from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.kernels.base import ActivationKind
from ep_runtime.kernels.errors import ConfigError, EPRuntimeError
from ep_runtime.strict_model import InvalidValues, StrictModel

LAYER: dict[str, Any] = {
    "hidden_size": 8,
    "moe_intermediate_size": 6,
    "num_experts": 8,
    "top_k": 2,
}


def test_shared_width_defaults_to_the_number_of_shared_experts_times_the_routed_width() -> None:
    moe = MoEConfig(**LAYER, num_shared_experts=3)
    assert moe.shared_intermediate_size == 18
    assert moe.has_shared_expert


def test_a_given_shared_width_is_kept() -> None:
    moe = MoEConfig(**LAYER, num_shared_experts=1, shared_intermediate_size=20)
    assert moe.shared_intermediate_size == 20


def test_a_shared_width_alone_is_a_shared_expert() -> None:
    assert MoEConfig(**LAYER, shared_intermediate_size=20).has_shared_expert


def test_without_shared_experts_the_width_is_zero() -> None:
    moe = MoEConfig(**LAYER)
    assert moe.shared_intermediate_size == 0
    assert not moe.has_shared_expert


def test_routing_and_activation_are_handed_on_unchanged() -> None:
    moe = MoEConfig(
        **LAYER,
        scoring="sigmoid",
        n_group=4,
        topk_group=2,
        group_score="top2_sum",
        norm_topk_prob=False,
        routed_scaling_factor=2.5,
        activation="swigluoai",
        swiglu_alpha=1.5,
        swiglu_limit=7.0,
    )
    spec = moe.routing_spec()
    assert (spec.num_experts, spec.top_k, spec.scoring) == (8, 2, "sigmoid")
    assert (spec.n_group, spec.topk_group, spec.group_score) == (4, 2, "top2_sum")
    assert (spec.norm_topk_prob, spec.routed_scaling_factor) == (False, 2.5)
    activation = moe.experts_activation()
    assert activation.kind is ActivationKind.SWIGLUOAI
    assert (activation.alpha, activation.limit) == (1.5, 7.0)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_dtype_names_are_torch_dtypes(name: str) -> None:
    assert MoEConfig(**(LAYER | {"dtype": name})).torch_dtype is getattr(torch, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size: .*got 0"),
        ({"top_k": 9}, r"top_k \(9\).*num_experts \(8\)"),
        ({"n_group": 3}, r"n_group \(3\).*num_experts \(8\)"),
        ({"n_group": 2, "topk_group": 3}, r"topk_group \(3\).*n_group \(2\)"),
        ({"n_group": 8, "topk_group": 1}, r"top_k \(2\).*1 experts.*topk_group \(1\)"),
        (
            {"n_group": 8, "topk_group": 4, "group_score": "top2_sum"},
            r"top2_sum.*num_experts \(8\) / n_group \(8\)",
        ),
        ({"apply_router_weight_on_input": True}, r"top_k \(2\)"),
        ({"shared_expert_gate": True}, "shared_expert_gate.*num_shared_experts"),
        ({"swiglu_limit": 7.0}, "swiglu_limit.*silu.*swigluoai"),
        (
            {"swiglu_alpha": 3.0},
            r"swiglu_alpha \(3\.0\) has no effect with activation silu; drop it",
        ),
        (
            {"activation": "relu2", "swiglu_limit": 7.0},
            r"swiglu_limit \(7\.0\) has no effect with activation relu2",
        ),
        (
            {"group_score": "top2_sum"},
            r"group_score \(top2_sum\) has no effect with n_group 1; drop it or set n_group",
        ),
        ({"n_group": 1, "group_score": "top2_sum"}, r"group_score \(top2_sum\) has no effect"),
        (
            {"n_group": 2, "topk_group": 2},
            r"n_group \(2\) has no effect with topk_group \(2\), which leaves no group out; drop "
            r"both or lower topk_group",
        ),
        ({"shared_intermediate_size": -4}, r"shared_intermediate_size: .*got -4"),
        ({"activation": "relu"}, r"activation: .*'relu2'.*got 'relu'"),
        ({"scoring": "tanh"}, r"scoring: .*'sigmoid'.*got 'tanh'"),
        ({"dtype": "float8"}, r"dtype: .*got 'float8'"),
        ({"routed_scaling_factor": float("nan")}, r"routed_scaling_factor: .*finite.*got nan"),
        ({"routed_scaling_factor": float("inf")}, r"routed_scaling_factor: .*finite.*got inf"),
        ({"routed_scaling_factor": "2.5"}, r"routed_scaling_factor: .*got '2.5'"),
        ({"routed_scaling_factor": True}, r"routed_scaling_factor: .*got True"),
        ({"activation": "swigluoai", "swiglu_limit": float("nan")}, r"swiglu_limit: .*got nan"),
        ({"activation": "swigluoai", "swiglu_limit": -7.0}, r"swiglu_limit: .*got -7.0"),
        ({"activation": "swigluoai", "swiglu_limit": 0}, r"swiglu_limit: .*got 0"),
        ({"activation": "swigluoai", "swiglu_alpha": float("inf")}, r"swiglu_alpha: .*got inf"),
        ({"activation": "swigluoai", "swiglu_alpha": "1.7"}, r"swiglu_alpha: .*got '1.7'"),
        ({"norm_topk_prob": "yes"}, r"norm_topk_prob: .*boolean.*got 'yes'"),
        ({"norm_topk_prob": 1}, r"norm_topk_prob: .*boolean.*got 1"),
        ({"has_correction_bias": "no"}, r"has_correction_bias: .*got 'no'"),
        ({"router_bias": 0}, r"router_bias: .*got 0"),
        ({"expert_bias": "true"}, r"expert_bias: .*got 'true'"),
        ({"shared_expert_gate": 0}, r"shared_expert_gate: .*got 0"),
        ({"apply_router_weight_on_input": "off"}, r"apply_router_weight_on_input: .*got 'off'"),
        ({"num_expert": 8}, r"num_expert: unknown key; did you mean 'num_experts'"),
    ],
)
def test_a_layer_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoEConfig(**(LAYER | changes))


def test_a_default_that_is_written_out_is_no_key_without_effect() -> None:
    """As `model_dump` writes it, which configurations are copied through."""
    moe = MoEConfig(**LAYER, swiglu_alpha=1.702, swiglu_limit=None, n_group=1, group_score="max")
    assert moe == MoEConfig(**LAYER)
    assert MoEConfig(**moe.model_dump()) == moe
    grouped = MoEConfig(**LAYER, n_group=4, topk_group=3, group_score="top2_sum")
    assert MoEConfig(**grouped.model_dump()) == grouped


def test_a_whole_number_may_stand_for_a_float() -> None:
    moe = MoEConfig(
        **LAYER, activation="swigluoai", routed_scaling_factor=2, swiglu_alpha=1, swiglu_limit=7
    )
    assert (moe.routed_scaling_factor, moe.swiglu_alpha, moe.swiglu_limit) == (2.0, 1.0, 7.0)
    assert ParallelConfig(timeout_s=30).timeout_s == 30.0


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="hidden_size: is required"):
        MoEConfig(moe_intermediate_size=6, num_experts=8, top_k=2)  # type: ignore[call-arg]


def test_top_k_of_one_may_weigh_the_input() -> None:
    assert MoEConfig(**(LAYER | {"top_k": 1}), apply_router_weight_on_input=True).top_k == 1


def test_several_faults_come_in_one_error() -> None:
    with pytest.raises(InvalidValues) as caught:
        ParallelConfig(dp_size=0, tp_size=0)
    assert [path for path, _ in caught.value.faults] == [("dp_size",), ("tp_size",)]
    assert isinstance(caught.value, EPRuntimeError)


def test_ep_size_defaults_to_the_whole_world() -> None:
    assert ParallelConfig().ep_size == 1
    assert ParallelConfig(dp_size=3, tp_size=2).ep_size == 6
    assert ParallelConfig.model_validate({"dp_size": 2, "ep_size": None}).ep_size == 2
    assert ParallelConfig(dp_size=2, tp_size=2).world_size == 4


def test_long_names_mean_the_same_as_short_ones() -> None:
    names = {"data_parallel_size": 4, "tensor_parallel_size": 2}
    long = ParallelConfig(**names, expert_parallel_size=4)  # type: ignore[arg-type, call-arg]
    assert long == ParallelConfig(dp_size=4, tp_size=2, ep_size=4)
    assert ParallelConfig(**names).ep_size == 8  # type: ignore[arg-type]
    assert set(long.model_dump()) >= {"dp_size", "tp_size", "ep_size"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp_size": 4, "ep_size": 3}, r"ep_size \(3\).*4 \* 1 = 4"),
        ({"ep_size": 0}, "ep_size must be 1 or more"),
        ({"expert_parallel_size": 0}, "ep_size must be 1 or more"),
        ({"dp_size": 0}, r"dp_size: .*got 0"),
        ({"dp_size": "2"}, r"dp_size: .*got '2'"),
        ({"dp_size": True}, r"dp_size: .*got True"),
        ({"tp_size": 1.0}, r"tp_size: .*got 1.0"),
        ({"max_tokens_per_rank": 0}, r"max_tokens_per_rank: .*got 0"),
        ({"timeout_s": 0}, r"timeout_s: .*got 0"),
        ({"timeout_s": float("inf")}, r"timeout_s: .*got inf"),
        ({"timeout_s": float("nan")}, r"timeout_s: .*got nan"),
        ({"timeout_s": 1e30}, r"timeout_s: .*less than or equal to 2592000 .*got 1e\+30"),
        ({"timeout_s": "60"}, r"timeout_s: .*got '60'"),
        ({"timeout_s": True}, r"timeout_s: .*got True"),
        ({"device": "tpu"}, r"device: .*got 'tpu'"),
        ({"expert_placement_strategy": "random"}, r"expert_placement_strategy: .*got 'random'"),
        ({"dp_sise": 2}, r"dp_sise: unknown key; did you mean 'dp_size'"),
        ({"dp_size": 2, "data_parallel_size": 2}, "given twice"),
    ],
)
def test_parallelism_that_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(**values)


def test_shared_expert_settings_have_documented_defaults_and_limits() -> None:
    default = SharedExpertsConfig()
    assert (default.overlap, default.token_threshold) == ("auto", 256)
    assert SharedExpertsConfig(token_threshold=0).token_threshold == 0
    with pytest.raises(ConfigError, match=r"overlap: .*got 'on'"):
        SharedExpertsConfig(overlap="on")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"token_threshold: .*got -1"):
        SharedExpertsConfig(token_threshold=-1)


@pytest.mark.parametrize("value", [True, "7", 7.0])
def test_a_token_threshold_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"token_threshold: .*got {value!r}"):
        SharedExpertsConfig(token_threshold=value)


def test_values_cannot_change_after_they_were_checked() -> None:
    parallel = ParallelConfig()
    with pytest.raises(ValueError, match="frozen"):
        parallel.dp_size = 2
    assert hash(parallel) == hash(ParallelConfig())


def test_a_nested_fault_is_named_by_its_whole_path() -> None:
    class Outer(StrictModel):
        parallel: ParallelConfig

    with pytest.raises(ConfigError, match=r"parallel\.dp_sise: unknown key"):
        Outer(parallel={"dp_sise": 2})  # type: ignore[arg-type]
