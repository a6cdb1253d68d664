"""The word problems: questions read again by another reader, solutions by arithmetic, what fits into the recipes."""

import random
import re

import pytest

from configs.examples import word_problem_rows
from grpo.config import GRPOConfig, SFTConfig
from grpo.config.recipes import load_recipe
from grpo.rewards.builtin import math_reward
from tests.torchrun import ROOT
from tests.unit.data.test_data import encode_prompt


@pytest.fixture(scope="module")
def tokenizer():
    return word_problem_rows.tokenizer()


@pytest.fixture(scope="module")
def test_rows():
    return word_problem_rows.word_problems("test")


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


def test_answers_and_solutions_are_right(test_rows):
    for row in test_rows:
        assert solve(row["question"]) == int(row["answer"])
        thoughts = re.fullmatch(r"<think>(.*)</think><answer>(\d+)</answer>", row["completion"])
        results = []
        for equation in thoughts[1].split():
            left, sign, right, result = re.fullmatch(r"(\d+)([-+*])(\d+)=(\d+)\.", equation).groups()
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(left), int(right))
            assert value == int(result) and 1 <= value <= 999
            results.append(result)
        assert results[-1] == thoughts[2] == row["answer"]
    assert math_reward([row["completion"] for row in test_rows], [row["answer"] for row in test_rows]) == [1.0] * 1000


def test_splits_are_distinct_fixed_and_share_no_calculation(test_rows, monkeypatch):
    state = random.getstate()
    monkeypatch.setitem(word_problem_rows.NUM_ROWS, "train", 3000)
    train = word_problem_rows.word_problems("train")
    assert random.getstate() == state
    assert (len(train), len(test_rows)) == (3000, 1000)
    assert len({row["question"] for row in train + test_rows}) == 4000
    assert not {row["completion"] for row in train} & {row["completion"] for row in test_rows}
    assert test_rows[0]["question"].startswith("Jane has 39 apples. Then the number of apples grows")
    # 2, 3 and 4 sentences that do something, about equally often
    counts = [len(re.findall(r"[.?]", row["question"])) - 2 for row in test_rows]
    assert min(counts.count(number) for number in (2, 3, 4)) > 280 and set(counts) == {2, 3, 4}


def test_everything_fits_into_the_recipes(tokenizer, test_rows):
    grpo = load_recipe(str(ROOT / "configs" / "word_problems.py"), GRPOConfig)
    sft = load_recipe(str(ROOT / "configs" / "word_problems_sft.py"), SFTConfig)
    for row in test_rows:
        prompt = len(encode_prompt(tokenizer, grpo.data, row["question"]))
        assert prompt <= grpo.data.max_prompt_tokens
        completion = len(tokenizer.encode(row["completion"])) + 1  # the end of the turn
        assert completion <= grpo.generator.max_completion_tokens
        assert prompt + completion <= min(sft.max_sequence_tokens, 512)
