"""The package deep_ep: which generation of its API is installed, and buffers of that API.

Nothing here imports it before a backend is built. What it needs from whoever starts the process:

- `LD_LIBRARY_PATH` with the folders nvidia/nvshmem/lib and nvidia/nccl/lib of site-packages.
- low-latency mode, which runs on NVSHMEM, also within one host: on a host without InfiniBand
  `NVSHMEM_REMOTE_TRANSPORT=none`, and where the host's name does not resolve
  `NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo` and `NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY=AF_INET`.
  deep_ep itself sets `NVSHMEM_DISABLE_NVLS=1` and its queue sizes; `NVSHMEM_QP_DEPTH` (1024) is
  read, and bounds max_tokens_per_rank.
"""

import logging
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ep_runtime.all2all.base import (
    BackendCapabilities,
    BackendShape,
    EPGroup,
    RoutedTokens,
    shape_fault,
)
from ep_runtime.all2all.expert_ids import IdTable
from ep_runtime.kernels.errors import ConfigError, PlanError, first_line

logger = logging.getLogger(__name__)

# The name that marks each generation of the API, newest first.
GENERATIONS = (("EPBuffer", "V2.5"), ("ElasticBuffer", "V2"), ("Buffer", "V1"))
SUPPORTED_GENERATION = "V1"


def deep_ep_generation(module: ModuleType) -> str | None:
    """V1, V2 or V2.5 by the names a deep_ep module has; None where it is something else."""
    return next((version for name, version in GENERATIONS if hasattr(module, name)), None)


def bind_deep_ep(backend: str) -> ModuleType:
    """Import deep_ep for a backend. Raises PlanError where it is missing, broken or not V1."""
    try:
        module = import_module("deep_ep")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise PlanError(
            f"all2all_backend {backend} needs the package deep_ep, whose import failed: {reason}; "
            f"install ep-runtime[deepep], and put the folders nvidia/nvshmem/lib and "
            f"nvidia/nccl/lib of site-packages on LD_LIBRARY_PATH"
        ) from error
    generation = deep_ep_generation(module)
    if generation != SUPPORTED_GENERATION:
        found = "is not DeepEP: it has no Buffer"
        if generation is not None:
            name = dict((v, n) for n, v in GENERATIONS)[generation]
            found = f"has API generation {generation} (deep_ep.{name}), which is not supported yet"
        raise PlanError(
            f"all2all_backend {backend}: the installed deep_ep {found}; install generation "
            f"{SUPPORTED_GENERATION} (ep-runtime[deepep]) or use all2all_backend: all_to_all"
        )
    return module


def refuse_unfit_shape(backend: BackendCapabilities, shape: BackendShape) -> None:
    """Raise PlanError, naming the key, where DeepEP's kernels cannot serve a layer's shape."""
    fault = shape_fault(backend, shape)
    if fault is not None:
        raise PlanError(f"all2all_backend {backend.name} cannot be used: {fault}")


def open_buffer(module: ModuleType, group: EPGroup, backend: str, **options: Any) -> Any:
    """A `deep_ep.Buffer` of V1 over the group; a collective of it. Ended by `destroy()` alone.

    Its destructor would run a collective barrier, so it is told not to.
    """
    try:
        buffer = module.Buffer(group.process_group, explicitly_destroy=True, **options)
    except (RuntimeError, AssertionError, OSError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"all2all_backend {backend}: deep_ep.Buffer({options}) failed: {reason}; it needs "
            f"NVLink between all GPUs of the EP group, each rank on its own, and in low-latency "
            f"mode NVSHMEM's variables (NVSHMEM_REMOTE_TRANSPORT=none, "
            f"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo, NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY=AF_INET)"
        ) from error
    if group.rank == 0:
        logger.info("%s is bound to deep_ep %s (deep_ep.Buffer)", backend, SUPPORTED_GENERATION)
    return buffer


def expert_numbers(shape: BackendShape, device: torch.device) -> IdTable | None:
    """DeepEP's number of each global expert, int32; None where the two are the same.

    DeepEP holds expert n on rank n // E_local, as its local expert n % E_local.
    """
    placement = shape.placement
    num_local = shape.num_experts // placement.ep_size
    pairs = zip(placement.rank_of, placement.local_id_of, strict=True)
    numbers = [rank * num_local + local_id for rank, local_id in pairs]
    if numbers == list(range(shape.num_experts)):
        return None
    return IdTable(torch.tensor(numbers, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class PaddedTokens:
    """hidden_states: [max(T, 1), H padded] bf16. topk_ids: [max(T, 1), K] int64 in DeepEP's
    numbering, -1: not routed. topk_weights: [max(T, 1), K] float32. num_rows: T.
    num_source_rows: of all ranks together."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    num_rows: int
    num_source_rows: int


def pad_tokens(tokens: RoutedTokens, hidden_size: int) -> PaddedTokens:
    """Rows, ids and weights as DeepEP takes them; of a rank without rows, one that goes nowhere.

    tokens: its ids are DeepEP's numbers already.
    """
    topk_ids, topk_weights = tokens.topk_ids, tokens.topk_weights
    num_rows, top_k = topk_ids.shape
    if num_rows == 0:
        topk_ids, topk_weights = topk_ids.new_full((1, top_k), -1), topk_weights.new_zeros(1, top_k)
    return PaddedTokens(
        hidden_states=padded(tokens.hidden_states, hidden_size, min_rows=1),
        topk_ids=topk_ids.to(torch.int64).contiguous(),
        topk_weights=topk_weights.contiguous(),
        num_rows=num_rows,
        num_source_rows=sum(tokens.rows_per_rank),
    )


def padded(rows: Tensor, hidden_size: int, min_rows: int = 0) -> Tensor:
    """[..., H] rows contiguous with zeros up to hidden_size, and up to min_rows rows."""
    columns = hidden_size - rows.shape[-1]
    missing = max(0, min_rows - rows.shape[-2])
    if columns or missing:
        rows = torch.nn.functional.pad(rows, (0, columns, 0, missing))
    return rows.contiguous()
