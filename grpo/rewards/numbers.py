"""Which number a text is, written out: its exact value and its unit, or that it is none.

Nothing that could change the value is dropped: what is not read as digits, sign, power of ten or unit makes the text no
number. Values are fractions, because 10000000000000001 and ..02 are the same float. configs/ANSWERS.md has examples.
"""

import functools
import operator
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

# Longer texts are no numbers, so that no pattern below costs more than a few microseconds.
NUMBER_CHARACTERS = 200
# Powers of ten beyond a float's are refused: 1e999999999 would fill the memory.
LARGEST_EXPONENT = 308

# Spellings of the units that an answer may have and its reference not, or the other way round. Plurals of fewer than
# four letters are named here, because ms is not m.
UNITS = {
    "$": "$ US$ USD dollar", "€": "€ EUR euro", "£": "£ GBP", "¥": "¥ yen", "₹": "₹ rupee", "cent": "¢ cent",
    "%": "% percent", "°": "° degree deg", "°C": "°C", "°F": "°F",
    "mm": "mm millimeter", "cm": "cm cms centimeter", "m": "m meter", "km": "km kms kilometer",
    "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yds yard", "mi": "mi mile",
    "mg": "mg milligram", "g": "g gram", "kg": "kg kgs Kg kilo kilogram", "oz": "oz ounce", "lb": "lb lbs pound",
    "ml": "ml mL milliliter", "l": "l L liter", "cup": "cup", "gal": "gal gallon",
    "s": "s sec second", "min": "min minute", "h": "h hr hrs hour", "day": "day", "week": "week wk wks",
    "month": "month", "year": "year yr yrs", "mi/h": "mph", "km/h": "kph", "unit": "unit",
}  # fmt: skip
_UNIT_NAMES = {spelling: name for name, spellings in UNITS.items() for spelling in spellings.split()}


class Number(NamedTuple):
    """A number as written: `unit` is what stands around it, known units by one name (`cm`, `$/h`), "" without one."""

    value: Fraction
    unit: str
    has_known_unit: bool
    """Whether the unit is none or in UNITS, so that it may be missing on the other side."""
    is_rounded: bool  # ≈12
    is_division: bool  # work left to do: a fraction that is whole (96/2), not in lowest terms, or of decimals


# ---------------------------------------------------------------------------------------------------------------------
# Clean-up

_CHARACTERS = (
    {0xFF01 + i: chr(0x21 + i) for i in range(94)}  # full-width ASCII
    | dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))  # without width
    | {ord("\u2212"): "-", ord("\u2013"): "-", ord("\u2044"): "/", ord("²"): "^2", ord("³"): "^3"}
    | {ord("º"): "°", ord("˚"): "°", ord("℃"): "°C", ord("℉"): "°F"}
    | {ord("∞"): "\\infty ", ord("∅"): "\\emptyset ", ord("π"): "\\pi ", ord("≤"): "\\le ", ord("≥"): "\\ge "}
)
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
_SPACING = re.compile(r"\\(?:left|right|displaystyle|quad|qquad|thinspace)(?![a-zA-Z])|(?<!\\)\\[,;: ]|(?<=.)~")
_DEGREES = re.compile(r"\^? ?\{? ?(?:\\circ|\\degrees?|°)(?![a-zA-Z]) ?\}?")
# LaTeX's other names of a command.
_SYNONYMS = {"cfrac": "frac", "dfrac": "frac", "tfrac": "frac", "varnothing": "emptyset", "leq": "le", "geq": "ge"}
_SYNONYM = re.compile(rf"\\({'|'.join(_SYNONYMS)})(?![a-zA-Z])")
_FRACTION = re.compile(r"\\frac ?(?:\{ ?([-+]?[0-9.]+) ?\}|([0-9])) ?(?:\{ ?([0-9.]+) ?\}|([0-9]))")
# LaTeX's commands around words.
TEXT_COMMAND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|mbox) ?\{([^{}]*)\}")
_ONE_IN_BRACES = re.compile(r"([_^])\{(\w)\}")
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("(", ")"))


@functools.lru_cache(maxsize=4096)  # the completions of a group have one reference, and often one answer
def clean_text(text: str) -> str:
    """The text as a reader sees it, on one line, full-width characters as ASCII, ½ as 1/2.

    Without LaTeX's marks of text, spacing and size, Markdown, the dollars or brackets of a formula, parentheses around
    the whole, and a final period.
    """
    text = " ".join(text.split())
    if not text.isascii():
        text = _VULGAR_FRACTION.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0])} ", text)
        text = _DEGREES.sub("°", text.translate(_CHARACTERS))
    if "\\" in text:
        text = re.sub(r"\\! ?", "", text).replace("\\$", "$").replace("\\%", "%")
        text = _SYNONYM.sub(lambda match: f"\\{_SYNONYMS[match[1]]}", text)
        text = _DEGREES.sub("°", _SPACING.sub(" ", text))
        text = _FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
        text = TEXT_COMMAND.sub(r" \1 ", text)
    text = _ONE_IN_BRACES.sub(r"\1\2", text.replace("{,}", ","))
    text = " ".join(text.split()).strip("*_` ").removesuffix(".").rstrip("*_` ")
    for _ in range(2):
        for opening, closing in _WRAPPERS:
            inner = text[len(opening) : -len(closing)]
            several = opening in inner or (opening == "(" and re.search(r"[,;()]", inner))
            if text.startswith(opening) and text.endswith(closing) and inner and not several:
                text = inner.strip("*_` ").removesuffix(".")
    return text


