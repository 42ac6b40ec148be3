"""What `ep-runtime bench` measures: the keys of its YAML file, and its options over them.

Each key is an option too: `top_k` is `--top-k`. A key that takes a list takes one value as well;
an option's list has commas.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BeforeValidator, Field, model_validator

from ep_runtime.config import MAX_TIMEOUT_S, MoEConfig, ParallelConfig
from ep_runtime.kernels.errors import ConfigError
from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.launch.run_config import MAX_SEED
from ep_runtime.launch.yaml_file import read_yaml_mapping
from ep_runtime.strict_model import InvalidValues, StrictModel

DispatchDtype = Literal["auto", "model", "fp8"]
Part = Literal["dispatch", "combine", "dispatch_combine", "experts", "shared", "layer"]
RoutingKind = Literal["balanced", "random", "zipf", "hotspot", "model"]
DEFAULT_RANKS = 2
LIST_KEYS = (
    *("backends", "dispatch_dtype", "parts", "tokens_per_rank", "hidden_size", "num_experts"),
    *("top_k", "moe_intermediate_size", "dtype", "quantization", "routing"),
)
# Schemes that ask for a group size.
_INTEGER = (str(WeightScheme.INT4), str(WeightScheme.INT8))


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


Positive = Annotated[int, Field(gt=0)]
ItemT = TypeVar("ItemT")
# One value or several.
Several = Annotated[tuple[ItemT, ...], Field(min_length=1), BeforeValidator(_as_list)]


@dataclass(frozen=True)
class Candidate:
    """A backend by name, and the `dispatch_dtype` that it is asked to send rows in."""

    backend: str
    dispatch_dtype: DispatchDtype = "auto"

    @property
    def label(self) -> str:
        """Example: symm_mem, symm_mem fp8."""
        is_plain = self.dispatch_dtype == "auto"
        return self.backend if is_plain else f"{self.backend} {self.dispatch_dtype}"


class BenchConfig(StrictModel):
    """One `ep-runtime bench`.

    ranks: of one EP group. backends: None for every registered one; one that cannot run is told
    of with its reason. dispatch_dtype: each backend is measured with each. mode: graph replays
    CUDA graphs for those backends that can be captured.
    max_tokens_per_rank: what buffers are built for; None: the largest of tokens_per_rank.
    tokens_per_rank .. routing: every combination is a case. quantization: of the routed experts,
    a scheme's name, and with fp8_block of the shared expert; group_size: of those in int4 and int8.
    routing `model`: the layer's router.
    num_shared_experts: 0: none. rounds: in each, every backend is measured once. iterations: timed
    calls (or replays) in a round. warmup: calls before the first round.
    """

    ranks: int = Field(default=DEFAULT_RANKS, gt=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    backends: Several[str] | None = None
    dispatch_dtype: Several[DispatchDtype] = ("auto",)
    experts: str = "auto"
    mode: Literal["eager", "graph"] = "eager"
    parts: Several[Part] = ("dispatch", "combine", "dispatch_combine", "experts", "shared", "layer")
    tokens_per_rank: Several[Positive] = (1, 8, 32, 128)
    hidden_size: Several[Positive] = (1024,)
    num_experts: Several[Positive] = (16,)
    top_k: Several[Positive] = (4,)
    moe_intermediate_size: Several[Positive] = (512,)
    num_shared_experts: int = Field(default=1, ge=0)
    dtype: Several[Literal["float32", "bfloat16", "float16"]] = ("bfloat16",)
    quantization: Several[str] = (str(WeightScheme.NONE),)
    group_size: int | None = Field(default=None, strict=True)
    routing: Several[RoutingKind] = ("random",)
    max_tokens_per_rank: int | None = Field(default=None, gt=0)
    rounds: int = Field(default=5, gt=0)
    iterations: int = Field(default=20, gt=0)
    warmup: int = Field(default=3, gt=0)
    seed: int = Field(default=0, ge=0, le=MAX_SEED)
    timeout_s: float = Field(default=600, gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)
    output_dir: str = "runs/bench"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in LIST_KEYS:
            twice = [v for v, count in Counter(getattr(self, key) or ()).items() if count > 1]
            if twice:
                raise InvalidValues([((key,), f"has {twice[0]!r} twice; drop one")])
        limit, most = self.max_tokens_per_rank, max(self.tokens_per_rank)
        if limit is not None and limit < most:
            raise ValueError(
                f"max_tokens_per_rank ({limit}) must be at least the largest of tokens_per_rank "
                f"({most})"
            )
        if self.parts == ("shared",) and self.num_shared_experts == 0:
            raise ValueError(
                "parts (shared) has nothing to measure: num_shared_experts is 0; set it to 1"
            )
        if self.group_size is not None and not set(_INTEGER) & set(self.quantization):
            raise ValueError(
                f"group_size ({self.group_size}) is of {' and '.join(_INTEGER)}, and quantization "
                f"is {', '.join(self.quantization)}; drop it"
            )
        list(self.layers())
        return self

    def layers(self) -> Iterator[MoEConfig]:
        """The layer of every combination of sizes, dtype and quantization."""
        sizes = (self.hidden_size, self.num_experts, self.top_k, self.moe_intermediate_size)
        kinds = (self.dtype, self.quantization)
        for dtype, scheme, hidden, num_experts, top_k, width in product(*kinds, *sizes):
            stored: Any = scheme
            if scheme in _INTEGER:
                stored = {"weight": scheme, "group_size": self.group_size}
            has_fp8_shared = scheme == WeightScheme.FP8_BLOCK and self.num_shared_experts > 0
            of_shared: Any = scheme if has_fp8_shared else None
            yield MoEConfig(
                hidden_size=hidden,
                moe_intermediate_size=width,
                num_experts=num_experts,
                top_k=top_k,
                num_shared_experts=self.num_shared_experts,
                dtype=dtype,
                quantization=stored,
                shared_quantization=of_shared,
            )

    def parallel(self, candidate: Candidate | None = None) -> ParallelConfig:
        """The ranks, and what their buffers are built for; with a candidate's two keys."""
        candidate = candidate or Candidate("auto")
        return ParallelConfig(
            dp_size=self.ranks,
            device=self.device,
            all2all_backend=candidate.backend,
            dispatch_dtype=candidate.dispatch_dtype,
            max_tokens_per_rank=self.max_tokens_per_rank or max(self.tokens_per_rank),
            timeout_s=self.timeout_s,
        )

    def to_yaml(self) -> str:
        """A file that `load_bench_config` reads back as this."""
        return yaml.safe_dump(self.model_dump(mode="json", exclude_none=True), sort_keys=False)


