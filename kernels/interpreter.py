"""Triton on a CPU: whether it interprets, and the repairs its interpreter needs to be right.

The interpreter runs a kernel's programs one after another on numpy arrays. numpy has no bfloat16,
so it keeps the bits in uint16, and as released it also does its arithmetic on them: sums, products
and dots of bfloat16 are garbage, float32 is truncated instead of rounded, and with numpy >= 2.4
Triton 3.6 cannot take `range` of a tensor. The repairs compute bfloat16 in float32 and round once,
as a GPU does. Not repaired: bfloat16 `fma` and bfloat16 `atomic_add`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ep_runtime.kernels.errors import PlanError

_TORCH_DTYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
# Bits of a float of so many bytes, as torch and numpy name them.
_TORCH_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_NUMPY_SIGNED_BITS = {1: np.uint8, 2: np.int16, 4: np.int32}
_NUMPY_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def is_interpreting() -> bool:
    """Whether this process imported Triton with TRITON_INTERPRET=1.

    Asks what Triton made of its own `tl.zeros`, because the variable has no effect on functions
    that were decorated before it was set.
    """
    return not isinstance(tl.zeros, triton.runtime.JITFunction)


def prepare_launch(device: torch.device) -> None:
    """Call before a process launches a Triton kernel; cheap and idempotent.

    Installs the repairs where Triton interprets. Raises PlanError for tensors on a CPU where it
    does not.
    """
    if is_interpreting():
        install()
    elif device.type == "cpu":
        raise PlanError(
            "a Triton kernel was given tensors on the CPU; set TRITON_INTERPRET=1 before the "
            "process starts, or choose experts: reference"
        )


@cache
def install() -> None:
    """Install the repairs into `triton.runtime.interpreter`, once a process. Triton 3.6 to 3.9."""
    import triton.runtime.interpreter as interpreter

    _repair_float_conversion(interpreter)
    for name in ("binary_op", "unary_op", "ternary_op"):
        _compute_in_float32(interpreter, name)
    _repair_dot(interpreter)
    _repair_casts(interpreter)
    _repair_bf16_constants(interpreter)
    _repair_index_of_tensor(interpreter)
    _reduce_in_float32(interpreter, interpreter.ReduceOps, "sum")
    _reduce_in_float32(interpreter, interpreter.ScanOps, "cumsum")


def _convert_bits(bits: Any, source: Any, target: Any) -> Any:
    """Floats of Triton dtype `source` to `target`, rounding to nearest even; NaN and inf stay.

    bits: numpy array of any dtype of the source's width. Returns the target's bits, unsigned.
    """
    array = np.ascontiguousarray(bits)
    source_bytes = source.primitive_bitwidth // 8
    target_bytes = target.primitive_bitwidth // 8
    flat = torch.from_numpy(array.view(_NUMPY_SIGNED_BITS[source_bytes]).copy())
    values = flat.view(_TORCH_DTYPES[source]).float().to(_TORCH_DTYPES[target])
    result = values.view(_TORCH_BITS[target_bytes]).numpy().view(_NUMPY_BITS[target_bytes])
    return result.reshape(array.shape)


def _is_bf16(handle: Any) -> bool:
    dtype = getattr(handle, "dtype", None)
    return dtype is not None and dtype.scalar == tl.bfloat16


def _to_float32(interpreter: Any, handle: Any) -> Any:
    """A bfloat16 handle as float32; anything else as it is."""
    if not _is_bf16(handle):
        return handle
    values = _convert_bits(handle.data, tl.bfloat16, tl.float32).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


def _to_bf16(interpreter: Any, handle: Any) -> Any:
    """A float32 handle rounded to bfloat16; a comparison's int1 as it is."""
    if handle.dtype.scalar != tl.float32:
        return handle
    bits = _convert_bits(handle.data.astype(np.float32), tl.float32, tl.bfloat16)
    return interpreter.TensorHandle(bits, tl.bfloat16)


