"""How often each expert of each layer was used: read from the JSON report of a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ep_runtime.kernels.errors import ConfigError

_KEY = "tokens_per_expert_of_layer"
Loads = dict[int, list[int]]


def read_loads(path: Path, layers: tuple[int, ...], num_experts: int) -> Loads:
    """Decoder layer -> [E] slots that landed on each expert, over all ranks of the run.

    path: what `ep-runtime run` wrote for a checkpoint: `report.json`, or its `--json` file.
    layers, num_experts: the checkpoint's. Raises ConfigError where the file is no such report, or
    one of another model.
    """
    loads: Loads = {}
    for rank in _ranks(path):
        for layer, counts in _counts_of(path, rank).items():
            if len(counts) != num_experts:
                raise ConfigError(
                    f"--statistics {path}: layer {layer} has counts of {len(counts)} experts, and "
                    f"the checkpoint has {num_experts}; give the report of a run of this model"
                )
            sums = loads.setdefault(layer, [0] * num_experts)
            loads[layer] = [a + b for a, b in zip(sums, counts, strict=True)]
    if set(loads) != set(layers):
        raise ConfigError(
            f"--statistics {path}: has counts of the layers {sorted(loads)}, and the checkpoint's "
            f"MoE layers are {list(layers)}; give the report of a run of this model"
        )
    for layer, counts in loads.items():
        if not any(counts):
            raise ConfigError(
                f"--statistics {path}: layer {layer} has no slot on any expert; give the report of "
                f"a run with prompts"
            )
    return loads


def most_used(counts: list[int], num_experts: int) -> tuple[int, ...]:
    """The experts with the most slots, by rising id; of equally used ones the lower ids.

    Example: counts 3, 9, 3, 0 and two experts give 0, 1.
    """
    ranked = sorted(range(len(counts)), key=lambda expert: (-counts[expert], expert))
    return tuple(sorted(ranked[:num_experts]))


def _ranks(path: Path) -> list[Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--statistics {path}: cannot be read as JSON: {error}") from None
    ranks = report.get("ranks") if isinstance(report, Mapping) else None
    if not isinstance(ranks, list) or not ranks:
        raise ConfigError(
            f"--statistics {path}: has no `ranks`; give the report that `ep-runtime run` wrote of "
            f"a checkpoint (report.json in its output_dir)"
        )
    return ranks


def _counts_of(path: Path, rank: Any) -> Loads:
    counts = rank.get(_KEY) if isinstance(rank, Mapping) else None
    if not isinstance(counts, Mapping) or not counts:
        raise ConfigError(
            f"--statistics {path}: its ranks have no `{_KEY}`; give the report of a run of a "
            f"checkpoint by this release (a run of `model.layer` has no layers to count)"
        )
    loads: Loads = {}
    for layer, values in counts.items():
        is_list = isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
        if not str(layer).isdecimal() or not is_list:
            raise ConfigError(
                f"--statistics {path}: {_KEY}.{layer} must be the number of slots of each expert "
                f"of a layer; got {values!r}"
            )
        loads[int(layer)] = values
    return loads
