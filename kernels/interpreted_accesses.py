"""Which bytes an interpreted Triton kernel loads and stores, told to whoever watches.

Triton's interpreter knows the address of every element, so what a kernel touches is observed and
not declared. Left out are volatile loads and atomics: a kernel uses them to talk to another one
while both run, which is ordering of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

Intervals = list[tuple[int, int]]  # of addresses, [start, stop), rising, apart


class LaunchWatcher(Protocol):
    """Asked to run each launch, and told what it touched."""

    def launch(self, kernel: str, arguments: tuple[Any, ...], run: Callable[[], None]) -> None:
        """Call `run`, once."""

    def on_stream(self, address: int) -> AbstractContextManager[None]:
        """Launches inside were given the CUDA stream of that address instead of the current one."""

    def touched(self, intervals: Intervals, *, is_store: bool) -> None:
        """One load or store of one program of the launch that runs."""


@contextmanager
def watch_interpreted_launches(watcher: LaunchWatcher) -> Iterator[None]:
    """Tell `watcher` of every launch inside; nothing where Triton does not interpret."""
    if find_spec("triton") is None:
        yield
        return
    from ep_runtime.kernels.interpreter import install, is_interpreting

    if not is_interpreting():
        yield
        return
    install()  # its repairs come first, so that what is put back here has them
    import triton.runtime.interpreter as interpreter

    from ep_runtime.kernels.launch import PreparedLaunch

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    call, prepared_call = executor.__call__, PreparedLaunch.__call__
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_prepared_call(
        self: Any, grid: tuple[int, ...], *varying: Any, stream: int | None = None
    ) -> None:
        if stream is None:
            prepared_call(self, grid, *varying)
            return
        with watcher.on_stream(stream):
            prepared_call(self, grid, *varying)

    def watched_call(self: Any, *arguments: Any, **keywords: Any) -> None:
        def run() -> None:
            # Rows that nobody wrote are computed on and dropped; numpy would warn of each.
            with np.errstate(all="ignore"):
                call(self, *arguments, **keywords)

        watcher.launch(self.fn.__name__, (*arguments, *keywords.values()), run)

    def watched_load(
        self: Any,
        ptrs: Any,
        mask: Any,
        other: Any,
        cache_modifier: Any,
        eviction_policy: Any,
        is_volatile: Any,
    ) -> Any:
        if not is_volatile:
            watcher.touched(_intervals(ptrs, mask), is_store=False)
        return load(self, ptrs, mask, other, cache_modifier, eviction_policy, is_volatile)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watcher.touched(_intervals(ptrs, mask), is_store=True)
        return store(self, ptrs, value, mask, *rest)

    executor.__call__ = watched_call
    setattr(PreparedLaunch, "__call__", watched_prepared_call)  # noqa: B010
    builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
    try:
        yield
    finally:
        executor.__call__ = call
        setattr(PreparedLaunch, "__call__", prepared_call)  # noqa: B010
        builder.create_masked_load, builder.create_masked_store = load, store


def _intervals(ptrs: Any, mask: Any) -> Intervals:
    """The bytes of the elements that are not masked."""
    num_bytes = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
    addresses = np.asarray(ptrs.data).astype(np.int64)
    is_on = np.broadcast_to(np.asarray(mask.data).astype(bool), addresses.shape)
    return merge_addresses(addresses[is_on], num_bytes)


def merge_addresses(addresses: Any, num_bytes: int) -> Intervals:
    """Intervals of elements of `num_bytes` each. Example: 8, 0, 4, 20 of 4: (0, 12), (20, 24)."""
    if addresses.size == 0:
        return []
    rising = np.unique(addresses)
    breaks = np.flatnonzero(np.diff(rising) > num_bytes)
    starts = rising[np.concatenate(([0], breaks + 1))]
    stops = rising[np.concatenate((breaks, [rising.size - 1]))] + num_bytes
    return list(zip(starts.tolist(), stops.tolist(), strict=True))
