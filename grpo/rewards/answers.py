"""Where the answer is in a completion, and when two answers are the same: the rule of docs/answers.md.

numbers.py says which number a text is, latex.py compares expressions. Wherever a careful reader could doubt, two
answers are not the same. The text is read in one pass, so that a megabyte of braces or tags takes no quadratic time.
"""

import contextlib
import re
from fractions import Fraction
from typing import NamedTuple

from grpo.rewards.latex import cpu_limit, same_expression
from grpo.rewards.numbers import EACH_PERIOD, TEXT_COMMAND, arithmetic, clean_text, read_number

# ---------------------------------------------------------------------------------------------------------------------
# Where the answer is

# Tags in any case, with blanks and attributes: thoughts stay thoughts if their <Think > is odd.
_THINK_TAG = re.compile(r"<\s*(?P<close>/\s*)?think\b[^<>]*>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<\s*(?P<close>/\s*)?answer\s*>", re.IGNORECASE)
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9]+(?:[.,/][0-9]+)*))|\\.|[{}]", re.DOTALL)
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
# What begins the last line that is the answer, by the name of the format
_LAST_LINE = {
    "hashes": re.compile(r"(?s:.*)####\s*(.*)"),
    "answer_line": re.compile(
        r"(?s:.*)(?:\A|\n)[ \t*_#>`]*+(?:the )?(?:final )?answer[ *_`]*[:：][ *_`]*\s*(.*)", re.IGNORECASE
    ),
}
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
# Two answers are a choice if only signs and joining words are between them, or an "or" in the same sentence.
_JOINED = re.compile(r"(?:[\s,;$.*&/\\]|\b(?:and|also|maybe|perhaps)\b)*+", re.IGNORECASE)
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_NEXT_SENTENCE = re.compile(r"[.!?\n]")

