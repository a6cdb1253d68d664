"""Completions are the same in any order, and what is carried over goes on as one completion."""

import pytest

from tests.tiny_models import make_tiny
from tests.torchrun import torchrun


@pytest.mark.parametrize("tensor_parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_order_does_not_matter_and_pieces_join(tmp_path, tensor_parallel):
    """On two replicas, and on one of two ranks, which must end a call at the same step."""
    folder = make_tiny(tmp_path, "qwen3-tied")
    print(torchrun("tests/dist/programs/tails.py", folder, tensor_parallel, nproc=2))
