"""Which number a text is: its exact value and its unit, or that it is none.

What would change the value is understood or refused, never dropped: signs, scales, powers, and words like "half of" or
"more than". So a word before the number must be a common one, and one behind it is a unit unless it is known to be more
than that. Values are fractions, because 10000000000000001 and ..02 are the same float.
"""

import functools
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

from grpo.rewards.answers.words import COMMON, IDLE, NO_UNITS, POWERS, SCALES, SHORT_UNITS, UNITS

# Longer texts are no numbers. With the bound, no pattern below can cost more than a few microseconds.
NUMBER_CHARACTERS = 200
# Powers of ten beyond a float's are refused: 1e999999999 would fill the memory.
LARGEST_EXPONENT = 308


class Quantity(NamedTuple):
    """A number as written: `unit` is made of canonical names ("cm", "dollar / h"), "" without one."""

    value: int | Fraction
    unit: str = ""


# x, x_1, f(x), \theta, Area: an equation with such a left side says the value of its name.
NAME = r"(?:\\?[a-zA-Z]|\\[a-zA-Z]+|[a-zA-Z]{3,20})(?:_(?:\w|\{\w{1,8}\}))?'?(?: ?\([a-zA-Z](?:, ?[a-zA-Z]){0,4}\))?"
_NAMED = re.compile(NAME + r" ?= ?")


def parse_number(text: str) -> int | Fraction | None:
    """The one number in a text without its unit, or None: see read_quantity. `x = 7` is 7."""
    named = _NAMED.match(text[:NUMBER_CHARACTERS])
    quantity = read_quantity(text[named.end() :] if named else text)
    return quantity.value if quantity else None


# The usual answer, without the long way.
_USUAL = re.compile(r"(\$?)([-+]?[0-9]{1,3}(?:,[0-9]{3})+|[-+]?[0-9]+)(?:\.([0-9]+))?( [a-z]+)?")


@functools.lru_cache(maxsize=4096)  # the completions of a group have one reference, and often one answer
def read_quantity(text: str) -> Quantity | None:
    """The one number in a text and its unit: `$1,234.50`, `12 apples`, `-3/4`, `1 1/2`, `1.5e3 km`, `5 million`, `42°`.

    A percent sign is a unit: `50%` is 50, never 0.5. None if the text has no number, several (`3 or 4`), a formula
    (`2*3`, `5!`, `5x`, `x = 5`), a date or time (`5 pm`, `5 May`), a word that may change the value (`twice 5`,
    `5 or more`, `not 5`), or more than NUMBER_CHARACTERS.
    """
    if len(text) > NUMBER_CHARACTERS:
        return None
    if usual := _USUAL.fullmatch(text):
        whole, decimals = usual[2].replace(",", ""), usual[3] or ""
        value = Fraction(int(whole + decimals), 10 ** len(decimals)) if decimals else int(whole)
        scale, unit = (_read_after(usual[4]) or (0, [])) if usual[4] else (1, [])
        if usual[1]:
            unit = ["dollar", *(unit[1:] if unit[:1] == ["dollar"] else unit)]
        return Quantity(value * scale, " ".join(unit)) if scale else None
    if text.isascii() and not _DIGIT.search(text):
        return None
    text = plain_text(text)
    if "\\frac" in text:
        text = " ".join(_FRACTION.sub(r" \1/\3 ", text).split())
    if text[:1] == "(" and text[-1:] == ")" and "," not in text:
        text = text[1:-1].strip()
    start = _FIRST_DIGIT.search(text)
    if not start:
        return None
    before = _read_before(text[: start.start()])
    number = _read_value(text[start.start() :])
    if before is None or number is None:
        return None
    sign, currency = before
    value, rest = number
    after = _read_after(rest)
    if after is None:
        return None
    scale, unit = after
    if currency and unit[:1] == [currency]:  # $18 dollars
        unit = unit[1:]
    return Quantity(sign * value * scale, " ".join([currency, *unit] if currency else unit))


# ---------------------------------------------------------------------------------------------------------------------
# Characters and LaTeX

