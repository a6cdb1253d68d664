"""Which number a text is: its exact value and its unit. Or that it is not a number.

Nothing that could change the value is dropped. A text with anything else than digits, a sign, a power of ten and a unit
is not a number. Values are fractions, because 10000000000000001 and ..02 are the same float. docs/answers.md has
examples.
"""

import functools
import operator
import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

# Longer texts are not numbers, so that no pattern below takes more than a few microseconds.
NUMBER_CHARACTERS = 200
# Larger powers of ten than a float has are refused: 1e999999999 would fill the memory.
LARGEST_EXPONENT = 308

# Units that an answer may have and its reference not, or the other way round. Each line has a name and its spellings.
# The plural in -s of a word of three letters or more needs no entry. Shorter ones have one, because ms is not m.
UNITS = """
    $ US$ USD dollar
    € EUR euro
    £ GBP
    ¥ yen
    ₹ rupee
    cent ¢
    % percent
    ° degree deg
    °C
    °F
    mm millimeter millimetre
    cm cms centimeter centimetre
    m meter metre
    km kms kilometer kilometre
    in inch inche
    ft foot feet
    yd yds yard
    mi mile
    mg milligram
    g gram
    kg kgs Kg kilo kilogram
    oz ounce
    lb lbs pound
    ml mL milliliter millilitre
    l L liter litre
    cup
    gal gallon
    s sec second
    min minute
    h hr hrs hour
    day
    week wk wks
    month
    year yr yrs
    mi/h mph
    km/h kph
    unit
"""
_UNIT_NAMES = {}
for _line in UNITS.splitlines():
    for _spelling in _line.split():
        _UNIT_NAMES[_spelling] = _line.split()[0]


class Number(NamedTuple):
    """A number as it is written."""

    value: Fraction
    unit: str
    """The text around the digits. A known unit has its name in UNITS (`cm`, `$/h`). Empty without one."""
    has_known_unit: bool
    """Whether the unit is empty or in UNITS, so that the other side may lack it."""
    is_division: bool
    """Whether work is left: a fraction that is whole (96/2), not in lowest terms, or of decimals."""


# ---------------------------------------------------------------------------------------------------------------------
# Clean-up

_FULL_WIDTH = {0xFF01 + i: chr(0x21 + i) for i in range(94)}
_CHARACTERS = _FULL_WIDTH | str.maketrans(
    {
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff"),  # without width
        "\u2212": "-",
        "\u2013": "-",
        "\u2044": "/",
        "²": "^{2}",
        "³": "^{3}",
        "º": "°",
        "˚": "°",
        "℃": "°C",
        "℉": "°F",
        "∞": "\\infty ",
        "∅": "\\emptyset ",
        "π": "\\pi ",
        "≤": "\\le ",
        "≥": "\\ge ",
        "≠": "\\ne ",
        "±": "\\pm ",
        "∪": "\\cup ",
        "∈": "\\in ",
        "·": "\\cdot ",
        "α": "\\alpha ",
        "β": "\\beta ",
        "θ": "\\theta ",
        "λ": "\\lambda ",
    }
)
_VULGAR_FRACTION = re.compile("[¼-¾⅐-⅞]")
# √3 and √(x+1), but not √3x, which is one of two
_ROOT = re.compile(r"√ ?(?:([0-9]+)|\(([^()]*)\))(?![\w(.])")
_SPACING = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|quad|qquad|thinspace)(?![a-zA-Z])|(?<!\\)\\[,;: ]|(?<=.)~"
)
_DEGREES = re.compile(r"\^? ?\{? ?(?:\\circ|\\degrees?|°)(?![a-zA-Z]) ?\}?")
# LaTeX's other names of a command
_SYNONYMS = {
    **dict.fromkeys(("cfrac", "dfrac", "tfrac"), "frac"),
    "varnothing": "emptyset",
    **dict.fromkeys(("leq", "leqslant"), "le"),
    **dict.fromkeys(("geq", "geqslant"), "ge"),
    "neq": "ne",
    **dict.fromkeys(("dbinom", "tbinom"), "binom"),
    "lbrace": "{",
    "rbrace": "}",
}
_SYNONYM = re.compile(rf"\\({'|'.join(_SYNONYMS)})(?![a-zA-Z])")
_FRACTION = re.compile(r"\\frac ?(?:\{ ?([-+]?[0-9.]+) ?\}|([0-9])) ?(?:\{ ?([0-9.]+) ?\}|([0-9]))")
_SIGN_BELOW = re.compile(r"(\\frac ?\{) ?([0-9.]+ ?\} ?\{) ?- ?(?=[0-9.]+ ?\})")
# 3:30 PM, 3:30 p.m.
_TIME_OF_DAY = re.compile(r"(:[0-9]{2}) ?([ap])\.? ?m\b\.?", re.IGNORECASE)
# LaTeX's commands around words
TEXT_COMMAND = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal)|boldsymbol|bm|mbox) ?\{([^{}]*)\}")
_ONE_IN_BRACES = re.compile(r"([_^])\{(\w)\}(?! ?[0-9])")  # x^{2}3 is not x^23
_MARKDOWN = "*_` "
_WRAPPERS = {
    "$$": "$$",
    "$": "$",
    "\\(": "\\)",
    "\\[": "\\]",
    "(": ")",
}


