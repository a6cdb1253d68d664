"""Where the answer stands in a completion, and when two answers are the same: the rule of configs/ANSWERS.md.

Which number a text is stands in numbers.py, what an expression is in latex.py. Wherever a careful reader could doubt,
the answer is not the same. Reading takes one pass: nothing but braces or tags takes no quadratic time.
"""

import re
from fractions import Fraction

from grpo.rewards.latex import same_expression
from grpo.rewards.numbers import TEXT_COMMAND, arithmetic, clean_text, read_number

# ---------------------------------------------------------------------------------------------------------------------
# Where the answer stands

# Tags in any case, with blanks and attributes: thoughts stay thoughts if their <Think > is odd.
_THINK_TAG = re.compile(r"<\s*(?P<close>/\s*)?think\b[^<>]*>", re.IGNORECASE)
_ANSWER_TAG = re.compile(r"<\s*(?P<close>/\s*)?answer\s*>", re.IGNORECASE)
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?P<bare>-?[0-9]+(?:[.,/][0-9]+)*))|\\.|[{}]", re.DOTALL)
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{\s*\}")
_LINE = re.compile(r"(?s:.*)####\s*(.*)")  # the last one
_BOX_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
# Between two answers that are a choice: joining signs and words alone, or "or" in the same sentence.
_JOINED = re.compile(r"(?:[\s,;$.*&/\\]|\b(?:and|also|maybe|perhaps)\b)*+", re.IGNORECASE)
_OR = re.compile(r"\bor\b", re.IGNORECASE)
_NEXT_SENTENCE = re.compile(r"[.!?\n]")

# So many characters are looked at on each side of a box, and behind an answer for what takes it back.
_BESIDE_CHARACTERS, _BEHIND_CHARACTERS = 120, 400
_UNSEEN = re.compile(
    r"\\(?:left|right|displaystyle|q?quad|begin ?\{[a-z]+\*?\})(?![a-zA-Z])|(?<!\\)(?:\\[()\[\],;: ]|\$)"
    r"|(?<!~)~(?!~)|[*#`]|&(?!\s*-?\d)"
)
_SENTENCE_END = re.compile(r"[.!?]\s+|\n\s*")
_TAKEN_BACK = re.compile(
    r"\b(?:not?|wait|wrong|incorrect|mistaken?|actually|correction|sorry|hmm+)\b|n['’]t\b"
    r"|\A[\W\d]*\b(?:(?:and|also)\W+)*(?:or|maybe|perhaps)\b|\A[\W\d]*\b(?:(?:and|also)\W+)+\d|\A\s*\\?[,;/&]\W*\d",
    re.IGNORECASE,
)
# Words beside a box that change what is in it.
_CHANGING = "or not minus negative plus times twice half double than squared cubed doubled factorial mod dozen hundred"
_CHANGING += " thousand grand million billion trillion mln bln trn lakh crore"
_WORD = rf"(?<![\\\w'’])(?!(?i:{_CHANGING.replace(' ', '|')})\b)[^\W\d_]"
_ARROW = r"[-=]>|[→⇒∴]|\\(?:implies|iff|therefore|to|in|(?:[Ll]ong)?[Rr]ightarrow)(?![a-zA-Z])"
# What may stand before and behind a box without being part of it, and the sign and the unit that are.
_BEFORE = re.compile(
    rf"(?:\A|\n|(?<![!<>])=|(?<![0-9]):|(?<![0-9]),\s|[:.;!?]\s|\\\\|(?=≈|\\approx)|{_ARROW}|(?!and\b){_WORD}{{2,}})\s*"
    r"(?P<sign>-|≈|\\approx(?![a-zA-Z])|\\\$|)\s*\Z"
)
_BEHIND = re.compile(
    rf"(?:[ ^{{]*(?P<unit>\\?%|(?:°|\\circ\b)[ }}]*[CF]?\b|(?!in\b){_WORD}+(?:/[a-z]+)?\b(?:\^\{{?[0-9]\}}?)?))?\s*"
    rf"(?:\Z|\n|[.;:?)}}\"”。](?![0-9])|[,，](?!\s*[0-9])|(?<=\s)!|[—\u2600-\u27bf\U0001f300-\U0001faff]"
    rf"| \([a-zA-Z]{{2}}|<[/|]|\\\\|\\(?:end|tag|qed|(?:black)?square)\b|{_ARROW}|{_WORD}{{2,}})"
)

