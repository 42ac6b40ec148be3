"""Activations against transformers' own, and by hand."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ep_runtime.kernels.activation import apply_activation
from ep_runtime.kernels.base import Activation, ActivationKind


def random_projection(seed: int = 0) -> torch.Tensor:
    return 4 * torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", [ActivationKind.SILU, ActivationKind.GELU])
def test_gated_kinds_agree_with_transformers(kind: ActivationKind) -> None:
    x = random_projection()
    expected = ACT2FN[kind.value](x[:, :16]) * x[:, 16:]
    torch.testing.assert_close(apply_activation(x, Activation(kind)), expected)


def test_relu2_is_ungated() -> None:
    x = random_projection()
    actual = apply_activation(x, Activation(ActivationKind.RELU2))
    assert actual.shape == x.shape
    torch.testing.assert_close(actual, ACT2FN["relu2"](x))


@pytest.mark.parametrize("limit", [7.0, 1.5])
def test_swigluoai_agrees_with_gpt_oss(limit: float) -> None:
    x = random_projection()
    interleaved = torch.stack([x[:, :16], x[:, 16:]], dim=-1).flatten(1)
    module: Any = SimpleNamespace(alpha=1.702, limit=limit)
    expected = GptOssExperts._apply_gate(module, interleaved)
    actual = apply_activation(x, Activation(ActivationKind.SWIGLUOAI, alpha=1.702, limit=limit))
    torch.testing.assert_close(actual, expected)


def test_swigluoai_limit_is_honoured() -> None:
    x = torch.tensor([[10.0, 3.0]])
    clamped = apply_activation(x, Activation(ActivationKind.SWIGLUOAI, limit=7.0)).item()
    free = apply_activation(x, Activation(ActivationKind.SWIGLUOAI)).item()
    assert clamped == pytest.approx(4 * 7 / (1 + math.exp(-1.702 * 7)), rel=1e-6)
    assert free == pytest.approx(4 * 10 / (1 + math.exp(-1.702 * 10)), rel=1e-6)


def test_bf16_is_computed_in_float32_and_rounded_once() -> None:
    x = random_projection().bfloat16()
    actual = apply_activation(x, Activation())
    assert actual.dtype is torch.bfloat16
    expected = torch.nn.functional.silu(x[:, :16].float()) * x[:, 16:].float()
    assert torch.equal(actual, expected.bfloat16())
