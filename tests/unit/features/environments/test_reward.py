"""What an environment adds to the reward of an episode, and what its value says of passing."""

import pytest

from grpo import features
from grpo.algorithm.groups import pass_rate, pass_values
from grpo.config import GRPOConfig
from grpo.config.recipes import change
from grpo.report.rollout_metrics import evaluation_metrics
from grpo.rewards.pool import RewardError, check_lost, with_rewards
from grpo.run.scorer import passing_parts
from grpo.types import Rollout
from tests.rollouts import completion

OUTAGE = "turn: look: ConnectionResetError"


@pytest.mark.parametrize(
    ("weights", "of_function", "value", "reward"),
    [
        ((2.0, 0.5), 1.0, 3.0, 6.5),
        ((2.0, 0.5), 1.0, None, 0.5),
        ((2.0, 0.5), None, 3.0, 6.0),
        ((2.0, 0.5), None, None, None),
        ((0.0, 0.5), 1.0, 3.0, 0.5),
        ((0.0, 0.5), None, 3.0, None),  # what only measures is no reward
        ((2.0, 0.0), 1.0, None, None),  # nor is a function's
        ((0.0, 0.0), 1.0, 3.0, 0.0),
    ],
)
def test_the_reward_of_an_episode(weights, of_function, value, reward):
    fields = {"environment.weight": weights[0], "reward.functions": {"math_reward": weights[1]}}
    scored = of_episode({"environment.name": "a.py:Game"} | fields, of_function, reward=value)
    assert scored.reward == reward and scored.rewards == {"Game": value, "math_reward": of_function}


@pytest.mark.parametrize("field", [{"environment.name": "a.py:Game"}, {"environment.tools": ("calculator",)}])
def test_an_episode_that_was_lost_has_no_reward_with_a_class_or_without(field):
    """Functions would give 0 for a conversation that an outage ended. Half of a step may be lost, not more."""
    assert of_episode(field).reward is not None
    lost = of_episode(field, failure=OUTAGE)
    assert lost.reward is None and list(lost.failures.values()) == [OUTAGE]
    with pytest.raises(RewardError, match=f"2 of 3 episodes were lost; the first: {OUTAGE}"):
        check_lost([lost, lost, of_episode(field)])


@pytest.mark.parametrize(
    ("of_class", "failure", "accuracy"),
    [
        (1.0, "", 1.0),
        (0.5, "", 0.0),
        (None, "", 1.0),  # a class without get_reward: by the first function, which gave 1
        (None, OUTAGE, 0.0),
    ],
)
def test_an_episode_passes_by_its_class_or_without_get_reward_by_the_first_function(of_class, failure, accuracy):
    fields = {"environment.name": "a.py:Game", "reward.functions": {"math_reward": 1.0}}
    scored = [of_episode(fields, reward=of_class, failure=failure)]
    functions = passing_parts(change(GRPOConfig(), fields))
    metrics = evaluation_metrics(scored, scored * 2, 2, functions)
    assert metrics["eval/accuracy"] == metrics["eval/pass_at_2"] == accuracy
    assert pass_rate(pass_values(scored, functions), 1.0) == (None if failure else accuracy)


def of_episode(fields: dict, of_function: float | None = 1.0, **episode: object) -> Rollout:
    """Return an episode as it is scored by these fields. of_function: what math_reward gives it."""
    config = change(GRPOConfig(), fields)
    episode = {"reward": 1.0, "failure": ""} | episode
    rollout = completion([], episode=episode, text="text")
    said = {name: part.values([rollout], "")[0] for name, part in features.call(config, "reward_part", config)}
    return with_rewards(rollout, said | {"math_reward": (of_function, "")}, config.reward_weights)
