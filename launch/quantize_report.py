"""What `ep-runtime quantize` made: each tier's error and bytes, as JSON values and as a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ep_runtime.kernels.quant.scheme import WeightScheme
from ep_runtime.launch.environment import describe_versions
from ep_runtime.launch.quantize_jobs import TierErrors
from ep_runtime.launch.quantize_statistics import Loads
from ep_runtime.plan_text import format_bytes

SCHEMA_VERSION = 1


def quantization_report(
    *,
    source: Path,
    output: Path,
    statistics: Path,
    nvfp4_experts: Mapping[int, tuple[int, ...]],
    loads: Loads,
    tiers: Mapping[WeightScheme, TierErrors],
    source_bytes: int,
    output_bytes: int,
) -> dict[str, Any]:
    """JSON values. slots_in_nvfp4: the share of a layer's routed slots that landed on its experts
    in NVFP4, by the statistics."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": "quantize",
        "environment": describe_versions(),
        "source": str(source),
        "output": str(output),
        "statistics": str(statistics),
        "method": str(WeightScheme.HYBRID),
        "tiers": {
            str(tier): {
                "num_experts": errors.num_experts,
                "num_weights": errors.num_weights,
                "bytes": errors.num_bytes,
                "source_bytes": errors.source_bytes,
                "bits_per_weight": errors.bits_per_weight,
                "relative_error": errors.relative_error,
            }
            for tier, errors in tiers.items()
        },
        "layers": {
            str(layer): {
                "nvfp4_experts": list(experts),
                "slots_in_nvfp4": sum(loads[layer][e] for e in experts) / sum(loads[layer]),
            }
            for layer, experts in nvfp4_experts.items()
        },
        "bytes": {"source": source_bytes, "output": output_bytes},
    }


def print_quantization(report: dict[str, Any], console: Console) -> None:
    columns = ("tier", "experts", "weights", "bytes", "before", "bits a weight", "relative error")
    table = Table(*columns, title="Routed experts, all layers")
    for name, tier in report["tiers"].items():
        table.add_row(
            name,
            str(tier["num_experts"]),
            str(tier["num_weights"]),
            format_bytes(tier["bytes"]),
            format_bytes(tier["source_bytes"]),
            f"{tier['bits_per_weight']:.2f}",
            f"{tier['relative_error']:.4f}",
        )
    console.print(table)
    shares = [layer["slots_in_nvfp4"] for layer in report["layers"].values()]
    first = next(iter(report["layers"].values()))
    console.print(
        f"{len(first['nvfp4_experts'])} experts of each of {len(shares)} layers are in nvfp4; they "
        f"took {min(shares):.0%} to {max(shares):.0%} of a layer's slots",
        highlight=False,
    )
    sizes = report["bytes"]
    console.print(
        f"{report['output']}: {format_bytes(sizes['output'])}, from "
        f"{format_bytes(sizes['source'])}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
