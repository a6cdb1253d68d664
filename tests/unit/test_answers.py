"""Answers judged by hand, cheats that earn nothing, and that reading an answer costs no more than its length."""

import pathlib
import random
import re
import time
from fractions import Fraction

import pytest

from grpo.rewards.answers.equality import find_answer, is_expression, same_answer
from grpo.rewards.answers.extract import extract_answer, without_thoughts
from grpo.rewards.answers.numbers import NUMBER_CHARACTERS, Quantity, parse_number, plain_text, read_quantity
from grpo.rewards.builtin import exact_match, math_reward, math_verify
from tests.unit.answer_cheats import CHEATS
from tests.unit.answer_pairs import LATEX_PAIRS, PAIRS, TAG_PAIRS

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize(("given", "reference", "right", "why"), PAIRS + TAG_PAIRS)
def test_judged_pairs_in_tags(given, reference, right, why):
    assert math_reward([f"<answer>{given}</answer>"], [reference]) == [float(right)], why
    assert math_reward([f"<think>{reference}</think>\n<answer>\n{given}\n</answer>"], [reference]) == [float(right)], (
        why
    )


@pytest.mark.parametrize(("given", "reference", "right", "why"), PAIRS + LATEX_PAIRS)
def test_judged_pairs_in_boxes(given, reference, right, why):
    completion = rf"so $\boxed{{{given}}}$."
    assert math_reward([completion], [reference], answer_format="boxed") == [float(right)], why
    expected = float(right) if is_expression(reference) else None
    assert math_verify([completion], answer=[reference]) == [expected], why
    assert math_verify([f"<answer>{given}</answer> {reference}"], answer=[reference]) == [expected], why


@pytest.mark.parametrize(("given", "reference", "right", "why"), PAIRS + TAG_PAIRS + LATEX_PAIRS)
def test_exact_match_never_pays_for_what_is_judged_wrong(given, reference, right, why):
    (reward,) = exact_match([f"<answer>{given}</answer>"], answer=[reference])
    same_letters = given.casefold() == reference.casefold()  # 5 mg and 5 Mg, which exact_match takes as documented
    assert reward == 0.0 or right or same_letters, why


@pytest.mark.parametrize(("answer_format", "completion", "reference", "what"), CHEATS)
def test_cheats_earn_nothing(answer_format, completion, reference, what):
    start = time.process_time()
    assert math_reward([completion], [reference], answer_format=answer_format) == [0.0]
    assert exact_match([completion], answer=[reference], answer_format=answer_format) == [0.0]
    # math_verify, by design, also reads a number that stands in no tag or box
    if find_answer(completion) != "42":
        assert math_verify([completion], answer=[reference]) == [0.0]
    assert time.process_time() - start < 5  # each takes milliseconds; a time limit of the library's is 2 s


def test_the_readme_counts_the_pairs_and_cheats():
    pairs = PAIRS + TAG_PAIRS + LATEX_PAIRS
    assert len({pair[:2] for pair in pairs}) == len(pairs)
    counts = len(pairs), sum(not right for _, _, right, _ in pairs), len(CHEATS)
    said = re.search(r"(\d+) pairs .*?(\d+) of them wrong\s.*?(\d+) cheats", README.read_text(), re.DOTALL)
    assert said and tuple(map(int, said.groups())) == counts


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("5", Quantity(Fraction(5))),
        ("$5/hour", Quantity(Fraction(5), "dollar / h")),
        ("$5 per hour", Quantity(Fraction(5), "dollar / h")),
        ("5 dollars per hour", Quantity(Fraction(5), "dollar / h")),
        ("60 mph", Quantity(Fraction(60), "mi / h")),
        ("7 sq ft", Quantity(Fraction(7), "ft^2")),
        ("3 1/2 cups", Quantity(Fraction(7, 2), "cup")),
        ("-\\frac{3}{4}\\text{ cup}", Quantity(Fraction(-3, 4), "cup")),
        ("1e-7", Quantity(Fraction(1, 10**7))),
        ("90^\\circ", Quantity(Fraction(90), "°")),
        ("5 boxes of apples", Quantity(Fraction(5), "boxe apple")),
        ("5h", None),
        ("5 X", None),
        ("one 5", None),
        ("1e309", None),
        ("9" * NUMBER_CHARACTERS, Quantity(Fraction(int("9" * NUMBER_CHARACTERS)))),
        ("9" * (NUMBER_CHARACTERS + 1), None),
    ],
)
def test_quantities(text, quantity):
    assert read_quantity(text) == quantity


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I get 3, then 4 and so 12 apples.", "12 apples"),
        ("The total is 5 million people.", "5 million people"),
        ("It costs $5, in total $30.", "$30"),
        ("so it is -7", "-7"),
        ("so 10^6", "10^"),  # a formula in prose is not read, and no bare number either
        (r"first $x = 3$, so $x + 1 = \frac{8}{2}$.", r"x + 1 = \frac{8}{2}"),
        (r"The final answer is \(\frac{1}{2}\). I hope it is right, as $3$ was not.", "3"),
        (r"so \[ x^2 \]", r"\[ x^2 \]"),
        ("<think>7</think> nothing", None),
        ("<answer>unknown</answer> 7", "unknown"),
        (r"7 \boxed{}", "7"),
        (r"\boxed{\frac{1}{2}} is 0.5", r"\frac{1}{2}"),
    ],
)
def test_find_answer(text, answer):
    found = find_answer(text)
    assert (found.strip() if found else found) == answer