Span = tuple[int, int, str]  # start, end, content


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer in a completion, without surrounding blanks and boxes; None if there is none or it is empty.

    Thoughts are no answer (see `without_thoughts`). answer_tag: content of the last <answer>..</answer>. boxed: content
    of the last \\boxed{} that is not empty, with a sign or unit beside it. hashes: the line behind the last ####. Where
    the completion has an <answer>, box and hashes are looked for only in it. None also for an answer that is cut off,
    taken back, one of a choice, or part of a larger expression: configs/ANSWERS.md has examples of each.

    Raises ValueError on another format.
    """
    if answer_format not in ("answer_tag", "boxed", "hashes"):
        raise ValueError(f"answer_format={answer_format!r} is unknown; use answer_tag, boxed or hashes")
    text = without_thoughts(text)
    if tags := _tags(text):
        text = _last(text, tags)
    boxes = _boxes(text)
    if answer_format == "hashes":
        line = _LINE.match(text)
        answer = _last(text, [(*line.span(1), line[1])]) if line else ""
    elif boxes and (tags or answer_format == "boxed"):
        several = bool(tags) and len({content.strip() for _, _, content in boxes}) > 1
        answer = "" if several or not _last(text, boxes) else _with_neighbours(text, boxes)
    else:
        answer = _EMPTY_BOX.sub("", text) if tags and answer_format == "answer_tag" else ""
    return answer.strip() or None


def last_box(text: str) -> str:
    """The content of the last box in a reference, whatever stands around it; "" without one."""
    boxes = _boxes(text)
    return _unboxed(boxes[-1][2]).strip() if boxes else ""


def without_thoughts(text: str) -> str:
    """The text without its thoughts: what stands between the first <think> and the last </think>.

    A block that never ends hides all that follows; a closing tag without an opening one (chat templates open <think> in
    the prompt) hides all before it.
    """
    tags = list(_THINK_TAG.finditer(text)) if "<" in text else []
    if not tags:
        return text
    closing = [tag for tag in tags if tag["close"]]
    start = tags[0].start() if closing and not tags[0]["close"] else 0
    end = closing[-1].end() if closing else 0
    opened = next((tag.start() for tag in tags if tag.start() >= end), len(text))
    return text[:start] + text[end:opened]


def _tags(text: str) -> list[Span]:
    """All <answer>..</answer>, in order; one that is cut off comes last and has no content."""
    found, opened = [], None
    for tag in _ANSWER_TAG.finditer(text) if "<" in text else ():
        if not tag["close"]:
            opened = tag
        elif opened:
            found.append((opened.start(), tag.end(), text[opened.end() : tag.start()]))
            opened = None
    return [*found, (opened.start(), len(text), "")] if opened else found


def _boxes(text: str) -> list[Span]:
    """The outermost boxes that are not empty, in order; one that is cut off comes last and has no content."""
    closed: list[tuple[int, int, int, int]] = []  # start, start and end of the content, end
    opened: list[tuple[bool, int, int]] = []
    for match in _BOX_OR_BRACE.finditer(text) if "box" in text else ():
        token = match[0]
        if match["bare"]:
            closed.append((match.start(), *match.span("bare"), match.end()))
        elif token.endswith("{") and token != "\\{":
            opened.append((token != "{", match.start(), match.end()))
        elif token == "}" and opened:
            is_box, start, inside = opened.pop()
            if is_box:
                while closed and closed[-1][0] > start:
                    closed.pop()
                closed.append((start, inside, match.start(), match.end()))
    found = [(start, end, text[inside:close]) for start, inside, close, end in closed]
    cut = [(start, len(text), "") for is_box, start, _ in opened if is_box]
    return [span for span in found if span[2].strip()] + cut[:1]


def _last(text: str, found: list[Span]) -> str:
    """The last of several answers; "" if it is one of a choice, or taken back in its sentence or the next."""
    if len(found) > 1:
        (_, end, before), (start, _, last) = found[-2:]
        if before.strip() not in ("", last.strip()) and _is_choice(text[end:start]):
            return ""
    _, end, content = found[-1]
    sentences = _SENTENCE_END.split(_beside(text[end : end + _BEHIND_CHARACTERS]), 2)[:2]
    return "" if any(map(_TAKEN_BACK.search, sentences)) else content


def _is_choice(between: str) -> bool:
    """Whether what stands between two answers makes a choice of them."""
    return bool(_JOINED.fullmatch(between) or (_OR.search(between) and not _NEXT_SENTENCE.search(between)))


def _with_neighbours(text: str, boxes: list[Span]) -> str:
    """The content of the last box with the sign and the unit beside it; "" if anything else beside it may change it."""
    start, end, content = boxes[-1]
    floor = max(start - _BESIDE_CHARACTERS, boxes[-2][1] if len(boxes) > 1 else 0)
    before = _BEFORE.search(_beside(text[floor:start])[-24:])  # the last word, or its end
    behind = _BEHIND.match(_beside(text[end : end + _BESIDE_CHARACTERS]))
    if not before or not behind:
        return ""
    sign, unit = before["sign"], behind["unit"] or ""
    answer = sign + _unboxed(content)
    number = read_number(clean_text(f"{answer} {unit}"))
    if number and number.has_known_unit:
        return f"{answer} {unit}"
    return "" if sign or len(unit) == 1 else answer  # a word behind it is prose, a letter is a factor


def _beside(text: str) -> str:
    """What stands beside an answer, without marks of formulas, Markdown, spacing and text."""
    return TEXT_COMMAND.sub(r" \1 ", _UNSEEN.sub(" ", _EMPTY_BOX.sub("", text)))


def _unboxed(content: str) -> str:
    """Content of a box without boxes that stand inside it."""
    content = _BOX_COMMAND.sub("", _EMPTY_BOX.sub("", content)).strip()
    return content[1:-1] if content[:1] == "{" and content[-1:] == "}" else content


# ---------------------------------------------------------------------------------------------------------------------
# When two are the same

# Longer answers are equal only as they stand: nothing below has to be fast for a text of any length.
ANSWER_CHARACTERS = 1000

# x, x_1, f(x), \theta. Two letters may be a product.
_NAME = re.compile(r"(?:(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\w|_\{\w{1,8}\})? ?(?:\([a-zA-Z]\))?)?")
_EQUALS = re.compile(r" ?= ?|(?<=[^ ]) ?(?=≈|\\approx)")
# Blanks around signs, and behind a factor: 5 x.
_IDLE_BLANK = re.compile(r" ?([^\w\s]) ?|(?<=[0-9]) (?=[a-zA-Z])")
# What has no case: any word but LaTeX's commands; in a box only longer words and "no", since other letters are symbols.
_CASELESS = {
    False: re.compile(r"(?<![\\a-zA-Z])[^\W\d_]+"),
    True: re.compile(r"(?<![\\a-zA-Z])(?:[^\W\d_]{3,}|(?i:no))(?![^\W\d_])"),
}


def same_answer(given: str, reference: str, tolerance: float, latex: bool) -> bool:
    """Whether two answers are the same, with `latex` also as expressions (in the process's main thread only).

    Raises OutOfTime if expressions take too long.
    """
    if max(len(given), len(reference)) > ANSWER_CHARACTERS:
        return given.split() == reference.split()
    given, reference = clean_text(given), clean_text(reference)
    if not given or not reference:
        return False
    (name, given_end), (other, reference_end) = _last_side(given), _last_side(reference)
    if name == other or "=" not in given or "=" not in reference:
        given, reference = given_end, reference_end
    found, expected = read_number(given), read_number(reference)
    if found and expected:
        missing = not found.unit or not expected.unit
        if found.unit != expected.unit and not (missing and found.has_known_unit and expected.has_known_unit):
            symbols = latex and not (found.has_known_unit or expected.has_known_unit)  # 3y x^2
            return symbols and same_expression(given, reference, tolerance)
        if found.is_division and not expected.is_division:
            return False
        integers = found.value.denominator == expected.value.denominator == 1
        exact = integers or found.is_rounded or expected.is_rounded
        # the tolerance as it is written: a millionth, and not the float next to it
        return abs(found.value - expected.value) <= (0 if exact else Fraction(str(tolerance)) * abs(expected.value))
    if expected and expected.has_known_unit:
        return False
    if _text(given, latex) == _text(reference, latex):
        return True
    return latex and same_expression(given, reference, tolerance)


def parse_number(text: str) -> int | Fraction | None:
    """The value of the one number that an answer is, without its unit and "x ="; None if it is none."""
    number = read_number(_last_side(clean_text(text[:ANSWER_CHARACTERS]))[1])
    return number.value if number and number.has_known_unit else None


def _last_side(text: str) -> tuple[str, str]:
    """The name before `=` and what is behind it: (`x`, `7`) of `x = 7` and `x = 3+4 = 7`; (``, the text) if not so."""
    name, *work = _EQUALS.split(text)
    if not _NAME.fullmatch(name):
        name, work = "", [name, *work]
    last = work.pop() if work else text
    number = read_number(last) if work else None
    return (name, last) if all(number and arithmetic(side) == number.value for side in work) else ("", text)


def _text(text: str, latex: bool) -> str:
    """What is compared as text: without blanks that say nothing, and without the case of words."""
    return _CASELESS[latex].sub(lambda match: match[0].casefold(), _IDLE_BLANK.sub(r"\1", text))
