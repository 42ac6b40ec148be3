"""What is said of where a layer's tiles come from, and when a table of tiles has no effect."""

from dataclasses import replace

import pytest
import torch

from ep_runtime.kernels import hopper_packed_schedule
from ep_runtime.kernels.base import Activation, ExpertsShape
from ep_runtime.kernels.hopper_packed_layers import suits_hopper_packed
from ep_runtime.kernels.hopper_packed_schedule import takes_hopper_packed
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.kernels.triton_batched_experts import TritonBatchedExperts
from ep_runtime.kernels.triton_experts import TritonExperts
from ep_runtime.kernels.tuning_text import describe_tuning, tile_table_fault

NAME = "NVIDIA H200"
INT4 = QuantScheme(WeightScheme.INT4, 128)
MXFP4 = QuantScheme(WeightScheme.MXFP4)
NVFP4 = QuantScheme(WeightScheme.NVFP4)
# Sizes that no shipped table has.
SHAPE = ExpertsShape(3, 192, 320, 2, Activation(), torch.bfloat16, scheme=INT4)
HOPPER = "the packed Hopper GEMM, by its own rule; tile tables have no effect"
NO_TABLE = "the rule: no table of NVIDIA H200 with Triton"


@pytest.mark.parametrize("scheme", [INT4, MXFP4, NVFP4], ids=lambda scheme: scheme.weight)
@pytest.mark.parametrize("kernel", [TritonExperts, TritonBatchedExperts])
def test_a_layer_of_the_packed_hopper_gemm_is_said_to_have_no_tables(
    kernel: type[TritonExperts] | type[TritonBatchedExperts], scheme: QuantScheme
) -> None:
    """Of sm_90 alone; where the device's capability is unknown, of both."""
    layer = kernel(replace(SHAPE, scheme=scheme))
    assert layer.tuning_text(NAME, (9, 0)) == HOPPER
    elsewhere = layer.tuning_text(NAME, (8, 0))
    assert elsewhere is not None
    assert elsewhere.startswith(f"the packed Triton GEMM, {NO_TABLE}")
    assert layer.tuning_text(NAME) == (
        f"on sm_90 the packed Hopper GEMM, by its own rule; elsewhere {elsewhere}"
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(SHAPE, scheme=QuantScheme(WeightScheme.INT8, 64)), "the packed Triton GEMM, the"),
        (replace(SHAPE, dtype=torch.float16, scheme=NVFP4), "the packed Triton GEMM, the rule: no"),
        (replace(SHAPE, dtype=torch.float16, scheme=MXFP4), "the packed Triton GEMM, the rule: no"),
        (replace(SHAPE, intermediate_size=324), "the packed Triton GEMM, the rule: no table of"),
        (replace(SHAPE, scheme=QuantScheme()), NO_TABLE),
    ],
)
def test_other_layers_have_tables_on_the_same_device(other: ExpertsShape, said: str) -> None:
    assert describe_tuning(other, NAME, (9, 0)).startswith(said)
    assert describe_tuning(other, NAME) == describe_tuning(other, NAME, (9, 0))
    assert tile_table_fault(other, (9, 0)) is None


def test_why_a_table_has_no_effect_names_how_the_weights_are_stored() -> None:
    fault = tile_table_fault(SHAPE, (9, 0))
    assert fault is not None
    assert fault.startswith("weights stored as int4_w4a16 run on the packed Hopper GEMM")
    for unknown_or_older in (None, (8, 0)):
        assert tile_table_fault(SHAPE, unknown_or_older) is None
    in_nf3 = replace(SHAPE, scheme=QuantScheme(WeightScheme.NF3))
    assert tile_table_fault(in_nf3, None) == "weights stored as nf3 have no tables"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [320, 324])
@pytest.mark.parametrize(
    "scheme",
    [
        INT4,
        MXFP4,
        QuantScheme(WeightScheme.INT4, 96),
        QuantScheme(WeightScheme.INT4, 128, has_input_order=True),
        QuantScheme(WeightScheme.INT8, 128),
        QuantScheme(),
    ],
    ids=str,
)
def test_what_is_said_is_what_a_call_does(
    scheme: QuantScheme, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopper_packed_schedule, "_is_sm_90", lambda device: True)
    shape = replace(SHAPE, scheme=scheme, intermediate_size=width, dtype=dtype)
    assert suits_hopper_packed(shape) is takes_hopper_packed(shape, torch.device("cuda"))
