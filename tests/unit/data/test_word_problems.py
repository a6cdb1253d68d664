"""The word problems: solutions by arithmetic, no row twice, what fits into the recipes."""

import re

from configs.examples import word_problem_rows
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load_recipe
from tests.torchrun import ROOT
from tests.unit.data.test_data import encode_prompt


def test_rows_are_right_fixed_distinct_and_fit_into_the_recipes(monkeypatch):
    monkeypatch.setitem(word_problem_rows.NUM_ROWS, "train", 3000)
    train, test = (word_problem_rows.word_problems(split) for split in ("train", "test"))
    assert len({row["question"] for row in train + test}) == 4000
    assert not {row["completion"] for row in train} & {row["completion"] for row in test}
    assert test[0]["question"].startswith("Jane has 39 apples. Then the number of apples grows")

    tokenizer = word_problem_rows.tokenizer()
    grpo = load_recipe(str(ROOT / "configs" / "word_problems.py"), GRPOConfig)
    sft = load_recipe(str(ROOT / "configs" / "word_problems_sft.py"), SFTConfig)
    for row in test:
        equations = re.findall(r"(\d+[-+*]\d+)=(\d+)\.", row["completion"])
        assert all(eval(left) == int(right) for left, right in equations)
        assert row["completion"].endswith(f"={row['answer']}.</think><answer>{row['answer']}</answer>")
        num_prompt = len(encode_prompt(tokenizer, grpo.data, row["question"]))
        num_completion = len(tokenizer.encode(row["completion"])) + 1  # the end of the turn
        assert num_prompt <= grpo.data.max_prompt_tokens and num_completion <= grpo.generator.max_completion_tokens
        assert num_prompt + num_completion <= sft.max_sequence_tokens