def load_bench_config(name: str | None, options: Mapping[str, object]) -> BenchConfig:
    """A file's keys with the options that are not None over them.

    name: a YAML file; None: the defaults. An option of a list's key may hold commas.
    Raises ConfigError naming the file's key or the option, its value and what is wanted.
    """
    values: dict[str, Any] = {}
    if name is not None:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{name}: no such file; a clone has some in benchmarks/")
        values = read_yaml_mapping(path)
    given = {key: value for key, value in options.items() if value is not None}
    for key in LIST_KEYS:
        if isinstance(given.get(key), str):
            given[key] = [part.strip() for part in str(given[key]).split(",")]
    try:
        return BenchConfig(**{**values, **given})
    except InvalidValues as error:
        where = "" if name is None else f"{name}: "
        texts = [_told(path, text, given, where) for path, text in error.faults]
        raise ConfigError("; ".join(texts)) from None


def _told(path: tuple[str, ...], text: str, given: Mapping[str, object], where: str) -> str:
    """A fault under the name that the user wrote: the option's, or the file's key."""
    if path and path[0] in given:
        return f"{option_of(path[0])}: {text}"
    return f"{where}{'.'.join(path)}: {text}" if path else f"{where}{text}"


def option_of(key: str) -> str:
    """Example: top_k is given as --top-k."""
    return f"--{key.replace('_', '-')}"
