"""MXFP4: every byte under every scale, gpt-oss' fused tensors, compressed-tensors' layers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.format import Projection, StoredTensorError
from ep_runtime.kernels.quant.mxfp4 import Mxfp4Format, read_compressed_mxfp4, read_mxfp4
from tests.kernels.quant.agreement import check_agreement, check_layout, check_stored
from tests.kernels.quant.writers import write_compressed_mxfp4, write_mxfp4_experts


def test_every_byte_under_every_scale_is_what_transformers_reads() -> None:
    """Row s has all 256 bytes under scale s, 254 at most; 2^-127 and 2^127 among them."""
    blocks = torch.arange(256, dtype=torch.uint8).repeat(255).reshape(255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    projection = Projection(255, 512, torch.bfloat16)
    converted = Mxfp4Format().convert({"blocks": blocks, "scales": scales}, projection)
    check_layout(Mxfp4Format(), converted, projection)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    expected = expected.transpose(1, 2)
    assert torch.equal(dequantize(converted), expected)
    definition = Mxfp4Format().dequantize({"blocks": blocks, "scales": scales}, projection)
    assert torch.equal(definition, expected[0])
    assert not expected.isnan().any()


@settings(deadline=None, max_examples=20)
@given(
    num_experts=st.integers(1, 3),
    num_rows=st.integers(1, 20),
    num_groups=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_each_expert_of_fused_tensors_is_what_transformers_reads(
    num_experts: int, num_rows: int, num_groups: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_experts, num_rows, 32 * num_groups, generator=generator)
    written = write_mxfp4_experts(weight * torch.logspace(-3, 3, num_rows)[:, None])
    form = read_mxfp4(written.config)
    projection = Projection(num_rows, 32 * num_groups, torch.float32)
    stored = form.stored_fused(num_experts, projection)
    assert stored is not None
    tensors = written.by_role(stored)
    check_stored(stored, tensors)
    for expert in range(num_experts):
        one = {role: tensor[expert] for role, tensor in tensors.items()}
        converted = form.convert(one, projection)
        check_layout(form, converted, projection)
        assert torch.equal(dequantize(converted)[0], written.weight[expert])
        assert torch.equal(form.dequantize(one, projection), written.weight[expert])


@settings(deadline=None, max_examples=20)
@given(num_rows=st.integers(1, 20), num_groups=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_a_linear_layer_is_what_compressed_tensors_reads(
    num_rows: int, num_groups: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, 32 * num_groups, generator=generator, dtype=torch.bfloat16)
    written = write_compressed_mxfp4(weight)
    check_agreement(read_compressed_mxfp4(written.config), written)


def test_a_scale_of_nan_is_refused() -> None:
    tensors = {
        "blocks": torch.zeros(2, 2, 16, dtype=torch.uint8),
        "scales": torch.tensor([[127, 127], [255, 127]], dtype=torch.uint8),
    }
    with pytest.raises(StoredTensorError, match="scales: 1 of 4 scales are NaN"):
        Mxfp4Format().convert(tensors, Projection(2, 64, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 8}, r"^weights.num_bits \(8\) must be 4; quantise again as MXFP4A16"),
        ({"type": "int"}, r"^weights.type \('int'\) must be 'float'"),
        ({"group_size": 16}, r"^weights.group_size \(16\) must be 32"),
        ({"symmetric": False}, r"^weights.symmetric \(False\) must be True"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(change: dict[str, Any], message: str) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    assert read_compressed_mxfp4({"weights": weights}) == Mxfp4Format()
    with pytest.raises(ConfigError, match=message):
        read_compressed_mxfp4({"weights": {**weights, **change}})