# Characters that are looked at on each side of a box, and after an answer for words that take it back
_CHARACTERS_BESIDE = 120
_CHARACTERS_AFTER = 400
_UNSEEN = re.compile(
    r"\\(?:left|right|displaystyle|q?quad|begin ?\{[a-z]+\*?\})(?![a-zA-Z])|(?<!\\)(?:\\[()\[\],;: ]|\$)"
    r"|(?<!~)~(?!~)|[*#`]|&(?!\s*-?\d)"
)
# The first half of a mark such as \), whose second half the limit of tokens cut off
_HALF_MARK = re.compile(r"(?<!\\)\\\Z")
_BLANKS = re.compile(r"[^\S\n]+")
_SENTENCE_END = re.compile(r"[.!?]\s+|\n\s*")
_NO = r"\b(?:not?|cannot|never|nobody|impossible|untrue|wrong|incorrect|mistaken)\b|n['’]t\b"
_TAKEN_BACK = re.compile(
    rf"{_NO}|\b(?:wait|mistake|actually|correction|sorry|hmm+)\b"
    r"|\A[\W\d]*\b(?:(?:and|also)\W+)*(?:or|maybe|perhaps)\b|\A[\W\d]*\b(?:(?:and|also)\W+)+\d|\A[\s\\%$€£¥₹¢]*[,;/&|]\W*\d",
    re.IGNORECASE,
)
# Words next to a box that change what is in it
_CHANGING = "or not minus negative plus times twice half double than squared cubed doubled factorial mod dozen hundred"
_CHANGING += " thousand grand million billion trillion mil mln mn bln bn trn lakh crore tenth"
# also millions and hundredths; 万 and the like are parts of words
_WORD = rf"(?<![\\\w'’])(?!(?i:{_CHANGING.replace(' ', '|')})(?:th)?s?\b|[十百千万萬亿億])[^\W\d_]"
_ARROW = r"[-=]>|[→⇒∴]|\\(?:implies|iff|therefore|to|in|(?:[Ll]ong)?[Rr]ightarrow)(?![a-zA-Z])"
# "times" counts how often something happens if one of these is behind it. Otherwise it may be a product.
_OFTEN = rf"[)}}]?(?:\Z|\.(?![0-9]))|[,\n]\s*[a-zA-Z]{{2}}|\n\s*\Z|(?:in|on|per|during)\b|{EACH_PERIOD}"
# A clause that denies what follows: "it cannot be", "nobody says that it is". But not "numbers that are not even are".
_DENIAL = re.compile(
    rf"{_NO}|\b(?:none|nothing|anything|neither|nor|hardly|unlikely|false|mistake|doubt|den(?:y|ies)|rejects?|disagree|fails?)\b",
    re.IGNORECASE,
)
_VERB = r"(?:=|['’]s\b|\b(?:is|are|was|were|has|have|had|gets?|gives?|giving|leaves?|leaving|equals|needs?|makes?)\b)"
_CLAUSE_END = re.compile(
    rf"[.!?]\s|[;\n]|{_ARROW}|\b(?:so|then|thus|hence|therefore)\b|,(?=[^,]*{_VERB}[^,]*\Z)", re.IGNORECASE
)
_THE_ANSWER = re.compile(r"\b(?:that|it|this|answer|result|value|solution)\b|\b[b-z] (?:=|is\b)", re.IGNORECASE)
# Words in front of a box that make another number of it: "half the value", "the square root of", "3 added to"
_OPERATIONS = (
    "half third quarter fourth fifth sixth eighth tenth percent cent negative opposite inverse reciprocal root"
)
_OPERATIONS += (
    " square cube double triple multiple factorial power log logarithm sine cosine tangent absolute complement"
)
_OPERATIONS += " conjugate derivative added subtracted divided multiplied far different differ opposed instead"
_OPERATION = re.compile(
    rf"(?:\b(?:half|twice|double|triple|without|except|unlike)|(?:\b(?:{_OPERATIONS.replace(' ', '|')})s?|[0-9%}}]) "
    r"(?:of|to|from|by))(?: (?:of|the|this|that|our|value|number|result|answer))* ?\Z",
    re.IGNORECASE,
)
# What may be before and after a box without changing it. The sign and the unit belong to the answer.
_BEFORE = re.compile(
    rf"(?:\A|\n|(?<![!<>])=|(?<![0-9]):|(?<![0-9]),\s|[:.;!?]\s|\\\\|(?=≈|\\approx)|{_ARROW}"
    rf"|(?!and\b){_WORD}{{2,}}(?:['’](?:s|re))?)\s*"
    r"(?P<sign>-|≈|\\approx(?![a-zA-Z])|\\\$|[€£¥₹]|)\s*\Z"
)
_AFTER = re.compile(
    r"(?:[ ^{]*(?P<unit>\\?%|\\\$|[€£¥₹¢]|(?:°|\\circ\b)[ }]*[CF]?\b"
    rf"|(?!in\b|{EACH_PERIOD}){_WORD}+(?:/[a-z]+)?\b(?: ?\^ ?\{{?[0-9]\}}?)?))?\s*"
    rf"(?:\Z|\n|[.;:?)}}\"”。](?![0-9])|[,，](?!\s*[0-9])|(?<=\s)!|[—\u2600-\u27bf\U0001f300-\U0001faff]"
    rf"| \([a-zA-Z]{{2}}|<[/|]|\\\\|\\(?:end|tag|qed|(?:black)?square)\b|{_ARROW}|{EACH_PERIOD}|{_WORD}{{2,}}"
    rf"|(?i:times)\b(?=\s?(?:{_OFTEN})))"
)


class Span(NamedTuple):
    """An answer in a text: where its tag or box starts and ends, and what is in it."""

    start: int
    end: int
    content: str