@functools.lru_cache(maxsize=4096)  # the completions of a group have one reference, and often one answer
def clean_text(text: str) -> str:
    """Return the text as a reader sees it: on one line, full-width characters as ASCII, ½ as 1/2.

    These are dropped: LaTeX's marks of text, spacing and size, Markdown, the dollars or brackets of a formula,
    parentheses around the whole, and a final period or comma.
    """
    text = " ".join(text.split())
    if not text.isascii():
        text = _VULGAR_FRACTION.sub(lambda match: f" {unicodedata.normalize('NFKC', match[0])} ", text)
        text = _DEGREES.sub("°", text.translate(_CHARACTERS))
        text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1] or match[2]}}}", text)
    if "\\" in text:
        text = re.sub(r"\\! ?", "", text).replace("\\$", "$").replace("\\%", "%")
        text = text.replace("\\langle", "(").replace("\\rangle", ")")
        text = _SYNONYM.sub(lambda match: f"\\{_SYNONYMS[match[1]]}", text)
        text = _DEGREES.sub("°", _SPACING.sub(" ", text))
        text = _SIGN_BELOW.sub(r"\1-\2", text)
        text = _FRACTION.sub(lambda m: f"\\frac{{{m[1] or m[2]}}}{{{m[3] or m[4]}}}", text)
        text = TEXT_COMMAND.sub(r" \1 ", text)
    text = _ONE_IN_BRACES.sub(r"\1\2", text.replace("{,}", ",").replace("{:}", ":"))
    text = " ".join(text.split()).strip(_MARKDOWN)
    text = _TIME_OF_DAY.sub(lambda match: f"{match[1]} {match[2].lower()}m", text)
    if text.endswith((".", ",")):
        text = text[:-1].rstrip(_MARKDOWN)
    for opening, closing in [*_WRAPPERS.items()] * 2:
        inner = text[len(opening) : -len(closing)]
        if not inner or not text.startswith(opening) or not text.endswith(closing) or opening in inner:
            continue
        if opening != "(" or not re.search(r"[,;()]", inner):  # else a tuple
            text = inner.strip(_MARKDOWN).removesuffix(".")
    return text


# ---------------------------------------------------------------------------------------------------------------------
# The value and its unit

_DIGITS = r"(?:[1-9][0-9]{0,2}(?:(?:,[0-9]{3})+|(?: [0-9]{3})+)(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,4}}(?![0-9]))?"
_TIMES = r"(?:×|\\times|\\cdot|\*|x)"
_NUMBER = re.compile(
    r"(?:≈|~|\\approx)? ?(?P<sign>[-+]?|(?i:minus|negative) ) ?"
    r"(?P<currency>US\$|[$€£¥₹])? ?(?P<inner_sign>[-+]?) ?"
    rf"(?:(?:(?P<factor>{_DECIMAL}) ?{_TIMES} ?)?10 ?\^ ?\{{?(?P<exponent>[-+]?[0-9]{{1,4}})\}}?(?![0-9])"
    r"|(?P<once>[0-9]+\.[0-9]*)\\(?:overline|bar) ?\{?(?P<repeated>[0-9]+)\}?"
    r"|(?P<whole>[0-9]+) (?P<part>[0-9]+) ?/ ?(?P<parts>[0-9]+)"
    rf"|(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL}))"
    r"(?P<gap> ?)(?P<unit>(?:[a-zA-Z%°$€£¥₹¢]|/(?=[a-zA-Z]))[^-+=<>()\[\]|,;\\]*)?"  # no sign, bracket or relation
)
_OPERATION = re.compile(rf"({_DECIMAL}) ?([-+/]|{_TIMES}) ?({_DECIMAL})")
# The s of a word of four letters or more. Fewer letters may be symbols.
_PLURAL = re.compile("(?<=[a-zA-Z]{3})(?<!s)s$")
# "a day" and "every day" are "per day"
EACH_PERIOD = r"(?:an?|each|every)\s(?=(?:second|minute|hour|day|night|week|weekend|month|year|season)\b)"
_PER_CENT = re.compile(r"\bper cent\b")
_PER = re.compile(rf" ?/ ?|(?:^| )(?:per |{EACH_PERIOD})")
_TEMPERATURE = re.compile(r"(?!.$)(?:°|deg(?:rees?)?)? ?(c|f)(?:elsius|ahrenheit)?", re.IGNORECASE)


