"""A hybrid of NVFP4 and NF3: its tiers as tensors, and its keys in a checkpoint's configuration."""

import json
from typing import Any

import pytest
import torch

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize, dequantize_expert
from ep_runtime.kernels.quant.hybrid import (
    HybridFormat,
    hybrid_config,
    join_tiers,
    read_hybrid,
)
from ep_runtime.kernels.quant.nf3 import NF3_VALUES, Nf3Format, quantize_nf3
from ep_runtime.kernels.quant.nvfp4 import Nvfp4Format, Nvfp4Writer, quantize_nvfp4
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantScheme, WeightScheme
from ep_runtime.kernels.quant.storage import (
    empty_hybrid,
    expert_of,
    num_stored,
    quantized_tensor,
    stored_shapes,
    take_experts,
    tensors_of,
    tiers_of,
)

CPU = torch.device("cpu")
HYBRID = QuantScheme(WeightScheme.HYBRID, nvfp4_experts=(1, 3))


def joined(name: str, experts: list[QuantizedTensor]) -> QuantizedTensor:
    tensors = [tensors_of(one) for one in experts]
    stacked = {key: torch.cat([one[key] for one in tensors]) for key in tensors[0]}
    return quantized_tensor(stacked, QuantScheme(WeightScheme(name)))


def four_experts() -> tuple[torch.Tensor, QuantizedTensor]:
    """Experts 1 and 3 in NVFP4, 0 and 2 in NF3, each what it alone is dequantised to."""
    weight = torch.randn(4, 6, 96, generator=torch.Generator().manual_seed(1))
    nvfp4 = [quantize_nvfp4(weight[e]) for e in (1, 3)]
    nf3 = [quantize_nf3(weight[e]) for e in (0, 2)]
    exact = torch.cat([dequantize(one) for one in (nf3[0], nvfp4[0], nf3[1], nvfp4[1])])
    return exact, join_tiers(joined("nvfp4", nvfp4), joined("nf3", nf3), (3, 1))


def test_tiers_count_places_as_the_docstring_says() -> None:
    assert tiers_of([True, False, True]).tolist() == [0, -1, 1]
    assert tiers_of([]).tolist() == []


def test_each_expert_is_dequantised_from_its_own_tier() -> None:
    exact, hybrid = four_experts()
    assert hybrid.scheme == HYBRID
    assert torch.equal(dequantize(hybrid), exact)
    for expert in range(4):
        one = dequantize_expert(
            hybrid.values, hybrid.parameters, hybrid.scheme, expert=expert, num_parts=1
        )
        assert torch.equal(one, exact[expert])
        assert expert_of(hybrid, expert).scheme == HYBRID.of_expert(expert)


@pytest.mark.parametrize("experts", [[3, 0], [2], [1, 3], [0, 1, 2, 3], []])
def test_a_ranks_experts_keep_their_tiers_and_are_laid_out_as_a_layer_has_them(
    experts: list[int],
) -> None:
    exact, hybrid = four_experts()
    taken = take_experts(hybrid, experts)
    if experts:
        assert torch.equal(dequantize(taken), exact[experts])
    shapes = stored_shapes(HYBRID, 6, 96, num_parts=1, dtype=torch.float32)
    places = empty_hybrid(shapes, HYBRID, experts, CPU)
    found = tensors_of(taken)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in places.items()
    }
    assert torch.equal(places["tiers"], found["tiers"])
    for name, shape in shapes.items():
        assert len(found[name]) == num_stored(name, HYBRID, experts)
        assert found[name].nbytes == len(found[name]) * shape.num_bytes


def test_a_tier_may_have_no_experts() -> None:
    exact, hybrid = four_experts()
    only = take_experts(hybrid, [0, 2])
    assert len(only.values) == 0
    assert torch.equal(dequantize(only), exact[[0, 2]])


@pytest.mark.parametrize("nvfp4_experts", [(0,), (0, 4), (1, 1)])
def test_experts_that_do_not_fit_the_tiers_are_refused(nvfp4_experts: tuple[int, ...]) -> None:
    _, hybrid = four_experts()
    nvfp4, nf3 = take_experts(hybrid, [1, 3]), take_experts(hybrid, [0, 2])
    with pytest.raises(ValueError, match="must be 2 of 4 experts"):
        join_tiers(nvfp4, joined("nf3", [expert_of(nf3, 0), expert_of(nf3, 1)]), nvfp4_experts)


def test_the_configuration_survives_json() -> None:
    config = json.loads(json.dumps(hybrid_config({3: (1, 5), 1: ()})))
    assert config["nf3_codebook"] == list(NF3_VALUES)
    assert read_hybrid(config) == {1: HybridFormat(()), 3: HybridFormat((1, 5))}


def test_a_format_is_each_experts_own() -> None:
    form = HybridFormat((1, 5))
    assert form.of_expert(5) == Nvfp4Format(Nvfp4Writer.MODELOPT)
    assert form.of_expert(4) == Nf3Format()
    assert form.scheme.of_expert(5).weight is WeightScheme.NVFP4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nf3_group_size": 32}, r"quantization_config.nf3_group_size \(32\) must be 64; make the"),
        ({"nvfp4_group_size": None}, r"nvfp4_group_size \(None\) must be 16"),
        ({"nf3_codebook": [0.0] * 8}, r"nf3_codebook \(\[0.0, .*\) must be \[-1.0, -0.535"),
        ({"nvfp4_experts": {}}, r"nvfp4_experts \(\{\}\) must name, for each layer"),
        ({"nvfp4_experts": {"one": []}}, r"nvfp4_experts has the key 'one', which is no layer's"),
        ({"nvfp4_experts": {"1": [2, 2]}}, r"nvfp4_experts.1 \(\[2, 2\]\) names an expert twice"),
        ({"nvfp4_experts": {"1": [-1]}}, r"nvfp4_experts.1 \(\[-1\]\) must be a list of experts"),
        ({"nvfp4_experts": {"1": 7}}, r"nvfp4_experts.1 \(7\) must be a list of experts"),
    ],
)
def test_keys_that_cannot_be_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_hybrid({**hybrid_config({1: (0,)}), **change})
