"""What holds for every test."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Begin with the same random numbers of torch, whichever tests ran before."""
    torch.manual_seed(0)
