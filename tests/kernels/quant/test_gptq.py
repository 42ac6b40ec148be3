"""GPTQ: both formats, both ways of storing zero points, act-order, and what is refused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.format import Projection, StoredTensorError
from ep_runtime.kernels.quant.gptq import GptqFormat, ZeroStorage, read_gptq, unpack_zeros
from ep_runtime.kernels.quant.packing import unpack_pairs
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from tests.kernels.quant.agreement import check_agreement, read
from tests.kernels.quant.writers import IntCodes, Written, pack_gptq, write_gptq

WRITERS = ["gptqmodel:7.7.0", "auto_gptq:0.7.1"]


def random_weight(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    """Rows of several ranges, one of them above 0 only: its zero points are 0."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(num_rows, num_columns, generator=generator)
    weight *= torch.logspace(-2, 1, num_rows).unsqueeze(1)
    weight[0].abs_()
    return weight


@settings(deadline=None, max_examples=80)
@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.sampled_from([32, 64, 128, -1]),
    num_rows=st.integers(1, 41),
    half_columns=st.integers(1, 150),
    is_symmetric=st.booleans(),
    has_act_order=st.booleans(),
    layout=st.sampled_from(["gptq", "gptq_v2", "gptq_p"]),
    writer=st.sampled_from(WRITERS),
    seed=st.integers(0, 2**31),
)
def test_any_gptq_weight_is_what_its_writer_meant(
    bits: int,
    group_size: int,
    num_rows: int,
    half_columns: int,
    is_symmetric: bool,
    has_act_order: bool,
    layout: str,
    writer: str,
    seed: int,
) -> None:
    num_columns = 2 * half_columns
    order = torch.randperm(num_columns, generator=torch.Generator().manual_seed(seed))
    written = write_gptq(
        random_weight(num_rows, num_columns, seed),
        bits=bits,
        group_size=group_size,
        is_symmetric=is_symmetric,
        order=order if has_act_order else None,
        layout=layout,
        writer=writer,
    )
    converted = check_agreement(read_gptq(written.config), written)
    assert (converted.parameters.zero_points is None) == is_symmetric
    assert (converted.parameters.input_order is None) == (not has_act_order or group_size == -1)


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_and_zero_points_are_the_writers_exactly(bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    groups = torch.arange(96) // 32
    quantized = IntCodes(
        torch.randint(0, 2**bits, (5, 96), generator=generator),
        torch.randint(0, 2**bits, (5, 3), generator=generator),
        torch.rand(5, 3, generator=generator).half(),
        groups[torch.randperm(96, generator=generator)],
    )
    written = pack_gptq(
        quantized,
        bits=bits,
        group_size=32,
        is_symmetric=False,
        has_act_order=True,
        layout="gptq",
        writer=WRITERS[0],
    )
    converted = read(read_gptq(written.config), written)
    codes = converted.values if bits == 8 else unpack_pairs(converted.values)
    order = converted.parameters.input_order
    zeros = converted.parameters.zero_points
    assert order is not None
    assert zeros is not None
    assert torch.equal(codes[0].long(), quantized.codes[:, order[0].long()])
    assert torch.equal(quantized.groups[order[0].long()], groups)
    assert torch.equal(zeros[0].long(), quantized.zeros)
    assert torch.equal(converted.parameters.scales[0], quantized.scales.float())


def one_weight(*, code: int, scale: float, stored_zero: int, layout: str) -> float:
    """The first of a row of 8 columns with code, scale and what is stored as zero point."""
    form = read_gptq({"bits": 4, "group_size": -1, "sym": False, "checkpoint_format": layout})
    tensors = {
        "qweight": torch.full((1, 1), code, dtype=torch.int32),
        "qzeros": torch.full((1, 1), stored_zero, dtype=torch.int32),
        "scales": torch.full((1, 1), scale, dtype=torch.float16),
    }
    converted = form.convert(tensors, Projection(1, 8, torch.float32))
    return float(dequantize(converted)[0, 0, 0])


def test_a_stored_zero_of_7_is_8_in_v1_and_7_in_v2() -> None:
    assert one_weight(code=9, scale=0.5, stored_zero=7, layout="gptq") == 0.5
    assert one_weight(code=9, scale=0.5, stored_zero=7, layout="gptq_v2") == 1.0


def test_a_stored_zero_of_15_is_0_in_v1() -> None:
    assert one_weight(code=9, scale=0.5, stored_zero=15, layout="gptq") == 4.5
    assert one_weight(code=9, scale=0.5, stored_zero=15, layout="gptq_v2") == -3.0


def test_zero_points_that_gptqmodel_stored_come_back() -> None:
    """Both rows are what GPTQModel 7.7.0 made of the zero points, `pack_original` and then
    `convert_gptq_v2_to_v1_format_module`, on a CPU."""
    zeros = torch.tensor([[0, 5, 0, 0, 15, 1, 8, 0], [7, 0, 15, 2, 0, 0, 3, 9]])
    stored = torch.tensor([[-150081729], [-2115035658]], dtype=torch.int32)
    assert torch.equal(unpack_zeros(stored, 4, ZeroStorage.LESS_1_IN_WORD).long(), zeros)
    assert not torch.equal(unpack_zeros(stored, 4, ZeroStorage.LESS_1_IN_FIELD).long(), zeros)


def test_zero_points_of_a_symmetric_checkpoint_are_not_read() -> None:
    written = write_gptq(random_weight(8, 128), is_symmetric=True)
    written.tensors[".qzeros"].random_(-(2**31), 2**31 - 1)
    converted = check_agreement(read_gptq(written.config), written)
    assert converted.scheme == QuantScheme(WeightScheme.INT4, 128)


def test_the_meta_of_the_configuration_tells_who_stored_the_zero_points() -> None:
    config = {"bits": 4, "group_size": 128, "sym": False}
    optimum = {"quantizer": ["optimum:1.24.0", "gptqmodel:2.1.0"]}
    assert read_gptq(config).zero_storage is ZeroStorage.LESS_1_IN_FIELD
    assert read_gptq({**config, "meta": optimum}).zero_storage is ZeroStorage.LESS_1_IN_WORD
    named = {**config, "meta": {"quantizer": "gptqmodel:1.0"}}
    assert read_gptq(named).zero_storage is ZeroStorage.LESS_1_IN_WORD
    v2 = {**named, "checkpoint_format": "gptq_v2"}
    assert read_gptq(v2).zero_storage is ZeroStorage.AS_IS


def test_static_groups_need_no_order() -> None:
    """GPTQModel says so under meta; the columns' groups are then in order."""
    written = write_gptq(random_weight(8, 128), group_size=32)
    for place in ({"static_groups": True}, {"meta": {"static_groups": True}}):
        form = read_gptq({**written.config, "desc_act": True, **place})
        assert not form.scheme.has_input_order
        check_agreement(form, written)


def test_act_order_of_columns_that_are_in_order_already() -> None:
    """One expert's may be, and its tensors still look like the others'."""
    written = write_gptq(random_weight(8, 96), group_size=32, order=torch.arange(96))
    converted = check_agreement(read_gptq(written.config), written)
    order = converted.parameters.input_order
    assert order is not None
    assert order[0].tolist() == list(range(96))


def test_columns_of_two_groups_take_the_scales_of_both() -> None:
    """64 columns in groups of 32 with scales 1 and 4, all codes 1 above the zero: 160."""
    groups = torch.arange(64) // 32
    quantized = IntCodes(
        torch.full((1, 64), 9), torch.full((1, 2), 8), torch.tensor([[1.0, 4.0]]).half(), groups
    )
    written = pack_gptq(
        quantized,
        bits=4,
        group_size=32,
        is_symmetric=True,
        has_act_order=False,
        layout="gptq_v2",
        writer=WRITERS[0],
    )
    converted = check_agreement(read_gptq(written.config), written)
    assert float(dequantize(converted).sum()) == 160


def test_the_last_group_may_be_partial() -> None:
    written = write_gptq(random_weight(8, 416), group_size=128, is_symmetric=False)
    converted = check_agreement(read_gptq(written.config), written)
    assert converted.parameters.scales.shape == (1, 8, 4)


def test_scales_take_the_dtype_of_the_layer() -> None:
    written = write_gptq(random_weight(8, 128))
    converted = read(read_gptq(written.config), written, torch.bfloat16)
    scales = written.tensors[".scales"].T.to(torch.bfloat16)
    assert torch.equal(converted.parameters.scales[0], scales)


def test_a_scale_that_the_layers_dtype_cannot_hold_is_refused() -> None:
    written = write_gptq(random_weight(8, 128))
    written.tensors[".scales"] = torch.full((1, 8), 1e6, dtype=torch.bfloat16)
    with pytest.raises(StoredTensorError, match="scales: 8 of 8 scales are NaN or infinite"):
        read(read_gptq(written.config), written, torch.float16)


def test_a_bias_of_zeros_is_as_none() -> None:
    written = write_gptq(random_weight(8, 128))
    written.tensors[".bias"] = torch.zeros(8).half()
    check_agreement(read_gptq(written.config), written)
    written.tensors[".bias"][3] = 0.5
    with pytest.raises(StoredTensorError, match="bias: is not 0"):
        read(read_gptq(written.config), written)


def with_groups(groups: Tensor, *, has_act_order: bool) -> tuple[GptqFormat, Written]:
    written = write_gptq(random_weight(8, 128), group_size=32)
    written.tensors[".g_idx"] = groups.int()
    return read_gptq({**written.config, "desc_act": has_act_order}), written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((5, 1), r"g_idx: group 0 has 31 columns, must have 32 \(group_size is 32"),
        ((5, 4), r"g_idx: group 0 has 31 columns, must have 32"),
        ((5, -1), r"g_idx: group 0 has 31 columns, must have 32"),
    ],
)
def test_groups_that_no_order_of_columns_gives_are_refused(
    change: tuple[int, int], message: str
) -> None:
    groups = torch.arange(128) // 32
    groups[change[0]] = change[1]
    form, written = with_groups(groups, has_act_order=True)
    with pytest.raises(StoredTensorError, match=message):
        read(form, written)


