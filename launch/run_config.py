"""The run's YAML file as values, and the command line's `--set` merged over it.

Relative paths in the file (model.checkpoint, workload.prompts, kernel.tile_table) are relative to
the file; those given with --set, and output_dir, are relative to the current directory.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, StrictInt, model_validator

from ep_runtime.config import MoEConfig, ParallelConfig, SharedExpertsConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.launch.yaml_file import parse_yaml, read_yaml_mapping
from ep_runtime.strict_model import InvalidValues, StrictModel

MAX_SEED = 2**32 - 1  # random generators take 64 bits, of which ranks and layers use some
SHIPPED_CONFIGS = Path(__file__).parent / "configs"
_ALIASES = {
    ("parallel", "data_parallel_size"): "dp_size",
    ("parallel", "tensor_parallel_size"): "tp_size",
    ("parallel", "expert_parallel_size"): "ep_size",
}
# Of each of these, a file has exactly one; one given with --set takes the place of the file's.
_ALTERNATIVES = {
    "model": ("checkpoint", "tiny", "layer"),
    "workload": ("prompts", "tokens_per_rank"),
}
_PATHS = {("model", "checkpoint"), ("workload", "prompts"), ("kernel", "tile_table")}


class TinyModel(StrictModel):
    """A tiny checkpoint with random weights, written before the ranks start."""

    family: str
    seed: int = Field(default=0, ge=0, le=MAX_SEED, strict=True)


class ModelSection(StrictModel):
    """What is run: a Hugging Face directory, a tiny checkpoint, or one layer."""

    checkpoint: str | None = None
    tiny: TinyModel | None = None
    layer: MoEConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _exactly_one(self, "model")
        return self

    @property
    def is_layer(self) -> bool:
        return self.layer is not None


class KernelSection(StrictModel):
    """The experts kernel. tile_table: a file of `ep-runtime tune`, looked up before the shipped."""

    experts: str = "auto"
    tile_table: str | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tile_table is not None and self.experts == "reference":
            raise ValueError(
                "tile_table has no effect with experts: reference, which has no tiles; drop one"
            )
        return self


class WorkloadSection(StrictModel):
    """What the ranks are fed.

    prompts: a text file, one prompt a line, shared out over the DP ranks (some may get none).
    tokens_per_rank: random rows (a layer) or one random prompt (a model) per DP rank; 0: none.
    seed: of a layer's weights and of random tokens. routing: where a layer's rows go.
    """

    prompts: str | None = None
    tokens_per_rank: list[StrictInt] | None = None
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED, strict=True)
    routing: Literal["model", "balanced", "hotspot", "zipf"] = "model"
    max_new_tokens: int = Field(default=0, ge=0, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _default_seed(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("prompts") is None:
            return {**values, "seed": 0} if values.get("seed") is None else values
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        _exactly_one(self, "workload")
        if self.tokens_per_rank is not None and min(self.tokens_per_rank, default=0) < 0:
            raise ValueError(f"tokens_per_rank ({self.tokens_per_rank}) must be 0 or more each")
        return self


class RunConfig(StrictModel):
    """One `ep-runtime run`; see the keys in docs/design.md, section 6.

    check: default `layer` for a layer, `logits` for a checkpoint. Logits are compared with a model
    whose rows are exact, so then `parallel.dispatch_dtype: auto` is `model`.
    """

    parallel: ParallelConfig = ParallelConfig()
    model: ModelSection
    kernel: KernelSection = KernelSection()
    shared_experts: SharedExpertsConfig = SharedExpertsConfig()
    workload: WorkloadSection
    check: Literal["off", "layer", "logits"] = "off"
    output_dir: str = "runs"

    @model_validator(mode="before")
    @classmethod
    def _default_check(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if values.get("check") is None:
            model = values.get("model")
            is_layer = isinstance(model, dict) and model.get("layer") is not None
            values = {**values, "check": "layer" if is_layer else "logits"}
        parallel = values.get("parallel") or {}
        is_auto = isinstance(parallel, dict) and parallel.get("dispatch_dtype") in (None, "auto")
        if values["check"] == "logits" and is_auto:
            values = {**values, "parallel": {**parallel, "dispatch_dtype": "model"}}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        faults = list(_contradictions(self))
        if faults:
            raise InvalidValues(faults)
        return self

    def to_yaml(self) -> str:
        """A file that `load_run_config` reads back as this."""
        values = self.model_dump(mode="json", exclude_none=True)
        return yaml.safe_dump(values, sort_keys=False)


def _contradictions(config: RunConfig) -> list[tuple[tuple[str, ...], str]]:
    """Keys that contradict one another or would have no effect, each with its path."""
    faults: list[tuple[tuple[str, ...], str]] = []
    workload, dp_size = config.workload, config.parallel.dp_size
    counts = workload.tokens_per_rank
    if counts is not None and len(counts) != dp_size:
        faults.append(
            (
                ("workload", "tokens_per_rank"),
                f"has {len(counts)} numbers; parallel.dp_size ({dp_size}) needs one per DP rank",
            )
        )
    if config.model.is_layer:
        if workload.prompts is not None:
            faults.append(
                (
                    ("workload", "prompts"),
                    "has no effect on model.layer, which has no vocabulary; use tokens_per_rank",
                )
            )
        if workload.max_new_tokens:
            faults.append(
                (
                    ("workload", "max_new_tokens"),
                    f"({workload.max_new_tokens}) has no effect on model.layer; drop it",
                )
            )
        if config.check == "logits":
            faults.append((("check",), "logits needs a checkpoint; model.layer takes off or layer"))
        return faults
    if workload.routing != "model":
        faults.append(
            (
                ("workload", "routing"),
                f"{workload.routing} has no effect on a checkpoint, whose own router decides; "
                f"drop it or use model.layer",
            )
        )
    if workload.prompts is not None and workload.seed is not None:
        faults.append((("workload", "seed"), "has no effect with workload.prompts; drop it"))
    if config.check == "logits" and config.parallel.dispatch_dtype == "fp8":
        faults.append(
            (
                ("parallel", "dispatch_dtype"),
                "(fp8) contradicts check: logits, which compares with exact rows; drop one",
            )
        )
    if config.check == "layer":
        faults.append((("check",), "layer needs model.layer; a checkpoint takes off or logits"))
    return faults


def _exactly_one(section: StrictModel, name: str) -> None:
    given = [key for key in _ALTERNATIVES[name] if getattr(section, key) is not None]
    if len(given) != 1:
        wanted, got = ", ".join(_ALTERNATIVES[name]), ", ".join(given) or "none"
        raise ValueError(f"needs exactly one of {wanted}; got {got}")


def find_config(name: str | Path) -> Path:
    """The file itself, or the shipped one of that bare name; else a ConfigError."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(
            f"{name} is a folder; give a YAML file, in which `model: {{checkpoint: {name}}}` names "
            f"it if it holds a checkpoint"
        )
    shipped = sorted(p.name for p in SHIPPED_CONFIGS.glob("*.yaml"))
    if path.name == str(name) and path.name in shipped:
        return SHIPPED_CONFIGS / path.name
    near = get_close_matches(path.name, shipped, n=1)
    hint = f"did you mean the shipped {near[0]!r}?" if near else f"shipped: {', '.join(shipped)}"
    raise ConfigError(f"{name}: no such file; {hint}")


