"""Run configurations as text, small enough for a busy CPU."""

from pathlib import Path

LAYER = """\
parallel: {dp_size: 2, device: cpu, max_tokens_per_rank: 4}
model:
  layer: {hidden_size: 32, moe_intermediate_size: 16, num_experts: 5, top_k: 2,
          num_shared_experts: 1, dtype: float32}
workload: {tokens_per_rank: [7, 0]}
output_dir: out
"""
ONE_RANK = LAYER.replace("dp_size: 2", "dp_size: 1").replace("[7, 0]", "[7]")
TINY = """\
parallel: {dp_size: 2, device: cpu}
model: {tiny: {family: qwen2_moe, seed: 1}}
workload: {prompts: prompts.txt, max_new_tokens: 3}
output_dir: out
"""


def write_config(folder: Path, text: str, prompts: str = "one prompt\n") -> Path:
    """run.yaml with its prompts.txt beside it."""
    (folder / "prompts.txt").write_text(prompts)
    path = folder / "run.yaml"
    path.write_text(text)
    return path
