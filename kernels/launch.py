"""A Triton launch of which everything that does not change is worked out once.

`kernel[grid](...)` looks at every argument of every launch: its type, whether it is 1 or divides
by 16, where its memory is. With 30 arguments that costs several times what the launch itself does
(docs/performance.md). A `PreparedLaunch` looks at the arguments that vary, picks the kernel that
Triton compiled for such arguments, and calls it with the others as they were when it was made.
"""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from ep_runtime.kernels.interpreter import is_interpreting, prepare_launch

_ALIGNMENT = 16  # what Triton compiles for: addresses (in bytes) and integers that it divides


class PreparedLaunch:
    """One kernel with all but its first arguments bound.

    kernel: a `triton.jit` function whose varying parameters come first. bound: the rest by name,
    constexprs included; its tensors keep their addresses, and live as long as this does.
    options: of the launch: num_warps, num_stages, launch_pdl and what else Triton takes beside a
    kernel's own parameters. The first launch with arguments of a kind compiles, so it must not be
    the one that is captured. Launch hooks (of Triton's own profiler) are not called.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        *,
        options: Mapping[str, object],
        **bound: object,
    ) -> None:
        """Raises TypeError where `bound` is not exactly the last of the kernel's parameters."""
        prepare_launch(device)
        names = list(kernel.arg_names)
        num_varying = len(names) - len(bound)
        if num_varying < 0 or set(names[num_varying:]) != set(bound):
            raise TypeError(
                f"{kernel.__name__} has the parameters {names}, of which {sorted(bound)} are not "
                f"the last"
            )
        self.kernel, self.options = kernel, dict(options)
        self.bound = tuple(bound[name] for name in names[num_varying:])
        self._bound_values = tuple(
            value.data_ptr() if isinstance(value, Tensor) else value for value in self.bound
        )
        self._compiled: dict[Hashable, tuple[Any, Any, Any]] = {}
        self._is_interpreting = is_interpreting()
        if not self._is_interpreting:
            self._is_specialised = [not p.do_not_specialize for p in kernel.params[:num_varying]]
            has_index = device.index is not None or device.type != "cuda"
            self._device_index = device.index if has_index else torch.cuda.current_device()

    def __call__(
        self, grid: tuple[int, ...], *varying: Tensor | int | None, stream: int | None = None
    ) -> None:
        """Launch on the current stream, or on the CUDA stream of that address.

        grid: one to three numbers of programs. varying: the kernel's first parameters in order;
        tensors on the device, which the caller keeps alive until the kernel has run, integers, or
        None.
        """
        if self._is_interpreting:
            self.kernel[grid](*varying, *self.bound, **self.options)
            return
        kind, values = look_at(varying, self._is_specialised)
        if kind not in self._compiled:
            self._compiled[kind] = self._compile(grid, varying)
        run, function, metadata = self._compiled[kind]
        if stream is None:
            stream = triton.runtime.driver.active.get_current_stream(self._device_index)
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, stream, function, metadata, None, None, None, *values, *self._bound_values)

    def _compile(
        self, grid: tuple[int, ...], varying: tuple[Tensor | int | None, ...]
    ) -> tuple[Any, Any, Any]:
        compiled = self.kernel.warmup(*varying, *self.bound, grid=grid, **self.options)
        return compiled.run, compiled.function, compiled.packed_metadata


def look_at(
    varying: tuple[Tensor | int | None, ...], is_specialised: list[bool]
) -> tuple[tuple[object, ...], list[int | None]]:
    """What Triton compiles different kernels for, of each argument, and the arguments as numbers.

    is_specialised: of each, whether an integer is told apart by its value. Tensors differ in dtype
    and in whether 16 divides their address, which is their number; integers in whether they need 64
    bits, and if specialised in whether they are 1 or multiples of 16. In every launch, so plain.
    """
    kind: list[object] = []
    numbers: list[int | None] = []
    for value, by_value in zip(varying, is_specialised, strict=True):
        if isinstance(value, int):
            numbers.append(value)
            kind.append(-(2**31) <= value < 2**31)
            if by_value:
                kind.append("1" if value == 1 else value % _ALIGNMENT == 0)
        elif value is None:
            numbers.append(None)
            kind.append(None)
        else:
            address = value.data_ptr()
            numbers.append(address)
            kind += (value.dtype, address % _ALIGNMENT == 0)
    return tuple(kind), numbers
