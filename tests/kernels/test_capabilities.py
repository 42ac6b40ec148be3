"""What kernels declare about themselves is backed by something."""

import ast
from pathlib import Path

import pytest

from ep_runtime.kernels.base import Concurrency
from ep_runtime.kernels.registry import experts_class

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["reference", "triton", "triton_batched"])
def test_a_certified_kernel_names_a_test_that_exists(name: str) -> None:
    capabilities = experts_class(name).capabilities
    assert capabilities.name == name
    certified = [r for r in capabilities.concurrency if r.concurrency is Concurrency.CERTIFIED]
    assert certified
    for rule in certified:
        path, test = rule.evidence.split("::")
        tree = ast.parse((ROOT / path).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
