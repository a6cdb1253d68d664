"""What is refused before rows are read."""

import pathlib

import pytest

from grpo.config import GRPOConfig, change
from grpo.rewards.pool import EPISODE_COLUMNS
from grpo.run.inputs import check_functions

FILE = """
def scored(completions, **columns):
    return [1.0] * len(completions)


class Silent:
    def reset(self, **row):
        pass

    def reply(self, text):
        return None
"""


def test_a_column_that_rewards_would_get_otherwise_is_refused(tmp_path: pathlib.Path):
    """Except the prompt's and the one that names a row's environment, which others read too."""
    mine = tmp_path / "mine.py"
    mine.write_text(FILE)
    alone = change(GRPOConfig(), {"reward.functions": {f"{mine}:scored": 1.0}})
    with_environment = change(alone, {"environment.name": f"{mine}:Silent"})
    for name in EPISODE_COLUMNS:
        check_functions(change(alone, {"data.columns": {name: name}}))
        with pytest.raises(ValueError, match=f"has {name}, but with an environment .* --data.columns my_{name} {name}"):
            check_functions(change(with_environment, {"data.columns": {name: name}}))
        with pytest.raises(ValueError, match=f"has {name}, but"):
            check_functions(with_environment, ["prompt", name])  # of data.row
    check_functions(change(with_environment, {"data.prompt_column": "messages"}))
    with pytest.raises(ValueError, match="has completion_ids, but"):
        check_functions(change(alone, {"data.columns": {"completion_ids": "ids"}}))
