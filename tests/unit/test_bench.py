"""What benches import is there; the shapes of random models."""

import ast
import importlib.util
import sys

import pytest

from tests.torchrun import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))

import random_checkpoint


@pytest.mark.parametrize(
    "name", [name for name, shape in random_checkpoint.SHAPES.items() if "qwen2" in shape.values()]
)
def test_heads_of_a_random_qwen2_are_as_wide_as_vllm_takes_them_to_be(name):
    """vLLM divides, whatever config.json says, and reads the first rows of weights that are too large."""
    shape = {"head_dim": random_checkpoint.HEAD_DIM} | random_checkpoint.SHAPES[name]
    assert shape["head_dim"] * shape["num_attention_heads"] == shape["hidden_size"]


@pytest.mark.parametrize("file", sorted((ROOT / "tests/bench").glob("*.py")), ids=lambda file: file.stem)
def test_what_a_bench_imports_of_the_project_is_there(file):
    """Most of them no test runs."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and importlib.util.find_spec(node.module.partition(".")[0]):
            module = importlib.import_module(node.module)
            missing = [name.name for name in node.names if not hasattr(module, name.name)]
            assert not any(importlib.util.find_spec(f"{node.module}.{name}") is None for name in missing), missing
        elif isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] in {"trl"}, node.module
