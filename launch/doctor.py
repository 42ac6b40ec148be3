"""`ep-runtime doctor`: what this machine has, and what of this package it can use."""

from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ep_runtime.all2all.registry import backend_class, backend_names
from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.kernels.errors import PlanError
from ep_runtime.kernels.quant.scheme import UNQUANTISED, QuantScheme, WeightScheme
from ep_runtime.kernels.registry import experts_class, experts_names
from ep_runtime.launch.environment import (
    describe_deep_ep,
    describe_devices,
    describe_mpi,
    describe_versions,
)
from ep_runtime.machine import Machine
from ep_runtime.plan import resolve_plan
from ep_runtime.plan_text import format_bytes

SCHEMA_VERSION = 1


def diagnose() -> dict[str, Any]:
    """Everything as JSON values; `machine` is what `Machine.from_dict` reads back."""
    machine = Machine.detect("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": machine.to_dict(),
        "environment": describe_versions(),
        "devices": describe_devices(),
        "mpi": describe_mpi(),
        "deep_ep": describe_deep_ep(),
        "backends": [_verdict(name, _backend_fault(name, machine)) for name in backend_names()],
        "experts": [_verdict(name, experts_fault(name, machine)) for name in experts_names()],
    }


def _verdict(name: str, fault: str | None) -> dict[str, Any]:
    return {"name": name, "usable": fault is None, "reason": fault}


def _backend_fault(name: str, machine: Machine) -> str | None:
    """Why no layer can use a backend here: what the resolver says of a small layer."""

    def plan() -> None:
        limit = backend_class(name).capabilities.max_ep_size
        parallel = ParallelConfig(dp_size=2 if limit is None else limit, all2all_backend=name)
        resolve_plan(_probe_layer("bfloat16", "silu"), parallel, machine)

    return _fault_of(plan)


def experts_fault(name: str, machine: Machine) -> str | None:
    """Why no layer can use a kernel there: what the resolver says of a layer that it takes."""

    def plan() -> None:
        capabilities = experts_class(name).capabilities
        dtypes = {str(dtype).removeprefix("torch.") for dtype in capabilities.dtypes}
        layer = _probe_layer(
            min(dtypes), min(capabilities.activations), _probe_scheme(capabilities.schemes)
        )
        # No more rows than the smallest of kernels takes.
        resolve_plan(layer, ParallelConfig(max_tokens_per_rank=8), machine, experts=name)

    return _fault_of(plan)


def _probe_scheme(schemes: frozenset[WeightScheme]) -> QuantScheme:
    """How the weights of a layer that is planned to ask a kernel are stored."""
    if WeightScheme.NONE in schemes:
        return UNQUANTISED
    weight = min(schemes)
    group_size = 128 if weight in (WeightScheme.INT4, WeightScheme.INT8) else None
    hot = (0,) if weight is WeightScheme.HYBRID else ()
    return QuantScheme(weight, group_size, nvfp4_experts=hot)


def _probe_layer(dtype: str, activation: str, quantization: QuantScheme = UNQUANTISED) -> MoEConfig:
    names: dict[str, Any] = {
        "dtype": dtype,
        "activation": activation,
        "quantization": quantization,
    }
    return MoEConfig(
        hidden_size=128,
        moe_intermediate_size=128,
        num_experts=8,
        top_k=2,
        **names,
    )


def _fault_of(plan: Callable[[], None]) -> str | None:
    try:
        plan()
    except PlanError as error:
        # The resolver's own sentence, without the name, which the table has in its first column.
        return str(error).partition(" cannot be used: ")[2] or str(error)
    except ImportError as error:
        return str(error)
    return None


def print_diagnosis(diagnosis: dict[str, Any], console: Console) -> None:
    """Tables for a reader."""
    devices = Table("device", "name", "memory", "reaches directly", title="Devices")
    for device in diagnosis["devices"]:
        peers = ", ".join(f"cuda:{peer}" for peer in device.get("peers", ()))
        memory = format_bytes(device["memory_bytes"])
        devices.add_row(device["device"], device["name"], memory, peers or "-")
    console.print(devices)

    software = Table("software", "found", title="Software")
    versions = diagnosis["environment"]
    for name in ("python", "torch", "cuda", "nccl", "transformers"):
        software.add_row(name, versions[name] or "none")
    triton = versions["triton"]
    software.add_row("triton", f"{triton}, {diagnosis['machine']['triton']}" if triton else "none")
    deep_ep = diagnosis["deep_ep"]
    found = f"generation {deep_ep['generation']}" if deep_ep["installed"] else "not installed"
    software.add_row("deep_ep", deep_ep.get("fault", found))
    packages = [name for name in diagnosis["machine"]["packages"] if name != "deep_ep"]
    software.add_row("packages of kernels", ", ".join(packages) or "none")
    mpi = diagnosis["mpi"]
    software.add_row("mpi4py", mpi["mpi4py"] or "not installed")
    software.add_row("MPI library", mpi["library"] or mpi.get("library_fault", "none"))
    software.add_row("mpirun", mpi["mpirun"] or "not on PATH")
    console.print(software)

    for kind in ("backends", "experts"):
        table = Table(kind, "usable", "why not", title=f"Usable {kind}")
        for verdict in diagnosis[kind]:
            usable = "yes" if verdict["usable"] else "no"
            table.add_row(verdict["name"], usable, verdict["reason"] or "-")
        console.print(table)
