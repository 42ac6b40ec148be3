"""The package that has the fused Marlin GEMM: which is installed, and its operator's signature.

vLLM's operator library, or sglang's sgl_kernel, whichever there is; none is imported before weights
are prepared. Of vLLM only the library is loaded, not its Python, so that `pip install --no-deps
vllm` is enough. The operator, `moe_wna16_marlin_gemm`, has had several signatures; it is bound by
the names of its arguments, and one with an argument that is not known here is refused.

Source: vLLM 0.26.0, csrc/libtorch_stable/moe/marlin_moe_wna16/ops.cu and torch_bindings.cpp (the
schema is in the library too); sglang, sgl-kernel/csrc/moe/marlin_moe_wna16/ops.cu.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ep_runtime.kernels.errors import PlanError

logger = logging.getLogger(__name__)

OPERATOR = "moe_wna16_marlin_gemm"
# Importable name -> the namespace of torch.ops that its operator is in; in the order of preference.
NAMESPACES = {"vllm": "_moe_C", "sgl_kernel": "sgl_kernel"}
MIN_CAPABILITY = (8, 0)
# sm_80 and later; a device that is not among them cannot be planned for.
CAPABILITIES = frozenset(
    {(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)}
)
# Each argument's other spelling -> the one that calls here use, which is vLLM 0.26's.
_SPELLINGS = {
    "global_scale_or_none": "global_scale",
    "a_scales_or_none": "a_scales",
    "b_q_type_id": "b_type_id",
    "is_k_full": "is_full_k",
}
_REQUIRED = frozenset(
    (
        "a",
        "c_or_none",
        "b_q_weight",
        "b_scales",
        "b_zeros_or_none",
        "workspace",
        "sorted_token_ids",
        "expert_ids",
        "num_tokens_past_padded",
        "topk_weights",
        "moe_block_size",
        "top_k",
        "mul_topk_weights",
        "b_type_id",
        "size_m",
        "size_n",
        "size_k",
        "use_atomic_add",
        "use_fp32_reduce",
        "is_zp_float",
    )
)
# What a call says where there is nothing to say. Sums across programs are in float32 and in a
# fixed order, never by atomics. Tiles of no expert, which is_ep is about, are never passed.
DEFAULTS: dict[str, Any] = {
    "b_bias_or_none": None,
    "a_scales": None,
    "global_scale": None,
    "b_zeros_or_none": None,
    "g_idx_or_none": None,
    "perm_or_none": None,
    "mul_topk_weights": False,
    "is_ep": False,
    "is_full_k": True,
    "use_atomic_add": False,
    "use_fp32_reduce": True,
    "is_zp_float": False,
    "thread_k": -1,
    "thread_n": -1,
    "blocks_per_sm": -1,
}
KNOWN = _REQUIRED | frozenset(DEFAULTS)


@dataclass(frozen=True)
class MarlinOperator:
    """The operator that was bound. source: where it is from, for a reader.

    arguments: its own, in its order, in the spelling that is used here.
    """

    call: Callable[..., Any]
    arguments: tuple[str, ...]
    source: str

    @property
    def supports_bias(self) -> bool:
        return "b_bias_or_none" in self.arguments

    @property
    def supports_input_order(self) -> bool:
        return {"g_idx_or_none", "perm_or_none"} <= set(self.arguments)

    def __call__(self, values: Mapping[str, Any]) -> None:
        """values: by name; what is not given is as `DEFAULTS` says. Does not wait for the device.

        KeyError for a required argument that is not given.
        """
        given = {**DEFAULTS, **values}
        self.call(*[given[name] for name in self.arguments])


def bind_marlin(experts: str, device: torch.device) -> MarlinOperator:
    """Find the operator for an experts kernel on a device, and log which it is.

    Raises PlanError where the device is older than sm_80, no package is there or its library does
    not load, or the operator is missing or has another signature.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < MIN_CAPABILITY:
            raise PlanError(
                f"experts {experts} runs on sm_80 and later, and {device} is sm_{major}{minor}; "
                f"use experts: triton"
            )
    for package, namespace in NAMESPACES.items():
        source = f"{package} (loaded before)"
        if not _has_operator(namespace):
            if find_spec(package) is None:
                continue
            source = _load(experts, package)
        operator = _bind(experts, package, namespace, source)
        logger.info("experts %s: bound %s", experts, operator.source)
        return operator
    raise PlanError(
        f"experts {experts} needs the fused Marlin GEMM of the package "
        f"{' or '.join(NAMESPACES)}, and neither is installed; install ep-runtime[marlin] (or vllm "
        f"alone, with pip's --no-deps)"
    )


def _bind(experts: str, package: str, namespace: str, source: str) -> MarlinOperator:
    """The operator of a package that is loaded; PlanError where there is none that is known."""
    cure = "install ep-runtime[marlin] or use experts: triton"
    if not _has_operator(namespace):
        raise PlanError(
            f"experts {experts}: the installed {package} has no operator "
            f"torch.ops.{namespace}.{OPERATOR}; {cure}"
        )
    operator = getattr(getattr(torch.ops, namespace), OPERATOR).default
    own = [argument.name for argument in operator._schema.arguments]
    arguments = tuple(_SPELLINGS.get(name, name) for name in own)
    unknown = [name for name in own if _SPELLINGS.get(name, name) not in KNOWN]
    missing = sorted(_REQUIRED - set(arguments))
    if unknown or missing:
        parts = [f"takes {', '.join(unknown)}"] if unknown else []
        parts += [f"lacks {', '.join(missing)}"] if missing else []
        raise PlanError(
            f"experts {experts}: {package}'s operator {OPERATOR} has another signature than is "
            f"known here: it {' and '.join(parts)}; {cure}"
        )
    return MarlinOperator(operator, arguments, f"{source}, torch.ops.{namespace}.{OPERATOR}")


def _has_operator(namespace: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), OPERATOR)


def _load(experts: str, package: str) -> str:
    """Load a package's operators and say where they are from. PlanError where that fails."""
    try:
        if package == "vllm":
            return _load_vllm_libraries()
        module = import_module(package)
        return f"{package} {getattr(module, '__version__', '')}".strip()
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PlanError(
            f"experts {experts} needs the fused Marlin GEMM, and {package}, which has it, does not "
            f"load: {reason}; install one that was built for torch {torch.__version__}"
        ) from error


def _load_vllm_libraries() -> str:
    """vLLM's MoE operators: in one library since its stable ABI, before that in _moe_C alone."""
    spec = find_spec("vllm")
    folders = [] if spec is None else spec.submodule_search_locations or []
    libraries = sorted(path for folder in folders for path in Path(folder).glob("_moe_C*.so"))
    if not libraries:
        raise ImportError("it has no library _moe_C*.so (a build without CUDA?)")
    for library in libraries:
        torch.ops.load_library(str(library))
    return f"vllm ({', '.join(library.name for library in libraries)})"
