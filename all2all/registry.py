"""All-to-all backends by name. A new backend is one file and one line here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ep_runtime.all2all.base import All2AllBackend, BackendCapabilities
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.registry import check_registration

# In the order `auto` prefers them.
_BUILT_IN = {
    "local": "ep_runtime.all2all.local:LocalBackend",
    "symm_mem": "ep_runtime.all2all.symm_mem:SymmMemBackend",
    "deepep_low_latency": "ep_runtime.all2all.deepep_low_latency:DeepEPLowLatencyBackend",
    "deepep_high_throughput": (
        "ep_runtime.all2all.deepep_high_throughput:DeepEPHighThroughputBackend"
    ),
    "all_to_all": "ep_runtime.all2all.all_to_all:AllToAllBackend",
    "naive": "ep_runtime.all2all.naive:NaiveBackend",
}
_registered: dict[str, type[All2AllBackend[Any, Any]]] = {}
_stand_ins: dict[str, type[All2AllBackend[Any, Any]]] = {}


def register_backend(name: str, cls: type[All2AllBackend[Any, Any]]) -> None:
    """Make an out-of-tree backend choosable by name; the last registration wins."""
    _check_backend(name, cls)
    _registered[name] = cls


@contextmanager
def stand_in_backends(classes: Sequence[type[All2AllBackend[Any, Any]]]) -> Iterator[None]:
    """Make backends choosable by their names while this is open, and by those alone: they are not
    among `backend_names`, so `auto` takes none and no error tells a user of one."""
    made = {cls.capabilities.name: cls for cls in classes}
    for name, cls in made.items():
        _check_backend(name, cls)
    _stand_ins.update(made)
    try:
        yield
    finally:
        for name in made:
            del _stand_ins[name]


def _check_backend(name: str, cls: type[All2AllBackend[Any, Any]]) -> None:
    if name in _BUILT_IN:
        raise ConfigError(
            f"all2all_backend {name!r} is built in; register yours under another name"
        )
    check_registration("all2all_backend", name, cls, BackendCapabilities)


def backend_names() -> tuple[str, ...]:
    """Every backend that a user may name, in the order `auto` prefers them."""
    return (*_BUILT_IN, *_registered)


def backend_class(name: str) -> type[All2AllBackend[Any, Any]]:
    """The class behind a name; an unknown one is a ConfigError that lists the valid ones."""
    for classes in (_registered, _stand_ins):
        if name in classes:
            return classes[name]
    if name not in _BUILT_IN:
        raise ConfigError(
            f"all2all_backend {name!r} is unknown; choose one of: auto, "
            f"{', '.join(backend_names())}"
        )
    module, attribute = _BUILT_IN[name].split(":")
    cls: type[All2AllBackend[Any, Any]] = getattr(import_module(module), attribute)
    return cls
