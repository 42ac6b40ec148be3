"""`check: logits` of a quantised checkpoint, by what the experts kernel multiplies."""

from pathlib import Path

import pytest

from ep_runtime.distributed import init_distributed
from ep_runtime.launch.model_job import FP8_LOGIT_LIMIT, LOGIT_LIMIT, model_checks, run_model
from ep_runtime.launch.run_config import load_run_config
from tests.ep_runtime.quantized_checkpoints import quantized_checkpoint
from tests.launch.configs import TINY, write_config


@pytest.mark.parametrize(("experts", "in_fp8"), [("triton", True), ("reference", False)])
def test_an_fp8_checkpoint_passes_its_check(experts: str, in_fp8: bool, tmp_path: Path) -> None:
    """Held to what fp8 rows allow, or, on exact rows, to equal tokens too."""
    checkpoint = quantized_checkpoint("qwen3_moe_fp8_block")
    text = TINY.replace("{tiny: {family: qwen2_moe, seed: 1}}", f"{{checkpoint: {checkpoint}}}")
    path = write_config(tmp_path, text.replace("dp_size: 2", "dp_size: 1"), "ONE PROMPT\n")
    config = load_run_config(path, [f"kernel.experts={experts}", "workload.max_new_tokens=2"])
    with init_distributed(config.parallel) as ctx:
        model, result, outcome = run_model(config, ctx, ctx.world_group)
        is_in_fp8 = any(layer.plan.multiplies_fp8_rows for layer in model.moe_layers)
        checks = model_checks(config, outcome, [result], has_shared=False, in_fp8=is_in_fp8)
    assert is_in_fp8 is in_fp8
    logits = checks[0]
    assert logits.limit == (FP8_LOGIT_LIMIT if in_fp8 else LOGIT_LIMIT)
    assert (logits.value > LOGIT_LIMIT) is in_fp8
    assert len(checks) == (2 if in_fp8 else 4)
    assert all(check.passed for check in checks)
