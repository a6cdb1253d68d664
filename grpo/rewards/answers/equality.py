"""When two answers are the same: as numbers with units, lists, equations, texts, and LaTeX expressions.

Where an answer stands is extract.py's, which number it is numbers.py's, what an expression is latex.py's. Wherever a
careful reader could doubt, the answer is not the same.
"""

import functools
import re
from fractions import Fraction

from grpo.rewards.answers.extract import extract_answer, find_answer
from grpo.rewards.answers.latex import parse_expression, same_expression
from grpo.rewards.answers.numbers import NAME, Quantity, parse_number, plain_text, read_quantity

__all__ = ["extract_answer", "find_answer", "is_expression", "parse_number", "same_answer"]

# Longer answers are equal only as they stand: nothing below has to be fast for a text of any length.
ANSWER_CHARACTERS = 1000

_INTEGER = re.compile(r"[-+]?[0-9]{1,200}")


def same_answer(given: str, reference: str, tolerance: float, latex: bool) -> bool:
    """Whether two answers are equal as math_reward defines it, with `latex` also as expressions (main thread only)."""
    if given == reference:
        return True
    if _INTEGER.fullmatch(given) and _INTEGER.fullmatch(reference):
        return int(given) == int(reference)
    if max(len(given), len(reference)) > ANSWER_CHARACTERS:
        return given.casefold().split() == reference.casefold().split()
    found, expected = read_quantity(given), read_quantity(reference)
    if found and expected:
        return _same_quantity(found, expected, tolerance)
    if not latex and (found or expected) and "=" not in given + reference:
        return False
    given, reference = plain_text(given), plain_text(reference)
    if not given or not reference:
        return False
    brackets, items = _list(given)
    expected_brackets, expected_items = _list(reference)
    if items and expected_items:
        if not _same_brackets(brackets, expected_brackets):
            return False
        return _same_items(items, expected_items, brackets in _UNORDERED, tolerance, latex)
    if bool(items) != bool(expected_items) and not _SEVERAL.search(reference if items else given):
        return False
    if "=" in given or "=" in reference:
        sides, expected_sides = _sides(given), _sides(reference)
        if not sides or not expected_sides:  # a chain, or a relation
            return _as_text(given) == _as_text(reference)
        (name, value), (expected_name, expected_value) = sides, expected_sides
        named, expected_named = (not side or bool(_NAME.fullmatch(side)) for side in (name, expected_name))
        if named and expected_named:
            same_name = not name or not expected_name or _as_text(name) == _as_text(expected_name)
            return same_name and same_answer(value, expected_value, tolerance, latex)
        if not name or not expected_name:
            return False
    # What is a number for one and not for the other, such as 5 m and 5 M, is not equal by its letters.
    if (found is None) == (expected is None) and _as_text(given) == _as_text(reference):
        return True
    return latex and _same_latex(given, reference, tolerance)


def is_expression(reference: str) -> bool:
    """Whether a reference can be compared: a number, a single word, or LaTeX that parses. Main thread only."""
    if len(reference) > ANSWER_CHARACTERS:
        return False
    text = plain_text(reference)
    if read_quantity(text) or re.fullmatch(r"[^\W\d_]+\.?|\([^\W\d_]\)", text):
        return True
    _, items = _list(text)
    if items:
        return all(map(is_expression, items))
    _, value = _sides(text) or ("", text)
    return not _is_prose(value) and parse_expression(value) is not None


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def _same_quantity(given: Quantity, reference: Quantity, tolerance: float) -> bool:
    """Units agree if they are the same or one side has none. Integers must be the same, others within the tolerance."""
    if given.unit and reference.unit and given.unit != reference.unit:
        return False
    if given.value.denominator == 1 and reference.value.denominator == 1:
        return given.value == reference.value
    return abs(given.value - reference.value) <= _exactly(tolerance) * abs(reference.value)


@functools.cache
def _exactly(tolerance: float) -> Fraction:
    return Fraction(str(tolerance))  # a millionth, and not the float next to it


# ---------------------------------------------------------------------------------------------------------------------
# Lists, tuples, intervals

_OPENING = {"(": ")", "[": "]", "\\{": "\\}"}
_UNORDERED = ("", "\\{\\}")
_LISTED = re.compile(r"[,;]|\\\{|\\lbrace")
_BRACKET = re.compile(r"\\[{}]|[()\[\]{},;]")
# A text that stands for several values without listing them.
_SEVERAL = re.compile(r"\\pm|±|\\mp|[<>≤≥∈]|\\(?:leq?|geq?|lt|gt|in)(?![a-zA-Z])|\\cup|∪")


def _list(text: str) -> tuple[str, list[str]]:
    """Its brackets ("", "()", "[)", "\\{\\}" ..) and its items; no items if the text is no list."""
    if not _LISTED.search(text):
        return "", []
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    brackets, inner = "", text
    opening = next((name for name in _OPENING if text.startswith(name)), "")
    closing = next((name for name in _OPENING.values() if text.endswith(name)), "")
    is_set = "\\{" in (opening, closing) or "\\}" in (opening, closing)
    if opening and closing and (not is_set or _OPENING[opening] == closing):
        depth_inside = _split(text[len(opening) : -len(closing)], bare=False)
        if depth_inside is not None:
            if len(depth_inside) > 1 or is_set:
                return opening + closing, depth_inside
            inner = ""
    pieces = _split(inner, bare=True) if inner else None
    return brackets, pieces if pieces and len(pieces) > 1 else []


