"""When two answers are the same, in three sentences.

Two answers are the same if their texts agree after a clean-up: LaTeX's marks of text and spacing, Markdown, parentheses
around the whole, case, blanks around signs, a final period, and "x =" if only one side has it. Or if each is one number
written out (digits, decimals, a fraction, a power of ten) of the same exact value, or within `tolerance` where one of
them is no integer, and with the same unit, of which a common one (UNITS in numbers.py) may be missing on one side. Or,
as LaTeX, if math-verify takes two expressions as equal whose words, functions and brackets agree; but a reference that
is a number is equal to numbers only, never to an operation that is left to do.

Where an answer stands is extract.py's, which number it is numbers.py's, what an expression is latex.py's. Wherever a
careful reader could doubt, the answer is not the same.
"""

import functools
import re
from fractions import Fraction

from grpo.rewards.answers.latex import parse_expression, same_expression
from grpo.rewards.answers.numbers import clean_text, read_number

# Longer answers are equal only as they stand: nothing below has to be fast for a text of any length.
ANSWER_CHARACTERS = 1000

# x =, x_1 =, f(x) =, \theta =. Two letters may be a product.
_NAME = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\w|_\{\w{1,8}\})? ?(?:\([a-zA-Z]\))? ?= ?")
_AROUND_SIGNS = re.compile(r" ?([^\w\s]) ?")


def same_answer(given: str, reference: str, tolerance: float, latex: bool) -> bool:
    """Whether two answers are the same, with `latex` also as expressions (in the process's main thread only)."""
    if max(len(given), len(reference)) > ANSWER_CHARACTERS:
        return given.casefold().split() == reference.casefold().split()
    given, reference = clean_text(given), clean_text(reference)
    if not given or not reference:
        return False
    if "=" not in given or "=" not in reference:
        given, reference = _without_name(given), _without_name(reference)
    found, expected = read_number(given), read_number(reference)
    if found and expected:
        missing = not found.unit or not expected.unit
        if found.unit != expected.unit and not (missing and found.has_known_unit and expected.has_known_unit):
            return False
        if found.value.denominator == 1 and expected.value.denominator == 1:
            return found.value == expected.value
        return abs(found.value - expected.value) <= _exactly(tolerance) * abs(expected.value)
    if expected and expected.has_known_unit:
        return False
    if _AROUND_SIGNS.sub(r"\1", given).casefold() == _AROUND_SIGNS.sub(r"\1", reference).casefold():
        return True
    return latex and same_expression(given, reference, tolerance)


def is_expression(reference: str) -> bool:
    """Whether a reference can be compared: a number, a single word, or LaTeX that parses. Main thread only."""
    text = _without_name(clean_text(reference[: ANSWER_CHARACTERS + 1]))
    if len(text) > ANSWER_CHARACTERS:
        return False
    return bool(read_number(text) or re.fullmatch(r"[^\W\d_]+", text)) or parse_expression(text) is not None


def parse_number(text: str) -> int | Fraction | None:
    """The value of the one number that an answer is, without its unit and "x ="; None if it is none."""
    number = read_number(_without_name(clean_text(text[:ANSWER_CHARACTERS])))
    return number.value if number and number.has_known_unit else None


def _without_name(text: str) -> str:
    name = _NAME.match(text)
    return text[name.end() :] if name else text


@functools.cache
def _exactly(tolerance: float) -> Fraction:
    return Fraction(str(tolerance))  # a millionth, and not the float next to it
