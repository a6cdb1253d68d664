"""Reading answers: where a completion's final answer is, which number it is, and when two answers are the same.

The standard library, and math-verify only once a LaTeX answer is compared.
"""

import math
import re

# Longest LaTeX answer compared as an expression, and seconds for each parse and comparison: policies do write
# 9^{9^{9^9}} and thousands of open brackets.
LATEX_CHARACTERS = 300
LATEX_SECONDS = 2

# No <answer> inside the content: of "<answer> 1 <answer> 2 </answer>" the answer is 2.
_ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOXED_OR_BRACE = re.compile(r"\\boxed\s*\{|[{}]")


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer in a completion, without surrounding blanks; None if there is none or it is empty.

    answer_tag: content of the last complete <answer>..</answer>. boxed: content of the last \\boxed{} whose braces
    balance. hashes: what follows the last #### on its line. Raises ValueError on another format.
    """
    if answer_format == "answer_tag":
        found = _ANSWER_TAG.findall(text)
        answer = found[-1] if found else ""
    elif answer_format == "boxed":
        answer = _last_boxed(text)
    elif answer_format == "hashes":
        _, hashes, rest = text.rpartition("####")
        answer = rest.partition("\n")[0] if hashes else ""
    else:
        raise ValueError(f"answer_format={answer_format!r} is unknown; use answer_tag, boxed or hashes")
    return answer.strip() or None


def _last_boxed(text: str) -> str:
    # One pass with a stack: a policy that repeats "\boxed{" thousands of times must not cost quadratic time.
    opened, last_start, last = [], -1, ""
    for match in _BOXED_OR_BRACE.finditer(text):
        if match.group() != "}":
            opened.append((match.group() != "{", match.end()))
        elif opened:
            is_boxed, start = opened.pop()
            if is_boxed and start > last_start:
                last_start, last = start, text[start : match.start()]
    return last


# Groups of three behind commas or (thin) spaces, or plain digits; then decimals and a power of ten.
_PLAIN = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
# The whole text must be words, one number or fraction, words. Signs that would change the number's value are allowed
# nowhere: - and / only where they join words (12-inch, km/h), digits behind the number only as a unit's power (m^2).
_ONE_NUMBER = re.compile(
    r"(?P<before>[^\d\-+*/^\\√<>≤≥≠]*?)(?<![a-zA-Z])(?P<sign>[-+]?)(?: ?(?:[$€£¥₹]|EUR|USD|GBP) ?)?"
    rf"(?P<top>{_PLAIN})(?: ?/ ?(?P<bottom>{_PLAIN}))?"
    r"(?P<after>(?:[^\d²³\-+*/^=<>×·!\\√]|-(?=[a-zA-Z]{2})|/(?=[a-zA-Z]{2})|(?<=[a-zA-Z])/|(?<=[a-zA-Z])\^?[23²³])*)"
)
# Words that make it another number: "minus 2" and "2 pi" are not 2, "5 million" is not 5.
_NOT_BEFORE = frozenset(["minus", "negative", "half", "sqrt", "root", "log", "ln", "exp", "sin", "cos", "tan"])
_NOT_UNITS = frozenset(
    ["x", "y", "pi", "π", "sqrt", "half", "dozen", "hundred", "thousand", "million", "billion", "trillion", "k"]
)


def parse_number(text: str) -> float | None:
    """The one number in a text, or None: `$1,234.50`, `12 apples`, `-3/4`, `1.5e3 km`, `1 234`, `x = 7`.

    Currency signs and units are dropped. A percent sign is such a unit: `50%` is 50, never 0.5. None if the text has no
    number, several (`3 or 4`), a formula (`2*3`, `10^6`, `5!`), or one scaled by a word or glyph (`5 million`, `3½`).
    """
    for written, plain in (("−", "-"), ("–", "-"), ("\\$", "$"), ("\\%", "%")):  # typographic minus, LaTeX escapes
        text = text.replace(written, plain)
    text = " ".join(text.split()).strip("*_` ")  # blanks and Markdown
    match = _ONE_NUMBER.fullmatch(text)
    if not match:
        return None
    unit = re.sub(r"(?<=[a-zA-Z])\^?[23²³]", "", match["after"])
    if not (_NOT_BEFORE.isdisjoint(_words(match["before"])) and _NOT_UNITS.isdisjoint(_words(unit))):
        return None
    if any(character.isnumeric() for character in match["before"] + unit):
        return None
    top, bottom = (float(re.sub("[, ]", "", part or "1")) for part in (match["top"], match["bottom"]))
    value = top / bottom if bottom else math.inf
    return (-value if match["sign"] == "-" else value) if math.isfinite(value) else None


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def same_answer(given: str, reference: str, tolerance: float, latex: bool) -> bool:
    """Whether two answers are equal as math_reward defines it, with `latex` also as expressions (main thread only)."""
    given_number, reference_number = parse_number(given), parse_number(reference)
    if given_number is not None and reference_number is not None:
        return abs(given_number - reference_number) <= tolerance * max(1.0, abs(reference_number))
    if _normalised(given) == _normalised(reference):
        return True
    if not latex or len(given) > LATEX_CHARACTERS:
        return False
    import math_verify  # sympy takes a second to load, and only \boxed{} answers need it

    expressions = [math_verify.parse(f"${text}$", parsing_timeout=LATEX_SECONDS) for text in (reference, given)]
    return math_verify.verify(*expressions, timeout_seconds=LATEX_SECONDS)


def _normalised(text: str) -> str:
    return " ".join(text.casefold().split()).strip("*_` ").removesuffix(".")
