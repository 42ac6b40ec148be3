"""NVFP4: two writers, whose global scale is a multiplier or a divisor, and two parts of w13."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.format import Projection, StoredTensorError
from ep_runtime.kernels.quant.nvfp4 import (
    Nvfp4Format,
    Nvfp4Writer,
    read_compressed_nvfp4,
    read_modelopt,
)
from ep_runtime.kernels.quant.scheme import QuantizedTensor, QuantParameters
from tests.kernels.quant.agreement import LIMIT, check_agreement, read
from tests.kernels.quant.writers import (
    Written,
    write_compressed_nvfp4,
    write_modelopt_nvfp4,
)

WRITERS: dict[Callable[[Tensor], Written], Callable[[dict[str, Any]], Nvfp4Format]] = {
    write_modelopt_nvfp4: read_modelopt,
    write_compressed_nvfp4: read_compressed_nvfp4,
}


def random_weight(num_rows: int, num_columns: int, seed: int = 0, scale: float = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(num_rows, num_columns, generator=generator)


@settings(deadline=None, max_examples=40)
@given(
    write=st.sampled_from(list(WRITERS)),
    num_rows=st.integers(1, 20),
    num_groups=st.integers(1, 9),
    scale=st.sampled_from([1e-3, 1.0, 50.0]),
    seed=st.integers(0, 2**31),
)
def test_any_nvfp4_weight_is_what_its_writer_reads(
    write: Callable[[Tensor], Written], num_rows: int, num_groups: int, scale: float, seed: int
) -> None:
    written = write(random_weight(num_rows, 16 * num_groups, seed, scale))
    check_agreement(WRITERS[write](written.config), written)


def test_the_global_scale_is_a_multiplier_or_a_divisor() -> None:
    """Code 3 is 1.5, scale 2, and a global scale of 4."""
    tensors = {
        "weight": torch.full((1, 8), 0x33, dtype=torch.uint8),
        "scale": torch.full((1, 1), 2.0).to(torch.float8_e4m3fn),
        "global_scale": torch.tensor(4.0),
    }
    projection = Projection(1, 16, torch.float32)
    by_writer = {
        writer: dequantize(Nvfp4Format(writer).convert(tensors, projection))
        for writer in Nvfp4Writer
    }
    assert by_writer[Nvfp4Writer.MODELOPT].unique().tolist() == [12.0]
    assert by_writer[Nvfp4Writer.COMPRESSED_TENSORS].unique().tolist() == [0.75]


def test_gate_and_up_keep_their_own_global_scale() -> None:
    written = [write_modelopt_nvfp4(random_weight(6, 64, seed, 10.0**seed)) for seed in (0, 2)]
    gate, up = (read(read_modelopt(one.config), one) for one in written)
    assert gate.parameters.global_scales is not None
    assert up.parameters.global_scales is not None
    w13 = QuantizedTensor(
        torch.cat((gate.values, up.values), 1),
        QuantParameters(
            torch.cat((gate.parameters.scales, up.parameters.scales), 1),
            global_scales=torch.cat(
                (gate.parameters.global_scales, up.parameters.global_scales), 1
            ),
        ),
        gate.scheme,
    )
    for actual, one in zip(dequantize(w13, num_parts=2)[0].chunk(2), written, strict=True):
        assert float((actual - one.weight).abs().max()) <= LIMIT * float(one.weight.abs().max())
    with pytest.raises(ValueError, match=r"nvfp4 weights of 1 parts have global scales \[1, 2\]"):
        dequantize(w13)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("write", WRITERS)
def test_a_global_scale_that_is_not_above_0_and_finite_is_refused(
    write: Callable[[Tensor], Written], value: float
) -> None:
    written = write(random_weight(2, 32))
    name = next(name for name in written.tensors if name.endswith(("_scale_2", "_global_scale")))
    written.tensors[name] = torch.full_like(written.tensors[name], value)
    with pytest.raises(StoredTensorError, match=r"global_scale: is .*, must be above 0 and finite"):
        read(WRITERS[write](written.config), written)


def test_a_scale_of_nan_is_refused() -> None:
    written = write_modelopt_nvfp4(random_weight(2, 32))
    written.tensors[".weight_scale"].view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(StoredTensorError, match="scale: 1 of 4 scales are NaN"):
        read(read_modelopt(written.config), written)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_bits": 8}, r"^weights.num_bits \(8\) must be 4; quantise again as NVFP4A16"),
        ({"type": "int"}, r"^weights.type \('int'\) must be 'float'"),
        ({"group_size": 32}, r"^weights.group_size \(32\) must be 16"),
        ({"symmetric": False}, r"^weights.symmetric \(False\) must be True"),
    ],
)
def test_compressed_weights_that_cannot_be_read_are_refused(
    change: dict[str, Any], message: str
) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    form = read_compressed_nvfp4({"weights": weights})
    assert form == Nvfp4Format(Nvfp4Writer.COMPRESSED_TENSORS)
    with pytest.raises(ConfigError, match=message):
        read_compressed_nvfp4({"weights": {**weights, **change}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, r"quantization_config.quant_algo \('NVFP4_AWQ'\) must be"),
        (
            {"config_groups": {"group_0": {"weights": {"group_size": 32}}}},
            r"quantization_config.config_groups.group_0.weights.group_size \(32\) must be 16",
        ),
    ],
)
def test_a_modelopt_configuration_that_cannot_be_read_is_refused(
    change: dict[str, Any], message: str
) -> None:
    config = {"quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"group_size": 16}}}}
    assert read_modelopt(config) == Nvfp4Format(Nvfp4Writer.MODELOPT)
    with pytest.raises(ConfigError, match=message):
        read_modelopt({**config, **change})
