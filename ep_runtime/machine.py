"""What a plan needs to know of the machine; detected, or named for one that is not here."""

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

import torch

from ep_runtime.kernels.errors import ConfigError

OPTIONAL_PACKAGES = ("deep_ep", "deep_gemm", "vllm", "sgl_kernel")
_NEEDED = {"name", "device_type", "triton"}


class TritonMode(StrEnum):
    COMPILED = "compiled"  # for the CUDA device
    INTERPRETER = "interpreter"  # on a CPU, for tests: right, and very slow
    UNUSABLE = "unusable"  # on a CPU without TRITON_INTERPRET=1, or not installed


@dataclass(frozen=True)
class Machine:
    """One rank's device and what is installed; equal on all ranks, or their plans differ.

    device_memory_bytes: of one device; None where unknown, and no part of a plan's digest.
    packages: importable optional ones. num_devices: CUDA devices of one host, 0 on a CPU.
    nvlink: whether NVLink joins every two of them; None where that could not be asked.
    compute_capability: of the CUDA device, (9, 0) for sm_90; None on a CPU and where unknown.
    """

    name: str
    device_type: str
    triton: TritonMode
    device_memory_bytes: int | None = None
    packages: tuple[str, ...] = ()
    num_devices: int = 0
    nvlink: bool | None = None
    compute_capability: tuple[int, int] | None = None

    @classmethod
    def detect(cls, device_type: str) -> "Machine":
        """Look at this machine, for ranks on `device_type` ("cpu" or "cuda")."""
        packages = tuple(name for name in OPTIONAL_PACKAGES if importlib.util.find_spec(name))
        if device_type == "cuda":
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            return cls(
                name=properties.name,
                device_type="cuda",
                triton=_triton_mode(on_cpu=False),
                device_memory_bytes=properties.total_memory,
                packages=packages,
                num_devices=torch.cuda.device_count(),
                nvlink=_all_joined_by_nvlink(torch.cuda.device_count()),
                compute_capability=(properties.major, properties.minor),
            )
        return cls(
            name="cpu", device_type="cpu", triton=_triton_mode(on_cpu=True), packages=packages
        )

    @classmethod
    def preset(cls, name: str) -> "Machine":
        """A machine by name, for plans of machines that are not here."""
        if name not in PRESETS:
            raise ConfigError(
                f"machine {name!r} is unknown; choose one of: {', '.join(PRESETS)}, or give the "
                f"JSON file that `ep-runtime doctor --json FILE` writes"
            )
        return PRESETS[name]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Machine":
        """The inverse of `to_dict`.

        Raises ConfigError for a key that is unknown or missing, and naming one whose value has
        another form.
        """
        if not isinstance(values, dict):
            raise ConfigError(f"machine is {values!r}; it must be a mapping of its keys")
        known = {field.name for field in fields(cls)}
        if set(values) - known or not set(values) >= _NEEDED:
            raise ConfigError(
                f"machine has the keys {sorted(values)}; needed are name, device_type, triton, "
                f"allowed besides are {', '.join(sorted(known - _NEEDED))}"
            )
        for key, value in values.items():
            has_form, form = _FORMS[key]
            if not has_form(value):
                raise ConfigError(f"machine.{key} is {value!r}; it must be {form}")
        capability = values.get("compute_capability")
        return cls(
            name=values["name"],
            device_type=values["device_type"],
            triton=TritonMode(values["triton"]),
            device_memory_bytes=values.get("device_memory_bytes"),
            packages=tuple(values.get("packages", ())),
            num_devices=values.get("num_devices", 0),
            nvlink=values.get("nvlink"),
            compute_capability=None if capability is None else (capability[0], capability[1]),
        )

    def to_dict(self) -> dict[str, Any]:
        capability = self.compute_capability
        return asdict(self) | {
            "packages": list(self.packages),
            "compute_capability": None if capability is None else list(capability),
        }


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_list(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(is_one, value))


# Of each key: whether a value has its form in JSON, and that form for a reader.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda v: isinstance(v, str) and v != "", "a text"),
    "device_type": (lambda v: v in ("cpu", "cuda"), "cpu or cuda"),
    "triton": (lambda v: v in tuple(TritonMode), f"one of: {', '.join(TritonMode)}"),
    "device_memory_bytes": (
        lambda v: v is None or _is_whole(v, 1),
        "a whole number of 1 or more, or null",
    ),
    "packages": (lambda v: _is_list(v, lambda one: isinstance(one, str)), "a list of texts"),
    "num_devices": (lambda v: _is_whole(v, 0), "a whole number of 0 or more"),
    "nvlink": (lambda v: v is None or isinstance(v, bool), "true, false or null"),
    "compute_capability": (
        lambda v: v is None or (_is_list(v, lambda one: _is_whole(one, 0)) and len(v) == 2),
        "two whole numbers, as [9, 0], or null",
    ),
}

PRESETS = {
    "cpu": Machine(name="cpu", device_type="cpu", triton=TritonMode.INTERPRETER),
    "h200x8": Machine(
        name="NVIDIA H200",
        device_type="cuda",
        triton=TritonMode.COMPILED,
        device_memory_bytes=143_771 * 2**20,  # nvidia-smi's 143771 MiB
        num_devices=8,
        nvlink=True,
        compute_capability=(9, 0),
    ),
}


def _triton_mode(*, on_cpu: bool) -> TritonMode:
    if importlib.util.find_spec("triton") is None:
        return TritonMode.UNUSABLE
    from ep_runtime.kernels.interpreter import is_interpreting

    if is_interpreting():
        return TritonMode.INTERPRETER
    return TritonMode.UNUSABLE if on_cpu else TritonMode.COMPILED


def _all_joined_by_nvlink(num_devices: int) -> bool | None:
    """Whether every two devices of this host have NVLink between them."""
    from torch._C import _distributed_c10d
    from torch._C._autograd import DeviceType

    detect = getattr(_distributed_c10d, "_detect_dma_connectivity", None)
    if detect is None:
        return None
    try:
        matrix = detect(DeviceType.CUDA, "nvlink").matrix
    except RuntimeError:
        return None  # the driver does not tell
    pairs = ((a, b) for a in range(num_devices) for b in range(num_devices) if a != b)
    return all(matrix[a][b] > 0 for a, b in pairs)