def test_groups_out_of_order_without_desc_act_are_refused() -> None:
    form, written = with_groups(torch.arange(127, -1, -1) // 32, has_act_order=False)
    with pytest.raises(StoredTensorError, match="g_idx: its groups are not in order"):
        read(form, written)


def test_act_order_needs_the_groups() -> None:
    form = GptqFormat(4, 32, is_symmetric=True, has_act_order=True)
    assert form.stored(Projection(8, 64, torch.float32))["g_idx"].is_required
    whole_rows = GptqFormat(4, None, is_symmetric=True, has_act_order=True)
    assert not whole_rows.stored(Projection(8, 64, torch.float32))["g_idx"].is_required


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, r"quantization_config.bits \(3\) must be 4 or 8; quantise again"),
        ({"bits": None}, r"quantization_config.bits \(None\) must be 4 or 8"),
        ({"group_size": 0}, r"quantization_config.group_size \(0\) must be the number of"),
        ({"group_size": "128"}, r"quantization_config.group_size \('128'\) must be"),
        ({"sym": None}, r"quantization_config.sym \(None\) must be true or false"),
        ({"desc_act": "no"}, r"quantization_config.desc_act \('no'\) must be true or false"),
        ({"checkpoint_format": "marlin"}, r"checkpoint_format \('marlin'\) must be 'gptq' or"),
        ({"format": "gptq_x"}, r"quantization_config.format \('gptq_x'\) must be 'gptq' or"),
        ({"is_marlin_format": True}, r"is_marlin_format \(True\) must be False"),
        ({"pack_dtype": "int16"}, r"pack_dtype \('int16'\) must be 'int32'"),
        ({"meta": 3}, r"quantization_config.meta \(3\) must be a mapping"),
        ({"dynamic": {"-:.*mlp.*": {}}}, r"quantization_config.dynamic \(settings of single"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(
    change: dict[str, Any], message: str
) -> None:
    config = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    assert read_gptq(config) == GptqFormat(4, 128, is_symmetric=True)
    with pytest.raises(ConfigError, match=message):
        read_gptq({**config, **change})


def test_fields_past_the_last_column_and_row_are_not_read() -> None:
    written = write_gptq(random_weight(3, 12), is_symmetric=False, group_size=-1)
    written.tensors[".qweight"][-1] |= 0x77770000
    written.tensors[".qzeros"] |= 0x77777000
    check_agreement(read_gptq(written.config), written)
