"""Rewards: what counts as an answer, which numbers are equal, and how a failing function is reported."""

import functools
import json
import math
import pathlib
import pickle
import time

import pytest

from grpo.config import RewardConfig
from grpo.rewards import (
    RewardError,
    extract_answer,
    load_functions,
    math_reward,
    parse_number,
    score,
    thinking_reward,
)
from grpo.types import Completion, Prompt, Rollout

GSM8K = pathlib.Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"


def rollout(text: str, **columns) -> Rollout:
    return Rollout(prompt=Prompt(0, [1], columns), completion=Completion([2], [-0.5], False), text=text)


@pytest.mark.parametrize(
    ("answer_format", "text", "answer"),
    [
        ("answer_tag", "so <answer> 42 </answer>.", "42"),
        ("answer_tag", "<answer>1</answer> no, <answer>2</answer>", "2"),
        ("answer_tag", "<answer>1</answer> and <answer>2", "1"),
        ("answer_tag", "<answer>1 <answer>2</answer>", "2"),
        ("answer_tag", "<answer>1</answer> stray </answer>", "1"),
        ("answer_tag", "<answer>\n3\napples\n</answer>", "3\napples"),
        ("answer_tag", "<answer>  </answer>", None),
        ("answer_tag", "the answer is 42", None),
        ("answer_tag", "", None),
        ("boxed", r"thus \boxed{42}", "42"),
        ("boxed", r"\boxed{1} or \boxed{2}", "2"),
        ("boxed", r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        ("boxed", r"\boxed{1} and \boxed{\frac{3}{4}", "1"),
        ("boxed", r"{ \boxed {5} }}", "5"),
        ("boxed", r"\boxed{}", None),
        ("boxed", r"\boxed{42", None),
        ("boxed", "42", None),
        ("hashes", "48 + 24 = 72\n#### 72", "72"),
        ("hashes", "#### 1\n#### 2\nbye", "2"),
        ("hashes", "####", None),
        ("hashes", "### 5", None),
    ],
)
def test_extract_answer(answer_format, text, answer):
    assert extract_answer(text, answer_format) == answer


def test_extract_answer_refuses_an_unknown_format():
    with pytest.raises(ValueError, match=r"'xml' is unknown; use answer_tag, boxed or hashes"):
        extract_answer("5", "xml")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        (" 42 ", 42),
        ("42.", 42),
        ("**42**", 42),
        ("-7", -7),
        ("+7", 7),
        ("−7", -7),  # U+2212
        ("0.5", 0.5),
        (".5", 0.5),
        ("1,234", 1234),
        ("1,234,567.5", 1234567.5),
        ("1 234 567", 1234567),
        ("1\u202f234", 1234),
        ("$18", 18),
        ("$1,234.50", 1234.5),
        ("\\$18", 18),
        ("$18$", 18),
        ("-$18", -18),
        ("$-18", -18),
        ("€3", 3),
        ("3 €", 3),
        ("£ 2.50", 2.5),
        ("EUR 5", 5),
        ("EUR5", 5),
        ("5 EUR", 5),
        ("50%", 50),
        ("50\\%", 50),
        ("50 percent", 50),
        ("12 apples", 12),
        ("3.5 km", 3.5),
        ("60 km/h", 60),
        ("$5/hour", 5),
        ("12-inch", 12),
        ("7 m^2", 7),
        ("7 m²", 7),
        ("7 cm3", 7),
        ("x = 5", 5),
        ("x=-5", -5),
        ("about 5 hours", 5),
        ("3/4", 0.75),
        ("-3/4", -0.75),
        ("3 / 4 cup", 0.75),
        ("1e3", 1000),
        ("1.5E-3 kg", 0.0015),
        ("007", 7),
    ],
)
def test_parse_number(text, number):
    assert parse_number(text) == pytest.approx(number, rel=1e-12)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris",
        "-",
        ".",
        "3 or 4",
        "3, 4",
        "1,23",
        "1,2345",
        "1.2.3",
        "5-3",
        "12:30",
        "2024-01-02",
        "1/2/3",
        "1 3/4",
        "2*3",
        "2 + x",
        "10^6",
        "5!",
        "5²",
        "3½",
        "5x",
        "2 pi",
        "2π",
        "√2",
        "sqrt(2)",
        "minus 5",
        "5 million",
        "x > 5",
        "H2O",
        "3/0",
        "1e999",
        "nan",
        "٤",
    ],
)
def test_parse_number_takes_nothing_but_one_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" * 30000,
        "<answer>" * 30000,
        " " * 100000,
        "5" * 100000,
        "1," * 50000,
        "1 111" * 20000,
        "5 / " * 30000,
        "a 5" + " b" * 50000 + " 6",
        "$ " * 50000,
    ],
    ids=lambda text: text[:8],
)
def test_reading_a_degenerate_completion_takes_no_quadratic_time(text):
    start = time.perf_counter()
    for answer_format in ("answer_tag", "boxed", "hashes"):
        extract_answer(text, answer_format)
    parse_number(text)
    assert time.perf_counter() - start < 5  # about 0.1 s; quadratic time would be minutes