def _repair_float_conversion(interpreter: Any) -> None:
    released = interpreter._convert_float

    def convert(values: Any, source: Any, target: Any, rounding_mode: Any = None) -> Any:
        if source in _TORCH_DTYPES and target in _TORCH_DTYPES:
            return _convert_bits(values, source, target)
        return released(values, source, target, rounding_mode)

    interpreter._convert_float = convert


def _compute_in_float32(interpreter: Any, name: str) -> None:
    """Make one of the builder's n-ary operations compute bfloat16 operands in float32."""
    released: Callable[..., Any] = getattr(interpreter.InterpreterBuilder, name)

    def operation(builder: Any, *arguments: Any) -> Any:
        *handles, numpy_function = arguments
        # tl.where is ternary with a boolean first: it moves bits and must not round them.
        is_select = name == "ternary_op" and not _is_bf16(handles[0])
        if is_select or not any(map(_is_bf16, handles)):
            return released(builder, *arguments)
        widened = (_to_float32(interpreter, handle) for handle in handles)
        return _to_bf16(interpreter, released(builder, *widened, numpy_function))

    setattr(interpreter.InterpreterBuilder, name, operation)


def _repair_dot(interpreter: Any) -> None:
    released = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        wide_a, wide_b = _to_float32(interpreter, a), _to_float32(interpreter, b)
        return released(builder, wide_a, wide_b, accumulator, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _repair_casts(interpreter: Any) -> None:
    released = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(builder: Any, value: Any, target_type: Any) -> Any:
        source, target = value.dtype.scalar, target_type.scalar
        if source in _TORCH_DTYPES and target in _TORCH_DTYPES and source != target:
            bits = _convert_bits(value.data, source, target)
            return interpreter.TensorHandle(
                bits.view(interpreter._get_np_dtype(target_type)), target
            )
        if source == tl.bfloat16 and target not in _TORCH_DTYPES:
            return released(builder, _to_float32(interpreter, value), target_type)
        if target == tl.bfloat16 and source != tl.bfloat16:
            integers = interpreter.TensorHandle(value.data.astype(np.float32), tl.float32)
            return _to_bf16(interpreter, integers)
        return released(builder, value, target_type)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def _repair_bf16_constants(interpreter: Any) -> None:
    """Triton < 3.9 has no way to make a bfloat16 from a Python float."""
    if hasattr(interpreter.InterpreterBuilder, "get_bf16"):
        return

    def get_bf16(builder: Any, value: float) -> Any:
        scalar = interpreter.TensorHandle(np.array([value], np.float32), tl.float32)
        return _to_bf16(interpreter, scalar)

    interpreter.InterpreterBuilder.get_bf16 = get_bf16


def _repair_index_of_tensor(interpreter: Any) -> None:
    """Triton 3.6 turns a one-element array into an int in a way that numpy 2.4 refuses."""
    released = interpreter._patch_lang_tensor

    def index(tensor: Any) -> int:
        return int(np.asarray(tensor.handle.data).item())

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        released(tensor, *scope)
        if scope:
            scope[0].set_attr(tensor, "__index__", index)
        else:
            tensor.__index__ = index

    interpreter._patch_lang_tensor = patch_lang_tensor


def _reduce_in_float32(interpreter: Any, operation: Any, name: str) -> None:
    """Make a reduction or scan of bfloat16 accumulate in float32 and round once."""
    released: Callable[..., Any] = getattr(operation, name)

    def as_tensor(handle: Any, is_block: bool) -> Any:
        shape = list(handle.data.shape)
        return tl.core.tensor(
            handle, tl.block_type(handle.dtype, shape) if is_block else handle.dtype
        )

    def reduce(self: Any, value: Any) -> Any:
        if not (isinstance(value, tl.tensor) and value.dtype.scalar == tl.bfloat16):
            return released(self, value)
        result = released(self, as_tensor(_to_float32(interpreter, value.handle), True))
        results = result if isinstance(result, list) else [result]
        rounded = [as_tensor(_to_bf16(interpreter, r.handle), r.type.is_block()) for r in results]
        return rounded if isinstance(result, list) else rounded[0]

    setattr(operation, name, reduce)
