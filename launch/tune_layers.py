"""Which layers `ep-runtime tune` measures: those of files and checkpoints, or of sizes given."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ep_runtime.config import MoEConfig
from ep_runtime.kernels.base import ExpertsShape
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.packed_weights import is_packed, packed_fault
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.kernels.row_passes import MAX_SLOTS_PER_PASS
from ep_runtime.kernels.tile_checks import TUNED_SCHEMES
from ep_runtime.kernels.tile_tables import TunedLayer
from ep_runtime.launch.explain import read_source
from ep_runtime.launch.tune_list import LIST_FORM, FoundLayer, read_list
from ep_runtime.placement import place_experts
from ep_runtime.selection import experts_shape

_SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k")
# Their groups and zero points are no options.
_NOT_BY_NAME = (WeightScheme.INT4, WeightScheme.INT8)


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
) -> dict[ExpertsShape, str]:
    """The shapes in order, of a rank with the most experts, each with what errors call it.

    sources: run files, lists of layers, checkpoint folders or their config.json. local_experts: of
    a rank; None: what a list says or a run file's parallel.ep_size gives, else all of them.
    A table has each layer once, so layers that are one there are measured once, as the first of
    them, and refused where they would not be measured alike (`_unkeyed`).
    """
    given = sizes.given()
    if sources and given:
        option = next(iter(given)).replace("_", "-")
        raise ConfigError(f"--{option} has no effect beside {sources[0]}; drop one of the two")
    if sources:
        found = [layer for source in sources for layer in _layers_of(source)]
    else:
        found = [_layer_of(given)]
    return _each_once((_shape_of(layer, local_experts), layer.place) for layer in found)


def _each_once(layers: Iterable[tuple[ExpertsShape, str]]) -> dict[ExpertsShape, str]:
    places: dict[ExpertsShape, str] = {}
    first_of_key: dict[TunedLayer, ExpertsShape] = {}
    for shape, place in layers:
        first = first_of_key.setdefault(TunedLayer.of(shape), shape)
        differing = [
            f"{name} {one} and {other}"
            for (name, one), other in zip(
                _unkeyed(first).items(), _unkeyed(shape).values(), strict=True
            )
            if one != other
        ]
        if differing:
            raise ConfigError(
                f"{places[first]} and {place} are one layer in a table, which does not have the "
                f"{'; '.join(differing)} in which they differ; leave one out, tiles of the other "
                f"serve both"
            )
        places.setdefault(first, place)
    return places


def _unkeyed(shape: ExpertsShape) -> dict[str, Any]:
    """What is measured of a layer and is not in a table's `TunedLayer`.

    An activation's numbers (alpha, limit) are not: they change no tiles.
    """
    return {
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "activation": str(shape.activation.kind),
    }


def _layers_of(source: str) -> list[FoundLayer]:
    """The layers of one source."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"{source}: has no config.json, so it is no checkpoint folder; name one, a run "
                f"file or a list of layers"
            )
    elif path.suffix == ".json":
        if not path.is_file():
            raise ConfigError(f"{source}: no such file")
        if path.name != "config.json":
            raise ConfigError(
                f"{source}: of JSON files only a checkpoint's config.json says what its layers "
                f"are; a list of layers is YAML, as {LIST_FORM}"
            )
    elif path.is_file() and (listed := read_list(source)) is not None:
        return listed
    moe, sections = read_source(source, ())
    try:
        placement = place_experts("linear", moe.num_experts, sections.parallel.ep_size)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return [FoundLayer(source, moe, placement.num_local_experts(0))]


def _layer_of(given: dict[str, Any]) -> FoundLayer:
    """The layer that options give."""
    options = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    missing = [name for name in _SIZES if name not in given]
    if missing:
        raise ConfigError(
            f"name a run file or a checkpoint, or give the sizes of a layer; missing: "
            f"{', '.join('--' + name.replace('_', '-') for name in missing)}"
        )
    if given.get("scheme") in _NOT_BY_NAME:
        raise ConfigError(
            f"--scheme {given['scheme']} leaves open how many columns share a scale; list the "
            f"layer in a file, with quantization: {{weight: {given['scheme']}, group_size: 128}}, "
            f"without group_size where a whole row shares one"
        )
    renamed = {"intermediate_size": "moe_intermediate_size", "scheme": "quantization"}
    moe = MoEConfig(**{renamed.get(name, name): value for name, value in given.items()})
    return FoundLayer(" ".join(f"{option} {value}" for option, value in options.items()), moe)


def _shape_of(layer: FoundLayer, local_experts: int | None) -> ExpertsShape:
    """local_experts: the option's; None: not given."""
    moe, place = layer.moe, layer.place
    weight = str(moe.quantization.weight)
    if weight not in TUNED_SCHEMES:
        raise ConfigError(
            f"{place}: weights stored as {weight} have no tiles to tune; those of "
            f"{', '.join(TUNED_SCHEMES)} have"
        )
    if is_packed(moe.quantization) and (fault := packed_fault(moe.quantization)):
        raise ConfigError(
            f"{place}: experts triton has no tiles to tune for the layer: {fault}; leave it out"
        )
    its_own = layer.local_experts
    if local_experts is not None and layer.is_listed and its_own is not None:
        raise ConfigError(
            f"--local-experts ({local_experts}) has no effect on {place}, which gives "
            f"local_experts; drop one of the two"
        )
    name = "local experts" if local_experts is None else "--local-experts"
    number = local_experts if local_experts is not None else its_own
    if number is None:
        number = moe.num_experts
    if not 1 <= number <= moe.num_experts:
        raise ConfigError(
            f"{place}: {name} ({number}) must be 1 to the layer's {moe.num_experts} experts"
        )
    # A bias changes no tiles.
    return replace(experts_shape(moe, number), has_bias=False)


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
