"""Example files with rows: what they give is what rewards read."""

import json
import re

import pytest

from grpo.config import RewardConfig
from grpo.config.user_files import load_function
from grpo.data.streams import Seen
from grpo.rewards.loading import load_functions
from tests.torchrun import ROOT

EXAMPLES = ROOT / "configs" / "examples"


def test_the_smallest_number_is_held_out_and_paid_by_the_last_number():
    rows = load_function(f"{EXAMPLES}/smallest.py:rows", "test")
    last_number = load_function(f"{EXAMPLES}/smallest.py:last_number", "test")
    train = rows("train")
    test = rows("test")
    assert len(test) == 256
    numbers = [{int(number) for number in re.findall(r"\d+", row["question"])} for row in test + train]
    assert [str(min(three)) for three in numbers] == [row["answer"] for row in test + train]
    assert len({frozenset(three) for three in numbers}) == len(numbers)
    completions = ["68", "Of 23 and 68 it is 68.", "68 is not 23", "I do not know.", "168"]
    assert last_number(completions, ["68"] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_similar_texts_earn_the_share_that_matches():
    config = RewardConfig(functions={f"{EXAMPLES}/similar.py:similar": 1.0})
    (function,) = load_functions(config, ["answer"]).values()
    assert function(["abcd", "ab"], ["abcd", "abcd"]) == [1.0, pytest.approx(2 * 2 / 6)]


def test_curricula_pass_over_what_is_solved_and_prefer_the_middle():
    skip_solved = load_function(f"{EXAMPLES}/curriculum.py:skip_solved", "test")
    medium_first = load_function(f"{EXAMPLES}/curriculum.py:medium_first", "test")
    rows = [Seen(pass_rate, times=3, step=10) for pass_rate in (0.0, 0.2, 0.5, 0.875, 1.0)]
    assert [skip_solved(seen, 50) for seen in rows] == [1, 1, 1, 1, 0]
    assert skip_solved(rows[-1], 110) == 1
    assert [medium_first(seen, 50) for seen in rows] == [0.2, 1, 1, 0.2, 0.2]


def test_tasks_of_reasoning_gym_are_paid_by_their_own_verifier():
    pytest.importorskip("reasoning_gym")
    chain_sum = load_function(f"{EXAMPLES}/reasoning_gym_rows.py:chain_sum", "test")
    verified = load_function(f"{EXAMPLES}/reasoning_gym_rows.py:verified", "test")
    train = chain_sum("train")
    test = chain_sum("test")
    assert len(test) == 200 and not {row["question"] for row in train} & {row["question"] for row in test}
    right = json.loads(test[0]["entry"])["answer"]
    completions = [f"So <answer>{right}</answer>", f"<answer>{right}.0</answer>"]
    completions += [f"<answer>{right}1</answer>", f"<answer>1{right}</answer>", f"It is {right}."]
    # the verifier itself gives parts to the third and fourth, which hold the right answer
    assert verified(completions, [test[0]["entry"]] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]
