"""The package deep_gemm: which generation of its API is installed, and its two grouped GEMMs.

Nothing here imports it before weights are prepared. What it needs from whoever starts the process:
a CUDA toolkit with `nvcc`, or headers and `DG_JIT_USE_NVRTC=1`, since it compiles each GEMM when it
is first launched, into `DG_JIT_CACHE_DIR` (so the first launch is not one to capture). `CUDA_HOME`
names the toolkit where `nvcc` is not on the path.

Both GEMMs multiply e4m3 by e4m3 with a float32 scale for every 1 x 128 of the rows and every
128 x 128 of the weights, sum in float32 and round to bfloat16. Neither waits for the device.

Shapes: P positions, E local experts, C rows of each of them, N output columns, K input columns,
G = K / 128 groups.
"""

from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ep_runtime.kernels.errors import PlanError

PACKAGE = "deep_gemm"
# The name that marks each generation of the API, newest first.
GENERATIONS = (
    ("m_grouped_fp8_gemm_nt_contiguous", "V2"),
    ("m_grouped_gemm_fp8_fp8_bf16_nt_contiguous", "V1"),
)
SUPPORTED_GENERATION = "V2"
# Rows of one block on sm_90: an expert's run of positions, and its capacity, are multiples of it.
ALIGNMENT = 128
CAPABILITY = (9, 0)  # of the devices whose scales are float32, as ours are
_USED = (
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "get_mk_alignment_for_contiguous_layout",
)


def deep_gemm_generation(module: ModuleType) -> str | None:
    """V1 or V2 by the names a deep_gemm module has; None where it is something else."""
    return next((version for name, version in GENERATIONS if hasattr(module, name)), None)


def bind_deep_gemm(experts: str, device: torch.device) -> "DeepGemm":
    """Import deep_gemm for an experts kernel on a device.

    Raises PlanError where it is missing, broken or not V2, or the device is not of sm_90.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else CAPABILITY
    if capability != CAPABILITY:
        raise PlanError(
            f"experts {experts} runs on sm_90 (H100, H200), and {device} is "
            f"sm_{capability[0]}{capability[1]}, where deep_gemm wants scales in another form; use "
            f"experts: triton"
        )
    try:
        module = import_module(PACKAGE)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise PlanError(
            f"experts {experts} needs the package deep_gemm, whose import failed: {reason}; "
            f"install ep-runtime[deepgemm], and set CUDA_HOME to a CUDA toolkit"
        ) from error
    generation = deep_gemm_generation(module)
    missing = [name for name in _USED if not hasattr(module, name)]
    if generation != SUPPORTED_GENERATION or missing:
        found = "is not DeepGEMM: it has no grouped GEMM"
        if generation is not None:
            found = f"has API generation {generation}, without {', '.join(missing)}"
        raise PlanError(
            f"experts {experts}: the installed deep_gemm {found}; install generation "
            f"{SUPPORTED_GENERATION} (ep-runtime[deepgemm]) or use experts: triton"
        )
    return DeepGemm(module, experts)


@dataclass(frozen=True)
class DeepGemm:
    """The package's two grouped GEMMs. experts: who calls, for messages."""

    module: ModuleType
    experts: str

    def multiply_contiguous(
        self,
        rows: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        position_experts: Tensor,
        *,
        out: Tensor,
    ) -> None:
        """out[p] = rows[p] @ weights[position_experts[p]].T, for runs of whole blocks an expert.

        rows: [P, K] e4m3 contiguous, and [P, G] float32 with strides (1, P); P is a multiple of
        ALIGNMENT. weights: [E, N, K] e4m3 and [E, ceil(N / 128), G] float32, both contiguous.
        position_experts: [P] int32, one expert in each block; -1 of padding, which reads rows and
        writes numbers that nobody needs: 0 wherever a whole half block is padding.
        out: [P, N] bfloat16 contiguous, written whole.
        """
        self._refuse_other_alignment()
        self.module.m_grouped_fp8_gemm_nt_contiguous(
            rows, weights, out, position_experts, disable_ue8m0_cast=True
        )

    def multiply_masked(
        self,
        rows: tuple[Tensor, Tensor],
        weights: tuple[Tensor, Tensor],
        counts: Tensor,
        *,
        expected_rows: int,
        out: Tensor,
    ) -> None:
        """out[e, i] = rows[e, i] @ weights[e].T for i below counts[e].

        rows: [E, C, K] e4m3 contiguous, and [E, C, G] float32 with strides (G * C, 1, C); C is a
        multiple of ALIGNMENT: a block that went past C would write to the next expert's rows.
        weights: as of `multiply_contiguous`. counts: [E] int32, none above C. expected_rows: of an
        expert, at least 1; which block sizes are chosen goes by it, no result does. out: [E, C, N]
        bfloat16 contiguous; whole blocks are written, unspecified numbers from counts[e] on.
        """
        self.module.m_grouped_fp8_gemm_nt_masked(
            rows, weights, out, counts, expected_rows, disable_ue8m0_cast=True
        )

    def _refuse_other_alignment(self) -> None:
        """It is a setting of the process; another one would give each block a wrong expert."""
        alignment = self.module.get_mk_alignment_for_contiguous_layout()
        if alignment != ALIGNMENT:
            raise PlanError(
                f"experts {self.experts} needs deep_gemm's alignment for the contiguous layout at "
                f"{ALIGNMENT}, its value on sm_90, and something in this process has set it to "
                f"{alignment}; call deep_gemm.set_mk_alignment_for_contiguous_layout({ALIGNMENT})"
            )
