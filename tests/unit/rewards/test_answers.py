"""Answers judged by hand, cheats that earn nothing, and that reading an answer costs no more than its length."""

import functools
import json
import pathlib
import random
import re
import time

import pytest

from grpo.rewards.answers import extract_answer, parse_number, same_answer, without_thoughts
from grpo.rewards.builtin import math_reward
from grpo.rewards.numbers import NUMBER_CHARACTERS, clean_text, read_number
from tests.unit.rewards.answer_cheats import CHEATS
from tests.unit.rewards.answer_pairs import ALGEBRA, LATEX_PAIRS, PAIRS, TAG_PAIRS, UNPAID, documented

README = pathlib.Path(__file__).parents[2] / "README.md"
GSM8K = pathlib.Path(__file__).parents[3] / "../shared/data/gsm8k/train.jsonl"

# ---- Judged by hand


def paid(given: str, reference: str, right: bool) -> float:
    return float(right and (given, reference) not in UNPAID)


@pytest.mark.parametrize("case", documented(), ids=str)
def test_the_document_tells_what_each_answer_earns(case):
    assert math_reward([case.completion], [case.reference], answer_format=case.answer_format) == [case.earns]


@pytest.mark.parametrize(("given", "reference", "right", "why"), PAIRS + TAG_PAIRS)
def test_judged_pairs_in_tags(given, reference, right, why):
    expected = [paid(given, reference, right)]
    assert math_reward([f"<answer>{given}</answer>"], [reference]) == expected, why
    assert math_reward([f"<think>{reference}</think>\n<answer>\n{given}\n</answer>"], [reference]) == expected, why


@pytest.mark.parametrize(("given", "reference", "right", "why"), PAIRS + LATEX_PAIRS)
def test_judged_pairs_in_boxes(given, reference, right, why):
    completion, expected = rf"so $\boxed{{{given}}}$.", paid(given, reference, right)
    assert math_reward([completion], [reference], answer_format="boxed") == [expected], why


@pytest.mark.parametrize(("given", "reference"), ALGEBRA)
def test_answers_of_algebra(given, reference):
    for one, other in ((given, reference), (reference, given), (given, given), (reference, reference)):
        assert math_reward([rf"\boxed{{{one}}}"], [other], answer_format="boxed") == [1.0]
    if given.replace(" ", "") == reference.replace(" ", ""):
        assert math_reward([f"<answer>{given}</answer>"], [reference]) == [1.0]


@pytest.mark.parametrize(("answer_format", "completion", "reference", "what"), CHEATS)
def test_cheats_earn_nothing(answer_format, completion, reference, what):
    start = time.process_time()
    assert math_reward([completion], [reference], answer_format=answer_format) == [0.0]
    assert time.process_time() - start < 5  # each takes milliseconds; a time limit of the library's is 2 s


def test_the_readme_counts_verdicts_and_cheats():
    pairs, cases = PAIRS + TAG_PAIRS + LATEX_PAIRS, documented()
    assert len({pair[:2] for pair in pairs}) == len(pairs) and len(set(cases)) == len(cases)
    assert UNPAID.keys() <= {(given, reference) for given, reference, right, _ in pairs if right}
    wrong = sum(not case.right for case in cases) + sum(not right for _, _, right, _ in pairs)
    unpaid = sum(case.right and not case.earns for case in cases) + len(UNPAID)
    counts = len(cases), len(pairs), wrong, len(CHEATS), unpaid
    told = r"(\d+) verdicts.*?(\d+) more pairs.*?(\d+) of all these are wrong.*?(\d+) whole completions.*?except (\d+) "
    said = re.search(told, " ".join(README.read_text().split()))
    assert said and tuple(map(int, said.groups())) == counts


@pytest.mark.skipif(not GSM8K.exists(), reason=f"{GSM8K} is not there")
def test_every_gsm8k_solution_is_worth_one():
    solutions = [json.loads(line)["answer"] for line in GSM8K.open()]
    assert math_reward(solutions, solutions, answer_format="hashes") == [1.0] * 7473
    assert None not in {parse_number(extract_answer(solution, "hashes")) for solution in solutions}


# ---- Where the answer stands


