"""Each MoE layer of quantised checkpoints in bfloat16, with given ids, on 1, 2 and 4 ranks.

Against the layer, in float32, of the plain checkpoint that the writer's own dequantisation gives.
Of a fixture, which has no such one, against the same checkpoint loaded in float32, whose logits are
those of the writer's weights (test_quantized_models.py, test_quantized_integers.py).
"""

from functools import cache

import pytest
from torch import Tensor

from ep_runtime.config import ParallelConfig
from tests.ep_runtime.quantized_checkpoints import (
    FROM_OTHERS,
    INTEGERS,
    INTEGERS_FROM_OTHERS,
    WRITTEN,
    plain_checkpoint,
    quantized_checkpoint,
)
from tests.ep_runtime.quantized_layers import ROWS, outputs_of_layers
from tests.harness import run_ranks
from tests.tolerances import relative_error

MAX_ERROR = 1e-2
BACKENDS = {1: "auto", 2: "naive", 4: "all_to_all"}  # by number of ranks
FIXTURES = (*FROM_OTHERS, *INTEGERS_FROM_OTHERS)
NAMES = (*WRITTEN, *INTEGERS, *FIXTURES)


def parallel(num_ranks: int) -> ParallelConfig:
    return ParallelConfig(
        dp_size=num_ranks,
        all2all_backend=BACKENDS[num_ranks],
        device="cpu",
        max_tokens_per_rank=8,
        dispatch_dtype="model",
    )


@cache
def expected() -> dict[str, list[list[Tensor]]]:
    """By name, layer and rank whose rows they are; on one rank."""
    paths = {
        name: str(quantized_checkpoint(name) if name in FIXTURES else plain_checkpoint(name))
        for name in NAMES
    }
    found: list[dict[str, list[list[Tensor]]]] = run_ranks(
        outputs_of_layers, parallel(1), paths, "float32", timeout=120
    )
    return found[0]


@cache
def results_on(num_ranks: int) -> list[dict[str, list[list[Tensor]]]]:
    paths = {name: str(quantized_checkpoint(name)) for name in NAMES}
    return run_ranks(outputs_of_layers, parallel(num_ranks), paths, "bfloat16", timeout=120)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_ranks", BACKENDS)
def test_a_layer_computes_what_the_writers_weights_do(num_ranks: int, name: str) -> None:
    num_layers = 0
    for rank, by_name in enumerate(results_on(num_ranks)):
        whose = [rank] if num_ranks > 1 else range(len(ROWS))
        for of_layer, outputs in zip(expected()[name], by_name[name], strict=True):
            num_layers += 1
            for output, other in zip(outputs, whose, strict=True):
                assert output.shape == of_layer[other].shape
                error = relative_error(output, of_layer[other])
                assert error <= MAX_ERROR, f"rows of rank {other}: {error:.1e}"
    assert num_layers >= num_ranks