def extract_answer(text: str, answer_format: str) -> str | None:
    """Return the final answer in a completion, without blanks or boxes around it. None if there is none.

    answer_tag: content of the last <answer>..</answer>. boxed: content of the last \\boxed{} that is not empty, with
    the sign or unit next to it. hashes: the line after the last ####. answer_line: the rest of the last line that
    begins with `Answer:`. Boxes and lines are looked for only in the <answer> if there is one, and never in thoughts
    (see `without_thoughts`). There is no answer if the last one is empty, cut off, taken back, one of a choice, or part
    of a larger expression: docs/answers.md has examples.

    Raises ValueError on another format.

    >>> extract_answer("7, no: <answer>8</answer>", "answer_tag"), extract_answer("It is 8.", "boxed")
    ('8', None)
    """
    formats = ("answer_tag", "boxed", *_LAST_LINE)
    if answer_format not in formats:
        raise ValueError(f"answer_format={answer_format!r} is unknown; use one of {', '.join(formats)}")
    text = without_thoughts(text)
    tags = _answer_tags(text)
    if tags:
        text = _last_of(tags, text)
    boxes = _boxes(text)
    answer = ""
    if answer_format in _LAST_LINE:
        line = _LAST_LINE[answer_format].match(text)
        if line:
            start, end = line.span(1)
            answer = _last_of([Span(start, end, line[1])], text)
            boxes = _boxes(answer)
            if boxes:
                answer = _in_boxes(boxes, answer, may_differ=False)
    elif boxes and (tags or answer_format == "boxed"):
        answer = _in_boxes(boxes, text, may_differ=not tags)
    elif answer_format == "answer_tag" and tags:
        answer = _EMPTY_BOX.sub("", text)
    return answer.strip() or None


def _in_boxes(boxes: list[Span], text: str, *, may_differ: bool) -> str:
    """Return the answer in the boxes of a text: the last one with its neighbours. Empty if there is none.

    may_differ: earlier boxes may hold something else than the last one.
    """
    contents = {box.content.strip() for box in boxes}
    if len(contents) > 1 and not may_differ:
        return ""
    return _with_neighbours(boxes, text) if _last_of(boxes, text) else ""


def last_box(text: str) -> str:
    """Return the content of the last box in a reference, whatever is around it. Empty without a box.

    Boxes that only signs and joining words separate are one list: `1, 2` for `\\boxed{1} and \\boxed{2}`.
    """
    boxes = _boxes(text)
    joined = boxes[-1:]
    for box in reversed(boxes[:-1]):
        if not _JOINED.fullmatch(text[box.end : joined[0].start]):
            break
        joined.insert(0, box)
    contents = [_unboxed(box.content).strip() for box in joined]
    return ", ".join(dict.fromkeys(contents))


def without_thoughts(text: str) -> str:
    """Return the text without its thoughts: all between the first <think> and the last </think>.

    A <think> that never ends hides all that follows. A </think> without a beginning hides all before it, because chat
    templates can open <think> in the prompt.
    """
    tags = list(_THINK_TAG.finditer(text))
    if not tags:
        return text
    closing = [tag for tag in tags if tag["close"]]
    start = 0
    end = 0
    if closing:
        end = closing[-1].end()
        if not tags[0]["close"]:
            start = tags[0].start()
    unclosed = [tag.start() for tag in tags if tag.start() >= end]
    cut = min(unclosed, default=len(text))
    return text[:start] + text[end:cut]


def _answer_tags(text: str) -> list[Span]:
    """Find all <answer>..</answer> in order. One that is cut off comes last and has no content."""
    spans = []
    opened = None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag["close"]:
            opened = tag
        elif opened:
            content = text[opened.end() : tag.start()]
            spans.append(Span(opened.start(), tag.end(), content))
            opened = None
    if opened:
        spans.append(Span(opened.start(), len(text), ""))
    return spans