# ---------------------------------------------------------------------------------------------------------------------
# The value and its unit

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,4}}(?![0-9]))?"
_TIMES = r"(?:×|\\times|\\cdot|\*|x)"
_NUMBER = re.compile(
    r"(?P<about>≈|~|\\approx)? ?(?P<sign>[-+]?|(?i:minus|negative) ) ?"
    r"(?P<currency>US\$|[$€£¥₹])? ?(?P<inner_sign>[-+]?) ?"
    rf"(?:(?:(?P<factor>{_DECIMAL}) ?{_TIMES} ?)?10 ?\^ ?\{{?(?P<exponent>[-+]?[0-9]{{1,4}})\}}?(?![0-9])"
    r"|(?P<whole>[0-9]+) (?P<part>[0-9]+) ?/ ?(?P<parts>[0-9]+)"
    rf"|(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL}))"
    r"(?P<gap> ?)(?P<unit>(?:[a-zA-Z%°$€£¥₹¢]|/(?=[a-zA-Z]))[^-+=<>()\[\]|,;\\]*)?"  # no sign, bracket or relation
)
_OPERATION = re.compile(rf"({_DECIMAL}) ?([-+/]|{_TIMES}) ?({_DECIMAL})")
# The s of a word of four letters and more. Fewer letters may be symbols.
_PLURAL = re.compile("(?<=[a-zA-Z]{3})(?<!s)s$")
_TEMPERATURE = re.compile(r"(?!.$)(?:°|deg(?:rees?)?)? ?(c|f)(?:elsius|ahrenheit)?", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def read_number(text: str) -> Number | None:
    """The one number that a clean text is: `$1,234.50`, `12 apples`, `-3/4`, `1 1/2`, `1.5e3 km`, `10^6`, `42°`, `≈12`.

    What follows the digits is the unit, whatever it says, but without a sign, bracket or relation in it (`2x + 1`).
    Only one in UNITS may be missing on the other side. None for anything else: no number, an operation (`2*3`, `5!`),
    words in front, more than NUMBER_CHARACTERS.
    """
    match = _NUMBER.fullmatch(_with_slashes(text)) if len(text) <= NUMBER_CHARACTERS else None
    if not match or (match["sign"] and match["inner_sign"]):
        return None
    value = _value(match)
    if value is None:
        return None
    parts = [_unit_name(part) for part in re.split(r" ?/ ?|(?:^| )per ", (match["unit"] or "").strip())]
    parts[0] = _UNIT_NAMES.get(match["currency"], "") + parts[0]
    unit = "/".join(parts)
    touches = match["unit"] and len(match["unit"]) == 1 and match["unit"].isalpha() and not match["gap"]  # 5h, 5m
    known = not unit or (all(part.partition("^")[0] in UNITS for part in unit.split("/")) and not touches)
    lowest = value.denominator > 1 and value.denominator == _decimal(match["bottom"] or "1")
    negative = match["inner_sign"] == "-" or match["sign"] not in ("", "+")
    return Number(-value if negative else value, unit, known, bool(match["about"]), bool(match["top"]) and not lowest)


def arithmetic(text: str) -> Fraction | None:
    """What two numbers joined by one of `+ - * /` are worth; None for any other text."""
    match = _OPERATION.fullmatch(_with_slashes(text[:NUMBER_CHARACTERS]))
    left, right = map(_decimal, match.group(1, 3)) if match else (None, None)
    if left is None or right is None or (match[2] == "/" and not right):
        return None
    return {"+": operator.add, "-": operator.sub, "/": operator.truediv}.get(match[2], operator.mul)(left, right)


def _with_slashes(text: str) -> str:
    return " ".join(_FRACTION.sub(r" \1/\3 ", text).split()) if "\\frac" in text else text


def _value(match: re.Match) -> Fraction | None:
    if match["whole"]:
        part, parts = int(match["part"]), int(match["parts"])
        return int(match["whole"]) + Fraction(part, parts) if 0 < part < parts else None
    digits = match["factor"] or match["top"] or match["decimal"] or "1"
    value, power, bottom = map(_decimal, (digits, f"1e{match['exponent'] or 0}", match["bottom"] or "1"))
    return None if value is None or power is None or not bottom else value * power / bottom


def _decimal(digits: str) -> Fraction | None:
    mantissa, _, exponent = re.sub("[, ]", "", digits).lower().partition("e")
    exponent = int(exponent or "0")
    return Fraction(mantissa) * Fraction(10) ** exponent if abs(exponent) <= LARGEST_EXPONENT else None


@functools.lru_cache(maxsize=4096)
def _unit_name(text: str) -> str:
    """One name for all spellings of a unit; what is not in UNITS stays as it is, except for its plural."""
    if degrees := _TEMPERATURE.fullmatch(text):
        return f"°{degrees[1].upper()}"
    base, caret, power = text.replace(" ^", "^").partition("^")
    power = power.replace(" ", "")  # 3x^2 y
    # symbols have a case (mg is not Mg), words do not
    for word in (base, base.lower() if len(base) > 3 else base):
        singular = _PLURAL.sub("", word)
        for spelling in (word, re.sub("(met|lit)re$", r"\1er", singular)):
            if spelling in _UNIT_NAMES:
                return _UNIT_NAMES[spelling] + caret + power
    # a form of its own that plural and singular share: boxes and box, berries and berry, cookies and cookie (cooky)
    shared = re.sub("(?<=[a-zA-Z]{2}[sxzh])e$", "", _PLURAL.sub("", base))
    return re.sub("(?<=[a-zA-Z]{2})ie$", "y", shared) + caret + power
