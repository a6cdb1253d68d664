"""What the start says about completions, and by what they pass."""

from types import SimpleNamespace

from configs.examples import toys
from grpo.config import GRPOConfig
from grpo.config.recipes import change
from grpo.run.policy import describe_ends
from grpo.run.scorer import passing_parts


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


def test_a_field_chooses_the_function_by_which_a_completion_passes():
    """Scripts of TRL put the function for the format first, which would be taken for accuracy."""
    config = change(GRPOConfig(), {"reward.functions": {"format_reward": 0.2, "right.py:accuracy": 1.0}})
    assert passing_parts(config) == ["format_reward"]
    assert passing_parts(change(config, {"reward.passes": "right.py:accuracy"})) == ["right.py:accuracy"]
