"""Experts kernels by name. A new kernel is one file and one line here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from ep_runtime.kernels.base import Experts, ExpertsCapabilities
from ep_runtime.kernels.errors import ConfigError

# In the order `auto` prefers them.
_BUILT_IN = {
    "triton": "ep_runtime.kernels.triton_experts:TritonExperts",
    "triton_batched": "ep_runtime.kernels.triton_batched_experts:TritonBatchedExperts",
    "deep_gemm": "ep_runtime.kernels.deep_gemm_experts:DeepGemmExperts",
    "deep_gemm_batched": "ep_runtime.kernels.deep_gemm_batched_experts:DeepGemmBatchedExperts",
    "marlin": "ep_runtime.kernels.marlin_experts:MarlinExperts",
    "resident": "ep_runtime.kernels.resident_experts:ResidentExperts",
    "nvfp4_nf3_hybrid": "ep_runtime.kernels.hybrid_experts:HybridExperts",
    "reference": "ep_runtime.kernels.reference_experts:ReferenceExperts",
}
_registered: dict[str, type[Experts]] = {}
_stand_ins: dict[str, type[Experts]] = {}
_CONCURRENCY = Experts.concurrency.__func__  # type: ignore[attr-defined]


def check_registration(kind: str, name: str, cls: object, capabilities: type) -> None:
    """Refuse what no plan could use: a reserved or other name, or no declared capabilities."""
    if name == "auto":
        raise ConfigError(f"{kind} 'auto' is reserved; register yours under another name")
    declared = getattr(cls, "capabilities", None)
    if not isinstance(cls, type) or not isinstance(declared, capabilities):
        raise ConfigError(
            f"{kind} {name!r} must be a class with `capabilities`, a {capabilities.__name__}; "
            f"got {cls!r}"
        )
    declared_name = getattr(declared, "name", None)
    if declared_name != name:
        raise ConfigError(
            f"{kind} {name!r} declares capabilities.name {declared_name!r}; make them equal"
        )


def register_experts(name: str, cls: type[Experts]) -> None:
    """Make an out-of-tree experts kernel choosable by name; the last registration wins."""
    _check_experts(name, cls)
    _registered[name] = cls


@contextmanager
def stand_in_experts(classes: Sequence[type[Experts]]) -> Iterator[None]:
    """Make kernels choosable by their names while this is open, and by those alone: they are not
    among `experts_names`, so `auto` takes none and no error tells a user of one."""
    made = {cls.capabilities.name: cls for cls in classes}
    for name, cls in made.items():
        _check_experts(name, cls)
    _stand_ins.update(made)
    try:
        yield
    finally:
        for name in made:
            del _stand_ins[name]


def _check_experts(name: str, cls: type[Experts]) -> None:
    if name in _BUILT_IN:
        raise ConfigError(f"experts {name!r} is built in; register yours under another name")
    check_registration("experts", name, cls, ExpertsCapabilities)
    if cls.concurrency.__func__ is not _CONCURRENCY:  # type: ignore[attr-defined]
        raise ConfigError(
            f"experts {name!r} overrides concurrency(); declare the rules in "
            f"capabilities.concurrency, which is what the plan reads"
        )


def experts_names() -> tuple[str, ...]:
    """Every kernel that a user may name, in the order `auto` prefers them."""
    return (*_BUILT_IN, *_registered)


def experts_class(name: str) -> type[Experts]:
    """The class behind a name; an unknown one is a ConfigError that lists the valid ones."""
    for classes in (_registered, _stand_ins):
        if name in classes:
            return classes[name]
    if name not in _BUILT_IN:
        raise ConfigError(
            f"experts {name!r} is unknown; choose one of: auto, {', '.join(experts_names())}"
        )
    module, attribute = _BUILT_IN[name].split(":")
    cls: type[Experts] = getattr(import_module(module), attribute)
    return cls
