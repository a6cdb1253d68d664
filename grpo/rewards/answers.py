"""Where the answer stands in a completion, and when two answers are the same, in three sentences.

Two answers are the same if their texts agree after a clean-up: LaTeX's marks of text and spacing, Markdown, parentheses
around the whole, case, blanks around signs, a final period, and "x =" if only one side has it. Or if each is one number
written out (digits, decimals, a fraction, a power of ten) of the same exact value, or within `tolerance` where one of
them is no integer, and with the same unit, of which a common one (UNITS in numbers.py) may be missing on one side. Or,
as LaTeX, if math-verify takes two expressions as equal whose words, functions and brackets agree; but a reference that
is a number is equal to numbers only, never to an operation that is left to do.

Which number a text is stands in numbers.py, what an expression is in latex.py. Wherever a careful reader could doubt,
the answer is not the same. Reading takes one pass: a text that repeats "<answer>" takes no quadratic time.
"""

import functools
import re
from fractions import Fraction

from grpo.rewards.latex import same_expression
from grpo.rewards.numbers import clean_text, read_number

# ---------------------------------------------------------------------------------------------------------------------
# Where the answer stands

# Tags in any case, with blanks and attributes: thoughts stay thoughts if their <Think > is odd.
_THINK_TAG = re.compile(r"<\s*(?P<close>/\s*)?think\b[^<>]*>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<\s*(?P<close>/\s*)?answer\s*>", re.IGNORECASE)
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# Between two answers that leave it to the reader which one is meant.
_JOINED = re.compile(r"[\s,;$.*]*+(?:and|or|or maybe|or perhaps|/)?[\s,;$.*]*+", re.IGNORECASE)

Span = tuple[int, int, str]  # start, end, content


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer in a completion, without surrounding blanks and boxes; None if there is none or it is empty.

    Thoughts are no answer (see `without_thoughts`). answer_tag: content of the last complete <answer>..</answer>.
    boxed: content of the last \\boxed{} that is not empty and whose braces balance. hashes: what follows the last ####
    on its line. Where the completion has an <answer>, box and hashes are looked for only in it. None also for a choice,
    which is no answer: two different ones with nothing but "and", "or" or a comma between, or different boxes in a tag.

    Raises ValueError on another format.
    """
    if answer_format not in ("answer_tag", "boxed", "hashes"):
        raise ValueError(f"answer_format={answer_format!r} is unknown; use answer_tag, boxed or hashes")
    text = without_thoughts(text)
    tagged = _tagged(text)
    if answer_format == "hashes":
        _, hashes, rest = (text if tagged is None else tagged).rpartition("####")
        answer = rest.partition("\n")[0] if hashes else ""
    elif answer_format == "boxed" and tagged is None:
        answer = _unbox_inner(_last(text, _boxes(text)))
    else:
        answer = _unboxed(tagged) if tagged and (answer_format == "answer_tag" or _boxes(tagged)) else ""
    return answer.strip() or None


def without_thoughts(text: str) -> str:
    """The text without its thoughts: what stands between the first <think> and the last </think>.

    A block that never ends hides all that follows; a closing tag without an opening one (chat templates open <think> in
    the prompt) hides all before it.
    """
    tags = list(_THINK_TAG.finditer(text)) if "<" in text else []
    closing = [number for number, tag in enumerate(tags) if tag["close"]]
    shown, start = "", 0
    if closing:
        shown = "" if tags[0]["close"] else text[: tags[0].start()]
        start, tags = tags[closing[-1]].end(), tags[closing[-1] + 1 :]
    return shown + (text[start : tags[0].start()] if tags else text[start:])


def _tagged(text: str) -> str | None:
    """The content of the last complete <answer>..</answer>, "" if it is one of a choice; None without one.

    Of "<answer> 1 <answer> 2 </answer>" the answer is 2.
    """
    found, opened = [], None
    for tag in _ANSWER_TAG.finditer(text) if "<" in text else ():
        if not tag["close"]:
            opened = tag
        elif opened:
            found.append((opened.start(), tag.end(), text[opened.end() : tag.start()]))
            opened = None
    return _last(text, found) if found else None


def _boxes(text: str) -> list[Span]:
    """The outermost \\boxed{..} and \\fbox{..} that close and are not empty, in order."""
    found: list[Span] = []
    opened: list[tuple[bool, int, int]] = []
    for match in _BOX_OR_BRACE.finditer(text) if "box" in text else ():
        token = match[0]
        if token.endswith("{") and token != "\\{":
            opened.append((token != "{", match.start(), match.end()))
        elif token == "}" and opened:
            is_box, start, inside = opened.pop()
            content = text[inside : match.start()]
            if is_box and content.strip():
                while found and found[-1][0] > start:
                    found.pop()
                found.append((start, match.end(), content))
    return found


def _last(text: str, found: list[Span]) -> str:
    """The last of several answers; "" if the one before is another and only joined to it."""
    if len(found) > 1:
        (_, end, before), (start, _, last) = found[-2:]
        if before.strip() not in ("", last.strip()) and _JOINED.fullmatch(text, end, start):
            return ""
    return found[-1][2] if found else ""


def _unboxed(text: str) -> str:
    """An answer's text with its box taken off: one box in some words is the answer, different boxes are none."""
    found = _boxes(text)
    if not found:
        return _EMPTY_BOX.sub("", text)
    return _unbox_inner(found[-1][2]) if len({content.strip() for _, _, content in found}) == 1 else ""


def _unbox_inner(content: str) -> str:
    """Content of a box without boxes that stand inside it."""
    content = _BOX_COMMAND.sub("", _EMPTY_BOX.sub("", content)).strip()
    return content[1:-1] if content[:1] == "{" and content[-1:] == "}" else content


# ---------------------------------------------------------------------------------------------------------------------
# When two are the same

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
