"""`check: layer`: how far a layer may be off, and that one which computes on fp8 rows passes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ep_runtime.config import MoEConfig, ParallelConfig
from ep_runtime.distributed import init_distributed
from ep_runtime.launch.layer_job import LayerJob, layer_checks, layer_tolerance
from ep_runtime.launch.run_config import load_run_config
from ep_runtime.machine import PRESETS
from ep_runtime.plan import resolve_plan
from tests.launch.configs import ONE_RANK, write_config


@pytest.mark.parametrize(
    ("moe", "parallel", "limit"),
    [
        ({"dtype": "float32"}, {}, 1e-5),
        ({}, {}, 1e-2),
        ({}, {"dispatch_dtype": "fp8"}, 6e-2),
        ({"quantization": "fp8_block"}, {"dispatch_dtype": "model"}, 6e-2),
        ({"quantization": "fp8_channel"}, {}, 6e-2),
        ({"quantization": "nvfp4"}, {}, 1e-2),
        # The reference multiplies what the weights are, dequantised, with the rows as they are.
        ({"quantization": "fp8_block", "experts": "reference"}, {}, 1e-2),
    ],
)
def test_the_limit_goes_by_what_is_rounded_to_fp8(
    moe: dict[str, Any], parallel: dict[str, Any], limit: float
) -> None:
    values = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "top_k": 2}
    keys = {**values, "dtype": "bfloat16", **moe}
    experts = keys.pop("experts", "auto")
    config = MoEConfig.model_validate(keys)
    ranks = ParallelConfig(dp_size=2, device="cuda", **parallel)
    plan = resolve_plan(config, ranks, PRESETS["h200x8"], experts=experts)
    assert layer_tolerance(plan) == limit


@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_channel"])
def test_a_layer_that_computes_on_fp8_rows_passes_its_check(scheme: str, tmp_path: Path) -> None:
    """The products of fp8 rows are further off than those of bfloat16 may be."""
    text = ONE_RANK.replace("float32", f"bfloat16, quantization: {scheme}")
    config = load_run_config(write_config(tmp_path, text), ["kernel.experts=triton", "check=layer"])
    assert config.model.layer is not None
    with init_distributed(config.parallel) as ctx:
        plan, result = LayerJob(config, config.model.layer, ctx).run()
    checks = {check.name: check for check in layer_checks(config, plan, [result])}
    error = checks["layer: relative error"]
    assert error.limit == 6e-2
    assert 1e-2 < error.value < 6e-2
    assert all(check.passed for check in checks.values())


def test_an_output_that_the_next_call_changes_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_run_config(write_config(tmp_path, ONE_RANK), [])
    assert config.model.layer is not None
    call, kept = LayerJob._call, list[torch.Tensor]()

    def reuse(*given: Any) -> torch.Tensor:
        kept.append(call(*given))
        if len(kept) == 2:
            kept[0].zero_()
        return kept[-1]

    monkeypatch.setattr(LayerJob, "_call", reuse)
    with init_distributed(config.parallel) as ctx:
        plan, result = LayerJob(config, config.model.layer, ctx).run()
    first = layer_checks(config, plan, [result])[0]
    assert (first.name, first.value, first.passed) == ("layer: relative error", 1.0, False)
