"""What is installed and what devices there are, for `doctor` and for reports."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from typing import Any

import torch
import torch.distributed as dist

from ep_runtime.all2all.deepep_package import deep_ep_generation


def describe_versions() -> dict[str, Any]:
    """Versions of this process's software; None for what is not installed."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "ep_runtime": package_version("ep-runtime"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "triton": package_version("triton"),
        "transformers": package_version("transformers"),
    }


def package_version(name: str) -> str | None:
    """A distribution's version, None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def nccl_version() -> str | None:
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def describe_devices() -> list[dict[str, Any]]:
    """The CPU, then each CUDA device with its memory and the devices it can address directly."""
    cpu: dict[str, Any] = {
        "name": platform.processor() or platform.machine(),
        "device": "cpu",
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [cpu]
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        peers = [
            other
            for other in range(count)
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        devices.append(
            {
                "name": properties.name,
                "device": f"cuda:{index}",
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "peers": peers,
            }
        )
    return devices


def describe_mpi() -> dict[str, Any]:
    """mpi4py's version, its MPI library and mpirun; asked without starting MPI."""
    facts: dict[str, Any] = {
        "mpi4py": package_version("mpi4py"),
        "library": None,
        "mpirun": shutil.which("mpirun", path=_search_path()),
    }
    if facts["mpi4py"] is not None:
        import mpi4py

        mpi4py.rc.initialize = False
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            facts["library_fault"] = " ".join(str(error).split())
        else:
            facts["library"] = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    return facts


def _search_path() -> str:
    """PATH, then the folder of this interpreter, where a virtual environment's mpirun is."""
    return os.pathsep.join([os.environ.get("PATH", ""), os.path.dirname(sys.executable)])


def describe_deep_ep() -> dict[str, Any]:
    """Whether DeepEP is there and which generation of its API; importing it may fail."""
    if importlib.util.find_spec("deep_ep") is None:
        return {"installed": False, "generation": None}
    try:
        import deep_ep
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return {"installed": True, "generation": None, "fault": " ".join(str(error).split())}
    return {"installed": True, "generation": deep_ep_generation(deep_ep) or "unknown"}
