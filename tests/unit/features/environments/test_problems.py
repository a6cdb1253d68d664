"""What does not go with an environment, and what one needs."""

import pytest

from grpo.config import GRPOConfig, SFTConfig, change
from grpo.config.checks import validate

TOOLS = {"environment.tools": ("mine.py:look",)}
SEVERAL = {"environment.name": {"one": "x.py:A", "two": "x.py:B"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment.name": "look"}, "environment.name .* 'look', which names no class .* environment.tools"),
        (SEVERAL, "several classes .* need a column .* --data.columns environment COLUMN"),
        (
            TOOLS | {"sampling.carry_over": 1, "algorithm.importance_correction": "truncate"},
            "carry_over does not go with an environment",
        ),
        (TOOLS | {"generator.stop": ("END",)}, "generator.stop, .* an environment: .* use generator.stop_token_ids"),
        (TOOLS | {"data.prompt_template": "{question}"}, "prompt_template .* with an environment: it has no turns"),
        (TOOLS | {"environment.rounds": True, "environment.answer_steps": 4}, "rounds does not go .*answer_steps"),
        ({"algorithm.advantages": "return_to_go"}, "return_to_go needs an environment: .* use rloo"),
    ],
)
def test_what_does_not_go_with_an_environment_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        validate(change(GRPOConfig(), changes))


def test_an_environment_is_reward_enough():
    environment = {"environment.name": "guess.py:Guess", "environment.options": {"high": 4}, "environment.max_turns": 1}
    config = change(GRPOConfig(), environment | {"reward.functions": {}, "sampling.dynamic": True})
    validate(config)
    assert (config.environment.enabled, config.environment.reward_name) == (True, "Guess")
    assert not SFTConfig().environment.enabled
