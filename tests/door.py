"""What a test of the core does where a feature's folder was deleted (test_without_features.py)."""

import contextlib
from collections.abc import Iterator

import pytest

from grpo.watch.failures import BadInput

LACKS = "which this checkout lacks"  # how the door refuses a config


@contextlib.contextmanager
def skipping_what_needs_a_deleted_feature() -> Iterator[None]:
    """Skip the test if the block is refused because a folder of grpo/features/ is not here."""
    try:
        yield
    except (ValueError, BadInput) as error:
        if LACKS not in str(error):
            raise
        pytest.skip(str(error))
