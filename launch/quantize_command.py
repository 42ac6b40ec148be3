"""`ep-runtime quantize`: a checkpoint whose frequent experts are in NVFP4, the others in NF3."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from ep_runtime.checkpoint import INDEX_FILE, PICKLE_FILES, read_config
from ep_runtime.kernels.errors import CheckpointError, ConfigError
from ep_runtime.kernels.quant.hybrid import HybridFormat, hybrid_config
from ep_runtime.kernels.quant.scheme import QuantScheme, WeightScheme
from ep_runtime.launch.json_file import prepare_json_file, write_json
from ep_runtime.launch.quantize_jobs import Job, TierErrors, make_jobs
from ep_runtime.launch.quantize_report import print_quantization, quantization_report
from ep_runtime.launch.quantize_statistics import most_used, read_loads
from ep_runtime.launch.quantize_writer import (
    ShardWriter,
    TensorSpec,
    cut_into_shards,
    shard_names,
    write_index,
)
from ep_runtime.moe_from_hf import moe_config_from_hf
from ep_runtime.opened_checkpoint import OpenedCheckpoint
from ep_runtime.quantization import read_quantization

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|KiB|MiB|GiB|B)", re.IGNORECASE)
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class HotExperts:
    """How many experts of a layer are in NVFP4: a number, or a share of them; one of the two."""

    number: int | None = None
    share: float | None = None

    def count(self, num_experts: int) -> int:
        """Of a layer of so many. Example: a share of 0.3 of 8 experts is 3."""
        if (self.number is None) == (self.share is None):
            raise ConfigError("give one of --hot (experts of a layer) and --hot-share (0 to 1)")
        if self.number is not None:
            if not 0 <= self.number <= num_experts:
                raise ConfigError(
                    f"--hot ({self.number}) must be from 0 to the {num_experts} experts of a layer"
                )
            return self.number
        share = self.share or 0.0
        if not 0 <= share <= 1:
            raise ConfigError(f"--hot-share ({share:g}) must be from 0 to 1")
        return ceil(share * num_experts - 1e-9)


def quantize_command(
    source: Path,
    output: Path,
    *,
    statistics: Path,
    hot: HotExperts,
    shard_size: str,
    json_file: Path | None,
    console: Console,
) -> None:
    """Write `output` from `source`, a tensor at a time, and report each tier's error and bytes.

    Raises ConfigError or CheckpointError, before anything is written, for what cannot be made.
    config.json comes last, so what is cut short is no checkpoint.
    """
    prepare_json_file(json_file)
    max_bytes = parse_size(shard_size)
    _refuse_family(source)
    opened = OpenedCheckpoint(source, None)
    layers = tuple(opened.moe_of_layer)
    loads = read_loads(statistics, layers, opened.moe.num_experts)
    num_hot = hot.count(opened.moe.num_experts)
    forms = {layer: HybridFormat(most_used(loads[layer], num_hot)) for layer in layers}
    _check_sizes(opened, forms)
    tiers = {WeightScheme.NVFP4: TierErrors(), WeightScheme.NF3: TierErrors()}
    jobs = make_jobs(opened, forms, tiers)
    _prepare_output(output, source)
    with opened.reader:
        files = _write_shards(opened, jobs, output, max_bytes, console)
    values = read_config(source)
    values["quantization_config"] = hybrid_config({n: f.nvfp4_experts for n, f in forms.items()})
    try:
        write_index(output, files)
        _copy_other_files(source, output)
        (output / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{output}: cannot be written: {error}") from error
    report = quantization_report(
        source=source,
        output=output,
        statistics=statistics,
        nvfp4_experts={layer: form.nvfp4_experts for layer, form in forms.items()},
        loads=loads,
        tiers=tiers,
        source_bytes=sum(opened.reader.num_bytes(name) for name in opened.reader.tensors),
        output_bytes=sum(spec.num_bytes for specs in files.values() for spec in specs),
    )
    print_quantization(report, console)
    write_json(json_file, report)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `512MiB`, `800B`; ConfigError for anything else."""
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if size < 1:
        raise ConfigError(f"--shard-size ({text}) must be a size, as 5GB or 512MiB")
    return size


def _refuse_family(source: Path) -> None:
    values = read_config(source)
    cure = "give the checkpoint in bfloat16 that it was made from"
    try:
        quantization = read_quantization(values)
    except ConfigError as error:
        raise ConfigError(f"{source}: is quantised already, {cure}; besides, {error}") from None
    if quantization is not None:
        raise ConfigError(f"{source}: is quantised already ({quantization.method}); {cure}")
    moe = moe_config_from_hf(values)
    if moe.expert_bias:
        raise ConfigError(
            f"{source}: model_type {values.get('model_type')} has experts with biases, which "
            f"{WeightScheme.HYBRID} does not store"
        )


def _check_sizes(opened: OpenedCheckpoint, forms: Mapping[int, HybridFormat]) -> None:
    scheme: QuantScheme = next(iter(forms.values())).scheme
    opened.moe.with_quantization(scheme)  # a ConfigError that names the size


def _prepare_output(output: Path, source: Path) -> None:
    try:
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            is_cut_short = output.is_dir() and not (output / "config.json").exists()
            found = ", without a config.json, so cut short or no checkpoint" if is_cut_short else ""
            raise ConfigError(
                f"{output}: is there already{found}; give a folder that is new or empty"
            )
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be made: {error}") from None


def _write_shards(
    opened: OpenedCheckpoint,
    jobs: Sequence[Job],
    output: Path,
    max_bytes: int,
    console: Console,
) -> dict[str, list[TensorSpec]]:
    """File -> its tensors."""
    sized = [(job, sum(spec.num_bytes for spec in job.specs)) for job in jobs]
    shards = list(cut_into_shards(sized, max_bytes))
    files: dict[str, list[TensorSpec]] = {}
    columns = (TextColumn("quantising"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(size for _, size in sized))
        for file, shard in zip(shard_names(len(shards)), shards, strict=True):
            specs = files[file] = [spec for job in shard for spec in job.specs]
            try:
                with ShardWriter(output / file, specs) as writer:
                    for name, tensor in _tensors(opened, shard):
                        writer.write(name, tensor)
                        bar.advance(task, tensor.numel() * tensor.element_size())
            except OSError as error:
                raise CheckpointError(f"{output / file}: cannot be written: {error}") from error
    return files


def _tensors(opened: OpenedCheckpoint, jobs: Sequence[Job]) -> Iterator[tuple[str, Any]]:
    with torch.no_grad():
        for job in jobs:
            yield from job.tensors(opened.reader)


def _copy_other_files(source: Path, output: Path) -> None:
    """What is no weight and not rewritten: the tokenizer's files, generation_config.json."""
    for path in sorted(source.iterdir()):
        is_weight = path.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        is_written = path.name in ("config.json", INDEX_FILE, *PICKLE_FILES)
        if path.is_file() and not is_weight and not is_written:
            shutil.copyfile(path, output / path.name)