def _boxes(text: str) -> list[Span]:
    """Find the outermost boxes that are not empty, in order. One that is cut off comes last and has no content."""
    closed = []  # start, start and end of the content, end
    opened = []  # whether it is a box, start, start of the content
    first = _BOX_COMMAND.search(text)  # braces before the first box do not matter
    if not first:
        return []
    for match in _BOX_OR_BRACE.finditer(text, len(text[: first.start()].rstrip("\\"))):
        token = match[0]
        if match["bare"]:
            inside, close = match.span("bare")
            closed.append((match.start(), inside, close, match.end()))
        elif token.endswith("{") and token != "\\{":
            opened.append((token != "{", match.start(), match.end()))
        elif token == "}" and opened:
            is_box, start, inside = opened.pop()
            if is_box:
                while closed and closed[-1][0] > start:  # a box inside of this one
                    closed.pop()
                closed.append((start, inside, match.start(), match.end()))
    spans = []
    for start, inside, close, end in closed:
        content = text[inside:close]
        if content.strip():
            spans.append(Span(start, end, content))
    for is_box, start, _ in opened:
        if is_box:
            return [*spans, Span(start, len(text), "")]
    return spans


def _last_of(spans: list[Span], text: str) -> str:
    """Return the content of the last answer. Empty if it is one of a choice, or taken back within two sentences."""
    last = spans[-1]
    if len(spans) > 1:
        earlier = spans[-2]
        differs = earlier.content.strip() not in ("", last.content.strip())
        if differs and _is_choice(text[earlier.end : last.start]):
            return ""
    after = _seen(text[last.end : last.end + _CHARACTERS_AFTER])
    sentences = _SENTENCE_END.split(after, 2)
    if any(map(_TAKEN_BACK.search, sentences[:2])):
        return ""
    return last.content


def _is_choice(between: str) -> bool:
    """Decide whether the text between two answers makes them a choice."""
    if _JOINED.fullmatch(between):
        return True
    return _OR.search(between) is not None and not _NEXT_SENTENCE.search(between)


def _with_neighbours(boxes: list[Span], text: str) -> str:
    """Return the content of the last box with the sign and unit next to it. Empty if anything else may change it."""
    box = boxes[-1]
    end_of_earlier = boxes[-2].end if len(boxes) > 1 else 0
    floor = max(end_of_earlier, box.start - _CHARACTERS_BESIDE)
    ceiling = box.end + _CHARACTERS_BESIDE
    # an ellipsis where the text goes on: blanks up to there do not begin or end it
    text_before = text[floor : box.start]
    if floor > end_of_earlier:
        text_before = f"…{text_before}"
    text_after = text[box.end : ceiling]
    if ceiling < len(text):
        text_after = f"{text_after}…"
    else:
        text_after = _HALF_MARK.sub("", text_after)
    text_before = _seen(text_before)
    text_after = _seen(text_after)
    if "|" in text_before.rpartition("\n")[2]:  # a table's cells are lines
        text_before = text_before.replace(" | ", "\n")
        text_after = text_after.replace(" |", "\n", 1)
    before = _BEFORE.search(text_before[-24:])  # the last word, or its end
    after = _AFTER.match(text_after)
    if not before or not after or _OPERATION.search(text_before) or _denies(text_before):
        return ""
    unit = after["unit"] or ""
    answer = before["sign"] + _unboxed(box.content)
    if _is_amount(f"{answer} {unit}"):
        return f"{answer} {unit}"
    if len(unit) == 1 or re.match(r"\w/|\w+\^", unit):  # a letter is a factor, and so is a power
        return ""
    # a sign belongs to a number, and a currency has no other unit behind it
    if before["sign"] and (_is_amount(f"1 {unit}") or not _is_amount(answer)):
        return ""
    return answer  # a word is prose


def _denies(text: str) -> bool:
    """Decide whether the last clause of a text, as far as it goes, denies what comes next."""
    clause = _CLAUSE_END.split(text)[-1]
    denied = _DENIAL.split(clause)
    if len(denied) == 1:
        return False
    return not re.search(_VERB, denied[-1]) or bool(_THE_ANSWER.search(denied[-1]))


def _is_amount(text: str) -> bool:
    """Return whether the text is one number, bare or with a unit of UNITS."""
    number = read_number(clean_text(text))
    return number is not None and number.has_known_unit