@pytest.mark.parametrize(
    ("answer_format", "text", "answer"),
    [
        ("answer_tag", "so <answer> 42 </answer>.", "42"),
        ("answer_tag", "<answer>1 <answer>2</answer>", "2"),
        ("answer_tag", "<answer>1</answer> stray </answer>", "1"),
        ("answer_tag", "<answer>\n3\napples\n</answer>", "3\napples"),
        ("answer_tag", "<answer>  </answer>", None),
        ("answer_tag", "<answer> </answer><answer>5</answer>", "5"),
        ("answer_tag", "", None),
        ("answer_tag", r"<answer>\boxed{5}</answer>", "5"),
        ("answer_tag", "< Answer >5</ ANSWER>", "5"),
        ("answer_tag", "<think>a <answer>4</answer></think><answer>5</answer>", "5"),
        ("answer_tag", "<answer>5</answer><think><answer>4</answer></think>", "5"),
        ("answer_tag", "<think>what is a <think>?</think><answer>5</answer>", "5"),
        ("answer_tag", "thoughts of a prompt's block</think><answer>5</answer>", "5"),
        ("boxed", r"\boxed{5} \boxed{ }", "5"),
        ("boxed", r"\boxed{\boxed{5}}", "5"),
        ("boxed", r"\fbox{5}", "5"),
        ("boxed", r"\boxed{4} <answer>so \boxed{5}</answer>", "5"),
        ("boxed", r"\boxed{\frac{3}{4}}", r"\frac{3}{4}"),
        ("boxed", r"} so \boxed {5} }}", "5"),
        ("boxed", r"\boxed{}", None),
        ("hashes", "#### 1\n#### 2\nbye", "2"),
        ("hashes", "#### 4 <answer>#### 5</answer>", "5"),
        ("hashes", "####", None),
        ("hashes", "### 5", None),
    ],
)
def test_extract_answer(answer_format, text, answer):
    assert extract_answer(text, answer_format) == answer


# ---- Numbers


@pytest.mark.parametrize(
    "text",
    ["", "Paris", "-", ".", "3, 4", "1,23", "1,2345", "1.2.3", "5-3", "12:30", "2024-01-02", "2*3", "2 + x", "5!"]
    + ["2^3", "√2", "sqrt(2)", "minus -5", "x > 5", "H2O", "3/0", "1e999", "1e309", "nan", "٤", "one 5", "--5", "+-5"]
    + ["9" * (NUMBER_CHARACTERS + 1)],
)
def test_what_is_no_number(text):
    assert read_number(clean_text(text)) is None


@pytest.mark.parametrize(
    ("given", "reference", "reward"),
    [
        ("$1,234", "48*2\n#### 1,234", 1.0),
        ("5", 5, 1.0),
        ("5", 5.0, 1.0),
        ("5", "", None),
        ("5", "  ", None),
        ("5", None, None),
        ("5", "no solution ####", None),
        ("5", r"so x is $\boxed{4}$ and $\boxed{5}$.", 0.0),
        ("4, 5", r"so x is $\boxed{4}$ and $\boxed{5}$.", 1.0),
        ("5", r"$\boxed{5}$. So it is $\boxed{5}$.", 1.0),
        ("5", r"first \boxed{4}, and from it \boxed{5}", 1.0),
    ],
)
def test_math_reward(given, reference, reward):
    assert math_reward([f"<answer>{given}</answer>"], [reference], question=["?"]) == [reward]


@pytest.mark.parametrize("reference", [["6"], [], {"value": 6}, float("nan")])
def test_a_reference_that_is_no_text_or_number_is_refused_with_the_way_out(reference):
    for text in ("", f"<answer>{reference}</answer>"):
        with pytest.raises(ValueError, match=rf"is {type(reference).__name__} .*--data.answer-column answer.0"):
            math_reward([text], [reference])


def test_partial_credit_is_for_a_wrong_answer_in_the_right_form():
    completions = ["<answer>5</answer>", "<answer>6</answer>", "6", "<answer></answer>"]
    assert math_reward(completions, ["5"] * 4, partial_credit=0.1) == [1.0, 0.1, 0.0, 0.0]


def test_tolerance_is_relative_and_for_fractions_only():
    """A hundredth of 20.5 is 0.205, of 0.1 it is 0.001. Integers are equal or not."""
    reward = functools.partial(math_reward, tolerance=0.01)
    completions = [f"<answer>{number}</answer>" for number in ("20.7", "20.71", "0.101", "0.1011", "202", "0")]
    references = ["20.5", "20.5", "0.1", "0.1", "200", "0.001"]
    assert reward(completions, references) == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


# ---- Work


