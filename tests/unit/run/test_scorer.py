"""What the start says about completions, and what the environment adds to a reward."""

from dataclasses import replace

import pytest

from configs.examples import toys
from grpo.algorithm.groups import pass_rate, pass_values
from grpo.config import DataConfig, GRPOConfig
from grpo.config.recipes import change
from grpo.report.rollout_metrics import evaluation_metrics
from grpo.rewards.pool import weighted_sum
from grpo.run.scorer import Scorer, passed_end_line
from grpo.types import Completion, Piece, Prompt, Rollout


def test_a_turn_whose_end_is_no_stop_is_said():
    """As with a base model, whose EOS is another token than that of its chat template."""
    tokenizer = toys.trained_tokenizer(["1 + 1 = 2"], 300)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|im_start|>"
    data = DataConfig()
    line = passed_end_line(tokenizer, data, [tokenizer.eos_token_id], [])
    assert "ends a turn with <|im_end|>" in line and f"--generator.stop-token-ids {end}" in line
    assert passed_end_line(tokenizer, data, [tokenizer.eos_token_id, end], []) == ""
    assert passed_end_line(tokenizer, data, [tokenizer.eos_token_id], ["<|im_end|>"]) == ""
    text = DataConfig(prompt_template="Q: {question} A:")
    assert passed_end_line(tokenizer, text, [tokenizer.eos_token_id], []) == ""


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
    scorer, rollout = of_episode({"environment.name": "a.py:Game"} | fields)
    rollout.completion.episode["reward"] = value
    pool_reward = weighted_sum({"math_reward": of_function}, {"math_reward": weights[1]})
    scored = scorer._with_environment(replace(rollout, rewards={"math_reward": of_function}, reward=pool_reward))
    assert scored.reward == reward and scored.rewards == {"Game": value, "math_reward": of_function}


@pytest.mark.parametrize("field", [{"environment.name": "a.py:Game"}, {"environment.tools": ("calculator",)}])
def test_an_episode_that_was_lost_has_no_reward_with_a_class_or_without(field):
    """Functions would give 0 for a conversation that an outage ended."""
    scorer, rollout = of_episode(field)
    assert scorer._with_environment(rollout).reward is not None
    rollout.completion.episode["failure"] = "turn: look: ConnectionResetError"
    lost = scorer._with_environment(rollout)
    assert lost.reward is None and list(lost.failures.values()) == ["turn: look: ConnectionResetError"]


@pytest.mark.parametrize(
    ("of_class", "failure", "accuracy"),
    [
        (1.0, "", 1.0),
        (0.5, "", 0.0),
        (None, "", 1.0),  # a class without get_reward: by the first function, which gave 1
        (None, "turn: look: ConnectionResetError", 0.0),
    ],
)
def test_an_episode_passes_by_its_class_or_without_get_reward_by_the_first_function(of_class, failure, accuracy):
    scorer, rollout = of_episode({"environment.name": "a.py:Game", "reward.functions": {"math_reward": 1.0}})
    rollout.completion.episode.update(reward=of_class, failure=failure)
    scored = [scorer._with_environment(rollout)]
    metrics = evaluation_metrics(scored, scored * 2, 2, scorer.pass_functions)
    assert metrics["eval/accuracy"] == metrics["eval/pass_at_2"] == accuracy
    values_S = pass_values(scored, scorer.pass_functions)
    assert pass_rate(values_S, 1.0) == (None if failure else accuracy)


@pytest.mark.parametrize(("passes", "accuracy"), [("", 0.0), ("right.py:accuracy", 1.0)])
def test_a_field_chooses_the_function_by_which_a_completion_passes(passes, accuracy):
    """Scripts of TRL put the function for the format first, which would be taken for accuracy."""
    functions = {"format_reward": 0.2, "right.py:accuracy": 1.0}
    scorer, rollout = of_episode({"reward.functions": functions, "reward.passes": passes})
    scored = [replace(rollout, rewards={"format_reward": 0.0, "right.py:accuracy": 1.0})]
    assert evaluation_metrics(scored, [], 0, scorer.pass_functions)["eval/accuracy"] == accuracy


def of_episode(fields: dict) -> tuple[Scorer, Rollout]:
    """Return what scores an episode by these fields, without its processes, and an episode with the pool's reward."""
    config = change(GRPOConfig(), fields)
    scorer = Scorer.__new__(Scorer)
    scorer.environment = config.environment
    scorer.weights = config.reward_weights
    scorer.passes = config.reward.passes
    completion = replace(Completion((Piece.nothing(),), False), episode={"reward": 1.0, "failure": ""})
    return scorer, Rollout(Prompt(0, [5]), completion, "text", rewards={"math_reward": 1.0}, reward=0.5)
