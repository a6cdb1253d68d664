"""What the start says about completions, and by what they pass."""

from types import SimpleNamespace

import pytest

from configs.examples import toys
from grpo.config import GRPOConfig
from grpo.config.recipes import change
from grpo.report.rollout_metrics import evaluation_metrics
from grpo.run.policy import describe_ends
from grpo.run.scorer import passing_parts
from tests.rollouts import completion


def test_a_turn_whose_end_is_no_stop_is_said():
    """As with a base model, whose EOS is another token than that of its chat template."""
    tokenizer = toys.trained_tokenizer(["1 + 1 = 2"], 300)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|im_start|>"

    def warnings(*more_stops: int, **fields: object) -> list[str]:
        policy = SimpleNamespace(tokenizer=tokenizer, stop_token_ids=[tokenizer.eos_token_id, *more_stops])
        return describe_ends(change(GRPOConfig(), fields), policy)[1:]

    (line,) = warnings()
    assert "ends a turn with <|im_end|>" in line and f"--generator.stop-token-ids {end}" in line
    assert not warnings(end)
    assert not warnings(**{"generator.stop": ("<|im_end|>",)})
    assert not warnings(**{"data.prompt_template": "Q: {question} A:"})


@pytest.mark.parametrize(("passes", "accuracy"), [("", 0.0), ("right.py:accuracy", 1.0)])
def test_a_field_chooses_the_function_by_which_a_completion_passes(passes, accuracy):
    """Scripts of TRL put the function for the format first, which would be taken for accuracy."""
    functions = {"format_reward": 0.2, "right.py:accuracy": 1.0}
    config = change(GRPOConfig(), {"reward.functions": functions, "reward.passes": passes})
    scored = [completion([], text="text", rewards={"format_reward": 0.0, "right.py:accuracy": 1.0}, reward=1.0)]
    assert evaluation_metrics(scored, [], 0, passing_parts(config))["eval/accuracy"] == accuracy