def _seen(text: str) -> str:
    """Return the text next to an answer without marks of formulas, Markdown, spacing and text; blanks once."""
    text = _EMPTY_BOX.sub("", text)
    text = _UNSEEN.sub(" ", text)
    text = TEXT_COMMAND.sub(r" \1 ", text)
    return _BLANKS.sub(" ", text)


def _unboxed(content: str) -> str:
    """Return the content of a box without the boxes inside of it."""
    content = _BOX_COMMAND.sub("", _EMPTY_BOX.sub("", content)).strip()
    if content.startswith("{") and content.endswith("}"):
        return content[1:-1]
    return content


# ---------------------------------------------------------------------------------------------------------------------
# When two answers are the same

# Longer answers are equal only if their words are: nothing below has to be fast for a text of any length.
ANSWER_CHARACTERS = 1000

# x, x_1, f(x), \theta, (x, y). Two letters may be a product.
_NAME = re.compile(r"(?:(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\w|_\{\w{1,8}\})? ?(?:\([a-zA-Z]\))?)?|\(x, ?y(?:, ?z)?\)")
# What one side alone may have in front of an interval or a set: x \in
_ELEMENT = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+) ?\\in ?(?=[\[({]|\\[{l(])")
_SET = re.compile(r"\\\{((?:(?!\\[{}]).)*)\\\}")
_POINT = re.compile(r"\([^()]*,[^()]*\)")
_RELATION = re.compile(r"[<>]|\\(?:[lg]e|ne|in)(?![a-zA-Z])")
_AND = re.compile(r",? and (?=\S)")
_OR_BETWEEN = re.compile(r",? or (?=\S)")
_ABOUT = re.compile(r"\A(?:≈|~|\\approx)(?= ?[0-9.])")
_EQUALS = re.compile(r" ?= ?|(?<=[^ ]) ?(?=≈|\\approx)")
# Blanks that say nothing: around signs, after a factor (5 x), and between a command and digits (\ne 5)
_IDLE_BLANK = re.compile(r" ?(\\[a-zA-Z]+) (?=[0-9])| ?([^\w\s]) ?|(?<=[0-9]) (?=[a-zA-Z])")
# Words whose case does not count: in a tag all except LaTeX's commands. In a box only "no" and words of three letters
# or more, because other letters are symbols.
_CASELESS_IN_TAG = re.compile(r"(?<![\\a-zA-Z])[^\W\d_]+")
_CASELESS_IN_BOX = re.compile(r"(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|(?i:no))(?![^\W\d_])")


def same_answer(answer: str, reference: str, tolerance: float, latex: bool) -> bool:
    """Decide whether two answers are the same; with `latex` also as expressions, in the process's main thread only.

    Raises OutOfTime if comparing expressions takes too long.
    """
    if max(len(answer), len(reference)) > ANSWER_CHARACTERS:
        return answer.split() == reference.split()
    answer = _with_commas(clean_text(answer))
    reference = _with_commas(clean_text(reference))
    are_numbers = read_number(answer) and read_number(reference)
    with cpu_limit() if latex and not are_numbers else contextlib.nullcontext():
        return _same(answer, reference, tolerance, latex)


def _same(answer: str, reference: str, tolerance: float, latex: bool) -> bool:
    """Compare two clean answers, or two lists of them item by item."""
    if not answer or not reference:
        return False
    if (_ELEMENT.match(answer) is None) != (_ELEMENT.match(reference) is None):
        answer = _ELEMENT.sub("", answer, count=1)
        reference = _ELEMENT.sub("", reference, count=1)
    name, answer_value = _split_name(answer)
    reference_name, reference_value = _split_name(reference)
    if name == reference_name or "=" not in answer or "=" not in reference:
        answer = answer_value
        reference = reference_value
    number = read_number(answer)
    expected = read_number(reference)
    if number and expected:
        missing = not number.unit or not expected.unit
        if number.unit != expected.unit and not (missing and number.has_known_unit and expected.has_known_unit):
            are_symbols = latex and not number.has_known_unit and not expected.has_known_unit  # 3y x^2
            return are_symbols and same_expression(answer, reference, tolerance)
        if number.is_division and not expected.is_division:
            return False
        if number.value.denominator == expected.value.denominator == 1:
            return number.value == expected.value
        # the tolerance as it is written: a millionth, and not the float next to it
        distance = abs(number.value - expected.value)
        return distance <= Fraction(str(tolerance)) * abs(expected.value)
    if expected and expected.has_known_unit:
        return False
    if _comparable(answer, latex) == _comparable(reference, latex):
        return not number  # 1,234 is one number, and 1, 234 a list of two
    items = _items(answer)
    expected_items = _items(reference)
    if len(items) > 1 or len(expected_items) > 1:
        return _same_items(items, expected_items, tolerance, latex, is_set=_SET.fullmatch(reference) is not None)
    return latex and same_expression(_ABOUT.sub("", answer), reference, tolerance)


def _with_commas(text: str) -> str:
    """Write a list of clean text with commas: `1, 2, and 3`, and `x = 1 or x = 2`, which has one name."""
    if _RELATION.search(text):  # x < 1 and x > 3
        return text
    text = _AND.sub(", ", text)
    alternatives = _OR_BETWEEN.split(text)
    names = set(map(_name_of, alternatives))
    return ", ".join(alternatives) if len(names) == 1 and "" not in names else text


def _items(text: str) -> list[str]:
    """Split a list without brackets, or a set, at its commas and semicolons: `x=1`, `(2, 3)` for `x=1, (2, 3)`."""
    inside = _SET.fullmatch(text)
    depth = 0
    items = [""]
    for character in inside[1] if inside else text:
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return [item.strip() for item in items]


def _same_items(
    items: list[str],
    expected_items: list[str],
    tolerance: float,
    latex: bool,
    is_set: bool,
) -> bool:
    """Compare two lists. Their order counts, except in a set, among points, and among equations such as x=1, y=2."""
    if len(items) != len(expected_items):
        return False
    names = set(map(_name_of, expected_items))
    if len(names) > 1 and names != set(map(_name_of, items)):
        return False
    are_points = all(_POINT.fullmatch(item) for item in expected_items)
    has_order = not is_set and not are_points and "" in names
    items = list(items)
    for expected in expected_items:
        partners = items[:1] if has_order else items
        partner = next((item for item in partners if _same(item, expected, tolerance, latex)), None)
        if partner is None:
            return False
        items.remove(partner)
    return True


def parse_number(text: str) -> int | Fraction | None:
    """Return the value of the one number that an answer is, without its unit and `x =`. None if it is not a number."""
    _, value = _split_name(clean_text(text[:ANSWER_CHARACTERS]))
    number = read_number(value)
    return number.value if number and number.has_known_unit else None


def _split_name(text: str) -> tuple[str, str]:
    """Return the name in front of `=` and what follows: `x` and `7` for `x = 7`, and for `x = 3+4 = 7`, which is true.

    The name is empty if there is none, and for anything else all of the text follows.
    """
    name, *sides = _EQUALS.split(text)
    if not _NAME.fullmatch(name):
        sides.insert(0, name)
        name = ""
    if not sides:
        return name, text
    *work, last = sides
    if work:
        number = read_number(last)
        if not number or any(arithmetic(side) != number.value for side in work):
            return "", text
    return name, last


def _name_of(equation: str) -> str:
    """Return x for `x = 7`. Empty without a name on the left, or without anything on the right."""
    name, value = _split_name(equation)
    return name if value != equation else ""


def _comparable(text: str, latex: bool) -> str:
    """Return the text that is compared: without blanks that say nothing, and without the case of words."""
    caseless = _CASELESS_IN_BOX if latex else _CASELESS_IN_TAG
    text = _IDLE_BLANK.sub(r"\1\2", text)
    return caseless.sub(lambda match: match[0].casefold(), text)
