"""The examples in docstrings are true: those of grpo/ that need no GPU, engine or network to be imported."""

import doctest
import importlib
import pathlib

import pytest

MODULES = [path for path in sorted(pathlib.Path("grpo").rglob("*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_examples_in_docstrings_are_true(path):
    module = importlib.import_module(".".join(path.with_suffix("").parts))
    seen = doctest.testmod(module)
    assert seen.attempted
    assert not seen.failed


def test_many_rooms_have_examples():
    assert len({path.parts[1] for path in MODULES}) >= 7
