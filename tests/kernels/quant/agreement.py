"""Whether a format reads what a writer stored, as the writer reads it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ep_runtime.kernels.quant.awq import AwqFormat
from ep_runtime.kernels.quant.dequantize import dequantize
from ep_runtime.kernels.quant.format import Projection, StoredTensor, WeightFormat
from ep_runtime.kernels.quant.gptq import GptqFormat
from ep_runtime.kernels.quant.mxfp4 import Mxfp4Format
from ep_runtime.kernels.quant.nvfp4 import Nvfp4Format
from ep_runtime.kernels.quant.pack_quantized import PackQuantizedFormat
from ep_runtime.kernels.quant.scheme import QuantizedTensor
from ep_runtime.kernels.quant.storage import stored_shapes, tensors_of
from tests.kernels.quant.writers import Written

# Of float32 arithmetic in another order: a product or a quotient more.
LIMIT = 1e-6


DefinedFormat = GptqFormat | AwqFormat | PackQuantizedFormat | Mxfp4Format | Nvfp4Format


def projection_of(written: Written, dtype: torch.dtype = torch.float32) -> Projection:
    num_rows, num_columns = written.weight.shape
    return Projection(num_rows, num_columns, dtype)


def read(
    form: WeightFormat, written: Written, dtype: torch.dtype = torch.float32
) -> QuantizedTensor:
    """What `convert` makes of the stored tensors, once shapes and dtypes are as `stored` says."""
    projection = projection_of(written, dtype)
    stored = form.stored(projection)
    tensors = written.by_role(stored)
    known = {suffix for tensor in stored.values() for suffix in tensor.suffixes}
    assert set(written.tensors) <= known
    check_stored(stored, tensors)
    return form.convert(tensors, projection)


def check_stored(stored: Mapping[str, StoredTensor], tensors: Mapping[str, Tensor]) -> None:
    for role, wanted in stored.items():
        if not wanted.is_used:
            continue
        assert role in tensors or not wanted.is_required, role
        if role in tensors:
            assert tuple(tensors[role].shape) in wanted.shapes, role
            assert tensors[role].dtype in wanted.dtypes, role


def check_agreement(form: DefinedFormat, written: Written) -> QuantizedTensor:
    """Definition and `convert` both give the writer's weight; the tensors are as declared."""
    projection = projection_of(written)
    converted = read(form, written)
    check_layout(form, converted, projection)
    assert_equal(dequantize(converted)[0], written.weight)
    tensors = written.by_role(form.stored(projection))
    assert_equal(form.dequantize(tensors, projection), written.weight)
    return converted


def check_layout(form: WeightFormat, converted: QuantizedTensor, projection: Projection) -> None:
    """Names, shapes and dtypes are those of the format's scheme."""
    declared = stored_shapes(
        form.scheme, projection.rows, projection.columns, num_parts=1, dtype=projection.dtype
    )
    found = {n: (tuple(t.shape), t.dtype) for n, t in tensors_of(converted).items()}
    assert found == {n: ((1, *shape.shape), shape.dtype) for n, shape in declared.items()}
    assert converted.scheme == form.scheme
    assert all(tensor.is_contiguous() for tensor in tensors_of(converted).values())


def assert_equal(actual: Tensor, expected: Tensor) -> None:
    """Within a rounding of the largest weight."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype == torch.float32
    assert float((actual - expected).abs().max()) <= LIMIT * float(expected.abs().max())
