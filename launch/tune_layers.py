"""Which layers `ep-runtime tune` measures: those of files and checkpoints, or of sizes given.

A file that lists layers is YAML, each with the keys of a run's `model.layer` and local_experts:

    layers:
      - {hidden_size: 4096, moe_intermediate_size: 1536, num_experts: 128, top_k: 8,
         local_experts: 64, quantization: fp8_block}
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.packed_weights import is_packed, packed_fault
from ep_runtime.kernels.row_passes import MAX_SLOTS_PER_PASS
from ep_runtime.kernels.tile_checks import TUNED_SCHEMES
from ep_runtime.launch.explain import read_source
from ep_runtime.launch.yaml_file import read_yaml_mapping
from ep_runtime.placement import place_experts
from ep_runtime.selection import experts_shape
from ep_runtime.strict_model import StrictModel

_YAML_SUFFIXES = (".yaml", ".yml")
_SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k")


class ListedLayer(MoEConfig):
    """A layer of a list. local_experts: of one rank; None: all of them."""

    local_experts: int | None = Field(default=None, gt=0, strict=True)


class LayerList(StrictModel):
    """A file that lists layers."""

    layers: tuple[ListedLayer, ...]


@dataclass(frozen=True)
class TuneSizes:
    """The options that stand for a layer without a file; None: not given."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    scheme: str | None = None
    dtype: str | None = None
    activation: str | None = None

    def given(self) -> dict[str, Any]:
        """Those that were."""
        return {name: value for name, value in vars(self).items() if value is not None}


def layers_to_tune(
    sources: Sequence[str], sizes: TuneSizes, local_experts: int | None
) -> tuple[ExpertsShape, ...]:
    """The shapes, each once, in order; of a rank with the most experts.

    sources: run files, lists of layers, checkpoint folders or their config.json. local_experts: of
    a rank; None: what a list says or a run file's parallel.ep_size gives, else all of them.
    """
    given = sizes.given()
    if sources and given:
        option = next(iter(given)).replace("_", "-")
        raise ConfigError(f"--{option} has no effect beside {sources[0]}; drop one of the two")
    if not sources:
        missing = [name for name in _SIZES if name not in given]
        if missing:
            raise ConfigError(
                f"name a run file or a checkpoint, or give the sizes of a layer; missing: "
                f"{', '.join('--' + name.replace('_', '-') for name in missing)}"
            )
        found: list[tuple[MoEConfig, int | None]] = [(_moe_of(given), None)]
    else:
        found = [layer for source in sources for layer in _layers_of(source)]
    shapes = [
        _shape_of(moe, its_own if local_experts is None else local_experts)
        for moe, its_own in found
    ]
    return tuple(dict.fromkeys(shapes))


def _layers_of(source: str) -> list[tuple[MoEConfig, int | None]]:
    """The layers of one source and how many experts a rank has of each; None: all of them."""
    path = Path(source).expanduser()
    if path.suffix in _YAML_SUFFIXES and path.is_file():
        values = read_yaml_mapping(path)
        if "layers" in values:
            try:
                listed = LayerList(**values)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
            return [(layer, layer.local_experts) for layer in listed.layers]
    moe, sections = read_source(source, ())
    placement = place_experts("linear", moe.num_experts, sections.parallel.ep_size)
    return [(moe, placement.num_local_experts(0))]


def _moe_of(given: dict[str, Any]) -> MoEConfig:
    renamed = {"intermediate_size": "moe_intermediate_size", "scheme": "quantization"}
    return MoEConfig(**{renamed.get(name, name): value for name, value in given.items()})


def _shape_of(moe: MoEConfig, local_experts: int | None) -> ExpertsShape:
    weight = str(moe.quantization.weight)
    if weight not in TUNED_SCHEMES:
        raise ConfigError(
            f"weights stored as {weight} have no tiles to tune; those of "
            f"{', '.join(TUNED_SCHEMES)} have"
        )
    if is_packed(moe.quantization) and (fault := packed_fault(moe.quantization)):
        raise ConfigError(f"experts triton has no tiles to tune for the layer: {fault}")
    if local_experts is None:
        local_experts = moe.num_experts
    if not 1 <= local_experts <= moe.num_experts:
        raise ConfigError(
            f"local experts ({local_experts}) must be 1 to the layer's {moe.num_experts} experts"
        )
    # A bias changes no tiles.
    return replace(experts_shape(moe, local_experts), has_bias=False)


def num_source_rows(rows_per_expert: float, shape: ExpertsShape) -> int:
    """Rows routed on all ranks for about so many expected rows an expert, at least 1.

    No more than one pass of the triton experts has, into which larger calls are cut.
    Example: 4 rows an expert, 256 experts, top-8: 128.
    """
    num_experts = shape.num_experts or shape.num_local_experts
    rows = round(rows_per_expert * num_experts / shape.top_k)
    # Those that land here: with at least one of K slots on a local expert.
    landing = 1.0 - (1.0 - shape.num_local_experts / num_experts) ** shape.top_k
    most = int(MAX_SLOTS_PER_PASS / shape.top_k / landing)
    return max(1, min(rows, most))


def parse_rows_per_expert(text: str) -> tuple[float, ...]:
    """`1,4,16.5` as numbers above 0, rising, each once."""
    try:
        numbers = sorted({float(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise ConfigError(f"--rows-per-expert {text!r} must be numbers above 0, as 1,4,16")
    return tuple(numbers)