def load_run_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a file (or a shipped one by its bare name) with `key.path=value` merged over it.

    Raises ConfigError naming each wrong key with its full path.
    """
    file = find_config(path)
    values = read_yaml_mapping(file)
    try:
        values = _named(values, relative_to=file.resolve().parent)
        given = parse_overrides(overrides)
        merged = merge_overrides(values, given)
        config = RunConfig(**merged)
    except ConfigError as error:
        with_set = "".join(f" --set {override}" for override in overrides)
        raise ConfigError(f"{file}{with_set}: {error}") from None
    return config


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["parallel.dp_size=2"]` as `{"parallel": {"dp_size": 2}}`; values are YAML.

    Aliases become the canonical keys and paths absolute, from the current directory.
    """
    values: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {override!r} must read key=value, as parallel.dp_size=2")
        try:
            value = parse_yaml(text)
        except ConfigError as error:
            raise ConfigError(f"--set {override!r}: {error}") from None
        *sections, last = key.split(".")
        place: Any = values
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or last in place:
            raise ConfigError(f"--set {override!r}: the key {key!r} is given twice; drop one")
        place[last] = value
    return _named(values, relative_to=Path.cwd())


def merge_overrides(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`given` over `values`, section by section; neither is changed.

    Of keys that exclude one another (model.tiny, model.checkpoint) the given one stays.
    """
    kept = dict(values)
    for section, alternatives in _ALTERNATIVES.items():
        chosen, old = given.get(section), values.get(section)
        if isinstance(chosen, dict) and isinstance(old, dict) and set(chosen) & set(alternatives):
            dropped = set(alternatives) - set(chosen)
            kept[section] = {key: value for key, value in old.items() if key not in dropped}
    return _merge(kept, given)


def _merge(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in given.items():
        old = merged.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _named(values: dict[str, Any], relative_to: Path) -> dict[str, Any]:
    """The same values under their canonical keys, paths made absolute."""
    named = dict(values)
    for section, body in values.items():
        if not isinstance(body, dict):
            continue
        new: dict[str, Any] = {}
        for key, value in body.items():
            name = _ALIASES.get((section, key)) or str(key)
            if name in new:
                raise ConfigError(f"{section}.{key}: given twice, as {name} too; drop one")
            if (section, name) in _PATHS and isinstance(value, str):
                value = str(relative_to / Path(value).expanduser())
            new[name] = value
        named[section] = new
    return named
