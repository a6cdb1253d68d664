"""What benches import is there."""

import ast
import importlib.util
import sys

import pytest

from tests.torchrun import ROOT

sys.path.append(str(ROOT / "tests" / "bench"))


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
