"""A layer of packed weights on the triton kernel, interpreted: its result, and what it holds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ep_runtime.config import ParallelConfig
from ep_runtime.distributed import EPContext, init_distributed
from ep_runtime.kernels.interpreter import is_interpreting
from ep_runtime.layer import MoELayer
from tests.ep_runtime.stored_experts import quantized_moe, stored_weights
from tests.tolerances import TOLERANCES, relative_error

# numpy's, of padding rows, which are unwritten memory.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
INT8 = {"weight": "int8_w8a16", "group_size": 64, "has_input_order": False}


@pytest.fixture(scope="module")
def ctx() -> Iterator[EPContext]:
    if not is_interpreting():
        pytest.skip("Triton compiles for CUDA in this process")
    with init_distributed(ParallelConfig(device="cpu")) as context:
        yield context


@pytest.mark.parametrize(
    ("scheme", "changes"),
    [
        ("int4", {"dtype": "float32"}),
        ("int8_act_order", {"quantization": INT8}),
        ("mxfp4", {}),
        ("nvfp4", {}),
    ],
)
def test_a_layer_computes_what_the_reference_kernel_does_and_holds_its_weights_once(
    scheme: str, changes: dict[str, Any], ctx: EPContext
) -> None:
    moe = quantized_moe(scheme, **changes)
    outputs: list[Tensor] = []
    for experts in ("reference", "triton"):
        layer = MoELayer(moe, ctx, experts=experts)
        layer.load_experts(**stored_weights(moe))
        rows = torch.randn(11, moe.hidden_size, generator=torch.Generator().manual_seed(9))
        outputs.append(layer(rows.to(moe.torch_dtype)))
    assert relative_error(outputs[1], outputs[0]) <= TOLERANCES[moe.torch_dtype]
    assert layer.w13.is_meta
    assert layer.w2.is_meta
    assert layer.expert_weights.w13.dtype is torch.int16