@functools.lru_cache(maxsize=4096)
def read_number(text: str) -> Number | None:
    """Read the one number that a clean text is: `$1,234.50`, `12 apples`, `-3/4`, `1 1/2`, `1.5e3 km`, `10^6`, `≈12`.

    What follows the digits is the unit, whatever it says, if there is no sign, bracket or relation in it (`2x + 1`).
    Returns None for anything else: no number, an operation (`2*3`, `5!`), words in front, more than NUMBER_CHARACTERS.
    """
    if len(text) > NUMBER_CHARACTERS:
        return None
    match = _NUMBER.fullmatch(_with_slashes(text))
    if not match or (match["sign"] and match["inner_sign"]):
        return None
    value = _value(match)
    if value is None:
        return None
    after_digits = match["unit"] or ""
    after_digits = _PER_CENT.sub("percent", after_digits)
    names = [_unit_name(part) for part in _PER.split(after_digits.strip())]
    unit = _UNIT_NAMES.get(match["currency"], "") + "/".join(names)
    may_be_symbol = len(after_digits) == 1 and after_digits.isalpha() and not match["gap"]  # 5h, 5m
    is_known = all(part.partition("^")[0] in _UNIT_NAMES.values() for part in unit.split("/"))
    is_lowest = value.denominator > 1 and value.denominator == _decimal(match["bottom"] or "1")
    if match["inner_sign"] == "-" or match["sign"] not in ("", "+"):
        value = -value
    return Number(
        value,
        unit,
        has_known_unit=not unit or (is_known and not may_be_symbol),
        is_division=bool(match["top"]) and not is_lowest,
    )


def arithmetic(text: str) -> Fraction | None:
    """Calculate two numbers joined by one of `+ - * /`, or read one number without a unit. None for any other text."""
    match = _OPERATION.fullmatch(_with_slashes(text[:NUMBER_CHARACTERS]))
    if not match:
        number = read_number(text)
        return number.value if number and not number.unit else None
    left = _decimal(match[1])
    right = _decimal(match[3])
    if left is None or right is None or (match[2] == "/" and not right):
        return None
    operations = {
        "+": operator.add,
        "-": operator.sub,
        "/": operator.truediv,
    }
    operation = operations.get(match[2], operator.mul)
    return operation(left, right)


def _with_slashes(text: str) -> str:
    """Write fractions of LaTeX with a slash."""
    if "\\frac" not in text:
        return text
    return " ".join(_FRACTION.sub(r" \1/\3 ", text).split())


def _value(match: re.Match) -> Fraction | None:
    """Return the value of a match of _NUMBER, without its sign. None for a fraction that is not one."""
    if match["whole"]:
        part = int(match["part"])
        parts = int(match["parts"])
        if not 0 < part < parts:
            return None
        return int(match["whole"]) + Fraction(part, parts)
    if match["repeated"]:  # 0.1\overline{6} is 16.6.. - 1.6.., divided by 100 - 10
        places = len(match["once"].partition(".")[2])
        once = int(match["once"].replace(".", ""))
        with_period = int(match["once"].replace(".", "") + match["repeated"])
        return Fraction(with_period - once, 10 ** (places + len(match["repeated"])) - 10**places)
    value = _decimal(match["factor"] or match["top"] or match["decimal"] or "1")
    power = _decimal(f"1e{match['exponent'] or 0}")
    bottom = _decimal(match["bottom"] or "1")
    if value is None or power is None or not bottom:
        return None
    return value * power / bottom


def _decimal(digits: str) -> Fraction | None:
    """Return the exact value of digits. None if their power of ten is too large."""
    digits = re.sub("[, ]", "", digits).lower()
    mantissa, _, exponent = digits.partition("e")
    exponent = int(exponent or "0")
    if abs(exponent) > LARGEST_EXPONENT:
        return None
    return Fraction(mantissa) * Fraction(10) ** exponent


@functools.lru_cache(maxsize=4096)
def _unit_name(text: str) -> str:
    """Return the name in UNITS of a unit. Another word stays as it is, without the s of its plural."""
    degrees = _TEMPERATURE.fullmatch(text)
    if degrees:
        return f"°{degrees[1].upper()}"
    base, caret, power = text.replace(" ^", "^").partition("^")
    power = power.replace(" ", "")  # 3x^2 y
    word = base.lower() if len(base) > 3 else base  # symbols have a case (mg is not Mg), words do not
    singular = _PLURAL.sub("", word)
    name = _UNIT_NAMES.get(word) or _UNIT_NAMES.get(singular) or _PLURAL.sub("", base)
    return name + caret + power
