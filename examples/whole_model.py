"""A Hugging Face checkpoint, expert-parallel: next tokens of each rank's own prompts.

python examples/whole_model.py [CHECKPOINT]
torchrun --nproc-per-node 2 examples/whole_model.py [CHECKPOINT]

Without a checkpoint, a tiny one with random weights is written first and text is read as bytes.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch.distributed as dist

import ep_runtime as ep
from ep_runtime.models import greedy_generate
from ep_runtime.tiny import write_tiny_checkpoint

PROMPTS = ["The experts of a layer", "are spread over the ranks.", "Each rank has its own prompts."]


def checkpoint_for(ctx: ep.EPContext) -> Path:
    """The one the user named, else a tiny one that rank 0 writes while the others wait."""
    if len(sys.argv) > 1:
        return Path(sys.argv[1])
    folder = [tempfile.mkdtemp(prefix="tiny_moe_") if ctx.rank == 0 else ""]
    if ctx.rank == 0:
        write_tiny_checkpoint("qwen2_moe", folder[0], seed=0)
    if ctx.world_size > 1:
        dist.broadcast_object_list(folder)
    return Path(folder[0])


def encode(texts: list[str], checkpoint: Path) -> list[list[int]]:
    if not (checkpoint / "tokenizer_config.json").is_file():
        return [list(text.encode()) for text in texts]
    from transformers import AutoTokenizer

    return [AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"] for text in texts]


def main() -> None:
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    with ep.init_distributed(ep.ParallelConfig(dp_size=num_ranks)) as ctx:
        checkpoint = checkpoint_for(ctx)
        model = ep.load_model(checkpoint, ctx)
        prompts = encode(PROMPTS[ctx.dp_rank :: ctx.parallel.dp_size], checkpoint)
        output = greedy_generate(model, ctx, prompts, max_new_tokens=8)
        if ctx.rank == 0:
            print(model.plan.explain())
        for prompt, tokens in zip(prompts, output.tokens, strict=True):
            print(f"rank {ctx.rank}: {len(prompt)} tokens go on with {tokens}")


if __name__ == "__main__":
    main()
