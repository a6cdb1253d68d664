"""What the start says about completions."""

from grpo.config import DataConfig
from grpo.data import toy
from grpo.run.scorer import passed_end_line


def test_a_turn_whose_end_is_no_stop_is_said():
    """As with a base model, whose EOS is another token than that of its chat template."""
    tokenizer = toy.trained_tokenizer(["1 + 1 = 2"], 300)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokenizer.eos_token = "<|im_start|>"
    data = DataConfig()
    line = passed_end_line(tokenizer, data, [tokenizer.eos_token_id], [])
    assert "ends a turn with <|im_end|>" in line and f"--generator.stop-token-ids {end}" in line
    assert passed_end_line(tokenizer, data, [tokenizer.eos_token_id, end], []) == ""
    assert passed_end_line(tokenizer, data, [tokenizer.eos_token_id], ["<|im_end|>"]) == ""
    text = DataConfig(prompt_template="Q: {question} A:")
    assert passed_end_line(tokenizer, text, [tokenizer.eos_token_id], []) == ""