def _split(text: str, bare: bool) -> list[str] | None:
    """At its outermost commas; None if its brackets do not balance. A bare `1,234` is one number."""
    depth, cuts = 0, []
    for match in _BRACKET.finditer(text):
        token = match[0]
        if token in ("(", "[", "{", "\\{"):
            depth += 1
        elif token in (",", ";"):
            if depth == 0:
                cuts.append(match.start())
        else:
            depth -= 1
            if depth < 0:
                return None
    if depth:
        return None
    spaced = [cut for cut in cuts if text[cut + 1 : cut + 2] == " "]
    if bare and not spaced:
        cuts = [cut for cut in cuts if not re.match(r",[0-9]{3}(?![0-9])", text[cut:])]
    cuts = spaced or cuts
    return [text[start + 1 : end].strip() for start, end in zip([-1, *cuts], [*cuts, len(text)], strict=True)]


def _same_brackets(given: str, reference: str) -> bool:
    return given == reference or (given in _UNORDERED and reference in _UNORDERED)


def _same_items(given: list[str], reference: list[str], unordered: bool, tolerance: float, latex: bool) -> bool:
    if len(given) != len(reference) or not all(given):
        return False
    if not unordered:
        return all(same_answer(*pair, tolerance, latex) for pair in zip(given, reference, strict=True))
    left = list(reference)
    for item in given:
        match = next((other for other in left if same_answer(item, other, tolerance, latex)), None)
        if match is None:
            return False
        left.remove(match)
    return True


# ---------------------------------------------------------------------------------------------------------------------
# Equations

_EQUALS = re.compile(r"(?<![<>!:=\\])=(?!=)")
_NAME = re.compile(NAME)


def _sides(text: str) -> tuple[str, str] | None:
    """Left and right side of an equation, ("", text) for a text that is none; None for a chain or another relation."""
    sides = _EQUALS.split(text)
    if len(sides) > 2 or (len(sides) == 1 and "=" in text):
        return None
    return (sides[0].strip(), sides[1].strip()) if len(sides) == 2 else ("", text)


# ---------------------------------------------------------------------------------------------------------------------
# Texts

_OPTION = re.compile(r"(?:option|choice)?[ :]*[(\[]?([a-z])[)\]]?[.:]?")
_AROUND_SIGNS = re.compile(r" ?([^\w\s]) ?")
_ONE_IN_BRACES = re.compile(r"([_^])\{(\w)\}")


def _as_text(text: str) -> str:
    """For comparing texts: no case, final period, blanks around signs, or parentheses around an option's letter."""
    text = text.casefold().strip("*_` ").removesuffix(".")
    option = _OPTION.fullmatch(text)
    return option[1] if option else _AROUND_SIGNS.sub(r"\1", _ONE_IN_BRACES.sub(r"\1\2", text))


# ---------------------------------------------------------------------------------------------------------------------
# Expressions

_COMMAND = re.compile(r"\\[a-zA-Z]+")
_WORD = re.compile(r"[^\W\d_]{3,}")
# Names of functions, and environments, that may stand without a backslash.
_FUNCTIONS = frozenset(["sin", "cos", "tan", "sec", "csc", "cot", "log", "exp", "sqrt", "gcd", "lcm", "max", "min"])
_FUNCTIONS |= {"matrix", "pmatrix", "bmatrix", "vmatrix", "array"}
# Other bases, ratios and times, several signs, "not" and hexadecimal, of which the library reads less than is there.
_LITERAL = re.compile(r"[0-9)] ?_|:|\+ ?-|- ?\+|^- ?-|\\not|\\neg|¬|(?<![0-9.])0[xXbBoO][0-9a-fA-F]")
# With its unit: \text{..} at the end, which plain_text has taken out of its braces.
_TRAILING_WORDS = re.compile(r"(?P<value>.*[\d})\]]) (?P<unit>[a-zA-Z][a-zA-Z./ ]*(?:\^?[23])?)")


def _same_latex(given: str, reference: str, tolerance: float) -> bool:
    (given, unit), (reference, expected_unit) = _without_unit(given), _without_unit(reference)
    if unit and expected_unit and unit != expected_unit:
        return False
    if _LITERAL.search(given) or _LITERAL.search(reference) or _is_prose(reference):
        return False
    # Letters that stand together are a product to the parser, so words must be the same words on both sides. It does
    # not tell R from r either.
    if _words(given) != _words(reference) or _mixes_case(given) or _mixes_case(reference):
        return False
    return same_expression(given, reference, tolerance)


def _without_unit(text: str) -> tuple[str, str]:
    match = _TRAILING_WORDS.fullmatch(text)
    quantity = read_quantity(f"1 {match['unit']}") if match else None
    return (match["value"], quantity.unit) if quantity and quantity.unit else (text, "")


def _is_prose(text: str) -> bool:
    """Whether a text is words and nothing to calculate with."""
    rest = _COMMAND.sub("", text)
    return bool(re.search(r"[^\W\d_]{2,}", rest)) and not re.search(r"[0-9+*/^=<>\\]", rest)


def _words(text: str) -> list[str]:
    words = (word.casefold() for word in _WORD.findall(_COMMAND.sub(" ", text)))
    return sorted(word for word in words if word not in _FUNCTIONS)


def _mixes_case(text: str) -> bool:
    letters = set(re.findall("[a-zA-Z]", _COMMAND.sub(" ", text)))
    return any(letter.swapcase() in letters for letter in letters)
