"""Which files go with a feature's folder, and what a test of the core does where that was deleted."""

import contextlib
import pathlib
from collections.abc import Iterator

import pytest

from grpo import features
from grpo.watch.failures import BadInput
from tests import ROOT

LACKS = "which this checkout lacks"  # how the door refuses a config
# What goes with each folder besides it and tests/unit/features/NAME
ALSO = {
    "agents": ["tests/e2e/test_agents.py", "tests/e2e/tiny_agents.py"],
    "environments": ["tests/e2e/test_environments.py"],
    "hub": [],
    "machine": [],
    "programs": [],
    "qwen3_5": [],
    "reward_model": [
        "tests/e2e/test_reward_model.py",
        "tests/dist/test_reward_model.py",
        "tests/dist/programs/reward_model.py",
    ],
    "show": [],
    "trial": [],
    "wandb": [],
}


def goes_with(feature: str) -> list[str]:
    """Paths from the root that are deleted with a feature."""
    return [f"grpo/features/{feature}", f"tests/unit/features/{feature}", *ALSO[feature]]


DELETED = [name for name in features.FEATURES if name not in features.present()]
GONE = [ROOT / path for name in DELETED for path in goes_with(name)]


def is_gone(path: pathlib.Path) -> bool:
    """Whether a file or folder went with a deleted feature."""
    path = path.resolve()
    return any(path.is_relative_to(gone) for gone in GONE)


@contextlib.contextmanager
def skipping_what_needs_a_deleted_feature() -> Iterator[None]:
    """Skip the test if the block is refused because a folder of grpo/features/ is not here."""
    try:
        yield
    except (ValueError, BadInput) as error:
        if LACKS not in str(error):
            raise
        pytest.skip(str(error))
