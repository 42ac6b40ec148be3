"""Expert-parallel runtime for Mixture-of-Experts inference.

Names load on first use, so importing a kernel needs torch and triton alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ep_runtime.all2all.registry import register_backend as register_backend
    from ep_runtime.config import MoEConfig as MoEConfig
    from ep_runtime.config import ParallelConfig as ParallelConfig
    from ep_runtime.config import SharedExpertsConfig as SharedExpertsConfig
    from ep_runtime.distributed import EPContext as EPContext
    from ep_runtime.distributed import init_distributed as init_distributed
    from ep_runtime.kernels.errors import CapacityError as CapacityError
    from ep_runtime.kernels.errors import CheckpointError as CheckpointError
    from ep_runtime.kernels.errors import ConfigError as ConfigError
    from ep_runtime.kernels.errors import EPRuntimeError as EPRuntimeError
    from ep_runtime.kernels.errors import PlanError as PlanError
    from ep_runtime.kernels.errors import RankFailure as RankFailure
    from ep_runtime.kernels.quant.scheme import QuantizedTensor as QuantizedTensor
    from ep_runtime.kernels.quant.scheme import QuantParameters as QuantParameters
    from ep_runtime.kernels.quant.scheme import QuantScheme as QuantScheme
    from ep_runtime.kernels.quant.scheme import WeightScheme as WeightScheme
    from ep_runtime.kernels.registry import register_experts as register_experts
    from ep_runtime.layer import MoELayer as MoELayer
    from ep_runtime.machine import Machine as Machine
    from ep_runtime.models import load_model as load_model
    from ep_runtime.plan import Plan as Plan
    from ep_runtime.plan import resolve_plan as resolve_plan

_DEFINED_IN = {
    "CapacityError": "kernels.errors",
    "CheckpointError": "kernels.errors",
    "ConfigError": "kernels.errors",
    "EPContext": "distributed",
    "EPRuntimeError": "kernels.errors",
    "Machine": "machine",
    "MoEConfig": "config",
    "MoELayer": "layer",
    "ParallelConfig": "config",
    "Plan": "plan",
    "PlanError": "kernels.errors",
    "QuantParameters": "kernels.quant.scheme",
    "QuantScheme": "kernels.quant.scheme",
    "QuantizedTensor": "kernels.quant.scheme",
    "RankFailure": "kernels.errors",
    "SharedExpertsConfig": "config",
    "WeightScheme": "kernels.quant.scheme",
    "init_distributed": "distributed",
    "load_model": "models",
    "register_backend": "all2all.registry",
    "register_experts": "kernels.registry",
    "resolve_plan": "plan",
}

__all__ = sorted(_DEFINED_IN)


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_DEFINED_IN])
