"""What the layers tuned for an H200 and the small ones compiled for them would launch.

Run as `python -m tests.launch.small_layers_gate` in a process without TRITON_INTERPRET; needs no
GPU. Prints one JSON list of {layer, tiles, of_layer, of_small}: of both projections the kernel's
name, and of each argument what Triton compiles it for.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_runtime.kernels import triton_experts
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.packed_schedule import PackedExpertsTiles, PackedTiles
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.kernels.tile_tables import SHIPPED_TABLES
from ep_runtime.kernels.tiles import ExpertsTiles, GemmTiles
from ep_runtime.launch.tune_compile import small_shape
from ep_runtime.launch.tune_layers import TuneSizes, layers_to_tune
from tests.kernels.compile_gate import catch_launches, run_triton_experts

GEMM = GemmTiles(128, 128, num_warps=4, num_stages=3, swap_operands=True)
PACKED_GEMM = PackedTiles(64, num_warps=4, num_stages=3)
TILES = {
    "triton": ExpertsTiles(16, GEMM, GEMM),
    "hopper": ExpertsTiles(128, GEMM, GEMM, is_hopper=True),
}
PACKED_TILES = {"packed": PackedExpertsTiles(16, PACKED_GEMM, PACKED_GEMM)}


def specialisation(kernel: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> list[Any]:
    """The kernel's name, and of each argument what Triton compiles it for."""
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | keywords
    found = {}
    for parameter in kernel.params:
        value = values.get(parameter.name)
        if isinstance(value, Tensor):
            found[parameter.name] = str(value.dtype)
        elif isinstance(value, TensorDescriptor | GluonDescriptor):
            found[parameter.name] = f"{value.base.dtype} {value.block_shape}"
        elif isinstance(value, int) and not parameter.is_constexpr:
            is_looked_at = not parameter.do_not_specialize
            found[parameter.name] = str(is_looked_at and (value == 1, value % 16 == 0))
        else:
            found[parameter.name] = str(value)
    return [kernel.__name__, found]


def projections(shape: ExpertsShape, tiles: ExpertsTiles | PackedExpertsTiles) -> list[list[Any]]:
    """Of one call on such tiles."""
    choice = "choose_tiles_of_packed" if is_packed(shape.scheme) else "choose_tiles"
    with patch.object(triton_experts, choice, lambda *given: tiles):
        launches = catch_launches(partial(run_triton_experts, shape, 32, with_num_rows=False))
    found = [specialisation(*launch) for launch in launches]
    return [one for one in found if "project" in one[0]]


def main() -> None:
    report = []
    listed = layers_to_tune([str(SHIPPED_TABLES / "NVIDIA_H200.yaml")], TuneSizes(), None)
    for shape in listed:
        for name, tiles in (PACKED_TILES if is_packed(shape.scheme) else TILES).items():
            entry = {"layer": str(shape), "tiles": name, "of_layer": projections(shape, tiles)}
            report.append({**entry, "of_small": projections(small_shape(shape), tiles)})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