_DASHES = (  # Unicode's dashes (Pd), and the signs called minus
    "\u058a\u05be\u1400\u1806\u2010\u2011\u2012\u2013\u2014\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40\u2e5d\u301c\u3030\u30a0"
    "\ufe31\ufe32\ufe58\ufe63\uff0d\U00010ead\u2212\u02d7\u2043\u2796\u207b\u208b\u23af\u2500\u00ad"
)
_ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff"
_CHARACTERS = (
    {0xFF01 + i: chr(0x21 + i) for i in range(94)}  # full-width ASCII
    | dict.fromkeys(map(ord, _DASHES), "-")
    | dict.fromkeys(map(ord, _ZERO_WIDTH))
    | {ord("\u2044"): "/", ord("\u2215"): "/", ord("\u2019"): "'"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT_POWER = re.compile(r"(?<![0-9])10([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+)")
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_FRACTION = re.compile(r"\\[dtc]?frac ?(?:\{ ?([-+]?[0-9.]+) ?\}|([0-9])) ?(?:\{ ?([0-9.]+) ?\}|([0-9]))")
_TEXT_COMMAND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox|operatorname) ?\{([^{}]*)\}")
_DEGREES = re.compile(r"\^? ?\{? ?(?:\\circ|\\degrees?|°)(?![a-zA-Z]) ?\}?")
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|thinspace)(?![a-zA-Z])|(?<!\\)\\[,;: ]|~")
_NO_SPACE = re.compile(r"\\! ?")  # \! takes space away, and a blank behind a command is none
_WRAPPERS = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def plain_text(text: str) -> str:
    """The text as a reader sees it, on one line: no marks of LaTeX for text, spacing and degrees.

    All dashes are `-`, full-width characters are ASCII, Markdown and the dollars or brackets of a formula are gone. A
    fraction of digits is written `\\frac{1}{2}`, not `1/2`, which before a letter would be another value.
    """
    text = " ".join(text.split())
    if not text.isascii():
        text = _SUPERSCRIPT_POWER.sub(lambda match: "10^" + match[1].translate(_SUPERSCRIPTS), text)
        text = _VULGAR_FRACTION.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0])} ", text)
        text = text.translate(_CHARACTERS)
        text = _DEGREES.sub("°", text)
    if "\\" in text:
        text = _NO_SPACE.sub("", text).replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
        text = _DEGREES.sub("°", _SPACING.sub(" ", text))
        text = _FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
        text = _TEXT_COMMAND.sub(r" \1 ", text)
    elif "{,}" in text:
        text = text.replace("{,}", ",")
    text = " ".join(text.split()).strip("*_` ")
    for _ in range(2):
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and inner and opening not in inner:
                text = inner.strip()
    return text.strip("*_` ")


# ---------------------------------------------------------------------------------------------------------------------
# The value

_DIGIT = re.compile("[0-9]")
_FIRST_DIGIT = re.compile(r"\.?[0-9]")
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?: [0-9]{3})+(?![0-9])|[0-9]+)"
_PLAIN = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,4}}(?![0-9]))?"
_POWER_OF_TEN = r"10 ?(?:\^|\*\*) ?(?:\{ ?([-+]?[0-9]{1,4}) ?\}|([-+]?[0-9]{1,4}))"
_MIXED = re.compile(r"([0-9]+) ([0-9]+) ?/ ?([0-9]+)")
_QUOTIENT = re.compile(rf"({_PLAIN}) ?/ ?({_PLAIN})")
_SCIENTIFIC = re.compile(rf"(?:({_PLAIN}) ?(?:×|\\times|\\cdot|\*|x) ?)?{_POWER_OF_TEN}(?![0-9])")
_ONE = re.compile(_PLAIN)


def _read_value(text: str) -> tuple[int | Fraction, str] | None:
    """The value of the number that a text begins with, and what follows it."""
    if match := _SCIENTIFIC.match(text):
        exponent = int(match[2] or match[3])
        factor = _decimal(match[1] or "1")
        if factor is None or abs(exponent) > LARGEST_EXPONENT:
            return None
        return factor * Fraction(10) ** exponent, text[match.end() :]
    if (match := _MIXED.match(text)) and 0 < int(match[2]) < int(match[3]):
        return int(match[1]) + Fraction(int(match[2]), int(match[3])), text[match.end() :]
    if match := _QUOTIENT.match(text):
        top, bottom = _decimal(match[1]), _decimal(match[2])
        return (Fraction(top) / bottom, text[match.end() :]) if top is not None and bottom else None
    match = _ONE.match(text)
    value = _decimal(match[0]) if match else None
    return None if value is None else (value, text[match.end() :])