@pytest.mark.parametrize(
    ("reference", "expression"),
    [
        ("5 cm", True),
        ("x+1", True),
        (r"\frac{1}{2}", True),
        ("(1, \\infty)", True),
        ("x = 5", True),
        ("east", True),
        (r"\text{(B)}", True),
        ("see the solution", False),
        ("no answer", False),
        (r"\frac{1}{", False),
        ("???", False),
        (r"\hat{:=f()}", False),
    ],
)
def test_references_that_are_no_expression(reference, expression):
    assert is_expression(reference) == expression
    if not expression:
        assert math_verify([r"\boxed{5}"], answer=[reference]) == [None]


def test_a_text_reference_is_compared_as_text():
    """Letters of words are never multiplied: east, seat and e*a*s*t."""
    for given, same in (("East", True), ("seat", False), ("e a s t", False), ("eats", False)):
        assert same_answer(given, "east", tolerance=1e-6, latex=True) == same


PIECES = ["<answer>", "</answer>", "<think>", "</think>", "< ", "\\boxed{", "\\fbox{", "{", "}", "(", ")", "[", "\\[",
          "\\(", "$", "1", "1,", "1 111", ",111", "5 / ", "a/", "aa/", "aa-", "a.", "10^", "\\frac{1}{2}", "\\frac",
          " ", "\n", "-",
          "+-", "½", "²", "\u200b", "é", "\\text{", "m^2", "####", "=", "x = ", "a ", "EUR", "5e", "°", "^{",
          "~", "\\", "final answer is", "and", " or ", "'", "_{1}", "..", "*", "\ufeff"]  # fmt: skip


def _seconds(text: str) -> float:
    start = time.process_time()
    for answer_format in ("answer_tag", "boxed", "hashes"):
        extract_answer(text, answer_format)
    find_answer(text)
    without_thoughts(text)
    plain_text(text)
    parse_number(text)
    same_answer(text, "42", tolerance=1e-6, latex=False)
    same_answer("42 cm", text, tolerance=1e-6, latex=False)
    return time.process_time() - start


ENDS = (("", ""), ("<answer>5 ", "!</answer>"), ("\\boxed{", "}"))


def test_no_text_costs_more_than_its_length():
    """20 kB of one piece, or of two in turns, and of the slowest 100 kB: quadratic time is 25 times as long."""
    draw = random.Random(0)
    texts = ["".join(pieces) for pieces in zip(PIECES, draw.sample(PIECES, len(PIECES)), strict=True)] + PIECES
    seconds = {
        (head, text, tail): _seconds(head + text * (20_000 // len(text)) + tail)
        for text in texts
        for head, tail in ENDS
    }
    slowest = max(seconds, key=seconds.get)
    head, text, tail = slowest
    assert seconds[slowest] < 1, slowest  # about 0.1 s
    assert _seconds(head + text * (100_000 // len(text)) + tail) < 5, slowest


def test_no_short_text_takes_exponential_time():
    """Whatever up to 200 characters are made of: all patterns work on texts of that length."""
    draw = random.Random(1)
    for _ in range(1000):
        few = draw.sample(PIECES, draw.randint(1, 4))
        text = "5" + "".join(draw.choice(few) for _ in range(80)) + draw.choice("!x5 ")
        assert _seconds(text[:NUMBER_CHARACTERS]) < 0.5, text