@pytest.mark.parametrize(
    ("given", "reference", "reward"),
    [
        ("72", "72", 1.0),
        ("72.0", "72", 1.0),
        ("$1,234", "48*2\n#### 1,234", 1.0),
        ("71", "72", 0.0),
        ("0.75", "3/4", 1.0),
        ("50%", "50", 1.0),
        ("50%", "0.5", 0.0),
        ("0.3333333", "1/3", 1.0),  # 3.3e-8 off
        ("0.33333", "1/3", 0.0),  # 3.3e-6 off
        ("1000000.9", "1000000", 1.0),  # 9e-7 of a million
        ("1000001.1", "1000000", 0.0),
        ("Paris.", " paris", 1.0),
        ("New   York", "new york", 1.0),
        ("London", "Paris", 0.0),
        ("3 or 4", "3", 0.0),
        ("5", 5, 1.0),
        ("5", 5.0, 1.0),
        ("5", "", None),
        ("5", "  ", None),
        ("5", None, None),
        ("5", "no solution ####", None),
    ],
)
def test_math_reward(given, reference, reward):
    assert math_reward([f"<answer>{given}</answer>"], [reference], question=["?"]) == [reward]


def test_partial_credit_is_for_a_wrong_answer_in_the_right_form():
    completions = ["<answer>5</answer>", "<answer>6</answer>", "6", "<answer></answer>"]
    assert math_reward(completions, ["5"] * 4, partial_credit=0.1) == [1.0, 0.1, 0.0, 0.0]


def test_tolerance_is_relative_above_one_and_absolute_below():
    reward = functools.partial(math_reward, tolerance=0.01)
    completions = [f"<answer>{number}</answer>" for number in ("202", "203", "0.109", "0.111")]
    assert reward(completions, ["200", "200", "0.1", "0.1"]) == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("given", "reference", "reward"),
    [
        (r"\frac{3}{4}", "0.75", 1.0),
        (r"\frac{\sqrt{3}}{2}", r"\frac{\sqrt3}2", 1.0),
        ("x+1", "1+x", 1.0),
        (r"\frac{3}{5}", "0.75", 0.0),
        ("{" * 2000 + "}" * 2000, "5", 0.0),
    ],
)
def test_boxed_answers_are_compared_as_latex(given, reference, reward):
    assert math_reward([rf"so \boxed{{{given}}}"], [reference], answer_format="boxed") == [reward]


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not there")
def test_every_gsm8k_solution_is_worth_one():
    solutions = [json.loads(line)["answer"] for line in GSM8K.open()]
    gold = [extract_answer(solution, "hashes") for solution in solutions]
    assert len(gold) == 7473
    assert [answer for answer in gold if parse_number(answer) is None] == []
    assert math_reward(solutions, solutions, answer_format="hashes") == [1.0] * 7473
    assert parse_number(gold[0]) == 72


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>2 + 3 = 5</think> <answer>5</answer>", 1.0),
        ("<think>\nlong\n\nthoughts\n</think>\n#### 5", 1.0),
        ("<think>is it <answer>4</answer>?</think><answer>5</answer>", 1.0),
        ("<think>2 + 3 = 5</think>", 1.0),
        ("<answer>5</answer>", 0.0),
        ("", 0.0),
        ("<think></think><answer>5</answer>", 0.5),
        ("<think> \n </think><answer>5</answer>", 0.5),
        ("<think>2 + 3", 0.5),
        ("2 + 3</think><answer>5</answer>", 0.5),
        ("</think>2 + 3<think>", 0.5),
        ("<think>a</think><think>b</think>", 0.5),
        ("<think>a<think>b</think>", 0.5),
        ("<answer>5</answer><think>2 + 3</think>", 0.5),
        ("<think>2 + 3 <answer>5</answer></think>", 0.5),
    ],
)
def test_thinking_reward(text, reward):
    assert thinking_reward([text], answer=["5"]) == [reward]


def test_load_functions_binds_the_options_of_math_reward():
    config = RewardConfig(
        functions={"math_reward": 2.0, "thinking_reward": 0.5},
        answer_format="hashes",
        tolerance=0.1,
        partial_credit=0.3,
    )
    functions = load_functions(config, columns=["question", "answer"])
    assert list(functions) == ["math_reward", "thinking_reward"]
    function, weight = functions["math_reward"]
    assert weight == 2.0
    assert function(["#### 105", "#### 120"], answer=["100", "100"], question=["", ""]) == [1.0, 0.3]


