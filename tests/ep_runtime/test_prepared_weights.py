"""A layer holds its experts' weights once, whatever the kernel makes of them."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels import registry
from ep_runtime.kernels.base import ExpertInput, ExpertWeights
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import QuantParameters
from ep_runtime.kernels.reference_experts import ReferenceExperts
from ep_runtime.kernels.registry import register_experts
from ep_runtime.kernels.workspace import Workspace
from ep_runtime.layer import MoELayer
from ep_runtime.prepared_weights import named_tensors, without_stored
from tests.ep_runtime.stored_experts import quantized_moe, stored_weights
from tests.tolerances import TOLERANCES, relative_error

PACKED_BY = 3  # extra bytes, so that it is not the stored tensor seen otherwise


class Packed(ReferenceExperts):
    """Keeps w13 in one row of bytes; w2 and every scale as they are stored."""

    capabilities = replace(ReferenceExperts.capabilities, name="packed")

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        flat = weights.w13.detach().view(torch.uint8).flatten()
        self.w13_shape, self.w13_dtype = weights.w13.shape, weights.w13.dtype
        return replace(weights, w13=torch.cat([flat, flat.new_zeros(PACKED_BY)]))

    def run(
        self, expert_input: ExpertInput, weights: ExpertWeights, workspace: Workspace
    ) -> Tensor:
        w13 = weights.w13[:-PACKED_BY].view(self.w13_dtype).view(self.w13_shape)
        return super().run(expert_input, replace(weights, w13=w13), workspace)


class Strided(ReferenceExperts):
    """Copies every tensor into the other order of its last two dimensions."""

    capabilities = replace(ReferenceExperts.capabilities, name="strided")

    def prepare_weights(self, weights: ExpertWeights) -> ExpertWeights:
        def turned(quant: QuantParameters | None) -> QuantParameters | None:
            return None if quant is None else replace(quant, scales=_turned(quant.scales))

        return replace(
            weights,
            w13=_turned(weights.w13),
            w2=_turned(weights.w2),
            w13_quant=turned(weights.w13_quant),
            w2_quant=turned(weights.w2_quant),
        )


def _turned(tensor: Tensor) -> Tensor:
    return tensor.detach().mT.clone(memory_format=torch.contiguous_format).mT


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    for cls in (Packed, Strided):
        register_experts(cls.capabilities.name, cls)


@pytest.fixture(scope="module")
def ctx() -> Iterator[EPContext]:
    with init_distributed(ParallelConfig(device="cpu")) as context:
        yield context


def plain_moe() -> MoEConfig:
    return quantized_moe("fp8_block", quantization="none", dtype="float32")


def weights_for(moe: MoEConfig, seed: int = 0) -> dict[str, Any]:
    if moe.quantization.is_quantised:
        return stored_weights(moe, seed)
    generator = torch.Generator().manual_seed(seed)
    num_experts, hidden, width = moe.num_experts, moe.hidden_size, moe.moe_intermediate_size
    return {
        "w13": torch.randn(num_experts, 2 * width, hidden, generator=generator) / 12,
        "w2": torch.randn(num_experts, hidden, width, generator=generator) / 12,
        "router": torch.randn(num_experts, hidden, generator=generator),
    }


def held_bytes(layer: MoELayer) -> int:
    """Of the experts' weights, each memory once."""
    tensors = [*named_tensors(layer.expert_weights).values()]
    tensors += [p for n, p in layer.named_parameters() if n.startswith("w") and not p.is_meta]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def output_of(layer: MoELayer) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(11, layer.moe.hidden_size, generator=generator)
    output: Tensor = layer(rows.to(layer.moe.torch_dtype))
    return output


@pytest.mark.parametrize("moe", [plain_moe(), quantized_moe("fp8_block")], ids=["plain", "fp8"])
@pytest.mark.parametrize(("experts", "extra_bytes"), [("packed", PACKED_BY), ("strided", 0)])
def test_weights_that_the_kernel_copied_are_in_memory_once(
    experts: str, extra_bytes: int, moe: MoEConfig, ctx: EPContext
) -> None:
    plain = MoELayer(moe, ctx, experts="reference")
    plain.load_experts(**weights_for(moe))
    layer = MoELayer(moe, ctx, experts=experts)
    allocated = weakref.ref(layer.w13)
    layer.load_experts(**weights_for(moe))
    assert held_bytes(plain) == plain.plan.bytes_per_rank[0].experts
    assert held_bytes(layer) == held_bytes(plain) + extra_bytes
    assert allocated() is None, "what was filled is still alive"
    error = relative_error(output_of(layer), output_of(plain))
    assert error <= TOLERANCES[moe.torch_dtype]


@pytest.mark.parametrize("moe", [plain_moe(), quantized_moe("fp8_block")], ids=["plain", "fp8"])
def test_a_copy_in_other_strides_takes_the_stored_ones_place(
    moe: MoEConfig, ctx: EPContext
) -> None:
    """And can be filled again."""
    layer = MoELayer(moe, ctx, experts="strided")
    layer.load_experts(**weights_for(moe))
    for seed in (0, 1):
        weights = weights_for(moe, seed)
        wanted = weights["w2"].values if moe.quantization.is_quantised else weights["w2"]
        with torch.no_grad():
            layer.expert_tensors("w2")["values"].copy_(wanted)
        layer.finish_loading()
        assert torch.equal(layer.w2.float(), wanted.float())
        assert layer.w2.data_ptr() == layer.expert_weights.w2.data_ptr()


@pytest.mark.parametrize("moe", [plain_moe(), quantized_moe("fp8_block")], ids=["plain", "fp8"])
def test_other_weights_can_be_loaded_later(moe: MoEConfig, ctx: EPContext) -> None:
    layer = MoELayer(moe, ctx, experts="packed")
    layer.load_experts(**weights_for(moe))
    first, first_bytes = output_of(layer), held_bytes(layer)
    layer.load_experts(**weights_for(moe, seed=1))
    plain = MoELayer(moe, ctx, experts="reference")
    plain.load_experts(**weights_for(moe, seed=1))
    assert torch.equal(output_of(layer), output_of(plain))
    assert not torch.equal(output_of(layer), first)
    assert held_bytes(layer) == first_bytes


def test_what_the_kernel_keeps_alone_cannot_be_filled_in_place(ctx: EPContext) -> None:
    moe = plain_moe()
    layer = MoELayer(moe, ctx, experts="packed")
    layer.load_experts(**weights_for(moe))
    assert layer.w13.is_meta
    assert layer.w13.shape == (5, 384, 160)
    assert not layer.w2.is_meta
    with pytest.raises(ConfigError, match=r"experts packed keeps them.*call load_experts"):
        layer.expert_tensors("w13")
    with pytest.raises(ConfigError, match="call load_experts"):
        layer.finish_loading()


def test_weights_of_other_values_do_not_take_the_stored_ones_place() -> None:
    """Also where one bit of one expert is all, and where NaN is what is stored."""
    stored = ExpertWeights(torch.randn(3, 4, 8), torch.full((3, 8, 4), torch.nan))
    prepared = ExpertWeights(stored.w13.clone(), stored.w2.clone())
    prepared.w13[2, 3, 7] += 1
    replaced = without_stored(stored, prepared)
    assert replaced["w13"].is_meta
    assert replaced["w2"].data_ptr() == prepared.w2.data_ptr()
    assert without_stored(stored, stored) == {}
