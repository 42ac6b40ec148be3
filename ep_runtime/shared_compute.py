"""How a layer's shared expert is held and computed: one rule table, first match wins.

Pure, from the configuration, the machine and the experts kernel that was chosen, so that it is a
part of the plan, which ranks agree on.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import ExpertsCapabilities
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.machine import Machine, TritonMode

# sm_90 and sm_100: 227 KiB of shared memory a program, and e4m3 products.
_CAPABILITIES = (9, 10)
# What a row's bytes must be a multiple of, to be read by TMA.
_ROW_BYTES = 16


class SharedCompute(StrEnum):
    """Each as it stores the weights and multiplies them."""

    LIBRARY = "library"  # in the layer's dtype, dequantised; torch's matrix products
    KERNELS = "kernels"  # the same, but of few rows products of our own
    FP8 = "fp8"  # e4m3 with scales, as stored; rows are quantised, products are of e4m3


@dataclass(frozen=True)
class _Question:
    moe: MoEConfig
    machine: Machine
    experts: ExpertsCapabilities


@dataclass(frozen=True)
class _Fault:
    """Why our kernels are not taken."""

    applies: Callable[[_Question], bool]
    reason: Callable[[_Question], str]


_KERNEL_FAULTS = (
    _Fault(
        lambda q: q.moe.dtype == "float32",
        lambda q: "dtype float32 is multiplied by the library, in IEEE precision",
    ),
    _Fault(
        lambda q: q.experts.is_reference,
        lambda q: (
            f"experts {q.experts.name} is what others are compared with: nothing is quantised "
            f"beside"
        ),
    ),
    _Fault(
        lambda q: q.machine.triton is TritonMode.UNUSABLE,
        lambda q: "Triton is not usable here",
    ),
    _Fault(
        lambda q: q.machine.device_type == "cpu" and not q.experts.needs_triton,
        lambda q: f"in the interpreter only beside a Triton kernel, not experts {q.experts.name}",
    ),
    _Fault(
        lambda q: (q.machine.compute_capability or (9, 0))[0] not in _CAPABILITIES,
        lambda q: (
            f"for compute capability {' and '.join(f'{n}.x' for n in _CAPABILITIES)}, and this "
            f"device has {'.'.join(map(str, q.machine.compute_capability or ()))}"
        ),
    ),
)


def choose_shared_compute(
    moe: MoEConfig, machine: Machine, experts: ExpertsCapabilities
) -> tuple[SharedCompute, dict[SharedCompute, str]]:
    """The way to take, and why not each of the others that would come before it.

    A machine that does not know its device's capability is not refused for it.
    """
    faults: dict[SharedCompute, str] = {}
    for compute in (SharedCompute.FP8, SharedCompute.KERNELS):
        fault = next(_faults(compute, _Question(moe, machine, experts)), None)
        if fault is None:
            return compute, faults
        faults[compute] = fault
    return SharedCompute.LIBRARY, faults


def _faults(compute: SharedCompute, question: _Question) -> Iterator[str]:
    moe, is_fp8 = question.moe, compute is SharedCompute.FP8
    if is_fp8 and moe.shared_quantization.weight is not WeightScheme.FP8_BLOCK:
        yield f"shared_quantization is {moe.shared_quantization.weight}"
    if not moe.has_shared_expert:
        yield "the layer has no shared expert"
    yield from (fault.reason(question) for fault in _KERNEL_FAULTS if fault.applies(question))
    itemsize = 1 if is_fp8 else moe.torch_dtype.itemsize
    sizes = {
        "hidden_size": moe.hidden_size,
        "shared_intermediate_size": moe.shared_intermediate_size,
    }
    for key, size in sizes.items():
        if size * itemsize % _ROW_BYTES:
            yield f"{key} ({size}) is not a multiple of {_ROW_BYTES // itemsize}"