def _decimal(digits: str) -> int | Fraction | None:
    if digits.isdigit():
        return int(digits)
    mantissa, _, exponent = re.sub("[, ]", "", digits).lower().partition("e")
    if abs(int(exponent or "0")) > LARGEST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** int(exponent or "0")


# ---------------------------------------------------------------------------------------------------------------------
# What stands before and behind it

_BEFORE = re.compile(
    r"(?P<words>.*?)(?P<gap> ?)(?P<sign>[-+]?) ?(?P<currency>US\$|[$€£¥₹]|EUR|USD|GBP)? ?(?P<inner>[-+]?) ?", re.DOTALL
)


def _read_before(text: str) -> tuple[int, str] | None:
    """Sign and currency of a number from what stands before it; None if that is more than common words."""
    match = _BEFORE.fullmatch(text)
    words, signs = match["words"], match["sign"] + match["inner"]
    if len(signs) > 1 or (words and not match["gap"] and words[-1] not in ":="):
        return None
    if not re.fullmatch(r"[a-zA-Z' ]*[:=]? ?", words):
        return None
    if not COMMON.issuperset(re.findall("[a-z]+", words.lower())):
        return None
    return (-1 if signs == "-" else 1), UNITS.get((match["currency"] or "").lower(), "")


_TOKEN = re.compile(r"[a-zA-Z]+(?:\^?\{?[23²³]\}?)?|[%°$€£¥₹/]")
_AFTER = re.compile(
    r"(?:-|/(?=[a-zA-Z]))?"
    r"(?:[a-zA-Z '%°$€£¥₹]|(?<=[a-zA-Z])(?:\^\{[23]\}|\^?[23²³]|/|-(?=[a-zA-Z])|\.(?=[a-zA-Z ]))|(?<= )/)*\.?"
)


def _read_after(text: str) -> tuple[int, list[str]] | None:
    """Scale and canonical unit from what follows a number; None if it is, or may be, more than a scale and a unit."""
    if not text:
        return 1, []
    text = text.rstrip(" ,").removesuffix(".")
    if not _AFTER.fullmatch(text) or text[:2] in ("- ", "-"):
        return None
    touches = text[:1].isalpha()
    tokens = _TOKEN.findall(re.sub(r"\.|'", "", text))  # p.m. is pm
    scale, unit = 1, []
    for index, token in enumerate(tokens):
        word = token.lower()
        if word in SCALES and scale == 1 and not unit:
            scale = SCALES[word]
        elif word in NO_UNITS or (token[0].isalpha() and not _may_be_unit(token, touches and index == 0)):
            return None
        elif word not in IDLE or token == "in" and index == 0:
            unit += _canonical(token)
    return scale, _powers_last(unit)


def _may_be_unit(token: str, touches: bool) -> bool:
    letters = token.rstrip("23²³^{}")
    return len(letters) > (3 if touches else 1) or (letters in SHORT_UNITS and len(letters) > touches)


def _canonical(token: str) -> list[str]:
    letters = token.rstrip("23²³^{}")
    power = token[len(letters) :].strip("^{}").translate(_SUPERSCRIPTS)
    word = letters.lower()
    if letters in SHORT_UNITS and letters[0] == "M":  # "Mg" is not "mg"
        word = letters
    singular = word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
    name = UNITS.get(word) or UNITS.get(singular, singular)
    return [f"{name}^{power}"] if power else name.split()


def _powers_last(unit: list[str]) -> list[str]:
    """`square m` and `sq m` as `m^2`, so that they are one unit with it."""
    if len(unit) > 1 and unit[0] in POWERS:
        return [f"{unit[1]}^{POWERS[unit[0]]}", *unit[2:]]
    return unit
