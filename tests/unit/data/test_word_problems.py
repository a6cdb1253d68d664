"""The word problems: questions read again by another reader, solutions by arithmetic, what fits into the recipes."""

import random
import re

from configs.examples import word_problem_rows
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load_recipe
from tests.torchrun import ROOT
from tests.unit.data.test_data import encode_prompt

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def solve(question: str) -> int:
    """What a reader makes of it who knows the words and not the generator."""
    first, *steps, _ = re.findall(r"[^.?]+[.?]", question)
    total = int(re.search(r"has (\d+)", first)[1])
    for step in steps:
        numbers = [int(number) for number in re.findall(r"\d+", step)]
        if "times as many" in step:
            total *= numbers[0]
            continue
        change = numbers[0] * numbers[1] if len(numbers) == 2 else numbers[0]
        own = step.strip().startswith(("She", "He"))
        leaves = (own and re.search(r"gives|loses|sells", step)) or re.search(r"borrows|break", step)
        total += -change if leaves else change
    return total


def test_rows_are_right_fixed_distinct_and_fit_into_the_recipes(monkeypatch):
    state = random.getstate()
    monkeypatch.setitem(word_problem_rows.NUM_ROWS, "train", 3000)
    train, test = (word_problem_rows.word_problems(split) for split in ("train", "test"))
    assert random.getstate() == state
    assert len({row["question"] for row in train + test}) == 4000
    assert not {row["completion"] for row in train} & {row["completion"] for row in test}
    assert test[0]["question"].startswith("Jane has 39 apples. Then the number of apples grows")

    tokenizer = word_problem_rows.tokenizer()
    grpo = load_recipe(str(ROOT / "configs" / "word_problems.py"), GRPOConfig)
    sft = load_recipe(str(ROOT / "configs" / "word_problems_sft.py"), SFTConfig)
    for row in test:
        assert solve(row["question"]) == int(row["answer"])
        thoughts = re.fullmatch(r"<think>(.*)</think><answer>(\d+)</answer>", row["completion"])
        results = []
        for equation in thoughts[1].split():
            left, sign, right, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)\.", equation).groups()
            assert 1 <= OPERATIONS[sign](int(left), int(right)) == int(result) <= 999
            results.append(result)
        assert results[-1] == thoughts[2] == row["answer"]
        num_prompt = len(encode_prompt(tokenizer, grpo.data, row["question"]))
        num_completion = len(tokenizer.encode(row["completion"])) + 1  # the end of the turn
        assert num_prompt <= grpo.data.max_prompt_tokens and num_completion <= grpo.generator.max_completion_tokens
        assert num_prompt + num_completion <= sft.max_sequence_tokens
