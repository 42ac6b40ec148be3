"""compressed-tensors' pack-quantized, against the library's own compressor."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.format import StoredTensorError
from ep_runtime.kernels.quant.pack_quantized import PackQuantizedFormat, read_pack_quantized
from ep_runtime.kernels.quant.packing import unpack_pairs
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from tests.kernels.quant.agreement import check_agreement, read
from tests.kernels.quant.writers import write_pack_quantized


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128, -1]),
    num_rows=st.integers(1, 41),
    num_groups=st.integers(1, 5),
    half_columns=st.integers(1, 60),
    is_symmetric=st.booleans(),
    has_group_order=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_any_packed_weight_is_what_compressed_tensors_reads(
    bits: int,
    group_size: int,
    num_rows: int,
    num_groups: int,
    half_columns: int,
    is_symmetric: bool,
    has_group_order: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    assume(not (has_group_order and group_size == -1))
    num_columns = 2 * half_columns if group_size == -1 else num_groups * group_size
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, num_columns, generator=generator)
    weight[0].abs_()
    order = torch.randperm(num_columns, generator=generator)
    written = write_pack_quantized(
        weight.to(dtype),
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        order=order if has_group_order else None,
    )
    converted = check_agreement(read_pack_quantized(written.config), written)
    codes = converted.values if bits == 8 else unpack_pairs(converted.values)
    signed = unpack_from_int32(written.tensors[".weight_packed"], bits, weight.shape).int()
    order_of_columns = converted.parameters.input_order
    assert (order_of_columns is not None) == has_group_order
    if order_of_columns is not None:
        signed = signed[:, order_of_columns[0].long()]
    assert torch.equal(codes[0].int() - 2 ** (bits - 1), signed)
    assert (converted.parameters.zero_points is not None) == (not is_symmetric)


def test_static_act_order_needs_no_order() -> None:
    written = write_pack_quantized(torch.randn(8, 128), group_size=32)
    for name in ("static", "weight"):
        config = {**written.config, "weights": {**written.config["weights"], "actorder": name}}
        form = read_pack_quantized(config)
        assert form.scheme == QuantScheme(WeightScheme.INT4, 32)
        check_agreement(form, written)


def test_groups_that_were_never_set_are_in_order() -> None:
    written = write_pack_quantized(torch.randn(8, 128), group_size=32, order=torch.arange(128))
    written.tensors[".weight_g_idx"].fill_(-1)
    converted = check_agreement(read_pack_quantized(written.config), written)
    assert converted.parameters.input_order is not None
    assert converted.parameters.input_order[0].tolist() == list(range(128))


def test_groups_that_no_order_of_columns_gives_are_refused() -> None:
    written = write_pack_quantized(torch.randn(8, 128), group_size=32, order=torch.randperm(128))
    written.tensors[".weight_g_idx"].fill_(2)
    with pytest.raises(StoredTensorError, match="weight_g_idx: group 0 has 0 columns, must have"):
        read(read_pack_quantized(written.config), written)


def test_another_shape_than_the_layers_is_refused() -> None:
    written = write_pack_quantized(torch.randn(8, 128))
    written.tensors[".weight_shape"] = torch.tensor([8, 127])
    with pytest.raises(StoredTensorError, match=r"weight_shape: is \[8, 127\], must be \[8, 128\]"):
        read(read_pack_quantized(written.config), written)


def test_a_partial_last_group_has_a_scale_of_its_own() -> None:
    """The library writes none; read as the other formats' are."""
    written = write_pack_quantized(torch.randn(8, 512), group_size=128)
    form = read_pack_quantized(written.config)
    cut = {**written.tensors, ".weight_packed": written.tensors[".weight_packed"][:, :52]}
    cut[".weight_shape"] = torch.tensor([8, 416])
    partial = type(written)(cut, written.weight[:, :416], written.config)
    assert check_agreement(form, partial).parameters.scales.shape == (1, 8, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 2}, r"^weights.num_bits \(2\) must be 4 or 8; quantise again"),
        ({"type": "float"}, r"^weights.type \('float'\) must be 'int'"),
        ({"strategy": "tensor"}, r"^weights.strategy \('tensor'\) must be 'group' or 'channel'"),
        ({"group_size": None}, r"^weights.group_size \(None\) must be the number of columns"),
        ({"dynamic": True}, r"^weights.dynamic \(True\) must be False"),
        ({"actorder": "block"}, r"^weights.actorder \('block'\) must be absent or False or"),
        ({"symmetric": 1}, r"^weights.symmetric \(1\) must be true or false"),
    ],
)
def test_weights_that_cannot_be_read_are_refused(change: dict[str, Any], message: str) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    assert read_pack_quantized({"weights": weights}) == PackQuantizedFormat(4, 128, True)
    with pytest.raises(ConfigError, match=message):
        read_pack_quantized({"weights": {**weights, **change}})


def test_quantised_activations_are_refused() -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel"}
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    with pytest.raises(ConfigError, match=r"^input_activations \(quantised activations\) must be"):
        read_pack_quantized({"weights": weights, "input_activations": activations})