def test_load_functions_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Options:\n"
        "    per_word: float = 0.5\n"
        "def words(completions, **columns):\n"
        "    return [Options().per_word * len(text.split()) for text in completions]\n"
        "def zero(completions, **columns):\n"
        "    return [0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    absolute = f"{tmp_path}/mine.py:zero"
    functions = load_functions(RewardConfig(functions={"mine.py:words": 2.0, absolute: 1.0}))
    (scored,) = score(functions, [rollout("one two three")])
    assert scored.rewards == {"mine.py:words": 1.5, absolute: 0.0}
    assert scored.reward == 3.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "maths",
            r"unknown reward function 'maths'; built-ins are math_reward, thinking_reward, "
            r"your own is written path/file.py:function",
        ),
        ("mine.py", "unknown reward function 'mine.py'"),
        ("absent.py:words", r"reward file /.*/absent.py does not exist"),
        ("mine.py:word", r"mine.py has no function 'word'; functions there: words, strict"),
        ("mine.py:LIMIT", r"mine.py has no function 'LIMIT'"),
        (
            "mine.py:strict",
            r"mine.py:strict cannot be called with completions and the columns question, answer: "
            r"got an unexpected keyword argument 'question'; end its arguments with \*\*columns",
        ),
        ("mine.py:words", r"missing a required argument: 'solution'.*list the columns it needs in data.columns"),
    ],
)
def test_load_functions_refuses(name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "LIMIT = 3\n"
        "def words(completions, solution, **columns): return []\n"
        "def strict(completions, answer): return []\n"
        "def _hidden(completions, **columns): return []\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_functions(RewardConfig(functions={name: 1.0}), columns=["question", "answer"])


def test_score_sums_by_weight_and_leaves_none_out():
    calls = []

    def length(completions, answer, **columns):
        calls.append((completions, answer, columns))
        return [float(len(text)) for text in completions]

    def known(completions, **columns):
        return [None, True, None]

    functions = {"length": (length, 0.5), "known": (known, 2.0)}
    rollouts = [
        rollout("ab", answer="1", question="p"),
        rollout("", answer="2", question="q"),
        rollout("abcd", answer="3"),
    ]
    rollouts[2].prompt.columns["question"] = "r"
    scored = score(functions, rollouts)
    assert calls == [(["ab", "", "abcd"], ["1", "2", "3"], {"question": ["p", "q", "r"]})]
    assert [r.rewards for r in scored] == [
        {"length": 2.0, "known": None},
        {"length": 0.0, "known": 1.0},
        {"length": 4.0, "known": None},
    ]
    assert [r.reward for r in scored] == [1.0, 2.0, 2.0]
    assert [r.text for r in scored] == ["ab", "", "abcd"]
    assert rollouts[0].rewards == {} and rollouts[0].reward is None


def test_score_of_only_none_is_none():
    functions = {"known": (lambda completions, **columns: [None] * len(completions), 1.0)}
    (scored,) = score(functions, [rollout("ab")])
    assert scored.rewards == {"known": None}
    assert scored.reward is None


def test_score_of_no_rollouts_calls_nothing():
    assert score({"never": (lambda completions: 1 / 0, 1.0)}, []) == []


def test_a_function_that_raises_names_completion_and_columns():
    def inverse(completions, answer, **columns):
        return [1 / int(text) for text in completions]

    with pytest.raises(RewardError) as caught:
        score({"inverse": (inverse, 1.0)}, [rollout("2", answer="two"), rollout("0", answer="z" * 2000)])
    message = str(caught.value)
    assert message.startswith("reward function inverse raised ZeroDivisionError: division by zero\n  completion: '0'\n")
    assert f"answer: '{'z' * 250} [.. 1500 characters ..] {'z' * 250}'" in message
    assert "two" not in message
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # it travels from a worker process


def test_a_function_that_raises_only_for_many_completions_says_so():
    def lonely(completions, **columns):
        if len(completions) > 1:
            raise KeyError("pair")
        return [1.0]

    with pytest.raises(
        RewardError, match=r"raised KeyError: 'pair'\n  with 2 completions at once, but not one at a time"
    ):
        score({"lonely": (lonely, 1.0)}, [rollout("a"), rollout("b")])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], r"^reward function bad returned 1 values for 2 completions; .*\n  completion: 'first'\n  answer: '5'$"),
        (0.5, r"^reward function bad returned float; it must return a list .* each of the 2 completions$"),
        (None, r"^reward function bad returned NoneType;"),
        (
            [1.0, math.nan],
            r"^reward function bad returned nan \(float\) for completion 1 of 2; it must be a finite number or None\n"
            r"  completion: 'second'\n  answer: '6'$",
        ),
        ([math.inf, 1.0], r"returned inf \(float\) for completion 0 of 2"),
        (["1.0", 1.0], r"returned '1.0' \(str\) for completion 0 of 2"),
    ],
)
def test_a_function_that_returns_something_else(values, message):
    rollouts = [rollout("first", answer="5"), rollout("second", answer="6")]
    with pytest.raises(RewardError, match=message):
        score({"bad": (lambda completions, **columns: values, 1.0)}, rollouts)
