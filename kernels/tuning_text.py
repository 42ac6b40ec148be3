"""Where a layer's tiles come from, for a reader; and whether a table can have an effect on it."""

import triton

from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.hopper_packed_layers import CAPABILITY as HOPPER
from ep_runtime.kernels.hopper_packed_layers import suits_hopper_packed
from ep_runtime.kernels.quant.packed_weights import is_packed
from ep_runtime.kernels.tile_checks import TUNED_SCHEMES
from ep_runtime.kernels.tile_tables import find_points

_HOPPER = "the packed Hopper GEMM, by its own rule"


def tile_table_fault(shape: ExpertsShape, compute_capability: tuple[int, int] | None) -> str | None:
    """Why no table of tiles can have an effect on a layer on such a device; None where one can.

    compute_capability: (9, 0) for sm_90; None: unknown, where a table may have an effect.
    """
    weight = shape.scheme.weight
    if weight not in TUNED_SCHEMES:
        return f"weights stored as {weight} have no tables"
    if compute_capability == HOPPER and suits_hopper_packed(shape):
        return f"weights stored as {weight} run on {_HOPPER}, on sm_90"
    return None


def describe_tuning(
    shape: ExpertsShape, device_name: str, compute_capability: tuple[int, int] | None = None
) -> str:
    """Where the tiles of a layer on such a device come from, with the Triton that is here; of
    packed weights also which GEMM reads them. compute_capability: as of `tile_table_fault`.

    Example: `table NVIDIA_H200.json, near 1, 8, 32 rows an expert; else the rule`.
    """
    on_hopper = suits_hopper_packed(shape)
    if on_hopper and compute_capability == HOPPER:
        return f"{_HOPPER}; tile tables have no effect"
    if fault := tile_table_fault(shape, compute_capability):
        return f"the rule: {fault}"
    text = _describe_tables(shape, device_name)
    if not is_packed(shape.scheme):
        return text
    text = f"the packed Triton GEMM, {text}"
    return f"on sm_90 {_HOPPER}; elsewhere {text}" if on_hopper and not compute_capability else text


def _describe_tables(shape: ExpertsShape, device_name: str) -> str:
    name, points = find_points(shape, device_name, triton.__version__)
    if not points:
        return f"the rule: no table of {device_name} with Triton {triton.__version__} has the layer"
    tuned = [f"{point.rows_per_expert:g}" for point in points if point.tiles is not None]
    if not tuned:
        return f"the rule: table {name} found none faster"
    return f"table {name}, near {', '.join(tuned)} rows an expert; else the rule"