class Counted(str):
    """A text that counts the characters copied from it and its pieces, and ends the test beyond `limit`."""

    copied, limit = 0, 0

    def __getitem__(self, key):
        piece = super().__getitem__(key)
        Counted.copied += len(piece)
        assert Counted.copied <= Counted.limit
        return Counted(piece)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed" + "{" * 500_000 + "42" + "}" * 500_000,
        "\\boxed{" * 125_000 + "42" + "}" * 125_000,
        "\\boxed{" * 125_000 + "42}",
        "{" * 500_000 + "}" * 500_000 + "\\boxed{41}",
        "<answer>" + "\\boxed{" * 125_000 + "42" + "}" * 125_000 + "</answer>",
    ],
    ids=["braces", "boxes", "cut off", "before", "in a tag"],
)
def test_a_megabyte_of_braces_is_copied_a_few_times_and_earns_nothing(text):
    Counted.copied, Counted.limit = 0, 10 * len(text)
    assert math_reward([Counted(text)], ["42"], answer_format="boxed") == [0.0]
    assert Counted.copied > 0


@pytest.mark.parametrize(
    ("answer_format", "head", "tail"),
    [
        ("answer_tag", "<answer>41</answer>", ".<answer>42</answer>"),
        ("boxed", "\\boxed{41}", ".\\boxed{42}"),
        ("hashes", "#### 41", ".\n#### 42"),
    ],
)
def test_words_between_two_answers_are_read_once(answer_format, head, tail):
    """A megabyte: time that is quadratic in it would be CPU minutes, and once through it milliseconds."""
    for words in (" or", " and also", " maybe,"):
        text = head + words * (1_000_000 // len(words)) + tail
        start = time.process_time()
        assert extract_answer(text, answer_format) in ("42", None)
        assert time.process_time() - start < 60


# ---- Time

PIECES = ["<answer>", "</answer>", "<think>", "</think>", "< ", "\\boxed{", "\\fbox{", "{", "}", "(", ")", "[", "\\[",
          "\\(", "$", "1", "1,", "1 111", ",111", "5 / ", "a/", "aa/", "aa-", "a.", "10^", "\\frac{1}{2}", "\\frac",
          " ", "\n", "-",
          "+-", "½", "²", "\u200b", "é", "\\text{", "m^2", "####", "=", "x = ", "a ", "EUR", "5e", "°", "^{",
          "~", "\\", "final answer is", "and", " or ", "'", "_{1}", "..", "*", "\ufeff"]  # fmt: skip


def read_in_every_way(text: str) -> None:
    for answer_format in ("answer_tag", "boxed", "hashes"):
        extract_answer(text, answer_format)
    without_thoughts(text)
    clean_text(text)
    parse_number(text)
    same_answer(text, "42", tolerance=1e-6, latex=False)
    same_answer("42 cm", text, tolerance=1e-6, latex=False)


def seconds_to_read(text: str, enough: float) -> float:
    """Measure the CPU seconds of this thread, and up to four times more, until they are below `enough`.

    Quadratic time shows each time. What the garbage of five thousand tests costs, or a busy core, does not.
    """
    for _ in range(5):
        start = time.thread_time()
        read_in_every_way(text)
        seconds = time.thread_time() - start
        if seconds < enough:
            break
    return seconds


def test_no_text_costs_more_than_its_length():
    """8 kB of one piece, or of two in turns, and of the slowest 100 kB: quadratic time is 156 times as long."""
    draw = random.Random(0)
    texts = ["".join(pieces) for pieces in zip(PIECES, draw.sample(PIECES, len(PIECES)), strict=True)] + PIECES
    ends = ("", ""), ("<answer>5 ", "!</answer>"), ("\\boxed{", "}"), ("\\boxed{4}", "\\boxed{5}")
    around = [(head, text, tail) for text in texts for head, tail in ends]
    seconds = {
        (head, text, tail): seconds_to_read(head + text * (8_000 // len(text)) + tail, 0.4)
        for head, text, tail in around
    }
    slowest = max(seconds, key=seconds.get)
    head, text, tail = slowest
    assert seconds[slowest] < 0.4, slowest  # about 0.04 s
    assert seconds_to_read(head + text * (100_000 // len(text)) + tail, 5) < 5, slowest


def test_no_short_text_takes_exponential_time():
    """Whatever up to 200 characters are made of: all patterns work on texts of that length."""
    draw = random.Random(1)
    for _ in range(1000):
        few = draw.sample(PIECES, draw.randint(1, 4))
        text = "5" + "".join(draw.choice(few) for _ in range(80)) + draw.choice("!x5 ")
        assert seconds_to_read(text[:NUMBER_CHARACTERS], 0.5) < 0.5, text
